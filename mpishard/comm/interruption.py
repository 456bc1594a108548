"""What interrupts a call leaves messages under way, which would meet those of later calls, and silently.

Ctrl-C comes to all ranks, and finds them in different calls: one waits for a message of a call that another has not
reached yet. Where both catch it and go on, each later call would take the message of the one before. So no rank
communicates on a mesh again once it was interrupted inside a call that communicates on it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from mpi4py import MPI

from mpishard.comm import in_flight
from mpishard.comm.lookout import Peers, cancel, lookouts
from mpishard.comm.thread import owner_of


def interrupted(call: str, error: BaseException, comm: MPI.Comm | None) -> None:
    """Let nobody on this rank use the mesh of ``comm`` any more. Not collective."""
    owner = owner_of(id(comm))
    if owner is not None and comm.Get_size() > 1:  # type: ignore[union-attr]
        owner.leave(f"{type(error).__name__} inside {call}")


def wait_interrupted(call: str, error: BaseException, peers: Peers, comm: MPI.Comm | None) -> None:
    """Leave a wait that ended without its messages; arguments as `guard.waiting` has them. Not collective."""
    if get_ident() in lookouts:
        return  # who looks out goes on with other communicators
    if callable(peers):
        requests: Any = peers
        in_flight.left.append(requests)
        cancel(requests.requests[: requests.receives])
    interrupted(call, error, comm)


def litter(comm: MPI.Comm) -> None:
    """Never free the communicators of a mesh: messages lie there that nobody will take. Not collective."""
    if (owner := owner_of(id(comm))) is not None:
        owner.littered = True


class under_way:  # noqa: N801 (reads as a state: `with under_way(...)`)
    """Bracket what a rank computes while messages are under way.

    An error of this rank is none of the messages', which still come to their end, in memory that is this call's. Where
    it is interrupted, its peers may be, too, before they have sent.

    Parameters
    ----------
    call, comm
        What is interrupted.
    ends
        Wait for the messages, at the end of the bracket.
    """

    __slots__ = ("_call", "_comm", "_ends")

    def __init__(self, call: str, comm: MPI.Comm | None, *ends: Callable[[], object]) -> None:
        self._call, self._comm, self._ends = call, comm, ends

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            for end in self._ends:
                end()
        finally:
            if error is not None and not isinstance(error, Exception):
                interrupted(self._call, error, self._comm)
