"""Messages between buffers in a GPU's memory and other ranks, by either of two routes.

Where MPI knows device memory, it reads and writes the buffers themselves. Elsewhere they travel through
pinned host memory in pieces: a piece is sent when it has arrived on the host, while the next one is on its
way there, and goes up to the device when it has arrived from its sender.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi4py import MPI
from torch import Tensor

from mpishard.comm import buffer, counter, guard
from mpishard.comm.buffer import address, byte_view
from mpishard.comm.driver import Driver, Memory
from mpishard.comm.mesh import Group

TAG = 12
ALIGN = 64  # of every message in its buffer
# Freed in flight, which is a mistake, messages get this long to arrive: MPI crashes if their memory goes first.
PATIENCE_S = 1.0
STAGED_NBYTES = 4 << 20  # a piece that travels through the host


class Envelope(NamedTuple):
    """A message to or from ``peer``."""

    peer: int
    tag: int
    nbytes: int


class _Side:
    """The buffer of all messages in one direction, and the pieces in which it travels."""

    def __init__(self, driver: Driver, messages: Sequence[Envelope], aware: bool) -> None:
        self.starts: list[int] = []
        at = 0
        for message in messages:
            self.starts.append(at)
            at += -(-message.nbytes // ALIGN) * ALIGN
        self.memory: Memory = driver.allocate(at)
        self.host: Tensor | None = None if aware else driver.pinned(at)
        most = buffer.MESSAGE_NBYTES if aware else min(STAGED_NBYTES, buffer.MESSAGE_NBYTES)
        # (peer, tag, start, stop)
        self.pieces = [
            (m.peer, m.tag, start + a, start + min(a + most, m.nbytes))
            for m, start in zip(messages, self.starts)
            for a in range(0, m.nbytes, most)
        ]
        # (host, device) memory of every piece
        self.copies = (
            [] if self.host is None else [(self.host[a:b], self.memory.tensor[a:b]) for *_, a, b in self.pieces]
        )
        self.count, self.nbytes = len(messages), sum(m.nbytes for m in messages)

    def parts(self) -> list[tuple[int, int, MPI.buffer]]:
        """Return (peer, tag, memory) of every piece."""
        origin = self.memory.address if self.host is None else self.host.data_ptr()
        return [(peer, tag, address(origin + a, b - a)) for peer, tag, a, b in self.pieces]


class Relay:
    """Messages to and from device buffers of our own, reversible: the same buffers serve both directions.

    Parameters
    ----------
    comm
        Communicator of the peers.
    driver
        The device.
    sends, recvs
        The messages of the forward direction.
    op
        Name for counters and the watchdog.
    aware
        Whether MPI may be given device memory; the same on all ranks.
    counted
        Whether `mpishard.comm_counter` counts the messages; else the caller does.

    Attributes
    ----------
    out, into : Memory
        What the forward direction sends from and receives to; message k begins at ``out_starts[k]``,
        ``into_starts[k]``.
    released : object or None
        The device's mark behind the last use of the buffers, by `release`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        driver: Driver,
        sends: Sequence[Envelope],
        recvs: Sequence[Envelope],
        op: str,
        aware: bool,
        *,
        counted: bool = True,
    ) -> None:
        driver.check()
        self._comm, self._driver, self._op, self._counted = comm, driver, op, counted
        self._sides = (_Side(driver, sends, aware), _Side(driver, recvs, aware))
        self.out, self.into = (side.memory for side in self._sides)
        self.out_starts, self.into_starts = (side.starts for side in self._sides)
        self._requests = tuple(
            [comm.Recv_init(part, peer, tag) for peer, tag, part in there.parts()]
            + [comm.Send_init(part, peer, tag) for peer, tag, part in here.parts()]
            for here, there in (self._sides, self._sides[::-1])
        )
        self._peers = tuple(
            guard.unfinished(requests, [peer for side in (there, here) for peer, *_ in side.pieces])
            for requests, (here, there) in zip(self._requests, (self._sides, self._sides[::-1]))
        )
        self.released: Any = None
        self._flying: list[MPI.Prequest] = []

    def acquire(self) -> None:
        """Wait until the device is done with the buffers' last use, on whatever stream. Not collective."""
        self._driver.check()
        if self.released is not None:
            self._driver.wait(self.released)
            self.released = None

    def start(self, adjoint: bool = False) -> None:
        """Start the messages; what fills the buffers to send is queued. Neighborwise collective."""
        driver, requests = self._driver, self._requests[adjoint]
        here, there = self._sides[::-1] if adjoint else self._sides
        self._flying = requests
        if self._counted and counter.active:
            counter.record(self._op, here.count, here.nbytes)
        if here.host is None:
            if here.pieces:
                driver.wait(driver.mark())
            driver.lend([here.memory.tensor], [there.memory.tensor])
            if requests:
                MPI.Prequest.Startall(requests)
            return
        n = len(there.pieces)
        assert there.host is not None
        marks = []
        for host, memory in here.copies:
            driver.download(host, memory)
            marks.append(driver.mark())
        driver.lend([], [there.host])
        if n:
            MPI.Prequest.Startall(requests[:n])
        for (host, _), mark, request in zip(here.copies, marks, requests[n:]):
            driver.wait(mark)
            driver.lend([host], [])
            request.Start()

    def poke(self, adjoint: bool = False) -> bool:
        """Let messages progress; return whether all have arrived. Not collective."""
        requests = self._requests[adjoint]
        return not requests or MPI.Request.Testall(requests)

    def finish(self, adjoint: bool = False) -> None:
        """Wait for the messages, and queue what brings them to the device. Neighborwise collective."""
        driver, requests = self._driver, self._requests[adjoint]
        here, there = self._sides[::-1] if adjoint else self._sides
        with guard.waiting(self._op, self._peers[adjoint], self._comm):
            if here.host is None or there.host is None:
                if requests:
                    MPI.Request.Waitall(requests)
                driver.take_back([here.memory.tensor], [there.memory.tensor])
                return
            uploaded = set()

            def upload(k: int) -> None:
                host, memory = there.copies[k]
                driver.take_back([], [host])
                driver.upload(memory, host)
                uploaded.add(k)

            while (arrived := MPI.Request.Waitsome(requests)) is not None:
                for k in arrived:
                    if k < len(there.pieces):
                        upload(k)
            for k in range(len(there.pieces)):
                if k not in uploaded:  # `poke` had completed it
                    upload(k)
            driver.take_back([here.host], [there.host])

    def release(self) -> None:
        """Give the buffers back: what reads them is queued. Not collective."""
        self.released = self._driver.mark()
        self._flying = []

    def free(self) -> None:
        """Free requests and memory. Not collective."""
        deadline = time.monotonic() + PATIENCE_S
        while self._flying and not MPI.Request.Testall(self._flying) and time.monotonic() < deadline:
            time.sleep(0.001)
        for request in self._requests[0] + self._requests[1]:
            request.Free()
        self._requests = ([], [])
        for side in self._sides:
            side.memory.free(self.released)
            side.host, side.copies = None, []


