"""Where to cut a dim so that its blocks cost the same: the cost per cell, as far as the costs of blocks tell.

Nothing here is collective. All ranks compute with the same numbers in the same order, and get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpishard.errors import LayoutError

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_TOLD = 4  # measurements that count
_SWEEPS = 5  # over all of them, until they agree


class CostDensity:
    """Cost per cell along a dim, piecewise constant between the borders at which blocks were measured.

    It agrees with the last measurement, and where costs do not change with those before: so borders close in on a
    costly spot that is smaller than a block. The whole dim costs 1.

    Parameters
    ----------
    n
        Extent of the dim.
    """

    def __init__(self, n: int) -> None:
        # borders and shares of each measurement: the last one is the latest
        self._told: list[tuple[Integers, Floats]] = []
        self._at, self._upto = np.array([0, n]), np.array([0.0, 1.0])

    def learn(self, borders: Sequence[int], costs: Sequence[float]) -> None:
        """Take in what the blocks between ``borders`` have cost, in any unit."""
        total = sum(costs)
        if total <= 0:
            return
        ends = np.array(borders)
        told = [(b, shares) for b, shares in self._told if not np.array_equal(b, ends)]
        self._told = [*told, (ends, np.array(costs, float) / total)][-_TOLD:]
        self._fit()

    @property
    def told(self) -> list[list[list[float]]]:
        """The measurements that count, the latest last: borders, and the shares of the blocks between them."""
        return [[borders.tolist(), shares.tolist()] for borders, shares in self._told]

    def remember(self, told: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take in measurements as `told` gives them, instead of those that are known."""
        self._told = [(np.array(borders, int), np.array(shares, float)) for borders, shares in told]
        if self._told:
            self._fit()

    def _fit(self) -> None:
        ends = np.sort(np.concatenate([borders for borders, _ in self._told]), kind="stable")
        self._at = at = ends[np.diff(ends, prepend=-1) > 0]
        widths = np.diff(at)
        pieces = widths / at[-1]
        told = []
        for borders, shares in self._told:
            # blocks without cells have no pieces
            full = np.flatnonzero(np.diff(borders))
            first = np.searchsorted(at, borders[full])
            block = np.repeat(np.arange(len(full)), np.diff(first, append=len(pieces)))
            told.append((first, block, shares[full], widths / np.diff(borders)[full][block]))
        # scaling each block to its cost keeps what others told of the cells inside it
        for _ in range(_SWEEPS):
            for first, block, shares, even in told:
                known = np.add.reduceat(pieces, first)[block]
                pieces = shares[block] * np.where(known > 0, pieces / np.where(known > 0, known, 1), even)
        self._upto = np.concatenate([[0.0], np.cumsum(pieces)])

    def costs(self, borders: Sequence[int]) -> Floats:
        """Return what blocks between ``borders`` would cost."""
        cells, at, upto = np.asarray(borders), self._at, self._upto
        k = np.minimum(np.searchsorted(at, cells, "right"), len(at) - 1) - 1
        width = at[k + 1] - at[k]
        part = np.where(width > 0, (cells - at[k]) / np.maximum(width, 1), 0.0)
        return np.diff(upto[k] + part * (upto[k + 1] - upto[k]))

    def equal(self, count: int) -> Floats:
        """Return the borders of ``count`` blocks of equal cost, which may lie inside cells."""
        at, upto = self._at, self._upto
        share = upto[-1] * np.arange(1, count) / count
        k = np.minimum(np.searchsorted(upto, share, "right"), len(at) - 1) - 1
        cost = upto[k + 1] - upto[k]
        part = np.where(cost > 0, np.minimum(1.0, (share - upto[k]) / np.where(cost > 0, cost, 1)), 0.0)
        return np.concatenate([at[:1], at[k] + part * (at[k + 1] - at[k]), at[-1:]])


def moved_borders(
    borders: Sequence[int],
    target: Sequence[float] | Floats,
    *,
    relaxation: float = 1.0,
    min_cells: int = 1,
    multiple: int = 1,
) -> tuple[int, ...]:
    """Move ``borders`` towards ``target``.

    Parameters
    ----------
    borders
        Of blocks: 0 is the first, the extent of the dim the last.
    target
        Where they should be, as many.
    relaxation
        How much of the way they go.
    min_cells
        Cells that every block keeps, at least.
    multiple
        Of which all borders but the last are multiples.

    Raises
    ------
    LayoutError
        There are too few cells.

    Examples
    --------
    >>> moved_borders((0, 5, 10), (0.0, 9.8, 10.0), min_cells=2)
    (0, 8, 10)
    """
    n, count = borders[-1], len(borders) - 1
    width = -(-min_cells // multiple) * multiple
    if n < (count - 1) * width + min_cells:
        raise LayoutError(
            "balance: blocks cannot have as many cells",
            expected=f"at least {(count - 1) * width + min_cells} cells for {count} blocks",
            got=f"{n} cells, min_cells={min_cells}, multiple={multiple}",
            fix="use fewer ranks along this dim, or smaller min_cells",
        )
    before = np.asarray(borders)
    out = multiple * np.rint((before + relaxation * (np.asarray(target) - before)) / multiple).astype(int)
    out[0], out[-1] = 0, n
    room = width * np.arange(count)
    out[:-1] = np.maximum.accumulate(out[:-1] - room) + room
    if count > 1:
        out[-2] = min(out[-2], (n - min_cells) // multiple * multiple)
        out[1:-1] = np.minimum.accumulate((out[1:-1] - room[1:])[::-1])[::-1] + room[1:]
    return tuple(out.tolist())
