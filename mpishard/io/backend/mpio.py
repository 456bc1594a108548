"""Back-end mpio: all ranks write one file, collectively, through MPI-IO.

Only low-level calls: the high-level ones hang where a rank has no cells, and lose the collective mode. Types
are converted in numpy beforehand: HDF5 would convert too, and write independently without a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.collective.gather_slabs import cells_of
from mpishard.comm.file_hints import info_of
from mpishard.comm.loaded import libraries
from mpishard.comm.mesh import Group
from mpishard.errors import MpishardError
from mpishard.io.backend.job import FAILURES, STAGED_NBYTES, Job, finish, given, is_host_dense
from mpishard.io.file.close import abandon, empty
from mpishard.io.file.hyperslab import BlockReader
from mpishard.io.file.journal import Journal, taken_back
from mpishard.io.file.open import LIBVER, check_descriptors, import_h5py, not_opened
from mpishard.io.file.room import check_room, no_room
from mpishard.io.file.schema import begun, create, grow, step_of
from mpishard.io.file.seen import mark_of
from mpishard.io.file.trust import Path
from mpishard.layout.slab import Box

# Below the 2 GiB that MPI's file layers count.
DIRECT_NBYTES = 1 << 30

_IO_MODES = {
    0: "no collective",
    1: "chunk independent",
    2: "chunk collective",
    3: "chunk mixed",
    4: "contiguous collective",
}
# device and number of files that HDF5 cuts to the length that it knows when the process ends
_unclosed: set[tuple[int, int]] = set()
COLLECTIVE = ("chunk collective", "contiguous collective")
_CAUSES = (
    "collective was not asked for",
    "a type is converted",
    "data are transformed",
    "MPI types are off by environment",
    "a selection is neither simple nor a scalar",
    "the dataset is neither contiguous nor chunked",
    "this HDF5 cannot filter in parallel",
    "a read through rank 0",
)


def write_mpio(job: Job) -> str:
    """Write the file from all ranks at once.

    Collective. Every rank makes the same number of calls, also one that has no cells, and also after an error:
    the others are waiting in them. Returns the mode that MPI-IO in fact used.
    """
    comm = job.group.comm
    file: Any = None
    journal: Journal | None = None
    closed: bool | None = None
    held: list[Any] = []
    scale = value = None
    modes: set[str] = set()
    try:
        error: BaseException | None = None
        step: int | None = None
        with job.together():
            # some MPI-IO never come back from a collective write to a full disk
            full = no_room(job.path.parent, job.nbytes)
            if full is not None:
                raise full
            if job.group.rank == 0 and job.exists:
                # takes room, too
                journal = begun(job.path)
            check_room(job.path, job.form, exists=job.exists, filtered=True)
            check_descriptors()
        # the calls that follow are collective: all ranks or none
        try:
            with job.together(), guard.waiting("io.write", (), comm):
                file = _opened(job.partial, "r+" if job.exists else "w", job.group, job.hints, job.alignment)
        except MpishardError:
            # where one rank has it the others must hear: to close it takes all of them
            if comm.allreduce(int(file is not None)):
                _dropped(file)
                closed = False
            file = None
            raise
        with job.together(), guard.waiting("io.write", (), comm):
            if not job.exists:
                held += create(file, job.form)
            if job.form.append is not None:
                step = step_of(file, job.form, job.path)
                scale = file[job.form.append]
                value = np.asarray([job.form.scales.get(job.form.append, step)]).astype(scale.dtype)
            datasets = {v.name: file[v.name] for v in job.form.variables}
        if step is not None:
            with job.together(), guard.waiting("io.write", (), comm):
                grow(file, job.form, step + 1)
        for name, layout, local in job.blocks():
            most = DIRECT_NBYTES if is_host_dense(local) else STAGED_NBYTES
            slabs = given(layout, job.group.rank, most, local.element_size())
            calls, _ = guard.agree(comm, None, numbers=(len(slabs), 0))
            at = layout.offset(job.tensors[name].mesh.coords)
            with guard.waiting("io.write", (), comm):
                error = _write(datasets[name], slabs, calls, local, at, step, modes) or error
        if step is not None:
            error = _stamp(scale, job.group, value, step) or error
        # on disk before success is told
        failed = _flushed(file, job.group)
        error = error or failed
        wrong = bool(comm.allreduce(int(error is not None)))
        if wrong and job.group.rank == 0:
            # room for what is left to write at the close
            with contextlib.suppress(OSError):
                empty(job.scrap) if journal is None else journal.put_back()
        failed = _closed(file, job.group, flushed=not wrong)
        closed = failed is None
        error = failed or error or (job.lost[0] if job.lost else None)
        # a file that was emptied says nothing
        if error is None and not wrong and job.group.rank == 0:
            error = _too_short(job)
        if comm.allreduce(int(error is not None)) and journal is not None:
            # before the others learn of it
            taken_back(journal, closed=bool(closed))
            journal = None
        job.agree(error)
        with job.together():
            if job.group.rank == 0:
                finish(job)
                if journal is not None:
                    journal.commit()
                    journal = None
    finally:
        if file and closed is None:
            closed = _closed(file, job.group) is None
        if closed is False and job.exists:
            with contextlib.suppress(OSError):
                _unclosed.add(mark_of(job.path)[:2])
        if job.group.rank == 0:
            job.discard()
        if journal is not None:
            taken_back(journal, closed=closed is not False)
    return _told(modes, comm)


def is_unclosed(path: Path) -> bool:
    """Tell whether a file is one that this process could not close after a step. Not collective."""
    return mark_of(path)[:2] in _unclosed


@contextlib.contextmanager
def opened_together(path: Path, group: Group) -> Iterator[Any]:
    """Open a file for reading on all ranks at once, for the time of a ``with`` block.

    Collective; the file must be one that every rank can open (see `unreadable`).

    Raises
    ------
    FileError
        It is damaged, or of another format, on any rank.
    """
    file, error = None, None
    try:
        with guard.waiting("io.read", (), group.comm):
            file = _opened(path, "r", group)
    except FAILURES as e:
        error = not_opened(path, e)
    try:
        guard.agree(group.comm, error)
    except MpishardError:
        _dropped(file)
        raise
    try:
        yield file
    finally:
        _closed(file, group, flushed=True)


def read_mpio(dataset: Any, group: Group, block: BlockReader) -> tuple[str, Exception | None]:
    """Read every rank's part of a dataset, of a file opened together, in the same collective calls.

    Collective. Returns the mode in fact used, and this rank's error.
    """
    comm = group.comm
    modes: set[str] = set()
    error: Exception | None = None
    count, _ = guard.agree(comm, None, numbers=(len(block.pieces), 0))
    dxpl = _collective()
    steps = block.read(dataset, dxpl)
    for i in range(count):
        with guard.waiting("io.read", (), comm):
            calls = block.calls
            try:
                # an error has ended the steps
                if i < len(block.pieces) and error is None:
                    next(steps)
            except FAILURES as e:
                error = e
            try:
                # the others are in this call, also where an error came before it
                if block.calls == calls:
                    _nothing(dataset, dxpl, write=False)
            except FAILURES as e:
                error = error or e
            modes.add(_mode(dxpl))
    steps.close()
    return _told(modes, comm), error


def _opened(
    path: Path,
    mode: str,
    group: Group,
    hints: Mapping[str, Any] | None = None,
    alignment: tuple[int, int] | None = None,
) -> Any:
    h5py = import_h5py()
    options = {} if alignment is None else {"alignment_threshold": alignment[0], "alignment_interval": alignment[1]}
    with info_of(hints) as info:
        return h5py.File(path, mode, driver="mpio", libver=LIBVER, comm=group.comm, info=info, **options)


def _dropped(file: Any) -> None:
    """Keep a file that another rank could not open: to close it takes all of them."""
    if file is not None:
        abandon(file)


def _flushed(file: Any, group: Group) -> Exception | None:
    try:
        with guard.waiting("io.write", (), group.comm):
            file.flush()
    except FAILURES as e:
        return e
    return None


def _closed(file: Any, group: Group, *, flushed: bool = False) -> Exception | None:
    """Close a file, one that could not be flushed on some rank only when it can be now on all (see `abandon`)."""
    if not flushed:
        error = _flushed(file, group)
        if group.comm.allreduce(int(error is not None)):
            abandon(file)
            return error or OSError("another rank cannot flush it")
    try:
        with guard.waiting("closing a file", (), group.comm):
            file.close()
    except FAILURES as e:
        # HDF5 ends the process when such a file is closed again, as it is when it is collected
        file.id.locked = 1
        return e
    return None


def _collective() -> Any:
    h5py = import_h5py()
    dxpl = h5py.h5p.create(h5py.h5p.DATASET_XFER)
    dxpl.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
    return dxpl


def _write(
    dataset: Any,
    slabs: list[Box],
    calls: int,
    local: Tensor,
    offset: tuple[int, ...],
    step: int | None,
    modes: set[str],
) -> Exception | None:
    dxpl = _collective()
    error: Exception | None = None
    for i in range(calls):
        slab: tuple[Any, Any, Any] | None = None
        try:
            # before the call that all ranks are in: who has no memory for a copy still makes it
            slab = _slab(dataset, local, offset, slabs[i], step) if i < len(slabs) else None
        except FAILURES as e:
            error = error or e
        try:
            if slab is None:
                _nothing(dataset, dxpl, write=True)
            else:
                dataset.id.write(*slab, None, dxpl)
        except FAILURES as e:
            error = error or e
        modes.add(_mode(dxpl))
    return error


def _slab(dataset: Any, local: Tensor, offset: tuple[int, ...], box: Box, step: int | None) -> tuple[Any, Any, Any]:
    """Return how a slab lies in memory and in the file, and its cells as the file has them."""
    h5s = import_h5py().h5s
    array = cells_of(local, offset, box).numpy().astype(dataset.dtype, copy=False)
    space = dataset.id.get_space()
    start = tuple(lo for lo, _ in box)
    shape = tuple(hi - lo for lo, hi in box)
    if step is not None:
        start, shape = (step, *start), (1, *shape)
    if shape:
        space.select_hyperslab(start, shape)
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR), space, array


def _nothing(dataset: Any, dxpl: Any, *, write: bool) -> None:
    h5s = import_h5py().h5s
    space, memory = dataset.id.get_space(), h5s.create_simple((1,))
    space.select_none()
    memory.select_none()
    array = np.empty(1, dataset.dtype)
    (dataset.id.write if write else dataset.id.read)(memory, space, array, None, dxpl)


def _stamp(scale: Any, group: Group, value: Any, step: int) -> Exception | None:
    """Write the step's value on its scale: one cell, given by the first rank."""
    dxpl = _collective()
    try:
        if group.rank:
            _nothing(scale, dxpl, write=True)
        else:
            space = scale.id.get_space()
            space.select_hyperslab((step,), (1,))
            scale.id.write(import_h5py().h5s.create_simple((1,)), space, value, None, dxpl)
    except FAILURES as e:
        return e
    return None


