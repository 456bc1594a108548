"""Segment tables: which cells of a strided array lie where in a packed buffer, for one copy kernel.

One launch moves every box of every message of every field. Pure arithmetic: neither torch nor MPI.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, product
from typing import NamedTuple

NDIM = 4  # dims of a segment after merging
UNITS = (16, 8, 4, 2, 1)  # bytes that one thread moves at a time, the widest that fits
TILE = 1024  # units that one block of threads moves
_MOST_UNITS = 1 << 30  # of a segment: the kernel counts in 32 bits


class Box(NamedTuple):
    """Cells of a strided array and their place in the packed buffer, all in bytes.

    The packed cells lie dense, last dim fastest. Strides may be negative (a flip) or zero.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    packed: int


class Segment(NamedTuple):
    """A box in the terms of the kernel: counts in units, slowest dim first, and byte strides."""

    offset: int
    packed: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def units(self) -> int:
        """Units in it."""
        return math.prod(self.counts)


class Table(NamedTuple):
    """The segments of one launch.

    Attributes
    ----------
    unit : int
        Bytes that a thread moves at a time.
    segments : tuple of Segment
    first_tiles : tuple of int
        The first tile of every segment, and the number of all tiles.
    """

    unit: int
    segments: tuple[Segment, ...]
    first_tiles: tuple[int, ...]

    def rows(self) -> list[tuple[int, ...]]:
        """Return one row of 64-bit integers per segment, as the kernel reads them. Not collective."""
        return [
            (s.offset, s.packed, s.units, first, *s.counts[1:], *s.strides)
            for s, first in zip(self.segments, self.first_tiles)
        ]


def plan_table(boxes: Iterable[Box], alignment: int = 16) -> Table:
    """Plan one launch that copies ``boxes``.

    Not collective.

    Parameters
    ----------
    boxes
        In any order; their packed cells do not overlap.
    alignment
        A power of two that divides the address of the strided array.

    Returns
    -------
    Table

    Examples
    --------
    >>> plan_table([Box(0, (2, 8), (64, 4), 4, 0)]).segments
    (Segment(offset=0, packed=0, counts=(1, 1, 2, 2), strides=(0, 0, 64, 16)),)
    """
    merged = [_merged(b) for b in boxes if math.prod(b.shape)]
    unit = min((_unit(b, alignment) for b in merged), default=UNITS[0])
    segments = tuple(s for b in merged for s in _segments(b, unit))
    tiles = accumulate((-(-s.units // TILE) for s in segments), initial=0)
    return Table(unit, segments, tuple(tiles))


def addresses(table: Table) -> Iterator[tuple[int, int]]:
    """Yield (offset, packed offset) of every unit as the kernel computes them. Not collective."""
    for tile in range(table.first_tiles[-1]):
        k = bisect_right(table.first_tiles, tile) - 1
        segment = table.segments[k]
        first = (tile - table.first_tiles[k]) * TILE
        for i in range(first, min(first + TILE, segment.units)):
            rest, at = i, segment.offset
            for n, stride in zip(segment.counts[:0:-1], segment.strides[:0:-1]):
                rest, place = divmod(rest, n)
                at += place * stride
            yield at + rest * segment.strides[0], segment.packed + i * table.unit


def _merged(box: Box) -> Box:
    """Join dims that one stride walks through; a contiguous run stays the last dim, of bytes that follow."""
    shape: list[int] = []
    strides: list[int] = []
    for n, stride in zip(box.shape, box.strides):
        if n == 1:
            continue
        if shape and strides[-1] == n * stride:
            shape[-1] *= n
            strides[-1] = stride
        else:
            shape.append(n)
            strides.append(stride)
    return box._replace(shape=tuple(shape) or (1,), strides=tuple(strides) or (box.itemsize,))


def _unit(box: Box, alignment: int) -> int:
    """Return the widest unit that moves a merged box: cells, or more of a contiguous run."""
    run = box.shape[-1] * box.itemsize if box.strides[-1] == box.itemsize else box.itemsize
    outer = box.strides if run == box.itemsize else box.strides[:-1]
    divisor = math.gcd(run, box.offset, box.packed, alignment, *outer)
    return next(u for u in UNITS if divisor % u == 0)


def _segments(box: Box, unit: int) -> Iterator[Segment]:
    """Yield a merged box in units, cut where the kernel has too few dims or its counters too few bits."""
    shape, strides = box.shape, box.strides
    if strides[-1] == box.itemsize:
        shape, strides = (*shape[:-1], shape[-1] * box.itemsize // unit), (*strides[:-1], unit)
    elif unit < box.itemsize:
        # cells wider than a unit are one more dim
        shape, strides = (*shape, box.itemsize // unit), (*strides, unit)
    pad = max(0, NDIM - len(shape))
    outer, outer_strides = shape[:-NDIM], strides[:-NDIM]
    counts, steps = (1,) * pad + shape[-NDIM:], (0,) * pad + strides[-NDIM:]
    units = math.prod(counts)
    for k, place in enumerate(product(*map(range, outer))):
        offset = box.offset + sum(i * s for i, s in zip(place, outer_strides))
        yield from _cut(Segment(offset, box.packed + k * units * unit, counts, steps), unit)


def _cut(segment: Segment, unit: int) -> Iterator[Segment]:
    if segment.units <= _MOST_UNITS:
        yield segment
        return
    dim = next(d for d, n in enumerate(segment.counts) if n > 1)
    n, inner = segment.counts[dim], math.prod(segment.counts[dim + 1 :])
    for start, stop in ((0, n // 2), (n // 2, n)):
        counts = (*segment.counts[:dim], stop - start, *segment.counts[dim + 1 :])
        part = Segment(
            segment.offset + start * segment.strides[dim],
            segment.packed + start * inner * unit,
            counts,
            segment.strides,
        )
        yield from _cut(part, unit)
