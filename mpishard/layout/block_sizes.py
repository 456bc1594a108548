"""Block sizes of thousands of ranks as a few runs of equal ones: tuples of integers that are computed when asked.

Nothing here is collective.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, pairwise, repeat
from operator import ne, sub
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from mpishard.layout.remembered import remembered

T_co = TypeVar("T_co", covariant=True)

FEW = 16  # so many numbers are kept one by one
_WORTH = 8  # entries per run from which on runs are kept

# (what is repeated, how often), neighbours differ
Repeats = tuple[tuple[int, int], ...]

if TYPE_CHECKING:
    _Integers = tuple[int, ...]
else:
    _Integers = Sequence


class _Computed(_Integers):
    """What stands for a tuple of integers: equal to it, hashed as it, printed in short."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            self._hash = hash(tuple(self))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, (tuple, _Computed)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    def __add__(self, other: Any) -> tuple[int, ...]:
        return tuple(self) + tuple(other)

    def __radd__(self, other: Any) -> tuple[int, ...]:
        return tuple(other) + tuple(self)

    def __mul__(self, times: Any) -> tuple[int, ...]:
        return tuple(self) * int(times)


class BlockSizes(_Computed):
    """Block sizes along a dim, kept as runs of equal ones.

    It stands for the tuple of the sizes: equal to it, hashed as it, and indexed, cut and looped over as it. Made by
    `as_block_sizes`, which keeps few or uneven ones as the tuple itself; so the same sizes are kept in one way.

    Attributes
    ----------
    runs : tuple of (int, int)
        Size and number of the blocks of each run.
    """

    __slots__ = ("_cells", "_firsts", "_starts", "runs")
    runs: Repeats

    def __init__(self, runs: Repeats) -> None:
        self.runs = runs
        # of every run, its first block and cell
        self._firsts = (0, *accumulate(k for _, k in runs))
        self._starts = (0, *accumulate(s * k for s, k in runs))

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockSizes, (self.runs,)

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            at = range(len(self))[i]
            if at.step != 1:
                return tuple(self[k] for k in at)
            runs = zip(self.runs, self._firsts)
            return repeated((s, min(at.stop, block + k) - max(at.start, block)) for (s, k), block in runs)
        if not -len(self) <= i < len(self):
            raise IndexError("no such block")
        return self.runs[bisect_right(self._firsts, i % len(self)) - 1][0]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(s, k) for s, k in self.runs)

    def __contains__(self, size: object) -> bool:
        return any(s == size for s, _ in self.runs)

    def __eq__(self, other: object) -> bool:
        return self.runs == other.runs if isinstance(other, BlockSizes) else super().__eq__(other)

    __hash__ = _Computed.__hash__

    def __repr__(self) -> str:
        return " + ".join(f"({s},) * {k}" for s, k in self.runs)

    @property
    def smallest(self) -> int:
        """The size of the smallest block."""
        return min(self.runs)[0]

    @property
    def largest(self) -> int:
        """The size of the largest block."""
        return max(self.runs)[0]

    @property
    def total(self) -> int:
        """Cells of all blocks."""
        return self._starts[-1]

    @property
    def borders(self) -> Borders:
        """The borders between the blocks."""
        return Borders(self)

    def start(self, block: int) -> int:
        """Return the first cell of a block, or, of the block after the last, the number of cells."""
        i = bisect_right(self._firsts, block) - 1
        return self._starts[i] + (block - self._firsts[i]) * self.runs[i][0] if i < len(self.runs) else self._starts[-1]


class Borders(_Computed):
    """The borders of blocks: as many as there are blocks, and one."""

    __slots__ = ("sizes",)
    sizes: BlockSizes

    def __init__(self, sizes: BlockSizes) -> None:
        self.sizes = sizes

    def __reduce__(self) -> tuple[Any, ...]:
        return Borders, (self.sizes,)

    def __len__(self) -> int:
        return len(self.sizes) + 1

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            at = range(len(self))[i]
            return tuple(self._between(at.start, at.stop) if at.step == 1 else (self[k] for k in at))
        count = len(self)
        if not -count <= i < count:
            raise IndexError("no such border")
        return self.sizes.start(i % count)

    def __iter__(self) -> Iterator[int]:
        return self._between(0, len(self))

    def _between(self, first: int, stop: int) -> Iterator[int]:
        """Give the borders from one to before another, run by run."""
        sizes = self.sizes
        parts: list[Iterable[int]] = []
        for (size, count), block, cell in zip(sizes.runs, sizes._firsts, sizes._starts):
            lo, hi = max(first, block) - block, min(stop, block + count) - block
            if lo < hi:
                parts.append(range(cell + lo * size, cell + hi * size, size) if size else repeat(cell, hi - lo))
        if first <= len(sizes) < stop:
            parts.append((sizes.total,))
        return chain.from_iterable(parts)

    def __repr__(self) -> str:
        return f"borders of {self.sizes}"


