"""Training steps on shards, torch.compile beside eager: a convolution net, a pointwise chain, fields carried along."""

from __future__ import annotations

import copy
import time

import torch
from torch import nn

import mpishard as ms
from benchmarks.harness.measure import Bench

AXIS = "extent"


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


class Advected(nn.Module):
    """Fields that are carried along a velocity of their own, with a source: values say what the exchange is."""

    def __init__(self) -> None:
        super().__init__()
        self.velocity = nn.Conv2d(8, 2, 3, padding=1)
        self.reaction = Pointwise()

    def forward(self, x):
        n, _, *extents = x.shape
        cells = torch.meshgrid(*(torch.arange(m) * 2 / m + (1 / m - 1) for m in extents), indexing="ij")
        for _ in range(2):
            steps = 0.1 * torch.tanh(self.velocity(x)).permute(0, 2, 3, 1)
            x = nn.functional.grid_sample(
                x, torch.stack(cells[::-1], -1).expand(n, -1, -1, -1) - steps, align_corners=False
            )
            x = self.reaction(x)
        return x


def net(channels: int = 8) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(8, channels, 3, padding=1)]
    for _ in range(3):
        layers += [nn.GroupNorm(4, channels), nn.GELU(), nn.Conv2d(channels, channels, 3, padding=1)]
    return nn.Sequential(*layers)


def step(model: nn.Module, x: ms.ShardTensor) -> None:
    model(x).square().mean().backward()


def run(bench: Bench) -> None:
    """Compare over extents; the quick run compiles by tracing alone."""
    mesh = ms.init_mesh((-1,), ("d",))
    backend = "eager" if bench.quick else "inductor"
    for name, model in {"pointwise": Pointwise(), "convolutions": net(), "advection": Advected()}.items():
        for extent in (16,) if bench.quick else (64, 256):
            torch.manual_seed(0)
            x = ms.distribute_tensor(torch.randn(1, 8, extent, extent), mesh, (ms.Shard(2),))
            eager, read = copy.deepcopy(model), copy.deepcopy(model)
            for m in (eager, read):
                ms.distribute_module(m, mesh)
            compiled = torch.compile(read, backend=backend, fullgraph=True)
            start = time.perf_counter()
            step(compiled, x)
            what = f"{name}, step, 1x8x{extent}x{extent}"
            bench.figure(f"{what}: first call", time.perf_counter() - start, "s", "compiled")
            calls = {"eager": lambda m=eager, x=x: step(m, x), "compiled": lambda m=compiled, x=x: step(m, x)}
            bench.compare(what, calls, floor="eager", count=1 if bench.quick else max(2, 4096 // extent), extent=extent)
