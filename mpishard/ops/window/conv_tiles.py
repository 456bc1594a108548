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

TILE = 1 << 18  # unfolded values of a tile, for each thread

# stride, padding, dilation, transposed, output padding, groups
Local = tuple[Any, Any, Any, bool, Any, int]
# per dim that is cut, the first output cell, how many, the first input cell and how many, of the input with padding
Box = tuple[tuple[int, int, int, int], ...]


class Tiling(NamedTuple):
    """The tiles of one shape.

    Attributes
    ----------
    cut
        Spatial dims that are cut, each with its padding.
    boxes
        One a tile.
    local
        Of a tile: nothing is padded along the dims that are cut.
    """

    cut: tuple[tuple[int, int], ...]
    boxes: tuple[Box, ...]
    local: Local

    def padded(self, x: Tensor) -> Tensor:
        """Return the input with its padding along the dims that are cut. Not collective."""
        pads = dict(self.cut)
        if not any(pads.values()):
            return x
        both = [p for dim in reversed(range(2, x.ndim)) for p in (pads.get(dim, 0),) * 2]
        return torch.constant_pad_nd(x, both)

    def read(self, x: Tensor, box: Box) -> Tensor:
        """Return the cells of the padded input that a tile reads. Not collective."""
        for (dim, _), (_, _, start, length) in zip(self.cut, box):
            x = x.narrow(dim, start, length)
        return x

    def made(self, y: Tensor, box: Box) -> Tensor:
        """Return the cells of the output that a tile makes. Not collective."""
        for (dim, _), (first, count, _, _) in zip(self.cut, box):
            y = y.narrow(dim, first, count)
        return y


def extents(space: Sequence[int], kernel: Sequence[int], local: Local) -> list[int]:
    """Return the output extents of a convolution that is not transposed. Not collective."""
    sizes = zip(space, kernel, *local[:3])
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]


@lru_cache(maxsize=1024)
def tiling(shape: tuple[int, ...], weight: tuple[int, ...], local: Local, most: int) -> Tiling:
    """Cut a convolution into tiles of ``most`` unfolded values, or of one cell. Not collective."""
    stride, padding, dilation, *rest = local
    out = extents(shape[2:], weight[2:], local)
    inner, cut, sides = list(padding), [], []
    for i in range(len(out)):
        row = math.prod(weight[1:]) * math.prod(out[i + 1 :])
        count = max(1, min(out[i], most // row))
        cut.append((2 + i, padding[i]))
        inner[i] = 0
        reach = dilation[i] * (weight[2 + i] - 1) + 1
        firsts = range(0, out[i], count)
        counts = [min(count, out[i] - first) for first in firsts]
        sides.append([(a, n, a * stride[i], (n - 1) * stride[i] + reach) for a, n in zip(firsts, counts)])
        if row <= most:
            break
    boxes: list[Box] = [()]
    for side in sides:
        boxes = [(*box, one) for box in boxes for one in side]
    return Tiling(tuple(cut), tuple(boxes), (stride, tuple(inner), dilation, *rest))  # type: ignore[arg-type]


def _of(x: Tensor, weight: Tensor, local: Local) -> Tiling:
    return tiling(tuple(x.shape), tuple(weight.shape), local, TILE * torch.get_num_threads())


def forward(run: Callable[[Tensor, Local], Tensor], x: Tensor, weight: Tensor, local: Local) -> Tensor:
    """Convolve; ``run`` does a tile. Not collective."""
    tiles, y = _of(x, weight, local), None
    shape = (x.shape[0], weight.shape[0], *extents(x.shape[2:], weight.shape[2:], local))
    padded = tiles.padded(x)
    for box in tiles.boxes:
        own = run(tiles.read(padded, box), tiles.local)
        if y is None:
            y = empty_as(own, shape)
        tiles.made(y, box).copy_(own)
    assert y is not None
    return y


def of_data(
    run: Callable[[Tensor, Tensor, Local], Tensor], g: Tensor, x: Tensor, weight: Tensor, local: Local
) -> Tensor:
    """Return the cotangent of the input; ``run`` returns that of a tile, for that of its output. Not collective."""
    tiles = _of(x, weight, local)
    padded = tiles.padded(x)
    gx = torch.zeros_like(padded)
    for box in tiles.boxes:
        tiles.read(gx, box).add_(run(tiles.made(g, box), tiles.read(padded, box), tiles.local))
    if padded is x:
        return gx
    for dim, pad in tiles.cut:
        gx = gx.narrow(dim, pad, x.shape[dim])
    return empty_as(x, x.shape).copy_(gx)


def of_weight(
    run: Callable[[Tensor, Tensor, Local], Tensor], g: Tensor, x: Tensor, weight: Tensor, local: Local
) -> Tensor:
    """Return the cotangent of the weight; ``run`` returns a tile's share of it. Not collective."""
    tiles, total = _of(x, weight, local), None
    padded = tiles.padded(x)
    for box in tiles.boxes:
        share = run(tiles.made(g, box), tiles.read(padded, box), tiles.local)
        total = share if total is None else total.add_(share)
    assert total is not None
    return total
