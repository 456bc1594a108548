"""Inlet: the end of a link that steps are got from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI
from torch import Tensor
from torch.autograd.graph import increment_version

from mpishard.comm import in_flight
from mpishard.comm.coupling import wire
from mpishard.comm.coupling.channel import Channel, Copies, Load, Parcel, boxes_of, notice
from mpishard.comm.coupling.patience import GET
from mpishard.comm.memory.buffer import address
from mpishard.errors import MpishardError, PeerError

_test_all, _start_all = MPI.Request.Testall, MPI.Prequest.Startall


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
        self._call = channel.call(GET)
        self._parcels = parcels
        self._asks = asks
        self._load = Load(parcels, dtypes)
        # what is all of a step, where it comes in one piece
        self._whole = [n if len(parts) == 1 else -1 for n, parts in zip(self._load.sizes, self._load.parts)]
        self._heads = [(head.data, notice(wire.STEP, 0, n).data) for head, n in zip(self._load.heads, self._whole)]
        comm, tag = channel.comm, channel.tag + wire.DATA
        self._requests = [
            comm.Recv_init(address(*parts[0]), p.peer, tag) for p, parts in zip(parcels, self._load.parts)
        ]
        self._known: Sequence[Tensor] = ()
        self._copies = Copies((), ())
        self._counted: Sequence[Tensor] = ()
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
        circle.start(error, step, -step, -kind, call=self._call)
        if error is None and kind == wire.STEP:
            self._unpack(blocks)
        least, most, last = circle.finish(timeout)
        if last:
            self.ended = True
            return None
        if least != -most:
            raise PeerError(
                "get: the ranks got different steps",
                expected="one step",
                got=f"steps {least} to {-most}",
                fix="call put on all ranks of the writing program alike",
            )
        return least

    def _received(self) -> tuple[int, int]:
        """Wait for a message of every peer; return what they are and the step. Neighborwise collective."""
        if self._asks and self.channel.circle.rank == 0:
            self._tell(self.channel.first, wire.REQUEST, wire.REQUEST)
        requests = self._requests
        _start_all(requests)
        if not _test_all(requests):
            self._running = set(range(len(requests)))
            wait = self.channel.wait(self.waits_for, "get")
            while not _test_all(requests):
                if not wait.pause():
                    raise self.channel.late(self.waits_for(), "get")
            self._running.clear()
        step = self._heads[0][0][3]
        for head, expected in self._heads:
            expected[3] = step
            if head != expected:
                break
        else:
            return wire.STEP, step
        heads = [self._checked(i) for i in range(len(self._parcels))]
        if len(set(heads)) > 1:
            other = {head: p.peer for head, p in reversed(list(zip(heads, self._parcels)))}
            raise PeerError(
                "get: the writers sent different steps",
                expected="one step",
                got=", ".join(
                    f"{step if kind == wire.STEP else 'the end'} from {self.channel.named([peer])}"
                    for (kind, step), peer in sorted(other.items(), key=lambda item: item[1])[:4]
                ),
                fix="call put on all ranks of the writing program alike",
            )
        return heads[0]

    def _checked(self, i: int) -> tuple[int, int]:
        magic, version, kind, step, nbytes, *_ = wire.HEAD.unpack_from(self._load.heads[i].data)
        if (magic, version, kind, nbytes) == (wire.MAGIC, wire.VERSION, wire.STEP, self._whole[i]):
            return kind, step
        peer = self._parcels[i].peer
        if (magic, version) != (wire.MAGIC, wire.VERSION):
            raise PeerError(wire.other_version(version if magic == wire.MAGIC else None))
        if kind == wire.GONE:
            self._over.add(peer)
            raise PeerError(
                f"get: {self.channel.named([peer])} left",
                expected="more steps, or close",
                got="the end of its process",
                fix="close the link on all ranks before a program ends",
            )
        if kind == wire.END:
            self._over.add(peer)
            return kind, 0
        if nbytes != self._load.sizes[i]:
            raise PeerError(
                f"get: a message of {self.channel.named([peer])} of another size",
                expected=f"{self._load.sizes[i]} bytes",
                got=f"{nbytes} bytes",
                fix="report this: both sides plan alike",
            )
        comm, tag = self.channel.comm, self.channel.tag + wire.DATA
        rest = [comm.Irecv(address(*part), peer, tag) for part in self._load.parts[i][1:]]
        wait = self.channel.wait(lambda: [peer], "get")
        try:
            while not _test_all(rest):
                if not wait.pause():
                    raise self.channel.late([peer], "get")
        except PeerError:
            in_flight.left.append((self._load, rest))
            raise
        return kind, step

    def _unpack(self, blocks: Sequence[Tensor]) -> None:
        if blocks is not self._known:
            self._known = blocks
            self._copies = Copies(boxes_of(blocks, self._parcels), self._load.views)
            # autograd keeps no tensor of inference mode, nor a count of its changes
            self._counted = [x for x in blocks if not x.is_inference()]
        if len(self._counted) == len(blocks):
            self._copies.run()
        else:
            with torch.inference_mode():
                self._copies.run()
        # not all of the copies are torch's own
        increment_version(self._counted)

    def stop(self) -> Callable[[], bool]:
        """Tell the writers that nothing is read any more; return a function to call until it is true. Collective."""
        for i, p in enumerate(self._parcels):
            # not to one that has left: what it never receives stays with MPICH, which has room for 64 such messages
            if not self.ended and not self._drained(i):
                self._tell(p.peer, wire.STOP, wire.STOP)
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

    def _tell(self, peer: int, tag: int, kind: int) -> None:
        in_flight.keep_sent(self.channel.comm.Isend(notice(kind, 0), peer, self.channel.tag + tag))

    def release(self, gone: bool = False) -> None:
        """Free what is local; where the program leaves without having closed the link, say so. Not collective."""
        for p in self._parcels:
            if gone and p.peer not in self._over:
                self._tell(p.peer, wire.STOP, wire.GONE)
        for request in self._requests:
            if not request.Get_status():
                request.Cancel()
                request.Wait()
            request.Free()
        self._requests = []
