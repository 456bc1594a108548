"""Opening files and finding datasets in them, with errors that say what is wrong."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from mpishard.errors import FileError, MissingPackageError, MpishardError
from mpishard.io.file.heap import Watched
from mpishard.io.file.journal import check_settled, is_pending
from mpishard.io.file.seen import Mark, changed, held, mark_of, note, of_open
from mpishard.io.file.trust import Path, check_memory, check_regular, is_inside, open_regular, shown, told

_NETCDF3 = (b"CDF\x01", b"CDF\x02", b"CDF\x05")

# of what a stranger's file may ask for
_MOST_CELLS = 1 << 60  # of a dim
_MOST_LINKS = 16  # that lead to a dataset, as HDF5 has it
_MOST_NAMES = 50  # in an error's text
_MOST_SOURCES = 1 << 20  # of a virtual dataset, and of those that it is made of
_ELSEWHERE = object()
# Open MPI opens two more beside a file; where one rank can not, all others wait in that call for ever
_DESCRIPTORS = 4
_TRIES = 20  # to open a file that is written to meanwhile
# of new files: HDF5 1.8 and later read it, and what says where datasets lie has checksums, so that damage is an error
LIBVER = ("v108", "latest")
# From here on HDF5 opens the sources of a file without a lock that was opened without one; before, those that it
# cannot lock, and the file itself under its own name, are fill values without a word.
_SOURCES_UNLOCKED = (1, 14, 4)


def import_h5py() -> Any:
    """Return h5py, imported when it is needed and not before. Not collective."""
    try:
        import h5py
    except ImportError as e:
        raise MissingPackageError(
            "mpishard.io needs h5py", expected="h5py installed", got=e, fix="pip install 'mpishard[io]'"
        ) from e
    return h5py


def opened(path: Path, *, locking: bool | None = False) -> Any:
    """Open a file for reading, without MPI and (if not asked for) without a lock. Not collective.

    Raises
    ------
    FileError
        It is missing, damaged, of another format, no regular file, or was left in the middle of a step; or it is open
        in this process since before it was written to.
    """
    h5py = import_h5py()
    try:
        for _ in range(_TRIES):
            check_settled(path)
            check_regular(path)
            mark = mark_of(path)
            if held(mark) not in (None, mark):
                raise changed(path, "it is open in this process, and was written to meanwhile")
            # Without a lock: read-only shared file systems refuse one, and nobody writes.
            file = h5py.File(path, "r", locking=locking)
            # of device and number some file systems tell a path and a descriptor differently
            own = of_open(file) or mark
            if own[2:] == mark[2:] and not is_pending(path):
                note(file, own)
                return file
            file.close()
        raise changed(path, "it is written to again and again")
    except FileError:
        raise
    except Exception as e:
        raise not_opened(path, e) from e


@contextlib.contextmanager
def looked_at(path: Path) -> Iterator[Any]:
    """Open a file to find datasets in it, not to read cells, for the time of a ``with`` block. Not collective.

    HDF5 never comes back from some damaged heaps; here opening a dataset that has its sources in one is an error.

    Raises
    ------
    FileError
        It cannot be opened, or (at the end) a heap that was asked for is damaged, whatever was made of that meanwhile.
    """
    h5py = import_h5py()
    try:
        watched = Watched(path)
    except Exception as e:
        raise not_opened(path, e) from e
    with watched:
        try:
            with h5py.File(watched, "r") as file:
                yield file
        except Exception as e:
            if watched.damage is None:
                raise
            raise not_opened(path, OSError(watched.damage)) from e
    if watched.damage is not None:
        raise not_opened(path, OSError(watched.damage))


def _check_heaps(path: Path, name: str, external: bool) -> None:
    """Open a dataset as `_followed` does, with an eye on heaps; what else is wrong with it shows there."""
    with looked_at(path) as file, contextlib.suppress(Exception):
        _followed(file, path, name, external, looking=True)


def check_descriptors() -> None:
    """Raise OSError where this process may not open as many files as MPI-IO does for one. Not collective."""
    held: list[int] = []
    try:
        while len(held) < _DESCRIPTORS:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in held:
            os.close(descriptor)


def unreadable(path: Path) -> FileError | None:
    """Return why a file cannot be opened, before all ranks open it together: one that fails there fails for ever.

    Not collective.
    """
    try:
        check_settled(path)
        check_descriptors()
        with open_regular(path) as file:
            magic = file.read(4)
    except FileError as e:
        return e
    except Exception as e:  # noqa: BLE001 (a path of the wrong type, say)
        return not_opened(path, e)
    return not_opened(path, OSError("another format")) if magic in _NETCDF3 else None


def not_opened(path: Path, e: Exception) -> FileError:
    """Return the error for a file that cannot be opened, with what is wrong with it. Not collective."""
    got, fix = f"{type(e).__name__}: {e}", "check that it is complete"
    if not isinstance(path, (str, os.PathLike)):
        got, fix = repr(path), "give a path"
    elif not os.path.exists(path):
        got, fix = "no such file", "check the path, and that every node sees it"
    elif os.path.isdir(path):
        got, fix = "a folder", "name a file in it"
    else:
        magic = b""
        with contextlib.suppress(OSError), open_regular(path) as f:
            magic = f.read(4)
        if magic in _NETCDF3:
            got = "a netCDF-3 file (the classic format), which is not HDF5"
            fix = "convert it once: nccopy -k netCDF-4 in.nc out.nc"
        elif _is_open_here(e):
            fix = "close it where this process has it open, or open it there with h5py.File(path, locking=False)"
    return FileError(
        f"read: cannot open {told(path)!r}",
        expected="an HDF5 (or netCDF-4) file that every rank can read",
        got=got,
        fix=fix,
    )


def _is_open_here(e: Exception) -> bool:
    """Tell whether HDF5 refused a file that this process has open in another way."""
    return isinstance(e, OSError) and ("flag values don't match" in str(e) or "file is already open" in str(e))


def found(file: Any, path: Path, name: str, *, external: bool = False, looked: bool = False) -> Any:
    """Return a dataset of an open file, one whose cells lie in this file or (a virtual one) in others of its folder.

    Not collective.

    Parameters
    ----------
    file, path
        The open file, and where it is.
    name
        Of the dataset, with its groups.
    external
        Whether links and cells may lie outside: anywhere that this user can read.
    looked
        Whether all datasets of the file were opened in `looked_at` before; one that is written to cannot be now.

    Raises
    ------
    FileError
        There is none of that name (the text lists those that are there), or it leads out of the file.
    """
    try:
        dataset = _resolved(file, path, name, external, looked=looked)
        if dataset is not None:
            if _grows(dataset):
                # HDF5 opens its sources to tell how long it is
                check_sources(dataset, path, external=external)
            if dataset.shape is None:
                raise FileError(
                    f"read: {shown(name)} in {told(path)!r} has no cells",
                    expected="a dataset with a shape",
                    got="a null dataspace (h5py.Empty)",
                    fix="name another dataset",
                )
            if max(dataset.shape, default=0) <= _MOST_CELLS:
                return dataset
    except MpishardError:
        raise
    except Exception as e:
        raise damaged(path, name, e) from e
    raise FileError(
        f"read: no dataset {shown(name)} in {os.fspath(path)!r}",
        expected=f"one of {_names(path)}",
        got=shown(name),
        fix="name a dataset of the file",
    )


def _resolved(file: Any, path: Path, name: str, external: bool, *, looked: bool = False) -> Any:
    """Return a dataset, None where there is none of that name."""
    if not looked:
        _check_heaps(path, name, external)
    dataset = _followed(file, path, name, external)
    if dataset is _ELSEWHERE:
        dataset = file.get(name)
    if not isinstance(dataset, import_h5py().Dataset):
        return None
    if dataset.id.get_create_plist().get_external_count():
        if not external:
            raise _outside(path, name, f"cells in {shown(dataset.external[0][0])}, which is no HDF5 file")
        for raw, _, _ in dataset.external:
            for at in filter(os.path.lexists, _places(dataset.file.filename, raw)):
                check_regular(at)
    return dataset


def _places(path: Path, name: str) -> list[str]:
    """Return where HDF5 may look for a file that another one names."""
    folders = [os.path.dirname(at(path)) for at in (os.path.abspath, os.path.realpath)]
    return [os.path.join(folder, name) for folder in [*folders, os.getcwd()]]


def _grows(dataset: Any) -> bool:
    """Tell whether a virtual dataset is as long as its sources."""
    plist = dataset.id.get_create_plist()
    if not dataset.is_virtual or not plist.get_virtual_count():
        return False
    unlimited = import_h5py().h5s.UNLIMITED
    return any(n in (None, unlimited) for n in plist.get_virtual_vspace(0).get_simple_extent_dims(True))


def _followed(file: Any, path: Path, name: str, external: bool, hops: int = 0, *, looking: bool = False) -> Any:
    """Return what a name leads to within its own file, or None; `_ELSEWHERE` where links lead out, to regular files.

    HDF5 waits at a pipe. Who is only ``looking`` does not leave the file.
    """
    h5py = import_h5py()
    if not isinstance(name, str) or "\0" in name:
        return None
    node, left = file, name.split("/")[::-1]
    if name.startswith("/"):
        node = file["/"]
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if not isinstance(node, h5py.Group):
            return None
        link = node.get(part, getlink=True)
        if link is None:
            return None
        if isinstance(link, h5py.HardLink):
            node = node[part]
            continue
        hops += 1
        if hops > _MOST_LINKS:
            raise _outside(path, name, f"more than {_MOST_LINKS} links, one to the other")
        if isinstance(link, h5py.ExternalLink):
            if not external:
                raise _outside(path, name, f"a link to {shown(link.path)} in {shown(link.filename)}")
            at = next(filter(os.path.lexists, _places(path, link.filename)), None)
            if at is None:
                return None
            same = os.path.realpath(at) == os.path.realpath(path)
            rest = "/".join([link.path, *left[::-1]])
            if not same and looking:
                return None
            with contextlib.nullcontext(file) if same else opened(at) as other:
                if not same:
                    _check_heaps(at, rest, external)
                _followed(other, at, rest, external, hops, looking=looking)
            return _ELSEWHERE
        if link.path.startswith("/"):
            node = file["/"]
        left += link.path.split("/")[::-1]
    return node


def _names(path: Path) -> str:
    """Return the names of a file's datasets for an error's text, as many as one can read."""
    h5py = import_h5py()
    names: list[str] = []
    seen = 0

    def visit(at: str, node: Any) -> bool | None:
        nonlocal seen
        seen += 1
        if isinstance(node, h5py.Dataset):
            names.append(at)
        return True if len(names) > _MOST_NAMES or seen > 100 * _MOST_NAMES else None

    with contextlib.suppress(Exception), looked_at(path) as file:
        file.visititems(visit)
    told = sorted(at if at.isprintable() and len(at) <= 200 else shown(at) for at in names[:_MOST_NAMES])
    more = [] if len(names) <= _MOST_NAMES else ["and more"]
    return ", ".join([*told, *more]) or "(the file has none)"


def check_sources(
    dataset: Any,
    path: Path,
    box: Sequence[tuple[int, int]] | None = None,
    *,
    external: bool = False,
    whole: bool = False,
) -> dict[str, Mark]:
    """Open the files that a virtual dataset takes a box from: HDF5 reads fill values where one is not there.

    Not collective. HDF5 ends the process at one that is made of itself, and at a pipe it waits.

    Parameters
    ----------
    dataset, path
        The dataset, and its file.
    box
        (start, stop) per dim; None for all cells.
    external
        Whether sources may lie outside of the file's folder.
    whole
        Whether the dataset takes the whole of each source, as one in parts does.

    Returns
    -------
    dict
        Path of a source -> what it was before.

    Raises
    ------
    FileError
        One of them is missing or damaged, lies outside, or is made of the dataset itself.
    """
    marks: dict[str, Mark] = {}
    if dataset.is_virtual:
        _check_sources(dataset, path, box, external, (), {}, marks, whole=whole)
    return marks


def _check_sources(
    dataset: Any,
    path: Path,
    box: Sequence[tuple[int, int]] | None,
    external: bool,
    above: tuple[Any, ...],
    known: dict[Any, int],
    marks: dict[str, Mark],
    *,
    whole: bool = False,
) -> int:
    """Return how many datasets HDF5 opens to read this one."""
    folders = [os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path))]
    own = (os.path.realpath(path), dataset.name)
    old = import_h5py().version.hdf5_version_tuple < _SOURCES_UNLOCKED
    if own in above or len(above) > _MOST_LINKS:
        raise _outside(path, dataset.name, "a virtual dataset that is made of itself", "ask who made it")
    count = 0
    for space, *given, _ in dataset.virtual_sources():
        file_name, name = map(source_name, given)
        lo, hi = space.get_select_bounds() if space.get_select_npoints() else ((1,), (0,))
        if box is not None and any(b < start or a >= stop for a, b, (start, stop) in zip(lo, hi, box)):
            continue
        if file_name is None or name is None:
            if not external:
                raise _outside(path, dataset.name, f"sources by a pattern, {shown(given[0])}:{shown(given[1])}")
            continue
        places = [os.fspath(path)] if file_name == "." else _places(path, file_name)[:2]
        at = next(filter(os.path.lexists, places), places[0])
        if not external and not any(is_inside(at, folder) for folder in folders):
            raise _outside(path, dataset.name, f"a source outside of its folder, {shown(file_name)}")
        missed = old and file_name != "." and os.path.realpath(at) == (*above, own)[0][0]
        if (at, name) not in known:
            # as HDF5 does; closed again: it does not open a file twice in two ways, and says nothing
            locking = None if old and not missed else False
            if file_name != "." and at not in marks and os.path.exists(at):
                marks[at] = mark_of(at)
            with contextlib.nullcontext(dataset.file) if file_name == "." else opened(at, locking=locking) as file:
                source, deeper = _resolved(file, at, name, external), 0
                if source is None:
                    found(file, at, name)  # raises
                if whole and source.shape != (extent := tuple(b - a + 1 for a, b in zip(lo, hi))):
                    raise OSError(f"a part of shape {source.shape} in place of {extent}, {shown(name)} of {at}")
                if source.is_virtual:
                    deeper = _check_sources(source, at, None, external, (*above, own), known, marks)
                known[at, name] = 1 + deeper
        if missed:
            got = f"a source in the file itself, by its name {shown(file_name)}, which this HDF5 does not see"
            raise _outside(path, dataset.name, got, "name the source's file '.', or use HDF5 1.14.4 or newer")
        count += known[at, name]
    if count > _MOST_SOURCES:
        raise _outside(path, dataset.name, f"{count} sources, of each other", "ask who made it")
    return count


def virtual_source(path: str, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a source of a virtual dataset: a file and a dataset of these names. Not collective.

    HDF5 reads patterns there, of which `%` is the sign, and `%%` one sign: see `source_name`.
    """
    path, name = (text.replace("%", "%%") for text in (path, name))
    return import_h5py().VirtualSource(path, name, shape=shape, dtype=dtype)


