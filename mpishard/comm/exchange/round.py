"""One round of messages of a window: along one dim, or along all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.exchange.neighbours import across
from mpishard.comm.exchange.persistent import Exchange
from mpishard.comm.exchange.pool import ExchangePool
from mpishard.comm.memory.copy_table import Box
from mpishard.comm.memory.piece import add_cells, cells, repeats
from mpishard.comm.mesh import CartMesh
from mpishard.comm.tag import Label, said

if TYPE_CHECKING:
    from mpishard.layout import Piece, Stage

    # a box of a window that has one owner: one piece of every stage
    Part = tuple[Piece, ...]
    Way = Sequence[tuple[int, Sequence[Part]]]


class Round:
    """The messages of one round on blocks of one shape, in steps, so that work can go on while they travel.

    Parameters
    ----------
    mesh, mesh_dims
        The mesh, and the dims along which the peers lie.
    stages
        Of this rank, whose pieces make up a part.
    sends, recvs, local
        What travels, per peer, and what stays on this rank.
    shape, dtype
        Of the block that the round starts from.
    op, label
        Name for counters and the watchdog, and what the plan is called.
    """

    def __init__(
        self,
        mesh: CartMesh,
        mesh_dims: tuple[int, ...],
        stages: Sequence[Stage],
        sends: Way,
        recvs: Way,
        local: Sequence[Part],
        shape: Sequence[int],
        dtype: torch.dtype,
        op: str,
        label: Label,
    ) -> None:
        self.stages, self.dims, self.dtype = stages, [stage.dim for stage in stages], dtype
        self._mesh, self._mesh_dims, self._op, self._label = mesh, mesh_dims, op, label
        self.sends, self.recvs, self.local = sends, recvs, local
        out, into = (
            [(peer, [self._extents(shape, part) for part in parts]) for peer, parts in side] for side in (sends, recvs)
        )
        self._pool = ExchangePool(mesh, mesh_dims, out, into, dtype, op, label)

    @classmethod
    def along(
        cls, mesh: CartMesh, stage: Stage, shape: Sequence[int], dtype: torch.dtype, op: str, label: Label
    ) -> Round:
        """Return the round of one stage. Not collective."""
        sends, recvs = (
            [(peer, [(p,) for p in pieces]) for peer, pieces in side] for side in (stage.sends, stage.recvs)
        )
        local = [(p,) for p in stage.local]
        return cls(mesh, stage.mesh_dims, [stage], sends, recvs, local, shape, dtype, op, label)

    @classmethod
    def at_once(
        cls, mesh: CartMesh, stages: Sequence[Stage], shape: Sequence[int], dtype: torch.dtype, op: str, label: Label
    ) -> Round:
        """Return the round in which every cell comes straight from its owner, corners too. Not collective.

        For a GPU, where a launch and a message cost more than the bytes of a halo.
        """
        own, mesh_dims = [stage.own for stage in stages], [stage.mesh_dims for stage in stages]
        sends, recvs = (
            across(mesh, mesh_dims, [{None: mine, **dict(side)} for mine, side in zip(own, sides)])
            for sides in ([s.sends for s in stages], [s.recvs for s in stages])
        )
        every = tuple(range(mesh.ndim))
        return cls(mesh, every, stages, sends, recvs, list(product(*own)), shape, dtype, op, label)

    def take(self, x: Tensor, adjoint: bool = False) -> Exchange | None:
        """Return the messages that lie beside ``x``, to be filled; None where none travel. Not collective."""
        if guard.DEBUG and self._mesh_dims:
            # of the whole mesh, also on ranks to which nothing comes
            guard.check(self._mesh.comm, said(self._op, self._label, adjoint))
        assert x.dtype == self.dtype, "planned for another dtype"
        return self._pool.take(x)

    def start(self, x: Tensor, at: int = 0) -> Exchange | None:
        """Send strips of ``x``, whose own block begins at cell ``at`` of the dims. Neighborwise collective."""
        exchange = self.take(x)
        if exchange is not None:
            if exchange.has_kernel and exchange.kernel_serves(x):
                exchange.pack(x, ("out", at), lambda: self._boxes(exchange.send_offsets, x, at))
            else:
                for (_, parts), views in zip(self.sends, exchange.sends):
                    for part, view in zip(parts, views):
                        view.copy_(self._source(x, part, at))
            exchange.start()
        return exchange

    def copy(self, x: Tensor, out: Tensor, at: int = 0) -> None:
        """Copy what this rank has itself from ``x``, whose own block begins at ``at``. Not collective."""
        for part in self.local:
            self._target(out, part).copy_(self._source(x, part, at))

    def finish(self, exchange: Exchange | None, out: Tensor, value: float = 0.0) -> None:
        """Fill ``out`` with what arrives, and with ``value`` beyond the domain. Neighborwise collective."""
        for stage in self.stages:
            for lo, hi in stage.fill:
                out.narrow(stage.dim, lo, hi - lo).fill_(value)
        if exchange is not None:
            exchange.finish()
            kernel = exchange.has_kernel and exchange.kernel_serves(out)
            if kernel:
                exchange.unpack(out, "into", lambda: self._boxes(exchange.recv_offsets, out, None))
            for (_, parts), views in zip(self.recvs, exchange.recvs):
                for part, view in zip(parts, views):
                    if not kernel or any(map(repeats, part)):
                        self._target(out, part).copy_(view)
            exchange.release()

    def start_adjoint(self, g: Tensor) -> Exchange | None:
        """Send home the cotangents of the cells that arrived. Neighborwise collective."""
        exchange = self.take(g, adjoint=True)
        if exchange is not None:
            kernel = exchange.has_kernel and exchange.kernel_serves(g)
            if kernel:
                exchange.pack(g, "into", lambda: self._boxes(exchange.recv_offsets, g, None), adjoint=True)
            for (_, parts), views in zip(self.recvs, exchange.recvs):
                for part, view in zip(parts, views):
                    repeated = [dim for dim, p in zip(self.dims, part) if repeats(p)]
                    if not kernel or repeated:
                        values = self._target(g, part)
                        view.copy_(values.sum(repeated, keepdim=True) if repeated else values)
            exchange.start(adjoint=True)
        return exchange

    def finish_adjoint(self, exchange: Exchange | None, own: Tensor) -> None:
        """Add what comes back to the block's cotangent ``own``, in place. Neighborwise collective."""
        if exchange is not None:
            exchange.finish(adjoint=True)
            for (_, parts), views in zip(self.sends, exchange.sends):
                for part, view in zip(parts, views):
                    self._add(own, part, view)
            exchange.release()

    def add(self, g: Tensor, own: Tensor) -> None:
        """Add the cotangents of what this rank has itself: the adjoint of `copy`. Not collective."""
        for part in self.local:
            self._add(own, part, self._target(g, part))

    def _add(self, own: Tensor, part: Part, values: Tensor) -> None:
        ((dim, p),) = zip(self.dims, part)  # all at once, only the fetch goes
        add_cells(own, dim, p.src, p.count, p.step, values)

    def _extents(self, block: Sequence[int], part: Part) -> tuple[int, ...]:
        """Return the shape in which a part travels, of a block or a window."""
        shape = list(block)
        for dim, p in zip(self.dims, part):
            shape[dim] = p.wire_count
        return tuple(shape)

    def _source(self, x: Tensor, part: Part, at: int) -> Tensor:
        for dim, p in zip(self.dims, part):
            x = cells(x, dim, p.src + at, p.count, p.step)
        return x

    def _target(self, out: Tensor, part: Part) -> Tensor:
        for dim, p in zip(self.dims, part):
            out = out.narrow(dim, p.dst, p.count)
        return out

    def _boxes(self, offsets: Sequence[Sequence[int]], x: Tensor, at: int | None) -> Iterator[Box]:
        """Yield what one kernel moves: the cells to send of a block at ``at``, or those that arrive (None)."""
        size = x.itemsize
        for (_, parts), places in zip(self.recvs if at is None else self.sends, offsets):
            for part, packed in zip(parts, places):
                if at is None and any(map(repeats, part)):
                    continue
                offset, strides = 0, [s * size for s in x.stride()]
                for dim, p in zip(self.dims, part):
                    offset += (p.dst if at is None else p.src + at) * strides[dim]
                    strides[dim] *= 1 if at is None else p.step
                yield Box(offset, self._extents(x.shape, part), tuple(strides), size, packed)
