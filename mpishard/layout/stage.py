"""The window planner: which cells each rank needs along one dim, and from whom they come.

Every operation that moves cells is a list of `Run`: window position -> source cell, in arithmetic
progressions. A halo, a pad in any mode, a flip, a roll, a strided slice and a re-balancing differ only in
their runs; `plan_stage` turns the runs of all ranks into this rank's segments. Pure arithmetic: no MPI, and
testable in one process for any number of ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mpishard.errors import LayoutError
from mpishard.layout.block_sizes import Each, bounds
from mpishard.layout.partition import owner

MODES = ("zeros", "constant", "reflect", "replicate", "circular")


class Run(NamedTuple):
    """Window cells ``dst + k`` come from source cells ``src + k * step``, for ``k`` in ``range(count)``."""

    dst: int
    count: int  # type: ignore[assignment]
    src: int
    step: int


Runs = tuple[Run, ...]


def interval_runs(n: int, lo: int, hi: int, mode: str = "zeros") -> Runs:
    """Return the runs of the window ``[lo, hi)`` of a dim of ``n`` cells, extended past its edges by ``mode``.

    Not collective.

    Parameters
    ----------
    n
        Global extent.
    lo, hi
        Window in global indices; it may lie partly or wholly outside ``[0, n)``.
    mode
        ``"zeros"`` and ``"constant"`` leave the outside uncovered; ``"reflect"``, ``"replicate"`` and
        ``"circular"`` map it to cells inside (circular wraps any number of times).

    Returns
    -------
    tuple of Run
        In ascending window position; positions in no run are the caller's to fill.

    Examples
    --------
    >>> interval_runs(5, -2, 3, "circular")
    (Run(dst=0, count=2, src=3, step=1), Run(dst=2, count=3, src=0, step=1))
    """
    check_mode(mode)
    if hi <= lo or n == 0:
        return ()
    if mode in ("zeros", "constant"):
        a, b = max(lo, 0), min(hi, n)
        return (Run(a - lo, b - a, a, 1),) if b > a else ()
    if mode == "replicate":
        parts = [
            (lo, min(hi, 0), 0, 0),
            (max(lo, 0), min(hi, n), max(lo, 0), 1),
            (max(lo, n), hi, n - 1, 0),
        ]
        return tuple(Run(a - lo, b - a, src, step) for a, b, src, step in parts if b > a)
    # circular and reflect tile the line: whole copies, every second one reversed for reflect (period n - 1)
    runs = []
    mirrored = mode == "reflect" and n > 1
    period = n - 1 if mirrored else n
    cell = lo
    while cell < hi:
        tile, inside = divmod(cell, period)
        if mirrored and tile % 2 and inside == 0:
            # the turning cell ends the copy before it: a block at the edge stays in one piece
            tile, inside = tile - 1, period
        if mirrored and tile % 2:
            src, step, stop = n - 1 - inside, -1, (tile + 1) * period
        else:
            src, step, stop = inside, 1, (tile + 1) * period + mirrored
        stop = min(hi, stop)
        runs.append(Run(cell - lo, stop - cell, src, step))
        cell = stop
    return tuple(runs)


def check_mode(mode: str) -> None:
    """Raise `LayoutError` unless ``mode`` is one of `MODES`."""
    if mode not in MODES:
        raise LayoutError("unknown padding mode", expected=MODES, got=repr(mode), fix="use one of them")


class Piece(NamedTuple):
    """One arithmetic progression of cells in local indices: ``src + k * step`` -> ``dst + k``."""

    src: int
    count: int  # type: ignore[assignment]
    step: int
    dst: int

    @property
    def wire_count(self) -> int:
        """Cells that travel: a repeated cell (step 0) travels once."""
        return self.count if self.step else min(self.count, 1)


Pieces = tuple[Piece, ...]


class Stage(NamedTuple):
    """What one rank does along one tensor dim: local copies, sends, receives and cells to fill.

    Attributes
    ----------
    dim : int
        Tensor dim.
    mesh_dims : tuple of int
        Mesh dims that shard it; peers are positions in their row-major product.
    n_in, n_out : int
        Local extent before and after.
    resident : int or None
        Where the whole own block lies in the window unchanged, its position; else None.
    local : tuple of Piece
        Cells that this rank already has (without the resident block).
    sends, recvs : tuple of (int, tuple of Piece)
        Per peer, ascending. ``src`` is local to the sender, ``dst`` to the receiver's window.
    fill : tuple of (int, int)
        Window intervals that no source covers.
    """

    dim: int
    mesh_dims: tuple[int, ...]
    n_in: int
    n_out: int
    resident: int | None
    local: Pieces
    sends: tuple[tuple[int, Pieces], ...]
    recvs: tuple[tuple[int, Pieces], ...]
    fill: tuple[tuple[int, int], ...]

    @property
    def own(self) -> Pieces:
        """All cells that this rank already has, the resident block first."""
        return self.local if self.resident is None else (Piece(0, self.n_in, 1, self.resident), *self.local)


def near(windows: Sequence[tuple[int, int]], n: int, mode: str, lo: int, hi: int) -> list[int]:
    """Return, ascending, the positions whose windows may hold cells of ``[lo, hi)``, by bisection.

    Not collective.

    Parameters
    ----------
    windows
        Interval of every position, whose ends do not fall from one position to the next.
    n, mode
        Of the dim, and of what lies beyond it, as for `interval_runs`.

    Examples
    --------
    >>> near([(-1, 4), (2, 7), (5, 9)], 8, "zeros", 0, 3)
    [0, 1]
    """
    if lo >= hi or not windows:
        return []
    lows, highs = Each(len(windows), lambda i: windows[i][0]), Each(len(windows), lambda i: windows[i][1])
    spans = [(lo, hi)]
    if mode == "circular":
        spans = [(lo + k * n, hi + k * n) for k in range((lows[0] - hi) // n, (highs[-1] - lo) // n + 2)]
    elif mode in ("reflect", "replicate"):
        # those that pass an end may need any cell within
        spans += [(min(lows[0], 0), 0), (n, max(highs[-1], n))]
    found: set[int] = set()
    for first, last in spans:
        if first < last:
            found.update(range(bisect_right(highs, first), bisect_left(lows, last)))
    return sorted(found)


def plan_stage(
    dim: int,
    mesh_dims: Sequence[int],
    sizes: Sequence[int],
    windows: Sequence[Runs] | Mapping[int, Runs],
    n_outs: Sequence[int] | Mapping[int, int],
    index: int,
    *,
    near: Iterable[int] | None = None,
) -> Stage:
    """Plan the exchange along one dim for the rank at block ``index``.

    Not collective: pure arithmetic on arguments that every rank knows.

    Parameters
    ----------
    dim
        Tensor dim.
    mesh_dims
        Mesh dims that shard it.
    sizes
        Block sizes of the source along the dim, one per position.
    windows
        The runs that each position needs, in global source indices.
    n_outs
        Window extents, one per position.
    index
        This rank's position.
    near
        The positions, ascending, whose windows may hold cells of this one's block; all of them, if not given. Only
        their windows are looked at, and this one's.

    Returns
    -------
    Stage
    """
    borders = bounds(sizes)
    mine, incoming = _by_owner(windows[index], borders)
    own = incoming.pop(index, ())
    resident = None
    local = []
    for piece in own:
        if resident is None and piece.step == 1 and piece.src == 0 and piece.count == sizes[index] > 0:
            resident = piece.dst
        else:
            local.append(piece)
    lo, hi = borders[index], borders[index + 1]
    sends = []
    if hi > lo:
        for peer in range(len(sizes)) if near is None else near:
            if peer == index:
                continue
            runs = windows[peer]
            pieces = _owned_pieces(runs, lo, hi) if _touches(runs, lo, hi) else ()
            if pieces:
                sends.append((peer, pieces))
    return Stage(
        dim,
        tuple(mesh_dims),
        sizes[index],
        n_outs[index],
        resident,
        tuple(local),
        tuple(sends),
        tuple(sorted(incoming.items())),
        _gaps(mine, n_outs[index]),
    )


def _by_owner(runs: Runs, borders: tuple[int, ...]) -> tuple[list[Piece], dict[int, Pieces]]:
    """Cut runs at block borders; return all pieces, and the pieces by owner."""
    everything: list[Piece] = []
    by_owner: dict[int, list[Piece]] = {}
    for run in runs:
        k = 0
        while k < run.count:
            cell = run.src + k * run.step
            who = owner(borders, cell)
            lo, hi = borders[who], borders[who + 1]
            if run.step == 0:
                stop = run.count
            elif run.step > 0:
                stop = min(run.count, k + (hi - 1 - cell) // run.step + 1)
            else:
                stop = min(run.count, k + (cell - lo) // -run.step + 1)
            piece = Piece(cell - lo, stop - k, run.step, run.dst + k)
            everything.append(piece)
            by_owner.setdefault(who, []).append(piece)
            k = stop
    return everything, {who: tuple(pieces) for who, pieces in by_owner.items()}


def _touches(runs: Runs, lo: int, hi: int) -> bool:
    for run in runs:
        last = run.src + (run.count - 1) * run.step
        if min(run.src, last) < hi and max(run.src, last) >= lo:
            return True
    return False


def _owned_pieces(runs: Runs, lo: int, hi: int) -> Pieces:
    """Return the part of ``runs`` that lies in ``[lo, hi)``, cut exactly as the receiver cuts it."""
    pieces = []
    for run in runs:
        if run.step == 0:
            first, stop = (0, run.count) if lo <= run.src < hi else (0, 0)
        elif run.step > 0:
            first = max(0, -((run.src - lo) // run.step))
            stop = min(run.count, (hi - 1 - run.src) // run.step + 1)
        else:
            first = max(0, -((hi - 1 - run.src) // -run.step))
            stop = min(run.count, (run.src - lo) // -run.step + 1)
        if stop > first:
            pieces.append(Piece(run.src + first * run.step - lo, stop - first, run.step, run.dst + first))
    return tuple(pieces)


def _gaps(pieces: Iterable[Piece], n_out: int) -> tuple[tuple[int, int], ...]:
    gaps, at = [], 0
    for piece in sorted(pieces, key=lambda p: p.dst):
        if piece.dst > at:
            gaps.append((at, piece.dst))
        at = max(at, piece.dst + piece.count)
    if n_out > at:
        gaps.append((at, n_out))
    return tuple(gaps)
