"""Strided boxes of memory, and how cells are copied between two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

# A contiguous run this short is copied as one element: numpy's and torch's inner loops over it cost more.
_RUN_NBYTES = 128


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

    @property
    def is_apart(self) -> bool:
        """Whether no two cells share memory: each dim steps over all cells of those with smaller steps."""
        reach = self.itemsize
        for step, n in sorted((abs(s), n) for s, n in zip(self.strides, self.shape) if n > 1):
            if step < reach and self.nbytes:
                return False
            reach += (n - 1) * step
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
