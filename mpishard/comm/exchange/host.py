"""Persistent messages between this rank and its peers: buffers of our own, the same ones both ways."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from mpi4py import MPI

from mpishard.comm import counter, guard
from mpishard.comm.memory.buffer import address, pieces
from mpishard.comm.mesh import Group

TAG = 7
_ALIGN = 64  # of every message

Parts = Sequence["tuple[int, Sequence[torch.Size | tuple[int, ...]]]"]


class Storage:
    """Host memory for the messages of many exchanges, of one at a time."""

    __slots__ = ("busy", "memory")

    def __init__(self, nbytes: int) -> None:
        # made in inference mode, it would serve no other
        with torch.inference_mode(False):
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self.busy = False


class Exchange:
    """One message to and from each peer of a group, reversible.

    Forward, it sends ``sends`` and receives ``recvs``; in the adjoint direction the same buffers travel the
    other way. For tensors in host memory.

    Parameters
    ----------
    group
        Ranks that take part; peers are ranks of its communicator.
    sends, recvs
        Per peer, the shapes of the blocks in its message, in order.
    dtype
        Of the tensors that are packed.
    op
        Name for counters and the watchdog.
    storages
        Where the messages may lie; one is added where none is free and large enough.

    Attributes
    ----------
    sends, recvs : list of list of Tensor
        Views of the buffers, per peer and block.
    storage : Storage
        Where they lie; this exchange's own from `start` to `release` only.
    """

    __slots__ = ("_backward", "_forward", "_group", "_nbytes", "_op", "_peers", "dtype", "recvs", "sends", "storage")

    device = torch.device("cpu")

    def __init__(
        self, group: Group, sends: Parts, recvs: Parts, dtype: torch.dtype, op: str, storages: list[Storage]
    ) -> None:
        self._group = group
        self._op = op
        self.dtype = dtype
        starts = list(accumulate((_aligned(_nbytes(shapes, dtype)) for _, shapes in (*sends, *recvs)), initial=0))
        self.storage = _free_storage(storages, starts[-1])
        self.sends, out = self._views(sends, starts)
        self.recvs, into = self._views(recvs, starts[len(sends) :])
        comm = group.comm
        self._forward = [comm.Recv_init(b, peer, TAG) for peer, b in into] + [
            comm.Send_init(b, peer, TAG) for peer, b in out
        ]
        self._backward = [comm.Recv_init(b, peer, TAG) for peer, b in out] + [
            comm.Send_init(b, peer, TAG) for peer, b in into
        ]
        self._peers = (
            guard.unfinished(self._forward, [p for p, _ in into + out]),
            guard.unfinished(self._backward, [p for p, _ in out + into]),
        )
        self._nbytes = ((len(out), sum(len(b) for _, b in out)), (len(into), sum(len(b) for _, b in into)))

    @property
    def busy(self) -> bool:
        """Whether this exchange, or another one in the same storage, is in flight."""
        return self.storage.busy

    def _views(self, parts: Parts, starts: Sequence[int]) -> tuple[list[list[torch.Tensor]], Any]:
        """Return the blocks of messages that begin at ``starts``, and each message's peer and memory."""
        memory, dtype = self.storage.memory, self.dtype
        views, messages = [], []
        with torch.inference_mode(False):
            for (peer, shapes), start in zip(parts, starts):
                ends = pairwise(accumulate((_nbytes([s], dtype) for s in shapes), initial=start))
                views.append([memory[a:b].view(dtype).view(tuple(s)) for (a, b), s in zip(ends, shapes)])
                whole = pieces(_nbytes(shapes, dtype))
                messages += [(peer, address(memory.data_ptr() + start + at, n)) for at, n in whole if n]
        return views, messages

    def start(self, adjoint: bool = False) -> None:
        """Start the messages; the buffers to send are packed. Neighborwise collective."""
        if counter.active:
            counter.record(self._op, *self._nbytes[adjoint])
        requests = self._backward if adjoint else self._forward
        if requests:
            MPI.Prequest.Startall(requests)
        self.storage.busy = True

    def finish(self, adjoint: bool = False) -> None:
        """Wait for the messages; afterwards the receive buffers are filled. Neighborwise collective."""
        requests = self._backward if adjoint else self._forward
        if requests:
            with guard.waiting(self._op, self._peers[adjoint], self._group.comm):
                MPI.Request.Waitall(requests)

    def release(self) -> None:
        """Give the buffers back: what was received is unpacked. Not collective."""
        self.storage.busy = False

    def free(self) -> None:
        """Free the persistent requests. Not collective."""
        for request in self._forward + self._backward:
            request.Free()
        self._forward, self._backward = [], []


def _nbytes(shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGN) * _ALIGN


def _free_storage(storages: list[Storage], nbytes: int) -> Storage:
    """Return the smallest storage that serves, of powers of two: few serve all."""
    found = [s for s in storages if not s.busy and s.memory.numel() >= nbytes]
    if found:
        return min(found, key=lambda s: s.memory.numel())
    storages.append(Storage(1 << (nbytes - 1).bit_length() if nbytes else 0))
    return storages[-1]
