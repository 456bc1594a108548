"""What is opened in folders that others may have filled: regular files, of bounded size, and never through a link.

A file of a stranger must not make this process wait (pipes, devices), take more memory than there is, read what lies
elsewhere, or write to any file but the one that the user named. For one process; nothing communicates.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import stat
from functools import lru_cache
from typing import IO, Any

from mpishard.errors import FileError

# what takes less is taken without asking how much there is
_SMALL_NBYTES = 64 << 20
_SHOWN = 60
_PARTIAL = ".partial"

Path = str | os.PathLike[str]


def kind_of(mode: int) -> str:
    """Return what a file is that is no regular one, in words. Not collective."""
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe (FIFO)",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "no regular file")


def check_regular(path: Path) -> None:
    """Raise OSError unless ``path`` leads to a regular file: opening a pipe would wait for ever. Not collective."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(kind_of(mode))


def check_replaceable(path: Path) -> None:
    """Raise OSError where a file that is written would take the place of a pipe, a device or a folder.

    Not collective. A link is replaced, not followed.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise OSError(f"{os.fspath(path)} is {kind_of(mode)}")


def hidden(path: pathlib.Path, token: str) -> pathlib.Path:
    """Return the name under which a file is written until it is complete. Not collective."""
    # of a path without a last part, such as /, too: what is wrong with it is found where all ranks hear of it
    return path.parent / f".{path.name}.{token}{_PARTIAL}"


def check_length(path: pathlib.Path) -> None:
    """Refuse a name that leaves no room for the one of `hidden`.

    Not collective.

    Raises
    ------
    FileError
        It is too long.
    """
    most = 1 << 20
    with contextlib.suppress(OSError, ValueError):  # a folder that is not there, or does not tell
        most = os.pathconf(path.parent, "PC_NAME_MAX") - len(f"..{'':12}{_PARTIAL}")
    nbytes = len(os.fsencode(path.name))
    if nbytes > most:
        raise FileError(
            f"{shown(path.name)} is too long for the name of a new file",
            expected=f"at most {most} bytes: until it is complete, it has a hidden name that is longer",
            got=f"{nbytes} bytes",
            fix="give it a shorter name",
        )


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; OSError for any other. Not collective."""
    return _opened(path, os.O_RDONLY)


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file of at most ``most`` bytes; OSError for any other. Not collective."""
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > most:
            raise OSError(f"{nbytes} bytes, of at most {most} that such a file may have")
        return file.read(nbytes)


def open_own(path: Path, *, mine: bool = True) -> IO[bytes]:
    """Open a file to change it in place: regular, no link, with no second name, and (``mine``) of this user.

    Not collective.

    Raises
    ------
    OSError
        It is anything else, or not there.
    """
    file = _opened(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        found = os.fstat(file.fileno())
        if found.st_nlink > 1:
            raise OSError(f"{os.fspath(path)} is a file with {found.st_nlink} names (hard links)")
        if mine and found.st_uid != os.geteuid():
            raise OSError(f"{os.fspath(path)} belongs to user {found.st_uid}, not to {os.geteuid()}")
    except BaseException:
        file.close()
        raise
    return file


def fresh(path: Path, *, replace: bool = True) -> IO[bytes]:
    """Make a new file, to write and read; what had its name goes first, or (``replace=False``) is an error.

    Not collective. A name that others can guess may be a link by now: it is not followed.
    """
    if replace:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "w+b")


def has_name(file: IO[bytes] | int, path: Path) -> bool:
    """Tell whether an open file, or its descriptor, still has its name. Not collective."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file if isinstance(file, int) else file.fileno()), os.lstat(path))
    return False


