"""Waits that another rank's failure ends: of a model inside a simulation, whose ranks go on without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from mpi4py import MPI

Peers = Sequence[int] | Callable[[], Sequence[int]]

# of threads
lookouts: dict[int, Callable[[], None]] = {}


class lookout:  # noqa: N801 (reads as a verb: `with lookout(...)`)
    """Call ``check`` over and over while this thread waits for other ranks; it may raise, and ends the wait.

    Not collective, but all ranks that communicate in its body are in it: collective calls begin with a barrier.
    What was under way is left under way, so the communicators in use are of no use after ``check`` has raised.
    """

    __slots__ = ("_check",)

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __enter__(self) -> None:
        lookouts[get_ident()] = self._check

    def __exit__(self, *error: object) -> None:
        del lookouts[get_ident()]


def looked_out() -> bool:
    """Tell whether this thread's waits may end so: blocking messages to single ranks must then be requests."""
    return get_ident() in lookouts


def wait_watchfully(check: Callable[[], None], peers: Peers, comm: MPI.Comm | None) -> None:
    """Wait until what `guard.waiting` brackets is complete, and the caller's own wait finds it so; look out meanwhile.

    As collective as that is. Who passes requests for ``peers`` may have a look of its own at them: MPICH ends a
    persistent one that `Get_status` finds complete, and its status with it.
    """
    if callable(peers):
        requests, receives = peers.requests, peers.receives  # type: ignore[attr-defined]
        look = getattr(peers, "look", None) or (lambda: all(request.Get_status() for request in requests))
        try:
            while not look():
                check()
        except BaseException:
            cancel(requests[:receives])
            raise
    elif not peers and comm is not None:
        barrier = comm.Ibarrier()  # type: ignore[attr-defined]
        while not barrier.Test():
            check()


def cancel(receives: Sequence[Any]) -> None:
    """Have MPI write no more to where messages were to come. Not collective."""
    for request in receives:
        if request and not request.Get_status():
            request.Cancel()
            request.Wait()
