"""A small window fetched in one round on the host: cells go to and from the messages by their numbers.

Every cell comes straight from its owner, corners too: one wait instead of one a dim, and as many operations of torch
for 26 neighbours as for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpishard.comm.exchange.persistent import Exchange, Offsets
from mpishard.comm.exchange.round import Round
from mpishard.comm.memory.piece import repeats

if TYPE_CHECKING:
    from mpishard.comm.exchange.round import Part, Way
    from mpishard.layout import Piece


# of which torch takes and puts cells by their numbers
DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
}


class _Table(NamedTuple):
    """Pairs of cells, by their numbers: of the block and of a message or the window, or of the window and a message.

    Of messages, ``packed`` are the cells of a whole buffer, in order: what lies between messages does not travel, and
    takes any. None where several cells meet in one. ``whole`` tells that nothing lies between them.
    """

    own: Tensor
    other: Tensor
    packed: Tensor | None = None
    whole: bool = False

    def of_message(self, buffer: Tensor) -> Tensor:
        """Return what has arrived in a buffer for ``own``."""
        return buffer if self.whole else buffer.index_select(0, self.other)


class AtOnce:
    """The round ``every`` of all dims, of blocks with few cells, given the shapes of the block and of its window."""

    def __init__(self, every: Round, in_shape: Sequence[int], out_shape: Sequence[int]) -> None:
        self._every, self._in, self._out = every, tuple(in_shape), tuple(out_shape)
        # of a block that lies in the window whole, which is copied as it is
        self._whole = all(stage.resident is not None for stage in every.stages) and bool(every.local)
        self._strides = [math.prod(self._out[dim + 1 :]) for dim in range(len(self._out))]
        self._first = sum((stage.resident or 0) * self._strides[stage.dim] for stage in every.stages)
        self._repeats = any(repeats(p) for _, parts in every.recvs for part in parts for p in part)
        self._tables: dict[torch.device, tuple[_Table | None, _Table | None, _Table | None, bool]] = {}

    def fetch(self, x: Tensor, value: float) -> Tensor:
        """Return the window of a block, with ``value`` beyond the domain. Neighborwise collective."""
        x = x.contiguous()
        exchange = self._every.take(x)
        sends, recvs, local, is_full = self._tables_of(x.device, exchange)
        cells = x.view(-1)
        if exchange is not None:
            if sends is not None:
                _pack(cells, sends, exchange.out)
            exchange.start()
        window = x.new_empty(self._out) if is_full else x.new_full(self._out, value)
        if self._whole:
            self._place(window).copy_(x)
        out = window.view(-1)
        if local is not None:
            out.index_copy_(0, local.other, cells.index_select(0, local.own))
        if exchange is not None:
            exchange.finish()
            if recvs is not None:
                out.index_copy_(0, recvs.own, recvs.of_message(exchange.into))
            exchange.release()
        return window

    def send_home(self, g: Tensor) -> Tensor:
        """Return the cotangent of the block for that of the window: the adjoint of `fetch`. Neighborwise collective."""
        g = g.contiguous()
        exchange = self._every.take(g, adjoint=True)
        sends, recvs, local, _ = self._tables_of(g.device, exchange)
        cells = g.view(-1)
        if exchange is not None:
            if recvs is not None:
                _pack(cells, recvs, exchange.into)
            exchange.start(adjoint=True)
        if self._whole:
            own = self._place(g).clone(memory_format=torch.contiguous_format)
        else:
            own = g.new_zeros(self._in)
        into = own.view(-1)
        if local is not None:
            into.index_add_(0, local.own, cells.index_select(0, local.other))
        if exchange is not None:
            exchange.finish(adjoint=True)
            if sends is not None:
                # in ascending order of the peers
                into.index_add_(0, sends.own, sends.of_message(exchange.out))
            exchange.release()
        return own

    def _place(self, window: Tensor) -> Tensor:
        """Return where the block lies in its window, which is contiguous."""
        return window.as_strided(self._in, self._strides, window.storage_offset() + self._first)

    def _tables_of(
        self, device: torch.device, exchange: Exchange | None
    ) -> tuple[_Table | None, _Table | None, _Table | None, bool]:
        """Return what is sent (block, message), received (window, message) and copied (block, window), made once.

        And whether nothing of the window lies beyond the domain.
        """
        found = self._tables.get(device)
        if found is None:
            every, local = self._every, self._every.local[1:] if self._whole else self._every.local
            sends: list[tuple[np.ndarray, np.ndarray]] = []
            recvs: list[tuple[np.ndarray, np.ndarray]] = []
            if exchange is not None:
                size = every.dtype.itemsize
                for part, first in _placed(every.sends, exchange.send_offsets, size):
                    own = self._numbers(self._in, part, _sent)
                    sends.append((own, first + np.arange(own.size)))
                for part, first in _placed(every.recvs, exchange.recv_offsets, size):
                    wire = list(self._in)
                    for dim, p in zip(every.dims, part):
                        wire[dim] = p.wire_count
                    recvs.append(
                        (self._numbers(self._out, part, _filled), first + self._numbers(wire, part, _travelled))
                    )
            kept = [(self._numbers(self._in, p, _read), self._numbers(self._out, p, _filled)) for p in local]
            given = [to.size for _, to in kept] + [to.size for to, _ in recvs]
            found = self._tables[device] = (
                _table(sends, device, 0 if exchange is None else exchange.out.numel()),
                _table(recvs, device, 0 if exchange is None or self._repeats else exchange.into.numel()),
                _table(kept, device),
                math.prod(self._in) * self._whole + sum(given) == math.prod(self._out),
            )
        return found

    def _numbers(self, shape: Sequence[int], part: Part, along: Callable[[Piece], np.ndarray]) -> np.ndarray:
        """Return the numbers of a part's cells in a dense array of ``shape``, in the order in which they travel."""
        where = dict(zip(self._every.dims, part))
        total = np.zeros((), dtype=np.int64)
        for dim, n in enumerate(shape):
            total = np.add.outer(total * n, along(where[dim]) if dim in where else np.arange(n))
        return total.reshape(-1)


