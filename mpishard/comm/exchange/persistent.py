"""Persistent messages between this rank and its peers: buffers of our own, the same ones both ways."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from mpi4py import MPI

from mpishard.comm import counter
from mpishard.comm.memory.buffer import address, pieces
from mpishard.comm.mesh import Group
from mpishard.comm.tag import Flight, Label, said

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
    op, label
        Name for counters and the watchdog, and what the plan is called.
    storages
        Where the messages may lie; one is added where none is free and large enough.

    Attributes
    ----------
    sends, recvs : list of list of Tensor
        Views of the buffers, per peer and block.
    storage : Storage
        Where they lie; this exchange's own from `start` to `release` only.
    """

    __slots__ = ("__weakref__", "_flights", "_nbytes", "_op", "dtype", "recvs", "sends", "storage")

    device = torch.device("cpu")

    def __init__(
        self,
        group: Group,
        sends: Parts,
        recvs: Parts,
        dtype: torch.dtype,
        op: str,
        label: Label,
        storages: list[Storage],
    ) -> None:
        self._op = op
        self.dtype = dtype
        starts = list(accumulate((_aligned(_nbytes(shapes, dtype)) for _, shapes in (*sends, *recvs)), initial=0))
        self.storage = _free_storage(storages, starts[-1])
        self.sends, out = self._views(sends, starts)
        self.recvs, into = self._views(recvs, starts[len(sends) :])
        comm = group.comm

        def flight(coming: Any, going: Any, adjoint: bool) -> Flight:
            tag = label.tag(adjoint)
            return Flight(
                comm,
                said(op, label, adjoint),
                [(peer, comm.Recv_init(b, peer, MPI.ANY_TAG), tag, len(b)) for peer, b in coming],
                [(peer, comm.Send_init(b, peer, tag)) for peer, b in going],
            )

        self._flights = (flight(into, out, False), flight(out, into, True))
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
        self._flights[adjoint].start()
        self.storage.busy = True

    def finish(self, adjoint: bool = False) -> None:
        """Wait for the messages; afterwards the receive buffers are filled. Neighborwise collective."""
        self._flights[adjoint].wait()

    def release(self) -> None:
        """Give the buffers back: what was received is unpacked. Not collective."""
        self.storage.busy = False

    def free(self) -> None:
        """Free the persistent requests. Not collective."""
        for flight in self._flights:
            flight.free()


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
