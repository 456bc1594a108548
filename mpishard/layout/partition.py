"""The one rule by which a dim is cut, and the arithmetic on its block sizes.

Nothing here is collective.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from numbers import Integral

import numpy as np

from mpishard.errors import LayoutError
from mpishard.layout.block_sizes import as_block_sizes, repeated


@lru_cache(maxsize=4096)
def balanced(n: int, count: int, multiple: int = 1) -> tuple[int, ...]:
    """Cut ``n`` cells into ``count`` blocks whose sizes differ by at most one, larger blocks first.

    Parameters
    ----------
    n, count
        Cells and blocks.
    multiple
        Cells per unit: units are balanced, and the cells that fill no unit go to the last block. Borders on
        multiples of a network's total stride let every strided convolution of it work on whole blocks.

    Examples
    --------
    >>> balanced(10, 4)
    (3, 3, 2, 2)
    >>> balanced(197, 2, multiple=8)
    (96, 101)
    """
    if not isinstance(multiple, Integral) or multiple < 1:
        raise LayoutError("multiple of the borders of blocks", expected="an integer >= 1", got=multiple, fix="give one")
    units, over = divmod(n, multiple)
    base, rest = divmod(units, count)
    return repeated(((multiple * (base + 1), rest), (multiple * base, count - 1 - rest), (multiple * base + over, 1)))


def owner(borders: Sequence[int], cell: int) -> int:
    """Return the index of the block that owns ``cell`` (never an empty block)."""
    return bisect_right(borders, cell) - 1


def weighted(n: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Cut ``n`` cells into blocks in proportion to ``weights`` (largest remainder, ties to the first).

    Examples
    --------
    >>> weighted(10, (1.0, 3.0))
    (3, 7)
    """
    exact = n * np.array(weights) / math.fsum(weights)
    sizes = exact.astype(np.int64)
    by_remainder = np.argsort(sizes - exact, kind="stable")
    sizes[by_remainder[: n - sizes.sum()]] += 1
    return as_block_sizes(sizes.tolist())


def rank_of(coords: Sequence[int], mesh_shape: Sequence[int]) -> int:
    """Return the rank at the coordinates of a mesh: row-major, as MPI orders Cartesian ranks. Not collective."""
    rank = 0
    for at, n in zip(coords, mesh_shape):
        rank = rank * n + at
    return rank


def coords_of(rank: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of a rank: the inverse of `rank_of`. Not collective."""
    coords = []
    for n in reversed(mesh_shape):
        rank, at = divmod(rank, n)
        coords.append(at)
    return tuple(reversed(coords))