def _too_short(job: Job) -> Exception | None:
    """Look at the closed file once more: MPI-IO may not have told of a full disk."""
    try:
        h5py = import_h5py()
        with h5py.File(job.partial, "r", locking=False) as file:
            for v in job.form.variables:
                file[v.name].id.get_storage_size()
    except FAILURES as e:
        return e
    return None


# what MPI-IO did


def _mode(dxpl: Any) -> str:
    mode, library = ctypes.c_int(-1), _hdf5()
    if library is None or library.H5Pget_mpio_actual_io_mode(ctypes.c_int64(dxpl.id), ctypes.byref(mode)) < 0:
        return "unknown"
    text = _IO_MODES.get(mode.value, "unknown")
    if text in COLLECTIVE:
        return text
    own, others = ctypes.c_uint32(0), ctypes.c_uint32(0)
    if library.H5Pget_mpio_no_collective_cause(ctypes.c_int64(dxpl.id), ctypes.byref(own), ctypes.byref(others)) < 0:
        return text
    causes = [cause for bit, cause in enumerate(_CAUSES) if (own.value | others.value) >> bit & 1]
    return f"{text}: {', '.join(causes)}" if causes else text


def _told(modes: set[str], comm: Any) -> str:
    """Return the modes as one text, and warn where one of them was not collective. Collective."""
    told = ", ".join(sorted(modes)) or "no cells"
    odd = [m for m in modes if m not in COLLECTIVE and (": " in m)]
    error: Warning | None = None
    if odd:
        try:
            warnings.warn(f"mpishard.io: MPI-IO was not collective ({'; '.join(odd)})", RuntimeWarning, stacklevel=4)
        except RuntimeWarning as e:
            error = e
    # what this rank's modes were, the others do not know; the user's filters make errors of warnings
    guard.agree(comm, error)
    return told


_library: list[Any] = []


def _hdf5() -> Any:
    """Return the HDF5 library that h5py has loaded, or None."""
    if not _library:
        _library.append(None)
        import_h5py()
        with contextlib.suppress(OSError):
            for path in libraries(r"libhdf5(_openmpi|_mpich)?(-\w+)?\.so[.\d]*"):
                library = ctypes.CDLL(path)
                if hasattr(library, "H5Pget_mpio_actual_io_mode"):
                    _library[0] = library
    return _library[0]
