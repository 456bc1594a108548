"""Tensors in host memory: MPI reads and writes them where they lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import counter, guard, thread
from mpishard.comm.lookout import looked_out
from mpishard.comm.memory import buffer
from mpishard.comm.memory.buffer import address, as_bytes, pieces, room_for, spans
from mpishard.comm.memory.reduction_type import Rule
from mpishard.comm.mesh import Group
from mpishard.comm.tag import Flight, Label, crossed, hashed, said, wait_all
from mpishard.comm.transport.device_message import ALIGN, Envelope
from mpishard.comm.transport.slot import ALL_REDUCE, has_room, slot_of
from mpishard.layout import are_equal

# (rank, tensor)
Parcels = Sequence[tuple[int, Tensor]]


class Storage:
    """Host memory for the messages of many plans, of one at a time."""

    __slots__ = ("busy", "memory")

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        # made in inference mode, it would serve no other
        with torch.inference_mode(False):
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.busy = False


class Part(NamedTuple):
    """Where the messages of one direction lie in a storage."""

    address: int
    nbytes: int
    tensor: Tensor


class Buffers:
    """Where persistent messages lie.

    Attributes
    ----------
    out, into : Part
        What the forward direction sends from and receives to; message k begins at ``out_starts[k]``,
        ``into_starts[k]``.
    storage : Storage
        Where both lie; theirs from `start` to `release` only.
    """

    __slots__ = ("into", "into_starts", "out", "out_starts", "storage")

    def __init__(
        self,
        sends: Sequence[Envelope],
        recvs: Sequence[Envelope],
        storages: list[Storage],
        device: torch.device | None = None,
    ) -> None:
        ends = [list(accumulate((-(-m.nbytes // ALIGN) * ALIGN for m in side), initial=0)) for side in (sends, recvs)]
        self.out_starts, self.into_starts = (places[:-1] for places in ends)
        n, m = (places[-1] for places in ends)
        self.storage = free_storage(storages, n + m, device)
        memory = self.storage.memory
        self.out = Part(memory.data_ptr(), n, memory[:n])
        self.into = Part(memory.data_ptr() + n, m, memory[n : n + m])

    def acquire(self) -> None:
        """Do nothing: no stream has work left on the buffers. Not collective."""

    def release(self) -> None:
        """Give the buffers back: what was received is unpacked. Not collective."""
        self.storage.busy = False


class Messages(Buffers):
    """Persistent messages to and from buffers in host memory, reversible; as `device_message.Relay` for a GPU's."""

    __slots__ = ("_flights", "_op", "_travel")

    def __init__(
        self,
        comm: MPI.Intracomm,
        sends: Sequence[Envelope],
        recvs: Sequence[Envelope],
        op: str,
        label: Label,
        storages: list[Storage],
    ) -> None:
        super().__init__(sends, recvs, storages)
        self._op = op
        out, into = (
            [
                (message.peer, message.tag, address(part.address + start + at, nbytes))
                for message, start in zip(side, starts)
                for at, nbytes in pieces(message.nbytes)
                if nbytes
            ]
            for side, part, starts in ((sends, self.out, self.out_starts), (recvs, self.into, self.into_starts))
        )

        def flight(here: Any, there: Any, adjoint: bool) -> Flight:
            return Flight(
                comm,
                said(op, label, adjoint),
                [(peer, comm.Recv_init(b, peer, MPI.ANY_TAG), tag + adjoint, len(b)) for peer, tag, b in there],
                [(peer, comm.Send_init(b, peer, tag + adjoint)) for peer, tag, b in here],
            )

        self._flights = (flight(out, into, False), flight(into, out, True))
        self._travel = tuple((len(side), sum(len(b) for *_, b in side)) for side in (out, into))

    def start(self, adjoint: bool = False) -> None:
        """Start the messages; the buffers to send are packed. Neighborwise collective."""
        if counter.active:
            counter.record(self._op, *self._travel[adjoint])
        self._flights[adjoint].start()
        self.storage.busy = True

    def finish(self, adjoint: bool = False) -> None:
        """Wait for the messages; afterwards the receive buffers are filled. Neighborwise collective."""
        self._flights[adjoint].wait()

    def free(self) -> None:
        """Free the persistent requests. Not collective."""
        for flight in self._flights:
            flight.free()


