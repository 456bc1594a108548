"""Strips of ghosted arrays: which cells of a halo come from where, and how a strip is copied in memory.

Ghosted arrays are described by address, shape and strides (`Block`), so that one path serves numpy, torch and
cupy, and so that nothing here keeps a caller's array alive. Nothing here communicates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

# A contiguous run this short is copied as one element: numpy's and torch's inner loops over it cost more.
_RUN_NBYTES = 128


class Strip(NamedTuple):
    """Cells of one array that travel together.

    ``peer`` is the other rank's position along the dim; ``side`` is 0 for the low and 1 for the high halo of
    the receiver; ``at`` is the first cell along the dim, in this rank's array.
    """

    peer: int
    side: int
    at: int
    count: int  # type: ignore[assignment]


class Strips(NamedTuple):
    """What one rank does along one dim; ``local`` are (source, destination, count) in its own array."""

    local: tuple[tuple[int, int, int], ...]
    sends: tuple[Strip, ...]
    recvs: tuple[Strip, ...]


def plan_strips(
    sizes: Sequence[int], lo: int | Sequence[int], hi: int | Sequence[int], periodic: bool, index: int
) -> Strips:
    """Plan the halo of width ``(lo, hi)`` along one dim for the rank at position ``index``.

    Not collective. ``sizes`` are the interior extents of all positions, ``lo`` and ``hi`` the widths of all of
    them, or of each; the halo may be wider than any interior. Cells beyond a non-periodic edge are in no strip.
    Sender and receiver list the strips of a (peer, side) in the same order.

    Examples
    --------
    >>> plan_strips((4, 3), 1, 0, False, 1)
    Strips(local=(), sends=(), recvs=(Strip(peer=0, side=0, at=0, count=1),))
    """
    borders = (0, *accumulate(sizes))
    los, his = ((w,) * len(sizes) if isinstance(w, int) else w for w in (lo, hi))
    local, sends, recvs = [], [], []
    for receiver, n in enumerate(sizes):
        start, stop = borders[receiver], borders[receiver + 1]
        below, above = los[receiver], his[receiver]
        for side, first, last, origin in ((0, start - below, start, 0), (1, stop, stop + above, below + n)):
            for owner, cell, offset, count in _sources(borders, first, last, periodic):
                src, dst = los[owner] + cell, origin + offset
                if owner == receiver == index:
                    local.append((src, dst, count))
                elif receiver == index:
                    recvs.append(Strip(owner, side, dst, count))
                elif owner == index:
                    sends.append(Strip(receiver, side, src, count))
    return Strips(tuple(local), tuple(sends), tuple(recvs))


def _sources(borders: Sequence[int], first: int, last: int, periodic: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield (owner, cell in its interior, offset from ``first``, count) of the global cells [first, last)."""
    extent = borders[-1]
    at, last = (first, last) if periodic else (max(first, 0), min(last, extent))
    while at < last:
        cell = at % extent
        owner = bisect_right(borders, cell) - 1
        count = min(last - at, borders[owner + 1] - cell)
        yield owner, cell - borders[owner], at - first, count
        at += count


class Block(NamedTuple):
    """A strided box in the memory of the host, or of the GPU ``device``; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: torch.device | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its cells."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether its cells lie in memory one after the other, last dim fastest."""
        step = self.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides)):
            if n != 1 and stride != step:
                return False
            step *= n
        return True

    def box(self, ranges: Sequence[tuple[int, int]]) -> Block:
        """Return the cells of ``ranges``, one (start, stop) per dim. Not collective."""
        address = self.address + sum(start * s for (start, _), s in zip(ranges, self.strides))
        return self._replace(address=address, shape=tuple(stop - start for start, stop in ranges))

    def dense(self, address: int) -> Block:
        """Return the block of this shape that lies dense in host memory at ``address``. Not collective."""
        strides = accumulate(self.shape[:0:-1], int.__mul__, initial=self.itemsize)
        return Block(address, self.shape, tuple(strides)[::-1], self.itemsize)


def copy_views(dst: Block, src: Block) -> tuple[Any, Any]:
    """Return views (numpy arrays, or torch tensors where one block is on a GPU) for copying ``src`` to ``dst``.

    Not collective. Both views have few dims and large elements: a copy's cost is its number of inner loops.
    """
    host = dst.device is None and src.device is None
    axes: list[tuple[int, int, int]] = []
    # slowest first in the array; the dense side follows
    for n, a, b in sorted(zip(dst.shape, dst.strides, src.strides), key=lambda x: -max(abs(x[1]), abs(x[2]))):
        if n == 1:
            continue
        if axes and axes[-1][1:] == (a * n, b * n):
            axes[-1] = (axes[-1][0] * n, a, b)
        else:
            axes.append((n, a, b))
    itemsize = dst.itemsize
    if host and axes and axes[-1][1:] == (itemsize, itemsize) and axes[-1][0] * itemsize <= _RUN_NBYTES:
        itemsize *= axes.pop()[0]
    shape = tuple(n for n, _, _ in axes)
    views = [
        Block(block.address, shape, tuple(axis[k] for axis in axes), itemsize, block.device)
        for k, block in ((1, dst), (2, src))
    ]
    make = host_view if host else _torch_view
    return make(views[0]), make(views[1])


def host_view(block: Block, dtype: str | None = None) -> np.ndarray:
    """Return the block as an array of numpy. Not collective."""
    # negative strides: the memory begins at the last cell of that dim
    reach = [(n - 1) * s for n, s in zip(block.shape, block.strides)]
    below = sum(r for r in reach if r < 0)
    span = sum(map(abs, reach)) + block.itemsize
    memory = MPI.buffer.fromaddress(block.address + below, span)
    return np.ndarray(block.shape, dtype or f"V{block.itemsize}", memory, -below, block.strides)  # type: ignore[arg-type]


class DeviceMemory:
    """Lets torch view device memory by address, without owning it."""

    def __init__(self, block: Block) -> None:
        self.__cuda_array_interface__ = {
            "data": (block.address, False),
            "shape": block.shape,
            "strides": block.strides,
            "typestr": _TYPESTR[block.itemsize],
            "version": 3,
        }


def is_viewable(block: Block) -> bool:
    """Return whether torch can view the block where it lies. Not collective."""
    return block.itemsize in _TYPESTR and min(block.strides, default=0) >= 0


_TYPESTR = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}


def _torch_view(block: Block) -> torch.Tensor:
    if block.device is not None and block.device.type == "cuda":
        return torch.as_tensor(DeviceMemory(block), device=block.device)
    return torch.from_numpy(host_view(block, _TYPESTR[block.itemsize]))
