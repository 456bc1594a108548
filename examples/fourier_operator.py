"""Trains a Fourier neural operator to solve Burgers' equation, on fields sharded over a mesh of MPI ranks.

    mpiexec -n 4 python examples/fourier_operator.py                      # 2-D, half a minute on 2 cores
    mpiexec -n 4 python examples/fourier_operator.py --ndim 3 --grid 32   # 3-D
    mpiexec -n 4 python examples/fourier_operator.py --verify --dtype float64   # the same as in one process?

The operator maps a random field to what it becomes some time later. Each rank holds one block of every field.
The network, the solver that makes the data, and the loss are those of one process (fno.py, which does not mention
mpishard): their Fourier transforms swap the sharded dims with others by all-to-all exchanges.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from statistics import median

# ranks share the cores of a node; before torch starts its threads
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from fno import FNO, burgers, loss_of, smooth
from torch import Tensor, nn
from tqdm import tqdm

import mpishard as ms

TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
VERIFIED_STEPS = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs="+", default=(-1, -1), help="extents, e.g. 2 2; -1: inferred")
    parser.add_argument("--ndim", type=int, choices=(2, 3), default=2, help="dims of the fields")
    parser.add_argument("--grid", type=int, default=64, help="cells along each dim")
    parser.add_argument("--samples", type=int, default=16, help="fields to learn from, and as many to test with")
    parser.add_argument("--steps", type=int, default=80, help="training steps")
    parser.add_argument("--width", type=int, default=12, help="channels of the network")
    parser.add_argument("--modes", type=int, default=8, help="modes that it keeps along each dim, of either sign")
    parser.add_argument("--layers", type=int, default=3, help="its spectral layers")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify", action="store_true", help="also run a few steps in one process and compare")
    args = parser.parse_args()
    if len(args.mesh) > args.ndim:
        parser.error(f"--mesh: a field has {args.ndim} dims to shard")
    if args.grid < 2 * args.modes:
        parser.error(f"--modes: {args.modes} of either sign need a --grid of {2 * args.modes}")
    return args


def main() -> int:
    args = arguments()
    torch.set_default_dtype(getattr(torch, args.dtype))
    mesh = ms.init_mesh(args.mesh, ("x", "y", "z")[: len(args.mesh)])
    torch.manual_seed(args.seed)
    # mesh dim 0 shards the grid's dim 0, and so on; the numbers are the same on every mesh
    placements = [ms.Shard(2 + dim) for dim in range(mesh.ndim)]
    noise = ms.randn(2 * args.samples, 1, *[args.grid] * args.ndim, mesh=mesh, placements=placements)
    start = smooth(noise)
    fields, others = start.split(args.samples)
    truth, other_truth = burgers(start).split(args.samples)
    say(mesh, f"fields {tuple(fields.shape)} on a mesh {mesh.shape}: {tuple(fields.to_local().shape)} on rank 0")

    good = verify(args, mesh, noise, fields, truth) if args.verify else True
    model = ms.distribute_module(make_model(args), mesh)
    losses, seconds = [], []
    with tqdm(train(model, fields, truth, args.steps), total=args.steps, unit="step", disable=mesh.rank != 0) as bar:
        for loss, elapsed in bar:
            losses.append(loss)
            seconds.append(elapsed)
            bar.set_postfix(loss=f"{loss:.4f}")
    with torch.no_grad():
        error = loss_of(model(others), other_truth).item()
        unchanged = loss_of(others, other_truth).item()
    say(mesh, f"{len(losses)} steps: loss {losses[0]:.4f} -> {losses[-1]:.4f}; {median(seconds):.2f} s per step")
    say(mesh, f"other fields: relative error {error:.4f}, where nothing but the field itself has {unchanged:.4f}")
    return 0 if good else 1


def make_model(args: argparse.Namespace) -> FNO:
    torch.manual_seed(args.seed)
    return FNO(ndim=args.ndim, width=args.width, modes=args.modes, layers=args.layers)


def train(model: nn.Module, x: Tensor, truth: Tensor, steps: int) -> Iterator[tuple[float, float]]:
    """Yield the loss of every step, and the seconds that it took."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=max(steps, 1))
    for _ in range(steps):
        start = time.perf_counter()
        loss = loss_of(model(x), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        yield loss.item(), time.perf_counter() - start


def trace(model: nn.Module, x: Tensor, truth: Tensor, steps: int) -> dict[str, list[Tensor]]:
    """Do a few steps of gradient descent; return every loss and gradient, and the last parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    out: dict[str, list[Tensor]] = {"loss": [], "gradient": [], "parameter": []}
    for _ in range(steps):
        loss = loss_of(model(x), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out["loss"].append(torch.tensor(loss.item()))
        out["gradient"] += [p.grad.detach().cpu().clone() for p in model.parameters()]
    out["parameter"] = [p.detach().cpu().clone() for p in model.parameters()]
    return out


def verify(args: argparse.Namespace, mesh: ms.CartMesh, noise: Tensor, fields: Tensor, truth: Tensor) -> bool:
    """Make the data and do a few steps sharded and in one process, and say how far apart they are."""
    mine = trace(ms.distribute_module(make_model(args), mesh), fields, truth, VERIFIED_STEPS)
    mine = {"field": [fields.full_tensor().cpu()], "solution": [truth.full_tensor().cpu()], **mine}
    whole = noise.full_tensor()
    reference = None
    if mesh.rank == 0:
        x = smooth(whole)[: args.samples]
        y = burgers(x)
        reference = {"field": [x.cpu()], "solution": [y.cpu()]}
        reference |= trace(make_model(args).to(mesh.device), x, y, VERIFIED_STEPS)
    reference = mesh.comm.bcast(reference)
    worst = 0.0
    for what, tensors in mine.items():
        # every rank compares its own: they must not drift apart either
        difference = max(mesh.comm.allgather(largest_difference(tensors, reference[what])))
        say(mesh, f"verify: largest relative difference of a {what} from one process: {difference:.1e}")
        worst = max(worst, difference)
    good = worst < TOLERANCE[args.dtype]
    verdict = "as good as equal" if good else "DIFFERENT"
    say(mesh, f"verify: {VERIFIED_STEPS} steps in {args.dtype}: {verdict} (limit {TOLERANCE[args.dtype]:.0e})")
    return good


def largest_difference(mine: list[Tensor], reference: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, each relative to the reference's largest element."""
    return max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in zip(mine, reference, strict=True)
    )


def say(mesh: ms.CartMesh, text: str) -> None:
    if mesh.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
