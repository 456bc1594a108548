"""Closing files that were written, whether or not HDF5 could write all of them. For one process; nothing communicates.

HDF5 keeps what it could not write, and tries again whenever it can, to the end of the process: in a file that was put
back meanwhile, or with an object that it has freed already. So what is left to write goes to memory, or is kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

from mpishard.io.file.open import import_h5py

# what h5py raises where HDF5 fails
_FAILURES = (OSError, RuntimeError, ValueError)


@contextlib.contextmanager
def made(path: str | os.PathLike[str], mode: str = "w", **options: Any) -> Iterator[Any]:
    """Open a file to write it, for the time of a ``with`` block; where that fails it is emptied. Not collective.

    Raises
    ------
    OSError, RuntimeError
        As HDF5 does, where it cannot be opened or closed.
    """
    file = import_h5py().File(path, mode, **options)
    error: Exception | None = None
    try:
        yield file
    except Exception:
        # before the objects are let go, that HDF5 flushes then
        empty(path)
        raise
    finally:
        error = shut(file, lambda: empty(path))
    if error is not None:
        raise error


def shut(
    file: Any, make_room: Callable[[], object], fill: Callable[[IO[bytes]], object] | None = None
) -> Exception | None:
    """Close a file that was written by this process alone, and return the error where that fails. Not collective.

    Parameters
    ----------
    file
        Open h5py file.
    make_room
        Called where there is no room for what HDF5 still holds, before it is tried again: what it then writes is lost.
    fill
        Writes into a file in memory, that HDF5 then has instead, what it may look at in this one before it closes it.
    """
    error: Exception | None = None
    # flushed first: an object that HDF5 cannot flush while it closes it is gone, and still to be closed
    try:
        file.flush()
    except _FAILURES as e:
        error = e
        make_room()
        if not _diverted(file, fill):
            try:
                file.flush()
            except _FAILURES:
                abandon(file)
                return error
    path = file.filename if file.driver == "sec2" else None
    try:
        file.close()
    except _FAILURES as e:
        # it would be closed once more when it is collected
        file.id.locked = 1
        return error or e
    if path is not None:
        with contextlib.suppress(OSError):
            _trim(path)
    return error


def _trim(path: str) -> None:
    """Give back what the disk holds for a file beyond its end (see `mpishard.io.file.room.hold`). Not collective."""
    found = os.stat(path)
    if 512 * found.st_blocks > found.st_size + found.st_blksize:
        os.truncate(path, found.st_size)


def _diverted(file: Any, fill: Callable[[IO[bytes]], object] | None) -> bool:
    """Have HDF5 write the rest of a file that is lost into memory, so that it can close it; tell whether it does."""
    if file.driver != "sec2" or not hasattr(os, "memfd_create"):
        return False
    with contextlib.suppress(OSError), open(os.memfd_create("mpishard"), "w+b") as image:
        if fill is not None:
            fill(image)
            image.flush()
        os.dup2(image.fileno(), file.id.get_vfd_handle(), inheritable=False)
        return True
    return False


def abandon(file: Any) -> None:
    """Keep a file that HDF5 cannot flush, and what is open in it, to the end of the process. Not collective.

    An object that cannot be closed HDF5 frees, and keeps: whoever lets go of it next ends the process, such as an
    error that held it, when it is collected.
    """
    h5py = import_h5py()
    for kept in h5py.h5f.get_obj_ids(file.id, h5py.h5f.OBJ_ALL):
        for _ in range(h5py.h5i.get_ref(kept)):
            h5py.h5i.inc_ref(kept)
    file.id.locked = 1


def empty(path: str | os.PathLike[str] | None) -> None:
    """Make room of a file that is lost. Not collective."""
    if path is not None:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)


def flush(path: str | os.PathLike[str]) -> None:
    """Have a file or a folder's entries on the disk before this returns. Not collective."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not os.path.isdir(path):  # not every file system flushes folders
            raise
    finally:
        os.close(fd)
