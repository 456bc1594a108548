"""Window fetch: run planned stages on a block, dim after dim, so that corners are carried; and its adjoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.exchange.persistent import Exchange
from mpishard.comm.exchange.pool import ExchangePool
from mpishard.comm.exchange.window_single_round import AtOnce
from mpishard.comm.memory.copy_table import Box
from mpishard.comm.memory.piece import add_cells, cells, empty_as, repeats
from mpishard.comm.mesh import CartMesh
from mpishard.comm.tag import Label, said
from mpishard.comm.transport.choice import transport_of

if TYPE_CHECKING:
    from mpishard.layout import Stage


class StageRun:
    """One stage on blocks of one shape, in steps, so that work can go on while messages travel.

    Parameters
    ----------
    mesh, stage
        The mesh and this rank's stage on it.
    shape, dtype
        Of the block that the stage starts from.
    op, label
        Name for counters and the watchdog, and what the plan is called; that which is being made, if not given.
    """

    def __init__(
        self,
        mesh: CartMesh,
        stage: Stage,
        shape: Sequence[int],
        dtype: torch.dtype,
        op: str,
        label: Label | None = None,
    ) -> None:
        self.mesh, self.stage, self.shape, self.dtype, self.op = mesh, stage, tuple(shape), dtype, op
        self.label = mesh.label if label is None else label
        d = self.dim = stage.dim
        sends, recvs = (
            [(peer, [(*self.shape[:d], p.wire_count, *self.shape[d + 1 :]) for p in pieces]) for peer, pieces in side]
            for side in (stage.sends, stage.recvs)
        )
        self._pool = ExchangePool(mesh, stage.mesh_dims, sends, recvs, dtype, op, self.label)

    def _check(self, adjoint: bool) -> None:
        # of the whole mesh, also on ranks to which nothing comes
        if self.stage.mesh_dims:
            guard.check(self.mesh.comm, said(self.op, self.label, adjoint))

    def _boxes(self, offsets: Sequence[Sequence[int]], x: Tensor, at: int | None) -> Iterator[Box]:
        """Yield what one kernel moves: the cells to send of a block at ``at``, or those that arrive (None)."""
        dim, size = self.dim, x.itemsize
        strides = [s * size for s in x.stride()]
        side = self.stage.recvs if at is None else self.stage.sends
        for (_, pieces), places in zip(side, offsets):
            for p, packed in zip(pieces, places):
                if at is None and repeats(p):
                    continue
                first, step = (p.dst, 1) if at is None else (p.src + at, p.step)
                yield Box(
                    first * strides[dim],
                    (*x.shape[:dim], p.count if at is None else p.wire_count, *x.shape[dim + 1 :]),
                    (*strides[:dim], strides[dim] * step, *strides[dim + 1 :]),
                    size,
                    packed,
                )

    def start(self, x: Tensor, at: int = 0) -> Exchange | None:
        """Send strips of ``x``, whose own block begins at cell ``at`` of the dim. Neighborwise collective."""
        assert x.dtype == self.dtype, "planned for another dtype"
        if guard.DEBUG:
            self._check(False)
        exchange = self._pool.take(x)
        if exchange is not None:
            kernel = exchange.kernel_serves(x)
            if kernel:
                exchange.pack(x, ("out", at), lambda: self._boxes(exchange.send_offsets, x, at))
            else:
                for (_, pieces), views in zip(self.stage.sends, exchange.sends):
                    for p, view in zip(pieces, views):
                        view.copy_(cells(x, self.dim, p.src + at, p.count, p.step))
            exchange.start()
        return exchange

    def finish(self, exchange: Exchange | None, out: Tensor, value: float = 0.0) -> None:
        """Fill ``out`` with what arrives, and with ``value`` beyond the domain. Neighborwise collective."""
        for lo, hi in self.stage.fill:
            out.narrow(self.dim, lo, hi - lo).fill_(value)
        if exchange is not None:
            exchange.finish()
            kernel = exchange.kernel_serves(out)
            if kernel:
                exchange.unpack(out, "into", lambda: self._boxes(exchange.recv_offsets, out, None))
            for (_, pieces), views in zip(self.stage.recvs, exchange.recvs):
                for p, view in zip(pieces, views):
                    if not kernel or repeats(p):
                        out.narrow(self.dim, p.dst, p.count).copy_(view)
            exchange.release()

    def start_adjoint(self, g: Tensor) -> Exchange | None:
        """Send home the cotangents of the cells that arrived. Neighborwise collective."""
        assert g.dtype == self.dtype, "planned for another dtype"
        if guard.DEBUG:
            self._check(True)
        exchange = self._pool.take(g)
        if exchange is not None:
            kernel = exchange.kernel_serves(g)
            if kernel:
                exchange.pack(g, "into", lambda: self._boxes(exchange.recv_offsets, g, None), adjoint=True)
            for (_, pieces), views in zip(self.stage.recvs, exchange.recvs):
                for p, view in zip(pieces, views):
                    if not kernel or repeats(p):
                        values = g.narrow(self.dim, p.dst, p.count)
                        view.copy_(values.sum(self.dim, keepdim=True) if repeats(p) else values)
            exchange.start(adjoint=True)
        return exchange

    def finish_adjoint(self, exchange: Exchange | None, own: Tensor) -> None:
        """Add what comes back to the block's cotangent ``own``, in place. Neighborwise collective."""
        if exchange is not None:
            exchange.finish(adjoint=True)
            for (_, pieces), views in zip(self.stage.sends, exchange.sends):
                for p, view in zip(pieces, views):
                    add_cells(own, self.dim, p.src, p.count, p.step, view)
            exchange.release()


