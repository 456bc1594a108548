"""Segments a whole brain volume at native resolution, sharded over a mesh of MPI ranks.

    mpiexec -n 4 python examples/segment_brain.py            # about five minutes on 2 cores
    mpiexec -n 4 python examples/segment_brain.py --steps 60 # longer, and better
    mpiexec -n 4 python examples/segment_brain.py --verify   # the same numbers as in one process?

A 3-D U-Net learns the grey- and white-matter maps of the ICBM152 brain (197 x 233 x 189 voxels) from its T1
image. The volume is never cropped: each rank reads and holds one block of it, and the network, the loss and
the training loop are those of one process (unet.py and brain_training.py, which do not mention mpishard).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

# ranks share the cores of a node; before torch starts its threads
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from brain_data import brain_path, write_brain
from brain_figure import draw
from brain_training import (
    TISSUES,
    Step,
    adam,
    add_arguments,
    autocast,
    dice,
    largest_difference,
    make_model,
    peak_nbytes,
    return_freed_memory,
    trace,
    train,
)
from mpi4py import MPI
from torch import Tensor
from tqdm import tqdm

import mpishard as ms

TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
# more steps in float32 compare how rounding grows: by 100 a step, in one process as well
VERIFIED_STEPS = {"float32": 1, "float64": 3}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs="+", default=(-1, -1), help="extents, e.g. 2 2; -1: inferred")
    parser.add_argument("--steps", type=int, default=17, help="training steps")
    parser.add_argument("--verify", action="store_true", help="also run a few steps in one process and compare")
    parser.add_argument("--compare-memory", action="store_true", help="also run a step in one process: its memory")
    parser.add_argument("--subsample", type=int, default=1, metavar="N", help="keep every N-th voxel along each dim")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the volumes, made where absent")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        default=os.environ.get("MPISHARD_CHECKPOINTS"),
        help="where a job that gets SIGUSR1 or SIGTERM saves, and goes on; a job script says it",
    )
    add_arguments(parser)
    args = parser.parse_args()
    if not 1 <= len(args.mesh) <= 3:
        parser.error("--mesh: a volume has 3 dims to shard")
    if args.verify and args.amp:
        parser.error("--verify compares to more digits than bfloat16 has: leave --amp out")
    return args


def check_launcher(size: int) -> None:
    told = int(os.environ.get("SLURM_NTASKS", size))
    if told != size:
        raise ms.MeshError(
            "the launcher and the MPI library do not know each other\n"
            f"  expected: {told} ranks, as SLURM_NTASKS says\n"
            f"  got:      {size} in MPI_COMM_WORLD\n"
            "  fix:      srun --mpi=... as the MPI library needs it (srun --mpi=list), or start all tasks"
        )


def main() -> int:
    args = arguments()
    check_launcher(MPI.COMM_WORLD.size)
    mesh = ms.init_mesh(args.mesh, ("x", "y", "z")[: len(args.mesh)])
    # around all of it: a signal while the volume is read stops after the first step, one while maps are written is late
    with ms.io.preemption(mesh) as stop:
        return segment(args, mesh, stop)


def segment(args: argparse.Namespace, mesh: ms.CartMesh, stop: ms.io.preemption) -> int:
    return_freed_memory()
    baseline = peak_nbytes()
    data = brain_path(args.data, args.subsample)
    if mesh.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        if not data.exists():
            write_brain(data, args.subsample)
    mesh.comm.Barrier()

    # mesh dim 0 shards the volume's dim 0, and so on; each rank reads its block and nothing else. Borders on
    # multiples of the stride of every level but the lowest let those work on whole blocks; the lowest is small,
    # and its stride, too, would make the blocks less alike
    how = {"dtype": getattr(torch, args.dtype), "multiple": 2 ** max(0, args.levels - 2)}
    placements = [ms.Shard(dim) for dim in range(mesh.ndim)]
    t1, *maps = (ms.io.read(data, name, mesh, placements, **how) for name in ("t1", *TISSUES))
    x, truth = t1[None, None], torch.stack(maps)[None]
    say(mesh, f"volume {tuple(t1.shape)} on a mesh {mesh.shape}: {tuple(t1.to_local().shape)} on rank 0")

    good = verify(args, mesh, data, x, truth) if args.verify else True
    model = ms.distribute_module(make_model(args), mesh)
    optimizer, rates = adam(model, args.steps)
    parts = {"model": model, "optimizer": optimizer, "scheduler": rates, "mesh": mesh}
    steps = resumed(args, mesh, parts)
    left = train(args, model, optimizer, rates, x, truth, args.steps - len(steps))
    with tqdm(left, initial=len(steps), total=args.steps, unit="step", disable=mesh.rank != 0) as bar:
        for step in bar:
            steps.append(step)
            bar.set_postfix(loss=f"{step.loss:.4f}")
            if stop.should_stop() and args.checkpoints:
                ms.io.save_checkpoint(args.checkpoints, len(steps), extra=[tuple(s) for s in steps], **parts)
                say(mesh, f"told to stop: saved after step {len(steps)}")
                return stop.exit_code
    with torch.no_grad(), autocast(args, x.device):
        predicted = torch.sigmoid(model(x).to(truth.dtype))
    scores = ", ".join(f"{name} {float(score):.3f}" for name, score in zip(TISSUES, dice(predicted, truth)))
    title = f"{len(steps)} steps: loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}; Dice {scores}"
    say(mesh, title)
    report(args, mesh, data, [step.seconds for step in steps], peak_nbytes() - baseline)

    result = args.out / "segment_brain.h5"
    attrs = {"title": title, "loss": [step.loss for step in steps]}
    ms.io.write(result, {name: predicted[0, i] for i, name in enumerate(TISSUES)}, attrs=attrs)
    if mesh.rank == 0:
        borders = [list(accumulate(sizes or ()))[:-1] for sizes in t1.sharding.sizes]
        draw(args.out / "segment_brain.png", data, result, borders, title)
    say(mesh, f"predicted maps: {result}, figure: {result.with_suffix('.png')}")
    return 0 if good else 1


def resumed(args: argparse.Namespace, mesh: ms.CartMesh, parts: dict[str, Any]) -> list[Step]:
    """Go on where a job before this one was told to stop; return the steps that it has done."""
    if not mesh.comm.bcast(bool(args.checkpoints and (args.checkpoints / "latest").exists())):
        return []
    found = ms.io.load_checkpoint(args.checkpoints, **parts)
    say(mesh, f"going on after step {found.step}")
    return [Step(*step) for step in found.extra]


def verify(args: argparse.Namespace, mesh: ms.CartMesh, data: Path, x: Tensor, truth: Tensor) -> bool:
    """Do the same few steps sharded and in one process, and say how far apart they end.

    The one process computes in float64. In float32 it is itself off that by more than the tolerance, as some of
    this network's gradients are sums over the volume that nearly cancel: then the ranks may be as far off.
    """
    steps = VERIFIED_STEPS[args.dtype]
    mine = trace(args, ms.distribute_module(make_model(args), mesh), x, truth, steps)
    reference = in_one_process(args, mesh, data, steps, "--dtype=float64")
    alone = in_one_process(args, mesh, data, steps) if args.dtype == "float32" else None
    good = True
    for what, tensors in mine.items():
        # every rank compares its own: they must not drift apart either
        difference = max(mesh.comm.allgather(largest_difference(tensors, reference[what])))
        line = f"verify: largest relative difference of a {what} from one process: {difference:.1e}"
        limit = TOLERANCE[args.dtype]
        if alone is not None:
            own = largest_difference(alone[what], reference[what])
            line += f" (one process in float32 itself: {own:.1e})"
            limit = max(limit, own)
        say(mesh, line)
        good = good and difference < limit
    verdict = "as good as equal" if good else "DIFFERENT"
    say(mesh, f"verify: {steps} step{'s' * (steps > 1)} in {args.dtype}: {verdict} (limit {TOLERANCE[args.dtype]:.0e})")
    return good


def report(args: argparse.Namespace, mesh: ms.CartMesh, data: Path, seconds: list[float], peak: int) -> None:
    peaks = [nbytes / 1e6 for nbytes in mesh.comm.allgather(peak)]
    say(mesh, f"{median(seconds):.2f} s per step")
    say(mesh, f"peak memory per rank: {', '.join(f'{p:.0f}' for p in peaks)} MB; together {sum(peaks):.0f} MB")
    if args.compare_memory:
        reference = in_one_process(args, mesh, data, 1)
        alone = reference["peak_nbytes"] / 1e6
        say(mesh, f"one process: {reference['seconds']:.2f} s for a step, {alone:.0f} MB")
        say(mesh, f"a rank needs at most {max(peaks) / alone:.3f} of that; 1/{mesh.size} is {1 / mesh.size:.3f}")


def in_one_process(args: argparse.Namespace, mesh: ms.CartMesh, data: Path, steps: int, *flags: str) -> dict[str, Any]:
    """Run brain_training.py on rank 0, with the cores of all, and return its result on every rank."""
    result = None
    if mesh.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "reference.pt"
            command = [sys.executable, Path(__file__).with_name("brain_training.py"), data, file]
            command += [f"--steps={steps}", f"--device={mesh.device}", f"--dtype={args.dtype}", f"--seed={args.seed}"]
            command += [f"--base={args.base}", f"--levels={args.levels}"]
            command += [f"--{flag}" for flag in ("amp", "recompute") if getattr(args, flag)]
            command += flags
            cores = str(len(os.sched_getaffinity(0)))
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": cores})
            result = torch.load(file)
    # a blocking call would take the cores away from the process that they wait for
    done = mesh.comm.Ibarrier()
    while not done.Test():
        time.sleep(0.05)
    return mesh.comm.bcast(result)


def say(mesh: ms.CartMesh, text: str) -> None:
    if mesh.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
