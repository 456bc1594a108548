"""Whether files are as they were when they were opened.

HDF5 keeps what it knows of an open file, and takes cells for fill values whose file is not there any more: of a file
that changes meanwhile it reads zeros without a word. For one process; nothing communicates.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from mpishard.errors import FileError
from mpishard.io.file.trust import Path, told

# device and number, size, time of the last write in ns
Mark = tuple[int, int, int, int]

# files that are open for reading in this process, and what they were: to HDF5 all that are one file are open as the
# first of them was
_open: list[tuple[weakref.ref[Any], Mark]] = []
_looking = threading.Lock()


def mark_of(at: Path | int) -> Mark:
    """Return what a file is like, by its path or descriptor. Not collective."""
    found = os.stat(at)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def of_open(file: Any) -> Mark | None:
    """Return what an open HDF5 file is like now; None where it has no descriptor, as in memory. Not collective."""
    with contextlib.suppress(Exception):
        return mark_of(file.id.get_vfd_handle())
    return None


def held(mark: Mark) -> Mark | None:
    """Return what a file was to those who have it open in this process, or None. Not collective."""
    with _looking:
        _open[:] = [(ref, own) for ref, own in _open if (other := ref()) is not None and other]
        return next((own for _, own in _open if own[:2] == mark[:2]), None)


def note(file: Any, mark: Mark) -> None:
    """Note that a file was opened, being as ``mark``. Not collective."""
    with _looking:
        _open.append((weakref.ref(file), mark))


def opening_mark(file: Any) -> Mark:
    """Return what a file was when it was opened by `opened`. Not collective."""
    with _looking:
        return next(mark for ref, mark in _open if ref() is file)


class Seen:
    """Files as they were before cells were read from them.

    Parameters
    ----------
    path
        Of the file that was opened.
    file
        The file, where it stays open: then another one may take its place.
    """

    def __init__(self, path: Path, file: Any = None) -> None:
        self._path = path
        self._file = file
        self._marks: dict[Path, Mark] = {}
        with contextlib.suppress(Exception):  # whoever opens it tells of that
            self._marks[path] = mark_of(path) if file is None else opening_mark(file)

    def add(self, marks: Mapping[str, Mark]) -> None:
        """Look at others, too: path -> what the file there was. Not collective."""
        self._marks.update(marks)

    @property
    def state(self) -> int:
        """A number for the state of the file, the same on all ranks that see the same."""
        return self._marks.get(self._path, (0, 0, 0, 0))[3]

    def changed(self) -> str:
        """Return what has changed, in words; nothing where nothing has. Not collective."""
        for at, mark in self._marks.items():
            try:
                own = of_open(self._file) if at == self._path and self._file is not None else None
                now = own or mark_of(at)
            except OSError as e:
                return f"{os.fspath(at)}: {e.strerror}"
            if now != mark:
                return f"{os.fspath(at)} was {'written to' if now[:2] == mark[:2] else 'replaced'}"
        return ""

    def check(self) -> None:
        """Raise where a file has changed. Not collective.

        Raises
        ------
        FileError
            One has.
        """
        if got := self.changed():
            raise changed(self._path, got)


def changed(path: Path, got: str) -> FileError:
    """Return the error for a file that has changed while it was read. Not collective."""
    return FileError(
        f"read: {told(path)!r} has changed since it was opened",
        expected="files that stay as they are while they are read",
        got=got,
        fix="read between the steps of who writes; close a Dataset, and open it anew, when its file has grown",
    )
