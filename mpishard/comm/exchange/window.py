"""Window fetch: run planned stages on a block, dim after dim, so that corners are carried, or at once; its adjoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpishard.comm import traced
from mpishard.comm.exchange.at_once import DTYPES, AtOnce
from mpishard.comm.exchange.round import Round
from mpishard.comm.memory.buffer import cat
from mpishard.comm.memory.piece import channels_last_of, empty_as, like_in_memory, repeats
from mpishard.comm.mesh import CartMesh
from mpishard.comm.tag import Label
from mpishard.comm.transport.choice import Transport, transport_of

if TYPE_CHECKING:
    from mpishard.layout import Stage

# Bytes of a window up to which the calls that make it take longer than its copies.
FEW_BYTES = 65_536


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
        Tensor dims along which messages travel, on this rank or any other. With several, they travel all at once
        on a GPU, and where the block is `small`.
    small
        Whether blocks have so few cells that a wait costs more than their halo's corners.
    value
        What cells beyond the domain hold.
    op, label
        Name for counters and the watchdog, and what the plan is called; that which is being made, if not given.

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
        small: bool = False,
        value: float = 0.0,
        op: str = "window",
        label: Label | None = None,
    ) -> None:
        self.label = mesh.label if label is None else label
        self.mesh, self.dtype, self.value, self.op, self._along = mesh, dtype, value, op, rounds
        self._small = small and rounds > 1 and dtype in DTYPES
        self._mesh_dims = tuple(range(mesh.ndim))
        self.in_shape = tuple(shape)
        self.stages = list(stages)
        self.rounds: list[Round] = []
        now = list(shape)
        for stage in stages:
            self.rounds.append(Round.along(mesh, stage, now, dtype, op, self.label))
            now[stage.dim] = stage.n_out
        self.out_shape = tuple(now)
        # where the whole own block lies in the window, one array serves all stages
        self.resident = all(s.resident is not None for s in stages)
        self.identity = not stages
        self._is_few = self.resident and math.prod(now) * dtype.itemsize <= FEW_BYTES

    @cached_property
    def _at_once(self) -> Round:
        return Round.at_once(self.mesh, self.stages, self.in_shape, self.dtype, self.op, self.label)

    @cached_property
    def _by_number(self) -> AtOnce:
        return AtOnce(self._at_once, self.in_shape, self.out_shape)

    def _is_by_number(self, x: Tensor) -> bool:
        """Tell whether messages of all dims travel at once, on the host: alike on every rank, whatever its block."""
        return self._small and (x.is_cpu or self._transport(x).driver is None)

    def _transport(self, x: Tensor) -> Transport:
        return transport_of(self.mesh.group(self._mesh_dims), x)

    @cached_property
    def adjoint(self) -> WindowAdjoint:
        """The adjoint map."""
        return WindowAdjoint(self)

    @cached_property
    def tangent(self) -> WindowOp:
        """The linear part: the same window with zeros beyond the domain."""
        if self.value == 0:
            return self
        shape, dtype = self.in_shape, self.dtype
        return WindowOp(
            self.mesh,
            self.stages,
            shape,
            dtype,
            rounds=self._along,
            small=self._small,
            op=self.op,
            label=self.label,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Fetch the window of the block ``x``. Neighborwise collective."""
        if traced.recording is not None:
            return self._recorded(self, x, self.out_shape, self.op)
        if self.identity:
            return x
        if self._is_by_number(x):
            return like_in_memory(x, self._by_number.fetch(x, self.value))
        if self._along > 1 and self._transport(x).driver is not None:
            out, every = empty_as(x, self.out_shape), self._at_once
            exchange = every.start(x)
            every.copy(x, out)
            every.finish(exchange, out, self.value)
            return out
        if self._slabs is not None and x.is_cpu and x.is_contiguous():
            return self._in_one_call(x, *self._slabs)
        return self._in_one_array(x) if self.resident else self._array_per_stage(x)

    def _recorded(self, run: Callable[[Tensor], Tensor], x: Tensor, shape: Sequence[int], name: str) -> Tensor:
        assert traced.recording is not None
        if self.identity:
            # the others communicate
            traced.recording.names.append(f"{name} {x.dtype}")
            return x
        return traced.recording.call(name, run, [x], shape, channels_last=channels_last_of(x) is not None)

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
        if self._is_few and x.is_contiguous():
            kept = iter(reversed(halo))
            for stage in reversed(self.stages):
                lo, n = stage.resident, stage.n_in
                assert lo is not None
                above = [next(kept)] if stage.n_out > lo + n else []
                x = cat([*([next(kept)] if lo else []), x, *above], stage.dim)
            return x
        window = empty_as(x, self.out_shape)
        self._own(window).copy_(x)
        for part, beside in zip(self._beside(window), halo):
            part.copy_(beside)
        return window

    def _beside(self, window: Tensor) -> Iterator[Tensor]:
        for stage in self.stages:
            lo, n = stage.resident, stage.n_in
            assert lo is not None
            for at, count in ((0, lo), (lo + n, stage.n_out - lo - n)):
                if count:
                    yield window.narrow(stage.dim, at, count)
            window = window.narrow(stage.dim, lo, n)

    def _own(self, window: Tensor, since: int = 0) -> Tensor:
        for stage in self.stages[since:]:
            window = window.narrow(stage.dim, stage.resident, stage.n_in)  # type: ignore[arg-type]
        return window

    @cached_property
    def _slabs(self) -> tuple[list[Tensor], list[int]] | None:
        """What `_in_one_call` joins along the dim: slabs beyond the domain, and an order.

        That in which these, then the block, then what arrives lie. None where there are many cells, several stages, or
        others than these.
        """
        if not self._is_few or len(self.stages) != 1:
            return None
        stage, arriving = self.stages[0], [p for _, parts in self.rounds[0].recvs for (p,) in parts]
        if stage.local or any(map(repeats, arriving)):
            return None
        shape, beyond = list(self.in_shape), []
        for lo, hi in stage.fill:
            shape[stage.dim] = hi - lo
            with torch.inference_mode(False):
                beyond.append(torch.full(shape, self.value, dtype=self.dtype, device="cpu"))
        places = [*(lo for lo, _ in stage.fill), stage.resident, *(p.dst for p in arriving)]
        counts = [*(hi - lo for lo, hi in stage.fill), stage.n_in, *(p.count for p in arriving)]
        # a block without cells lies where a slab begins, too
        order = sorted(range(len(places)), key=lambda i: (places[i], counts[i]))
        return beyond, order

    def _in_one_call(self, x: Tensor, beyond: list[Tensor], order: list[int]) -> Tensor:
        one = self.rounds[0]
        exchange = one.start(x)
        if exchange is None:
            parts = [*beyond, x]
        else:
            exchange.finish()
            parts = [*beyond, x, *(view for views in exchange.recvs for view in views)]
        window = cat([parts[i] for i in order], self.stages[0].dim)
        if exchange is not None:
            exchange.release()
        return window

    def _in_one_array(self, x: Tensor) -> Tensor:
        window = empty_as(x, self.out_shape)
        for k, (stage, one) in enumerate(zip(self.stages, self.rounds)):
            at: int = stage.resident  # type: ignore[assignment]
            view = self._own(window, k + 1)
            if k == 0:
                # the first strips leave before the block is copied
                exchange = one.start(x)
                self._own(window).copy_(x)
            else:
                exchange = one.start(view, at)
            one.copy(view, view, at)
            one.finish(exchange, view, self.value)
        return window

    def _array_per_stage(self, x: Tensor) -> Tensor:
        for stage, one in zip(self.stages, self.rounds):
            exchange = one.start(x)
            shape = list(x.shape)
            shape[stage.dim] = stage.n_out
            out = empty_as(x, shape)
            if stage.resident is not None:
                out.narrow(stage.dim, stage.resident, stage.n_in).copy_(x)
            one.copy(x, out)
            one.finish(exchange, out, self.value)
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
        if traced.recording is not None:
            window = self._forward
            return window._recorded(self, g, window.in_shape, f"adjoint of {window.op}")
        if self._forward._is_by_number(g) and not self._forward.identity:
            return like_in_memory(g, self._forward._by_number.send_home(g))
        ours = False  # whether g is already an array of our own
        for stage, one in reversed(list(zip(self._forward.stages, self._forward.rounds))):
            exchange = one.start_adjoint(g)
            if stage.resident is None:
                shape = list(g.shape)
                shape[stage.dim] = stage.n_in
                own = g.new_zeros(shape)
            else:
                own = g.narrow(stage.dim, stage.resident, stage.n_in)
                if not ours:
                    own = empty_as(g, own.shape).copy_(own)
            one.add(g, own)
            one.finish_adjoint(exchange, own)
            g, ours = own, True
        return g
