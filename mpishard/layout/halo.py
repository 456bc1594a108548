"""Halos along one dim, of tensors and of ghosted arrays: which cells come from which rank, and where they go.

A block with its halo is the window ``[start - lo, stop + hi)``; `plan_stage` plans it as any other window, from the
windows of the positions that are near enough to need cells of this one. A ghosted array holds that window: cell ``k``
of the window is cell ``k`` of the array, and a block begins at cell ``lo``.

Not collective.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.layout.block_sizes import Each, bounds
from mpishard.layout.stage import Stage, interval_runs, near, plan_stage

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
    borders = bounds(sizes)
    n, count = borders[-1], len(sizes)

    def window(i: int) -> tuple[int, int]:
        before, behind = (w if isinstance(w, int) else w[i] for w in (lo, hi))
        return borders[i] - before, borders[i + 1] + behind

    before, behind = (w if isinstance(w, int) else max(w) for w in (lo, hi))
    reached = Each(count, lambda i: (borders[i] - before, borders[i + 1] + behind))
    others = near(reached, n, mode, borders[index], borders[index + 1])
    windows = Each(count, lambda i: interval_runs(n, *window(i), mode))
    first, stop = window(index)
    return plan_stage(dim, mesh_dims, sizes, windows, {index: stop - first}, index, near=others)
