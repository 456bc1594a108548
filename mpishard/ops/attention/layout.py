"""Where queries, keys, values and masks meet: which dim each mesh dim shards, and how causal work is balanced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from mpishard.autograd.window import Wanted
from mpishard.layout import Layout, Placement, Replicate, Run, Runs, Shard, balanced, bounds, layout_of
from mpishard.ops.rule.contraction import Label, Labels
from mpishard.ops.rule.dim import CACHED

HEADS = 0  # batch dims are numbered from the last one, which holds the heads
SEQUENCE = "sequence"  # a mesh dim that shards queries, and keys and values with them
QUERIES = "queries"  # one that shards queries only: every rank has all keys and values
KEYS = "keys"  # one that shards keys and values only: every rank has all queries


class Meeting(NamedTuple):
    """How the operands of one attention are laid out.

    Attributes
    ----------
    operands
        Layouts of queries, keys, values and masks.
    used
        Per operand, the mesh dims over which every rank uses the same values.
    out
        Layout of the result.
    ring
        The mesh dims that shard queries, and keys and values, along the sequence.
    keys
        Those that shard keys and values only.
    """

    operands: tuple[Layout, ...]
    used: tuple[tuple[int, ...], ...]
    out: Layout
    ring: tuple[int, ...]
    keys: tuple[int, ...]


def labels_of(ndims: Sequence[int], masks: int) -> tuple[Labels, ...]:
    """Return the labels of the dims of queries, keys, values and ``masks`` masks. Not collective."""
    ends: list[Labels] = [("L", "E"), ("S", "E"), ("S", "V"), *[("L", "S")] * masks]
    return tuple((*range(n - 3, -1, -1), *end) for n, end in zip(ndims, ends))


def _is_full(layout: Layout, dim: int, label: Label, shape: tuple[int, ...], keys: int, group: int) -> bool:
    """Whether an operand has a dim whole, not one cell that broadcasts. ``shape``: of the scores."""
    if label == "L":
        return layout.shape[dim] == shape[-2]
    if label == "S":
        return layout.shape[dim] == keys
    if isinstance(label, int):
        return layout.shape[dim] * (group if label == HEADS else 1) == shape[-3 - label]
    return True


@lru_cache(maxsize=CACHED)
def plan_meeting(
    layouts: tuple[Layout, ...],
    shape: tuple[int, ...],
    groups: tuple[int, int],
    *,
    by_heads: bool = False,
    few_queries: bool = False,
) -> Meeting:
    """Plan where the operands meet.

    Not collective.

    Parameters
    ----------
    layouts
        Of queries, keys, values and masks; none is Partial.
    shape
        Of the result.
    groups
        Heads of the queries per head of the keys, and per head of the values.
    by_heads
        Whether mesh dims that would shard the sequence of keys shard the heads instead.
    few_queries
        Whether mesh dims along which all ranks have the queries shard keys and values only.
    """
    labels = labels_of([o.ndim for o in layouts], len(layouts) - 3)
    keys = layouts[1].shape[-2]
    shares = (1, *groups, *[1] * (len(layouts) - 3))
    full = [
        [_is_full(o, d, label, shape, keys, share) for d, label in enumerate(own)]
        for o, own, share in zip(layouts, labels, shares)
    ]
    at = [_label(m, layouts, labels, full) for m in range(len(layouts[0].mesh_shape))]
    along = [m for m, label in enumerate(at) if label == SEQUENCE]
    instead: Label = HEADS if by_heads else SEQUENCE
    if few_queries and all(type(layouts[0].placements[m]) is Replicate for m in along):
        instead = KEYS
    at = [instead if label == SEQUENCE else label for label in at]
    dims: dict[Label, tuple[int, ...]] = {}
    for m, label in enumerate(at):
        for own in {SEQUENCE: ("L", "S"), QUERIES: ("L",), KEYS: ("S",), None: ()}.get(label, (label,)):  # type: ignore[call-overload]
            dims[own] = (*dims.get(own, ()), m)
    sizes: dict[Label, tuple[int, ...]] = {}
    for o, own, share, whole in zip(layouts, labels, shares, full):
        for dim, mesh_dims in o.shard_dims.items():
            cut = o.sizes[dim]
            if dims.get(own[dim]) == mesh_dims and whole[dim] and cut is not None:
                sizes.setdefault(own[dim], tuple(n * share for n in cut) if own[dim] == HEADS else cut)
    mesh_shape = layouts[0].mesh_shape
    unit = math.lcm(*groups)
    if unit > 1 and HEADS in dims and any(n % unit for n in sizes.get(HEADS, (1,))):
        count = math.prod(mesh_shape[m] for m in dims[HEADS])
        sizes[HEADS] = tuple(n * unit for n in balanced(shape[-3] // unit, count))
    operands, used = [], []
    for o, own, share, whole in zip(layouts, labels, shares, full):
        placements: list[Placement] = [Replicate()] * len(mesh_shape)
        cuts: list[tuple[int, ...] | None] = [None] * o.ndim
        for d, label in enumerate(own):
            # the columns of a mask stay whole where its rows are cut
            if label in dims and whole[d] and (label != "S" or "L" not in own or instead == KEYS):
                for m in dims[label]:
                    placements[m] = Shard(d)
                cut = sizes.get(label)
                cuts[d] = tuple(n // share for n in cut) if cut is not None and label == HEADS else cut
        operands.append(layout_of(mesh_shape, placements, o.shape, cuts))
        used.append(tuple(m for m, a in enumerate(at) if a is not None and type(placements[m]) is Replicate))
    result: Labels = (*range(len(shape) - 3, -1, -1), "L", "V")
    out_placements: list[Placement] = [Replicate()] * len(mesh_shape)
    for d, label in enumerate(result):
        for m in dims.get(label, ()):
            out_placements[m] = Shard(d)
    out = layout_of(mesh_shape, out_placements, shape, [sizes.get(label) for label in result])
    keys_dims = dims.get("S", ())
    ring, only = ((), keys_dims) if instead == KEYS else (keys_dims, ())
    return Meeting(tuple(operands), tuple(used), out, ring, only)


def _label(m: int, layouts: Sequence[Layout], labels: Sequence[Labels], full: Sequence[Sequence[bool]]) -> Label | None:
    """Return what mesh dim ``m`` shards: that of the queries, or of the first operand that is sharded there."""
    found: list[Label | None] = []
    for layout, own, whole in zip(layouts, labels, full):
        p = layout.placements[m]
        # one cell that broadcasts is gathered
        found.append(own[p.dim] if type(p) is Shard and whole[p.dim] else None)
    query, key, value, *masks = found
    if query is None:
        query = next((a for a in (key, value, *masks) if isinstance(a, int)), None)
    if isinstance(query, int):
        shared = any(
            query in own and not whole[own.index(query)] and a in ("S", "E", "V")
            for own, whole, a in zip(labels[1:3], full[1:3], (key, value))
        )
        # keys that all of the batch share are not gathered: the queries move
        return SEQUENCE if shared else query
    if key is not None or value is not None:
        return SEQUENCE
    if query is not None or any(a is not None and own_rows[-2] for a, own_rows in zip(masks, full[3:])):
        return QUERIES
    return None


class Segment(NamedTuple):
    """Neighbouring cells of a sequence: where they lie in a block, how many, and their global position."""

    at: int
    count: int  # type: ignore[assignment]
    start: int


Segments = tuple[Segment, ...]


def contiguous(layout: Layout, dim: int) -> tuple[Segments, ...]:
    """Return the cells of every block along ``dim``, one segment each. Not collective."""
    sizes = layout.sizes[dim] or (layout.shape[dim],)
    return tuple((Segment(0, n, lo),) if n else () for n, lo in zip(sizes, bounds(sizes)))


def mirrored(n: int, count: int) -> tuple[Segments, ...]:
    """Cut ``n`` cells into ``2 count`` pieces, of which block ``i`` has the ``i``-th from both ends.

    Not collective. Under a causal mask every block has the same work then, in every step of the ring.
    """
    sizes = balanced(n, 2 * count)
    borders = bounds(sizes)
    out = []
    for i in range(count):
        first, last = sizes[i], sizes[2 * count - 1 - i]
        pieces = (Segment(0, first, borders[i]), Segment(first, last, borders[2 * count - 1 - i]))
        out.append(tuple(s for s in pieces if s.count))
    return tuple(out)


def sizes_in(blocks: Sequence[Segments]) -> tuple[int, ...]:
    """Return the extents of blocks. Not collective."""
    return tuple(sum(s.count for s in block) for block in blocks)


def moved_into(blocks: Sequence[Segments], dim: int) -> Wanted:
    """Return the window that brings the cells of ``dim``, in order, into ``blocks``. Not collective."""
    runs = tuple(tuple(Run(s.at, s.count, s.start, 1) for s in block) for block in blocks)
    return Wanted(dim, runs, sizes_in(blocks))


def moved_back(blocks: Sequence[Segments], dim: int, sizes: Sequence[int]) -> Wanted:
    """Return the window that brings ``blocks`` back into the order of ``dim``. Not collective."""
    placed = sorted(
        (s.start, s.count, first + s.at) for block, first in zip(blocks, bounds(sizes_in(blocks))) for s in block
    )
    borders = bounds(tuple(sizes))
    windows: list[Runs] = []
    for lo, hi in zip(borders[:-1], borders[1:]):
        runs = []
        for start, count, source in placed:
            a, b = max(lo, start), min(hi, start + count)
            if b > a:
                runs.append(Run(a - lo, b - a, source + a - start, 1))
        windows.append(tuple(runs))
    return Wanted(dim, tuple(windows), tuple(sizes))