def _sent(p: Piece) -> np.ndarray:
    return p.src + p.step * np.arange(p.wire_count)


def _read(p: Piece) -> np.ndarray:
    return p.src + p.step * np.arange(p.count)


def _filled(p: Piece) -> np.ndarray:
    return p.dst + np.arange(p.count)


def _travelled(p: Piece) -> np.ndarray:
    return np.arange(p.count) if p.step else np.zeros(p.count, dtype=np.int64)


def _placed(side: Way, offsets: Offsets, size: int) -> Iterator[tuple[Part, int]]:
    """Yield every part of messages, and the number of its first cell in their buffer."""
    for (_, parts), starts in zip(side, offsets):
        for part, start in zip(parts, starts):
            yield part, start // size


def _table(pairs: list[tuple[np.ndarray, np.ndarray]], device: torch.device, length: int = 0) -> _Table | None:
    """Return pairs as a table; ``length`` is that of the buffer of messages, if a copy is to fill it."""
    if not sum(own.size for own, _ in pairs):
        return None
    own, other = (np.concatenate(side) for side in zip(*pairs))
    packed = np.zeros(length, dtype=np.int64)
    if length:
        packed[other] = own
    # a plan lives on, and later gradients read it
    with torch.inference_mode(False):
        tables = [torch.from_numpy(numbers).to(device) for numbers in (own, other, packed)]
    whole = bool(np.array_equal(other, np.arange(length)))
    return _Table(tables[0], tables[1], tables[2] if length else None, whole)


def _pack(cells: Tensor, table: _Table, buffer: Tensor) -> None:
    """Copy cells of a block, or of a window's cotangent, to the buffer of their messages."""
    if table.packed is not None:
        torch.index_select(cells, 0, table.packed, out=buffer)
    else:
        buffer.zero_().index_add_(0, table.other, cells.index_select(0, table.own))
