"""What is worked out from layouts is remembered, and forgotten where it takes too much room.

A layout that says how many cells each of thousands of ranks has holds as many numbers. Where the data says them (a
mask, neighbours of points) each is another one. Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# what one function has worked out
KEPT = 65536
# numbers that new layouts hold one by one, at some 40 bytes each
ROOM = 1 << 21
_forget: list[Callable[[], None]] = []
_held = [0]


def remembered(call: F) -> F:
    """Remember what a function of layouts or of block sizes returns: a decorator."""
    cached = lru_cache(maxsize=KEPT)(call)
    _forget.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


def table() -> dict[Any, Any]:
    """Return a dictionary with layouts among its keys or values, for what is faster than `remembered`."""
    kept: dict[Any, Any] = {}
    _forget.append(kept.clear)
    return kept


def hold(count: int) -> None:
    """Note a new layout that holds so many numbers one by one; forget everything where they are too many together."""
    _held[0] += count
    if _held[0] > ROOM:
        for clear in _forget:
            clear()
        _held[0] = count
