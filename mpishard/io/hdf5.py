"""ShardTensors in HDF5 files, with an h5py that need not know MPI.

Reading: every rank opens the file read-only and reads its own hyperslab. Writing: rank 0 writes a temporary
file, slab by slab as the other ranks hand them over, and renames it when it is complete, so that a file of
that name is never half written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.funnel import Box, funnel
from mpishard.comm.mesh import CartMesh
from mpishard.errors import (
    FileError,
    LayoutError,
    MeshError,
    MissingPackageError,
    MpishardError,
    UnsupportedDtypeError,
    described,
)
from mpishard.layout import Layout, as_placements, layout_of
from mpishard.layout.slab import slabs
from mpishard.tensor import ShardTensor, wrap
from mpishard.tensor.operand import resolved

SLAB_NBYTES = 64 << 20

_NUMPY = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
_TORCH = {np.dtype(n): t for t, n in _NUMPY.items()}
# Pairs that the HDF5 library converts while it reads, so that the block never exists twice.
_CONVERTED = "iuf"


def read(
    path: str | os.PathLike[str],
    name: str,
    mesh: CartMesh,
    placements: Any,
    *,
    dtype: torch.dtype | None = None,
    sizes: Mapping[int, Sequence[int]] | None = None,
    multiple: int = 1,
) -> ShardTensor:
    """Read a dataset of an HDF5 (or netCDF-4) file, each rank its own block and nothing else.

    Collective over the mesh.

    Parameters
    ----------
    path
        The file; every rank opens it.
    name
        Name of the dataset, with its groups: ``"fields/temperature"``.
    mesh, placements
        Where and how to shard it; `Partial` is refused.
    dtype
        Of the result; that of the dataset if not given.
    sizes
        Tensor dim -> block sizes; balanced where not given.
    multiple
        Of which the borders between balanced blocks are multiples.

    Returns
    -------
    ShardTensor
        On ``mesh.device``.

    Raises
    ------
    FileError
        The file or the dataset is missing or damaged.
    LayoutError
        Placements that do not fit the dataset.
    UnsupportedDtypeError
        The dataset's type has no torch dtype.
    MissingPackageError
        h5py is not installed.

    Examples
    --------
    >>> x = ms.io.read("ocean.nc", "thetao", mesh, (ms.Shard(2), ms.Shard(3)))
    """
    comm = mesh.group(tuple(range(mesh.ndim))).comm
    file = layout = None
    error: MpishardError | None = None
    signature = f"io.read {name}"
    try:
        file = _opened(path)
        dataset = _dataset(file, path, name)
        layout = _layout(mesh, placements, dataset, name, sizes, multiple)
        wanted = _dtype_of(dataset, name) if dtype is None else dtype
        signature += f" {layout!r} {wanted}"
    except MpishardError as e:
        error = e
    with file or contextlib.nullcontext():
        guard.agree(comm, error, signature)
        assert layout is not None
        local = None
        try:
            local = _block(dataset, layout.box(mesh.coords), wanted)
        except (OSError, RuntimeError) as e:
            error = _damaged(path, name, e)
    guard.agree(comm, error)
    assert local is not None
    return wrap(local.to(mesh.device), layout, mesh)


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, ShardTensor], attrs: Mapping[str, Any] | None = None
) -> None:
    """Write ShardTensors as the datasets of a new HDF5 file; one that is there is replaced.

    Collective over the mesh. Rank 0 holds one slab of at most 64 MiB of the other ranks' data at a time. The
    file appears under its name when it is complete, and not at all where writing fails.

    Parameters
    ----------
    path
        The file, on a file system that rank 0 sees.
    tensors
        Name -> tensor, all on one mesh.
    attrs
        Attributes of the file; those of rank 0 count.

    Raises
    ------
    FileError
        The file cannot be written.
    MeshError
        There is no ShardTensor, or they live on different meshes.
    UnsupportedDtypeError
        HDF5 has no such type.
    MissingPackageError
        h5py is not installed.

    Notes
    -----
    Not differentiable. Another rank waits for its turn to hand over its slabs: give ``MPISHARD_TIMEOUT``
    the time that the whole file takes.

    Examples
    --------
    >>> ms.io.write("out.h5", {"temperature": x}, attrs={"title": "after 100 steps"})
    """
    mesh = _mesh_of(tensors)
    group = mesh.group(tuple(range(mesh.ndim)))
    told = [f"{name}: {x.layout!r} {x.dtype}" for name, x in tensors.items()]
    target = _Target(path) if group.rank == 0 else None
    error: MpishardError | None = None
    try:
        for name, x in tensors.items():
            if x.dtype not in _NUMPY:
                raise _unsupported(f"write: {name!r}", x.dtype)
        if target is not None:
            target.open(tensors, attrs or {})
    except MpishardError as e:
        error = e
    try:
        guard.agree(group.comm, error, f"io.write {'; '.join(told)}")
        with torch.no_grad():
            for name, x in tensors.items():
                whole = resolved(x)
                funnel(
                    whole.to_local().detach(),
                    whole.layout.offset(mesh.coords),
                    _given(whole.layout, x.dtype),
                    group,
                    lambda box, cells, name=name: target.put(name, box, cells),  # type: ignore[misc,union-attr]
                    op="io.write",
                )
        if target is not None:
            target.close()
        guard.agree(group.comm, target.error if target is not None else None)
    finally:
        if target is not None:
            target.discard()


class _Target:
    """The file that rank 0 writes: under another name until it is complete.

    What goes wrong is kept in ``error``: the other ranks are handing over their slabs, and must be heard out.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        self.file: Any = None
        self.error: MpishardError | None = None

    def open(self, tensors: Mapping[str, ShardTensor], attrs: Mapping[str, Any]) -> None:
        h5py = _h5py()
        try:
            self.file = h5py.File(self.partial, "w")
            for name, x in tensors.items():
                self.file.create_dataset(name, shape=tuple(x.shape), dtype=_NUMPY[x.dtype])
            for key, value in attrs.items():
                self.file.attrs[key] = value
        except (OSError, RuntimeError, TypeError, ValueError) as e:
            raise self._failed(e) from e

    def put(self, name: str, box: Box, cells: Tensor) -> None:
        if self.error is None:
            try:
                self.file[name][_selection(box)] = cells.numpy()
            except (OSError, RuntimeError) as e:
                self.error = self._failed(e)

    def close(self) -> None:
        try:
            self.file.close()
            if self.error is None:
                os.replace(self.partial, self.path)
        except (OSError, RuntimeError) as e:
            self.error = self.error or self._failed(e)

    def discard(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            if self.file is not None:
                self.file.close()
        self.partial.unlink(missing_ok=True)

    def _failed(self, e: Exception) -> FileError:
        return FileError(
            described(
                f"write: cannot write {str(self.path)!r}",
                expected="a folder that rank 0 can write to, room in it, and names and attributes that HDF5 takes",
                got=f"{type(e).__name__}: {e}",
                fix="make the folder, or choose another one",
            )
        )


def _given(layout: Layout, dtype: torch.dtype) -> list[list[Box]]:
    """Return the slabs that each rank gives; of ranks with the same block, the first gives it."""
    cells = SLAB_NBYTES // dtype.itemsize
    held = [m for m, p in enumerate(layout.placements) if not p.is_shard()]
    return [
        [] if any(coords[m] for m in held) else list(slabs(layout.box(coords), cells))
        for coords in product(*map(range, layout.mesh_shape))
    ]


def _mesh_of(tensors: Mapping[str, ShardTensor]) -> CartMesh:
    for name, x in tensors.items():
        if not isinstance(x, ShardTensor):
            raise MeshError(
                described(
                    f"write: {name!r} lives on no mesh",
                    expected="a ShardTensor",
                    got=type(x).__name__,
                    fix="shard it first, e.g. with mpishard.distribute_tensor",
                )
            )
    meshes = {id(x.mesh): x.mesh for x in tensors.values()}
    if len(meshes) != 1:
        raise MeshError(
            described(
                "write: the tensors of one file live on one mesh",
                expected="one mesh",
                got=list(meshes.values()) or "no tensor at all",
                fix="redistribute them, or write one file per mesh",
            )
        )
    return next(iter(meshes.values()))


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as e:
        raise MissingPackageError(
            described("mpishard.io needs h5py", expected="h5py installed", got=e, fix="pip install 'mpishard[io]'")
        ) from e
    return h5py


def _opened(path: str | os.PathLike[str]) -> Any:
    h5py = _h5py()
    try:
        # Without a lock: read-only shared file systems refuse one, and nobody writes.
        return h5py.File(path, "r", locking=False)
    except (OSError, RuntimeError) as e:
        there = os.path.exists(path)
        raise FileError(
            described(
                f"read: cannot open {os.fspath(path)!r}",
                expected="an HDF5 file that every rank can read",
                got=f"{type(e).__name__}: {e}" if there else "no such file",
                fix="check that it is complete" if there else "check the path, and that every node sees it",
            )
        ) from e


def _dataset(file: Any, path: str | os.PathLike[str], name: str) -> Any:
    import h5py

    found = file.get(name)
    if isinstance(found, h5py.Dataset) and found.shape is not None:
        return found
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


def _layout(mesh: CartMesh, placements: Any, dataset: Any, name: str, sizes: Any, multiple: int) -> Layout:
    own = as_placements(placements, mesh.ndim, dataset.ndim)
    if any(p.is_partial() for p in own):
        raise LayoutError(
            described(
                f"read: {name!r} cannot be read as a Partial",
                expected="Shard(dim) or Replicate() for every mesh dim",
                got=own,
                fix="use Replicate() where every rank shall have the whole",
            )
        )
    return layout_of(mesh.shape, own, dataset.shape, sizes, multiple)


def _dtype_of(dataset: Any, name: str) -> torch.dtype:
    try:
        return _TORCH[dataset.dtype.newbyteorder("=")]
    except KeyError:
        raise _unsupported(f"read: {name!r}", dataset.dtype) from None


def _unsupported(what: str, dtype: object) -> UnsupportedDtypeError:
    return UnsupportedDtypeError(
        described(
            f"{what} has a dtype that torch and HDF5 do not share",
            expected=", ".join(str(t).removeprefix("torch.") for t in _NUMPY),
            got=dtype,
            fix="convert it first, e.g. with x.float()",
        )
    )


def _block(dataset: Any, box: Box, dtype: torch.dtype) -> Tensor:
    stored = dataset.dtype.newbyteorder("=")
    memory = np.dtype(_NUMPY.get(dtype, stored))
    if stored.kind not in _CONVERTED or memory.kind not in _CONVERTED:
        memory = stored
    block = np.empty([hi - lo for lo, hi in box], memory)
    if block.size:
        dataset.read_direct(block, _selection(box))
    return torch.from_numpy(block).to(dtype)


def _selection(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


def _damaged(path: str | os.PathLike[str], name: str, e: Exception) -> FileError:
    return FileError(
        described(
            f"read: cannot read {name!r} of {os.fspath(path)!r}",
            expected="the whole dataset in the file",
            got=f"{type(e).__name__}: {e}",
            fix="check that the file is complete",
        )
    )