def source_name(text: str) -> str | None:
    """Return the name that HDF5 opens for that of a virtual dataset's source; None for a pattern. Not collective."""
    parts = text.split("%%")
    return None if any("%" in part for part in parts) else "%".join(parts)


def check_chunks(dataset: Any, name: str) -> None:
    """Refuse chunks that take more memory than there is: HDF5 reads whole ones. Not collective."""
    if dataset.chunks:
        check_memory(math.prod(dataset.chunks) * dataset.id.get_type().get_size(), f"a chunk of {shown(name)}")


def is_written(dataset: Any) -> bool:
    """Tell whether all of a dataset lies in its file: of cells that were never written, nothing may. Not collective.

    To look for the chunks of a box would go through all of them for each; to count them goes through them once.
    """
    if dataset.chunks is None:
        return dataset.id.get_offset() is not None
    if not hasattr(dataset.id, "get_num_chunks"):  # HDF5 before 1.10.5
        return bool(dataset.id.get_space_status() == import_h5py().h5d.SPACE_STATUS_ALLOCATED)
    every = math.prod(-(-n // extent) for n, extent in zip(dataset.shape, dataset.chunks))
    return bool(dataset.id.get_num_chunks() >= every)


def _outside(path: Path, name: str, got: str, fix: str | None = None) -> FileError:
    return FileError(
        f"read: {shown(name)} of {os.fspath(path)!r} leads out of its file",
        expected="cells in this file, or in files of the same folder",
        got=got,
        fix=fix or "where you trust who made it: external=True",
    )


def damaged(path: Path, name: str, e: Exception) -> FileError:
    """Return the error for a dataset whose cells cannot be read. Not collective."""
    return FileError(
        f"read: cannot read {shown(name)} of {told(path)!r}",
        expected="the whole dataset in the file",
        got=f"{type(e).__name__}: {e}",
        fix="check that the file is complete",
    )


def closed(path: Path, name: str) -> FileError:
    """Return the error for a dataset whose file was closed by the program itself. Not collective."""
    return FileError(
        f"read: {shown(name)} of {told(path)!r} is closed",
        expected="an io.Dataset that is open, on every rank",
        got="one whose close() was called, or whose with block is over",
        fix="take samples before that, or open it anew",
    )


def not_written(path: Path, e: Exception) -> FileError:
    """Return the error for a file that cannot be written. Not collective."""
    fix = "make the folder, or choose another one"
    # what h5py says of arguments: of the file and its folder it says OSError or RuntimeError
    if isinstance(e, (TypeError, ValueError, LookupError)):
        fix = "give what this is about otherwise: a name, an attribute or an option"
    elif _is_open_here(e):
        fix = "close it where this process has it open"
    return FileError(
        f"write: cannot write {told(path)!r}",
        expected="a folder that can be written to, room in it, and names, attributes and options that HDF5 takes",
        got=f"{type(e).__name__}: {e}",
        fix=fix,
    )
