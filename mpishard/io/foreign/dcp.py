"""Import of checkpoints of torch.distributed.checkpoint (DCP), without running what is in them.

Their list of contents is a pickle, which can run code. Here it is read as data, without any unpickler; cells are read
by torch's own reader of weights only. Sizes are compared with those of the files before anything is read.
"""

from __future__ import annotations

import io
import math
import os
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.argument import require, valueless
from mpishard.comm import guard
from mpishard.comm.memory.buffer import unfit
from mpishard.comm.mesh import CartMesh
from mpishard.errors import FileError, LayoutError, MpishardError
from mpishard.io.checkpoint.snapshot import state_of
from mpishard.io.checkpoint.state import DTYPES
from mpishard.io.file.dtype import plain_bools
from mpishard.io.file.trust import absolute, check_memory, is_inside, open_regular, read_bounded, shown, told
from mpishard.io.foreign.inert_pickle import Name, Pairs, Record, RefusedError, read
from mpishard.tensor import ShardTensor, wrap

_LIST_NBYTES = 1 << 30
_MOST_PIECES = 1 << 17
# of a piece besides its cells: names, an index, padding
_HEAD_NBYTES = 1 << 20
_BYTE_ORDER = sys.byteorder.encode()

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
    # Python 3.13
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
    # so Python 3.11.0 to 3.11.3 write a member of an enumeration
    "builtins": ("getattr",),
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
        Needed where no tensor is sharded, and the model not distributed by `distribute_module`.

    Returns
    -------
    dict
        Name -> tensor, in the dtype of the checkpoint.

    Raises
    ------
    FileError
        It is missing or damaged, its pieces overlap or leave a gap, or its list names anything but tensors.
    LayoutError
        A tensor is not there, or has another shape; or an argument is of another kind.

    Examples
    --------
    >>> ms.io.import_dcp("step-1000", model, prefix="model.", mesh=mesh)
    """
    wanted, mesh, error = state_of("import_dcp", model, mesh)
    comm = mesh.all_ranks.comm
    found: dict[str, Tensor] = {}
    signature = f"import_dcp {told(path)}"
    try:
        cut = sorted(f"{name!r}: {x.sharding if isinstance(x, ShardTensor) else None!r}" for name, x in wanted.items())
        signature += f" {cut} {prefix!r} strict={bool(strict)}"
        require("import_dcp", "prefix", prefix, str, 'leave it out, or give text, as "model."')
        _check(wanted, strict or not isinstance(model, torch.nn.Module))
        stored = _Stored(absolute(path))
        for name, like in wanted.items():
            if prefix + name in stored.tensors or strict:
                found[name] = stored.like(prefix + name, like)
    except MpishardError as e:
        error = error or e
    except RefusedError as e:
        error = error or _refused(path, f"a list of contents of which {e}", "ask who made it")
    except Exception as e:  # noqa: BLE001 (a damaged pickle can raise anything)
        fix = "check that it is complete, and holds plain tensors"
        error = error or _refused(path, f"{type(e).__name__}: {e}", fix)
    guard.agree(comm, error, signature)
    if isinstance(model, torch.nn.Module):
        try:
            model.load_state_dict(found, strict=strict)
        except Exception as e:  # noqa: BLE001 (of a model's own load_state_dict; the others go on)
            error = e
        guard.agree(comm, error)
    return found


def _check(wanted: dict[Any, Any], everything: bool) -> None:
    """Raise where what is to be read is not named, or not told by a tensor.

    What a model keeps besides tensors is left out, unless ``everything`` must be there.
    """
    for name, like in [*wanted.items()]:
        if not isinstance(name, str):
            what = "import_dcp: a name in model= is of another kind"
            raise LayoutError(what, expected="a str", got=repr(name), fix="name it as it was saved")
        if not isinstance(like, Tensor):
            if not everything:
                del wanted[name]
                continue
            raise LayoutError(
                f"import_dcp: {name!r} in model= is of another kind",
                expected="a tensor of the shape that was saved",
                got=type(like).__name__,
                fix="leave it out; strict=False leaves out what a model keeps besides tensors",
            )
        block = like.block if isinstance(like, ShardTensor) else like
        if odd := unfit(block) or valueless(block):
            got, fix = odd
            raise LayoutError(
                f"import_dcp: {name!r} cannot be read into", expected="a dense tensor with values", got=got, fix=fix
            )


class _Stored:
    """What a folder holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_bounded(path / ".metadata", _LIST_NBYTES)
        check_memory(64 * len(raw), "import_dcp: the list of contents")
        listed = _made(read(raw, _is_known), "Metadata").fields()
        entries = _pairs(listed["state_dict_metadata"])
        self.tensors = {
            name: entry.fields()
            for name, entry in entries
            if isinstance(name, str) and isinstance(entry, Record) and entry.kind.name == "TensorStorageMetadata"
        }
        self.places: dict[Any, dict[str, Any]] = {}
        for index, place in _pairs(listed["storage_data"]):
            own = _made(index, "MetadataIndex").fields()
            if own["fqn"] in self.tensors:
                offset = () if own["offset"] is None else _numbers(own["offset"])
                self.places[own["fqn"], offset] = _made(place, "_StorageInfo").fields()

    def like(self, name: str, like: Tensor) -> Tensor:
        """Read a tensor, or this rank's block of it."""
        entry = self.tensors.get(name)
        shape = None if entry is None else _numbers(entry["size"])
        if entry is None or shape != tuple(like.shape):
            raise LayoutError(
                f"import_dcp: {name!r} of {os.fspath(self.path)!r}",
                expected=f"a tensor of shape {tuple(like.shape)}",
                got="no such tensor" if entry is None else shape,
                fix="give the model that was saved, and prefix= if it was saved with others",
            )
        dtype = _dtype_of(entry)
        chunks = [_made(chunk, "ChunkStorageMetadata").fields() for chunk in entry["chunks"]]
        pieces = [(_numbers(chunk["offsets"]), _numbers(chunk["sizes"])) for chunk in chunks]
        problem = _gap_or_overlap(pieces, shape)
        if problem is not None:
            raise _refused(self.path, f"{name!r} of shape {shape} with {problem}", "check that it is complete")
        sharded = isinstance(like, ShardTensor) and not like.sharding.partial_dims
        layout: Any = like.sharding if sharded else None  # type: ignore[attr-defined]
        box = layout.box(like.mesh.coords) if sharded else [(0, n) for n in shape]  # type: ignore[attr-defined]
        local = [hi - lo for lo, hi in box]
        check_memory(math.prod(local) * dtype.itemsize, f"import_dcp: {name!r}")
        out = torch.empty(local, dtype=dtype, device="cpu")
        for start, sizes in pieces:
            common = [(max(lo, s), min(hi, s + n)) for (lo, hi), s, n in zip(box, start, sizes)]
            if any(lo >= hi for lo, hi in common):
                continue
            part, into = self._cells(name, start, sizes, dtype), out
            for dim, ((lo, hi), s, (at, _)) in enumerate(zip(common, start, box)):
                part, into = part.narrow(dim, lo - s, hi - lo), into.narrow(dim, lo - at, hi - lo)
            into.copy_(plain_bools(part))
        out = out.to(like.device)
        return wrap(out, layout, like.mesh) if sharded else out  # type: ignore[attr-defined]

    def _cells(self, name: str, start: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        place = self.places[name, start]
        if place.get("transform_descriptors"):
            raise _refused(self.path, "compressed or encrypted pieces", "save it without extensions")
        file = self.path / place["relative_path"]
        if not is_inside(file, self.path):
            raise _refused(
                self.path, f"a piece outside of its folder: {shown(place['relative_path'])}", "ask who made it"
            )
        offset, length = _numbers((place["offset"], place["length"]))
        most = math.prod(shape) * dtype.itemsize + _HEAD_NBYTES
        with open_regular(file) as f:
            there = os.fstat(f.fileno()).st_size
            if length > most or offset + length > there:
                got = f"{length} bytes at {offset} of {file.name}, of {there} bytes, for a piece of {name!r}"
                raise _refused(self.path, got, "check that it is complete")
            check_memory(3 * length, f"import_dcp: a piece of {name!r}")
            f.seek(offset)
            raw = io.BytesIO(f.read(length))
        # torch reads what begins otherwise in its older form, without checksums
        is_archive = raw.getbuffer()[:4] == b"PK\3\4"
        with zipfile.ZipFile(raw) as archive:
            members = archive.infolist()
            # what is packed could be any number of times larger
            packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
            if packed or not is_archive or sum(member.file_size for member in members) > length:
                raise _refused(self.path, f"packed cells of {name!r}", "ask who made it")
            # torch would turn round, in place, as many bytes as the piece says that there are
            if any(m.filename.endswith("/byteorder") and archive.read(m) != _BYTE_ORDER for m in members):
                fix = "load it with torch, and save it again on this machine"
                raise _refused(self.path, f"cells of {name!r} from a machine of another byte order", fix)
            there = min((m.file_size for m in members if "/data/" in m.filename), default=0)
            # torch does not compare them
            if archive.testzip() is not None:
                fix = "check that it is complete; torch.serialization.set_crc32_options(True) where it is saved"
                raise _refused(self.path, f"{file.name}: the checksum of a piece of {name!r} is wrong", fix)
        raw.seek(0)
        cells = torch.load(raw, map_location="cpu", weights_only=True)
        if (
            not isinstance(cells, Tensor)
            or cells.layout is not torch.strided
            or tuple(cells.shape) != shape
            or cells.dtype != dtype
            or cells.untyped_storage().nbytes() > there  # torch 2.8 reads on, whatever lies there in memory
        ):
            raise _refused(self.path, f"another thing than cells of {name!r}", "check that it is complete")
        return cells.detach()  # a parameter, too


def _is_known(name: Name) -> bool:
    known: tuple[str, ...] = _CLASSES.get(name.module, ())
    return name.name in known or (name.module == "torch" and name.name in DTYPES)


def _made(value: Any, kind: str) -> Record:
    if not isinstance(value, Record) or value.kind.name != kind:
        raise RefusedError(f"it has a {type(value).__name__} in place of a {kind}")
    return value


def _pairs(value: Any) -> Pairs:
    if not isinstance(value, Pairs):
        raise RefusedError(f"it has a {type(value).__name__} in place of a dict")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """Return a torch.Size, or a tuple."""
    numbers = value.args[0] if isinstance(value, Record) else value
    if not isinstance(numbers, tuple) or not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers):
        raise RefusedError(f"it has {shown(numbers)} in place of sizes")
    return numbers


