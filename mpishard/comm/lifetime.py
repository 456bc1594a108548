"""Who frees what, and when: local resources at any time, communicators only where all their ranks meet.

Ranks drop their last reference to a mesh at different times, and they leave the program for different
reasons. Neither may therefore lead to a collective call: a dropped mesh frees its persistent requests at once
and puts its communicators aside, until its ranks make another mesh together; at the end of the program only
local resources are freed, and `MPI_Finalize` does the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from mpi4py import MPI

from mpishard.comm import guard
from mpishard.comm.device import driver

Members = tuple[int, ...]

_made: dict[Members, int] = {}
# dropped on this rank, not yet known to be dropped on all
_dropped: dict[Members, dict[int, list[MPI.Comm]]] = {}
_living: weakref.WeakSet[Holding] = weakref.WeakSet()
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
    freed : bool
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        global _watched  # noqa: PLW0603
        group = comm.Get_group()
        members = tuple(sorted(group.Translate_ranks(None, MPI.COMM_WORLD.Get_group())))
        group.Free()
        # every one of these ranks counts the meshes over exactly these ranks alike
        number = _made[members] = _made.get(members, 0) + 1
        _reclaim(members, comm)
        self.comms: list[MPI.Comm] = [comm]
        self.releases: list[Callable[[], None]] = []
        self.freed = False
        self._drop = weakref.finalize(self, _put_aside, members, number, self.comms, self.releases)
        self._drop.atexit = False
        if not _watched:
            _watched = True
            guard.on_finalize(_release_all)
        _living.add(self)

    def release(self) -> None:
        """Free the local resources, last made first. Not collective."""
        self.freed = True
        _release(self.releases)

    def free(self) -> None:
        """Free everything. Collective."""
        self.release()
        self._drop.detach()
        _free(self.comms)


def _put_aside(members: Members, number: int, comms: list[MPI.Comm], releases: list[Callable[[], None]]) -> None:
    if not MPI.Is_finalized():
        _release(releases)
        _dropped.setdefault(members, {})[number] = comms


def _reclaim(members: Members, comm: MPI.Intracomm) -> None:
    mine = _dropped.get(members, {})
    everywhere = set.intersection(*comm.allgather(set(mine)))
    for number in sorted(everywhere):
        _free(mine.pop(number))


def _free(comms: list[MPI.Comm]) -> None:
    while comms:
        comms.pop().Free()


def _release(releases: list[Callable[[], None]]) -> None:
    while releases:
        releases.pop()()
    driver.trim()


def _release_all() -> None:
    for holding in list(_living):
        holding.release()
