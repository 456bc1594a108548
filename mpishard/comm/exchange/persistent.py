"""Persistent messages between this rank and its peers: buffers of our own, the same ones both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mpishard.comm.memory.copy_table import UNITS, Box, plan_table
from mpishard.comm.tag import Label
from mpishard.comm.transport.choice import Transport
from mpishard.comm.transport.device_message import Envelope
from mpishard.comm.transport.host import Storage

Parts = Sequence["tuple[int, Sequence[torch.Size | tuple[int, ...]]]"]
Offsets = list[list[int]]


class Exchange:
    """One message to and from each peer of a group, reversible.

    Forward, it sends ``sends`` and receives ``recvs``; in the adjoint direction the same buffers travel the
    other way.

    Parameters
    ----------
    transport
        What carries them.
    sends, recvs
        Per peer, the shapes of the blocks in its message, in order.
    dtype
        Of the tensors that are packed.
    op, label
        Name for counters and the watchdog, and what the plan is called.
    storages
        Host memory where the messages may lie; some is added where none is free and large enough.

    Attributes
    ----------
    transport, device
        What carries them, and where they lie.
    sends, recvs : list of list of Tensor
        Views of the buffers, per peer and block.
    out, into : Tensor
        The buffers, as cells: what the forward direction sends from and receives to.
    send_offsets, recv_offsets : list of list of int
        Where these begin in the buffers, in bytes.
    acquire, start, finish, release
        Of the messages: make the buffers this stream's, start and finish them in one direction or the other, and
        give the buffers back when what came is unpacked.
    """

    __slots__ = (
        "__weakref__",
        "_driver",
        "_messages",
        "_tables",
        "acquire",
        "device",
        "finish",
        "has_kernel",
        "into",
        "out",
        "recv_offsets",
        "recvs",
        "release",
        "send_offsets",
        "sends",
        "start",
        "storage",
        "transport",
    )

    def __init__(
        self,
        transport: Transport,
        sends: Parts,
        recvs: Parts,
        dtype: torch.dtype,
        op: str,
        label: Label,
        storages: list[Storage],
    ) -> None:
        self.transport, self.device, self.has_kernel = transport, transport.device, transport.has_kernel
        (out, out_blocks), (into, into_blocks) = (_envelopes(parts, dtype, label) for parts in (sends, recvs))
        # made in inference mode, they would serve no other
        with torch.inference_mode(False):
            self._messages = m = transport.messages(out, into, op, label, storages)
            self.out, self.into = m.out.tensor.view(dtype), m.into.tensor.view(dtype)
            self.sends, self.send_offsets = _views(m.out.tensor, m.out_starts, sends, out_blocks, dtype)
            self.recvs, self.recv_offsets = _views(m.into.tensor, m.into_starts, recvs, into_blocks, dtype)
        self._driver: Any = transport.driver
        self.storage = m.storage
        self._tables: dict[Any, Any] = {}
        self.acquire, self.start, self.finish, self.release = m.acquire, m.start, m.finish, m.release

    @property
    def busy(self) -> bool:
        """Whether this exchange, or another one in the same memory, is in flight."""
        return self.storage.busy

    def kernel_serves(self, x: Tensor) -> bool:
        """Whether `pack` and `unpack` can move cells of ``x``. Not collective."""
        return self.has_kernel and not (x.is_conj() or x.is_neg())

    def pack(self, x: Tensor, key: Any, boxes: Callable[[], Iterable[Box]], *, adjoint: bool = False) -> None:
        """Queue the copy of boxes of ``x`` to the buffer that the direction sends from. Not collective."""
        memory: Any = self._messages.into if adjoint else self._messages.out
        self._driver.pack(self._table(x, key, boxes), x.data_ptr(), memory)

    def unpack(self, x: Tensor, key: Any, boxes: Callable[[], Iterable[Box]]) -> None:
        """Queue the copy of what arrived to boxes of ``x``. Not collective."""
        self._driver.unpack(self._table(x, key, boxes), x.data_ptr(), self._messages.into)  # type: ignore[arg-type]

    def _table(self, x: Tensor, key: Any, boxes: Callable[[], Iterable[Box]]) -> Any:
        address = x.data_ptr() | UNITS[0]
        alignment = address & -address  # the lowest bit
        key = (key, x.shape, x.stride(), x.itemsize, alignment)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._driver.table(plan_table(boxes(), alignment))
        return table

    def free(self) -> None:
        """Free requests and buffers. Not collective."""
        self.sends, self.recvs = [], []
        self._tables.clear()
        self._messages.free()


def _envelopes(parts: Parts, dtype: torch.dtype, label: Label) -> tuple[list[Envelope], list[list[int]]]:
    sizes = [[torch.Size(s).numel() * dtype.itemsize for s in shapes] for _, shapes in parts]
    return [Envelope(peer, label.tag(False), sum(own)) for (peer, _), own in zip(parts, sizes)], sizes


def _views(
    memory: Tensor, starts: Sequence[int], parts: Parts, sizes: Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[list[list[Tensor]], Offsets]:
    views, offsets = [], []
    for start, (_, shapes), own in zip(starts, parts, sizes):
        places = list(accumulate(own, initial=start))
        offsets.append(places[:-1])
        views.append([memory[a:b].view(dtype).view(tuple(s)) for a, b, s in zip(places, places[1:], shapes)])
    return views, offsets