def free_storage(storages: list[Storage], nbytes: int, device: torch.device | None = None) -> Storage:
    """Return the smallest storage that serves, of powers of two: few serve all. Not collective."""
    found = [s for s in storages if not s.busy and s.memory.numel() >= nbytes]
    if found:
        return min(found, key=lambda s: s.memory.numel())
    storages.append(Storage(1 << (nbytes - 1).bit_length() if nbytes else 0, device))
    return storages[-1]


class Host:
    """How tensors in host memory travel among the ranks of a group. Nothing here checks or counts, but for messages.

    Parameters
    ----------
    group
        The ranks.
    """

    driver = None
    has_kernel = False
    device = torch.device("cpu")

    def __init__(self, group: Group) -> None:
        self.group, self.comm = group, group.comm
        self._slot = slot_of(group)

    def all_reduce(self, x: Tensor, y: Tensor, rule: Rule, op: str) -> None:
        """Reduce ``x``, contiguous, to ``y``, which may be ``x``. Collective over the group."""
        if has_room(x, op):
            with guard.waiting("all_reduce", (), self.comm):
                self._slot.all_reduce(x, y, rule, op)
            return
        at, to, comm, datatype = x.data_ptr(), y.data_ptr(), self.comm, rule.datatype
        with guard.waiting("all_reduce", (), comm):
            self._slot.meet(ALL_REDUCE[op], rule.dtype, x.nbytes)
            for a, n in pieces(x.nbytes):
                send = MPI.IN_PLACE if at == to else (address(at + a, n), datatype)
                comm.Allreduce(send, (address(to + a, n), datatype), rule.op)

    def start_sum(self, x: Tensor, rule: Rule) -> tuple[list[MPI.Request], Callable[[], object]]:
        """Start to sum ``x`` in place; return requests, and what is to be done after them. Collective."""
        request, arrived = self._slot.start_sum(x, rule)
        requests = [request]
        if not has_room(x, "sum"):
            at, datatype = x.data_ptr(), rule.datatype
            for a, n in pieces(x.nbytes):
                requests.append(self.comm.Iallreduce(MPI.IN_PLACE, (address(at + a, n), datatype), rule.op))
        return requests, arrived

    def on_host(self, x: Tensor) -> Tensor:
        """Return ``x`` where MPI may read it at once. Not collective."""
        return x

    def all_gather(self, x: Tensor, flat: Tensor, counts: Sequence[int], common: Hashable) -> None:
        """Gather ``counts`` bytes of every rank to ``flat``, which is contiguous; ``common`` is the same on all.

        Collective over the group.
        """
        with guard.waiting("all_gather", (), self.comm):
            self._slot.meet("all_gather", x.dtype, common)
            if flat.nbytes > buffer.MESSAGE_NBYTES:
                size = self.group.size
                MPI.Request.Waitall(start_messages(x, [(0, x.nbytes)] * size, flat, spans(counts), self.group))
            elif are_equal(counts):
                self.comm.Allgather(as_bytes(x), as_bytes(flat))
            else:
                self.comm.Allgatherv(as_bytes(x), [as_bytes(flat), list(counts)])

    def reduce_scatter(self, flat: Tensor, result: Tensor, counts: Sequence[int], rule: Rule) -> None:
        """Reduce ``flat``, of ``counts`` numbers for each rank, to one's own. Collective over the group."""
        comm, datatype = self.comm, rule.datatype
        with guard.waiting("reduce_scatter", (), comm):
            self._slot.meet("reduce_scatter", rule.dtype, flat.nbytes)
            if flat.nbytes <= buffer.MESSAGE_NBYTES:
                send, into = (as_bytes(flat), datatype), (as_bytes(result), datatype)
                if are_equal(counts):
                    comm.Reduce_scatter_block(send, into, rule.op)
                else:
                    comm.Reduce_scatter(send, into, list(counts), rule.op)
                return
            for root, (lo, hi) in enumerate(spans([n * flat.itemsize for n in counts])):
                for a, n in pieces(hi - lo):
                    send = (address(flat.data_ptr() + lo + a, n), datatype)
                    recv = (address(result.data_ptr() + a, n), datatype) if root == self.group.rank else None
                    comm.Reduce(send, recv, rule.op, root)

    def all_to_all(
        self, flat: Tensor, out: Sequence[int], into: Tensor, counts: Sequence[int], bound_nbytes: int
    ) -> None:
        """Send ``out`` numbers to every rank, and receive ``counts`` of each. Collective over the group."""
        size = into.itemsize
        ahead, back = [n * size for n in out], [n * size for n in counts]
        with guard.waiting("all_to_all", (), self.comm):
            self._slot.meet("all_to_all", into.dtype)
            if bound_nbytes > buffer.MESSAGE_NBYTES:
                MPI.Request.Waitall(start_messages(flat, spans(ahead), into, spans(back), self.group))
            else:
                self.comm.Alltoallv([as_bytes(flat), ahead], [as_bytes(into), back])

    def broadcast(self, x: Tensor, root: int) -> None:
        """Fill ``x`` with the root's. Collective over the group."""
        with guard.waiting("broadcast", (), self.comm):
            self._slot.meet(f"broadcast from {root}", x.dtype, x.nbytes)
            for a, n in pieces(x.nbytes):
                self.comm.Bcast(address(x.data_ptr() + a, n), root)

    def reduce(self, x: Tensor, y: Tensor, rule: Rule, root: int) -> None:
        """Reduce ``x`` to ``y`` of the root. Collective over the group."""
        comm, datatype, at_root = self.comm, rule.datatype, self.group.rank == root
        with guard.waiting("reduce", (), comm):
            self._slot.meet(f"reduce to {root}", rule.dtype, x.nbytes)
            for a, n in pieces(x.nbytes):
                into = (address(y.data_ptr() + a, n), datatype) if at_root else None
                comm.Reduce((address(x.data_ptr() + a, n), datatype), into, rule.op, root)

    def messages(
        self, sends: Sequence[Envelope], recvs: Sequence[Envelope], op: str, label: Label, storages: list[Storage]
    ) -> Messages:
        """Return persistent messages; ``storages`` are where they may lie. Not collective."""
        return Messages(self.comm, sends, recvs, op, label, storages)

    def post(
        self,
        sends: Parcels,
        recvs: Parcels,
        op: str,
        tag: int,
        *,
        in_order: bool = True,
        at_most: bool = False,
        bulk: bool = False,  # noqa: ARG002
    ) -> Posted:
        """Start to send tensors to other ranks and to fill contiguous others, once. Neighborwise collective.

        ``in_order`` as for a `device_message.Relay`; ``bulk`` as on a device, where it may be faster; ``at_most`` says
        that less may come, in one message. The caller counts.
        """
        comm, any_tag = self.comm, MPI.ANY_TAG if in_order else tag
        thread.require(comm)
        # room for copies first: where there is none, no message may wait here that would be the next call's
        kept = [(r, room_for(x)) for r, x in sends]
        coming, going = [], []
        for r, x in recvs:
            for a, n in pieces(x.nbytes):
                if n:
                    coming.append((r, comm.Irecv(address(x.data_ptr() + a, n), r, any_tag), tag, n))
        for (r, x), (_, given) in zip(kept, sends):
            if x is not given:
                x.copy_(given)
            for a, n in pieces(x.nbytes):
                if n:
                    going.append((r, comm.Isend(address(x.data_ptr() + a, n), r, tag)))
        return Posted(Flight(comm, op, coming, going, at_most=at_most), kept)

    def send_recv(self, x: Tensor, y: Tensor, to: int, of: int, tag: int, call: str) -> int:
        """Send ``x`` to a rank and fill ``y`` from one; return how many bytes came. Neighborwise collective.

        Raises
        ------
        DesyncError
            More came than ``y`` holds, or the message of another call.
        """
        comm, status = self.comm, MPI.Status()
        if max(x.nbytes, y.nbytes) > buffer.MESSAGE_NBYTES:
            # also an empty message: the other end may expect a small one, by the way below
            going, coming = (
                [(r, address(t.data_ptr() + a, n)) for a, n in pieces(t.nbytes)] if r != MPI.PROC_NULL else []
                for r, t in ((to, x), (of, y))
            )
            recvs = [(r, comm.Irecv(b, r, MPI.ANY_TAG), tag, len(b)) for r, b in coming]
            Flight(comm, call, recvs, [(r, comm.Isend(b, r, tag)) for r, b in going]).wait()
            return y.nbytes
        try:
            swap(comm, call, as_bytes(x), to, as_bytes(y), of, tag, status)
        except MPI.Exception as e:
            raise crossed(call, comm, [r for r in (of, to) if r != MPI.PROC_NULL], [], e) from None
        return came(status, comm, of, to, tag, call, y.nbytes)


