"""Window fetch: run planned stages on a block, dim after dim, so that corners are carried; and its adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpishard.comm.exchange import Exchange
from mpishard.comm.mesh import CartMesh

if TYPE_CHECKING:
    from mpishard.layout import Piece, Stage


class _StageRun:
    """One stage on blocks of one shape: its exchanges, and how pieces map to buffers."""

    def __init__(self, mesh: CartMesh, stage: Stage, shape: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
        self.mesh, self.stage, self.shape, self.dtype, self.op = mesh, stage, shape, dtype, op
        self.dim = stage.dim
        self._pool: list[Exchange] = []

    def exchange(self, device: torch.device) -> Exchange | None:
        """Return an exchange that is not in flight, or None where nothing travels."""
        stage = self.stage
        if not stage.sends and not stage.recvs:
            return None
        for exchange in self._pool:
            if not exchange.busy and exchange.device == device:
                return exchange
        d = stage.dim
        sends, recvs = (
            [(peer, [(*self.shape[:d], p.wire_count, *self.shape[d + 1 :]) for p in pieces]) for peer, pieces in side]
            for side in (stage.sends, stage.recvs)
        )
        exchange = Exchange(self.mesh.group(stage.mesh_dims), sends, recvs, self.dtype, device, self.op)
        self.mesh.own(exchange.free)
        self._pool.append(exchange)
        return exchange


def _cells(x: Tensor, dim: int, src: int, count: int, step: int) -> Tensor:
    """Return ``count`` cells of ``x`` from ``src`` in steps (a repeated cell once)."""
    if step == 1:
        return x.narrow(dim, src, count)
    if step == 0:
        return x.narrow(dim, src, min(count, 1))
    low = src if step > 0 else src + (count - 1) * step
    stride = abs(step)
    view = x.narrow(dim, low, (count - 1) * stride + 1)
    if stride > 1:
        view = view[(slice(None),) * dim + (slice(None, None, stride),)]
    return view if step > 0 else view.flip(dim)


def _add_cells(x: Tensor, dim: int, src: int, count: int, step: int, values: Tensor) -> None:
    """Add ``values`` to the cells that `_cells` reads: its adjoint."""
    if step == 0:
        x.narrow(dim, src, 1).add_(values.sum(dim, keepdim=True) if values.shape[dim] != 1 else values)
    elif step > 0:
        _cells(x, dim, src, count, step).add_(values)
    else:
        _cells(x, dim, src + (count - 1) * step, count, -step).add_(values.flip(dim))


class WindowOp:
    """Block in, window out: a linear map over the ranks of a mesh.

    Parameters
    ----------
    mesh
        The mesh of the block.
    stages
        One per tensor dim that changes, in the order in which they run.
    shape
        Local shape of the block.
    dtype
        Of the block.
    value
        What cells beyond the domain hold.
    op
        Name for counters and the watchdog.

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
        value: float = 0.0,
        op: str = "window",
    ) -> None:
        self.mesh, self.dtype, self.value, self.op = mesh, dtype, value, op
        self.in_shape = tuple(shape)
        self.runs: list[_StageRun] = []
        now = list(shape)
        for stage in stages:
            self.runs.append(_StageRun(mesh, stage, tuple(now), dtype, op))
            now[stage.dim] = stage.n_out
        self.out_shape = tuple(now)
        # where the whole own block lies in the window, one array serves all stages
        self.resident = all(s.resident is not None for s in stages)
        self.identity = not stages

    @cached_property
    def adjoint(self) -> WindowAdjoint:
        """The adjoint map."""
        return WindowAdjoint(self)

    @cached_property
    def tangent(self) -> WindowOp:
        """The linear part: the same window with zeros beyond the domain."""
        if self.value == 0:
            return self
        return WindowOp(self.mesh, [r.stage for r in self.runs], self.in_shape, self.dtype, op=self.op)

    def __call__(self, x: Tensor) -> Tensor:
        """Fetch the window of the block ``x``. Neighborwise collective."""
        if self.identity:
            return x
        return self._in_one_array(x) if self.resident else self._array_per_stage(x)

    def _in_one_array(self, x: Tensor) -> Tensor:
        window = x.new_empty(self.out_shape)
        own = window
        for run in self.runs:
            own = own.narrow(run.dim, run.stage.resident, run.stage.n_in)  # type: ignore[arg-type]
        first = True
        for k, run in enumerate(self.runs):
            view = window
            for later in self.runs[k + 1 :]:
                view = view.narrow(later.dim, later.stage.resident, later.stage.n_in)  # type: ignore[arg-type]
            at: int = run.stage.resident  # type: ignore[assignment]
            if first:
                # strips leave before the block is copied
                exchange = self._send(run, x, 0)
                own.copy_(x)
                first = False
            else:
                exchange = self._send(run, view, at)
            for p in run.stage.local:
                view.narrow(run.dim, p.dst, p.count).copy_(_cells(view, run.dim, p.src + at, p.count, p.step))
            self._receive(run, exchange, view)
        return window

    def _array_per_stage(self, x: Tensor) -> Tensor:
        for run in self.runs:
            stage = run.stage
            exchange = self._send(run, x, 0)
            shape = list(x.shape)
            shape[run.dim] = stage.n_out
            out = x.new_empty(shape)
            if stage.resident is not None:
                out.narrow(run.dim, stage.resident, stage.n_in).copy_(x)
            for p in stage.local:
                out.narrow(run.dim, p.dst, p.count).copy_(_cells(x, run.dim, p.src, p.count, p.step))
            self._receive(run, exchange, out)
            x = out
        return x

    @staticmethod
    def _send(run: _StageRun, x: Tensor, at: int) -> Exchange | None:
        exchange = run.exchange(x.device)
        if exchange is not None:
            for (_, pieces), views in zip(run.stage.sends, exchange.sends):
                for p, view in zip(pieces, views):
                    view.copy_(_cells(x, run.dim, p.src + at, p.count, p.step))
            exchange.start()
        return exchange

    def _receive(self, run: _StageRun, exchange: Exchange | None, out: Tensor) -> None:
        for lo, hi in run.stage.fill:
            out.narrow(run.dim, lo, hi - lo).fill_(self.value)
        if exchange is not None:
            exchange.finish()
            for (_, pieces), views in zip(run.stage.recvs, exchange.recvs):
                for p, view in zip(pieces, views):
                    out.narrow(run.dim, p.dst, p.count).copy_(view)
            exchange.release()


