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

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from mpishard.comm.exchange.persistent import Exchange
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.memory.piece import empty_as

Cuts = list["tuple[int, _Narrow, _Narrow]"]
_Narrow = tuple["tuple[int, int, int]", ...]  # arguments of a tensor's narrow, one after the other


class Frame:
    """Where the parts of the windows of one plan lie, and what travels to and from them.

    The parts of one window, or of its cotangent, are a list: the block, and the slabs, low and high of every round;
    those of rounds that have not run yet are missing.

    Parameters
    ----------
    window
        The plan, of windows that hold the whole block and zeros beyond the domain.
    """

    def __init__(self, window: WindowOp) -> None:
        self._stages, self._rounds = window.stages, window.rounds
        # where the block begins in the window, along the dim of every round
        self._at: list[int] = [stage.resident for stage in self._stages]  # type: ignore[misc]
        self._ends = [at + stage.n_in for at, stage in zip(self._at, self._stages)]
        self._shapes = [tuple(window.in_shape)]
        self._places: list[list[tuple[int, int, int, int]]] = []
        shape = list(window.in_shape)
        for k, stage in enumerate(self._stages):
            for width in (self._at[k], stage.n_out - self._ends[k]):
                shape[stage.dim] = width
                self._shapes.append(tuple(shape))
            shape[stage.dim] = stage.n_out
            pieces = chain.from_iterable(parts for _, parts in self._rounds[k].recvs)
            self._places.append([self._place(k, p.dst, p.count) for (p,) in pieces])
        self._strips: dict[int, list[Cuts]] = {}

    def start(self, k: int, parts: Sequence[Tensor]) -> Exchange | None:
        """Send the strips of round ``k``. Neighborwise collective."""
        exchange = self._rounds[k].take(parts[0])
        if exchange is not None:
            for view, cuts in zip(chain.from_iterable(exchange.sends), self._strips_of(k, exchange)):
                read(view, parts, cuts)
            exchange.start()
        return exchange

    def finish(self, k: int, exchange: Exchange | None, parts: list[Tensor]) -> None:
        """Wait for the slabs of round ``k``, which are added to the parts. Neighborwise collective."""
        beyond = self._stages[k].fill
        for shape in self._shapes[2 * k + 1 : 2 * k + 3]:
            slab = empty_as(parts[0], shape)
            parts.append(slab.zero_() if beyond else slab)
        if exchange is not None:
            exchange.finish()
            for (i, *cut), view in zip(self._places[k], chain.from_iterable(exchange.recvs)):
                parts[i].narrow(*cut).copy_(view)
            exchange.release()

    def start_adjoint(self, k: int, parts: Sequence[Tensor]) -> Exchange | None:
        """Send home the cotangents of the slabs of round ``k``. Neighborwise collective."""
        exchange = self._rounds[k].take(parts[0], adjoint=True)
        if exchange is not None:
            for (i, *cut), view in zip(self._places[k], chain.from_iterable(exchange.recvs)):
                view.copy_(parts[i].narrow(*cut))
            exchange.start(adjoint=True)
        return exchange

    def finish_adjoint(self, k: int, exchange: Exchange | None, parts: Sequence[Tensor]) -> None:
        """Add what comes back to the cotangents of the block and of the rounds before. Neighborwise collective."""
        if exchange is not None:
            exchange.finish(adjoint=True)
            for view, cuts in zip(chain.from_iterable(exchange.sends), self._strips_of(k, exchange)):
                for i, taken, given in cuts:
                    _cut(parts[i], given).add_(_cut(view, taken))
            exchange.release()

    def cuts(self, out: Sequence[int], origin: Sequence[int]) -> Cuts:
        """Return which parts a box of shape ``out`` meets that begins at cell ``origin``, one number per round.

        Not collective. Per part: its number, what is cut out of the box, and what out of the part.
        """
        found = []
        for i, shape in enumerate(self._shapes):
            starts, k = list(self._at), (i - 1) // 2
            if i:
                starts[: k + 1] = [0] * k + [0 if i % 2 else self._ends[k]]
            taken, given = [], []
            for stage, start, first in zip(self._stages, starts, origin):
                d = stage.dim
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

    def _strips_of(self, k: int, exchange: Exchange) -> list[Cuts]:
        """Return what the strips of round ``k`` are made of: of parts of the rounds before."""
        strips = self._strips.get(k)
        if strips is None:
            pieces = chain.from_iterable(parts for _, parts in self._rounds[k].sends)
            origins = [[0] * k + [self._at[k] + p.src] + self._at[k + 1 :] for (p,) in pieces]
            views = chain.from_iterable(exchange.sends)
            strips = self._strips[k] = [self.cuts(view.shape, origin) for view, origin in zip(views, origins)]
        return strips

    def _place(self, k: int, at: int, count: int) -> tuple[int, int, int, int]:
        """Return the part, and the cells of it, that come from cell ``at`` of the window on in round ``k``."""
        i, first = (2 * k + 1, 0) if at < self._at[k] else (2 * k + 2, self._ends[k])
        return i, self._stages[k].dim, at - first, count


def read(out: Tensor, parts: Sequence[Tensor], cuts: Cuts) -> None:
    """Fill ``out`` with the cells of the parts that it meets. Not collective."""
    for i, taken, given in cuts:
        _cut(out, taken).copy_(_cut(parts[i], given))


def _cut(x: Tensor, cuts: _Narrow) -> Tensor:
    for cut in cuts:
        x = x.narrow(*cut)
    return x
