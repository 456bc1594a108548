"""Export to the safetensors format: a header in JSON, then the tensors' bytes; other programs read it as it is."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.argument import require, valueless
from mpishard.comm import guard
from mpishard.comm.collective.gather_slabs import Intervals, funnel
from mpishard.comm.memory.buffer import unfit
from mpishard.comm.mesh import CartMesh
from mpishard.errors import FileError, LayoutError, MpishardError, UnsupportedDtypeError
from mpishard.io.backend.job import given
from mpishard.io.checkpoint.snapshot import state_of, stored_dtype
from mpishard.io.file.close import flush
from mpishard.io.file.dtype import NUMPY
from mpishard.io.file.trust import absolute, check_length, check_replaceable, fresh, hidden, is_text, shown, told
from mpishard.tensor import ShardTensor
from mpishard.tensor.operand import on_mesh

_SLAB_NBYTES = 64 << 20
# the format's own key, and the longest header that its readers take
_METADATA, _HEADER_NBYTES = "__metadata__", 100_000_000
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def export_safetensors(
    path: str | os.PathLike[str],
    model: torch.nn.Module | Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    mesh: CartMesh | None = None,
) -> None:
    """Write a model's parameters and buffers, of global shape, as a safetensors file; one that is there is replaced.

    Collective over the mesh. Rank 0 holds one slab of at most 64 MiB of the other ranks' data at a time. The file
    appears under its name when it is complete.

    Parameters
    ----------
    path
        The file, on a file system that rank 0 sees.
    model
        A model, or its state dict; plain tensors (those of rank 0 count) and ShardTensors.
    metadata
        Text to go with them: name -> text.
    mesh
        Needed where no tensor is sharded, and the model not distributed by `distribute_module`.

    Raises
    ------
    FileError
        The file cannot be written.
    UnsupportedDtypeError
        The format has no such type.
    LayoutError
        There is something else than dense tensors in the state dict, or a name or metadata that the format cannot hold:
        what is no text, has half a surrogate pair, or a tensor named ``__metadata__``.

    Examples
    --------
    >>> ms.io.export_safetensors("model.safetensors", model, mesh=mesh)
    """
    state, mesh, error = state_of("export_safetensors", model, mesh)
    group = mesh.all_ranks
    header: dict[str, Any] = {}
    end, own, text = 0, Path(), b""
    try:
        own = absolute(path)
        if metadata is not None:
            require("export_safetensors", "metadata", metadata, Mapping, "give {name: text}")
            for key, value in metadata.items():
                _check_text("a name of the metadata", key)
                _check_text(f"metadata[{key!r}]", value)
            if metadata:
                header[_METADATA] = dict(metadata)
        for name, x in state.items():
            _check_text("a name of a tensor", name)
            _check(name, x)
            begin, end = end, end + math.prod(x.shape) * x.dtype.itemsize
            header[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
        text = _packed(header)
    except Exception as e:  # noqa: BLE001 (Python's too, of other kinds of arguments)
        error = error or e
    cut = {name: repr(x.sharding) for name, x in state.items() if isinstance(x, ShardTensor)}
    guard.agree(group.comm, error, f"export_safetensors to {told(path)}: {header}, of {cut}")
    target = None
    try:
        if group.rank == 0:
            target = _Target(own, header, text, end)
            error = target.open()
        guard.agree(group.comm, error)
        for name, x in state.items():
            with torch.no_grad():
                whole = on_mesh(x, mesh)
                local = whole.block.detach().resolve_conj().resolve_neg().view(stored_dtype(x.dtype))
            consume = None if target is None else target.putter(name, tuple(x.shape), local.dtype)
            boxes = partial(given, whole.sharding, nbytes=_SLAB_NBYTES, itemsize=local.itemsize)
            funnel(local, whole.sharding.offset(mesh.coords), boxes, group, consume, op="export")  # type: ignore[arg-type]
        guard.agree(group.comm, None if target is None else target.close())
    finally:
        if target is not None:
            target.discard()


def _check_text(what: str, text: Any) -> None:
    if is_text(text):
        return
    raise LayoutError(
        f"export_safetensors: {what} that the format cannot hold",
        expected="text of whole characters",
        got=shown(text) if isinstance(text, str) else type(text).__name__,
        fix="convert it with str(), and leave lone surrogates out",
    )


def _packed(header: dict[str, Any]) -> bytes:
    """Return the header as it lies in the file; LayoutError where readers would refuse it. Not collective."""
    text = json.dumps(header).encode()
    if len(text) > _HEADER_NBYTES:
        raise LayoutError(
            "export_safetensors: names, shapes and metadata that readers take for damage",
            expected=f"at most {_HEADER_NBYTES} bytes of them",
            got=len(text),
            fix="leave metadata out, or export parts of the model",
        )
    return text + b" " * (-len(text) % 8)  # tensors begin at multiples of 8


def _check(name: str, x: Any) -> None:
    if name == _METADATA:
        raise LayoutError(
            f"export_safetensors: a tensor named {name!r}",
            expected="another name: that one is the metadata's",
            got=name,
            fix="rename it, or leave it out; text goes into metadata=",
        )
    if not isinstance(x, Tensor):
        raise LayoutError(
            f"export_safetensors: {name!r}", expected="a tensor", got=type(x).__name__, fix="leave it out"
        )
    block = x.block if isinstance(x, ShardTensor) else x
    if odd := unfit(block) or valueless(block):
        got, fix = odd
        raise LayoutError(
            f"export_safetensors: {name!r} cannot be stored", expected="a dense tensor with values", got=got, fix=fix
        )
    if x.dtype not in _NAMES:
        raise UnsupportedDtypeError(
            f"export_safetensors: {name!r} has a dtype that the format does not know",
            expected=", ".join(str(t).removeprefix("torch.") for t in _NAMES),
            got=x.dtype,
            fix="convert it first",
        )


class _Target:
    """The file on rank 0; errors are kept until all ranks ask for them."""

    def __init__(self, path: Path, header: dict[str, Any], text: bytes, nbytes: int) -> None:
        self.path = path
        self.partial = hidden(path, secrets.token_hex(6))
        self.header = header
        self.text = text
        self.nbytes = nbytes
        self.start = 8 + len(text)
        self.error: MpishardError | None = None

    def open(self) -> MpishardError | None:
        try:
            check_replaceable(self.path)
            check_length(self.path)
            with fresh(self.partial) as file:
                file.write(len(self.text).to_bytes(8, "little") + self.text)
                file.flush()
                if self.nbytes:
                    # now, while a full disk is an error: later, in mapped memory, it would be a signal
                    os.posix_fallocate(file.fileno(), self.start, self.nbytes)
        except Exception as e:  # noqa: BLE001 (the others wait for this rank)
            self._failed(e)
        return self.error

    def putter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        def put(box: Intervals, cells: Tensor) -> None:
            if self.error is None:
                try:
                    at = self.start + self.header[name]["data_offsets"][0]
                    whole = np.memmap(self.partial, NUMPY[dtype], "r+", at, shape or (1,))
                    whole[tuple(slice(lo, hi) for lo, hi in box) or ...] = cells.numpy()
                    whole.flush()
                except Exception as e:  # noqa: BLE001 (the others hand their cells over)
                    self._failed(e)

        return put

    def close(self) -> MpishardError | None:
        if self.error is None:
            try:
                flush(self.partial)
                os.replace(self.partial, self.path)
            except Exception as e:  # noqa: BLE001 (the others wait for this rank)
                self._failed(e)
        return self.error

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.partial.unlink(missing_ok=True)

    def _failed(self, e: Exception) -> None:
        if not isinstance(e, MpishardError):
            e = FileError(
                f"export_safetensors: cannot write {os.fspath(self.path)!r}",
                expected="a folder that rank 0 can write to, and room in it",
                got=f"{type(e).__name__}: {e}",
                fix="make the folder, or choose another one",
            )
        self.error = e