class WindowOp:
    """Block in, window out: a linear map over the ranks of a mesh.

    Parameters
    ----------
    mesh
        The mesh of the block.
    stages
        One per tensor dim that changes, in the order in which they run.
    shape, dtype
        Of the local block.
    rounds
        Tensor dims along which messages travel, on this rank or any other. With several, on a GPU they travel
        all at once.
    value
        What cells beyond the domain hold.
    op, label
        As of `StageRun`.

    Notes
    -----
    Adjoint: the stages reversed; what a rank received is sent back and *added* to the owned cells, in
    ascending order of the peers.
    """

    def __init__(
        self,
        mesh: CartMesh,
        stages: Sequence[Stage],
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        rounds: int = 1,
        value: float = 0.0,
        op: str = "window",
        label: Label | None = None,
    ) -> None:
        self.label = mesh.label if label is None else label
        self.mesh, self.dtype, self.value, self.op, self._rounds = mesh, dtype, value, op, rounds
        self.in_shape = tuple(shape)
        self.runs: list[StageRun] = []
        now = list(shape)
        for stage in stages:
            self.runs.append(StageRun(mesh, stage, now, dtype, op, self.label))
            now[stage.dim] = stage.n_out
        self.out_shape = tuple(now)
        # where the whole own block lies in the window, one array serves all stages
        self.resident = all(s.resident is not None for s in stages)
        self.identity = not stages

    @cached_property
    def _at_once(self) -> AtOnce:
        return AtOnce(self.mesh, [run.stage for run in self.runs], self.in_shape, self.dtype, self.op, self.label)

    @cached_property
    def adjoint(self) -> WindowAdjoint:
        """The adjoint map."""
        return WindowAdjoint(self)

    @cached_property
    def tangent(self) -> WindowOp:
        """The linear part: the same window with zeros beyond the domain."""
        if self.value == 0:
            return self
        stages = [r.stage for r in self.runs]
        shape, dtype = self.in_shape, self.dtype
        return WindowOp(self.mesh, stages, shape, dtype, rounds=self._rounds, op=self.op, label=self.label)

    def __call__(self, x: Tensor) -> Tensor:
        """Fetch the window of the block ``x``. Neighborwise collective."""
        if self.identity:
            return x
        if self._rounds > 1 and transport_of(self.mesh.group(tuple(range(self.mesh.ndim))), x).driver is not None:
            return self._at_once(x, empty_as(x, self.out_shape), self.value)
        return self._in_one_array(x) if self.resident else self._array_per_stage(x)

    def halo_of(self, window: Tensor) -> list[Tensor]:
        """Return what `joined` needs of a window that was fetched: copies of the cells beside this rank's block.

        Where the window does not hold the whole block, it is the window itself. Not collective.
        """
        if self.identity:
            return []
        return [part.clone() for part in self._beside(window)] if self.resident else [window]

    def joined(self, x: Tensor, halo: Sequence[Tensor]) -> Tensor:
        """Return the window of the block ``x`` again, of its `halo_of`: nothing travels. Not collective."""
        if self.identity:
            return x
        if not self.resident:
            return halo[0]
        window = empty_as(x, self.out_shape)
        self._own(window).copy_(x)
        for part, kept in zip(self._beside(window), halo):
            part.copy_(kept)
        return window

    def _beside(self, window: Tensor) -> Iterator[Tensor]:
        for run in self.runs:
            lo, n = run.stage.resident, run.stage.n_in
            assert lo is not None
            for at, count in ((0, lo), (lo + n, run.stage.n_out - lo - n)):
                if count:
                    yield window.narrow(run.dim, at, count)
            window = window.narrow(run.dim, lo, n)

    def _own(self, window: Tensor) -> Tensor:
        for run in self.runs:
            window = window.narrow(run.dim, run.stage.resident, run.stage.n_in)  # type: ignore[arg-type]
        return window

    def _in_one_array(self, x: Tensor) -> Tensor:
        window = empty_as(x, self.out_shape)
        for k, run in enumerate(self.runs):
            at: int = run.stage.resident  # type: ignore[assignment]
            view = window
            for later in self.runs[k + 1 :]:
                view = view.narrow(later.dim, later.stage.resident, later.stage.n_in)  # type: ignore[arg-type]
            if k == 0:
                # the first strips leave before the block is copied
                exchange = run.start(x)
                self._own(window).copy_(x)
            else:
                exchange = run.start(view, at)
            for p in run.stage.local:
                view.narrow(run.dim, p.dst, p.count).copy_(cells(view, run.dim, p.src + at, p.count, p.step))
            run.finish(exchange, view, self.value)
        return window

    def _array_per_stage(self, x: Tensor) -> Tensor:
        for run in self.runs:
            stage = run.stage
            exchange = run.start(x)
            shape = list(x.shape)
            shape[run.dim] = stage.n_out
            out = empty_as(x, shape)
            if stage.resident is not None:
                out.narrow(run.dim, stage.resident, stage.n_in).copy_(x)
            for p in stage.local:
                out.narrow(run.dim, p.dst, p.count).copy_(cells(x, run.dim, p.src, p.count, p.step))
            run.finish(exchange, out, self.value)
            x = out
        return x


class WindowAdjoint:
    """Cotangent of a window in, cotangent of the block out; see `WindowOp`."""

    def __init__(self, forward: WindowOp) -> None:
        self._forward = forward

    @property
    def adjoint(self) -> WindowOp:
        """The linear part of the window fetch."""
        return self._forward.tangent

    def __call__(self, g: Tensor) -> Tensor:
        """Send halo cotangents home and add what comes back. Neighborwise collective."""
        ours = False  # whether g is already an array of our own
        for run in reversed(self._forward.runs):
            stage = run.stage
            exchange = run.start_adjoint(g)
            if stage.resident is None:
                shape = list(g.shape)
                shape[run.dim] = stage.n_in
                own = g.new_zeros(shape)
            else:
                own = g.narrow(run.dim, stage.resident, stage.n_in)
                if not ours:
                    own = empty_as(g, own.shape).copy_(own)
            for p in stage.local:
                add_cells(own, run.dim, p.src, p.count, p.step, g.narrow(run.dim, p.dst, p.count))
            run.finish_adjoint(exchange, own)
            g, ours = own, True
        return g
