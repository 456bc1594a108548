"""Whose folder it is: of several jobs that save into one, the first does, and the others are told who that is.

The lock is ``.lock`` in the folder: `flock` holds it from a job's first save to the end of its process, whatever ends
that, and the file says who holds it. Where a file system has no locks, what the file says decides: a process of this
machine holds it while it lives (its start time is compared: numbers of processes are used again); one of another
machine for ten minutes after its last save, unless it was of the same batch job, which then was queued again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from pathlib import Path
from typing import IO, Any

from mpishard.errors import FileError
from mpishard.io.file.trust import has_name, shown

LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NOTE_NBYTES = 1 << 12
_STALE_S = 600.0
_NAMING_S = 2.0  # the holder writes its name as soon as it has the lock
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "JOB_ID")

# the folder's real path -> descriptor of its lock, held as long as that is open: to the end of the process
_held: dict[str, int] = {}


def locked(file: IO[bytes], how: int = fcntl.LOCK_EX) -> bool:
    """Lock a file, or tell that its file system has no locks; BlockingIOError where another one holds it.

    Not collective.
    """
    try:
        fcntl.flock(file.fileno(), how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as e:
        if e.errno in NO_LOCKS:
            return False
        raise
    return True


def hold(folder: Path) -> None:
    """Make a folder this process' own to save into, until the process ends. Not collective.

    Raises
    ------
    FileError
        Another job's process holds it; the text says which.
    OSError
        The lock cannot be made.
    """
    key, path = os.path.realpath(folder), folder / LOCK
    held = _held.get(key)
    if held is not None and has_name(held, path):
        os.utime(held)
        return
    if held is not None:
        os.close(_held.pop(key))
    file = _taken(path, folder)
    while not has_name(file, path):
        file.close()
        file = _taken(path, folder)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb") as note:
        note.truncate()
        note.write(json.dumps(_me()).encode() + b"\n")
    _held[key] = os.dup(file.fileno())
    file.close()


def _taken(path: Path, folder: Path) -> IO[bytes]:
    # for reading: a file that is open for writing keeps a file system from being unmounted or made read-only
    for way in (os.O_RDONLY, os.O_RDWR):
        flags = way | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags, 0o666), "rb")
        try:
            there = os.fstat(file.fileno())
            if not stat.S_ISREG(there.st_mode) or there.st_nlink > 1:
                raise OSError(f"{path} is no lock, but a file of another kind, or with another name")
            _take(file, folder)
        except OSError as e:
            file.close()
            if e.errno != errno.EBADF:  # of NFS, which locks only what may be written to
                raise
        else:
            return file
    raise OSError(f"{path} cannot be locked")


def _take(file: IO[bytes], folder: Path) -> None:
    try:
        free = locked(file) or not _lives(_note(file), os.fstat(file.fileno()).st_mtime)
    except BlockingIOError:
        free = False
    if not free:
        raise FileError(
            f"save_checkpoint: another job saves into {os.fspath(folder)!r}",
            expected="a folder that one job saves into at a time",
            got=f"its lock ({LOCK}) is held by {_told(_holder(file))}",
            fix="save into another folder, or end that process: the lock ends with it",
        )


def _me() -> dict[str, Any]:
    job = next((f"{name}={os.environ[name]}" for name in _JOBS if name in os.environ), None)
    pid = os.getpid()
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"host": socket.gethostname(), "pid": pid, "started": _started(pid), "job": job, "time": now}


def _started(pid: int) -> str | None:
    """Return when a process of this machine began, in the system's own count; None where there is none."""
    with contextlib.suppress(OSError, IndexError, UnicodeDecodeError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]
    return None


def _note(file: IO[bytes]) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        file.seek(0)
        note = json.loads(file.read(_NOTE_NBYTES))
        if isinstance(note, dict):
            return note
    return {}


def _holder(file: IO[bytes]) -> dict[str, Any]:
    """Return what the holder of a lock says of itself, as soon as it does; nothing where it does not."""
    until = time.monotonic() + _NAMING_S
    while True:
        note = _note(file)
        # until then it is what the one before has left
        if note and (note.get("host") != socket.gethostname() or _started_is(note)):
            return note
        if time.monotonic() > until:
            return {}
        time.sleep(0.01)


def _lives(note: dict[str, Any], touched: float) -> bool:
    me = _me()
    if note.get("host") == me["host"]:
        return note.get("pid") != me["pid"] and _started_is(note)
    again = note.get("job") is not None and note["job"] == me["job"]
    return bool(note) and not again and time.time() - touched < _STALE_S


def _started_is(note: dict[str, Any]) -> bool:
    pid = note.get("pid")
    started = _started(pid) if type(pid) is int else None
    return started is not None and started == note.get("started")


def _told(note: dict[str, Any]) -> str:
    if not note:
        return "a process that has not told its name"
    job = "no batch job" if note.get("job") is None else f"job {shown(note['job'])}"
    return f"process {shown(note.get('pid'))} on {shown(note.get('host'))}, {job}, since {shown(note.get('time'))}"


def _forget() -> None:
    # a forked child's copies would hold the locks after the end of the process that took them
    for held in _held.values():
        os.close(held)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
