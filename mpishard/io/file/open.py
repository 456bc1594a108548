"""Opening files and finding datasets in them, with errors that say what is wrong."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpishard.errors import FileError, MissingPackageError, described
from mpishard.io.file.journal import heal

Path = str | os.PathLike[str]

_FALLOC_FL_KEEP_SIZE = 1  # fallocate(2)

_NETCDF3 = (b"CDF\x01", b"CDF\x02", b"CDF\x05")


def import_h5py() -> Any:
    """Return h5py, imported when it is needed and not before. Not collective."""
    try:
        import h5py
    except ImportError as e:
        raise MissingPackageError(
            described("mpishard.io needs h5py", expected="h5py installed", got=e, fix="pip install 'mpishard[io]'")
        ) from e
    return h5py


def opened(path: Path) -> Any:
    """Open a file for reading, without MPI and without a lock. Not collective.

    Raises
    ------
    FileError
        It is missing, damaged, or of another format.
    """
    h5py = import_h5py()
    heal(path)
    try:
        # Without a lock: read-only shared file systems refuse one, and nobody writes.
        return h5py.File(path, "r", locking=False)
    except (OSError, RuntimeError) as e:
        raise not_opened(path, e) from e


def unreadable(path: Path) -> FileError | None:
    """Return why a file cannot be opened, before all ranks open it together: one that fails there fails for ever.

    Not collective.
    """
    try:
        heal(path)
        with open(path, "rb") as file:
            magic = file.read(4)
    except FileError as e:
        return e
    except OSError as e:
        return not_opened(path, e)
    return not_opened(path, OSError("another format")) if magic in _NETCDF3 else None


def not_opened(path: Path, e: Exception) -> FileError:
    """Return the error for a file that cannot be opened, with what is wrong with it. Not collective."""
    got, fix = f"{type(e).__name__}: {e}", "check that it is complete"
    if not os.path.exists(path):
        got, fix = "no such file", "check the path, and that every node sees it"
    elif os.path.isdir(path):
        got, fix = "a folder", "name a file in it"
    else:
        try:
            with open(path, "rb") as f:
                magic = f.read(4)
        except OSError:
            magic = b""
        if magic in _NETCDF3:
            got = "a netCDF-3 file (the classic format), which is not HDF5"
            fix = "convert it once: nccopy -k netCDF-4 in.nc out.nc"
    return FileError(
        described(
            f"read: cannot open {os.fspath(path)!r}",
            expected="an HDF5 (or netCDF-4) file that every rank can read",
            got=got,
            fix=fix,
        )
    )


def found(file: Any, path: Path, name: str) -> Any:
    """Return a dataset of an open file.

    Not collective.

    Raises
    ------
    FileError
        There is none of that name; the text lists those that are there.
    """
    h5py = import_h5py()
    dataset = file.get(name)
    if isinstance(dataset, h5py.Dataset) and dataset.shape is not None:
        return dataset
    names: list[str] = []
    file.visititems(lambda at, node: names.append(at) if isinstance(node, h5py.Dataset) else None)
    raise FileError(
        described(
            f"read: no dataset {name!r} in {os.fspath(path)!r}",
            expected=f"one of {', '.join(sorted(names)) or '(the file has none)'}",
            got=repr(name),
            fix="name a dataset of the file",
        )
    )


def check_sources(dataset: Any, path: Path, box: Sequence[tuple[int, int]]) -> None:
    """Open the files that a virtual dataset takes a box from: HDF5 reads fill values where one is not there.

    Not collective.

    Raises
    ------
    FileError
        One of them is missing or damaged.
    """
    if not dataset.is_virtual:
        return
    folder = os.path.dirname(os.path.abspath(path))
    for space, file_name, name, _ in dataset.virtual_sources():
        lo, hi = space.get_select_bounds() if space.get_select_npoints() else ((1,), (0,))
        if file_name == "." or any(b < start or a >= stop for a, b, (start, stop) in zip(lo, hi, box)):
            continue
        at = os.path.join(folder, file_name)
        # closed again: HDF5 does not open a file twice in two ways, and says nothing
        with opened(at) as file:
            found(file, at, name)


@contextlib.contextmanager
def noted() -> Iterator[list[BaseException]]:
    """Collect what h5py finds wrong while it lets objects go, for the time of a ``with`` block.

    Not collective. A disk may be full only when the last cells of an object are flushed. h5py can then but
    print the error, through `sys.excepthook`: one that ends the job would.
    """
    lost: list[BaseException] = []
    hooks = sys.excepthook, sys.unraisablehook
    sys.excepthook = lambda kind, error, trace: lost.append(error)  # noqa: ARG005
    sys.unraisablehook = lambda info: lost.append(info.exc_value or RuntimeError(info.err_msg))
    try:
        yield lost
    finally:
        sys.excepthook, sys.unraisablehook = hooks


def shut(file: Any, make_room: Callable[[], object]) -> Exception | None:
    """Close a file that was written, and return the error where that fails.

    Not collective, unless the file is open on several ranks. Where there is no room for what HDF5 still holds,
    ``make_room`` is called before it is tried again: what it then writes is lost anyway.
    """
    error: Exception | None = None
    for _ in range(2):
        try:
            file.close()
        except (OSError, RuntimeError, ValueError) as e:  # noqa: PERF203
            error = error or e
            make_room()
        else:
            return error
    # it would be closed once more when it is collected, by a thread that can do nothing about it
    file.id.locked = 1
    return error


def no_room(folder: Path, nbytes: int) -> OSError | None:
    """Return the error of writing ``nbytes`` to a file in ``folder`` where it is known before. Not collective.

    HDF5 cannot close a file that it could not write whole; old versions crash.
    """
    disk = os.statvfs(folder)
    free, most = disk.f_bavail * disk.f_frsize, resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if nbytes > free:
        return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {nbytes} bytes to write, {free} bytes free")
    if most != resource.RLIM_INFINITY and nbytes > most:
        return OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: {nbytes} bytes, the limit is {most} (ulimit -f)")
    return None


def reserve(path: Path, nbytes: int) -> None:
    """Allocate the blocks of what is appended to a file next at once, where the file system can. Not collective.

    The length of the file stays: HDF5 need not know. Python's ``posix_fallocate`` would change it, and write to
    every block where the file system cannot allocate.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None:
        return
    with open(path, "r+b") as file:
        end = os.fstat(file.fileno()).st_size
        failed = fallocate(file.fileno(), _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(end), ctypes.c_int64(nbytes))
        if failed and ctypes.get_errno() == errno.ENOSPC:
            os.ftruncate(file.fileno(), end)  # it may have taken all that there was
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {nbytes} bytes to write", str(path))


def empty(path: Path | None) -> None:
    """Make room of a file that is lost. Not collective."""
    if path is not None:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)


def damaged(path: Path, name: str, e: Exception) -> FileError:
    """Return the error for a dataset whose cells cannot be read. Not collective."""
    return FileError(
        described(
            f"read: cannot read {name!r} of {os.fspath(path)!r}",
            expected="the whole dataset in the file",
            got=f"{type(e).__name__}: {e}",
            fix="check that the file is complete",
        )
    )


def not_written(path: Path, e: Exception) -> FileError:
    """Return the error for a file that cannot be written. Not collective."""
    return FileError(
        described(
            f"write: cannot write {os.fspath(path)!r}",
            expected="a folder that can be written to, room in it, and names and attributes that HDF5 takes",
            got=f"{type(e).__name__}: {e}",
            fix="make the folder, or choose another one",
        )
    )
