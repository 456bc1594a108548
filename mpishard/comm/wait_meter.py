"""How long a rank waits for others: what is left of a step is its own work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident


class WaitMeter:
    """Adds up the waits of the thread that starts it, and of torch's threads, which compute for it in backward.

    Parameters
    ----------
    clock
        Returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._total = 0.0
        self._thread = 0
        self._open: dict[int, tuple[int, float]] = {}  # per thread, waits inside each other and when the first began

    def start(self) -> None:
        """Begin with 0 s. Not collective."""
        self._total, self._thread = 0.0, get_ident()
        self._open.clear()
        meters.append(self)

    def stop(self) -> float:
        """Return the seconds in waits since `start`. Not collective."""
        meters.remove(self)
        return self._total

    def enter(self) -> None:
        """Note that a wait of the current thread begins. Not collective."""
        thread = get_ident()
        # other threads of Python's have work of their own, such as writing a checkpoint
        if thread == self._thread or isinstance(threading.current_thread(), threading._DummyThread):
            depth, since = self._open.get(thread, (0, 0.0))
            self._open[thread] = depth + 1, since if depth else self._clock()

    def leave(self) -> None:
        """Note that a wait of the current thread is over. Not collective."""
        depth, since = self._open.pop(get_ident(), (0, 0.0))
        if depth == 1:
            self._total += self._clock() - since
        elif depth:
            self._open[get_ident()] = depth - 1, since


# those that are on: whoever waits tells them
meters: list[WaitMeter] = []
