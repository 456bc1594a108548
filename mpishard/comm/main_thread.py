"""The thread that initialised MPI: where it was initialised for one thread, MPI allows calls in that one alone."""

from __future__ import annotations

import threading

from mpi4py import MPI

from mpishard.errors import UnsupportedOperationError


def main_only() -> bool:
    """Tell whether MPI allows calls in the thread alone that initialised it. Not collective."""
    return MPI.Query_thread() < MPI.THREAD_SERIALIZED


def require_allowed(what: str) -> None:
    """Raise where MPI allows no call in this thread. Not collective."""
    if not main_only() or MPI.Is_thread_main():
        return
    level = "MPI_THREAD_SINGLE" if MPI.Query_thread() == MPI.THREAD_SINGLE else "MPI_THREAD_FUNNELED"
    raise UnsupportedOperationError(
        f"{what}: MPI allows no call in this thread",
        expected="the thread that initialised MPI",
        got=f"thread {threading.current_thread().name!r}, with {level}",
        fix="call from that thread, or initialise MPI with MPI_THREAD_SERIALIZED or more, as mpi4py does by default",
    )
