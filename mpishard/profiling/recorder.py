"""What one rank does, call by call: time, waits and messages of each operation.

Knows nothing of torch or MPI: `mpishard.profiling.hook` tells it what begins and ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import NamedTuple

OPERATION, BACKWARD, COMMUNICATION = "operation", "backward", "communication"


class Event(NamedTuple):
    """A span on a rank's track; times in nanoseconds since the ranks set off together."""

    name: str
    kind: str
    start: int
    duration: int
    messages: int
    nbytes: int
    thread: int


class Total:
    """What the calls of one name took on this rank; times in nanoseconds."""

    __slots__ = ("calls", "messages", "nbytes", "time", "wait")

    def __init__(self) -> None:
        self.calls = self.time = self.wait = self.messages = self.nbytes = 0


class _Call:
    """An operation that has begun."""

    __slots__ = ("implied", "inner", "kind", "last", "messages", "name", "nbytes", "outer", "start", "wait")

    def __init__(self, name: str, kind: str, outer: bool, implied: bool) -> None:
        self.name, self.kind, self.outer, self.implied = name, kind, outer, implied
        self.start = self.last = perf_counter_ns()
        # of operations inside, which have rows of their own
        self.inner = self.wait = self.messages = self.nbytes = 0


class _Thread:
    __slots__ = ("calls", "number", "waits")

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[_Call] = []
        self.waits: list[tuple[str, int]] = []


class Recorder:
    """Takes in what this rank does, from all its threads.

    An operation within another is a part of it, unless the other is *outer* (a backward pass, a step of a pipeline):
    then both have rows, the outer one without what the inner ones took. Communication outside of every operation is
    an operation itself, by its own name.

    Parameters
    ----------
    most
        How many events are kept for a trace; those after are in the totals alone.

    Attributes
    ----------
    totals : dict
        (kind, name) -> `Total`.
    events : list of Event
        In the order in which they ended.
    left_out : int
        Events above ``most``.
    elapsed : int
        Nanoseconds from `begin` to `end`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.totals: dict[tuple[str, str], Total] = {}
        self.events: list[Event] = []
        self.left_out = self.elapsed = self._origin = 0
        self._running = False
        self._threads: dict[int, _Thread] = {}

    def begin(self) -> None:
        """Set off. Not collective, but for the clocks' sake all ranks come from a collective call."""
        self._origin, self._running = perf_counter_ns(), True
        self._threads[get_ident()] = _Thread(0)

    def end(self) -> None:
        """Stop: what is still open ends where it was last seen. Not collective."""
        self._running, self.elapsed = False, perf_counter_ns() - self._origin
        for thread in self._threads.values():
            while thread.calls:
                self._close(thread, thread.calls[-1].last)

    # -- operations

    def enter(self, name: str, *, outer: bool = False, kind: str = OPERATION) -> bool:
        """Begin an operation; return whether it counts, and `leave` must follow."""
        thread = self._thread()
        if thread.calls:
            top = thread.calls[-1]
            if top.implied:
                self._close(thread, top.last)
            elif not top.outer:
                return False
        thread.calls.append(_Call(name, kind, outer, False))
        return True

    def leave(self) -> None:
        """End the operation that was entered last."""
        thread, now = self._thread(), perf_counter_ns()
        # a part of the backward pass ends with the pass
        while thread.calls and (top := thread.calls[-1]).kind == BACKWARD:
            self._close(thread, top.last if top.implied else now)
        if thread.calls:
            self._close(thread, now)

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Be an operation, or a part of one."""
        counts = self.enter(name)
        try:
            yield
        finally:
            if counts:
                self.leave()

    def backward(self, name: str) -> None:
        """Begin the backward of an operation, which goes on until that of another one begins."""
        if not self._running:
            return
        thread = self._thread()
        if thread.calls and thread.calls[-1].kind == BACKWARD:
            self._close(thread, perf_counter_ns())
        # an engine's own thread has no backward pass around
        thread.calls.append(_Call(name, BACKWARD, False, implied=not thread.calls))

    # -- messages and waits

    def add(self, op: str, messages: int, nbytes: int) -> None:
        """Take in what this rank sends in one call."""
        thread = self._thread()
        call = thread.calls[-1] if thread.calls else None
        if call is None or (call.implied and (call.name != op or call.messages) and call.kind == OPERATION):
            call = self._imply(thread, op)
        call.messages += messages
        call.nbytes += nbytes
        total = self._total(COMMUNICATION, op)
        total.calls += 1
        total.messages += messages
        total.nbytes += nbytes

    def wait_begins(self, op: str) -> None:
        """Take in that this rank waits for others from now on."""
        thread = self._thread()
        name = short(op)
        if not thread.calls:
            self._imply(thread, name)
        thread.waits.append((name, perf_counter_ns()))

    def wait_ends(self) -> None:
        """Take in that what it waited for has come."""
        thread = self._thread()
        if not thread.waits:
            return  # it began before the profile did
        name, start = thread.waits.pop()
        now = perf_counter_ns()
        if thread.calls:
            thread.calls[-1].wait += now - start
            thread.calls[-1].last = now
        total = self._total(COMMUNICATION, name)
        total.time += now - start
        total.wait += now - start
        self._keep(f"wait: {name}", COMMUNICATION, start, now - start, 0, 0, thread.number)

    def _imply(self, thread: _Thread, name: str) -> _Call:
        if thread.calls:
            self._close(thread, thread.calls[-1].last)
        call = _Call(name, OPERATION, False, True)
        thread.calls.append(call)
        return call

    def _close(self, thread: _Thread, now: int) -> None:
        call = thread.calls.pop()
        duration = now - call.start
        total = self._total(call.kind, call.name)
        total.calls += 1
        total.time += duration - call.inner
        total.wait += call.wait
        total.messages += call.messages
        total.nbytes += call.nbytes
        if thread.calls:
            thread.calls[-1].inner += duration
            thread.calls[-1].last = now
        name = f"{call.name} backward" if call.kind == BACKWARD else call.name
        self._keep(name, call.kind, call.start, duration, call.messages, call.nbytes, thread.number)

    def _keep(self, name: str, kind: str, start: int, duration: int, messages: int, nbytes: int, thread: int) -> None:
        if len(self.events) < self._most:
            self.events.append(Event(name, kind, start - self._origin, duration, messages, nbytes, thread))
        else:
            self.left_out += 1

    def _total(self, kind: str, name: str) -> Total:
        key = kind, name
        total = self.totals.get(key)
        if total is None:
            total = self.totals[key] = Total()
        return total

    def _thread(self) -> _Thread:
        ident = get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads.setdefault(ident, _Thread(len(self._threads)))
        return thread


def short(op: str) -> str:
    """Return what messages are counted as, of what a rank says that waits for them. Not collective."""
    word = re.split(r"[ ,(]", op.removeprefix("adjoint of "), maxsplit=1)[0]
    return _COUNTED_AS.get(word, word)


_COUNTED_AS = {"HaloExchanger": "halo_refresh", "shift": "send_recv"}
