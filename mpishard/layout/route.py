"""Routes: the layouts that a tensor passes through so that each of some dims is whole once. Pure arithmetic, no MPI.

Nothing here is collective.
"""

from __future__ import annotations

import math
from functools import cache
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from mpishard.layout.layout import Layout, layout_of
from mpishard.layout.placement import Placement, Replicate, Shard
from mpishard.layout.remembered import remembered

# per mesh dim the tensor dim that it shards, or WHOLE
Cut = tuple[int, ...]
WHOLE = -1

_UNEVEN = 1.25  # how much larger the largest block may be where a result stays
_MESSAGE_CELLS = 1024  # an exchange, and every message of it, costs about as much as so many cells
_WIDE = 3  # mesh dims from which on not every dim is tried
_OTHERS = 2  # then only so many of the dims that they do not shard, the longest


class Leg(NamedTuple):
    """A layout on the way, the dims that are worked on in it, and the layout of what comes out."""

    before: Layout
    dims: tuple[int, ...]
    after: Layout


class Trip(NamedTuple):
    """What a route has to do.

    Attributes
    ----------
    source, target : Layout
        Of the argument and of the result: the same placements, without a Partial. Extents may differ along ``dims``.
    dims : tuple of int
        Tensor dims to work on, each while it is whole.
    first, last : int or None
        The one of ``dims`` that comes before, or after, all others.
    returns : bool
        Whether the result is brought back to the placements of the source. If not it stays where the last dim was
        worked on, unless its blocks are less even there, or fewer, or along a dim of which neither is true: it was
        sharded, or worked on. (Channels would be gathered for what comes next.)
    """

    source: Layout
    target: Layout
    dims: tuple[int, ...]
    first: int | None = None
    last: int | None = None
    returns: bool = True


def plan_route(trip: Trip) -> tuple[Leg, ...]:
    """Plan the cheapest way there and back.

    Returns
    -------
    tuple of Leg
        Dims that can be worked on in a layout are worked on in it, all together. What comes out of the last leg
        is still to be brought to the target, if the trip returns; else the last leg ends in the result's layout.

    Notes
    -----
    A shortest path over the placements of the mesh dims that shard one of the dims: along each, another dim may be
    cut instead. So one mesh dim takes a transpose and one back; two take both at once where a dim is long enough
    to be cut by both, or one after the other. A dim is gathered only where no other has more than one cell.
    """
    start: Cut = tuple(p.dim if type(p) is Shard else WHOLE for p in trip.source.placements)
    active = [m for m, d in enumerate(start) if d in trip.dims and trip.source.mesh_shape[m] > 1]
    for gather in (False, True):
        choices = [_choices(trip, d, len(active), gather) if m in active else [d] for m, d in enumerate(start)]
        path = _cheapest(trip, start, choices)
        if path is not None:
            break
    assert path is not None
    for searched in (_largest_block, _whole, _blocks):
        searched.cache_clear()
    legs, done = [], frozenset[int]()
    for cut, dims in path:
        before = _layout(trip, done, cut)
        done |= set(dims)
        legs.append(Leg(before, dims, _layout(trip, done, cut)))
    return tuple(legs)


def _choices(trip: Trip, own: int, n_active: int, gather: bool) -> list[int]:
    """Return what a mesh dim may shard instead of ``own``."""
    extents = [max(n, m) for n, m in zip(trip.source.shape, trip.target.shape)]
    others = [d for d in range(len(extents)) if d != own and extents[d] > 1]
    if n_active >= _WIDE:
        free = sorted((d for d in others if d not in trip.source.shard_dims), key=lambda d: -extents[d])[:_OTHERS]
        others = [d for d in others if d in trip.source.shard_dims or d in free]
    return [own, *others, *([WHOLE] if gather else [])]


Path = tuple[tuple[Cut, tuple[int, ...]], ...]


def _cheapest(trip: Trip, start: Cut, choices: list[list[int]]) -> Path | None:
    """Return the placements on the way and the dims worked on in each, or None where there is no way."""
    count = 0
    every = frozenset(trip.dims)
    ready = _ready(trip, frozenset(), start)
    heap: list[tuple[int, int, frozenset[int], Cut, Path]] = [(0, 0, frozenset(ready), start, ((start, ready),))]
    seen: set[tuple[frozenset[int], Cut]] = set()
    while heap:
        cost, _, done, cut, path = heappop(heap)
        if done == every and not trip.returns and (cut == start or _may_stay(trip, start, cut)):
            return path
        if done == every and cut == start:
            # the way back needs no leg of its own
            return path if path[-1][1] or len(path) == 1 else path[:-1]
        if (done, cut) in seen:
            continue
        seen.add((done, cut))
        shape = tuple(b if d in done else a for d, (a, b) in enumerate(zip(trip.source.shape, trip.target.shape)))
        for other in [start] if done == every else product(*choices):
            if other == cut:
                continue
            ready = _ready(trip, done, other)
            if ready or done == every:
                count += 1
                step = _cost(trip, shape, done, cut, other)
                heappush(heap, (cost + step, count, done | set(ready), other, (*path, (other, ready))))
    return None


