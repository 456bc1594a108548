"""One direction of a link between two programs: an `Outlet` that puts steps into slots, an `Inlet` that gets them.

Steps are pushed: a message is a synchronous send, which ends when its receive has begun, so that a slot is free when
its step was taken, and nothing else holds a step. Only the policy "latest", which may take a step back, keeps it
until rank 0 of the reader asks. docs/coupling.md has the format.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import counter, wire
from mpishard.comm.buffer import address, pieces
from mpishard.comm.patience import CertainError, Circle, Presence, Wait, keep_going, leave, state_of
from mpishard.errors import MpishardError, PeerError, described

_ALIGN = 64
_HEAD = wire.HEAD.size
_LOOK_S = 0.2

ENDED, FULL, FREE = range(3)
POLICIES = ("block", "drop_newest", "latest")

Box = Sequence["tuple[int, int]"]


class Parcel(NamedTuple):
    """The message to or from a rank (of both programs): boxes of fields, by number of the field."""

    peer: int
    boxes: tuple[tuple[int, Box], ...]


class Channel(NamedTuple):
    """Where the messages of a link travel.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        Of the ranks of both programs.
    first : int
        Rank there of the first of the other program.
    tag : int
        The first of the link's tags there.
    serial : int
        The link's number among this program's.
    circle : Circle
        This program's ranks.
    other : str
        Name of the other program.
    presences : dict
        Rank in ``comm`` -> where its process is.
    timeout_s : float
        How long to wait for the other program.
    """

    comm: MPI.Intracomm
    first: int
    tag: int
    serial: int
    circle: Circle
    other: str
    presences: dict[int, Presence]
    timeout_s: float

    def wait(self, peers: Callable[[], Sequence[int]], what: str) -> Wait:
        """Return a wait that ends where a peer is dead. Not collective."""
        return Wait(self.timeout_s, lambda: self.check(peers(), what))

    def check(self, peers: Sequence[int], what: str) -> None:
        """Raise where one of these ranks is known to be dead. Not collective."""
        dead = [p for p in peers if state_of(self.presences[p]) == "dead"]
        if dead:
            raise CertainError(
                described(
                    f"{what}: {self.named(dead)} died",
                    expected="a living peer",
                    got="its process is gone",
                    fix="see what it printed",
                )
            )

    def named(self, peers: Sequence[int]) -> str:
        """Return ranks of the other program in words. Not collective."""
        ranks = ", ".join(str(p - self.first) for p in sorted(peers)[:16])
        return f"rank{'s' * (len(peers) > 1)} {ranks} of program {self.other!r}"

    def late(self, peers: Sequence[int], what: str) -> PeerError:
        """Return the error of peers that did not come in time. Not collective."""
        stopped = [p for p in peers if state_of(self.presences[p]) == "stopped"]
        kind = CertainError if stopped else PeerError
        return kind(
            described(
                f"{what}: {self.named(peers)} did not answer",
                expected=f"the other side of the link within {self.timeout_s:g} s",
                got="nothing" + (f"; stopped by a signal: {self.named(stopped)}" if stopped else ""),
                fix="look whether it died or hangs; give connect a longer timeout where its steps take longer",
            )
        )


class _Load:
    """Memory for one step: the messages of all peers, each behind its head."""

    def __init__(self, parcels: Sequence[Parcel], dtypes: Sequence[torch.dtype]) -> None:
        shapes = [[tuple(hi - lo for lo, hi in box) for _, box in p.boxes] for p in parcels]
        nbytes = [
            [_aligned(math.prod(shape) * dtypes[field].itemsize) for shape, (field, _) in zip(own, p.boxes)]
            for own, p in zip(shapes, parcels)
        ]
        self.sizes = [_HEAD + sum(own) for own in nbytes]
        starts = list(accumulate(self.sizes, initial=0))
        with torch.inference_mode(False):
            self.memory = torch.empty(starts[-1], dtype=torch.uint8)
            # in the order of the parcels and of their boxes
            self.views: list[Tensor] = []
            for p, start, own, lengths in zip(parcels, starts, shapes, nbytes):
                for (field, _), shape, at in zip(p.boxes, own, accumulate(lengths, initial=start + _HEAD)):
                    dtype = dtypes[field]
                    count = math.prod(shape) * dtype.itemsize
                    self.views.append(self.memory[at : at + count].view(dtype).view(shape))
        self.heads = [self.memory[a : a + _HEAD].numpy().view(np.int64) for a in starts[:-1]]
        self.parts = [[(self.memory.data_ptr() + a + at, n) for at, n in pieces(s)] for a, s in zip(starts, self.sizes)]


class _Slot:
    """A load that is sent by requests of its own."""

    def __init__(self, channel: Channel, parcels: Sequence[Parcel], dtypes: Sequence[torch.dtype]) -> None:
        self.load = _Load(parcels, dtypes)
        self.step = -1
        self.flying = False
        self.peers: list[int] = []
        self.requests: list[MPI.Prequest] = []
        for p, parts in zip(parcels, self.load.parts):
            for start, nbytes in parts:
                self.requests.append(channel.comm.Ssend_init(address(start, nbytes), p.peer, channel.tag + wire.DATA))
                self.peers.append(p.peer)

    def send(self) -> None:
        self.flying = True
        if self.requests:
            MPI.Prequest.Startall(self.requests)

    def done(self) -> bool:
        if self.flying and MPI.Request.Testall(self.requests):
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

    Attributes
    ----------
    ended : bool
        Whether `put` has found that the reader has closed its side: the same on all ranks.
    """

    def __init__(
        self, channel: Channel, parcels: Sequence[Parcel], dtypes: Sequence[torch.dtype], policy: str, depth: int
    ) -> None:
        self.channel = channel
        self._parcels = parcels
        self._depth = depth
        self._new_slot = partial(_Slot, channel, parcels, dtypes)
        self._slots = [self._new_slot() for _ in range(depth)]
        self._policy = policy
        self._next = 0  # the number of the step that is put next
        self._sent = 0  # steps in the ring, for policies that push
        self._unread: list[_Slot] = []  # "latest": filled and not asked for, oldest first
        self._asked = self._served = 0
        self._putting = False
        self._looked = time.monotonic()
        self._stopped: set[int] = set()
        self.ended = False
        self._ends: dict[int, tuple[MPI.Request, np.ndarray]] = {}
        self._known: list[Tensor] = []
        self._boxes: list[Tensor] = []
        self._tree: list[tuple[MPI.Request, np.ndarray]] = []
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
        circle, timeout = self.channel.circle, self.channel.timeout_s
        room = FULL
        self.progress()
        self._putting = True
        try:
            slot = self._slots[self._sent % len(self._slots)]
            if error is None:
                try:
                    room = self._room(slot)
                except PeerError as e:
                    error = e
            circle.start(error, room, -self._asked)
            if room == FREE and error is None and self._policy != "latest":
                self._fill(slot, blocks)
                if self._policy == "block":
                    # whatever the others find: a reader that has stopped drops it, and an error ends the link
                    self._send(slot, self._next)
            room, asked, _ = circle.finish(timeout)
            if room == ENDED:
                self.ended = True
                return False
            step, self._next = self._next, self._next + 1
            if self._policy == "latest":
                self._asked = max(self._asked, -asked)
                self._serve()
                slot = self._emptied()
                self._fill(slot, blocks)
                slot.step = step
                self._unread.append(slot)
                self._serve()
            elif room == FREE:
                self._sent += 1
                if self._policy != "block":
                    self._send(slot, step)
            return room == FREE
        finally:
            self._putting = False
            if self._stopped:
                self.progress()

    def _room(self, slot: _Slot) -> int:
        if self._stopped:
            return ENDED
        if self._policy == "latest" or slot.done():
            self._look()
            return FREE
        if self._policy == "drop_newest":
            self._look()
            return FULL
        wait = self.channel.wait(slot.waits_for, "put")
        while not slot.done():
            if self._stopped:
                return ENDED
            if not wait.pause():
                raise self.channel.late(slot.waits_for(), "put")
        return FREE

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
            # one more than the depth, for the step that is being read: the reader asks for the next when it has it
            if len(self._slots) <= self._depth:
                self._slots.append(self._new_slot())

    def _fill(self, slot: _Slot, blocks: Sequence[Tensor]) -> None:
        if len(blocks) != len(self._known) or any(a is not b for a, b in zip(blocks, self._known)):
            self._known = list(blocks)
            self._boxes = boxes_of(blocks, self._parcels)
        with torch.no_grad():
            for view, box in zip(slot.load.views, self._boxes):
                view.copy_(box)

    def _send(self, slot: _Slot, step: int) -> None:
        for head, nbytes in zip(slot.load.heads, slot.load.sizes):
            head[:] = (wire.MAGIC, wire.VERSION, wire.STEP, step, nbytes, 0, 0, 0)
        if counter.active:
            counter.record("put", len(slot.requests), sum(slot.load.sizes))
        slot.send()

    def _serve(self) -> None:
        while self._served < self._asked and self._unread:
            slot = self._unread.pop(0)
            self._served += 1
            self._send(slot, slot.step)

    def progress(self) -> None:
        """Answer the reader where it asks or stops. Not collective."""
        comm, tag = self.channel.comm, self.channel.tag
        status = MPI.Status()
        while comm.Iprobe(MPI.ANY_SOURCE, tag + wire.STOP, status):
            peer = status.Get_source()
            comm.Recv(np.empty(_HEAD // 8, np.int64), peer, tag + wire.STOP)
            self._stopped.add(peer)
        if not self._putting:
            # never before a step that is on its way
            for peer in self._stopped:
                self._end(peer, wire.END)
        if self._policy == "latest":
            self._progress_requests()

    def _progress_requests(self) -> None:
        channel, circle, serial = self.channel, self.channel.circle, self.channel.serial
        if circle.rank == 0:
            while channel.comm.Iprobe(channel.first, channel.tag + wire.REQUEST):
                channel.comm.Recv(np.empty(_HEAD // 8, np.int64), channel.first, channel.tag + wire.REQUEST)
                self._asked += 1
            told = not self._putting and self._served < self._asked and bool(self._unread)
        else:
            parent, told = circle.rank & (circle.rank - 1), False
            note = np.empty(_HEAD // 8, np.int64)
            while circle.comm.Iprobe(parent, serial):
                circle.comm.Recv(note, parent, serial)
                self._asked = max(self._asked, int(note[3]))
                told = True
        if told:
            # where a rank waits it cannot agree: the others are told, down a tree
            self._tree = [(request, note) for request, note in self._tree if not request.Test()]
            step = 1
            while circle.rank + step < circle.size and not circle.rank & step:
                note = notice(wire.SERVE, self._asked)
                request = circle.comm.Isend(note, circle.rank + step, serial)
                self._tree.append((request, note))
                step <<= 1
        if not self._putting:
            self._serve()

    def _end(self, peer: int, kind: int) -> None:
        if peer not in self._ends:
            head = notice(kind, self._next)
            self._ends[peer] = (self.channel.comm.Isend(head, peer, self.channel.tag + wire.DATA), head)

    def flush(self) -> Callable[[], bool]:
        """Return a function to call until it is true: then every step was read, or the reader has stopped."""

        def done() -> bool:
            self.progress()
            everything = all(slot.done() for slot in self._slots)
            if not everything or (self._unread and not self._stopped):
                return False
            for p in self._parcels:
                self._end(p.peer, wire.END)
            return all(request.Test() for request, _ in self._ends.values())

        return done

    def waits_for(self) -> list[int]:
        """Return the ranks that have not taken what is there for them. Not collective."""
        if self._unread and not self._stopped:
            return [p.peer for p in self._parcels]
        return sorted({peer for slot in self._slots if slot.flying for peer in slot.waits_for()})

    def release(self, gone: bool = False) -> None:
        """Free what is local; where the program leaves without having closed the link, say so. Not collective."""
        leave(self)
        if gone:
            for p in self._parcels:
                self._end(p.peer, wire.GONE)
        for slot in self._slots:
            if slot.done():
                for request in slot.requests:
                    request.Free()
        self._slots = []


class Inlet:
    """The end of a link that steps are got from.

    Parameters
    ----------
    channel
        Its messages.
    parcels
        Per rank that writes to this one, ascending; also one from which no cell comes, but the end of the stream.
    dtypes
        Of the fields.
    asks
        Whether the writer waits to be asked.
    """

    def __init__(self, channel: Channel, parcels: Sequence[Parcel], dtypes: Sequence[torch.dtype], asks: bool) -> None:
        self.channel = channel
        self._parcels = parcels
        self._asks = asks
        self._load = _Load(parcels, dtypes)
        comm, tag = channel.comm, channel.tag + wire.DATA
        self._requests = [
            comm.Recv_init(address(*parts[0]), p.peer, tag) for p, parts in zip(parcels, self._load.parts)
        ]
        self._known: list[Tensor] = []
        self._boxes: list[Tensor] = []
        self._notes: list[tuple[MPI.Request, np.ndarray]] = []
        self._over: set[int] = set()  # ranks whose last message is here
        self._running: set[int] = set()
        self.ended = False

    def get(self, blocks: Sequence[Tensor], error: MpishardError | None) -> int | None:
        """Fill the blocks with the next step; return its number, None at the end. Collective."""
        circle, timeout = self.channel.circle, self.channel.timeout_s
        if self.ended:
            return None
        kind = step = 0
        if error is None:
            try:
                kind, step = self._received()
            except PeerError as e:
                error = e
        circle.start(error, step, -step, -kind)
        if error is None and kind == wire.STEP:
            self._unpack(blocks)
        least, most, last = circle.finish(timeout)
        if last:
            self.ended = True
            return None
        if least != -most:
            raise PeerError(
                described(
                    "get: the ranks got different steps",
                    expected="one step",
                    got=f"steps {least} to {-most}",
                    fix="call put on all ranks of the writing program alike",
                )
            )
        return least

    def _received(self) -> tuple[int, int]:
        """Wait for a message of every peer; return what they are and the step. Neighborwise collective."""
        if self._asks and self.channel.circle.rank == 0:
            self._tell(self.channel.first, wire.REQUEST, 0)
        MPI.Prequest.Startall(self._requests)
        self._running = set(range(len(self._requests)))
        if not MPI.Request.Testall(self._requests):
            wait = self.channel.wait(self.waits_for, "get")
            while not MPI.Request.Testall(self._requests):
                if not wait.pause():
                    raise self.channel.late(self.waits_for(), "get")
        self._running.clear()
        heads = [self._checked(i) for i in range(len(self._parcels))]
        if len({kind for kind, _ in heads}) > 1 or (heads[0][0] == wire.STEP and len(set(heads)) > 1):
            raise PeerError(
                described(
                    "get: the writers sent different steps",
                    expected="one step",
                    got=", ".join(f"{step} from rank {p.peer}" for p, (_, step) in zip(self._parcels, heads)),
                    fix="call put on all ranks of the writing program alike",
                )
            )
        return heads[0]

    def _checked(self, i: int) -> tuple[int, int]:
        magic, version, kind, step, nbytes, *_ = self._load.heads[i].tolist()
        peer = self._parcels[i].peer
        if (magic, version) != (wire.MAGIC, wire.VERSION):
            raise PeerError(wire.other_version(version if magic == wire.MAGIC else None))
        if kind == wire.GONE:
            raise PeerError(
                described(
                    f"get: {self.channel.named([peer])} left",
                    expected="more steps, or close",
                    got="the end of its process",
                    fix="close the link on all ranks before a program ends",
                )
            )
        if kind == wire.END:
            self._over.add(peer)
            return kind, 0
        if nbytes != self._load.sizes[i]:
            raise PeerError(
                described(
                    f"get: a message of {self.channel.named([peer])} of another size",
                    expected=f"{self._load.sizes[i]} bytes",
                    got=f"{nbytes} bytes",
                    fix="report this: both sides plan alike",
                )
            )
        comm, tag = self.channel.comm, self.channel.tag + wire.DATA
        MPI.Request.Waitall([comm.Irecv(address(*part), peer, tag) for part in self._load.parts[i][1:]])
        return kind, step

    def _unpack(self, blocks: Sequence[Tensor]) -> None:
        if len(blocks) != len(self._known) or any(a is not b for a, b in zip(blocks, self._known)):
            self._known = list(blocks)
            self._boxes = boxes_of(blocks, self._parcels)
        with torch.no_grad():
            for box, view in zip(self._boxes, self._load.views):
                box.copy_(view)

    def stop(self) -> Callable[[], bool]:
        """Tell the writers that nothing is read any more; return a function to call until it is true. Collective."""
        if not self.ended:
            for p in self._parcels:
                self._tell(p.peer, wire.STOP, 0)
        self.ended = True

        return lambda: all(self._drained(i) for i in range(len(self._parcels)))

    def _drained(self, i: int) -> bool:
        """Drop what one rank sends until its last message is here; return whether it is. Not collective."""
        peer, request = self._parcels[i].peer, self._requests[i]
        while peer not in self._over:
            if i not in self._running:
                request.Start()
                self._running.add(i)
            if not request.Test():
                return False
            self._running.discard(i)
            try:
                self._checked(i)
            except PeerError:
                self._over.add(peer)
        return True

    def waits_for(self) -> list[int]:
        """Return the ranks whose message is not here. Not collective."""
        return [p.peer for p, request in zip(self._parcels, self._requests) if not request.Get_status()]

    def _tell(self, peer: int, kind: int, value: int) -> None:
        self._notes = [(request, note) for request, note in self._notes if not request.Test()]
        note = notice(kind, value)
        self._notes.append((self.channel.comm.Isend(note, peer, self.channel.tag + kind), note))

    def release(self) -> None:
        """Free what is local. Not collective."""
        for request in self._requests:
            if not request.Get_status():
                request.Cancel()
                request.Wait()
            request.Free()
        self._requests = []


def notice(kind: int, value: int) -> np.ndarray:
    """Return a message without cells. Not collective."""
    return np.array([wire.MAGIC, wire.VERSION, kind, value, _HEAD, 0, 0, 0], np.int64)


def boxes_of(blocks: Sequence[Tensor], parcels: Sequence[Parcel]) -> list[Tensor]:
    """Return the boxes of blocks, in the order of the parcels, outside autograd. Not collective."""
    out = []
    for p in parcels:
        for field, box in p.boxes:
            x = blocks[field].detach()
            for dim, (lo, hi) in enumerate(box):
                x = x.narrow(dim, lo, hi - lo)
            out.append(x)
    return out


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
