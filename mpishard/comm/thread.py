"""One thread communicates on a mesh: what two of them send would meet in another order on every rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from threading import get_ident
from typing import Any

from mpishard.comm.main_thread import require_allowed
from mpishard.errors import MeshError, UnsupportedOperationError

_PID = os.getpid()


class Owner:
    """The thread that communicates on the communicators of a mesh: the first one that does, until it ends.

    While ``lent`` is a name, only a `guest` does, who is called so.

    Attributes
    ----------
    left : str
        What has interrupted a call: nobody communicates any more.
    littered : bool
        Whether messages may lie in these communicators that nobody will take.
    """

    __slots__ = ("ident", "left", "lent", "littered")

    def __init__(self) -> None:
        self.ident, self.lent, self.left, self.littered = 0, "", "", False

    def lend(self, to: str = "") -> None:
        """Leave the mesh to a `guest`, or take it back. Not collective."""
        self.ident, self.lent = 0, to

    def leave(self, why: str) -> None:
        """Let nobody communicate any more. Not collective."""
        self.ident, self.littered = -1, True
        self.left = self.left or why

    def change(self) -> None:
        """Let the current thread communicate, or raise. Not collective."""
        if os.getpid() != _PID:
            raise UnsupportedOperationError(
                "a forked process communicates on a mesh",
                expected="calls on the ranks of the mesh",
                got=f"process {os.getpid()}, a child of {_PID}",
                fix="let children compute or read only, and communicate where the mesh was made",
            )
        if self.left:
            raise MeshError(
                "mesh used after a call on it was interrupted",
                expected="that nothing catches what interrupts a call that communicates",
                got=f"{self.left}: what it left under way would meet later calls",
                fix="end the program, or go on from a checkpoint on a new mesh; to save at a signal, ask "
                "mpishard.io.preemption on all ranks",
            )
        if get_ident() in _guests:
            return
        mine = _of_python(get_ident())
        if mine is None:
            return  # torch's: the owner waits in backward for it
        if self.lent:
            raise UnsupportedOperationError(
                "a mesh is lent to another thread",
                expected=f"nothing that communicates on it while {self.lent} does",
                got=f"a call in thread {mine.name!r}",
                fix="wait for it first",
            )
        require_allowed("a thread communicates")
        if other := _of_python(self.ident):
            raise UnsupportedOperationError(
                "two threads communicate on one mesh",
                expected="one thread, so that all ranks make the same calls in the same order",
                got=f"thread {mine.name!r}, while {other.name!r}, which has done so, is alive",
                fix="make a mesh for each thread that communicates, before they start, or leave it all to one",
            )
        self.ident = get_ident()


def _of_python(ident: int) -> threading.Thread | None:
    """Return the living thread of this identity, None where C++ has made it. Not collective."""
    # in place of `threading.enumerate`: backward on a GPU asks before every message
    known: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
    found = known.get(ident)
    return None if isinstance(found, threading._DummyThread) else found


# by the identity of the communicator's object: a look-up must cost nothing
_owners: dict[int, Owner] = {}
owner_of = _owners.get


def own(comm: Any, owner: Owner) -> None:
    """Let ``owner`` say who communicates. Not collective."""
    _owners[id(comm)] = owner


def require(comm: Any) -> None:
    """Raise where another thread communicates on ``comm``: before what is not waited for at once. Not collective."""
    owner = _owners.get(id(comm))
    if owner is not None and owner.ident != get_ident():
        owner.change()


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

    __slots__ = ("_outermost",)

    def __enter__(self) -> None:
        self._outermost = get_ident() not in _guests
        _guests.add(get_ident())

    def __exit__(self, *error: object) -> None:
        if self._outermost:
            _guests.discard(get_ident())


def _forked() -> None:
    for owner in _owners.values():
        owner.ident = -1


os.register_at_fork(after_in_child=_forked)
