"""Collectives on plain tensors, and their autograd, against MPI's own call on numpy arrays of the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench

AXIS = "nbytes"


def calls(mesh: ms.CartMesh, n: int) -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], object]]]:
    """Return ours and MPI's way of each collective, of ``n`` float32 a rank (a multiple of the ranks)."""
    size, part = WORLD.size, n // WORLD.size
    a, b, all_of = np.ones(n, np.float32), np.empty(n, np.float32), np.empty(n * size, np.float32)
    up, down = (WORLD.rank + 1) % size, (WORLD.rank - 1) % size
    along = ms.init_mesh((-1,), ("ring",), periodic=True)
    return {
        "all_reduce": (lambda x: ms.all_reduce(x, mesh), lambda: WORLD.Allreduce(a, b)),
        "all_gather": (lambda x: ms.all_gather(x, mesh, sizes=[n] * size), lambda: WORLD.Allgather(a, all_of)),
        "reduce_scatter": (
            lambda x: ms.reduce_scatter(x, mesh, sizes=[part] * size),
            lambda: WORLD.Reduce_scatter_block(a, b[:part]),
        ),
        "broadcast": (lambda x: ms.broadcast(x, mesh, 0), lambda: WORLD.Bcast(b, 0)),
        "shift": (
            lambda x: ms.shift(x, along, 0, 1),
            lambda: WORLD.Sendrecv(a, up, 0, b, down, 0, MPI.Status()),
        ),
    }


def run(bench: Bench) -> None:
    """Compare over bytes, without and with a gradient (which communicates once more)."""
    mesh = ms.init_mesh((-1,), ("d",))
    for nbytes in (256, 4096) if bench.quick else (256, 1 << 14, 1 << 20, 1 << 24):
        n = max(1, nbytes // 4 // WORLD.size) * WORLD.size
        count = 3 if bench.quick else max(5, min(2000, (1 << 25) // nbytes))
        plain, leaf = torch.ones(n), torch.ones(n, requires_grad=True)
        for name, (ours, raw) in calls(mesh, n).items():

            def step(ours=ours, leaf=leaf) -> None:
                leaf.grad = None
                y = ours(leaf)
                y.backward(torch.ones_like(y))

            bench.compare(
                f"{name}, {4 * n} bytes",
                {"MPI": raw, "ours": lambda ours=ours, x=plain: ours(x), "ours, with backward": step},
                floor="MPI",
                count=count,
                nbytes=4 * n,
                collective=name,
            )
