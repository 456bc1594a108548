"""The same as `mpishard.layout.balance`, number by number: what it is compared with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from mpishard.layout.balance import _SWEEPS, _TOLD


class CostDensity:
    def __init__(self, n):
        self._told = {}
        self._at, self._upto = [0, n], [0.0, 1.0]

    def learn(self, borders, costs):
        total = sum(costs)
        if total <= 0:
            return
        self._told.pop(tuple(borders), None)
        self._told[tuple(borders)] = [c / total for c in costs]
        if len(self._told) > _TOLD:
            del self._told[next(iter(self._told))]
        self._fit()

    def _fit(self):
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

    def costs(self, borders):
        upto = [self._before(b) for b in borders]
        return [hi - lo for lo, hi in zip(upto, upto[1:])]

    def _before(self, cell):
        at, upto = self._at, self._upto
        k = min(bisect_right(at, cell), len(at) - 1) - 1
        part = (cell - at[k]) / (at[k + 1] - at[k]) if at[k + 1] > at[k] else 0.0
        return upto[k] + part * (upto[k + 1] - upto[k])

    def equal(self, count):
        at, upto = self._at, self._upto
        out = [0.0]
        for i in range(1, count):
            share = upto[-1] * i / count
            k = min(bisect_right(upto, share), len(at) - 1) - 1
            cost = upto[k + 1] - upto[k]
            out.append(at[k] + (min(1.0, (share - upto[k]) / cost) * (at[k + 1] - at[k]) if cost > 0 else 0.0))
        return [*out, float(at[-1])]


def moved_borders(borders, target, *, relaxation=1.0, min_cells=1, multiple=1):
    n, count = borders[-1], len(borders) - 1
    width = -(-min_cells // multiple) * multiple
    out = [multiple * round((b + relaxation * (t - b)) / multiple) for b, t in zip(borders, target)]
    out[0], out[-1] = 0, n
    for i in range(1, count):
        out[i] = max(out[i], out[i - 1] + width)
    if count > 1:
        out[-2] = min(out[-2], (n - min_cells) // multiple * multiple)
    for i in range(count - 2, 0, -1):
        out[i] = min(out[i], out[i + 1] - width)
    return tuple(out)
