"""Outlet: the end of a link that steps are put into.

Steps are pushed: a message is a synchronous send, which ends when its receive has begun, so that a slot is free when
its step was taken, and nothing else holds a step. Only the policy "latest", which may take a step back, keeps it
until rank 0 of the reader asks. docs/coupling.md has the format.

With the policy "block" a step is put without waiting for the other ranks of the program: whether all of them could put
it is agreed meanwhile, and told by the next call, on all ranks. The other policies decide on all ranks at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import counter, in_flight
from mpishard.comm.coupling import wire
from mpishard.comm.coupling.channel import HEAD, Channel, Copies, Load, Parcel, boxes_of, notice
from mpishard.comm.coupling.patience import PUT, Ballot, keep_going, leave
from mpishard.comm.memory.buffer import address
from mpishard.errors import MpishardError, PeerError

POLICIES = ("block", "drop_newest", "latest")
ENDED, FULL, FREE = range(3)
_LOOK_S = 0.2
_test_all, _start_all, _ANY = MPI.Request.Testall, MPI.Prequest.Startall, MPI.ANY_SOURCE


class _Slot:
    """A load that is sent by requests of its own."""

    def __init__(self, channel: Channel, parcels: Sequence[Parcel], dtypes: Sequence[torch.dtype]) -> None:
        self.load = Load(parcels, dtypes)
        self._parcels = parcels
        self._known: Sequence[Tensor] = ()
        self._copies = Copies((), ())
        self.step = -1
        self.flying = False
        self.peers: list[int] = []
        self.requests: list[Any] = []
        for p, parts, head, size in zip(parcels, self.load.parts, self.load.heads, self.load.sizes):
            head[:] = notice(wire.STEP, -1, size)
            for start, nbytes in parts:
                self.requests.append(channel.comm.Ssend_init(address(start, nbytes), p.peer, channel.tag + wire.DATA))
                self.peers.append(p.peer)

    def fill(self, blocks: Sequence[Tensor]) -> None:
        if blocks is not self._known:
            self._known = blocks
            self._copies = Copies(self.load.views, boxes_of(blocks, self._parcels))
        self._copies.run()

    def done(self) -> bool:
        if self.flying and _test_all(self.requests):
            self.flying = False
        return not self.flying

    def waits_for(self) -> list[int]:
        return sorted({p for p, request in zip(self.peers, self.requests) if not request.Get_status()})


class Outlet:
    """The end of a link that steps are put into.

    Parameters
    ----------
    channel
        Its messages.
    parcels
        Per rank that reads from this one, ascending; also those to which no cell goes, but the end of the stream.
    dtypes
        Of the fields.
    policy, depth
        What to do when all of ``depth`` slots are full.
    ballot
        The ranks' agreement on the last step that was pushed.

    Attributes
    ----------
    policy : str
    ended : bool
        Whether `put` has found that the reader has closed its side: the same on all ranks.
    """

    def __init__(
        self,
        channel: Channel,
        parcels: Sequence[Parcel],
        dtypes: Sequence[torch.dtype],
        policy: str,
        depth: int,
        ballot: Ballot,
    ) -> None:
        self.channel = channel
        self._parcels = parcels
        self._depth = depth
        self.policy = policy
        # of steps that may be taken back one more than the depth, for the one that is being read: a rank that found no
        # memory for it in `put` would leave the others alone
        self._slots = [_Slot(channel, parcels, dtypes) for _ in range(depth + (policy == "latest"))]
        self._stop_tag = channel.tag + wire.STOP
        self._next = 0  # the number of the step that is put next
        self._sent = 0  # steps in the ring, for policies that push
        self._unread: list[_Slot] = []  # "latest": filled and not asked for, oldest first
        self._asked = self._served = 0
        self._putting = False
        self._looked = time.monotonic()
        self._stopped: set[int] = set()
        self._left: set[int] = set()  # of those, who takes nothing that is on its way
        self.ended = False
        self._ends: dict[int, MPI.Request] = {}
        self._call = channel.call(PUT)
        self._ballot = ballot
        keep_going(self)

    def put(self, blocks: Sequence[Tensor], error: MpishardError | None) -> bool:
        """Put a step; return whether it is in a slot. Collective.

        Parameters
        ----------
        blocks
            This rank's blocks of the fields.
        error
            What is wrong with them, or None.
        """
        if self._ballot.under_way:
            self.settle()
        if self.ended:
            return False
        self.progress()
        self._putting = True
        try:
            slot = self._slots[self._sent % len(self._slots)]
            room, wrong = FULL, error is not None
            if error is None:
                try:
                    room = self._room(slot)
                except PeerError as e:
                    error = e
            if self.policy == "block":
                return self._pushed(slot, blocks, room, error, wrong)
            circle = self.channel.circle
            circle.start(error, room, -self._asked, call=self._call)
            if room == FREE and error is None and self.policy != "latest":
                slot.fill(blocks)
            room, asked, _ = circle.finish(self.channel.timeout_s)
            if room == ENDED:
                self.ended = True
                return False
            step, self._next = self._next, self._next + 1
            if self.policy == "latest":
                # not what rank 0 has heard since: the others do not know of it
                self._asked = max(self._asked, -asked)
                self._serve(-asked)
                slot = self._emptied()
                slot.fill(blocks)
                slot.step = step
                self._unread.append(slot)
                self._serve(-asked)
            elif room == FREE:
                self._sent += 1
                self._send(slot, step)
            return room == FREE
        finally:
            self._putting = False
            if self._stopped:
                self.progress()

    def _pushed(
        self, slot: _Slot, blocks: Sequence[Tensor], room: int, error: MpishardError | None, wrong: bool
    ) -> bool:
        # whatever the others find: a reader that has stopped drops the step, and an error ends the link
        along: Sequence[Any] = ()
        if room == FREE and error is None:
            slot.fill(blocks)
            along = self._marked(slot, self._next)
        self._next += 1
        self._sent += 1
        self._ballot.start(error, room, call=self._call, along=along)
        if wrong:
            self.settle()  # what this rank was given is mostly what all were given: they need no other call
        return True

    def settle(self) -> None:
        """Learn what came of the last step that was pushed: an error of any rank is raised on all. Collective."""
        if self._ballot.under_way:
            room, _, _ = self._ballot.finish(self.channel.timeout_s)
            self.ended = self.ended or room == ENDED

    def _room(self, slot: _Slot) -> int:
        if self._reader_ended("put"):
            return ENDED
        if self.policy != "block":
            self._look()
            return FREE if self.policy == "latest" or slot.done() else FULL
        if slot.done():
            return FREE
        wait = self.channel.wait(slot.waits_for, "put")
        while not slot.done():
            if self._reader_ended("put"):
                return ENDED
            if not wait.pause():
                raise self.channel.late(slot.waits_for(), "put")
        return FREE

    def _reader_ended(self, what: str) -> bool:
        """Tell whether a rank of the reader has closed its side; raise where one left without. Not collective."""
        if not self._left:
            return bool(self._stopped)
        raise PeerError(
            f"{what}: {self.channel.named(sorted(self._left))} left",
            expected="a reader, until it closes the link",
            got="the end of its process, or of its link by an error",
            fix="see its error; close the link on all ranks before a program ends",
        )

    def _look(self) -> None:
        # a policy that never waits must still find out that nobody reads any more
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self.channel.check([p.peer for p in self._parcels], "put")

    def _emptied(self) -> _Slot:
        """Return the slot that the newest step goes into: a free one, or that of the oldest unread."""
        if len(self._unread) == self._depth:
            return self._unread.pop(0)
        while True:
            for slot in self._slots:
                if slot not in self._unread and slot.done():
                    return slot

    def _marked(self, slot: _Slot, step: int) -> list[Any]:
        """Return the requests that send a slot, which is filled."""
        for head in slot.load.heads:
            head[3] = step
        if counter.active:
            counter.record("put", len(slot.requests), sum(slot.load.sizes))
        slot.flying = True
        return slot.requests

    def _send(self, slot: _Slot, step: int) -> None:
        if requests := self._marked(slot, step):
            _start_all(requests)

    def _serve(self, asked: int) -> None:
        while self._served < asked and self._unread:
            slot = self._unread.pop(0)
            self._served += 1
            self._send(slot, slot.step)

    def progress(self) -> None:
        """Answer the reader where it asks or stops. Not collective."""
        comm, tag = self.channel.comm, self._stop_tag
        while comm.Iprobe(_ANY, tag):
            status = MPI.Status()
            comm.Probe(_ANY, tag, status)
            peer = status.Get_source()
            head = np.empty(HEAD // 8, np.int64)
            comm.Recv(head, peer, tag)
            self._stopped.add(peer)
            if head[2] == wire.GONE:
                self._left.add(peer)
        if not self._putting:
            # never before a step that is on its way
            for peer in self._stopped:
                self._end(peer, wire.END)
        if self.policy == "latest":
            self._progress_requests()

    def _progress_requests(self) -> None:
        channel, circle, serial = self.channel, self.channel.circle, self.channel.serial
        if circle.rank == 0:
            while channel.comm.Iprobe(channel.first, channel.tag + wire.REQUEST):
                channel.comm.Recv(np.empty(HEAD // 8, np.int64), channel.first, channel.tag + wire.REQUEST)
                self._asked += 1
            told = not self._putting and self._served < self._asked and bool(self._unread)
        else:
            parent, told = circle.rank & (circle.rank - 1), False
            note = np.empty(HEAD // 8, np.int64)
            while circle.comm.Iprobe(parent, serial):
                circle.comm.Recv(note, parent, serial)
                self._asked = max(self._asked, int(note[3]))
                told = True
        if told:
            # where a rank waits it cannot agree: the others are told, down a tree
            step = 1
            while circle.rank + step < circle.size and not circle.rank & step:
                note = notice(wire.SERVE, self._asked)
                in_flight.keep_sent(circle.comm.Isend(note, circle.rank + step, serial))
                step <<= 1
        if not self._putting:
            self._serve(self._asked)

    def _end(self, peer: int, kind: int) -> None:
        if peer not in self._ends and peer not in self._left:
            head = notice(kind, self._next)
            self._ends[peer] = in_flight.keep_sent(self.channel.comm.Isend(head, peer, self.channel.tag + wire.DATA))

    def flush(self) -> Callable[[], bool]:
        """Return a function to call until it is true: then every step was read, or the reader has stopped."""

        def done() -> bool:
            self.progress()
            everything = all(slot.done() for slot in self._slots)
            if self._left and (not everything or self._unread):
                self._reader_ended("close")
            # to whom nothing goes, nobody says that it has stopped
            if not everything or (self._unread and self._parcels and not self._stopped):
                return False
            for p in self._parcels:
                self._end(p.peer, wire.END)
            # nobody takes the end of steps where a rank has left
            return all(request.Test() for peer, request in self._ends.items() if peer not in self._left)

        return done

    def waits_for(self) -> list[int]:
        """Return the ranks that have not taken what is there for them. Not collective."""
        if self._unread and not self._stopped:
            return [p.peer for p in self._parcels]
        return sorted({peer for slot in self._slots if slot.flying for peer in slot.waits_for()})

    def release(self, gone: bool = False) -> None:
        """Free what is local; where the program leaves without having closed the link, say so. Not collective."""
        leave(self)
        self._ballot.leave()
        if gone:
            for p in self._parcels:
                self._end(p.peer, wire.GONE)
        for slot in self._slots:
            if slot.done():
                for request in slot.requests:
                    request.Free()
            else:
                in_flight.left.append(slot)  # a reader that is late takes it yet, or it is never taken
        self._slots = []
