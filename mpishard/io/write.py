"""Writing ShardTensors as the datasets of one HDF5 file."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import pickle
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpishard.autograd.argument import require
from mpishard.comm import counter, guard
from mpishard.comm.file_hints import info_of
from mpishard.comm.mesh import CartMesh
from mpishard.comm.null import no_values
from mpishard.errors import FileError, LayoutError, MeshError, MpishardError
from mpishard.io.backend.choice import choose_backend, tell
from mpishard.io.backend.job import FAILURES, Job
from mpishard.io.backend.mpio import is_unclosed, write_mpio
from mpishard.io.backend.root import write_root
from mpishard.io.backend.virtual import prune, write_virtual
from mpishard.io.file.dtype import numpy_dtype
from mpishard.io.file.excepthook import noted
from mpishard.io.file.journal import heal
from mpishard.io.file.open import import_h5py, not_written
from mpishard.io.file.schema import (
    Schema,
    Variable,
    any_filtered,
    are_chunks,
    check_places,
    checked_dims,
    chunks_of,
    named,
    option,
    place_of,
)
from mpishard.io.file.seen import held, mark_of
from mpishard.io.file.trust import (
    absolute,
    check_length,
    check_replaceable,
    is_text,
    open_own,
    require_text,
    shown,
    told,
)
from mpishard.io.viewer.grid import stored
from mpishard.io.viewer.vtkhdf import check_vtkhdf, write_vtkhdf
from mpishard.io.viewer.xdmf import check_xdmf, write_xdmf
from mpishard.tensor import ShardTensor

_WAYS = {"mpio": write_mpio, "virtual": write_virtual, "root": write_root}


# attributes of datasets in which HDF5 writes without a look at what they are: others end the process
_KEPT = ("DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST")


class Written(NamedTuple):
    """How a file was written: the back-end and the reason for it, and the mode in which cells were written."""

    backend: str
    reason: str
    mode: str


@counter.named("io.write")
def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, ShardTensor],
    attrs: Mapping[str, Any] | None = None,
    *,
    backend: str | None = None,
    append: str | None = None,
    chunks: Any = None,
    compression: Any = None,
    dims: Any = None,
    scales: Mapping[str, Any] | None = None,
    variable_attrs: Mapping[str, Mapping[str, Any]] | None = None,
    xdmf: bool = False,
    vtkhdf: bool = False,
    hints: Mapping[str, Any] | None = None,
    alignment: tuple[int, int] | None = None,
    locking: bool | str | None = None,
) -> Written:
    """Write ShardTensors as the datasets of an HDF5 file; one that is there is replaced, or appended to.

    Collective over the mesh. A rank holds at most 64 MiB besides its blocks. A new file appears under its name
    when it is complete, and not at all where writing fails: what was there before stays.

    Parameters
    ----------
    path
        The file, on a file system that rank 0 sees (with ``"mpio"`` and ``"virtual"``: every rank).
    tensors
        Name -> tensor, all on one mesh. A name may have groups: ``"fields/t"``.
    attrs
        Attributes of the file.
    backend
        ``"mpio"``, ``"virtual"`` or ``"root"``: see `choose_backend`, which says what None means. All give the
        same datasets.
    append
        Name of an unlimited first dim, such as ``"time"``: every dataset of the file along it gets one step more, its
        tensor: all of them at every call. The file is made where there is none; else the step is written into it, and
        taken back where that fails. A job that is killed in the middle of a step leaves a journal (``.NAME.undo``)
        beside the file: the next call of `write` for it, or `heal`, puts it back as it was before the step; until
        then reading it is an error. It must be a regular file, by its own and only name, whose datasets lie in it.
    chunks
        Chunk shape of the datasets, or True for one that follows the decomposition; without the dim appended
        along. One for all, or name -> chunks.
    compression
        As h5py has it: ``"gzip"``, ``"lzf"``, or a gzip level. One for all, or name -> compression.
    dims
        Names of each dataset's dims, as in netCDF: name -> names, or one sequence for all. Where some dims have
        names, or the file is appended to, others are named by place and extent: ``"dim0_64"``. A dataset with the
        name of a dim gives its values, and lies along it alone.
    scales
        Dim name -> its values (of the dim appended along: the step's value), kept as dimension scales.
    variable_attrs
        Dataset name -> its attributes; those of a dim's values too: ``{"time": {"units": "hours since 2000-01-01"}}``.
    xdmf
        Whether to write a companion, with the suffix ``.xdmf``, that ParaView opens: grids at the values of their
        scales.
    vtkhdf
        Whether to write a companion, with the suffix ``.vtkhdf``, that ParaView opens: images of even spacing.
    hints, alignment
        For mpio: hints for MPI-IO, and (threshold, interval) in bytes of HDF5's objects in the file.
    locking
        For virtual and root: whether HDF5 locks the file, as of `h5py.File`: False where the file system has no
        locks, ``"best-effort"`` where it may. None: what ``HDF5_USE_FILE_LOCKING`` says, else HDF5's own default.
        (Through MPI-IO it takes no locks; this library reads without them.)

    Returns
    -------
    Written
        The back-end, why it was taken, and the mode that was in fact used. Rank 0 prints a choice the first
        time that it is made.

    Raises
    ------
    FileError
        The file cannot be written.
    LayoutError
        Names of dims, or scales, that do not fit.
    MeshError
        There is no ShardTensor, or they live on different meshes.
    UnsupportedDtypeError
        HDF5 has no such type.
    UnsupportedOperationError
        The back-end that is asked for cannot work here.
    MissingPackageError
        h5py is not installed.

    Notes
    -----
    Not differentiable. Attributes, scales and their names are those of rank 0; of a file that is appended to,
    attributes, dims, other scales, chunks and compression are those of the first step, and what later ones give is not
    looked at. A step is appended in place: a job that is killed in the middle of that may leave a file that HDF5 cannot
    open until it is healed (see ``append``). With ``"root"`` a rank waits for its turn to hand over its slabs: give
    ``MPISHARD_TIMEOUT`` the time that the whole file takes. A file and the ``.parts-`` folder of ``"virtual"`` belong
    together: move both.

    Examples
    --------
    >>> ms.io.write("out.h5", {"temperature": x}, attrs={"title": "after 100 steps"})
    >>> ms.io.write("run.h5", {"t": x}, append="time", dims=("y", "x"), scales={"time": 0.5}, chunks=True)
    """
    mesh = _mesh_of(tensors)
    group = mesh.all_ranks
    error: Exception | None = None
    choice = form = own = None
    exists = filtered = False
    nbytes, packed = 0, b""
    given_hints: dict[str, str] = {}
    signature = "io.write"
    try:
        _check_meshes(tensors)
        each = [f"{name}: {x.sharding!r} {x.dtype}" for name, x in tensors.items()]
        signature = (
            f"io.write to {told(path)}: {'; '.join(each)}, append={append!r}, chunks={chunks!r}, "
            f"compression={compression!r}, xdmf={xdmf}, vtkhdf={vtkhdf}, alignment={alignment}, hints={hints}, "
            f"locking={locking}"
        )
        if mesh.device.type == "meta":
            raise no_values("io.write")
        own = absolute(path)
        import_h5py()
        for argument, value in {
            "attrs": attrs,
            "variable_attrs": variable_attrs,
            "scales": scales,
            "hints": hints,
        }.items():
            if value is not None:
                require("io.write", argument, value, Mapping, "give {name: value}")
        if append is not None:
            require("io.write", "append", append, str, "give the name of the dim that grows, as 'time'")
        given_hints = _hints(hints)
        _check_alignment(alignment)
        form = _form(tensors, attrs, append, chunks, compression, dims, scales, variable_attrs)
        _check_companions(own, [suffix for suffix, wanted in ((".xdmf", xdmf), (".vtkhdf", vtkhdf)) if wanted])
        nbytes = sum(math.prod(x.sharding.shape) * x.dtype.itemsize for x in tensors.values())
        filtered = any(v.compression is not None for v in form.variables)
        choice = choose_backend(mesh, nbytes, backend, append=append is not None, filtered=filtered, path=own)
        signature += f" through {choice.name}"
        if choice.name == "virtual" or vtkhdf:
            require_text(own, "write")
        if group.rank == 0:
            check_replaceable(own)
            heal(own, writing=True)
            if append is not None:
                exists = _may_append(own)
            if not exists:
                check_length(own)
            # before a file is replaced, or has one step more
            for wanted, check in ((xdmf, check_xdmf), (vtkhdf, check_vtkhdf)):
                if wanted:
                    check(own, stored(own, form) if exists else form)
            # a file that is there has its own filters
            filtered = filtered or (exists and choice.name == "mpio" and any_filtered(own, tensors))
            packed = pickle.dumps((form, secrets.token_hex(6), exists, own, filtered))
    except MpishardError as e:
        error = e
    except FAILURES as e:
        error = not_written(path, e)
    guard.agree(group.comm, error, signature)
    assert form is not None
    assert choice is not None
    # rank 0's, so that ranks cannot disagree
    form, token, exists, own, filtered = _from_root(group.comm, packed, path)
    choice = choose_backend(mesh, nbytes, backend, append=append is not None, filtered=filtered, path=own)
    tell(mesh, choice, "write")
    with noted() as lost:
        placed = {place_of(name): x for name, x in tensors.items()}
        job = Job(own, group, placed, form, token, exists, given_hints, alignment, locking, lost, set())
        mode = _WAYS[choice.name](job)
    if group.rank == 0:
        error = _tidy(job, [w for w, wanted in ((write_xdmf, xdmf), (write_vtkhdf, vtkhdf)) if wanted])
    if xdmf or vtkhdf:
        guard.agree(group.comm, error)
    return Written(choice.name, choice.reason, mode)


def _check_companions(path: Path, suffixes: Sequence[str]) -> None:
    if path.suffix in suffixes:
        raise FileError(
            f"write: {os.fspath(path)!r} has the name of its own companion",
            expected=f"another suffix than {path.suffix!r}, as '.h5': the companion would take the file's place",
            got=path.name,
            fix=f"name it {path.with_suffix('.h5').name!r}, or leave {path.suffix[1:]} out",
        )


def _tidy(job: Job, companions: Sequence[Callable[[Path, Schema], None]]) -> MpishardError | None:
    """Remove what earlier files of this name have left, and write the companions. One rank calls it."""
    with contextlib.suppress(OSError):
        prune(job.path, job.replaced)
    try:
        for write_companion in companions:
            write_companion(job.path, job.form)
    except FAILURES as e:
        return job.failed(e)
    return None


def _may_append(path: Path) -> bool:
    """Tell whether there is a file to append to; one that is changed in place is regular, no link, of one name."""
    if not os.path.lexists(path):
        return False
    try:
        open_own(path, mine=False).close()
    except OSError as e:
        raise FileError(
            f"write: cannot append to {os.fspath(path)!r}",
            expected="a regular file that can be written to, by its own and only name",
            got=f"{type(e).__name__}: {e}",
            fix=f"name the file itself ({os.path.realpath(path)}), or write another one",
        ) from e
    if is_unclosed(path):
        raise FileError(
            f"write: cannot append to {os.fspath(path)!r}",
            expected="a file that this process has closed: HDF5 cuts others to their old length when it ends",
            got="one that it could not close after a step that failed",
            fix="end this program, and append from the next one; or write another file",
        )
    if held(mark_of(path)) is not None:
        raise FileError(
            f"write: cannot append to {os.fspath(path)!r}",
            expected="a file that this process does not read: HDF5 opens none in two ways",
            got="an io.Dataset of it that is open",
            fix="close() it before, and open it anew",
        )
    return True


def _from_root(comm: Any, packed: bytes, path: Any) -> Any:
    with guard.waiting("io.write", (0,), comm):
        try:
            return pickle.loads(comm.bcast(packed))
        except MpishardError:
            raise
        except Exception as e:
            raise not_written(path, e) from e


def _form(
    tensors: Mapping[str, ShardTensor],
    attrs: Mapping[str, Any] | None,
    append: str | None,
    chunks: Any,
    compression: Any,
    dims: Any,
    scales: Mapping[str, Any] | None,
    variable_attrs: Mapping[str, Mapping[str, Any]] | None,
) -> Schema:
    variables = []
    for option_name, value in {"chunks": chunks, "compression": compression, "dims": dims}.items():
        odd = [name for name in value if name not in tensors] if isinstance(value, Mapping) else []
        if odd:
            raise FileError(
                f"write: {option_name} of no dataset", expected=f"names of {[*tensors]}", got=odd, fix="name a tensor"
            )
    for name, x in tensors.items():
        if not is_text(name) or "\0" in name:
            raise FileError(
                f"write: {name!r} is no name of a dataset",
                expected="text of whole characters, without zero bytes",
                got=repr(name),
                fix="give it another name",
            )
        dtype = numpy_dtype(x.dtype, name)
        shape = tuple(x.sharding.shape)
        cut = option(chunks, name)
        if cut is True or (cut is None and append is not None):
            cut = chunks_of(x.sharding, dtype.itemsize)
        elif cut is not None and not are_chunks(cut, shape):
            raise FileError(
                f"write: chunks of {name!r}",
                expected=f"True, or {len(shape)} numbers of at least 1",
                got=repr(cut),
                fix="give one extent per dim of the tensor",
            )
        own = (variable_attrs or {}).get(name, {})
        require("io.write", f"variable_attrs[{name!r}]", own, Mapping, "give {name: value}")
        names = checked_dims(option(dims, name), name, shape)
        chunk = None if cut is None else tuple(cut)
        variables.append(Variable(name, shape, dtype, chunk, option(compression, name), names, dict(own)))
    if append is not None or scales or any(v.dims is not None for v in variables):
        variables = list(named(variables))
    given = dict(scales or {}) if append is None else {append: 0, **(scales or {})}
    unknown = sorted(set(variable_attrs or ()) - set(tensors) - set(given))
    if unknown:
        raise FileError(
            "write: variable_attrs",
            expected=f"names of {[*tensors, *given]}",
            got=unknown,
            fix="name a tensor, or a dim whose values scales= gives: a dim without values has no attributes",
        )
    own_attrs = {dim: dict(a) for dim, a in (variable_attrs or {}).items() if dim in given and dim not in tensors}
    form = Schema(tuple(variables), dict(attrs or {}), dict(scales or {}), append, own_attrs)
    everything = (("the file", form.attrs), *((v.name, v.attrs) for v in form.variables), *own_attrs.items())
    for where, attributes in everything:
        for key, value in attributes.items():
            if attributes is not form.attrs and key in _KEPT:
                raise FileError(
                    f"write: attribute {key!r} of {where}",
                    expected="another name: HDF5 keeps there which dims datasets lie along",
                    got=shown(value),
                    fix="leave it out: dims= and scales= write it",
                )
            _check_attribute(where, key, value)
    check_places(form)
    return form._replace(variables=tuple(v._replace(name=place_of(v.name)) for v in form.variables))


def _hints(hints: Mapping[str, Any] | None) -> dict[str, str]:
    """Return hints as MPI takes them: a rank that cannot give them would leave the others in the call that opens."""
    try:
        given = {key: str(value) for key, value in (hints or {}).items()}
        with info_of(given):
            return given
    except Exception as e:
        raise LayoutError(
            "io.write: hints= that MPI does not take",
            expected="names of hints, and values of them as text",
            got=f"{type(e).__name__}: {e}",
            fix="name them as the MPI library does, e.g. {'striping_factor': 8}",
        ) from e


def _check_alignment(alignment: Any) -> None:
    with contextlib.suppress(TypeError, ValueError):
        threshold, interval = map(operator.index, (0, 1) if alignment is None else alignment)
        if threshold >= 0 and interval >= 1:
            return
    raise LayoutError(
        "io.write: alignment= is of another kind",
        expected="(threshold, interval) in bytes, of at least 0 and 1",
        got=repr(alignment),
        fix="give two whole numbers",
    )


def _check_attribute(where: str, key: Any, value: Any) -> None:
    with contextlib.suppress(TypeError, ValueError):
        kinds = np.asarray(value).dtype.kind
        if is_text(key) and key and "\0" not in key and kinds in "biufcSU":
            return
    raise FileError(
        f"write: attribute {key!r} of {where}",
        expected="a name without zero bytes, and text, a number, or an array of them",
        got=f"{type(value).__name__}: {value!r}",
        fix="convert it, e.g. with json.dumps",
    )


def _mesh_of(tensors: Mapping[str, ShardTensor]) -> CartMesh:
    """Return the mesh of the first tensor that has one: its ranks are those that hear what is wrong. Not collective."""
    require("io.write", "tensors", tensors, Mapping, "give {name: tensor}")
    for x in tensors.values():
        if isinstance(x, ShardTensor):
            return x.mesh
    _check_meshes(tensors)
    raise _no_one_mesh("no tensor at all")


def _check_meshes(tensors: Mapping[str, ShardTensor]) -> None:
    for name, x in tensors.items():
        if not isinstance(x, ShardTensor):
            raise MeshError(
                f"write: {name!r} lives on no mesh",
                expected="a ShardTensor",
                got=type(x).__name__,
                fix="shard it first, e.g. with mpishard.distribute_tensor",
            )
    meshes = {id(x.mesh): x.mesh.outline for x in tensors.values()}
    if len(meshes) > 1:
        raise _no_one_mesh([*meshes.values()])


def _no_one_mesh(got: object) -> MeshError:
    return MeshError(
        "write: the tensors of one file live on one mesh",
        expected="one mesh",
        got=got,
        fix="redistribute them, or write one file per mesh",
    )