def relayed(
    driver: Driver,
    group: Group,
    source: Tensor,
    sends: Sequence[tuple[int, tuple[int, int]]],
    target: Tensor,
    recvs: Sequence[tuple[int, tuple[int, int]]],
    op: str,
) -> None:
    """Send parts of one tensor to other ranks and receive those of another, once. Neighborwise collective.

    Parameters
    ----------
    driver, group
        The device, and the ranks that take part.
    source, target
        Contiguous, in its memory.
    sends, recvs
        (rank, (start, stop)), in bytes: what goes there from ``source``, and what comes from there to
        ``target``. What a rank sends to itself is copied.
    op
        Name for the watchdog; the caller counts.
    """
    outgoing, incoming = byte_view(source), byte_view(target)
    going, coming = ([(r, a, b) for r, (a, b) in side if r != group.rank and b > a] for side in (sends, recvs))
    out, into = ([Envelope(r, TAG, b - a) for r, a, b in side] for side in (going, coming))
    relay = Relay(group.comm, driver, out, into, op, group.aware, counted=False)
    try:
        relay.acquire()
        for (_, a, b), at in zip(going, relay.out_starts):
            relay.out.tensor[at : at + b - a].copy_(outgoing[a:b])
        relay.start()
        own = ([span for r, span in side if r == group.rank] for side in (sends, recvs))
        for (a, b), (at, to) in zip(*own):
            incoming[at:to].copy_(outgoing[a:b])
        relay.finish()
        for (_, a, b), at in zip(coming, relay.into_starts):
            incoming[a:b].copy_(relay.into.tensor[at : at + b - a])
        relay.release()
    finally:
        relay.free()
