"""The window fetch of `mpishard.comm.exchange.window` in one round of messages, for blocks in a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.exchange.neighbours import across
from mpishard.comm.exchange.pool import ExchangePool
from mpishard.comm.memory.copy_table import Box
from mpishard.comm.memory.piece import cells, repeats
from mpishard.comm.mesh import CartMesh
from mpishard.comm.tag import Label, said

if TYPE_CHECKING:
    from mpishard.layout import Piece, Stage

    # a box of a window that has one owner: one piece of every stage
    Part = tuple[Piece, ...]


class AtOnce:
    """All stages of a window in one round: every cell comes straight from its owner, corners too.

    For a GPU, where a launch and a message cost more than the bytes of a halo.

    Parameters
    ----------
    mesh, stages
        The mesh, and the stages of the window.
    shape, dtype
        Of the local block.
    op, label
        Name for counters and the watchdog, and what the plan is called.
    """

    def __init__(
        self,
        mesh: CartMesh,
        stages: Sequence[Stage],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        op: str,
        label: Label,
    ) -> None:
        self._mesh, self._stages, self._op, self._label = mesh, stages, op, label
        self._dims = [stage.dim for stage in stages]
        own = [stage.own for stage in stages]
        self._local: list[Part] = list(product(*own))
        self._sends, self._recvs = (
            across(
                mesh,
                [stage.mesh_dims for stage in stages],
                [{None: mine, **dict(side)} for mine, side in zip(own, sides)],
            )
            for sides in ([s.sends for s in stages], [s.recvs for s in stages])
        )
        sends, recvs = (
            [(peer, [self._extents(shape, part) for part in parts]) for peer, parts in side]
            for side in (self._sends, self._recvs)
        )
        self._pool = ExchangePool(mesh, tuple(range(mesh.ndim)), sends, recvs, dtype, op, label)

    def __call__(self, x: Tensor, out: Tensor, value: float) -> Tensor:
        """Fill ``out`` with the window of the block ``x``. Neighborwise collective."""
        if guard.DEBUG:
            guard.check(self._mesh.comm, said(self._op, self._label))
        exchange = self._pool.take(x)
        if exchange is not None:
            kernel = exchange.kernel_serves(x)
            if kernel:
                places = exchange.send_offsets
                exchange.pack(x, "out", lambda: self._boxes(places, self._sends, x, sending=True))
            else:
                for (_, parts), views in zip(self._sends, exchange.sends):
                    for part, view in zip(parts, views):
                        view.copy_(self._source(x, part))
            exchange.start()
        for part in self._local:
            self._target(out, part).copy_(self._source(x, part))
        for stage in self._stages:
            for lo, hi in stage.fill:
                out.narrow(stage.dim, lo, hi - lo).fill_(value)
        if exchange is not None:
            exchange.finish()
            kernel = exchange.kernel_serves(out)
            if kernel:
                there = exchange.recv_offsets
                exchange.unpack(out, "into", lambda: self._boxes(there, self._recvs, out, sending=False))
            for (_, parts), views in zip(self._recvs, exchange.recvs):
                for part, view in zip(parts, views):
                    if not kernel or any(map(repeats, part)):
                        self._target(out, part).copy_(view)
            exchange.release()
        return out

    def _extents(self, block: Sequence[int], part: Part) -> tuple[int, ...]:
        """Return the shape in which a part travels, of a block or a window."""
        shape = list(block)
        for dim, p in zip(self._dims, part):
            shape[dim] = p.wire_count
        return tuple(shape)

    def _source(self, x: Tensor, part: Part) -> Tensor:
        for dim, p in zip(self._dims, part):
            x = cells(x, dim, p.src, p.count, p.step)
        return x

    def _target(self, out: Tensor, part: Part) -> Tensor:
        for dim, p in zip(self._dims, part):
            out = out.narrow(dim, p.dst, p.count)
        return out

    def _boxes(self, offsets: Sequence[Sequence[int]], side: Any, x: Tensor, *, sending: bool) -> Iterator[Box]:
        """Yield what one kernel moves: the cells to send of a block, or those of a window that arrive."""
        size = x.itemsize
        for (_, parts), places in zip(side, offsets):
            for part, packed in zip(parts, places):
                if any(map(repeats, part)) and not sending:
                    continue
                offset, strides = 0, [s * size for s in x.stride()]
                for dim, p in zip(self._dims, part):
                    offset += (p.src if sending else p.dst) * strides[dim]
                    strides[dim] *= p.step if sending else 1
                yield Box(offset, self._extents(x.shape, part), tuple(strides), size, packed)
