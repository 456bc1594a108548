"""How the programs of a job find each other by name: a tree of messages that no absent rank hangs."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpishard.comm import guard, in_flight
from mpishard.comm.coupling import wire
from mpishard.comm.coupling.patience import Circle, Wait
from mpishard.comm.coupling.wire import Entry, Roll
from mpishard.comm.exit import require_mpi
from mpishard.comm.setting import first_agreement
from mpishard.errors import MpishardError, PeerError, described, ranges_of, ranks_text

# a rank gives up after those below it in the tree, and before those above
_LEVEL_S = 0.2
_ANSWER_S = 1.0
# MPI shows one message of several at a time, and not at every look: the last one counts
_LOOKS = 32

_attempts = 0


class Far(NamedTuple):
    """The ranks of another program: behind or before those of this one in a communicator of both."""

    comm: MPI.Intracomm
    first: int


class Meeting(NamedTuple):
    """What came of it.

    Attributes
    ----------
    programs : dict
        Name -> number of ranks, by ascending first rank.
    comm : mpi4py.MPI.Intracomm
        Of this program's ranks, for its own use.
    circle : Circle
        The same ranks, for the package's use.
    others : dict
        Name of every other program -> communicator of both programs' ranks, and the rank of its first there.
    """

    programs: dict[str, int]
    comm: MPI.Intracomm
    circle: Circle
    others: dict[str, Far]


def meet(name: object, timeout: object) -> Meeting:
    """Meet the other programs of the job.

    Collective over MPI_COMM_WORLD.

    Parameters
    ----------
    name
        Of this rank's program.
    timeout
        Seconds to wait for ranks that do not come; None: 60.

    Raises
    ------
    PeerError
        Ranks did not come; two programs have one name; a name or a timeout is none.
    MpishardError
        Ranks of this program differ in variables that change their messages.
    """
    global _attempts  # noqa: PLW0603
    require_mpi("join")
    _attempts += 1
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    wrong, timeout_s = "" if wire.is_name(name) else _bad_name(name, rank), checked_timeout(None, "join")
    try:
        timeout_s = checked_timeout(timeout, f"join: rank {rank}")
    except MpishardError as e:
        wrong = wrong or str(e)  # the others must hear of it
    mine = Roll(_attempts, (), wrong) if wrong else Roll(_attempts, (_entry(name, rank),))
    roll = _called(world, mine, timeout_s)
    if roll.text:
        raise guard.common(PeerError(roll.text), world)
    entries = sorted(roll.entries, key=lambda e: e.first)
    index = next(i for i, e in enumerate(entries) if e.name == name)
    with guard.waiting("join", (), world):
        comm = MPI.Intracomm(world.Split(index, rank))
        private = MPI.Intracomm(comm.Dup())
        others = {}
        # not by MPI_Intercomm_create, in which MPICH 5 crashes where programs lie between one another
        for (i, one), (j, other) in combinations(enumerate(entries), 2):
            both = world.Split(0 if index in (i, j) else MPI.UNDEFINED, rank + (size if index == j else 0))
            if index == i:
                others[other.name] = Far(MPI.Intracomm(both), one.ranks)
            elif index == j:
                others[one.name] = Far(MPI.Intracomm(both), 0)
    for own in (comm, private, *(far.comm for far in others.values())):
        own.Set_errhandler(MPI.ERRORS_RETURN)
    assert size == sum(e.ranks for e in entries)
    # of one program: others may have other variables
    first_agreement(private, None, "join")
    return Meeting({e.name: e.ranks for e in entries}, comm, Circle(private, str(name)), others)


def _called(world: MPI.Intracomm, mine: Roll, timeout_s: float) -> Roll:
    """Return everybody's entries, merged, or a text that says what is wrong; the same on all ranks. Collective."""
    rank, size = world.Get_rank(), world.Get_size()
    children = _children(rank, size)
    here: dict[int, Roll] = {}  # of the children that wait for an answer
    wait = Wait(timeout_s + len(children) * _LEVEL_S)
    looks = 0
    while looks < _LOOKS:
        _hear(world, children, here)
        looks = looks + 1 if len(here) == len(children) else 0
        if not looks and not wait.pause():
            break
    roll = mine
    for child in sorted(here):
        roll = _merged(roll, here[child])
    if missing := [child for child in children if child not in here]:
        roll = roll._replace(text=roll.text or _absent(missing, roll, size, timeout_s))
    going: list[MPI.Request] = []
    known = dict(here)
    if rank:
        parent = rank & (rank - 1)
        going.append(_sent(world, parent, roll))
        wait = Wait(timeout_s + _ANSWER_S + (size.bit_length() + 1) * _LEVEL_S)
        answer, in_time, gone = None, True, list[int]()
        while answer is None and in_time and not gone:
            in_time = wait.pause()
            answer = _received(world, parent, mine.attempt)
            _hear(world, children, here)
            gone = [child for child, told in known.items() if here.get(child) is not told]
        if answer is None:
            # who comes later must not take this rank for one that is here, and wait for it in what follows; who did so
            # a moment before has answered, and that counts: also with those below, who listen for longer
            going.append(_sent(world, parent, Roll(mine.attempt, withdrawn=True)))
            wait = Wait(rank.bit_count() * _LEVEL_S)
            while answer is None and wait.pause():
                answer = _received(world, parent, mine.attempt)
        if answer is None:
            verb = "gave up" if gone else "did not come"
            answer = roll._replace(text=_absent(gone or [parent], roll, size, timeout_s, verb))
        roll = answer
    elif not roll.text:
        roll = roll._replace(text=_one_name(roll.entries))
    told_last = {**known, **here}
    going += [_sent(world, child, roll._replace(attempt=told.attempt)) for child, told in told_last.items()]
    wait = Wait(_ANSWER_S)
    # small messages: only a rank that is gone keeps one
    while not all(request.Test() for request in going) and wait.pause():
        pass
    return roll


