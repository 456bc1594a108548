"""Gradients of many small parameters: our sums in backward, against one fused all-reduce by hand."""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench

WIDTH = 16


class Scales(nn.Module):
    """Many small parameters, each of which multiplies the whole."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x * weight
        return x


def run(bench: Bench) -> None:
    """Compare steps whose sums differ, and nothing else."""
    for count in (20,) if bench.quick else (50, 200):
        full = torch.randn(4 * WORLD.size, WIDTH, generator=torch.Generator().manual_seed(0))
        mesh = ms.init_mesh((-1,), ("d",))
        plain, ours = Scales(count), ms.distribute_module(Scales(count), mesh)
        block = full[4 * WORLD.rank : 4 * WORLD.rank + 4].clone()
        x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
        fused = np.empty(count * WIDTH, np.float32)

        def local(plain=plain, block=block) -> None:
            plain.zero_grad(set_to_none=True)
            plain(block).sum().backward()

        def hand(plain=plain, local=local, fused=fused) -> None:
            local()
            torch.cat([p.grad for p in plain.parameters()], out=torch.from_numpy(fused))
            WORLD.Allreduce(MPI.IN_PLACE, fused)
            for p, g in zip(plain.parameters(), torch.from_numpy(fused).split(WIDTH)):
                p.grad.copy_(g)

        def sharded(ours=ours, x=x) -> None:
            ours.zero_grad(set_to_none=True)
            ours(x).sum().backward()

        hand()
        sharded()
        assert all(torch.allclose(p.grad, q.grad) for p, q in zip(plain.parameters(), ours.parameters())), "they differ"
        bench.compare(
            f"step with {count} parameters of {WIDTH}",
            {"fused by hand": hand, "local, no sum": local, "ours": sharded},
            floor="fused by hand",
            count=2 if bench.quick else 20,
            parameters_count=count,
        )
