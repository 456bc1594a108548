"""Global heaps of HDF5 files, looked at as HDF5 comes upon them: from some damaged ones it never comes back.

Virtual datasets keep their sources there. For one process; nothing communicates.
"""

from __future__ import annotations

import os
from typing import Any

from mpishard.io.file.trust import Path, open_regular

_SUPERBLOCK = b"\x89HDF\r\n\x1a\n"
_HEAP = b"GCOL"
_MOST_OBJECTS = 1 << 16  # of a heap: they are numbered in two bytes
_READ_NBYTES = 1 << 16


class Watched:
    """A file for h5py's driver of Python objects, that reads no damaged heap.

    Not collective. HDF5 reads just what it needs: nothing of a large file is read that would not be read anyway.
    Datasets of it may be opened, but what opens others (their sources) takes this file for those.

    Attributes
    ----------
    damage : str or None
        What was wrong with a heap that HDF5 asked for.

    References
    ----------
    HDF5 File Format Specification, II.A, Superblock, and III.E, Global Heap.
    """

    def __init__(self, path: Path) -> None:
        self.damage: str | None = None
        self._file = open_regular(path)
        self._fd = self._file.fileno()
        self._at = 0
        self._length_nbytes = 8

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    # what h5py asks of it

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: os.fstat(self._fd).st_size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read all of a buffer, zeros beyond the end."""
        done = os.preadv(self._fd, [buffer], self._at)
        buffer[done:] = bytes(len(buffer) - done)
        if bytes(buffer[:8]) == _SUPERBLOCK and done >= 16:
            self._length_nbytes = buffer[14 if buffer[8] < 2 else 10]
        if bytes(buffer[:4]) == _HEAP:
            self._check(self._at)
        self._at += done
        return done

    def read(self, nbytes: int = -1) -> bytes:
        """Read some bytes; h5py knows by this that it is a file."""
        buffer = bytearray(max(nbytes, 0))
        return bytes(buffer[: self.readinto(buffer)])

    def write(self, data: Any) -> int:
        """Refuse to write."""
        raise OSError(f"{len(data)} bytes to write to a file that is looked at")

    def truncate(self, nbytes: int | None = None) -> None:
        """Leave the file as it is: HDF5 asks for that when it closes one."""

    def flush(self) -> None:
        """Do nothing."""

    # heaps

    def _check(self, heap: int) -> None:
        """Raise OSError where the objects of a heap do not lie in it one behind the other."""
        width = self._length_nbytes
        head = 8 * -(-(8 + width) // 8)  # of the heap, and of each object
        start, raw = heap, os.pread(self._fd, _READ_NBYTES, heap)
        stop = heap + int.from_bytes(raw[8 : 8 + width], "little")
        at, count = heap + head, 0
        wrong = stop > os.fstat(self._fd).st_size
        while not wrong and at + head <= stop:
            if at + head > start + len(raw):
                start, raw = at, os.pread(self._fd, _READ_NBYTES, at)
            own = raw[at - start : at - start + head]
            index, nbytes = (int.from_bytes(own[a:b], "little") for a, b in ((0, 2), (8, 8 + width)))
            # number 0 is what is free, with its own head
            needed = nbytes if index == 0 else head + (nbytes + 7) // 8 * 8
            count += 1
            wrong = not 0 < needed <= stop - at or count > _MOST_OBJECTS
            at += 0 if wrong else needed
        if wrong:
            self.damage = f"the global heap at byte {heap} is damaged at byte {at}"
            raise OSError(self.damage)