def _opened(path: Path, flags: int) -> IO[bytes]:
    mode = os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(f"{os.fspath(path)} is {kind_of(mode)}")
    # without waiting: it may have become something else meanwhile
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(f"{os.fspath(path)} is {kind_of(mode)}")
        return os.fdopen(fd, "r+b" if flags & os.O_RDWR else "rb")
    except BaseException:
        os.close(fd)
        raise


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether a path, after all links, lies in a folder. Not collective."""
    own, whole = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath((own, whole)) == whole


def told(path: Any) -> str:
    """Return a path for what ranks compare, unquoted: the same text where it names the same file. Not collective."""
    try:
        return os.path.abspath(os.fspath(path))
    except Exception:  # noqa: BLE001 (what a user's path raises, too)
        return shown(path).strip("'\"")


def absolute(path: Any) -> pathlib.Path:
    """Return a path that can be one.

    Not collective.

    Raises
    ------
    FileError
        It is of another type, has a NUL in it, or a lone surrogate that no file's name has.
    """
    try:
        text = os.fspath(path)
        if not isinstance(text, str) or b"\0" in os.fsencode(text):
            raise ValueError("no path")
        return pathlib.Path(os.path.abspath(text))
    except FileNotFoundError:
        raise FileError(
            f"{shown(path)} is relative to a folder that is gone",
            expected="a path from the root, or a current folder that is there",
            got="a current folder that was removed, or moved on another node, since the program began",
            fix="give an absolute path, or change to another folder",
        ) from None
    except (TypeError, ValueError):
        raise FileError(
            f"{shown(path)} is no path",
            expected="a str or a pathlib.Path, without NUL, that a file can be named by",
            got=shown(path),
            fix="give one",
        ) from None


def require_text(path: pathlib.Path, what: str) -> None:
    """Refuse a path for files that name each other: HDF5 has it in UTF-8.

    Not collective.

    Raises
    ------
    FileError
        Its bytes are no UTF-8.
    """
    if not is_text(os.fspath(path)):
        raise FileError(
            f"{what}: {shown(path)} is no text",
            expected="a path in UTF-8: files that show the parts of others (back-end 'virtual', and checkpoints in the "
            "background) name them by it",
            got=ascii(os.fsencode(path)),
            fix="rename that folder or file; or write with backend='root', not asynchronously",
        )


def is_text(value: Any) -> bool:
    """Tell whether a value is text that others can read: half a surrogate pair is none. Not collective."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def shown(text: Any) -> str:
    """Return a name of a file's own for an error's text: quoted, cut where it is long. Not collective."""
    try:
        text = str(text)
    except Exception:  # noqa: BLE001 (a user's, while the others wait to hear of an error)
        text = f"a {type(text).__name__}"
    quoted = ascii(text)
    return quoted if len(quoted) <= _SHOWN else f"{quoted[:_SHOWN]}... ({len(text)} characters)"


def check_memory(nbytes: int, what: str) -> None:
    """Refuse to take more memory than there is, before it is taken.

    Not collective.

    Raises
    ------
    FileError
        There is not as much.
    """
    if nbytes <= _SMALL_NBYTES or nbytes <= (there := available_nbytes()):
        return
    raise FileError(
        f"{what} does not fit into memory",
        expected=f"at most {there} bytes on this rank, which are free",
        got=f"{nbytes} bytes",
        fix="shard it over more ranks, or read a part of it; if the file is not that large, it is damaged",
    )


def available_nbytes() -> int:
    """Return how much memory this process can still take, where the system tells. Not collective."""
    limits = [_cgroup_nbytes()]
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space > 0:
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
            space = max(1, space - int(file.read().split()[0]) * resource.getpagesize())
        limits.append(space)
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/meminfo") as file:
            told = dict(line.split(":", 1) for line in file)
        limits.append(sum(int(told[key].split()[0]) << 10 for key in ("MemAvailable", "SwapFree") if key in told))
    return min((n for n in limits if n > 0), default=1 << 62)


@lru_cache(maxsize=1)
def _cgroup_nbytes() -> int:
    """Return the limit of this process' control group, 0 for none."""
    with contextlib.suppress(OSError):
        with open("/proc/self/cgroup") as file:
            own = [line.strip().split(":", 2) for line in file]
        for _, kinds, at in own:
            path = f"/sys/fs/cgroup{at}/memory.max"
            if "memory" in kinds.split(","):
                path = f"/sys/fs/cgroup/memory{at}/memory.limit_in_bytes"
            with contextlib.suppress(OSError, ValueError), open(path) as limit:
                return int(limit.read())
    return 0