def as_block_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return block sizes as they are kept: a tuple, or what stands for it."""
    # not isinstance, here and below: of a Sequence it takes five times as long
    if type(sizes) is BlockSizes:
        return sizes
    sizes = tuple(sizes)
    if len(sizes) <= FEW:
        return sizes
    if (1 + sum(map(ne, sizes, sizes[1:]))) * _WORTH > len(sizes):
        return sizes
    return BlockSizes(runs_of(sizes))


def repeated(runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the block sizes of runs, as they are kept; runs may be empty, and neighbours alike."""
    joined = []
    for size, some in groupby((run for run in runs if run[1] > 0), key=lambda run: run[0]):
        joined.append((size, sum(k for _, k in some)))
    count = sum(k for _, k in joined)
    if count > FEW and len(joined) * _WORTH <= count:
        return BlockSizes(tuple(joined))
    return tuple(chain.from_iterable(repeat(s, k) for s, k in joined))


def runs_of(sizes: Sequence[int]) -> Repeats:
    """Return the runs of block sizes, however they are kept."""
    if type(sizes) is BlockSizes:
        return sizes.runs
    if len(sizes) <= FEW:
        return tuple((s, len(list(same))) for s, same in groupby(sizes))
    each = np.array(sizes)
    firsts = np.flatnonzero(np.diff(each, prepend=each[0] - 1))
    counts = np.diff(firsts, append=len(each))
    return tuple(zip(each[firsts].tolist(), counts.tolist()))


def sole(sizes: Sequence[int]) -> int | None:
    """Return the one block that has cells, where the others have none; else None."""
    if type(sizes) is not BlockSizes:
        # of long ones that are not runs, several have
        return next(i for i, s in enumerate(sizes) if s) if len(sizes) <= FEW and sum(map(bool, sizes)) == 1 else None
    with_cells = [i for i, (s, _) in enumerate(sizes.runs) if s]
    single = len(with_cells) == 1 and sizes.runs[with_cells[0]][1] == 1
    return sizes._firsts[with_cells[0]] if single else None


def stretches(sizes: Sequence[int], first: int, stop: int) -> Iterator[tuple[int, range]]:
    """Give the blocks from ``first`` to before ``stop`` that have cells: the number of each, and its cells."""
    if type(sizes) is not BlockSizes:
        for i, (p, q) in enumerate(pairwise(bounds(sizes)[first : stop + 1]), first):
            if p < q:
                yield i, range(p, q)
        return
    for (size, count), block, cell in zip(sizes.runs, sizes._firsts, sizes._starts):
        for i in range(max(first, block), min(stop, block + count)) if size else ():
            start = cell + (i - block) * size
            yield i, range(start, start + size)


def count_with_cells(sizes: Sequence[int], first: int, stop: int) -> int:
    """Return how many blocks from ``first`` to before ``stop`` have cells."""
    if type(sizes) is not BlockSizes:
        return sum(map(bool, sizes[first:stop]))
    runs = zip(sizes.runs, sizes._firsts)
    return sum(max(0, min(stop, block + count) - max(first, block)) for (size, count), block in runs if size)


