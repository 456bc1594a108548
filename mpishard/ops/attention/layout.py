"""Where queries, keys, values and masks meet: which dim each mesh dim shards, and how causal work is balanced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

from mpishard.autograd.window import Wanted
from mpishard.layout import Alignment, Labels, Layout, Replicate, Run, Runs, align, balanced, bounds, in_full
from mpishard.ops.rule.dim import CACHED

HEADS = 0  # batch dims are numbered from the last one, which holds the heads
# labels that a mesh dim shards together. An operand that has both, a mask, is cut along its rows, its columns whole
SEQUENCE: Labels = ("L", "S")
QUERIES: Labels = ("L",)  # every rank has all keys and values
KEYS: Labels = ("S",)  # every rank has all queries


class Meeting(NamedTuple):
    """How the operands of one attention are laid out.

    Attributes
    ----------
    plan
        Layouts of queries, keys, values and masks, and where each is used.
    out
        Layout of the result.
    ring
        The mesh dims that shard queries, and keys and values, along the sequence.
    keys
        Those that shard keys and values only.
    """

    plan: Alignment
    out: Layout
    ring: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def operands(self) -> tuple[Layout, ...]:
        """Layouts of queries, keys, values and masks."""
        return self.plan.operands


def labels_of(ndims: Sequence[int], masks: int) -> tuple[Labels, ...]:
    """Return the labels of the dims of queries, keys, values and ``masks`` masks. Not collective."""
    ends: list[Labels] = [("L", "E"), ("S", "E"), ("S", "V"), *[("L", "S")] * masks]
    return tuple((*range(n - 3, -1, -1), *end) for n, end in zip(ndims, ends))


@lru_cache(maxsize=CACHED)
def plan_attention(
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
    result: Labels = (*range(len(shape) - 3, -1, -1), "L", "V")
    # features have as many cells in all operands that have them
    extents: dict[Any, int] = {**dict(zip(result[:-1], shape)), "S": layouts[1].shape[-2]}
    shares = [{HEADS: share} for share in (1, *groups, *[1] * (len(layouts) - 3))]
    here = list(map(in_full, layouts, labels, repeat(extents), shares))

    def choose(found: Sequence[Sequence[Any]]) -> list[Labels]:
        at = [_choice(own, labels, here) for own in found]
        instead: Labels = (HEADS,) if by_heads else SEQUENCE
        if few_queries and all(
            type(layouts[0].placements[m]) is Replicate for m, own in enumerate(at) if own is SEQUENCE
        ):
            instead = KEYS
        return [instead if own is SEQUENCE else own for own in at]

    plan = align(layouts, labels, extents, choose, shares)
    keys = tuple(m for m, at in enumerate(plan.cut) if "S" in at)
    only = KEYS in plan.cut
    return Meeting(plan, plan.result(result, shape, Replicate()), () if only else keys, keys if only else ())


def _choice(found: Sequence[Any], labels: Sequence[Labels], here: Sequence[Labels]) -> Labels:
    """Return what a mesh dim shards: that of the queries, or of the first operand that is sharded there."""
    query, key, value, *masks = found
    if query is None:
        query = next((a for a in (key, value, *masks) if isinstance(a, int)), None)
    if isinstance(query, int):
        shared = any(
            query in own and query not in full and a in ("S", "E", "V")
            for own, full, a in zip(labels[1:3], here[1:3], (key, value))
        )
        # keys that all of the batch share are not gathered: the queries move
        return SEQUENCE if shared else (query,)
    if key is not None or value is not None:
        return SEQUENCE
    if query is not None or any(a is not None and "L" in full for a, full in zip(masks, here[3:])):
        return QUERIES
    return ()


class Stretch(NamedTuple):
    """Neighbouring cells of a sequence: where they lie in a block, how many, and their global position."""

    at: int
    count: int  # type: ignore[assignment]
    start: int


Stretches = tuple[Stretch, ...]


def contiguous(layout: Layout, dim: int) -> tuple[Stretches, ...]:
    """Return the cells of every block along ``dim``, one segment each. Not collective."""
    sizes = layout.sizes[dim] or (layout.shape[dim],)
    return tuple((Stretch(0, n, lo),) if n else () for n, lo in zip(sizes, bounds(sizes)))


def mirrored(n: int, count: int) -> tuple[Stretches, ...]:
    """Cut ``n`` cells into ``2 count`` pieces, of which block ``i`` has the ``i``-th from both ends.

    Not collective. Under a causal mask every block has the same work then, in every step of the ring.
    """
    sizes = balanced(n, 2 * count)
    borders = bounds(sizes)
    out = []
    for i in range(count):
        first, last = sizes[i], sizes[2 * count - 1 - i]
        pieces = (Stretch(0, first, borders[i]), Stretch(first, last, borders[2 * count - 1 - i]))
        out.append(tuple(s for s in pieces if s.count))
    return tuple(out)


def sizes_in(blocks: Sequence[Stretches]) -> tuple[int, ...]:
    """Return the extents of blocks. Not collective."""
    return tuple(sum(s.count for s in block) for block in blocks)


def moved_into(blocks: Sequence[Stretches], dim: int) -> Wanted:
    """Return the window that brings the cells of ``dim``, in order, into ``blocks``. Not collective."""
    runs = tuple(tuple(Run(s.at, s.count, s.start, 1) for s in block) for block in blocks)
    return Wanted(dim, runs, sizes_in(blocks))


def moved_back(blocks: Sequence[Stretches], dim: int, sizes: Sequence[int]) -> Wanted:
    """Return the window that brings ``blocks`` back into the order of ``dim``. Not collective."""
    placed = sorted(
        (s.start, s.count, first + s.at) for block, first in zip(blocks, bounds(sizes_in(blocks))) for s in block
    )
    borders = bounds(tuple(sizes))
    windows: list[Runs] = []
    nearest = 0
    for lo, hi in zip(borders[:-1], borders[1:]):
        while nearest < len(placed) and placed[nearest][0] + placed[nearest][1] <= lo:
            nearest += 1
        runs, i = [], nearest
        while i < len(placed) and placed[i][0] < hi:
            start, count, source = placed[i]
            a, b = max(lo, start), min(hi, start + count)
            if b > a:
                runs.append(Run(a - lo, b - a, source + a - start, 1))
            i += 1
        windows.append(tuple(runs))
    return Wanted(dim, tuple(windows), tuple(sizes))
