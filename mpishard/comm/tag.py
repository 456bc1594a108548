"""What tells messages apart: every plan has tags of its own, one per direction, the same on all ranks.

A rank takes the next message of a peer whatever its tag, and looks at the tag afterwards: a message of another
call is an error at once, not a wait for one that never comes.

Plans have numbers that their ranks agreed on, and never share a tag. Messages without a plan (`hashed`) have one of
12,288: two calls that cross meet as if they were one where both their texts have the same remainder and their messages
the same length. ``MPISHARD_DEBUG=1`` compares the texts themselves.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

from mpi4py import MPI

from mpishard.comm import guard
from mpishard.comm.lifetime import family_of
from mpishard.comm.loaded import IS_OPEN_MPI
from mpishard.errors import DesyncError, MpishardError, PeerError, ranges_of, ranks_text
from mpishard.layout.remembered import remembered

# MPI guarantees 32767. First the messages of plans; then those whose ends have a text in common, and no number.
_FIRST, _HASHED, _LAST = 64, 20480, 32767
_NUMBERS = (_HASHED - _FIRST) // 2
_TEXT = 300  # letters of a key that an error shows
# its waits (4.1, several threads) never return where a message comes that is too long meanwhile
_POLLS = IS_OPEN_MPI


class Label:
    """What all ranks call a plan: a text, and a number that they agree on when it is made.

    Parameters
    ----------
    text
        The same on every rank.
    comms
        The communicators of its mesh and sub-meshes: the list itself, which goes on to change.

    Attributes
    ----------
    number : int
        Another one for every plan in use on these; -1 until it is agreed on.
    """

    __slots__ = ("__weakref__", "comms", "number", "text")

    def __init__(self, text: str, comms: list[Any]) -> None:
        self.text, self.comms, self.number = text, comms, -1
        _labels.add(self)

    def tag(self, adjoint: bool) -> int:
        """Return the tag of the messages of one direction. Not collective."""
        assert self.number >= 0, "messages before the ranks agreed on the plan"
        return _FIRST + 2 * (self.number % _NUMBERS) + adjoint


_labels: WeakSet[Label] = WeakSet()
_texts: dict[int, str] = {}


@remembered
def hashed(op: str, *parts: object) -> int:
    """Return a tag of what both ends of a message know, where they agree on no number. Not collective."""
    text = f"{op} {parts}"
    tag = _HASHED + zlib.crc32(text.encode()) % (_LAST - _HASHED + 1)
    _texts[tag] = text
    return tag


def said(op: str, label: Label, adjoint: bool = False) -> str:
    """Return the name of an operation for errors and the watchdog. Not collective."""
    return f"{'adjoint of ' * adjoint}{op} of {label.text[:_TEXT]}"


def _named(comm: MPI.Comm, tag: int) -> str:
    """Return the call that sends messages of this tag, as far as this rank has made it."""
    number, adjoint = divmod(tag - _FIRST, 2)
    if tag >= _HASHED:
        return _texts.get(tag, "another call")[:_TEXT]
    for label in list(_labels):
        if label.number >= 0 and label.number % _NUMBERS == number and comm in label.comms:
            return f"{'the adjoint of ' * adjoint}{label.text[:_TEXT]}"
    return f"another call (tag {tag})"


# MPI may need some before it sees what lies there: Intel's needs two
_LOOKS = 10


def _unexpected(comm: MPI.Comm, peers: Sequence[int]) -> list[str]:
    """Say which messages lie here that peers have sent and nothing on this rank has asked for."""
    world, lines = MPI.COMM_WORLD, []
    for other in family_of(comm):
        group = other.Get_group()
        for peer, place in zip(peers, comm.Get_group().Translate_ranks(peers, group)):
            status = MPI.Status()
            if place == MPI.UNDEFINED:
                continue
            if any(other.Iprobe(place, MPI.ANY_TAG, status) for _ in range(_LOOKS)):
                (rank,) = comm.Get_group().Translate_ranks([peer], world.Get_group())
                lines.append(f"Rank {rank} has sent {status.Get_count()} bytes of {_named(other, status.tag)}.")
    return lines


guard.unexpected = _unexpected


def crossed(
    op: str, comm: MPI.Comm, peers: Sequence[int], found: Sequence[tuple[int, int, int, int]], error: object = None
) -> DesyncError:
    """Return the error of messages that are not those of this call.

    Not collective.

    Parameters
    ----------
    op, comm, peers
        The operation, its communicator and the ranks that it talks to.
    found
        Per wrong message its source, tag and length, and the length that is right.
    error
        What MPI said, if anything.
    """
    world = MPI.COMM_WORLD
    ranks = comm.Get_group().Translate_ranks(sorted(set(peers)), world.Get_group())
    came = []
    for source, tag, nbytes, _ in found:
        (rank,) = comm.Get_group().Translate_ranks([source], world.Get_group())
        came.append(f"from rank {rank} {nbytes} bytes of {_named(comm, tag)}")
    right = f"{found[0][3]} bytes of this call" if found else "messages of this call"
    return DesyncError(
        f"ranks made different calls: rank {world.Get_rank()}, in {op}, with {ranks_text(ranges_of(ranks))}",
        expected=right,
        got="; ".join(came) or str(error),
        fix="look for code that depends on the rank before this call; MPISHARD_DEBUG=1 finds the first such call",
    )


def lost(op: str, comm: MPI.Comm, peers: Sequence[int], error: object) -> PeerError:
    """Return the error of messages of this call that MPI began and could not end: the other end is gone.

    Not collective.
    """
    world = MPI.COMM_WORLD
    ranks = comm.Get_group().Translate_ranks(sorted(set(peers)), world.Get_group())
    return PeerError(
        f"a message did not come whole: rank {world.Get_rank()}, in {op}, with {ranks_text(ranges_of(ranks))}",
        expected="all of a message that had begun to come",
        got=str(error).strip(),
        fix="a rank has ended, or a node or network has failed: look at what those ranks and the launcher said",
    )


def wait_all(requests: Sequence[Any], statuses: list[MPI.Status]) -> None:
    """Wait for messages of any length. Neighborwise collective."""
    if _POLLS:
        while not MPI.Request.Testall(requests, statuses):
            os.sched_yield()
    else:
        MPI.Request.Waitall(requests, statuses)


class Flight:
    """Messages that travel together, and what must come.

    Parameters
    ----------
    comm, op
        Communicator, and what a rank that waits says.
    recvs
        Per message that comes, its peer, request, tag and length in bytes. Requests for any tag find out what came
        instead.
    sends
        Per message that goes, its peer and request.
    exact
        Whether the requests take their own tags alone, which say all that both ends must have in common: nothing is
        left to look at, and a wait costs less.
    at_most
        Whether fewer bytes may come: the caller looks at `lengths`.
    """

    __slots__ = ("_at_most", "_comm", "_exact", "_expected", "_op", "_peers", "_seen", "_statuses", "requests")

    def __init__(
        self,
        comm: MPI.Intracomm,
        op: str,
        recvs: Sequence[tuple[int, Any, int, int]],
        sends: Sequence[tuple[int, Any]],
        *,
        exact: bool = False,
        at_most: bool = False,
    ) -> None:
        self._comm, self._op, self._exact, self._at_most = comm, op, exact, at_most
        self.requests: list[Any] = []
        self._peers: list[int] = []
        self._statuses: list[MPI.Status] = []
        self._expected: list[tuple[MPI.Status, int, int]] = []
        for peer, request, tag, nbytes in recvs:
            status = MPI.Status()
            self.requests.append(request)
            self._peers.append(peer)
            self._statuses.append(status)
            self._expected.append((status, tag, nbytes))
        for peer, request in sends:
            self.requests.append(request)
            self._peers.append(peer)
            self._statuses.append(MPI.Status())
        self._seen = False  # all through, by `look`

    def start(self) -> None:
        """Start persistent requests. Neighborwise collective."""
        if self.requests:
            MPI.Prequest.Startall(self.requests)

    def test(self) -> bool:
        """Let MPI make progress; return whether all messages are through. Not collective."""
        if not self.requests:
            return True
        through = self._through()
        if through:
            self._check()
        return through

    def _through(self) -> bool:
        try:
            return MPI.Request.Testall(self.requests, self._statuses)
        except MPI.Exception as e:
            raise self._crossed(self._expected, e) from None

    def __call__(self) -> list[int]:
        """Return the ranks whose messages are not through, for `guard.waiting`. Not collective."""
        return guard.incomplete(self.requests, self._peers)

    @property
    def receives(self) -> int:
        """How many of the requests are messages that come; they are the first."""
        return len(self._expected)

    def look(self) -> bool:
        """Tell whether all messages are through, of which `wait` keeps the statuses. Not collective."""
        self._seen = self._through()
        return self._seen

    def wait(self) -> None:
        """Wait until all messages are through. Neighborwise collective.

        Raises
        ------
        DesyncError
            Another message came than the one that must come.
        """
        if not self.requests:
            return
        with guard.waiting(self._op, self, self._comm):
            if self._seen:
                self._seen = False
            elif self._exact:
                MPI.Request.Waitall(self.requests)
                return
            else:
                try:
                    wait_all(self.requests, self._statuses)
                except MPI.Exception as e:
                    raise self._crossed(self._expected, e) from None
        self._check()

    def each(self) -> Iterator[int]:
        """Wait, and yield the number of each message as it is through; those that come are the first.

        Neighborwise collective. What `test` has seen through is left out.
        """
        some = [MPI.Status() for _ in self.requests]
        with guard.waiting(self._op, self, self._comm):
            if self._seen:
                self._seen = False
                self._check()
                return
            while (through := self._some(some)) is not None:
                for status, k in zip(some, through):
                    if k < len(self._expected):
                        _, tag, nbytes = self._expected[k]
                        if self._is_other(status, tag, nbytes):
                            raise self._crossed([(status, tag, nbytes)])
                    yield k

    def _some(self, statuses: list[MPI.Status]) -> list[int] | None:
        try:
            if not _POLLS:
                return MPI.Request.Waitsome(self.requests, statuses)
            while (through := MPI.Request.Testsome(self.requests, statuses)) == []:
                os.sched_yield()
            return through
        except MPI.Exception as e:
            raise self._crossed([], e) from None

    def _check(self) -> None:
        for status, tag, nbytes in self._expected:
            # what `test` has seen through comes again without a tag
            if self._is_other(status, tag, nbytes) and status.tag != MPI.ANY_TAG:
                raise self._crossed(self._expected)

    def lengths(self) -> list[int]:
        """Return how many bytes each message had that came, after `wait`. Not collective."""
        return [status.Get_count() for status, _, _ in self._expected]

    def _is_other(self, status: MPI.Status, tag: int, nbytes: int) -> bool:
        """Tell whether a message is not the one that must come; MPI refuses one that is too long."""
        return status.tag != tag or (status.Get_count() != nbytes and not self._at_most)

    def _crossed(self, expected: Sequence[tuple[MPI.Status, int, int]], error: object = None) -> MpishardError:
        found, broken = [], []
        for status, tag, n in expected:
            if status.tag == MPI.ANY_TAG:
                continue
            count = status.Get_count()
            if self._is_other(status, tag, n) or MPI.Get_error_class(status.error) == MPI.ERR_TRUNCATE:
                found.append((status.source, status.tag, count, n))
            elif status.error not in (MPI.SUCCESS, MPI.ERR_PENDING):
                broken.append(status.source)
        if broken and not found:
            return lost(self._op, self._comm, broken, error)
        return crossed(self._op, self._comm, self._peers, found, error)

    def free(self) -> None:
        """Free persistent requests. Not collective."""
        for request in self.requests:
            if request:  # Open MPI frees one that has failed
                request.Free()
        self.requests = []
