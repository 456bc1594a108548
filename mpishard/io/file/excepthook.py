"""Errors that h5py cannot raise, as it finds them where it lets objects go: kept, for who writes a file to tell.

Nothing here is collective.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from threading import get_ident
from types import TracebackType
from typing import Any

# the garbage collection may come here too
_lock = threading.RLock()
_installed: _Hooks | None = None


class _Hooks:
    """Hooks that keep what h5py finds wrong in threads that ask for it, and pass the rest on to those before."""

    def __init__(self) -> None:
        self.lost: dict[int, list[BaseException]] = {}  # by thread
        self.before = sys.excepthook, sys.unraisablehook
        sys.excepthook, sys.unraisablehook = self.uncaught, self.unraisable

    def uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Take an error that h5py prints."""
        lost = self.lost.get(get_ident())
        if lost is None or not _is_of_h5py(trace):
            self.before[0](kind, error, trace)
        else:
            lost.append(error)

    def unraisable(self, info: Any) -> None:
        """Take an error that nobody can catch."""
        lost = self.lost.get(get_ident())
        named = isinstance(info.object, str) and info.object.startswith("h5py.")
        if lost is None or not (named or _is_of_h5py(info.exc_traceback)):
            self.before[1](info)
        else:
            lost.append(info.exc_value or RuntimeError(info.err_msg))

    def remove(self) -> None:
        """Put back the hooks that were there before, unless the program has set others since."""
        if sys.excepthook == self.uncaught:
            sys.excepthook = self.before[0]
        if sys.unraisablehook == self.unraisable:
            sys.unraisablehook = self.before[1]


def _is_of_h5py(trace: TracebackType | None) -> bool:
    """Tell whether it was h5py that was called, and not a function of the program."""
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == "h5py"


@contextlib.contextmanager
def noted() -> Iterator[list[BaseException]]:
    """Collect what h5py finds wrong in this thread while it lets objects go, for the time of a ``with`` block.

    A disk may be full only when the last cells of an object are flushed. h5py can then but print the error, through
    `sys.excepthook`: one that ends the job would. What is not h5py's goes to the hooks of the program.
    """
    global _installed  # noqa: PLW0603
    lost: list[BaseException] = []
    with _lock:
        hooks = _installed = _installed or _Hooks()
        outer = hooks.lost.get(get_ident())
        hooks.lost[get_ident()] = lost
    try:
        yield lost
    finally:
        with _lock:
            if outer is None:
                del hooks.lost[get_ident()]
            else:
                hooks.lost[get_ident()] = outer
            if not hooks.lost:
                hooks.remove()
                _installed = None
