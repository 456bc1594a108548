"""Checksums of tensors by global tile: the same numbers whatever the mesh, and cheap to add up over ranks.

A tile is a run of the whole tensor in row-major order. Its checksum is the sum over its words of word times key,
modulo 2**64, where the keys are odd and depend on the position in the tile: one changed word always changes the
sum, and the parts of a tile that different ranks hold just add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from mpishard.comm.memory.buffer import dense
from mpishard.layout import Layout, layout_of
from mpishard.tensor.stream import mixed, runs

TILE = 1 << 20  # words
_SEED = 0x6D70697368617264
_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_RUN = 1 << 12  # shorter runs are taken many at once, by their indices
_STEP = 1 << 17


@lru_cache(maxsize=4)
def _keys(device: torch.device) -> Tensor:
    """Return one odd number per position in a tile. Not collective."""
    position = torch.arange(TILE, device="cpu").add_(1).mul_(-7046029254386353131).add_(_SEED)
    return (mixed(position) | 1).to(device)


def tile_count(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the number of tiles of a whole tensor. Not collective."""
    return -(-math.prod(shape) * _words(dtype) // TILE)


def _words(dtype: torch.dtype) -> int:
    """Return how many words a cell has: of 32 bits, so that each bit of one meets many random bits of its key."""
    return max(1, dtype.itemsize // 4)


def tile_sums(
    local: Tensor, layout: Layout, coords: tuple[int, ...], pause: Callable[[], object] = lambda: None
) -> Tensor:
    """Return this block's share of the checksum of every tile of the whole, as int64 in host memory.

    Not collective: the checksums are the sums over the ranks that together hold the tensor once. ``pause`` is called
    now and then.
    """
    out = torch.zeros(tile_count(layout.shape, local.dtype), dtype=torch.int64, device="cpu")
    flat = dense(local.detach()).view(-1)
    if flat.dtype is torch.bool:
        flat = flat.view(torch.uint8).clamp(max=1)  # as they are read
    words = _words(flat.dtype)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    flat = flat.view(_WORD[min(4, flat.itemsize)])
    if words > 1:  # one more dim
        layout = layout_of(layout.mesh_shape, layout.placements, (*layout.shape, words), (*layout.sizes, None))
    keys = _keys(flat.device)
    for at, n, start in _long_runs(layout, coords):
        done = 0
        while done < n:
            tile, lo = divmod(start + done, TILE)
            m = min(n - done, TILE - lo, _STEP)
            out[tile] += _dot(flat[at + done : at + done + m], keys[lo : lo + m])
            done += m
            pause()
        if at + n == flat.numel():
            return out
    for at, index, start in runs(layout, coords):
        pause()
        n = index.numel()
        position = (index + start).to(flat.device)
        terms = keys[position & (TILE - 1)].mul_(flat[at : at + n])
        last = start + int(index[-1])
        if start // TILE == last // TILE:
            out[start // TILE] += terms.sum().cpu()
        else:
            out.index_add_(0, (position // TILE).cpu(), terms.cpu())
    return out


def _dot(part: Tensor, keys: Tensor) -> Tensor:
    wide = part.to(torch.int64)
    return torch.dot(wide, keys) if wide.is_cpu else wide.mul_(keys).sum().cpu()


def _long_runs(layout: Layout, coords: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (position in the flat block, cells, position in the whole) of runs, unless they are short."""
    box = layout.box(coords)
    local = [hi - lo for lo, hi in box]
    split = layout.ndim
    while split and (split == layout.ndim or local[split] == layout.shape[split]):
        split -= 1
    n = math.prod(local[split:])
    if n < _RUN and split:
        return
    strides = [math.prod(layout.shape[d + 1 :]) for d in range(layout.ndim)]
    first = sum(lo * s for (lo, _), s in zip(box, strides))
    for i, outer in enumerate(product(*map(range, local[:split]))):
        yield i * n, n, first + sum(o * s for o, s in zip(outer, strides))


def to_text(sums: Tensor) -> str:
    """Return checksums as 16 hexadecimal digits each. Not collective."""
    return "".join(f"{s & (1 << 64) - 1:016x}" for s in sums.tolist())


def wrong_tile(sums: Tensor, text: str, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Return which tile is not what ``text`` says, in words, or None. Not collective."""
    wrong = _wrong(sums, text)
    if wrong is None:
        return None
    if not wrong:
        return f"{len(text) // 16} tiles of which {len(sums)} are there"
    first, last = cells_of(wrong[0], shape, dtype)
    ends = [tuple(map(int, np.unravel_index(i, shape))) for i in (first, last)] if shape else ["()", "()"]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"tile {wrong[0]} of {len(sums)}, cells {ends[0]} to {ends[1]}{more}"


def first_wrong_cells(sums: Tensor, text: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int] | None:
    """Return the first and the last cell, in row-major order, of the first wrong tile. Not collective."""
    wrong = _wrong(sums, text)
    return cells_of(wrong[0], shape, dtype) if wrong else None


def _wrong(sums: Tensor, text: str) -> list[int] | None:
    """Return the tiles that are not what ``text`` says; None where all are, none of them where their number is not."""
    found = to_text(sums)
    if found == text:
        return None
    if len(found) != len(text):
        return []
    return [t for t in range(len(sums)) if found[16 * t : 16 * t + 16] != text[16 * t : 16 * t + 16]]


def cells_of(tile: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Return the first and the last cell of a tile, in row-major order. Not collective."""
    step = TILE // _words(dtype)
    return tile * step, min((tile + 1) * step, math.prod(shape)) - 1
