"""The exchange of `mpishard.comm.exchange.host` for blocks in a GPU's memory: one kernel packs, one unpacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mpishard.comm.device.driver import Driver, Memory
from mpishard.comm.exchange.host import TAG, Parts
from mpishard.comm.memory.copy_table import UNITS, Box, plan_table
from mpishard.comm.mesh import Group
from mpishard.comm.point_to_point.device_message import Envelope, Relay

Offsets = list[list[int]]


class DeviceExchange:
    """One message to and from each peer of a group, reversible; see `mpishard.comm.exchange.host.Exchange`.

    Parameters
    ----------
    group, sends, recvs, dtype, op
        As there.
    driver
        The device.

    Attributes
    ----------
    sends, recvs : list of list of Tensor
        Views of the buffers, per peer and block.
    send_offsets, recv_offsets : list of list of int
        Where these begin in the buffers, in bytes.
    """

    def __init__(self, group: Group, sends: Parts, recvs: Parts, dtype: torch.dtype, driver: Driver, op: str) -> None:
        self.driver, self.device, self.dtype = driver, driver.device, dtype
        self.busy = False
        (out, out_blocks), (into, into_blocks) = (_envelopes(parts, dtype) for parts in (sends, recvs))
        # made in inference mode, they would serve no other
        with torch.inference_mode(False):
            self._relay = relay = Relay(group.comm, driver, out, into, op, group.aware)
            self.sends, self.send_offsets = _views(relay.out, relay.out_starts, sends, out_blocks, dtype)
            self.recvs, self.recv_offsets = _views(relay.into, relay.into_starts, recvs, into_blocks, dtype)
        self._tables: dict[Any, Any] = {}

    def acquire(self) -> None:
        """Make the buffers this stream's. Not collective."""
        self._relay.acquire()

    def kernel_serves(self, x: Tensor) -> bool:
        """Whether `pack` and `unpack` can move cells of ``x``. Not collective."""
        return self.driver.has_kernel and not (x.is_conj() or x.is_neg())

    def pack(self, x: Tensor, key: Any, boxes: Callable[[], Iterable[Box]], *, adjoint: bool = False) -> None:
        """Queue the copy of boxes of ``x`` to the buffer that the direction sends from. Not collective."""
        memory = self._relay.into if adjoint else self._relay.out
        self.driver.pack(self._table(x, key, boxes), x.data_ptr(), memory)

    def unpack(self, x: Tensor, key: Any, boxes: Callable[[], Iterable[Box]]) -> None:
        """Queue the copy of what arrived to boxes of ``x``. Not collective."""
        self.driver.unpack(self._table(x, key, boxes), x.data_ptr(), self._relay.into)

    def _table(self, x: Tensor, key: Any, boxes: Callable[[], Iterable[Box]]) -> Any:
        address = x.data_ptr() | UNITS[0]
        alignment = address & -address  # the lowest bit
        key = (key, x.shape, x.stride(), x.itemsize, alignment)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self.driver.table(plan_table(boxes(), alignment))
        return table

    def start(self, adjoint: bool = False) -> None:
        """Start the messages; what packs the buffers is queued. Neighborwise collective."""
        self.busy = True
        self._relay.start(adjoint)

    def finish(self, adjoint: bool = False) -> None:
        """Wait for the messages; on this stream, the receive buffers are filled. Neighborwise collective."""
        self._relay.finish(adjoint)

    def release(self) -> None:
        """Give the buffers back: what unpacks them is queued. Not collective."""
        self._relay.release()
        self.busy = False

    def free(self) -> None:
        """Free requests and buffers. Not collective."""
        self.sends, self.recvs = [], []
        self._tables.clear()
        self._relay.free()


def _envelopes(parts: Parts, dtype: torch.dtype) -> tuple[list[Envelope], list[list[int]]]:
    sizes = [[torch.Size(s).numel() * dtype.itemsize for s in shapes] for _, shapes in parts]
    return [Envelope(peer, TAG, sum(own)) for (peer, _), own in zip(parts, sizes)], sizes


def _views(
    memory: Memory, starts: Sequence[int], parts: Parts, sizes: Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[list[list[Tensor]], Offsets]:
    views, offsets = [], []
    for start, (_, shapes), own in zip(starts, parts, sizes):
        places = list(accumulate(own, initial=start))
        offsets.append(places[:-1])
        views.append([memory.tensor[a:b].view(dtype).view(tuple(s)) for a, b, s in zip(places, places[1:], shapes)])
    return views, offsets
