"""What the user has called, where calls are compared: rules communicate for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class _Inside(threading.local):
    """The text of a call of this thread, made when it is compared; None outside of calls."""

    call: Callable[[], str] | None = None


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
