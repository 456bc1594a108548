"""Whether there is room for a file, before HDF5 writes to it: one that it cannot write whole it cannot close.

It keeps such a file, and ends the process when it tries again. For one process; nothing communicates.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpishard.io.file.open import looked_at
from mpishard.io.file.parts import memory_file
from mpishard.io.file.schema import Schema, create, is_filtered, step_of

# at most what HDF5 writes besides cells and what makes up a new file: of a file, of a dataset with chunks
SPARE = 16 << 10
_PER_DATASET = 1 << 10
# free bytes from which there is room, whatever HDF5 adds to so many bytes of cells: to look takes longer than to write
_AMPLE, _MOST_PER_BYTE = 64 << 20, 16
# of fallocate(2)
_KEEP_SIZE = 1
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# of the B-tree that finds chunks (HDF5 file format, III.A.1), whose nodes come to be half full at the least
_FANOUT = 64


def no_room(folder: Path, more: int, before: int = 0) -> OSError | None:
    """Return the error of a file in ``folder`` that gets longer, where it is known before. Not collective.

    ``before`` is its length, and ``more`` at most what it gets, in bytes.
    """
    free, most, size = _free(folder), _limit(), before + more
    if more > free:
        return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: up to {more} bytes to write, {free} bytes free")
    if most is not None and size > most:
        return OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: up to {size} bytes, the limit is {most} (ulimit -f)")
    return None


def check_room(
    path: Path, form: Schema, *, exists: bool = False, lay: Callable[..., object] = create, filtered: bool = False
) -> int:
    """Raise where a new file, or one with a step more, may be longer than there is room, or this process may write.

    Not collective. Returns how long it may be at most, 0 where there is ample room.

    Parameters
    ----------
    path, form
        The file, and what is written to it.
    exists
        Whether it is there, and gets a step more.
    lay
        ``lay(file, form)`` makes a new file but for its cells.
    filtered
        Whether what filters make of cells counts too, at most as much as they can; if not, `check_filtered` looks
        at it as it is written.

    Raises
    ------
    FileError
        It does not take a step of this form.
    OSError
        It may be too long.
    """
    nbytes = sum(math.prod(v.shape) * v.dtype.itemsize for v in form.variables)
    if _limit() is None and _free(path.parent) > _AMPLE + _MOST_PER_BYTE * nbytes:
        return 0
    with looked_at(path) if exists else memory_file() as file:
        if exists:
            step_of(file, form, path)
            before, more = os.path.getsize(path), SPARE
        else:
            lay(file, form)
            file.flush()
            before, more = 0, len(file.id.get_file_image()) + SPARE
        for v in form.variables:
            box = [(0, n) for n in v.shape]
            more += _growth(file[v.name], box if form.append is None else [(0, 1), *box], filtered=filtered)
        if form.append is not None:
            more += _growth(file[form.append], [(0, 1)])
    if error := no_room(path.parent, more, before):
        raise error
    return before + more


def check_filtered(file: Any, dataset: Any, box: Sequence[tuple[int, int]]) -> None:
    """Raise OSError where a box of a dataset with filters may be too long, however they do. Not collective."""
    if is_filtered(dataset):
        path, size = Path(file.filename), file.id.get_filesize()
        most = size + _growth(dataset, box, filtered=True) + SPARE
        # with what is held for it already
        has = max(size, 512 * os.stat(path).st_blocks)
        if error := no_room(path.parent, max(0, most - has), has):
            raise error
        if _free(path.parent) < _AMPLE + most - size:
            hold(file, most)


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Have the disk's blocks of a part of a file, so that a full disk is found out at once. Not collective.

    Raises
    ------
    OSError
        There is no room.
    """
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError as e:
        if e.errno in _FULL:
            raise


def hold(file: Any, nbytes: int) -> None:
    """Have the disk keep room for a file of so many bytes, that nobody else can take meanwhile. Not collective.

    Once HDF5 has failed to write a part it cannot close the file, and some versions end the process later. The file
    gets no longer by this; `mpishard.io.file.close.shut` lets go of what it has not used.

    Raises
    ------
    OSError
        There is none.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None) if nbytes else None
    if fallocate is None:
        return
    args = ctypes.c_int(file.id.get_vfd_handle()), ctypes.c_int(_KEEP_SIZE), ctypes.c_int64(0), ctypes.c_int64(nbytes)
    if fallocate(*args) and (code := ctypes.get_errno()) in _FULL:
        raise OSError(code, os.strerror(code))


def _growth(dataset: Any, box: Sequence[tuple[int, int]], *, filtered: bool = False) -> int:
    """Return at most how much longer a file gets when a box of a dataset is written."""
    itemsize = dataset.dtype.itemsize
    if dataset.is_virtual:
        return 0
    if dataset.chunks is None:
        return math.prod(hi - lo for lo, hi in box) * itemsize
    touched = math.prod(max(0, -(-hi // c) - lo // c) for (lo, hi), c in zip(box, dataset.chunks))
    nbytes = touched * math.prod(dataset.chunks) * itemsize
    if is_filtered(dataset):
        # what cannot be compressed gets longer
        nbytes = nbytes + nbytes // 256 if filtered else 0
    key = 8 * (len(dataset.chunks) + 2)
    node = 24 + _FANOUT * (key + 8) + key
    leaves = 1 + 2 * touched // _FANOUT
    return nbytes + _PER_DATASET + node * (leaves + 1 + 2 * leaves // _FANOUT)


def _free(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _limit() -> int | None:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if most == resource.RLIM_INFINITY else most
