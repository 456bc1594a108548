"""Waits that end: polling with a deadline, ranks that decide together, and whether a process is still there."""

from __future__ import annotations

import itertools
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
from mpi4py import MPI

from mpishard import errors
from mpishard.comm import guard, in_flight
from mpishard.comm.coupling import wire
from mpishard.comm.dissemination import Dissemination
from mpishard.comm.exit import on_finalize
from mpishard.errors import DesyncError, PeerError

# looked up once: a step of a link makes few calls, and these are most of them
_yield, _start_all = os.sched_yield, MPI.Prequest.Startall
_SPIN_S = 3e-4
_LONGEST_PAUSE_S = 4e-3  # in a long wait: each look takes some tens of microseconds from who else is on the core
_FIRST_TAG = 1 << 14  # those below are the notes' of links
_LOOK_S = 0.2  # between looks whether peers are alive
_CALLS = PUT, GET, CLOSE = "put", "get", "close"
_CALL = 1 << 40  # above what the values of an agreement are

# what must go on whatever this rank waits for: called with no arguments, must not raise or wait
_background: tuple[Any, ...] = ()


def keep_going(worker: Any) -> None:
    """Have ``worker.progress()`` called in every wait of this rank, until `leave`. Not collective."""
    global _background  # noqa: PLW0603
    _background = (*_background, worker)


def leave(worker: Any) -> None:
    """Undo `keep_going`. Not collective."""
    global _background  # noqa: PLW0603
    _background = tuple(w for w in _background if w is not worker)


class CertainError(PeerError):
    """The error of a peer that is known to have died or to have been stopped, not only to be late."""


class Wait:
    """A wait of at most ``timeout_s`` seconds.

    Parameters
    ----------
    timeout_s
        Seconds.
    look
        Called now and then; raises where waiting is in vain.
    """

    __slots__ = ("_looked", "_spins", "_start", "_turns", "look", "timeout_s")

    def __init__(self, timeout_s: float, look: Callable[[], None] | None = None) -> None:
        self.timeout_s = timeout_s
        self.look = look
        self._start = 0.0
        self._turns = 0
        self._spins = True

    def pause(self) -> bool:
        """Let others run; return whether there is time left. Not collective."""
        self._turns += 1
        if self._spins and self._turns % 8:
            # most waits end here: what is done beside takes from those who are waited for, where they share a core
            _yield()
            return True
        now = time.monotonic()
        if not self._start:
            self._start = self._looked = now
        passed = now - self._start
        for worker in _background:
            worker.progress()
        if passed < _SPIN_S:
            return True
        self._spins = False
        if self.look is not None and now - self._looked > _LOOK_S:
            self._looked = now
            self.look()
        time.sleep(min(passed / 16, _LONGEST_PAUSE_S))
        return passed < self.timeout_s


class Circle:
    """The ranks of one program, which decide together whether a call has worked.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        Theirs, for this alone.
    name : str
        Of the program.
    """

    def __init__(self, comm: MPI.Intracomm, name: str) -> None:
        self.comm = comm
        self.name = name
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._broken = False
        self._tags = itertools.count(_FIRST_TAG)
        ballot = Ballot(self)
        on_finalize(ballot.leave)
        self.start, self.finish = ballot.start, ballot.finish

    def new_tag(self) -> int:
        """Return a tag on ``comm`` that nobody else has. Collective."""
        return next(self._tags)

    def agree(
        self, error: BaseException | None, timeout_s: float, a: int = 0, b: int = 0, c: int = 0, *, call: int = 0
    ) -> tuple[int, int, int]:
        """Return the least of every value; where a rank has an error, all raise that of the lowest. Collective."""
        self.start(error, a, b, c, call=call)
        return self.finish(timeout_s)

    def give_up(self) -> None:
        """Have later calls raise, as this rank has left one halfway: the others may be in it yet. Not collective."""
        self._broken = self._broken or self.size > 1

    def told(self, message: bytes | None, timeout_s: float) -> bytes:
        """Return rank 0's message on all ranks. Collective."""
        if self.size == 1:
            assert message is not None
            return message
        count = np.array([0 if message is None else len(message)], np.int64)
        self._complete(self.comm.Ibcast([count, MPI.INT64_T], 0).Test, timeout_s)
        data = np.empty(int(count[0]), np.uint8)
        if message is not None:
            data[:] = np.frombuffer(message, np.uint8)
        self._complete(self.comm.Ibcast([data, MPI.BYTE], 0).Test, timeout_s)
        return data.tobytes()

    def _raise(self, error: BaseException | None, rank: int, timeout_s: float) -> NoReturn:
        data = np.zeros(wire.TEXT_NBYTES, np.uint8)
        if rank == self.rank:
            said = wire.clipped(f"{type(error).__name__}|{error}", wire.TEXT_NBYTES)
            data[: len(said)] = np.frombuffer(said, np.uint8)
        if self.size > 1:
            self._complete(self.comm.Ibcast([data, MPI.BYTE], rank).Test, timeout_s)
        kind, _, text = wire.text_of(data.tobytes()).partition("|")
        raise guard.common(getattr(errors, kind, PeerError)(text), self.comm) from None

    def _complete(self, done: Callable[[], bool], timeout_s: float) -> None:
        # ranks whose own wait ran out come this much later
        wait = Wait(timeout_s + min(timeout_s, 5.0))
        while not done():
            if not wait.pause():
                self._broken = True
                in_flight.left.append(done)
                raise PeerError(
                    f"program {self.name!r}: not all of its own ranks came to the call",
                    expected=f"{self.size} ranks within {wait.timeout_s:.0f} s",
                    got=f"rank {self.rank}, and not all others",
                    fix="look for a rank that died or took another way",
                )


