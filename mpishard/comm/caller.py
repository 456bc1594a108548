"""What the user has called, where calls are compared: rules communicate for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class _Inside(threading.local):
    """What this thread calls, told when it is compared; None outside of calls.

    ``call`` is the whole text, where whole calls are compared; ``operands`` a function's name and its arguments, where
    only what they are laid out as is compared, of the first.
    """

    call: Callable[[], str] | None = None
    operands: tuple[str, Sequence[Any]] | None = None


inside = _Inside()


@contextlib.contextmanager
def within(call: Callable[[], str]) -> Iterator[None]:
    """Compare what ``call`` says too, wherever calls are compared in the body; the outermost counts. Not collective."""
    before = inside.call
    inside.call = before or call
    try:
        yield
    finally:
        inside.call = before