def joined(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the sizes of groups of ``count`` neighbours each.

    Examples
    --------
    >>> joined((3, 0, 2, 2), 2)
    (3, 4)
    """
    if type(sizes) is not BlockSizes:
        return tuple(sum(sizes[i : i + count]) for i in range(0, len(sizes), count))
    found, block = [], 0
    for (size, _), stop in zip(sizes.runs, sizes._firsts[1:]):
        if stop - block >= count:
            found.append((size * count, (stop - block) // count))
            block += (stop - block) // count * count
        if block < stop:
            # a group that several runs share
            found.append((sizes.start(block + count) - sizes.start(block), 1))
            block += count
    return repeated(found)


def total(sizes: Sequence[int]) -> int:
    """Return the cells of all blocks."""
    return sizes.total if type(sizes) is BlockSizes else sum(sizes)


def largest(sizes: Sequence[int]) -> int:
    """Return the cells of the largest block."""
    return sizes.largest if isinstance(sizes, BlockSizes) else max(sizes)


def key_of(sizes: Sequence[int] | None) -> Any:
    """Return what tells block sizes apart, however they are kept, and is hashed in no time."""
    return sizes.runs if type(sizes) is BlockSizes else sizes


def are_equal(sizes: Sequence[int]) -> bool:
    """Tell whether all blocks have the same size."""
    return len(sizes.runs) == 1 if type(sizes) is BlockSizes else sizes.count(sizes[0]) == len(sizes)


def bounds(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the ``len(sizes) + 1`` block borders.

    Examples
    --------
    >>> bounds((3, 0, 2))
    (0, 3, 3, 5)
    """
    return sizes.borders if type(sizes) is BlockSizes else _bounds(tuple(sizes))


@remembered
def _bounds(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *accumulate(sizes))


def sizes_of(borders: Sequence[int]) -> tuple[int, ...]:
    """Return the block sizes between ``borders``: the inverse of `bounds`."""
    if isinstance(borders, Borders):
        return borders.sizes
    return as_block_sizes(map(sub, borders[1:], borders[:-1]))


def moved_borders(sizes: Sequence[int], times: int, plus: int, over: int, n: int) -> tuple[int, ...]:
    """Return the borders of blocks moved to ``(border * times + plus) // over`` within ``[0, n]``, the ends to its own.

    Runs of blocks that stay alike are moved at once.

    Parameters
    ----------
    sizes
        Of the blocks.
    times, over
        At least 1.

    Examples
    --------
    >>> moved_borders((4, 4, 2), 1, 1, 2, 5)
    (0, 2, 4, 5)
    """
    if type(sizes) is not BlockSizes or any(s * times % over and k > FEW for s, k in sizes.runs):
        borders = bounds(sizes)[1:-1]
        if len(borders) <= FEW or n * max(times, over) >= 1 << 61:
            return (0, *[min(max((b * times + plus) // over, 0), n) for b in borders], n)
        return (0, *np.clip((np.array(borders) * times + plus) // over, 0, n).tolist(), n)

    def moved(cell: int) -> int:
        return min(max((cell * times + plus) // over, 0), n)

    out, start, last, blocks = [], 0, 0, len(sizes)
    for size, count in sizes.runs:
        blocks -= count
        # the last border of all is that of the end
        stop = count if blocks else count - 1
        step, rest = divmod(size * times, over)
        marks: Iterable[int] = range(1, stop + 1)
        if not rest:
            # neighbours are one step apart where neither was brought inside
            before = (start * times + plus) // over
            inside, outside = (-(before // step), (n - before) // step) if step else (1, 1)
            marks = sorted({k for k in (1, 2, inside, inside + 1, outside + 1, outside + 2) if 1 <= k <= stop})
        for k, following in pairwise((*marks, stop + 1)):
            out.append((moved(start + k * size) - last, following - k))
            last = moved(start + (following - 1) * size)
        start += size * count
    return bounds(repeated((*out, (n - last, 1))))


def scaled(sizes: Sequence[int], times: int) -> tuple[int, ...]:
    """Return block sizes ``times`` as large."""
    if type(sizes) is not BlockSizes:
        return tuple([s * times for s in sizes])
    return repeated((s * times, k) for s, k in runs_of(sizes))


class Each(Sequence[T_co]):
    """What each position along a dim has, computed when it is asked for."""

    __slots__ = ("_count", "_of")

    def __init__(self, count: int, of: Callable[[int], T_co]) -> None:
        self._count, self._of = count, of

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, i: int) -> T_co: ...
    @overload
    def __getitem__(self, i: slice) -> list[T_co]: ...
    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self._of(k) for k in range(self._count)[i]]
        if not -self._count <= i < self._count:
            raise IndexError("no such position")
        return self._of(i % self._count)

    def __iter__(self) -> Iterator[T_co]:
        return map(self._of, range(self._count))