class Ballot:
    """An agreement of a circle that may be under way while the circle agrees on other things.

    Its methods are called by all ranks, in the same order as other agreements of the circle.

    Parameters
    ----------
    circle
        The ranks.
    later
        Whether ranks do other things between `start` and `finish`.
    """

    def __init__(self, circle: Circle, *, later: bool = False) -> None:
        self._circle = circle
        self._error: BaseException | None = None
        self.under_way = False
        # nobody sends the messages of a second round before it is in a call again
        self._rounds = None if later and circle.size > 2 else Dissemination(circle.comm, circle.new_tag())
        self._numbers = np.zeros((2, 4), np.int64)
        self._request: MPI.Request = MPI.REQUEST_NULL
        self._done: Callable[[], bool] = self._request.Test if self._rounds is None else self._rounds.done

    def start(
        self,
        error: BaseException | None,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        *,
        call: int = 0,
        along: Sequence[MPI.Prequest] = (),
    ) -> None:
        """Start an agreement on the least of every value; `finish` ends it. Collective.

        ``call``: what `call_of` returns, where it is one of a link, so that no rank's matches another.
        ``along``: other requests that start now; one call for all costs less.
        """
        circle = self._circle
        if circle._broken:
            raise PeerError(
                f"program {circle.name!r}: its ranks have lost each other",
                expected="all of them in every call",
                got="an earlier call to which some never came",
                fix="see that call's error",
            )
        self._error = error
        failed = 0
        if error is not None:
            # what is known for certain is told first, then what the lowest rank says
            failed = circle.rank - (2 if isinstance(error, CertainError) else 1) * circle.size
        a, b = a + call * _CALL, b - call * _CALL
        if self._rounds is not None:
            self._rounds.start(failed, a, b, c, along)
        else:
            if along:
                _start_all(list(along))
            self._numbers[0] = failed, a, b, c
            self._request = circle.comm.Iallreduce(self._numbers[0], self._numbers[1], MPI.MIN)
            self._done = self._request.Test
        self.under_way = True

    def finish(self, timeout_s: float) -> tuple[int, int, int]:
        """Return the least of every value; where a rank has an error, all raise that of the lowest. Collective.

        All raise where they started for other calls.
        """
        self.under_way = False
        if not self._done():
            # mostly one turn of whoever shares the core is all that is missing
            _yield()
            if not self._done():
                self._circle._complete(self._done, timeout_s)
        failed, a, b, c = self._numbers[1].tolist() if self._rounds is None else self._rounds.least
        # first: an error of a rank that waited alone comes of it
        one, other = (a + _CALL // 2) // _CALL, -((b + _CALL // 2) // _CALL)
        if one != other:
            raise guard.common(_other_calls(self._circle.name, one, other), self._circle.comm)
        if failed:
            error, self._error = self._error, None
            self._circle._raise(error, failed % self._circle.size, timeout_s)
        return a - one * _CALL, b + one * _CALL, c

    def leave(self) -> None:
        """Free what is local, but not an agreement that nobody will end: MPI may still write to its memory."""
        done = self._done()
        if self._rounds is not None:
            self._rounds.free()
        elif not done:
            in_flight.left.append(self)


def call_of(name: str, serial: int) -> int:
    """Return the number of a call of the program's link with this number. Not collective."""
    return 1 + _CALLS.index(name) + len(_CALLS) * (serial % (1 << 20))


def _other_calls(program: str, *calls: int) -> DesyncError:
    words = []
    for call in calls:
        link, which = divmod(call - 1, len(_CALLS))
        words.append(f"{_CALLS[which]} of its link {link}" if call else "connect")
    return DesyncError(
        f"ranks of program {program!r} made different calls",
        expected="the same call of the same link on every rank",
        got=f"{words[0]} and {words[1]}, in the order of connect from 0",
        fix="look for code that depends on the rank before this call",
    )


class Presence(NamedTuple):
    """Where a process is: a hash of its machine, its number there, and when it started."""

    machine: int
    pid: int
    started: int


@cache
def presence() -> Presence:
    """Return this process's. Not collective."""
    pids = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    pid = os.getpid()
    return Presence(zlib.crc32(f"{socket.gethostname()} {pids}".encode()), pid, _stat(pid)[1])


def state_of(who: Presence) -> str:
    """Return what is known of a process: "dead", "stopped", or "" where nothing is. Not collective."""
    if who.machine != presence().machine or not presence().started:
        return ""
    state, started = _stat(who.pid)
    if started != who.started or state in "ZX":
        return "dead"
    return "stopped" if state in "Tt" else ""


def _stat(pid: int) -> tuple[str, int]:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])
