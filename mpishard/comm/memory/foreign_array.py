"""Fields of a simulation or a model: numpy, torch and cupy arrays, known by where they lie in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpishard.comm.memory.block import Block, DeviceMemory, is_viewable
from mpishard.errors import LayoutError, MeshError, UnsupportedDtypeError, UnsupportedOperationError


def field_key(field: Any) -> Any:
    """Return all that a plan on the memory of ``field`` depends on. Not collective.

    Every call of an exchanger comes through here: numpy's own ways to the address cost eight times as much.
    """
    if isinstance(field, np.ndarray):
        try:
            address = MPI.Get_address(field)
        except BufferError:  # not dense
            address = field.__array_interface__["data"][0]
        return address, field.shape, field.strides, field.dtype, field.flags.num
    if isinstance(field, torch.Tensor):
        try:
            lazy = field.is_conj() or field.is_neg()
            return field.data_ptr(), field.shape, field.stride(), field.dtype, field.requires_grad, lazy
        except RuntimeError:  # no memory of its own: `locate` refuses it
            return id(field)
    interface = getattr(field, "__cuda_array_interface__", None)
    if interface is None:
        return id(field)
    address, readonly = interface["data"]
    return address, readonly, interface["shape"], interface.get("strides"), interface["typestr"]


def mark_written(field: Any) -> None:
    """Let autograd notice that a tensor, which it may have saved, has changed. Not collective."""
    if isinstance(field, torch.Tensor):
        torch.autograd.graph.increment_version(field)


def dtype_names(dtype: Any) -> tuple[str, ...]:
    """Return numpy's name of a dtype, or the names of a sequence of them; torch's are the same. Not collective."""
    if isinstance(dtype, (tuple, list)):
        return tuple(name for d in dtype for name in dtype_names(d))
    if isinstance(dtype, torch.dtype):
        return (_torch_name(dtype),)
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.hasobject or not found.itemsize:
        raise UnsupportedDtypeError(
            "cells of this dtype cannot travel",
            expected="a numpy or torch dtype of fixed size, or a sequence of them",
            got=repr(dtype),
            fix="pass the dtype of the fields, e.g. u.dtype",
        )
    return (str(found),)


def locate(name: str, field: Any, shape: tuple[int, ...], dtype: str, device: torch.device) -> Block:
    """Check that a field can be written in place, and return where it lies.

    Not collective.

    Parameters
    ----------
    name
        What errors call it.
    field
        The array.
    shape, dtype
        What it must have.
    device
        The GPU that it may lie on; host memory is always welcome.
    """
    block, found, fault = _inspect(field, device)
    if block is None:
        raise UnsupportedOperationError(
            f"{name} is no array that can be written in place",
            expected="a numpy array, a torch tensor, or an object with __cuda_array_interface__",
            got=type(field),
            fix="pass the memory itself: numpy.asarray(x, copy=False), or x.to_local() of a ShardTensor",
        )
    if block.shape != shape:
        raise LayoutError(f"{name} has another shape", expected=shape, got=block.shape, fix="pass one of this shape")
    if found != dtype:
        raise UnsupportedDtypeError(
            f"{name} has another dtype", expected=dtype, got=found, fix="pass one of this dtype"
        )
    if block.device is not None and (
        block.device.type != device.type or device.index not in (None, block.device.index)
    ):
        raise MeshError(
            f"{name} is not in memory that this rank of the mesh uses",
            expected=f"host memory, or {device}",
            got=block.device,
            fix="move the field, or make the mesh with another device=",
        )
    if fault is None and not block.is_apart:
        fault = f"cells that share memory (strides {block.strides})"
    if fault is None and block.device is not None and not is_viewable(block):
        fault = f"cells of {block.itemsize} bytes with strides {block.strides} on a GPU"
    if fault is not None:
        raise UnsupportedOperationError(
            f"{name} cannot be written in place",
            expected="a writable array with memory of its own, outside autograd",
            got=fault,
            fix="pass the array that owns the memory; x.detach() of a tensor that requires grad",
        )
    return block


def _inspect(field: Any, device: torch.device) -> tuple[Block | None, str, str | None]:
    """Return where a field lies, the name of its dtype, and why it must not be written, if so."""
    if isinstance(field, np.ndarray):
        address = field.__array_interface__["data"][0]
        fault = None if field.flags.writeable else "a read-only array"
        return Block(address, field.shape, field.strides, field.itemsize), str(field.dtype), fault
    if isinstance(field, torch.Tensor):
        try:
            address, strides = field.data_ptr(), field.stride()
        except RuntimeError:  # sparse, or a wrapper around other tensors
            return None, "", None
        fault = None
        if field.requires_grad:
            fault = "a tensor that requires grad"
        elif field.is_conj() or field.is_neg():
            fault = "a lazily conjugated or negated view"
        size = field.element_size()
        on = None if field.is_cpu else field.device
        block = Block(address, tuple(field.shape), tuple(s * size for s in strides), size, on)
        return block, _torch_name(field.dtype), fault
    interface = getattr(field, "__cuda_array_interface__", None)
    if interface is None:
        return None, "", None
    dtype = np.dtype(interface["typestr"])
    address, readonly = interface["data"]
    block = Block(address, tuple(interface["shape"]), (), dtype.itemsize, _device_of(address, device))
    strides = tuple(interface.get("strides") or block.dense(address).strides)
    return block._replace(strides=strides), str(dtype), "a read-only array" if readonly else None


def _device_of(address: int, device: torch.device) -> torch.device:
    """Return ``device`` where the memory is its own, else a device that is not."""
    if device.type != "cuda":
        return torch.device("cuda")
    # torch copies what lies elsewhere
    there = torch.as_tensor(DeviceMemory(Block(address, (1,), (1,), 1)), device=device)
    return there.device if there.data_ptr() == address else torch.device("meta")


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
