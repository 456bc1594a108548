"""Interval arithmetic of window operations along one dim: output cells -> input cells, and who owns what.

Nothing here is collective.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from mpishard.layout.block_sizes import BlockSizes, Each, moved_borders


class Sliding(NamedTuple):
    """A window of ``kernel`` cells, ``dilation`` apart, that moves ``stride`` cells per output cell.

    Output cell ``j`` reads input cells ``j * stride - lo + k * dilation``.
    """

    kernel: int
    stride: int
    dilation: int
    lo: int
    hi: int

    @property
    def reach(self) -> int:
        """Cells from the first to the last input cell of one output cell."""
        return (self.kernel - 1) * self.dilation + 1

    def n_out(self, n: int) -> int:
        """Return the number of output cells for ``n`` input cells."""
        return (n + self.lo + self.hi - self.reach) // self.stride + 1

    def window(self, a: int, b: int) -> tuple[int, int]:
        """Return the input interval of the output interval ``[a, b)``, not clipped to the domain."""
        return a * self.stride - self.lo, (b - 1) * self.stride - self.lo + self.reach

    def follow(self, sizes: Sequence[int], n_out: int) -> tuple[int, ...]:
        """Return output borders such that a cell lies where the middle of its window does."""
        half = (self.reach - 1) // 2
        return moved_borders(sizes, 1, self.lo - half + self.stride - 1, self.stride, n_out)


class Transposed(NamedTuple):
    """The transpose: input cell ``i`` adds to output cells ``i * stride - lo + k * dilation``."""

    kernel: int
    stride: int
    dilation: int
    lo: int
    extra: int

    @property
    def reach(self) -> int:
        """Cells from the first to the last output cell of one input cell."""
        return (self.kernel - 1) * self.dilation + 1

    def n_out(self, n: int) -> int:
        """Return the number of output cells for ``n`` input cells."""
        return (n - 1) * self.stride - 2 * self.lo + self.reach + self.extra

    def window(self, a: int, b: int) -> tuple[int, int]:
        """Return the input interval whose outputs cover ``[a, b)``, not clipped to the domain."""
        if self.reach >= self.stride:
            first = -((self.reach - 1 - a - self.lo) // self.stride)
        else:  # gaps between the outputs of neighbouring cells: start at or before a
            first = (a + self.lo) // self.stride
        last = max((b - 1 + self.lo) // self.stride, -((self.reach - b - self.lo) // self.stride))
        return first, max(last, first) + 1

    def follow(self, sizes: Sequence[int], n_out: int) -> tuple[int, ...]:
        """Return output borders such that a cell lies where the input cell in its middle does."""
        half = (self.reach - 1) // 2
        return moved_borders(sizes, self.stride, half - self.lo, 1, n_out)


def paddings_meet(g: Sliding | Transposed, padding: int, n: int) -> bool:
    """Tell whether windows that read the padding at one end of ``n`` cells lie beside those of the other end.

    Of such 3-D convolutions with a stride, oneDNN (docs/upstream.md) writes the weight's gradient past the end of its
    arrays, and of those in 16 bits with fewer cells than the stride. Whole fields are seldom so short; blocks may be.
    """
    return g.stride > 1 and padding > 0 and (n < g.stride or (padding > g.stride and n < g.reach + g.stride))


class Adaptive(NamedTuple):
    """Output cell ``j`` of ``n_out`` reads the input cells ``[floor(j * n / n_out), ceil((j + 1) * n / n_out))``."""

    n: int
    n_out: int

    def window(self, a: int, b: int) -> tuple[int, int]:
        """Return the input interval of the output interval ``[a, b)``."""
        return a * self.n // self.n_out, -(-b * self.n // self.n_out)

    def follow(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return output borders such that a cell lies where the middle of its window does."""
        n, n_out = self
        # middle: (2 j + 1) n / (2 n_out)
        return moved_borders(sizes, 2 * n_out, n - 1, 2 * n, n_out)


def pairs(borders: Sequence[int]) -> Each[tuple[int, int]]:
    """Return the intervals between ``borders``, each with at least one cell.

    A rank without output cells still runs the local op, on the window of one cell that is dropped afterwards:
    so its operands take part in autograd as everywhere else.
    """
    n = borders[-1]

    def pair(i: int) -> tuple[int, int]:
        a, b = borders[i], borders[i + 1]
        return (a, b) if b > a else (min(a, n - 1), min(a, n - 1) + 1)

    return Each(len(borders) - 1, pair)


def windows(g: Sliding | Transposed | Adaptive, borders: Sequence[int]) -> Each[tuple[int, int]]:
    """Return the input interval of the output cells between ``borders``, of each position; see `pairs`."""
    cells = pairs(borders)
    return Each(len(cells), lambda i: g.window(*cells[i]))


def of_every_kind(sizes: Sequence[int], n_outs: Sequence[int], times: int, over: int) -> Iterator[int]:
    """Give positions that stand for all, where windows lie to their blocks as all others of their kind do.

    Of equal blocks with equally many output cells that follow each other, ``times`` of them for ``over`` input cells,
    the first stands for all: they are moved copies of each other.

    Parameters
    ----------
    sizes, n_outs
        Input and output cells of every position.
    """
    if not (isinstance(sizes, BlockSizes) and isinstance(n_outs, BlockSizes)):
        yield from range(len(sizes))
        return
    at = 0
    ends = sorted({*accumulate(k for _, k in sizes.runs), *accumulate(k for _, k in n_outs.runs)})
    for end in ends:
        alike = sizes[at] * times == n_outs[at] * over
        yield from (at,) if alike else range(at, end)
        at = end


def per_dim(value: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Return one number per spatial dim, as Python's: those of numpy's small integers overflow."""
    if isinstance(value, int):
        return (value,) * ndim
    value = tuple(map(operator.index, value))
    return value * ndim if len(value) == 1 else value


def padded(sizes: Sequence[int], lo: int, n_out: int) -> tuple[int, ...]:
    """Return the output borders of a dim that grows (or shrinks, ``lo < 0``) at its edges only."""
    return moved_borders(sizes, 1, lo, 1, n_out)
