"""Persistent messages between this rank and its peers: byte buffers of our own, the same ones both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpishard.comm import counter, guard
from mpishard.comm.buffer import address, pieces
from mpishard.comm.mesh import Group

TAG = 7
_ALIGN = 64

Parts = Sequence["tuple[int, Sequence[torch.Size | tuple[int, ...]]]"]


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

    Attributes
    ----------
    sends, recvs : list of list of Tensor
        Views of the buffers, per peer and block.
    """

    __slots__ = (
        "_backward",
        "_forward",
        "_group",
        "_nbytes",
        "_op",
        "_peers",
        "_storage",
        "busy",
        "dtype",
        "recvs",
        "sends",
    )

    device = torch.device("cpu")

    def __init__(self, group: Group, sends: Parts, recvs: Parts, dtype: torch.dtype, op: str) -> None:
        self._group = group
        self._op = op
        self.dtype = dtype
        self.busy = False
        # made in inference mode, they would serve no other
        with torch.inference_mode(False):
            self._storage, self.sends, out = self._allocate(sends, dtype)
            storage, self.recvs, into = self._allocate(recvs, dtype)
        self._storage += storage
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

    def _allocate(self, parts: Parts, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], Any]:
        storage, views, messages = [], [], []
        for peer, shapes in parts:
            sizes = [int(torch.Size(s).numel()) * dtype.itemsize for s in shapes]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            storage.append(buffer)
            at, own = 0, []
            for shape, nbytes in zip(shapes, sizes):
                own.append(buffer[at : at + nbytes].view(dtype).view(tuple(shape)))
                at += nbytes
            views.append(own)
            messages += [(peer, address(buffer.data_ptr() + a, n)) for a, n in pieces(at) if n]
        return storage, views, messages

    def start(self, adjoint: bool = False) -> None:
        """Start the messages; the buffers to send are packed. Neighborwise collective."""
        if counter.active:
            counter.record(self._op, *self._nbytes[adjoint])
        requests = self._backward if adjoint else self._forward
        if requests:
            MPI.Prequest.Startall(requests)
        self.busy = True

    def finish(self, adjoint: bool = False) -> None:
        """Wait for the messages; afterwards the receive buffers are filled. Neighborwise collective."""
        requests = self._backward if adjoint else self._forward
        if requests:
            with guard.waiting(self._op, self._peers[adjoint], self._group.comm):
                MPI.Request.Waitall(requests)

    def release(self) -> None:
        """Give the buffers back: what was received is unpacked. Not collective."""
        self.busy = False

    def free(self) -> None:
        """Free the persistent requests. Not collective."""
        for request in self._forward + self._backward:
            request.Free()
        self._forward, self._backward = [], []
