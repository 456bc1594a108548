"""The model beside online_solver: it corrects a coarse run while it learns, on line, what a coarse step gets wrong.

    mpiexec -n 4 python online_solver.py 800 100 64 : -n 2 python online_model.py 800 64

At every step the solver gives its fine run on coarse cells, and what one coarse step made of the fine run's last state.
The difference is what the network is to add to a coarse step; a pair is seen once, when it comes. Nothing is stored.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

import mpishard as ms

# the fields and what is learned of them, both about one
SCALE_IN, SCALE_OUT = 60.0, 2e4


class Closure(torch.nn.Module):
    """What to add to a coarse step: a linear stencil and a small network, around the periodic plane."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        around = {"kernel_size": 5, "padding": 2, "padding_mode": "circular"}
        self.stencil = torch.nn.Conv2d(3, 3, bias=False, **around)
        self.hidden = torch.nn.Conv2d(3, channels, **around)
        self.last = torch.nn.Conv2d(channels, 3, 1)
        # nothing, until something is learned
        for weight in (self.stencil.weight, self.last.weight, self.last.bias):
            torch.nn.init.zeros_(weight)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        """Return the scaled correction of a state [x, y, component]."""
        x = q.permute(2, 0, 1)[None] * SCALE_IN
        return (self.stencil(x) + self.last(torch.tanh(self.hidden(x))))[0].permute(1, 2, 0)


def relative(q: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the error of a run, by the size of the truth."""
    return float(((q - truth).square().sum() / truth.square().sum()).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int, help="of the solver")
    parser.add_argument("cells", type=int, help="of the coarse run, per dim")
    parser.add_argument("--updates", type=int, default=2, help="of the weights, per step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the figure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    me = ms.insitu.join("model")
    first = me.comm.rank == 0
    mesh = ms.init_mesh((-1,), ("x",), periodic=True, comm=me.comm)

    def field() -> ms.ShardTensor:
        return ms.zeros(args.cells, args.cells, 3, mesh=mesh, placements=(ms.Shard(0),), dtype=torch.float64)

    fine, coarse, alone, closed, closure, before = (field() for _ in range(6))
    given = {"fine": fine, "coarse": coarse, "alone": alone, "closed": closed}
    model = Closure().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    loss, errors = torch.zeros(()), []
    with (
        me.connect("water", into=given, out={"closure": closure}, timeout=600) as link,
        tqdm(total=args.steps, desc="coupled steps", disable=not first) as progress,
    ):
        for step in link:
            # the solver waits for this alone
            with torch.no_grad():
                closure.copy_(model(closed) / SCALE_OUT)
            link.put()
            errors.append((relative(alone, fine), relative(closed, fine)))
            if step > 0:
                wanted = (fine - coarse) * SCALE_OUT
                for _ in range(args.updates):
                    optimizer.zero_grad()
                    loss = (model(before) - wanted).square().mean() / wanted.square().mean()
                    loss.backward()
                    optimizer.step()
                slower.step()
            before.copy_(fine)
            left = float(loss)
            progress.set_postfix_str(
                f"not explained {left:.3f}, error without {errors[-1][0]:.4f}, with {errors[-1][1]:.4f}", refresh=False
            )
            progress.update()
    heights = [q[:, :, 0].full_tensor() for q in (fine, alone, closed)]
    if first:
        # imported where it is drawn
        from online_figure import draw

        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / "online_closure.png"
        draw(path, errors, heights)
        without, closed_error = errors[-1]
        print(
            f"error of the coarse run after {len(errors)} steps: {without:.5f} without the closure, "
            f"{closed_error:.5f} with it: {without / closed_error:.1f} times less; figure: {path}",
            flush=True,
        )


if __name__ == "__main__":
    main()
