"""A training step of a convolution net and of a pointwise chain on shards: torch.compile beside eager, in one run.

mpiexec -n 2 python benchmarks/compiled.py

Columns: milliseconds of the eager step, the ratio to it of the compiled one (below 1: faster), and the seconds that
the first compiled call took.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
from timing import WORLD, interleaved, options, ratio, say
from torch import nn

import mpishard as ms


class Pointwise(nn.Module):
    """Twenty operations of single cells, which a compiler makes one loop."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x):
        y = x * self.scale
        for _ in range(5):
            y = torch.sigmoid(y) * y + 0.5 * x - y.square() * 0.1
        return y


def net(channels: int = 8) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(8, channels, 3, padding=1)]
    for _ in range(3):
        layers += [nn.GroupNorm(4, channels), nn.GELU(), nn.Conv2d(channels, channels, 3, padding=1)]
    return nn.Sequential(*layers)


def main() -> None:
    args = options(__doc__)
    mesh = ms.init_mesh((-1,), ("d",))
    backend = "aot_eager" if args.quick else "inductor"
    extents = (16,) if args.quick else (64, 256)
    say(f"{WORLD.size} ranks, {backend}\n{'model':<12}{'extent':>8}{'eager ms':>10}{'compiled':>10}{'first s':>11}")
    for name, model in {"pointwise": Pointwise(), "conv net": net()}.items():
        for extent in extents:
            torch.manual_seed(0)
            x = ms.distribute_tensor(torch.randn(1, 8, extent, extent), mesh, (ms.Shard(2),))
            eager, read = copy.deepcopy(model), copy.deepcopy(model)
            for m in (eager, read):
                ms.distribute_module(m, mesh)
            compiled = torch.compile(read, backend=backend, fullgraph=True)
            start = time.perf_counter()
            step(compiled, x)
            took = time.perf_counter() - start
            count = 1 if args.quick else max(2, 4096 // extent)
            times = interleaved(
                {"eager": lambda m=eager, x=x: step(m, x), "compiled": lambda m=compiled, x=x: step(m, x)},
                count,
                args.rounds,
            )
            ms_ = 1e3 * statistics.median(times["eager"])
            say(f"{name:<12}{extent:>8}{ms_:>10.2f}{ratio(times, 'compiled', 'eager'):>10.2f}{took:>11.1f}")


def step(model, x) -> None:
    model(x).square().mean().backward()


if __name__ == "__main__":
    main()
