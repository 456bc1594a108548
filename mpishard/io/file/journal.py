"""Journals: a file that is changed in place is put back as it was where the job ends in the middle of it.

Before the first change, the bytes that may change are kept in ``.NAME.undo`` beside the file, with the file's size;
the journal goes when all changes are on the disk. Who finds one, finds a file that was left half changed, or that is
being changed right now: the one who changes it holds a lock on the journal, that ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpishard.errors import FileError, described

_MAGIC = b"mpishard undo 1\n"
_NBYTES = 16 << 20
# how long a reader waits for a step that is being written
WAIT_S = 20.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

Region = tuple[int, int]


def journal_of(path: str | os.PathLike[str]) -> Path:
    """Return where the journal of a file is. Not collective."""
    own = Path(os.path.abspath(path))
    return own.with_name(f".{own.name}.undo")


class Journal:
    """The bytes of a file that may change, kept until `commit` or `taken_back`. For one process; not collective.

    Parameters
    ----------
    path
        The file.
    regions
        (offset, number) of the bytes to keep; what lies behind the file's end needs none.
    settled
        Called when the changes stand.
    """

    def __init__(self, path: Path, regions: Sequence[Region], settled: Callable[[], object] = lambda: None) -> None:
        self.path, self.journal, self._settled = path, journal_of(path), settled
        partial = self.journal.with_name(f"{self.journal.name}.partial")
        self._file: Any = open(partial, "w+b")  # noqa: SIM115 (holds the lock)
        try:
            _locked(self._file)
            with open(path, "rb") as source:
                digest = hashlib.blake2b(digest_size=16)
                for data in _bytes(source, regions):
                    digest.update(data)
                size = os.fstat(source.fileno()).st_size
                head = {"size": size, "regions": list(regions), "digest": digest.hexdigest()}
                self._file.write(_MAGIC + json.dumps(head).encode() + b"\n")
                for data in _bytes(source, regions):
                    self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
            os.rename(partial, self.journal)
            _flush_folder(self.journal.parent)
        except BaseException:
            self.close()
            partial.unlink(missing_ok=True)
            raise

    def commit(self) -> None:
        """Let the changes stand; they are on the disk before the journal goes."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        self._remove()
        self._settled()

    def put_back(self) -> None:
        """Put the file back as it was, and keep the journal."""
        self._file.seek(0)
        _put_back(self.path, self._file)

    def close(self) -> None:
        """Let go of the journal; where it is still there, the next one who opens the file puts it back."""
        self._file.close()

    def _remove(self) -> None:
        self.journal.unlink()
        _flush_folder(self.journal.parent)
        self.close()


def taken_back(journal: Journal, *, closed: bool) -> None:
    """Undo what a failed step has written.

    Not collective. A file that HDF5 could not close may be written to once more when the program ends: its journal
    stays, for whoever opens it next.
    """
    try:
        journal.put_back()
        if closed:
            journal._remove()
    except OSError:
        pass  # the journal is still there
    finally:
        journal.close()


def heal(path: str | os.PathLike[str], *, writing: bool = False) -> None:
    """Put a file back that a job has left half changed; without a journal, do nothing.

    Not collective: whoever comes first does it, the others wait.

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
    """
    journal = journal_of(path)
    if not journal.exists():
        return
    end = time.monotonic() + WAIT_S
    try:
        while True:
            with open(journal, "r+b") as file:
                try:
                    locked = _locked(file)
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise _refused(path, "it is being written to by another job", "wait until it ends") from None
                    time.sleep(0.02)
                    continue
                if not (locked or writing):
                    raise _refused(
                        path,
                        "a step that was not finished, or is being written; locks do not work on this file system",
                        "append to it, or, where no job is writing to it, mpishard.io.heal(path, writing=True)",
                    )
                if not os.path.exists(path):
                    journal.unlink()
                    return
                # another one's, unless it still has the name
                if journal.exists() and os.path.samestat(os.fstat(file.fileno()), journal.stat()):
                    _put_back(Path(path), file)
                    journal.unlink()
                    _flush_folder(journal.parent)
                    return
    except FileNotFoundError:
        return  # finished meanwhile
    except OSError as e:
        if isinstance(e, FileError):
            raise
        fix = "open it once as a user who may write to it, where it can be written to"
        raise _refused(path, f"a step that was not finished ({type(e).__name__}: {e})", fix) from e


def _refused(path: str | os.PathLike[str], got: str, fix: str) -> FileError:
    return FileError(
        described(
            f"cannot open {os.fspath(path)!r}",
            expected="a file that no job is appending to, or has left in the middle of a step",
            got=got,
            fix=fix,
        )
    )


def _locked(file: Any) -> bool:
    """Lock a journal, or tell that this file system has no locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as e:
        if e.errno in _NO_LOCKS:
            return False
        raise
    return True


def _bytes(source: Any, regions: Sequence[Region]) -> Any:
    for offset, count in regions:
        source.seek(offset)
        for done in range(0, count, _NBYTES):
            yield source.read(min(_NBYTES, count - done))


def _put_back(path: Path, journal: Any) -> None:
    """Write what the journal keeps; the same result however often, and however many do it."""
    head: dict[str, Any] = {"digest": ""}
    if journal.read(len(_MAGIC)) == _MAGIC:
        head = json.loads(journal.readline())
    start, digest = journal.tell(), hashlib.blake2b(digest_size=16)
    for data in iter(lambda: journal.read(_NBYTES), b""):
        digest.update(data)
    if digest.hexdigest() != head["digest"]:
        raise _refused(path, "its journal is damaged", f"move {journal_of(path)} away, and check what the file holds")
    if os.path.getsize(path) < head["size"]:
        raise _refused(path, "a journal of a longer file", f"remove {journal_of(path)}, unless the file was cut")
    journal.seek(start)
    with open(path, "r+b") as file:
        for offset, count in head["regions"]:
            file.seek(offset)
            for done in range(0, count, _NBYTES):
                file.write(journal.read(min(_NBYTES, count - done)))
        file.flush()
        os.ftruncate(file.fileno(), head["size"])
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system flushes folders
            os.fsync(fd)
    finally:
        os.close(fd)