def _hear(world: MPI.Intracomm, children: Iterable[int], here: dict[int, Roll]) -> None:
    """Note which children have come, by the last that each said: one may give up, and come again. Not collective."""
    for child in children:
        while (told := _received(world, child)) is not None:
            here.pop(child, None)
            if not told.withdrawn:
                here[child] = told


def _children(rank: int, size: int) -> list[int]:
    out, step = [], 1
    while rank + step < size and not rank & step:
        out.append(rank + step)
        step <<= 1
    return out


def _sent(world: MPI.Intracomm, peer: int, roll: Roll) -> MPI.Request:
    return in_flight.keep_sent(world.Isend([wire.pack_roll(roll), MPI.BYTE], peer, wire.MEETING_TAG))


def _received(world: MPI.Intracomm, peer: int, attempt: int | None = None) -> Roll | None:
    status = MPI.Status()
    while (message := world.Improbe(peer, wire.MEETING_TAG, status)) is not None:
        data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        message.Recv([data, MPI.BYTE])
        roll = wire.unpack_roll(data.tobytes())
        # an answer to an attempt that failed before does not count any more
        if attempt is None or roll.attempt in (attempt, -1):
            return roll
    return None


def _merged(one: Roll, other: Roll) -> Roll:
    entries = {(e.name, e.file, e.appnum, e.command): e for e in one.entries}
    for e in other.entries:
        key = (e.name, e.file, e.appnum, e.command)
        known = entries.get(key)
        entries[key] = (
            e if known is None else known._replace(ranks=known.ranks + e.ranks, first=min(known.first, e.first))
        )
    return one._replace(entries=_joined(entries.values()), text=one.text or other.text)


def _joined(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Join entries of one program; what are two of one name stay two."""
    out: list[Entry] = []
    for e in sorted(entries, key=lambda e: e.first):
        for i, known in enumerate(out):
            if known.name == e.name and _same_program(known, e):
                out[i] = known._replace(ranks=known.ranks + e.ranks)
                break
        else:
            out.append(e)
    return tuple(out)


def _same_program(one: Entry, other: Entry) -> bool:
    # one program may be started in several parts of a job, with the same command, and a launcher may give each of
    # its ranks another argument
    return one.file == other.file and (one.appnum == other.appnum or one.command == other.command)


def _one_name(entries: Sequence[Entry]) -> str:
    firsts: dict[str, Entry] = {}
    for e in entries:
        known = firsts.setdefault(e.name, e)
        if known is not e:
            return described(
                f"join: two programs of one name, {e.name!r}",
                expected="another name for every program of the job",
                got=f"from rank {known.first} on {known.file} ({known.ranks} ranks), "
                f"from rank {e.first} on {e.file} ({e.ranks} ranks)",
                fix="name one of them otherwise",
            )
    return ""


def _absent(ranks: Sequence[int], roll: Roll, size: int, timeout_s: float, verb: str = "did not come") -> str:
    here = ", ".join(f"{e.name!r} ({e.ranks})" for e in roll.entries)
    return described(
        f"join: {ranks_text(ranges_of(ranks))} of MPI_COMM_WORLD {verb}",
        expected=f"all {size} ranks of the job within {timeout_s:g} s",
        got=f"so far, programs with ranks: {here or 'none'}",
        fix="call join in every program of the job, on all of its ranks; give a longer timeout where one starts late",
    )


def _bad_name(name: object, rank: int) -> str:
    return described(
        f"join: no name of a program on rank {rank}",
        expected=f"a text of 1 to {wire.NAME_NBYTES - 1} bytes",
        got=repr(name)[:80],
        fix="give one, the same on all ranks of the program",
    )


def _entry(name: object, rank: int) -> Entry:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        command = os.fsencode("\0".join(sys.orig_argv))
    script = sys.argv[0] if sys.argv and sys.argv[0] else sys.executable
    program = os.path.realpath(script) if os.path.exists(script) else f"{sys.executable} {' '.join(sys.orig_argv[1:])}"
    appnum = MPI.COMM_WORLD.Get_attr(MPI.APPNUM)
    return Entry(str(name), program[-250:], 1, rank, -1 if appnum is None else appnum, zlib.crc32(command))


def checked_timeout(timeout: object, what: str) -> float:
    """Return a timeout in seconds: that given, or 60, but less where the watchdog's is. Not collective."""
    if timeout is None:
        return min(60.0, guard.TIMEOUT_S * 0.9) if guard.TIMEOUT_S > 0 else 60.0
    if isinstance(timeout, (int, float)) and 0 < timeout < float("inf"):
        return float(timeout)
    raise MpishardError(f"{what}: timeout", expected="seconds > 0", got=repr(timeout), fix="give a number")