class WindowAdjoint:
    """Cotangent of a window in, cotangent of the block out; see `WindowOp`."""

    def __init__(self, forward: WindowOp) -> None:
        self.adjoint = forward.tangent
        self._runs = forward.runs
        self._identity = forward.identity

    @property
    def tangent(self) -> WindowAdjoint:
        """The linear part: itself."""
        return self

    def __call__(self, g: Tensor) -> Tensor:
        """Send halo cotangents home and add what comes back. Neighborwise collective."""
        if self._identity:
            return g
        ours = False  # whether g is already an array of our own
        for run in reversed(self._runs):
            stage = run.stage
            exchange = run.exchange(g.device)
            if exchange is not None:
                for (_, pieces), views in zip(stage.recvs, exchange.recvs):
                    for p, view in zip(pieces, views):
                        _gather(g, run.dim, p, view)
                exchange.start(adjoint=True)
            if stage.resident is None:
                shape = list(g.shape)
                shape[run.dim] = stage.n_in
                own = g.new_zeros(shape)
            else:
                own = g.narrow(run.dim, stage.resident, stage.n_in)
                if not ours:
                    own = own.clone(memory_format=torch.contiguous_format)
            for p in stage.local:
                _add_cells(own, run.dim, p.src, p.count, p.step, g.narrow(run.dim, p.dst, p.count))
            if exchange is not None:
                exchange.finish(adjoint=True)
                for (_, pieces), views in zip(stage.sends, exchange.sends):
                    for p, view in zip(pieces, views):
                        _add_cells(own, run.dim, p.src, p.count, p.step, view.to(g.device))
                exchange.release()
            g, ours = own, True
        return g


def _gather(g: Tensor, dim: int, p: Piece, out: Tensor) -> None:
    values = g.narrow(dim, p.dst, p.count)
    out.copy_(values.sum(dim, keepdim=True) if p.step == 0 and p.count > 1 else values)
