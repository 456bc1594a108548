"""Collectives on plain tensors against MPI on numpy arrays, and their autograd against a Function of its calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench, interleaved

AXIS = "nbytes"


Call = Callable[[np.ndarray, np.ndarray], object]
Map = Callable[[torch.Tensor], torch.Tensor]


def by_hand(forward: Call, backward: Call, n: int) -> Map:
    """Return what a user would write instead: a Function around MPI's calls, whose result has ``n`` numbers."""

    class Hand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.n = x.numel()
            y = torch.empty(n)
            forward(x.numpy(), y.numpy())
            return y

        @staticmethod
        def backward(ctx, g):
            h = torch.empty(ctx.n)
            backward(g.contiguous().numpy(), h.numpy())
            return h

    return Hand.apply


def calls(mesh: ms.CartMesh, n: int) -> dict[str, tuple[Map, Callable[[], object], Map]]:
    """Return each collective of ``n`` float32 a rank (a multiple of the ranks): ours, MPI's, MPI's in a Function."""
    size, rank, part = WORLD.size, WORLD.rank, n // WORLD.size
    a, b, all_of = np.ones(n, np.float32), np.empty(n, np.float32), np.empty(n * size, np.float32)
    up, down = (rank + 1) % size, (rank - 1) % size
    along = ms.init_mesh((-1,), ("ring",), periodic=True)

    def copy(x, y):
        if rank == 0:
            y[:] = x
        WORLD.Bcast(y, 0)

    def collect(g, h):
        WORLD.Reduce(g, h if rank == 0 else None, root=0)
        if rank:
            h[:] = 0

    def passed(to, of):
        return lambda x, y: WORLD.Sendrecv(x, to, 0, y, of, 0, MPI.Status())

    reduce, gather, scatter = WORLD.Allreduce, WORLD.Allgather, WORLD.Reduce_scatter_block
    return {
        "all_reduce": (lambda x: ms.all_reduce(x, mesh), lambda: reduce(a, b), by_hand(reduce, reduce, n)),
        "all_gather": (
            lambda x: ms.all_gather(x, mesh, sizes=[n] * size),
            lambda: gather(a, all_of),
            by_hand(gather, scatter, n * size),
        ),
        "reduce_scatter": (
            lambda x: ms.reduce_scatter(x, mesh, sizes=[part] * size),
            lambda: scatter(a, b[:part]),
            by_hand(scatter, gather, part),
        ),
        "broadcast": (lambda x: ms.broadcast(x, mesh, 0), lambda: WORLD.Bcast(b, 0), by_hand(copy, collect, n)),
        "shift": (
            lambda x: ms.shift(x, along, 0, 1),
            lambda: passed(up, down)(a, b),
            by_hand(passed(up, down), passed(down, up), n),
        ),
    }


def run(bench: Bench) -> None:
    """Compare over bytes, without a gradient, and with one, which communicates once more: with MPI's in a Function."""
    mesh = ms.init_mesh((-1,), ("d",))
    for nbytes in (256, 4096) if bench.quick else (256, 1 << 14, 1 << 20, 1 << 24):
        n = max(1, nbytes // 4 // WORLD.size) * WORLD.size
        count = 3 if bench.quick else max(5, min(2000, (1 << 25) // nbytes))
        plain, leaf = torch.ones(n), torch.ones(n, requires_grad=True)
        for name, (ours, raw, hand) in calls(mesh, n).items():

            def step(call: Map, leaf=leaf) -> None:
                leaf.grad = None
                y = call(leaf)
                y.backward(torch.ones_like(y))

            ways = {
                "MPI": raw,
                "ours": partial(ours, plain),
                "by hand, with backward": partial(step, hand),
                "ours, with backward": partial(step, ours),
            }
            times = interleaved(ways, count, bench.rounds)
            for floor, who in (("MPI", "ours"), ("by hand, with backward", "ours, with backward")):
                pair = {way: times[way] for way in (floor, who)}
                bench.add(f"{name}, {4 * n} bytes", pair, floor=floor, nbytes=4 * n, collective=name)
