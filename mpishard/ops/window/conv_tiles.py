"""Convolutions of large blocks by kernels that unfold their input: tile after tile, as much of it as a cache holds.

Such a kernel copies the input once for every weight of its window, 27 times in three dims, before it multiplies. Of a
tile the copies stay in the cache; of a block they fill memory. A tile is a box of output cells and the input cells that
these read; neighbouring tiles read some of the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.comm.memory.piece import empty_as
from mpishard.layout.stencil import Sliding, Transposed

TILE = 1 << 18  # unfolded values of a tile, for each thread

# stride, padding, dilation, transposed, output padding, groups
Local = tuple[Any, Any, Any, bool, Any, int]


class Side(NamedTuple):
    """A tile along one dim: the output cells that it makes, the input cells that it reads, zeros before and behind."""

    first: int
    made: int
    start: int
    read: int
    before: int
    behind: int


Box = tuple[Side, ...]


class Tiling(NamedTuple):
    """The tiles of one shape.

    Attributes
    ----------
    out
        Extents of the output, of all spatial dims.
    cut
        Dims that are cut.
    boxes
        One a tile.
    local
        Of a tile: nothing is padded along the dims that are cut.
    """

    out: tuple[int, ...]
    cut: tuple[int, ...]
    boxes: tuple[Box, ...]
    local: Local

    def read(self, x: Tensor, box: Box) -> Tensor:
        """Return the input cells that a tile reads, with the padding at its ends. Not collective."""
        pads = [0, 0] * (x.ndim - 2)
        for dim, side in zip(self.cut, box):
            x = x.narrow(dim, side.start, side.read)
            at = 2 * (x.ndim - 1 - dim)
            pads[at : at + 2] = side.before, side.behind
        return torch.constant_pad_nd(x, pads) if any(pads) else x

    def add(self, gx: Tensor, share: Tensor, box: Box) -> None:
        """Add a tile's share to a cotangent of the input: the adjoint of `read`. Not collective."""
        for dim, side in zip(self.cut, box):
            gx, share = gx.narrow(dim, side.start, side.read), share.narrow(dim, side.before, side.read)
        gx.add_(share)

    def made(self, y: Tensor, box: Box) -> Tensor:
        """Return the output cells that a tile makes. Not collective."""
        for dim, side in zip(self.cut, box):
            y = y.narrow(dim, side.first, side.made)
        return y


def slides(kernel: Sequence[int], local: Local) -> list[Sliding]:
    """Return the geometry of each spatial dim of a convolution, as one that is not transposed. Not collective."""
    return [Sliding(k, s, d, p, p) for k, s, p, d in zip(kernel, *local[:3])]


def out_shape(shape: Sequence[int], weight: Sequence[int], local: Local) -> tuple[int, ...]:
    """Return the shape of a convolution, transposed or not. Not collective."""
    stride, padding, dilation, transposed, extra, groups = local
    geometry: Sequence[Sliding | Transposed] = slides(weight[2:], local)
    if transposed:
        geometry = [Transposed(*g) for g in zip(weight[2:], stride, dilation, padding, extra)]
    channels = weight[1] * groups if transposed else weight[0]
    return shape[0], channels, *[g.n_out(n) for g, n in zip(geometry, shape[2:])]


@lru_cache(maxsize=1024)
def tiling(shape: tuple[int, ...], weight: tuple[int, ...], local: Local, most: int) -> Tiling:
    """Cut a convolution into tiles of ``most`` unfolded values, or of one cell. Not collective."""
    stride, padding, dilation, *rest = local
    geometry = slides(weight[2:], local)
    out = [g.n_out(n) for g, n in zip(geometry, shape[2:])]
    inner, cut, sides = list(padding), [], []
    for i, g in enumerate(geometry):
        row = math.prod(weight[1:]) * math.prod(out[i + 1 :])
        count = max(1, min(out[i], most // row))
        cut.append(2 + i)
        inner[i] = 0
        n, along = shape[2 + i], []
        for first in range(0, out[i], count):
            made = min(count, out[i] - first)
            lo, hi = g.window(first, first + made)
            # a whole tile may lie in the padding
            start, end, before = min(max(lo, 0), n), max(min(hi, n), 0), min(max(-lo, 0), hi - lo)
            along.append(Side(first, made, start, end - start, before, hi - lo - before - (end - start)))
        sides.append(along)
        if row <= most:
            break
    boxes: list[Box] = [()]
    for side in sides:
        boxes = [(*box, one) for box in boxes for one in side]
    return Tiling(tuple(out), tuple(cut), tuple(boxes), (stride, tuple(inner), dilation, *rest))  # type: ignore[arg-type]


def _of(x: Tensor, weight: Tensor, local: Local) -> Tiling:
    return tiling(tuple(x.shape), tuple(weight.shape), local, TILE * torch.get_num_threads())


def forward(run: Callable[[Tensor, Local], Tensor], x: Tensor, weight: Tensor, local: Local) -> Tensor:
    """Convolve; ``run`` does a tile. Not collective."""
    tiles, y = _of(x, weight, local), None
    shape = (x.shape[0], weight.shape[0], *tiles.out)
    for box in tiles.boxes:
        own = run(tiles.read(x, box), tiles.local)
        if y is None:
            y = empty_as(own, shape)
        tiles.made(y, box).copy_(own)
    assert y is not None
    return y


def of_data(
    run: Callable[[Tensor, Tensor, Local], Tensor], g: Tensor, x: Tensor, weight: Tensor, local: Local
) -> Tensor:
    """Return the cotangent of the input; ``run`` returns that of a tile, for that of its output. Not collective."""
    tiles, gx = _of(x, weight, local), torch.zeros_like(x)
    for box in tiles.boxes:
        tiles.add(gx, run(tiles.made(g, box), tiles.read(x, box), tiles.local), box)
    return gx


def of_weight(
    run: Callable[[Tensor, Tensor, Local], Tensor], g: Tensor, x: Tensor, weight: Tensor, local: Local
) -> Tensor:
    """Return the cotangent of the weight; ``run`` returns a tile's share of it. Not collective."""
    tiles, total = _of(x, weight, local), None
    for box in tiles.boxes:
        share = run(tiles.made(g, box), tiles.read(x, box), tiles.local)
        total = share if total is None else total.add_(share)
    assert total is not None
    return total
