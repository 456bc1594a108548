"""Who frees what, and when: local resources at any time, communicators only where all their ranks meet.

Ranks drop their last reference to a mesh at different times, and they leave the program for different
reasons. Neither may therefore lead to a collective call: a dropped mesh frees its persistent requests at once
and puts its communicators aside, until its ranks make another mesh together; at the end of the program only
local resources are freed, and `MPI_Finalize` does the rest.

Python collects garbage in any thread, also in one that must not call MPI: what is found there waits until this rank
makes something again.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpishard.comm import exit, guard, thread
from mpishard.comm.device import driver
from mpishard.errors import DesyncError, MeshError, MpishardError

T = TypeVar("T")

# what stands for the ranks of a communicator: how many they are, and the digests of all in one
Members = tuple[int, bytes]

_made: dict[Members, int] = {}
# dropped on this rank, not yet known to be dropped on all
_dropped: dict[Members, dict[int, tuple[thread.Owner, list[MPI.Comm]]]] = {}
_living: weakref.WeakSet[Holding] = weakref.WeakSet()
# each frees what is garbage, and was found in a thread that must not
_garbage: deque[Callable[[], None]] = deque()
_watched = False


class Holding:
    """The communicators and local resources of one mesh and its sub-meshes.

    Making one is collective over ``comm``, and frees what all of its ranks have dropped.

    Attributes
    ----------
    comms : list of mpi4py.MPI.Comm
        Communicators to free, all over the same ranks or over parts of them.
    releases : list of callable
        Each frees a local resource; none communicates.
    resources : weakref.WeakSet
        Local resources too, which have ``free`` and may go before.
    owner : Owner
        The thread that communicates.
    number : int
        Of the next plan.
    place : tuple
        What all its ranks call it.
    freed : bool
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        global _watched  # noqa: PLW0603
        members = _members(comm)
        # every one of these ranks counts the meshes over exactly these ranks alike
        number = _made[members] = _made.get(members, 0) + 1
        _reclaim(members, comm)
        self.comms: list[MPI.Comm] = [comm]
        self.releases: list[Callable[[], None]] = []
        self.resources: weakref.WeakSet[Any] = weakref.WeakSet()
        self.place = (members, number)
        self.owner = thread.Owner()
        self.number = 0
        self.freed = False
        self._drop = weakref.finalize(
            self, _dropping, members, number, self.owner, self.comms, self.releases, self.resources
        )
        self._drop.atexit = False
        if not _watched:
            _watched = True
            exit.on_finalize(_release_all)
            if guard.DEBUG:
                atexit.register(_compare_ends)
        _living.add(self)

    def release(self) -> None:
        """Free the local resources, last made first. Not collective."""
        self.freed = True
        # a forked child leaves its parent's messages and communicators alone
        if exit.alive():
            _release(self.releases, self.resources)

    def free(self) -> None:
        """Free everything. Collective."""
        self.release()
        free_discarded()
        self._drop.detach()
        if exit.alive():
            _free(self.owner, self.comms)


def discard(free: Callable[[], None]) -> None:
    """Free what is garbage: now, or where this thread must not call MPI, in `free_discarded`. Not collective.

    For finalizers. ``free`` must not communicate, nor hold the mesh.
    """
    if not exit.alive():
        return
    level = MPI.Query_thread()
    # between the two, any thread that communicates may be in MPI now
    if level == MPI.THREAD_MULTIPLE or (level < MPI.THREAD_SERIALIZED and MPI.Is_thread_main()):
        free()
    else:
        _garbage.append(free)


def free_discarded() -> None:
    """Free what was found in threads that must not. Not collective, for the thread that communicates.

    Who makes what may become garbage calls this first, so there is never more of it than was in use.
    """
    while _garbage:
        free = _garbage.popleft()
        # as in a finalizer: it is no error of the call that comes by
        with contextlib.suppress(MPI.Exception, MpishardError):
            if exit.alive():
                free()


def made(what: str, comm: MPI.Intracomm, make: Callable[[], T]) -> T:
    """Return what ``make`` makes, with communicators over the ranks of ``comm``.

    Collective. An MPI library has some thousand communicators: where none is left, those of dropped meshes are freed.

    Raises
    ------
    MeshError
        On every rank: no communicator is left.
    """
    for last in (False, True):
        with guard.waiting(what, (), comm):
            try:
                return make()
            except MPI.Exception as e:
                error = str(e).strip().splitlines()[-1]
        if not last:
            gc.collect()  # a mesh and its plans refer to each other
            _reclaim(_members(comm), comm)
    raise guard.common(
        MeshError(
            f"{what}: MPI makes no more communicators",
            expected="2 to the power of the number of mesh dims, for every mesh",
            got=error,
            fix="use one mesh for many tensors, mesh.free() those that are done with (of a simulation, sim.release()), "
            "or meshes of fewer dims",
        ),
        comm,
    )


