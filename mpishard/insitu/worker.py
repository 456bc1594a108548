"""A lasting worker thread, in which models run that a host has started."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread

_Calls = SimpleQueue[tuple[Callable[[], object], Event] | None]


class Worker:
    """A thread that begins with the first of its calls, and runs them one after the other.

    It lasts: for each new thread OpenMP starts others, and MPI keeps some memory for ever.
    """

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        self._thread: Thread | None = None

    def start(self, call: Callable[[], object]) -> Event:
        """Run ``call``, which raises nothing; return what is set when it has ended. Not collective."""
        if self._thread is None or not self._thread.is_alive():  # a forked process has none
            self._calls = SimpleQueue()
            # it knows the calls alone, so that this object may go
            self._thread = Thread(target=_work, args=(self._calls,), name="mpishard-hook", daemon=True)
            self._thread.start()
        done = Event()
        self._calls.put((call, done))
        return done

    def end(self) -> None:
        """End the thread, when its calls have ended. Not collective."""
        if self._thread is not None:
            self._thread = None
            self._calls.put(None)

    def __del__(self) -> None:
        self.end()


def _work(calls: _Calls) -> None:
    while (given := calls.get()) is not None:
        call, done = given
        call()
        done.set()
        del given, call  # nothing of it is kept until the next one
