"""Where queries, keys, values and masks meet: which dim each mesh dim shards, and how causal work is balanced."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from mpishard.autograd.window import Wanted
from mpishard.layout import (
    Alignment,
    Each,
    Labels,
    Layout,
    Replicate,
    Run,
    Runs,
    align,
    balanced,
    bounds,
    in_full,
    repeated,
)
from mpishard.layout.remembered import remembered

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


@remembered
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


class SequenceBlocks(Sequence[Stretches]):
    """The cells of a sequence that each of many blocks has, computed when they are asked for.

    A block is one piece of the sequence; or, mirrored, of ``2 p`` pieces block ``i`` has the ``i``-th from both ends.

    Attributes
    ----------
    sizes : tuple of int
        Extents of the blocks.
    mirrored : bool
        Whether a block is two pieces.
    """

    def __init__(self, pieces: Sequence[int], sizes: tuple[int, ...], *, mirrored: bool) -> None:
        self._borders = bounds(pieces)
        self.sizes, self.mirrored = sizes, mirrored

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(len(self))[i]]
        if not 0 <= i < len(self):
            raise IndexError("no such block")
        out, at = [], 0
        for piece in (i, self._mirror(i)) if self.mirrored else (i,):
            start, stop = self._borders[piece : piece + 2]
            if start < stop:
                out.append(Stretch(at, stop - start, start))
            at += stop - start
        return tuple(out)

    def start(self, block: int) -> int:
        """Return the first cell of a block's first piece; of the block after the last, that of what follows."""
        return self._borders[block] if block < len(self) else self._borders[-1]

    def _mirror(self, piece: int) -> int:
        return 2 * len(self) - 1 - piece

    def parts(self, lo: int, hi: int) -> Iterator[tuple[int, Stretch]]:
        """Give, in order, the blocks that have cells of ``[lo, hi)``, and where these lie in them. Not collective."""
        b = self._borders
        for piece in range(bisect_right(b, lo) - 1, min(bisect_left(b, hi), len(b) - 1)) if lo < hi else ():
            start, stop = max(lo, b[piece]), min(hi, b[piece + 1])
            if start < stop:
                second = self.mirrored and piece >= len(self)
                block = self._mirror(piece) if second else piece
                before = b[block + 1] - b[block] if second else 0
                yield block, Stretch(before + start - b[piece], stop - start, start)


def contiguous(layout: Layout, dim: int) -> SequenceBlocks:
    """Return the cells of every block along ``dim``, one piece each. Not collective."""
    sizes = layout.sizes[dim] or (layout.shape[dim],)
    return SequenceBlocks(sizes, sizes, mirrored=False)


def mirrored(n: int, count: int) -> SequenceBlocks:
    """Cut ``n`` cells into ``2 count`` pieces, of which block ``i`` has the ``i``-th from both ends.

    Not collective. Under a causal mask every block has the same work then, in every step of the ring.
    """
    base, rest = divmod(n, 2 * count)
    # the first pieces have one cell more: one of a block's, both of the last blocks' or none
    one = min(rest, 2 * count - rest)
    sizes = repeated(((2 * base + 1, one), (2 * base + 2 * (rest > count), count - one)))
    return SequenceBlocks(balanced(n, 2 * count), sizes, mirrored=True)


def moved_into(blocks: SequenceBlocks, dim: int) -> Wanted:
    """Return the window that brings the cells of ``dim``, in order, into ``blocks``. Not collective."""
    runs = Each(len(blocks), lambda i: tuple(Run(s.at, s.count, s.start, 1) for s in blocks[i]))
    return Wanted(dim, runs, blocks.sizes, lambda lo, hi: sorted({i for i, _ in blocks.parts(lo, hi)}))


def moved_back(blocks: SequenceBlocks, dim: int, sizes: Sequence[int]) -> Wanted:
    """Return the window that brings ``blocks`` back into the order of ``dim``. Not collective."""
    held, borders = bounds(blocks.sizes), bounds(sizes)

    def window(i: int) -> Runs:
        lo, hi = borders[i], borders[i + 1]
        return tuple(Run(s.start - lo, s.count, held[block] + s.at, 1) for block, s in blocks.parts(lo, hi))

    def near(lo: int, hi: int) -> list[int]:
        found: set[int] = set()
        for block in range(bisect_right(held, lo) - 1, bisect_left(held, hi)) if lo < hi else ():
            for s in blocks[block]:
                found.update(range(bisect_right(borders, s.start) - 1, bisect_left(borders, s.start + s.count)))
        return sorted(found)

    return Wanted(dim, Each(len(sizes), window), sizes, near)