def _may_stay(trip: Trip, start: Cut, cut: Cut) -> bool:
    """Tell whether the result may stay cut as it is."""
    if not {*cut} <= {*trip.dims, *start}:
        return False
    here, there = (_largest_block(trip.source.mesh_shape, c, trip.target.shape) for c in (cut, start))
    return cut.count(WHOLE) == start.count(WHOLE) and here <= _UNEVEN * there


@cache
def _largest_block(mesh_shape: tuple[int, ...], cut: Cut, shape: tuple[int, ...]) -> int:
    return math.prod(-(-n // _blocks(mesh_shape, cut, d)) for d, n in enumerate(shape))


def _ready(trip: Trip, done: frozenset[int], cut: Cut) -> tuple[int, ...]:
    """Return the dims that can be worked on now."""
    whole = [d for d in _whole(trip.source.mesh_shape, cut, trip.dims) if d not in done]
    if trip.first is not None and trip.first not in done and trip.first not in whole:
        return ()
    if trip.last in whole and len(done) + len(whole) < len(trip.dims):
        whole.remove(trip.last)
    return tuple(whole)


@remembered
def cut_elsewhere(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """Return the layout in which ``dims`` are whole on every rank, all at once, and others are cut in their place.

    Each mesh dim that shards one of them takes the dim that leaves the smallest blocks, of equals the longest; none,
    where no other dim has more than one cell for a rank. ``layout`` has no Partial.
    """
    cut: Cut = tuple(p.dim if type(p) is Shard and p.dim not in dims else WHOLE for p in layout.placements)
    others = sorted((d for d in range(layout.ndim) if d not in dims), key=lambda d: -layout.shape[d])
    for m, p in enumerate(layout.placements):
        if type(p) is Shard and p.dim in dims:
            ways: list[Cut] = [(*cut[:m], d, *cut[m + 1 :]) for d in (WHOLE, *others)]
            cut = min(ways, key=lambda way: _largest_block(layout.mesh_shape, way, layout.shape))
    _largest_block.cache_clear()
    _blocks.cache_clear()
    return layout.with_placements([Replicate() if d == WHOLE else Shard(d) for d in cut])


@cache
def _whole(mesh_shape: tuple[int, ...], cut: Cut, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d for d in dims if _blocks(mesh_shape, cut, d) == 1)


@cache
def _blocks(mesh_shape: tuple[int, ...], cut: Cut, dim: int) -> int:
    return math.prod(n for n, d in zip(mesh_shape, cut) if d == dim)


def _cost(trip: Trip, shape: tuple[int, ...], done: frozenset[int], cut: Cut, other: Cut) -> int:
    """Return what a redistribution costs the busiest rank, in cells."""
    peers = math.prod(n for n, a, b in zip(trip.source.mesh_shape, cut, other) if a != b)
    cells = max(_largest_block(trip.source.mesh_shape, c, shape) for c in (cut, other))
    real = (trip.first is not None and not done) or (trip.last is not None and len(done) == len(trip.dims))
    return (1 if real else 2) * cells * (peers - 1) // peers + _MESSAGE_CELLS * peers


def _layout(trip: Trip, done: frozenset[int], cut: Cut) -> Layout:
    """Return the layout of the tensor on the way; block sizes are those of the source or target where they fit."""
    source, target = trip.source, trip.target
    shape = [b if d in done else a for d, (a, b) in enumerate(zip(source.shape, target.shape))]
    placements: list[Placement] = [Replicate() if d == WHOLE else Shard(d) for d in cut]
    sizes = list(layout_of(source.mesh_shape, placements, shape).sizes)
    for d in range(len(shape)):
        mesh_dims = tuple(m for m, e in enumerate(cut) if e == d)
        for own in (source, target):
            if own.shard_dims.get(d) == mesh_dims and own.shape[d] == shape[d]:
                sizes[d] = own.sizes[d]
                break
    return layout_of(source.mesh_shape, placements, shape, sizes)
