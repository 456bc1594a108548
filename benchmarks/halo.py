"""In-place halo exchange against what MPI itself takes.

The rivals of a `HaloExchanger`: the loop that one writes by hand (mpi4py, persistent requests on subarray
types, dimension by dimension), and the raw transfer, the same bytes as dense messages. Ranks beyond the cores
measure the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench

AXIS = "extent"


class Persistent:
    """Steps of persistent requests, each step finished before the next starts."""

    def __init__(self, steps: Sequence[Sequence[MPI.Prequest]]) -> None:
        self.steps = steps

    def __call__(self) -> None:
        for requests in self.steps:
            MPI.Prequest.Startall(requests)
            MPI.Request.Waitall(requests)

    def free(self) -> None:
        for requests in self.steps:
            for request in requests:
                request.Free()


def by_hand(cart: MPI.Cartcomm, array: np.ndarray, dims: Sequence[int], width: int) -> Persistent:
    """Write the exchange along ``dims`` of a float32 array as one does with plain mpi4py."""
    steps = []
    for k, d in enumerate(dims):
        lo, hi = cart.Shift(k, 1)
        n = array.shape[d]

        def strip(start: int, k: int = k, d: int = d) -> list:
            shape, starts = list(array.shape), [0] * array.ndim
            shape[d], starts[d] = width, start
            for later in dims[k + 1 :]:
                shape[later] -= 2 * width
                starts[later] = width
            kind = MPI.FLOAT.Create_subarray(array.shape, shape, starts)
            kind.Commit()
            return [array, 1, kind]

        steps.append(
            [
                cart.Recv_init(strip(0), lo, 0),
                cart.Recv_init(strip(n - width), hi, 1),
                cart.Send_init(strip(n - 2 * width), hi, 0),
                cart.Send_init(strip(width), lo, 1),
            ]
        )
    return Persistent(steps)


def dense(cart: MPI.Cartcomm, counts: Sequence[int]) -> Persistent:
    """Send as many float32 as the strips of each mesh dim hold, both ways, from and to dense buffers."""
    steps = []
    for d, count in enumerate(counts):
        lo, hi = cart.Shift(d, 1)
        buffers = np.ones((4, count), np.float32)
        steps.append(
            [
                cart.Recv_init(buffers[0], lo, 0),
                cart.Recv_init(buffers[1], hi, 1),
                cart.Send_init(buffers[2], hi, 0),
                cart.Send_init(buffers[3], lo, 1),
            ]
        )
    return Persistent(steps)


def in_place(bench: Bench, shape: Sequence[int], n: int, width: int, fields: int) -> None:
    """Refresh the halos of fields of n^3 cells a rank."""
    mesh = ms.init_mesh(shape, periodic=True)
    cart = WORLD.Create_cart(shape, periods=[True] * 3)
    wide = n + 2 * width
    rng = np.random.default_rng(WORLD.rank)
    ours = [rng.random((wide,) * 3, dtype=np.float32) for _ in range(fields)]
    theirs = [u.copy() for u in ours]
    h = ms.HaloExchanger(mesh, ours[0].shape, (width,) * 3, np.float32)
    hands = [by_hand(cart, u, (0, 1, 2), width) for u in theirs]
    raw = dense(cart, [fields * width * n * n, fields * width * n * wide, fields * width * wide * wide])

    def hand() -> None:
        for loop in hands:
            loop()

    hand()
    h(*ours)
    assert all(np.array_equal(u, v) for u, v in zip(ours, theirs, strict=True)), "the exchanges disagree"
    report(
        bench,
        f"{n}^3, width {width}, {fields} field{'s'[: fields > 1]}, mesh {'x'.join(map(str, shape))}",
        {"ours": lambda: h(*ours), "hand": hand, "raw": raw},
        3 if bench.quick else max(5, 200 * 64**2 // (n * n * fields)),
        extent=n,
        width=width,
        fields=fields,
        mesh="x".join(map(str, shape)),
    )
    for loop in (*hands, raw):
        loop.free()
    cart.Free()
    mesh.free()


def ghost_resident(bench: Bench, shape: Sequence[int], extent: int) -> None:
    """Refresh the halo that a torch tensor's storage has room for."""
    mesh = ms.init_mesh(shape)
    storage = torch.zeros(1, 8, extent + 2, extent + 2)
    h = ms.HaloExchanger(mesh, storage.shape, (0, 0, 1, 1), storage.dtype, dims={2: 0, 3: 1})
    hand = by_hand(mesh.comm, storage.numpy(), (2, 3), 1)
    # a mesh dim of extent 1 has no neighbours here
    raw = dense(mesh.comm, [8 * extent if ranks > 1 else 0 for ranks in shape])
    count = 3 if bench.quick else max(20, 200 * 64 // extent)
    what = f"ghost-resident 1x8x{extent}x{extent}, mesh {'x'.join(map(str, shape))}"
    report(bench, what, {"ours": lambda: h(storage), "hand": hand, "raw": raw}, count)
    for loop in (hand, raw):
        loop.free()
    mesh.free()


def report(bench: Bench, what: str, calls: dict, count: int, **parameters: object) -> None:
    """Note the ratios to the program by hand, and that of ours to the raw transfer."""
    times = bench.compare(what, calls, floor="hand", count=count, **parameters)
    bench.figure(f"{what}: ours / raw", [a / b for a, b in zip(times["ours"], times["raw"])], "x")


def run(bench: Bench) -> None:
    """Compare over extents, widths, numbers of fields and directions."""
    size = WORLD.size
    extents, widths, fields = ((8, 12), (1, 2), (1, 3)) if bench.quick else ((32, 64, 128, 256), (1, 2, 3), (1, 2, 3))
    for n, width, k in product(extents, widths, fields):
        in_place(bench, (size, 1, 1), n, width, k)
    for n, width in zip(extents, widths):
        in_place(bench, (1, 1, size), n, width, 1)
    for extent in (16,) if bench.quick else (64, 1024):
        for shape in ((size, 1), (1, size)):
            ghost_resident(bench, shape, extent)