def swap(comm: Any, call: str, going: Any, to: int, coming: Any, of: int, tag: int, status: MPI.Status) -> None:
    """Send to one rank and receive from another; whoever looks out for the end of others can end it.

    Neighborwise collective.
    """
    if not looked_out():
        comm.Sendrecv(going, to, tag, coming, of, MPI.ANY_TAG, status)
        return
    requests = [comm.Irecv(coming, of, MPI.ANY_TAG), comm.Isend(going, to, tag)]
    with guard.waiting(call, guard.unfinished(requests, [of, to], 1), comm):
        wait_all(requests, [status, MPI.Status()])


def came(status: MPI.Status, comm: MPI.Intracomm, of: int, to: int, tag: int, call: str, nbytes: int) -> int:
    """Return the length of the message that came; an error where it is another call's. Not collective."""
    if of != MPI.PROC_NULL and status.tag != tag:
        peers = [r for r in (of, to) if r != MPI.PROC_NULL]
        raise crossed(call, comm, peers, [(of, status.tag, status.Get_count(), nbytes)])
    return status.Get_count()


class Posted:
    """Messages under way, which travel once."""

    __slots__ = ("_flight", "_sent")

    def __init__(self, flight: Flight, sent: object) -> None:
        self._flight = flight
        self._sent = sent  # its memory must outlive the messages

    def poke(self) -> None:
        """Let MPI make progress. Not collective."""
        self._flight.test()

    def wait(self) -> None:
        """Wait for the messages: what comes is there. Neighborwise collective."""
        self._flight.wait()

    def lengths(self) -> list[int] | None:
        """Return how many bytes came of each tensor, after `wait`, where that may be less. Not collective."""
        return self._flight.lengths()


def start_messages(
    x: Tensor,
    sends: Sequence[tuple[int, int]],
    y: Tensor,
    recvs: Sequence[tuple[int, int]],
    group: Group,
) -> list[MPI.Request]:
    """Start the messages of an all-to-all that no count could hold; spans are in bytes. Collective."""
    comm, rank, size, tag = group.comm, group.rank, group.size, hashed("large messages")
    out, into = x.data_ptr(), y.data_ptr()
    requests = []
    for step in range(size):
        of, to = (rank - step) % size, (rank + step) % size
        lo, hi = recvs[of]
        requests += [comm.Irecv(address(into + lo + a, n), of, tag) for a, n in pieces(hi - lo)]
        lo, hi = sends[to]
        requests += [comm.Isend(address(out + lo + a, n), to, tag) for a, n in pieces(hi - lo)]
    return requests
