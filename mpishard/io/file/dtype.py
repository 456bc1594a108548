"""The dtypes that torch and HDF5 share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.errors import UnsupportedDtypeError

NUMPY: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
TORCH = {np.dtype(n): t for t, n in NUMPY.items()}
# torch has few kernels for the wide unsigned ones
SIGNED = {torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
UNSIGNED = {s: u for u, s in SIGNED.items()}


def torch_dtype(stored: np.dtype[Any], name: str) -> torch.dtype:
    """Return the torch dtype of a dataset's type, whatever its byte order. Not collective."""
    try:
        return TORCH[stored.newbyteorder("=")]
    except KeyError:
        raise unsupported(f"read: {name!r}", stored) from None


def stored_type(dataset: Any, name: str) -> np.dtype[Any]:
    """Return the type of a dataset's cells.

    Not collective.

    Raises
    ------
    UnsupportedDtypeError
        It is none of numpy's, or none of torch's: a bitfield, say, or a record.
    """
    try:
        stored: np.dtype[Any] = dataset.dtype
    except Exception as e:
        raise unsupported(f"read: {name!r}", e) from e
    torch_dtype(stored, name)
    return stored


def numpy_dtype(dtype: torch.dtype, name: str) -> np.dtype[Any]:
    """Return the type of a dataset that holds ``dtype``. Not collective."""
    try:
        return np.dtype(NUMPY[dtype])
    except KeyError:
        raise unsupported(f"write: {name!r}", dtype) from None


def plain_bools(x: Tensor) -> Tensor:
    """Return what was read, with bools that are 0 or 1 in memory: torch counts other bytes as they are.

    Not collective; written in place.
    """
    if x.dtype is torch.bool:
        x.view(torch.uint8).clamp_(max=1)
    return x


def unsupported(what: str, dtype: object) -> UnsupportedDtypeError:
    """Return the error for a dtype that only one side knows. Not collective."""
    return UnsupportedDtypeError(
        f"{what} has a dtype that torch and HDF5 do not share",
        expected=", ".join(str(t).removeprefix("torch.") for t in NUMPY),
        got=dtype,
        fix="convert it first: a tensor with x.float(), a dataset with a program that knows it",
    )