def _dtype_of(entry: dict[str, Any]) -> torch.dtype:
    state = _made(entry["properties"], "TensorProperties").state
    dtype = state[0] if isinstance(state, tuple) else dict(_pairs(state))["dtype"]
    if not isinstance(dtype, Name):
        raise RefusedError("it has a tensor without a dtype")
    return DTYPES[dtype.name]


def _gap_or_overlap(pieces: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> str | None:
    """Return what is wrong with pieces that shall be all of a shape, each cell once; None where they are."""
    if any(len(start) != len(shape) or len(sizes) != len(shape) for start, sizes in pieces):
        return "pieces of other numbers of dims"
    pieces = [(start, sizes) for start, sizes in pieces if math.prod(sizes)]
    for start, sizes in pieces:
        if any(s + n > whole for s, n, whole in zip(start, sizes, shape)):
            return f"a piece at {start} of shape {sizes}, which is beyond its end"
    if len(pieces) > _MOST_PIECES:
        return f"{len(pieces)} pieces, of at most {_MOST_PIECES}"
    if shape and pieces:
        lo = np.array([start for start, _ in pieces])
        hi = lo + np.array([sizes for _, sizes in pieces])
        # along the dim that is cut most often few pieces lie side by side
        dim = max(range(len(shape)), key=lambda d: len(np.unique(lo[:, d])))
        order = np.argsort(lo[:, dim], kind="stable")
        lo, hi = lo[order], hi[order]
        for i, end in enumerate(np.searchsorted(lo[:, dim], hi[:, dim])):
            others = slice(i + 1, end)
            if ((lo[others] < hi[i]) & (hi[others] > lo[i])).all(axis=1).any():
                return f"pieces that overlap at {tuple(map(int, lo[i]))}"
    elif len(pieces) > 1:
        return "more than one piece of one cell"
    count = sum(math.prod(sizes) for _, sizes in pieces)
    return None if count == math.prod(shape) else f"a gap: {count} of {math.prod(shape)} cells"


def _refused(path: Any, got: str, fix: str) -> FileError:
    return FileError(
        f"import_dcp: cannot read {told(path)!r}",
        expected="a folder that torch.distributed.checkpoint has written, of tensors",
        got=got,
        fix=fix,
    )
