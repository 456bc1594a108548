"""Where to cut a dim so that its blocks cost the same: the cost per cell, as far as the costs of blocks tell.

Nothing here is collective. Sums go from left to right, so that every rank gets the same bits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from mpishard.errors import LayoutError, described

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
        # per measurement, by its borders: the last one is the latest
        self._told: dict[tuple[int, ...], list[float]] = {}
        self._at, self._upto = [0, n], [0.0, 1.0]

    def learn(self, borders: Sequence[int], costs: Sequence[float]) -> None:
        """Take in what the blocks between ``borders`` have cost, in any unit."""
        total = sum(costs)
        if total <= 0:
            return
        self._told.pop(tuple(borders), None)
        self._told[tuple(borders)] = [c / total for c in costs]
        if len(self._told) > _TOLD:
            del self._told[next(iter(self._told))]
        self._fit()

    @property
    def told(self) -> list[list[list[float]]]:
        """The measurements that count, the latest last: borders, and the shares of the blocks between them."""
        return [[list(borders), list(shares)] for borders, shares in self._told.items()]

    def remember(self, told: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take in measurements as `told` gives them, instead of those that are known."""
        self._told = {tuple(map(int, borders)): [float(s) for s in shares] for borders, shares in told}
        if self._told:
            self._fit()

    def _fit(self) -> None:
        self._at = at = sorted({b for told in self._told for b in told})
        pieces = [(hi - lo) / at[-1] for lo, hi in zip(at, at[1:])]
        ends = {told: [bisect_left(at, b) for b in told] for told in self._told}
        # scaling each block to its cost keeps what others told of the cells inside it
        for _ in range(_SWEEPS):
            for told, shares in self._told.items():
                for lo, hi, share in zip(ends[told], ends[told][1:], shares):
                    known = sum(pieces[lo:hi])
                    for k in range(lo, hi):
                        even = (at[k + 1] - at[k]) / (at[hi] - at[lo])
                        pieces[k] = share * (pieces[k] / known if known > 0 else even)
        self._upto = [0.0, *accumulate(pieces)]

    def costs(self, borders: Sequence[int]) -> list[float]:
        """Return what blocks between ``borders`` would cost."""
        upto = [self._before(b) for b in borders]
        return [hi - lo for lo, hi in zip(upto, upto[1:])]

    def _before(self, cell: int) -> float:
        at, upto = self._at, self._upto
        k = min(bisect_right(at, cell), len(at) - 1) - 1
        part = (cell - at[k]) / (at[k + 1] - at[k]) if at[k + 1] > at[k] else 0.0
        return upto[k] + part * (upto[k + 1] - upto[k])

    def equal(self, count: int) -> list[float]:
        """Return the borders of ``count`` blocks of equal cost, which may lie inside cells."""
        at, upto = self._at, self._upto
        out = [0.0]
        for i in range(1, count):
            share = upto[-1] * i / count
            k = min(bisect_right(upto, share), len(at) - 1) - 1
            cost = upto[k + 1] - upto[k]
            out.append(at[k] + (min(1.0, (share - upto[k]) / cost) * (at[k + 1] - at[k]) if cost > 0 else 0.0))
        return [*out, float(at[-1])]


def moved_borders(
    borders: Sequence[int], target: Sequence[float], *, relaxation: float = 1.0, min_cells: int = 1, multiple: int = 1
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
            described(
                "balance: blocks cannot have as many cells",
                expected=f"at least {(count - 1) * width + min_cells} cells for {count} blocks",
                got=f"{n} cells, min_cells={min_cells}, multiple={multiple}",
                fix="use fewer ranks along this dim, or smaller min_cells",
            )
        )
    out = [multiple * round((b + relaxation * (t - b)) / multiple) for b, t in zip(borders, target)]
    out[0], out[-1] = 0, n
    for i in range(1, count):
        out[i] = max(out[i], out[i - 1] + width)
    if count > 1:
        out[-2] = min(out[-2], (n - min_cells) // multiple * multiple)
    for i in range(count - 2, 0, -1):
        out[i] = min(out[i], out[i + 1] - width)
    return tuple(out)
