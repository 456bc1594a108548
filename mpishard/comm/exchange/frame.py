"""A window in parts: the block where it lies, and its halo beside it, so that the block is not copied.

Every round brings two slabs, below and above the block. As rounds run one after the other, those of a round span the
windows of the rounds before it (so they carry the corners) and the block along the dims of those after it::

    +---+-----------+---+
    |     low of 2      |     rounds along dim 1, then dim 0
    +---+-----------+---+
    |low|   block   |hi |     block and slabs are disjoint, and together the window
    |of1|           |of1|
    +---+-----------+---+
    |     high of 2     |
    +---+-----------+---+
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from mpishard.comm.exchange.persistent import Exchange
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.memory.piece import empty_as

if TYPE_CHECKING:
    from mpishard.layout import Piece


class Frame:
    """The parts of one window, or of its cotangent.

    Parameters
    ----------
    window
        Its plan, of windows that hold the whole block and zeros beyond the domain.
    block
        This rank's.
    halo
        The slabs, low and high of every round; those of rounds that have not run yet are missing.
    """

    def __init__(self, window: WindowOp, block: Tensor, halo: Sequence[Tensor] = ()) -> None:
        self._stages, self._rounds = window.stages, window.rounds
        # where the block begins in the window, along the dim of every round
        self._at: list[int] = [stage.resident for stage in self._stages]  # type: ignore[misc]
        self._dims = tuple([stage.dim for stage in self._stages])
        self._ends = tuple([at + stage.n_in for at, stage in zip(self._at, self._stages)])
        self.block, self.halo = block, list(halo)

    def start(self, k: int) -> Exchange | None:
        """Send the strips of round ``k``. Neighborwise collective."""
        exchange = self._rounds[k].take(self.block)
        if exchange is not None:
            for (p,), view in self._rounds[k].parts(exchange, adjoint=True):
                self.read(view, self._origin(k, p))
            exchange.start()
        return exchange

    def finish(self, k: int, exchange: Exchange | None) -> None:
        """Wait for the slabs of round ``k``. Neighborwise collective."""
        stage, shape = self._stages[k], list(self.block.shape)
        for before in self._stages[:k]:
            shape[before.dim] = before.n_out
        for width in (self._at[k], stage.n_out - self._at[k] - stage.n_in):
            shape[stage.dim] = width
            slab = empty_as(self.block, shape)
            self.halo.append(slab.zero_() if stage.fill else slab)
        if exchange is not None:
            exchange.finish()
            for (p,), view in self._rounds[k].parts(exchange):
                self._slab(k, p).copy_(view)
            exchange.release()

    def start_adjoint(self, k: int) -> Exchange | None:
        """Send home the cotangents of the slabs of round ``k``. Neighborwise collective."""
        exchange = self._rounds[k].take(self.block, adjoint=True)
        if exchange is not None:
            for (p,), view in self._rounds[k].parts(exchange):
                view.copy_(self._slab(k, p))
            exchange.start(adjoint=True)
        return exchange

    def finish_adjoint(self, k: int, exchange: Exchange | None) -> None:
        """Add what comes back to the cotangents of the block and of the rounds before. Neighborwise collective."""
        if exchange is not None:
            exchange.finish(adjoint=True)
            for (p,), view in self._rounds[k].parts(exchange, adjoint=True):
                self.add(view, self._origin(k, p))
            exchange.release()

    def read(self, out: Tensor, origin: Sequence[int]) -> None:
        """Fill ``out`` with the window from cell ``origin`` on, one number per round. Not collective."""
        for into, part in self._shared(out, origin):
            into.copy_(part)

    def add(self, values: Tensor, origin: Sequence[int]) -> None:
        """Add ``values`` to the cells that `read` reads: its adjoint. Not collective."""
        for share, part in self._shared(values, origin):
            part.add_(share)

    def _origin(self, k: int, p: Piece) -> list[int]:
        """Return where in the window the strip of a piece begins that round ``k`` sends."""
        return [0] * k + [self._at[k] + p.src] + self._at[k + 1 :]

    def _slab(self, k: int, p: Piece) -> Tensor:
        """Return the cells of a slab that a piece brings."""
        stage, end = self._stages[k], self._ends[k]
        slab, first = (self.halo[2 * k], 0) if p.dst < self._at[k] else (self.halo[2 * k + 1], end)
        return slab.narrow(stage.dim, p.dst - first, p.count)

    def _shared(self, out: Tensor, origin: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the cells of ``out`` that each part of the window has, and these."""
        parts = (self.block, *self.halo)
        shapes = tuple([part.shape for part in parts])
        for i, taken, given in _overlaps(self._dims, tuple(self._at), self._ends, shapes, out.shape, tuple(origin)):
            into, part = out, parts[i]
            for cut in taken:
                into = into.narrow(*cut)
            for cut in given:
                part = part.narrow(*cut)
            yield into, part


_Cuts = tuple[tuple[int, int, int], ...]  # of a tensor's narrow


@lru_cache(maxsize=1024)
def _overlaps(
    dims: tuple[int, ...],
    begins: tuple[int, ...],
    ends: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    out: tuple[int, ...],
    origin: tuple[int, ...],
) -> list[tuple[int, _Cuts, _Cuts]]:
    """Return which parts of a window, the block and its slabs, a box of shape ``out`` at ``origin`` meets, and where.

    Not collective. Per part: its number, what is cut out of the box, and what out of the part.
    """
    found = []
    for i, shape in enumerate(shapes):
        starts, k = list(begins), (i - 1) // 2
        if i:
            starts[: k + 1] = [0] * k + [0 if i % 2 else ends[k]]
        taken, given = [], []
        for d, start, first in zip(dims, starts, origin):
            lo, hi = max(start, first), min(start + shape[d], first + out[d])
            if lo >= hi:
                break
            if hi - lo < out[d]:
                taken.append((d, lo - first, hi - lo))
            if hi - lo < shape[d]:
                given.append((d, lo - start, hi - lo))
        else:
            found.append((i, tuple(taken), tuple(given)))
    return found
