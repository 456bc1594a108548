"""A host program's arrays as torch tensors on the same memory, whatever library or language made them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.comm.memory.block import Block, host_view
from mpishard.comm.memory.buffer import unfit
from mpishard.errors import (
    LayoutError,
    MeshError,
    MpishardError,
    UnsupportedDtypeError,
    UnsupportedOperationError,
    typed_text,
)


def as_tensor(name: str, array: Any, device: torch.device, *, writable: bool) -> Tensor:
    """Return a tensor on the memory of an array: no copy.

    Not collective.

    Parameters
    ----------
    name
        What errors call the array.
    array
        A numpy array or torch tensor, an object with ``__cuda_array_interface__``, ``__dlpack__``,
        ``__array_interface__`` or Python's buffer protocol, or ``(address, dtype, shape, strides)`` with strides in
        bytes (None: C order) and, for memory of a GPU, the device as a fifth.
    device
        Where memory of a GPU may lie.
    writable
        Whether it will be written.

    Raises
    ------
    MpishardError
        It cannot be viewed in place: its dtype, strides, device or owner.
    """
    try:
        tensor = _tensor_of(name, array, device, writable=writable)
    except MpishardError:
        raise
    except Exception as e:
        # other libraries raise what they like, and perhaps on one rank alone
        raise LayoutError(
            f"{name}: an array that cannot be taken",
            expected="one whose library gives its memory, or numbers that describe it",
            got=typed_text(e),
            fix="pass an array of numpy or torch on the same memory",
        ) from e
    require_own_cells(name, tensor, written=writable)
    return tensor


def require_own_cells(name: str, tensor: Tensor, *, written: bool = True) -> None:
    """Refuse memory where a stride is 0, or, where it is written to, two cells are one. Not collective."""
    stride = tensor.stride()
    same = bool(tensor.numel()) and any(s == 0 and n > 1 for s, n in zip(stride, tensor.shape))
    if same or (written and not Block(0, tuple(tensor.shape), stride, 1).is_apart):
        raise LayoutError(
            f"{name}: cells that share memory",
            expected="strides by which no cell lies where another one does",
            got=f"shape {tuple(tensor.shape)}, strides {stride}",
            fix="pass the array itself, not one that was broadcast, nor windows of it",
        )


def _tensor_of(name: str, array: Any, device: torch.device, *, writable: bool) -> Tensor:
    if isinstance(array, np.ndarray):
        return _of_numpy(name, array, writable)
    if isinstance(array, Tensor):
        return _of_torch(name, array, device)
    if isinstance(array, tuple):
        return _of_address(name, array, writable)
    if hasattr(array, "__cuda_array_interface__"):
        if writable and array.__cuda_array_interface__["data"][1]:
            raise _read_only(name)
        return _on_device(name, array, device)
    if hasattr(array, "__dlpack__"):
        return torch.from_dlpack(array)
    return _of_buffer(name, array, writable)


def _of_numpy(name: str, array: np.ndarray, writable: bool) -> Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedOperationError(
            f"{name}: a masked array, whose mask a model would not see",
            expected="plain cells",
            got=type(array).__name__,
            fix="pass array.data (and array.mask as a field of its own, if the model is to know it)",
        )
    if not array.flags.writeable:
        if writable:
            raise _read_only(name)
        # torch warns of the array itself
        array = _viewed(array)
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as e:
        if isinstance(e, TypeError) or not array.dtype.isnative:
            raise _no_dtype(name, array.dtype) from None
        raise LayoutError(
            f"{name}: strides that torch cannot have",
            expected=f"strides that are multiples of {array.itemsize} bytes, none below 0",
            got=array.strides,
            fix="pass the array that owns the memory, not a reversed view or a member of a record",
        ) from None


def _viewed(array: np.ndarray) -> np.ndarray:
    """Return a writable view of a read-only array, which keeps it alive."""
    block = Block(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)

    class Owner:
        __array_interface__ = {**array.__array_interface__, "data": (block.address, False)}
        kept = array

    return np.asarray(Owner())


def _of_torch(name: str, array: Tensor, device: torch.device) -> Tensor:
    fault, fix = None, "pass x.detach() or x.to_local(), and require gradients of u.tensor.detach()"
    if hasattr(array, "to_local"):
        fault = "a ShardTensor"
    elif array.requires_grad:
        fault = "a tensor that requires grad"
    elif array.device.type not in ("cpu", device.type):
        fault = f"a tensor on {array.device}, which the fields are not on"
    elif odd := unfit(array):
        fault, fix = odd
    elif array.is_conj() or array.is_neg():
        fault = "a tensor without plain memory of its own"
    elif array.is_inference():
        fault = "a tensor made in inference mode, whose changes autograd does not see"
    if fault is not None:
        raise UnsupportedOperationError(
            f"{name}: not the host's plain memory",
            expected="a plain strided tensor outside autograd",
            got=fault,
            fix=fix,
        )
    return array.detach()


def _of_address(name: str, told: tuple[Any, ...], writable: bool) -> Tensor:
    if len(told) not in (4, 5) or not isinstance(told[0], (int, np.integer)):
        raise LayoutError(
            f"{name}: not the description of an array",
            expected="(address, dtype, shape, strides in bytes or None), for a GPU's memory with its device",
            got=told,
            fix="pass an integer address and the array's dtype, shape and strides",
        )
    address, dtype, shape, strides, *on = int(told[0]), *told[1:]
    kind, is_torch = _dtype(name, dtype)
    shape = tuple(int(n) for n in shape)
    block = Block(address, shape, (), kind.itemsize).dense(address)
    if strides is not None:
        strides = tuple(int(s) for s in strides)
        block = block._replace(strides=strides)
    fault = None
    if len(block.strides) != len(shape) or min(shape, default=0) < 0:
        fault = "one stride per dim, and no extent below 0"
    elif block.nbytes and (address <= 0 or address % kind.alignment):
        fault = f"an address that is a multiple of {kind.alignment}, not null"
    elif any(s < 0 or s % kind.itemsize for s in block.strides):
        fault = f"strides in bytes that are multiples of {kind.itemsize}, none below 0"
    if fault is not None:
        raise LayoutError(
            f"{name}: the memory as described cannot be viewed",
            expected=fault,
            got=f"address {address:#x}, {kind}, shape {shape}, strides {strides}",
            fix="describe the array as it lies in memory",
        )
    if on and torch.device(on[0]).type != "cpu":
        interface = {
            "data": (address, not writable),
            "shape": shape,
            "strides": block.strides,
            "typestr": kind.str,
            "version": 3,
        }
        tensor = _on_device(name, type("Memory", (), {"__cuda_array_interface__": interface})(), torch.device(on[0]))
    elif not block.nbytes:
        tensor = torch.from_numpy(np.empty(shape, kind)).as_strided(shape, [s // kind.itemsize for s in block.strides])
    else:
        tensor = torch.from_numpy(host_view(block, kind.str))
    return tensor if is_torch is None else tensor.view(is_torch)


def _dtype(name: str, dtype: Any) -> tuple[np.dtype, torch.dtype | None]:
    """Return numpy's dtype, and torch's where numpy has none and the first only has its size."""
    if not isinstance(dtype, torch.dtype):
        try:
            return np.dtype(dtype), None
        except TypeError:
            raise _no_dtype(name, dtype) from None
    try:
        return np.dtype(str(dtype).removeprefix("torch.")), None
    except TypeError:
        return np.dtype(f"i{dtype.itemsize}"), dtype


def _on_device(name: str, array: Any, device: torch.device) -> Tensor:
    interface = array.__cuda_array_interface__
    if device.type != "cuda" or not torch.cuda.is_available():
        raise MeshError(
            f"{name}: memory of a GPU that this rank does not use",
            expected=f"memory of {device}",
            got="an object with __cuda_array_interface__",
            fix="pass host memory, or adopt with device= of the GPU on which the fields lie",
        )
    tensor = torch.as_tensor(array, device=device)
    if math.prod(interface["shape"]) and tensor.data_ptr() != interface["data"][0]:
        raise MeshError(
            f"{name}: memory of another GPU than this rank's",
            expected=f"memory of {device}",
            got="an array that had to be copied",
            fix="adopt with device= of the GPU on which the fields lie",
        )
    return tensor


def _of_buffer(name: str, array: Any, writable: bool) -> Tensor:
    if not hasattr(array, "__array_interface__"):
        try:
            array = memoryview(array)
        except TypeError:
            raise UnsupportedOperationError(
                f"{name}: not an array whose memory can be shared",
                expected="an array of numpy, torch or cupy, DLPack, a buffer, or (address, dtype, shape, strides)",
                got=type(array).__name__,
                fix="pass the array that holds the cells",
            ) from None
    return _of_numpy(name, np.asarray(array), writable)


def _no_dtype(name: str, dtype: Any) -> UnsupportedDtypeError:
    return UnsupportedDtypeError(
        f"{name}: torch has no such dtype",
        expected="a number type of the machine's byte order",
        got=repr(dtype),
        fix="keep the field in float32 or float64",
    )


def _read_only(name: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"{name}: read-only memory",
        expected="memory that may be written",
        got="a read-only array",
        fix="pass writable=False where the model only reads it",
    )


def described_array(tensor: Tensor) -> str:
    """Return what an array is, for the texts of errors. Not collective."""
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}, on {tensor.device.type}"


def differs(expected: Tensor, got: Tensor) -> bool:
    """Tell whether an array cannot take another's place. Not collective."""
    return (
        got.shape != expected.shape
        or got.dtype != expected.dtype
        or got.device != expected.device
        or _strides(got) != _strides(expected)
    )


def _strides(tensor: Tensor) -> Sequence[int]:
    # of one cell, or none, any stride does
    if not tensor.numel():
        return ()
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape) if n > 1)
