"""Journals: a file that is changed in place can be put back as it was where the job ends in the middle of it.

Before the first change, the bytes that may change are kept in ``.NAME.undo`` beside the file, with the file's size;
the journal goes when all changes are on the disk. Who finds one, finds a file that was left half changed, or that is
being changed right now: the one who changes it holds a lock on the journal, that ends with its process. Who reads
waits for the one, and refuses the other: a file is put back only by who may change it and asks for that, only where
both are regular files of this user's own with no other name, and only by a journal that is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from mpishard.errors import FileError
from mpishard.io.file.lock import locked
from mpishard.io.file.trust import absolute, fresh, has_name, open_own

# of one length: the first becomes the second when all is kept, before the first change
_BEGUN = b"mpishard undo 2 begun\n"
_WHOLE = b"mpishard undo 2 whole\n"
_NBYTES = 16 << 20
_HEAD_NBYTES = 256 << 20
# how long a reader waits for a step that is being written
WAIT_S = 20.0

# no file can have the journal's name: it is too long, or what should be the folder is none
_NO_PLACE = (errno.ENAMETOOLONG, errno.ENOTDIR)

Region = tuple[int, int]


def journal_of(path: str | os.PathLike[str]) -> Path:
    """Return where the journal of a file is. Not collective."""
    own = Path(os.path.abspath(path))
    # of a path without a last part, such as /, too, which is refused elsewhere
    return own.parent / f".{own.name}.undo"


class Journal:
    """The bytes of a file that may change, kept until `commit` or `taken_back`. For one process; not collective.

    Parameters
    ----------
    path
        The file.
    regions
        (offset, number) of the bytes to keep, one behind the other; what lies behind the file's end needs none.
    settled
        Called when the changes stand.
    """

    def __init__(self, path: Path, regions: Sequence[Region], settled: Callable[[], object] = lambda: None) -> None:
        self.path, self.journal, self._settled = path, journal_of(path), settled
        try:
            self._file = fresh(self.journal, replace=False)
        except FileExistsError:
            raise _written_to(path) from None
        try:
            self._keep(regions)
        except BaseException:
            if has_name(self._file, self.journal):
                self.journal.unlink()
            self.close()
            raise

    def _keep(self, regions: Sequence[Region]) -> None:
        end = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(BlockingIOError):  # a reader that looks whether somebody writes
                locked(self._file)
                break
            if time.monotonic() > end:
                raise _written_to(self.path)
            time.sleep(0.02)
        if not has_name(self._file, self.journal):
            raise _written_to(self.path)
        with open_own(self.path, mine=False) as source:
            size = os.fstat(source.fileno()).st_size
            head = {"size": size, "regions": list(regions), "digest": ""}
            digest = _digest_of(head)
            for data in _bytes(source, regions):
                digest.update(data)
            head["digest"] = digest.hexdigest()
            self._file.write(_BEGUN + json.dumps(head).encode() + b"\n")
            for data in _bytes(source, regions):
                self._file.write(data)
        self._flush()
        self._file.seek(0)
        self._file.write(_WHOLE)
        self._flush()
        _flush_folder(self.journal.parent)

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def commit(self) -> None:
        """Let the changes stand; they are on the disk before the journal goes."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        self._remove()
        self._settled()

    def put_back(self) -> None:
        """Put the file back as it was, and keep the journal."""
        with open_own(self.path, mine=False) as file:
            _put_back(self.path, file, self._file)

    def image(self, file: IO[bytes]) -> None:
        """Write the bytes that are kept into an empty file, each to its place."""
        _put_back(self.path, file, self._file, whole=False)

    def close(self) -> None:
        """Let go of the journal; where it is still there, the file waits to be put back (see `heal`)."""
        self._file.close()

    def _remove(self) -> None:
        self.journal.unlink()
        _flush_folder(self.journal.parent)
        self.close()


def taken_back(journal: Journal, *, closed: bool) -> None:
    """Undo what a failed step has written.

    Not collective. A file that HDF5 could not close may be written to once more when the program ends: its journal
    stays, for whoever changes it next.
    """
    try:
        journal.put_back()
        if closed:
            journal._remove()
    except OSError:
        pass  # the journal is still there
    finally:
        journal.close()


def is_pending(path: str | os.PathLike[str]) -> bool:
    """Tell whether a step is being written to a file, or was left in the middle. Not collective."""
    return os.path.lexists(journal_of(os.path.realpath(path)))


