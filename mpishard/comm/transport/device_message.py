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

from mpishard.comm import counter
from mpishard.comm.device import staging
from mpishard.comm.device.driver import Driver, Memory
from mpishard.comm.memory import buffer
from mpishard.comm.memory.buffer import address, byte_view
from mpishard.comm.tag import Flight, Label, said

ALIGN = 64  # of every message in its buffer
# Freed in flight, which is a mistake, messages get this long to arrive: MPI crashes if their memory goes first.
PATIENCE_S = 1.0


class Envelope(NamedTuple):
    """A message to or from ``peer``; in the adjoint direction, its tag is the next one."""

    peer: int
    tag: int
    nbytes: int


class _Side:
    """The buffer of all messages in one direction, and the pieces in which it travels.

    ``tensors``, one contiguous tensor per message, serve instead of a buffer where MPI sees only the host's memory.
    """

    def __init__(
        self, driver: Driver, messages: Sequence[Envelope], aware: bool, tensors: Sequence[Tensor] | None
    ) -> None:
        self.starts: list[int] = []
        at = 0
        for message in messages:
            self.starts.append(at)
            at += -(-message.nbytes // ALIGN) * ALIGN
        self.memory: Memory = driver.allocate(at if tensors is None or aware else 0)
        self.host: Tensor | None = None if aware else driver.pinned(at)
        most = buffer.MESSAGE_NBYTES if aware else min(staging.PIECE_NBYTES, buffer.MESSAGE_NBYTES)
        cuts = [(k, a, min(a + most, m.nbytes)) for k, m in enumerate(messages) for a in range(0, m.nbytes, most)]
        starts = self.starts
        # (peer, tag, start, stop)
        self.pieces = [(messages[k].peer, messages[k].tag, starts[k] + a, starts[k] + b) for k, a, b in cuts]
        # (host, device) memory of every piece
        self.copies: list[tuple[Tensor, Tensor]] = []
        if self.host is not None:
            there = [self.memory.tensor[at:] for at in starts] if tensors is None else list(map(byte_view, tensors))
            self.copies = [(self.host[starts[k] + a : starts[k] + b], there[k][a:b]) for k, a, b in cuts]
        self.count, self.nbytes = len(messages), sum(m.nbytes for m in messages)

    def parts(self) -> list[tuple[int, int, int, MPI.buffer]]:
        """Return (peer, tag, length, memory) of every piece."""
        origin = self.memory.address if self.host is None else self.host.data_ptr()
        return [(peer, tag, b - a, address(origin + a, b - a)) for peer, tag, a, b in self.pieces]


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
    op, label
        Name for counters and the watchdog, and what the plan is called, if it is one's.
    aware
        Whether MPI may be given device memory; the same on all ranks.
    tensors
        Contiguous tensors, one per message of ``sends`` and of ``recvs``: for messages that travel once, where MPI
        sees only the host's memory, these are sent and filled, and ``out`` and ``into`` are empty.
    counted
        Whether `mpishard.comm_counter` counts the messages; else the caller does.
    in_order
        Whether every rank sends in the order in which its peers receive: then what comes next is what must come.
        Where several relays are in flight, that may depend on the time, and each waits for its own tags.

    Attributes
    ----------
    out, into : Memory
        What the forward direction sends from and receives to; message k begins at ``out_starts[k]``,
        ``into_starts[k]``.
    released : object or None
        The device's mark behind the last use of the buffers, by `release`.
    busy : bool
        Whether the buffers are in use.
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
        tensors: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
        counted: bool = True,
        in_order: bool = True,
        label: Label | None = None,
    ) -> None:
        driver.check()
        self._label = label
        self._comm, self._driver, self._op, self._counted, self._in_order = comm, driver, op, counted, in_order
        given = (None, None) if tensors is None else tensors
        self._sides = (_Side(driver, sends, aware, given[0]), _Side(driver, recvs, aware, given[1]))
        self.out, self.into = (side.memory for side in self._sides)
        self.out_starts, self.into_starts = (side.starts for side in self._sides)
        # of the forward and of the adjoint direction; made at their first use
        self._ways: list[Flight | None] = [None, None]
        self.released: Any = None
        self.storage = self  # nobody else's
        self.busy = False
        self._flying: Flight | None = None

    def _way(self, adjoint: bool) -> Flight:
        way = self._ways[adjoint]
        if way is None:
            here, there = self._sides[::-1] if adjoint else self._sides
            comm = self._comm
            recvs = [
                (peer, comm.Recv_init(part, peer, MPI.ANY_TAG if self._in_order else tag + adjoint), tag + adjoint, n)
                for peer, tag, n, part in there.parts()
            ]
            sends = [(peer, comm.Send_init(part, peer, tag + adjoint)) for peer, tag, _, part in here.parts()]
            op = self._op if self._label is None else said(self._op, self._label, adjoint)
            way = self._ways[adjoint] = Flight(comm, op, recvs, sends)
        return way

    def acquire(self) -> None:
        """Wait until the device is done with the buffers' last use, on whatever stream. Not collective."""
        self._driver.check()
        if self.released is not None:
            self._driver.wait(self.released)
            self.released = None

    def start(self, adjoint: bool = False) -> None:
        """Start the messages; what fills the buffers to send is queued. Neighborwise collective."""
        driver, way = self._driver, self._way(adjoint)
        here, there = self._sides[::-1] if adjoint else self._sides
        self.busy = True
        self._flying, requests = way, way.requests
        if self._counted and counter.active:
            counter.record(self._op, here.count, here.nbytes)
        if here.host is None:
            if here.pieces:
                driver.wait(driver.mark())
            driver.lend([here.memory.tensor], [there.memory.tensor])
            way.start()
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
        return self._way(adjoint).test()

    def finish(self, adjoint: bool = False) -> None:
        """Wait for the messages, and queue what brings them to the device. Neighborwise collective."""
        driver, way = self._driver, self._way(adjoint)
        here, there = self._sides[::-1] if adjoint else self._sides
        if here.host is None or there.host is None:
            way.wait()
            driver.take_back([here.memory.tensor], [there.memory.tensor])
            return
        uploaded = set()

        def upload(k: int) -> None:
            host, memory = there.copies[k]
            driver.take_back([], [host])
            driver.upload(memory, host)
            uploaded.add(k)

        for k in way.each():
            if k < len(there.pieces):
                upload(k)
        for k in range(len(there.pieces)):
            if k not in uploaded:  # `poke` had completed it
                upload(k)
        driver.take_back([here.host], [there.host])

    def release(self) -> None:
        """Give the buffers back: what reads them is queued. Not collective."""
        self.released = self._driver.mark()
        self._flying = None
        self.busy = False

    def free(self) -> None:
        """Free requests and memory. Not collective."""
        deadline = time.monotonic() + PATIENCE_S
        requests = [] if self._flying is None else self._flying.requests
        while requests and not MPI.Request.Testall(requests) and time.monotonic() < deadline:
            time.sleep(0.001)
        for way in self._ways:
            if way is not None:
                way.free()
        self._ways = [None, None]
        for side in self._sides:
            side.memory.free(self.released)
            side.host, side.copies = None, []
        self._sides = ()  # type: ignore[assignment]
