"""Rows to columns: redistribute, and its backward, against MPI's Alltoallw on the same bytes."""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench

AXIS = "extent"


class Alltoallw:
    """The blocks of a square matrix of float32, from rows to columns, by subarray types: nothing is copied before."""

    def __init__(self, full: torch.Tensor) -> None:
        n, size = full.shape[0], WORLD.size
        bounds = [n * r // size for r in range(size + 1)]
        lo, hi = bounds[WORLD.rank], bounds[WORLD.rank + 1]
        self.rows = full[lo:hi].contiguous().numpy()
        self.columns = np.zeros((n, hi - lo), np.float32)
        self.kinds: tuple[list[MPI.Datatype], list[MPI.Datatype]] = ([], [])
        for a, b in zip(bounds, bounds[1:]):
            for array, kinds, sub, start in (
                (self.rows, self.kinds[0], (hi - lo, b - a), (0, a)),
                (self.columns, self.kinds[1], (b - a, hi - lo), (a, 0)),
            ):
                kinds.append(MPI.FLOAT.Create_subarray(array.shape, sub, start).Commit())
        self.counts, self.starts = [1] * size, [0] * size

    def __call__(self) -> None:
        out, into = ([x, self.counts, self.starts, k] for x, k in zip((self.rows, self.columns), self.kinds))
        WORLD.Alltoallw(out, into)

    def free(self) -> None:
        for kind in (*self.kinds[0], *self.kinds[1]):
            kind.Free()


def run(bench: Bench) -> None:
    """Compare over extents."""
    mesh = ms.init_mesh((-1,), ("d",))
    for extent in (32, 64) if bench.quick else (256, 1024, 4096):
        extent -= extent % WORLD.size
        full = torch.randn(extent, extent, generator=torch.Generator().manual_seed(0))
        raw = Alltoallw(full)
        x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
        leaf = x.detach().requires_grad_()
        raw()
        columns = x.redistribute(placements=[ms.Shard(1)])
        assert torch.equal(columns.to_local(), torch.from_numpy(raw.columns)), "the ways disagree"

        def step(leaf=leaf, cotangent=columns) -> None:
            leaf.grad = None
            leaf.redistribute(placements=[ms.Shard(1)]).backward(cotangent)

        bench.compare(
            f"rows to columns, {extent}^2 float32",
            {
                "Alltoallw": raw,
                "ours": lambda x=x: x.redistribute(placements=[ms.Shard(1)]),
                "ours, with backward": step,
            },
            floor="Alltoallw",
            count=3 if bench.quick else max(3, (1 << 25) // extent**2),
            extent=extent,
        )
        raw.free()
