"""In-place halo exchange against what MPI itself takes.

mpiexec -n 2 python benchmarks/halo.py

The rivals of a `HaloExchanger`: the loop that one writes by hand (mpi4py, persistent requests on subarray
types, dimension by dimension), and the floor, the same bytes as dense messages. Ranks beyond the cores
measure the scheduler.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI
from timing import WORLD, interleaved, options, ratio, say

import mpishard as ms


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


def in_place(shape: Sequence[int], n: int, width: int, fields: int, args: argparse.Namespace) -> None:
    mesh = ms.init_mesh(shape, periodic=True)
    cart = WORLD.Create_cart(shape, periods=[True] * 3)
    wide = n + 2 * width
    rng = np.random.default_rng(WORLD.rank)
    ours = [rng.random((wide,) * 3, dtype=np.float32) for _ in range(fields)]
    theirs = [u.copy() for u in ours]
    h = ms.HaloExchanger(mesh, ours[0].shape, (width,) * 3, np.float32)
    hands = [by_hand(cart, u, (0, 1, 2), width) for u in theirs]
    floor = dense(cart, [fields * width * n * n, fields * width * n * wide, fields * width * wide * wide])

    def hand() -> None:
        for loop in hands:
            loop()

    hand()
    h(*ours)
    assert all(np.array_equal(u, v) for u, v in zip(ours, theirs, strict=True)), "the exchanges disagree"
    count = 3 if args.quick else max(5, 200 * 64**2 // (n * n * fields))
    times = interleaved({"ours": lambda: h(*ours), "hand": hand, "floor": floor}, count, args.rounds)
    report(f"{n}^3 h{width}, mesh {'x'.join(map(str, shape))}, {fields} field{'s'[: fields > 1]}", times)
    for loop in (*hands, floor):
        loop.free()
    cart.Free()
    mesh.free()


def ghost_resident(shape: Sequence[int], extent: int, args: argparse.Namespace) -> None:
    mesh = ms.init_mesh(shape)
    storage = torch.zeros(1, 8, extent + 2, extent + 2)
    h = ms.HaloExchanger(mesh, storage.shape, (0, 0, 1, 1), storage.dtype, dims={2: 0, 3: 1})
    hand = by_hand(mesh.comm, storage.numpy(), (2, 3), 1)
    # a mesh dim of extent 1 has no neighbours here
    raw = dense(mesh.comm, [8 * extent if ranks > 1 else 0 for ranks in shape])
    count = 3 if args.quick else max(20, 200 * 64 // extent)
    times = interleaved({"ours": lambda: h(storage), "hand": hand, "floor": raw}, count, args.rounds)
    report(f"1x8x{extent}x{extent}, mesh {'x'.join(map(str, shape))}", times)
    for loop in (hand, raw):
        loop.free()
    mesh.free()


def report(name: str, times: dict[str, list[float]]) -> None:
    columns = "".join(f"{1e6 * statistics.median(times[k]):>10.1f}" for k in ("ours", "hand", "floor"))
    say(f"{name:<32}{columns}{ratio(times, 'ours', 'hand'):>10.2f}{ratio(times, 'ours', 'floor'):>10.2f}")


def main() -> None:
    args = options(__doc__)
    size = WORLD.size
    head = f"{'':<32}" + "".join(f"{c:>10}" for c in ("ours us", "hand us", "floor us", "/ hand", "/ floor"))
    sizes = ((8, 1), (12, 2)) if args.quick else ((32, 1), (64, 2), (128, 2))
    say(f"in place, periodic 3-D float32, {size} ranks\n{head}")
    for shape in ((size, 1, 1), (1, 1, size)):
        for n, width in sizes:
            in_place(shape, n, width, 1, args)
    for n, width in sizes[:2]:
        in_place((size, 1, 1), n, width, 3, args)
    say(f"\nghost-resident storage, torch float32; the floor is the raw transfer of the strips\n{head}")
    for extent in (16,) if args.quick else (64, 1024):
        for shape in ((size, 1), (1, size)):
            ghost_resident(shape, extent, args)


if __name__ == "__main__":
    main()
