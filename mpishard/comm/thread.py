"""One thread communicates on a mesh: what two of them send would meet in another order on every rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

from mpishard.errors import UnsupportedOperationError

_PID = os.getpid()


class Owner:
    """The thread that communicates on the communicators of a mesh: the first one that does, until it ends."""

    __slots__ = ("ident",)

    def __init__(self) -> None:
        self.ident = 0

    def change(self) -> None:
        """Let the current thread communicate, or raise. Not collective."""
        if os.getpid() != _PID:
            raise UnsupportedOperationError(
                "a forked process communicates on a mesh",
                expected="calls on the ranks of the mesh",
                got=f"process {os.getpid()}, a child of {_PID}",
                fix="let children compute or read only, and communicate where the mesh was made",
            )
        if threading.get_ident() in _guests:
            return
        threads = {t.ident: t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
        mine = threads.get(threading.get_ident())
        if mine is None:
            return  # torch's: the owner waits in backward for it
        if self.ident in threads:
            raise UnsupportedOperationError(
                "two threads communicate on one mesh",
                expected="one thread, so that all ranks make the same calls in the same order",
                got=f"thread {mine.name!r}, while {threads[self.ident].name!r}, which has done so, is alive",
                fix="make a mesh for each thread that communicates, before they start, or leave it all to one",
            )
        self.ident = threading.get_ident()


# by the identity of the communicator's object: a look-up must cost nothing
_owners: dict[int, Owner] = {}
owner_of = _owners.get


def own(comm: Any, owner: Owner) -> None:
    """Let ``owner`` say who communicates. Not collective."""
    _owners[id(comm)] = owner


def disown(comms: Iterable[Any]) -> None:
    """Forget communicators that end. Not collective."""
    for comm in comms:
        _owners.pop(id(comm), None)


class Depth(threading.local):
    """How many ``with`` blocks of it this thread is in, in ``value``."""

    value = 0

    def __enter__(self) -> None:
        self.value += 1

    def __exit__(self, *error: object) -> None:
        self.value -= 1


_guests: set[int] = set()


class guest:  # noqa: N801 (reads as a noun: `with guest()`)
    """Let this thread communicate beside the owner of a mesh, for the time of a ``with`` block. Not collective.

    For who knows that both use different communicators meanwhile.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        _guests.add(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        _guests.discard(threading.get_ident())


def _forked() -> None:
    for owner in _owners.values():
        owner.ident = -1


os.register_at_fork(after_in_child=_forked)
