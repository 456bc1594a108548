"""Halos along one dim, of tensors and of ghosted arrays: which cells come from which rank, and where they go.

A block with its halo is the window ``[start - lo, stop + hi)``; `plan_stage` plans it as any other window, from the
windows of the positions that are near enough to need cells of this one. A ghosted array holds that window: cell ``k``
of the window is cell ``k`` of the array, and a block begins at cell ``lo``.

Not collective.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from mpishard.layout.partition import bounds
from mpishard.layout.stage import Stage, interval_runs, plan_stage

Widths = int | Sequence[int]


def plan_halo(
    dim: int, mesh_dims: Sequence[int], sizes: Sequence[int], lo: Widths, hi: Widths, mode: str, index: int
) -> Stage:
    """Plan the halo along one dim for the rank at position ``index``.

    Parameters
    ----------
    dim, mesh_dims, sizes, index
        As for `plan_stage`.
    lo, hi
        Widths of all positions, or of each; the halo may be wider than any block.
    mode
        As for `interval_runs`: what lies beyond the domain.

    Returns
    -------
    Stage
        Sender and receiver list the pieces of a message in the same order: those of the low halo first.

    Examples
    --------
    >>> plan_halo(0, (0,), (4, 3), 1, 0, "zeros", 1).recvs
    ((0, (Piece(src=3, count=1, step=1, dst=0),)),)
    """
    borders = bounds(tuple(sizes))
    los, his = ((w,) * len(sizes) if isinstance(w, int) else w for w in (lo, hi))
    near = _near(borders, max(los), max(his), mode, index)
    windows = {
        i: interval_runs(borders[-1], borders[i] - los[i], borders[i + 1] + his[i], mode) for i in {index, *near}
    }
    return plan_stage(dim, mesh_dims, sizes, windows, {index: sizes[index] + los[index] + his[index]}, index, near=near)


def _near(borders: Sequence[int], lo: int, hi: int, mode: str, index: int) -> list[int]:
    """Return, ascending, the positions whose windows may hold cells of block ``index``, by bisection."""
    start, stop, n = borders[index], borders[index + 1], borders[-1]
    if start == stop:
        return []
    shifts = range(-(hi // n) - 1, lo // n + 2) if mode == "circular" else (0,)
    # window [b_i - lo, b_(i+1) + hi) meets [start, stop) + k n
    spans = [(start + k * n - hi, stop + k * n + lo) for k in shifts]
    if mode in ("reflect", "replicate"):
        spans += [(-1, lo), (n - hi, n + lo + 1)]  # those that pass an edge may need any cell within
    found: set[int] = set()
    for first, last in spans:
        found.update(range(max(bisect_right(borders, first) - 1, 0), min(bisect_left(borders, last), len(borders) - 1)))
    return sorted(found)
