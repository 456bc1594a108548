"""Counts of messages and bytes per operation, so that tests and users see what travelled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from mpishard.comm.interruption import halfway

F = TypeVar("F", bound=Callable[..., Any])


class Listener(Protocol):
    """What is told of every call that communicates."""

    def add(self, op: str, messages: int, nbytes: int) -> None:
        """Take in one call."""
        ...


@dataclass
class Count:
    """Messages and bytes that this rank sent in one operation (a collective counts as one message)."""

    calls: int = 0
    messages: int = 0
    nbytes: int = 0


@dataclass
class CommCounter:
    """What this rank communicated while `comm_counter` was active.

    Attributes
    ----------
    by_op : dict
        Operation name -> `Count`.
    """

    by_op: dict[str, Count] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Exchanges and collectives that this rank took part in."""
        return sum(c.calls for c in self.by_op.values())

    @property
    def messages(self) -> int:
        """Messages that this rank sent."""
        return sum(c.messages for c in self.by_op.values())

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(c.nbytes for c in self.by_op.values())

    def add(self, op: str, messages: int, nbytes: int) -> None:
        """Count one call. Not collective."""
        count = self.by_op.setdefault(op, Count())
        count.calls += 1
        count.messages += messages
        count.nbytes += nbytes

    def __str__(self) -> str:
        rows = [f"{op:<24}{c.calls:>8}{c.messages:>10}{c.nbytes:>14}" for op, c in sorted(self.by_op.items())]
        return "\n".join([f"{'op':<24}{'calls':>8}{'messages':>10}{'bytes':>14}", *rows])


active: list[Listener] = []
# what a profile runs around the calls that are `named`
around: Callable[[str], AbstractContextManager[object]] | None = None


def record(op: str, messages: int, nbytes: int) -> None:
    """Tell every listener of one call; callers test ``active`` first. Not collective."""
    for listener in active:
        listener.add(op, messages, nbytes)


def named(op: str) -> Callable[[F], F]:
    """Give a function a name in profiles, for calls that take milliseconds: the look costs a tenth of a microsecond."""

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                if around is None:
                    return function(*args, **kwargs)
                with around(op):
                    return function(*args, **kwargs)
            except BaseException as error:
                halfway(op, error, args, kwargs)
                raise

        return call  # type: ignore[return-value]

    return decorated


@contextmanager
def comm_counter() -> Iterator[CommCounter]:
    """Count what this rank sends of tensors while the block runs.

    Not collective. Numbers about them (the extents that ranks tell each other, what they agree on) do not count.

    Yields
    ------
    CommCounter
        Filled while the block runs.

    Examples
    --------
    >>> with ms.comm_counter() as count:
    ...     y = conv(x)
    >>> print(count)
    """
    counter = CommCounter()
    active.append(counter)
    try:
        yield counter
    finally:
        # this one, not another that has counted the same
        active[:] = [listener for listener in active if listener is not counter]
