"""Import of checkpoints of torch.distributed.checkpoint (DCP), without running what is in them.

Their list of contents is a pickle, which can run code. Here it may name nothing but the few classes that such a list
is made of, and cells are read by torch's own reader of weights only: other files are refused.
"""

from __future__ import annotations

import enum
import importlib
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.mesh import CartMesh
from mpishard.errors import FileError, LayoutError, MpishardError, described
from mpishard.io.checkpoint.snapshot import the_mesh
from mpishard.tensor import ShardTensor, wrap

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}


def import_dcp(
    path: str | os.PathLike[str],
    model: torch.nn.Module | Mapping[str, Tensor],
    *,
    prefix: str = "",
    strict: bool = True,
    mesh: CartMesh | None = None,
) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint of torch.distributed.checkpoint, each rank its own blocks.

    Collective over the mesh. The checkpoint may come from any number of processes. A rank reads the stored pieces
    that overlap what it holds, one at a time.

    Parameters
    ----------
    path
        Folder with the ``.metadata`` and ``.distcp`` files; every rank must see it.
    model
        What to read: a model, which is loaded, or name -> tensor. A ShardTensor is read in its layout.
    prefix
        Of the names in the checkpoint: ``"model."`` where ``{"model": model.state_dict()}`` was saved.
    strict
        Whether every tensor must be there.
    mesh
        Needed where no tensor is sharded.

    Returns
    -------
    dict
        Name -> tensor, in the dtype of the checkpoint.

    Raises
    ------
    FileError
        It is missing or damaged, or its list names anything but tensors.
    LayoutError
        A tensor is not there, or has another shape.

    Examples
    --------
    >>> ms.io.import_dcp("step-1000", model, prefix="model.", mesh=mesh)
    """
    wanted = dict(model.state_dict() if isinstance(model, torch.nn.Module) else model)
    mesh = the_mesh("import_dcp", mesh, wanted.values())
    comm = mesh.group(tuple(range(mesh.ndim))).comm
    error: MpishardError | None = None
    found: dict[str, Tensor] = {}
    try:
        stored = _Stored(Path(path))
        for name, like in wanted.items():
            if prefix + name in stored.tensors or strict:
                found[name] = stored.like(prefix + name, like)
    except MpishardError as e:
        error = e
    except Exception as e:  # noqa: BLE001 (a damaged pickle can raise anything)
        error = _refused(path, f"{type(e).__name__}: {e}", "check that it is complete, and holds plain tensors")
    guard.agree(comm, error, f"import_dcp {sorted(wanted)} {prefix!r}")
    if isinstance(model, torch.nn.Module):
        model.load_state_dict(found, strict=strict)
    return found


class _Stored:
    """What a folder holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path / ".metadata", "rb") as file:
            listed = _Careful(path, file).load()
        entries = listed.state_dict_metadata
        self.tensors = {name: entry for name, entry in entries.items() if hasattr(entry, "chunks")}
        self.places = {
            (index.fqn, tuple(index.offset or ())): place
            for index, place in listed.storage_data.items()
            if index.fqn in self.tensors
        }

    def like(self, name: str, like: Tensor) -> Tensor:
        """Read a tensor, or this rank's block of it."""
        entry = self.tensors.get(name)
        shape = None if entry is None else tuple(entry.size)
        if entry is None or shape != tuple(like.shape):
            raise LayoutError(
                described(
                    f"import_dcp: {name!r} of {os.fspath(self.path)!r}",
                    expected=f"a tensor of shape {tuple(like.shape)}",
                    got="no such tensor" if entry is None else shape,
                    fix="give the model that was saved, and prefix= if it was saved with others",
                )
            )
        sharded = isinstance(like, ShardTensor) and not like.layout.partial_dims
        layout: Any = like.layout if sharded else None
        box = layout.box(like.mesh.coords) if sharded else [(0, n) for n in shape]  # type: ignore[attr-defined]
        out = torch.empty([hi - lo for lo, hi in box], dtype=entry.properties.dtype)
        count = 0
        for chunk in entry.chunks:
            start = tuple(chunk.offsets)
            common = [(max(lo, s), min(hi, s + n)) for (lo, hi), s, n in zip(box, start, chunk.sizes)]
            if any(lo >= hi for lo, hi in common):
                continue
            part, into = self._cells(name, start, tuple(chunk.sizes)), out
            for dim, ((lo, hi), s, (at, _)) in enumerate(zip(common, start, box)):
                part, into = part.narrow(dim, lo - s, hi - lo), into.narrow(dim, lo - at, hi - lo)
            into.copy_(part)
            count += part.numel()
        if count != out.numel():
            raise _refused(self.path, f"{count} of {out.numel()} cells of {name!r}", "check that it is complete")
        out = out.to(like.device)
        return wrap(out, layout, like.mesh) if sharded else out  # type: ignore[attr-defined]

    def _cells(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        place = self.places[name, start]
        if getattr(place, "transform_descriptors", None):
            raise _refused(self.path, "compressed or encrypted pieces", "save it without extensions")
        file = self.path / place.relative_path
        if not file.resolve().is_relative_to(self.path.resolve()):
            raise _refused(self.path, f"a piece outside of its folder: {place.relative_path}", "ask who made it")
        with open(file, "rb") as f:
            f.seek(place.offset)
            raw = io.BytesIO(f.read(place.length))
        cells = torch.load(raw, map_location="cpu", weights_only=True)
        if not isinstance(cells, Tensor) or tuple(cells.shape) != shape:
            raise _refused(self.path, f"another thing than cells of {name!r}", "check that it is complete")
        return cells


class _Careful(pickle.Unpickler):
    """Reads a list of contents, and refuses to look up anything else than what such a list is made of."""

    def __init__(self, path: Path, file: Any) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return getattr(importlib.import_module(module), name)
        if (module, name) == ("builtins", "getattr"):
            return self._member  # so Python 3.11.0 to 3.11.3 write a member of an enumeration
        asked = f"a list of contents that asks for {module}.{name}, which could run code"
        raise _refused(self._path, asked, "ask who made it")

    def _member(self, kind: Any, name: Any) -> Any:
        if isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__:
            return kind.__members__[name]
        raise _refused(self._path, "a list of contents that looks up an attribute", "ask who made it")


def _refused(path: str | os.PathLike[str], got: str, fix: str) -> FileError:
    return FileError(
        described(
            f"import_dcp: cannot read {os.fspath(path)!r}",
            expected="a folder that torch.distributed.checkpoint has written, of tensors",
            got=got,
            fix=fix,
        )
    )