def check_settled(path: str | os.PathLike[str]) -> None:
    """Wait while a step is written to a file, and refuse one that was left in the middle of a step.

    Not collective. Changes nothing: a file is put back by `heal`, never because somebody reads it.

    Raises
    ------
    FileError
        It is being changed for long, or was left half changed.
    """
    # a step is written to the file itself, whatever link leads to it
    journal = journal_of(os.path.realpath(path))
    end, looks = time.monotonic() + WAIT_S, 0
    while True:
        try:
            fd = os.open(journal, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as e:
            if e.errno in _NO_PLACE:
                return
            raise _refused(path, f"a journal beside it that cannot be opened ({e})", _FIX_FOREIGN) from e
        with open(fd, "rb") as file:
            try:
                locks = locked(file, fcntl.LOCK_SH)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise _written_to(path) from None
            else:
                # once more: one who begins has made it, and locks it next
                looks += 1
                if looks > 2 and has_name(file, journal):
                    got = "a step that was not finished" + (
                        "" if locks else ", or is being written: locks do not work on this file system"
                    )
                    raise _refused(path, got, _FIX_PENDING.format(os.path.realpath(path)))
        time.sleep(0.02)


def heal(path: str | os.PathLike[str], *, writing: bool = False) -> None:
    """Put a file back that a job has left in the middle of a step; without a journal, do nothing.

    Not collective: whoever comes first does it, the others wait. `write` does it for a file that it writes or appends
    to; reading never does. The file and its journal (``.NAME.undo`` beside it) must be regular files of this user's
    own, no links and without a second name; the journal is read and checked to its end before a byte is changed.

    Parameters
    ----------
    path
        The file.
    writing
        Whether the caller is the one who may change the file: where locks do not work, only such a one heals.

    Raises
    ------
    FileError
        It is being changed, or cannot be put back here.

    Examples
    --------
    >>> ms.io.heal("run.h5")
    """
    path = absolute(path)
    journal = journal_of(path)
    end = time.monotonic() + WAIT_S
    # who writes replaces a link
    if not writing and path.is_symlink() and is_pending(path):
        raise _refused(path, "a link to a file that was left in the middle of a step", _FIX_FOREIGN)
    try:
        while os.path.lexists(journal):
            with open_own(journal) as file:
                try:
                    locks = locked(file)
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise _written_to(path) from None
                    time.sleep(0.02)
                    continue
                if not (locks or writing):
                    raise _refused(
                        path,
                        "a step that was not finished, or is being written; locks do not work on this file system",
                        "append to it, or, where no job is writing to it, mpishard.io.heal(path, writing=True)",
                    )
                # another one's, unless it still has the name
                if has_name(file, journal):
                    if os.path.lexists(path):
                        with open_own(path) as changed:
                            _put_back(path, changed, file)
                    journal.unlink()
                    _flush_folder(journal.parent)
    except FileNotFoundError:
        return  # finished meanwhile
    except OSError as e:
        if isinstance(e, FileError):
            raise
        raise _refused(path, f"a step that was not finished ({type(e).__name__}: {e})", _FIX_FOREIGN) from e


_FIX_PENDING = "mpishard.io.heal({!r}) puts it back as it was before that step, as does the next write(append=)"
_FIX_FOREIGN = (
    "heal the file itself, not a link to it, as the user whose file it is, where it can be written to; "
    "a journal that you have not written is not yours to trust: remove it"
)


def _written_to(path: str | os.PathLike[str]) -> FileError:
    return _refused(path, "it is being written to by another job", "wait until it ends")


def _refused(path: str | os.PathLike[str], got: str, fix: str) -> FileError:
    return FileError(
        f"cannot open {os.fspath(path)!r}",
        expected="a file that no job is appending to, or has left in the middle of a step",
        got=got,
        fix=fix,
    )


def _bytes(source: IO[bytes], regions: Sequence[Region]) -> Iterator[bytes]:
    for offset, count in regions:
        source.seek(offset)
        for done in range(0, count, _NBYTES):
            yield source.read(min(_NBYTES, count - done))


class _Head(NamedTuple):
    size: int
    regions: list[Region]
    digest: str


def _digest_of(head: dict[str, Any]) -> Any:
    return hashlib.blake2b(json.dumps([head["size"], head["regions"]]).encode(), digest_size=16)


def _put_back(path: str | os.PathLike[str], file: IO[bytes], journal: IO[bytes], *, whole: bool = True) -> None:
    """Write what the journal keeps; the same result however often, and however many do it."""
    journal.seek(0)
    magic = journal.read(len(_WHOLE))
    if magic in (_BEGUN, b""):
        return  # the file was not touched yet
    fix = f"move {journal_of(path)} away, and check what the file holds"
    head = _head_of(journal) if magic == _WHOLE else None
    if head is None:
        raise _refused(path, "its journal is damaged", fix)
    if whole and os.fstat(file.fileno()).st_size < head.size:
        raise _refused(path, "a journal of a longer file", f"remove {journal_of(path)}, unless the file was cut")
    for offset, count in head.regions:
        file.seek(offset)
        for done in range(0, count, _NBYTES):
            file.write(journal.read(min(_NBYTES, count - done)))
    file.flush()
    os.ftruncate(file.fileno(), head.size)
    os.fsync(file.fileno())


def _head_of(journal: IO[bytes]) -> _Head | None:
    """Return what a journal says, with the kept bytes next to be read; None unless all of it is as it was written."""
    line = journal.readline(_HEAD_NBYTES)
    try:
        told = json.loads(line)
        head = _Head(told["size"], [(offset, count) for offset, count in told["regions"]], told["digest"])
        digest = _digest_of(told)
    except (KeyError, RecursionError, TypeError, ValueError):
        return None
    at = 0
    for number in (head.size, *(n for region in head.regions for n in region)):
        if type(number) is not int or number < 0:
            return None
    for offset, count in head.regions:
        if offset < at or offset + count > head.size:
            return None
        at = offset + count
    start = journal.tell()
    if os.fstat(journal.fileno()).st_size != start + sum(count for _, count in head.regions):
        return None
    for data in iter(lambda: journal.read(_NBYTES), b""):
        digest.update(data)
    journal.seek(start)
    return head if digest.hexdigest() == head.digest else None


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system flushes folders
            os.fsync(fd)
    finally:
        os.close(fd)