@contextlib.contextmanager
def duplicated(what: str, host: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """Lend a duplicate of a host's communicator. Collective, as `made`; freed at the end.

    The host's handler may end the job at an error, but not where communicators of dropped meshes are yet to be freed.
    """
    handler = host.Get_errhandler()
    host.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        own = made(what, host, host.Dup)
    finally:
        host.Set_errhandler(handler)
    own.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        yield own
    finally:
        own.Free()


def _members(comm: MPI.Intracomm) -> Members:
    """Return what stands for the ranks of a communicator. Collective, one small reduction."""
    me = f"{MPI.COMM_WORLD.Get_rank()} {MPI.Get_processor_name()} {os.getpid()}"
    mine = np.frombuffer(blake2b(me.encode(), digest_size=16).digest(), np.uint8)
    all_ranks = np.empty_like(mine)
    comm.Allreduce(mine, all_ranks, MPI.BXOR)
    return comm.Get_size(), all_ranks.tobytes()


def is_freed(comm: MPI.Comm) -> bool:
    """Tell whether a mesh's communicator is gone, which all of its ranks free together. Not collective."""
    return bool(comm == MPI.COMM_NULL)


def family_of(comm: MPI.Comm) -> list[MPI.Comm]:
    """Return the communicators of the mesh that ``comm`` belongs to. Not collective."""
    return next((holding.comms for holding in list(_living) if comm in holding.comms), [comm])


def _dropping(
    members: Members,
    number: int,
    owner: thread.Owner,
    comms: list[MPI.Comm],
    releases: list[Callable[[], None]],
    resources: weakref.WeakSet[Any],
) -> None:
    # nobody else may hold the resources until it is their turn
    discard(partial(_put_aside, members, number, owner, comms, releases, list(resources)))


def _put_aside(members: Members, number: int, owner: thread.Owner, comms: list[MPI.Comm], *local: Any) -> None:
    _release(*local)
    thread.disown(comms)
    _dropped.setdefault(members, {})[number] = owner, comms


def _reclaim(members: Members, comm: MPI.Intracomm) -> None:
    free_discarded()
    mine = _dropped.get(members, {})
    # by number, and there are as many as all these ranks have made
    dropped = np.zeros(_made.get(members, 0) + 1, np.uint8)
    # what one rank must keep, all keep
    dropped[[number for number, (owner, _) in mine.items() if not owner.littered]] = 1
    everywhere = np.empty_like(dropped)
    comm.Allreduce(dropped, everywhere, MPI.MIN)
    for number in np.flatnonzero(everywhere).tolist():
        _free(*mine.pop(number))


# called with communicators that all of their ranks are about to free
before_free: list[Callable[[list[MPI.Comm]], None]] = []


def _free(owner: thread.Owner, comms: list[MPI.Comm]) -> None:
    for settle in before_free:
        settle(comms)
    thread.disown(comms)
    while comms:
        comm = comms.pop()
        # or MPI would give its context, free on all ranks, to another one, which would find the messages
        if not owner.littered:
            comm.Free()


def _release(releases: list[Callable[[], None]], resources: weakref.WeakSet[Any] | list[Any]) -> None:
    while releases:
        releases.pop()()
    for resource in list(resources):
        resource.free()
    resources.clear()
    driver.trim()


def _release_all() -> None:
    free_discarded()
    for holding in list(_living):
        holding.release()


def _compare_ends() -> None:
    """Find out that a rank's program is over while others still call. Collective, rank by rank."""
    if not exit.alive():
        return
    free_discarded()
    # what is freed, all have freed together: every rank has the same meshes here, alive or dropped
    ends = {holding.place: (holding.owner, holding.comms) for holding in list(_living)}
    ends |= {(members, number): one for members, own in _dropped.items() for number, one in own.items()}
    try:
        for place in sorted(ends):
            owner, comms = ends[place]
            if comms and not owner.left:
                guard.check(comms[0], "the end of the program")  # type: ignore[arg-type]
    except DesyncError as e:
        exit.say(f"[{exit.place()}] {e}\n")
        exit.abort(1)
