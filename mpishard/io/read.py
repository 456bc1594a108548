"""Reading datasets: every rank its own part, with or without a halo, and nothing else."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.argument import require, require_mesh
from mpishard.autograd.window import halo_widths
from mpishard.comm import counter, guard
from mpishard.comm.mesh import CartMesh
from mpishard.comm.null import no_values
from mpishard.errors import DesyncError, LayoutError, MpishardError
from mpishard.io.backend.choice import Choice, choose_reading, tell
from mpishard.io.backend.mpio import opened_together, read_mpio
from mpishard.io.file.cf import Decoding, decoding_of
from mpishard.io.file.dtype import stored_type, torch_dtype
from mpishard.io.file.hyperslab import BlockReader
from mpishard.io.file.open import (
    check_chunks,
    check_sources,
    damaged,
    found,
    import_h5py,
    is_written,
    opened,
    unreadable,
)
from mpishard.io.file.parts import narrowed
from mpishard.io.file.schema import is_filtered
from mpishard.io.file.seen import Seen, changed
from mpishard.io.file.selection import Axis, selected
from mpishard.io.file.trust import Path, check_memory, shown, told
from mpishard.layout import Layout, Run, as_placements, interval_runs, layout_of
from mpishard.tensor import wrap

Halo = Mapping[int, "int | tuple[int, int]"]
# of a file that changes while it is read
_TRIES = 20
_PAUSE_S = 0.05
# datasets that MPI-IO may not read
_FILTERED, _ELSEWHERE = 1, 2


@counter.named("io.read")
def read(
    path: Path,
    name: str,
    mesh: CartMesh,
    placements: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    sizes: Mapping[int, Sequence[int]] | None = None,
    multiple: int = 1,
    select: Any = None,
    decode: bool = False,
    halo: Halo | None = None,
    mode: str | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
    external: bool = False,
) -> Any:
    """Read a dataset of an HDF5 (or netCDF-4) file, each rank its own block and nothing else.

    Collective over the mesh.

    Parameters
    ----------
    path
        The file; every rank opens it, by the same path. It may be a stranger's: see ``external``.
    name
        Name of the dataset, with its groups: ``"fields/temperature"``.
    mesh, placements
        Where and how to shard it; `Partial` is refused. With ``select``, dims are those of the selection.
    dtype
        Of the result; that of the dataset if not given. Values are converted as by ``Tensor.to``.
    device
        Of the result; ``mesh.device`` if not given.
    sizes
        Tensor dim -> block sizes; balanced where not given.
    multiple
        Of which the borders between balanced blocks are multiples.
    select
        Numbers and slices with a positive step, one per dim of the dataset, as numpy has them: ``(-1, ...)`` is
        the last time step, ``(slice(None), 0)`` the first level of every step. A number drops its dim.
    decode
        Whether to undo the packing of the CF conventions: ``stored * scale_factor + add_offset``, and NaN where
        ``_FillValue`` or ``missing_value`` is stored; integers have the sign that ``_Unsigned`` says. The result is
        float32 for stored integers of up to 16 bits and floats of up to 32, else float64; a dataset without these
        attributes stays as it is.
    halo
        Tensor dim -> (lo, hi) or one width for both: read the block with its halo.
    mode
        What fills the halo beyond the domain's edge, as of `mpishard.halo_exchange`: ``"zeros"``, ``"reflect"``,
        ``"replicate"``, ``"circular"``. A dim on a periodic mesh dim wraps. None: zeros, and a halo wider than the
        extent is an error.
    out
        Kept buffer to read into: of this rank's shape (with the halo), any strides; its dtype and device hold, and
        ``dtype`` may say the same only.
    backend
        ``"mpio"`` to read collectively through MPI-IO, ``"root"`` or ``"virtual"`` for each rank on its own;
        None: MPI-IO where it works (see `choose_backend`). Parts that overlap (a halo, a replicated dim) are
        always read by each rank on its own, and with HDF5 before 1.14 so are compressed datasets.
    external
        Whether the dataset may lie outside: in files of other folders, behind links to other files, or in raw
        files. Without it such a dataset is an error: who made the file could have any file of yours read.

    Returns
    -------
    ShardTensor
        Or with ``halo`` a plain local tensor: the block with its halo, corners filled.

    Raises
    ------
    FileError
        The file or the dataset is missing or damaged, or a part of a virtual dataset is; it leads out of its
        folder, is no regular file, was left in the middle of a step (see `heal`), does not fit into memory, or changes
        each time that it is read.
    LayoutError
        Placements, a selection, a halo or a buffer that do not fit the dataset.
    UnsupportedDtypeError
        The dataset's type has no torch dtype.
    MissingPackageError
        h5py is not installed.

    Notes
    -----
    Cells that need no conversion go straight from the file to the result on the host; all others through one
    buffer of at most 64 MiB.

    Examples
    --------
    >>> x = ms.io.read("ocean.nc", "thetao", mesh, (ms.Shard(1), ms.Shard(2)), select=(0,), decode=True)
    >>> padded = ms.io.read("ocean.nc", "zos", mesh, (ms.Shard(1), ms.Shard(2)), halo={1: 1, 2: (1, 1)})
    """
    require_mesh("io.read", mesh)
    asked = _Asked(placements, dtype, device, sizes, multiple, select, decode, halo, mode, out, backend, external)
    return at_rest(path, lambda: _once(path, name, mesh, asked))


def at_rest(path: Path, once: Callable[[], Any]) -> Any:
    """Return what a call returns, called anew where that is None, as the file has changed meanwhile. Collective.

    Raises
    ------
    FileError
        It has each time.
    """
    for _ in range(_TRIES):
        got = once()
        if got is not None:
            return got
        time.sleep(_PAUSE_S)
    raise changed(path, "it is written to again and again")


def opened_alike(comm: Any, error: Exception | None, call: str, part: str, seen: Seen) -> bool:
    """Agree on errors, and tell whether all ranks have opened the same state of a file. Collective.

    A rank that looks once all have opened it sees whether what it has open was replaced before another one came.
    """
    return not any(_agreed(comm, e, call, told, 0, seen)[1] for e, told in ((error, part), (None, "")))


class _Asked(NamedTuple):
    """What is asked for beside the dataset: parameters of `read`."""

    placements: Any
    dtype: torch.dtype | None
    device: torch.device | str | None
    sizes: Mapping[int, Sequence[int]] | None
    multiple: int
    select: Any
    decode: bool
    halo: Halo | None
    mode: str | None
    out: Tensor | None
    backend: str | None
    external: bool

    def part(self, dataset: Any, name: str, mesh: CartMesh) -> Part:
        """Return what is read of the dataset. Not collective."""
        dtype = self.dtype
        if type(self.out) is Tensor and (dtype is None or isinstance(dtype, torch.dtype)):
            if dtype not in (None, self.out.dtype):
                raise LayoutError(
                    "read: out does not fit",
                    expected=f"a tensor of {dtype}, as dtype= says",
                    got=self.out.dtype,
                    fix="leave dtype out: that of out holds",
                )
            dtype = self.out.dtype
        return part_of(
            dataset,
            name,
            mesh,
            self.placements,
            dtype=dtype,
            sizes=self.sizes,
            multiple=self.multiple,
            select=self.select,
            decode=self.decode,
        )


def _chosen(path: Path, name: str, mesh: CartMesh, asked: _Asked) -> tuple[Choice, str]:
    """Return how the ranks read a file, and what they call; raise together where one of them cannot. Collective."""
    error: Exception | None = None
    choice: Choice | None = None
    call, how, kind = "io.read", "", 0
    try:
        how = f", external={bool(asked.external)}"
        call = f"io.read {shown(name)} of {told(path)}"
        if mesh.device.type == "meta":
            raise no_values("io.read")
        import_h5py()
        disjoint = not asked.halo and _is_sharded(asked.placements)
        choice = choose_reading(mesh, asked.backend, virtual=False, disjoint=disjoint, path=path)
        if choice.name == "mpio":
            error = unreadable(path)
            kind = _kind(path, name, asked.external) if error is None else 0
    except Exception as e:  # noqa: BLE001 (Python's too, of other kinds of arguments)
        error = e
    # a file that one rank does not see is told as that, where ranks may open files on their own
    together = choice is not None and choice.name == "mpio"
    group = mesh.all_ranks
    kind, _ = guard.agree(group.comm, error, f"{call if together else 'io.read'} by {choice}{how}", (kind, 0))
    assert choice is not None
    if together and kind:
        choice = choose_reading(mesh, asked.backend, virtual=kind == _ELSEWHERE, filtered=kind == _FILTERED)
    return choice, call


def _kind(path: Path, name: str, external: bool) -> int:
    """Return whether a dataset is one that MPI-IO may not read. Not collective.

    It is looked at by every rank alone: HDF5 opens the sources of a virtual dataset as it opened the file, together.
    """
    with contextlib.suppress(Exception), opened(path) as file:  # what is wrong with it shows where it is read
        return _kind_of(found(file, path, name, external=external))
    return 0


def _kind_of(dataset: Any) -> int:
    if dataset.is_virtual or dataset.external:
        return _ELSEWHERE
    return _FILTERED if is_filtered(dataset) else 0


def _once(path: Path, name: str, mesh: CartMesh, asked: _Asked) -> Any:
    """Do what `read` does, but return None on every rank where the file has changed meanwhile. Collective."""
    group = mesh.all_ranks
    external, out, gaps = asked.external, asked.out, 0
    choice, call = _chosen(path, name, mesh, asked)
    part_told = ""
    together = choice.name == "mpio"
    error: Exception | None = None
    seen = Seen(path)
    with contextlib.ExitStack() as files:
        try:
            file = files.enter_context(opened_together(path, group) if together else opened(path))
            dataset = found(file, path, name, external=external)
            if together and _kind_of(dataset) == _ELSEWHERE:
                raise changed(path, f"{shown(name)} has its cells in other files now")
            part = asked.part(dataset, name, mesh)
            plan = part.window(mesh, asked.halo, asked.mode)
            part_told = f" {part!r} {plan.told}"
            out = _buffer(plan.shape, part.dtype, mesh, asked.device, out)
            block = part.block(plan, out)
            if block.pieces:
                box, whole = _touched(block), dataset
                dataset = narrowed(whole, path, box)
                seen.add(check_sources(dataset, path, box, external=external, whole=dataset is not whole))
                check_chunks(dataset, name)
                gaps = int(choice.name == "mpio" and not is_written(dataset))
        except MpishardError as e:
            error = e
        except Exception as e:  # noqa: BLE001 (of a damaged file h5py raises anything)
            error = damaged(path, name, e)
        gaps, moved = _agreed(group.comm, error, call, part_told, gaps, seen)
        if moved:
            return None
        assert out is not None
        if gaps:
            choice = choose_reading(mesh, asked.backend, virtual=False, written=False)
            files.close()
        tell(mesh, choice, "read")
        failure: Exception | None = None
        if choice.name == "mpio":
            _, failure = read_mpio(dataset, group, block)
        else:
            try:
                if gaps:
                    dataset = found(files.enter_context(opened(path)), path, name, external=external)
                for _ in block.read(dataset):
                    pass
            except Exception as e:  # noqa: BLE001
                failure = e
    _, moved = _agreed(group.comm, None if failure is None else damaged(path, name, failure), call, "", 0, seen)
    if moved:
        return None
    return wrap(out, part.layout, mesh) if asked.halo is None else out


def _agreed(comm: Any, error: Exception | None, call: str, part: str, number: int, seen: Seen) -> tuple[int, int]:
    """Agree on errors, on the largest number, and on whether the file has changed: then nothing is wrong. Collective.

    What was found of a file that is written to says nothing, and ranks may have found it at different steps.
    """
    moved = int(bool(seen.changed()))
    try:
        return guard.agree(comm, None if moved else error, call + part, (number, moved))
    except DesyncError:
        state = -1 if moved else seen.state
        # ranks that named two files have seen two states as well: that is no file which changes
        most, least = guard.agree(comm, None, call, (state, -state))
        if most == -least >= 0:
            raise
        return number, 1


def _is_sharded(placements: Any) -> bool:
    each = placements if isinstance(placements, Iterable) else (placements,)
    return all(p.is_shard() for p in each if hasattr(p, "is_shard"))


class Window(NamedTuple):
    """What a rank reads: per dim the runs of selected cells, its shape, and whether cells stay unset."""

    runs: tuple[tuple[Run, ...], ...]
    shape: tuple[int, ...]
    open: bool
    told: str


class Part(NamedTuple):
    """The selected cells of a dataset, their layout, and how they become numbers."""

    axes: tuple[Axis, ...]
    layout: Layout
    dtype: torch.dtype
    stored: Any
    decoding: Decoding | None

    def window(self, mesh: CartMesh, halo: Halo | None = None, mode: str | None = None) -> Window:
        """Return what this rank reads. Not collective."""
        widths = _widths(halo or {}, self.layout, mesh, mode)
        runs, shape, is_open = [], [], False
        for dim, (lo, hi) in enumerate(self.layout.box(mesh.coords)):
            before, after = widths.get(dim, (0, 0))
            periodic = any(mesh.periodic[m] for m in self.layout.shard_dims.get(dim, ()))
            n = self.layout.shape[dim]
            how = "circular" if periodic and dim in widths else mode or "zeros"
            runs.append(interval_runs(n, lo - before, hi + after, how))
            shape.append(hi - lo + before + after)
            is_open |= sum(run.count for run in runs[-1]) < shape[-1]
        return Window(tuple(runs), tuple(shape), is_open, f"halo {sorted(widths.items())} {mode}")

    def block(self, window: Window, out: Tensor) -> BlockReader:
        """Return what reads a window into ``out``, whose other cells become 0. Not collective."""
        if window.open:
            out.zero_()
        return BlockReader(self.axes, window.runs, out, self.stored, self.decoding)


def part_of(
    dataset: Any,
    name: str,
    mesh: CartMesh,
    placements: Any,
    *,
    dtype: torch.dtype | None = None,
    sizes: Mapping[int, Sequence[int]] | None = None,
    multiple: int = 1,
    select: Any = None,
    decode: bool = False,
) -> Part:
    """Return what is read of a dataset; parameters as of `read`. Not collective."""
    if dtype is not None:
        require("read", "dtype", dtype, torch.dtype, "give one of torch's, as torch.float32")
    if sizes is not None:
        require("read", "sizes", sizes, Mapping, "give {dim: sizes}")
    axes = selected(select, dataset.shape, name)
    shape = [axis.count for axis in axes if axis.kept]
    own = as_placements(placements, mesh.ndim, len(shape))
    if any(p.is_partial() for p in own):
        raise LayoutError(
            f"read: {name!r} cannot be read as a Partial",
            expected="Shard(dim) or Replicate() for every mesh dim",
            got=own,
            fix="use Replicate() where every rank shall have the whole",
        )
    layout = layout_of(mesh.shape, own, shape, sizes, multiple)
    cells = stored_type(dataset, name)
    stored = torch_dtype(cells, name)
    decoding = decoding_of(dataset, stored) if decode else None
    wanted = dtype or (stored if decoding is None else decoding.dtype)
    if decoding is not None and not (wanted.is_complex or (wanted.is_floating_point and not stored.is_complex)):
        expected = "a complex dtype" if stored.is_complex else "a floating dtype or a complex one"
        raise LayoutError(f"read: {name!r} decoded", expected=expected, got=wanted, fix="leave dtype out, or decode")
    return Part(axes, layout, wanted, cells, decoding)


def _widths(halo: Halo, layout: Layout, mesh: CartMesh, mode: str | None) -> dict[int, tuple[int, int]]:
    out: dict[int, tuple[int, int]] = {}
    for dim, (lo, hi) in halo_widths("read: halo", halo, layout.ndim).items():
        periodic = any(mesh.periodic[m] for m in layout.shard_dims.get(dim, ()))
        n = layout.shape[dim]
        limit = n - 1 if mode == "reflect" and not periodic else n
        if min(lo, hi) < 0 or (max(lo, hi) > limit and not periodic and mode in (None, "reflect")):
            raise LayoutError(
                f"read: halo of dim {dim}",
                expected=f"widths from 0 to {max(limit, 0)} (wider ones with mode='zeros', 'replicate' or 'circular')",
                got=(lo, hi),
                fix="give {dim: (lo, hi)}",
            )
        out[dim] = (lo, hi)
    return out


def _buffer(
    shape: tuple[int, ...], dtype: torch.dtype, mesh: CartMesh, device: torch.device | str | None, out: Tensor | None
) -> Tensor:
    if out is None:
        check_memory(math.prod(shape) * dtype.itemsize, "read: this rank's block")
        try:
            return torch.empty(shape, dtype=dtype, device=mesh.device if device is None else device)
        except Exception as e:
            raise no_device(device, e) from e
    if type(out) is not Tensor or tuple(out.shape) != shape or out.requires_grad:
        raise LayoutError(
            "read: out does not fit",
            expected=f"a plain tensor of shape {shape} without requires_grad",
            got=f"{type(out).__name__} of shape {tuple(getattr(out, 'shape', ()))}",
            fix="make it of this rank's own shape, halo included",
        )
    return out


def no_device(device: object, e: Exception) -> LayoutError:
    """Return the error for a device that takes no block: nothing is wrong with the file. Not collective."""
    return LayoutError(
        "read: device= takes no block",
        expected="one of torch's that is here, with room for this rank's block",
        got=f"{shown(device)} ({type(e).__name__}: {e})",
        fix="leave it out for that of the mesh, or name another one",
    )


def _touched(block: BlockReader) -> list[tuple[int, int]]:
    """Return the box of the dataset that a block, not an empty one, reads from."""
    dims = range(len(block.pieces[0].start))
    lo = [min(p.start[d] for p in block.pieces) for d in dims]
    hi = [max(p.start[d] + (p.counts[d] - 1) * p.stride[d] + 1 for p in block.pieces) for d in dims]
    return list(zip(lo, hi))
