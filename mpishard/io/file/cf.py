"""Packed values to numbers, by the attributes of the CF conventions."""

from __future__ import annotations

import cmath
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpishard.errors import FileError
from mpishard.io.file.dtype import SIGNED, UNSIGNED
from mpishard.io.file.open import import_h5py, looked_at

# of one attribute: these are numbers, a few at most
_ATTRIBUTE_NBYTES = 1 << 16


class Decoding(NamedTuple):
    """``stored * scale + offset``, and NaN where ``stored``, a number of type ``bits``, is one of ``missing``."""

    scale: float
    offset: float
    missing: tuple[Any, ...]
    bits: torch.dtype
    dtype: torch.dtype

    def __call__(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the decoded values of stored ones. Not collective."""
        raw = raw.view(self.bits)
        # in the wider of both: packed values, or sums of them, may not fit into the narrower
        out = raw.to(torch.promote_types(self.dtype, dtype))
        if out is raw and (self.scale != 1 or self.offset != 0 or self.missing):
            out = out.clone()
        if self.scale != 1:
            out.mul_(self.scale)
        if self.offset != 0:
            out.add_(self.offset)
        for value in self.missing:
            if value == value:  # NaN stays NaN without our help
                out.masked_fill_(raw == value, float("nan"))
        return out.to(dtype)


def decoding_of(dataset: Any, stored: torch.dtype) -> Decoding | None:
    """Return how a dataset is decoded, or None where its attributes say nothing.

    Not collective.

    Parameters
    ----------
    dataset
        An h5py dataset; ``scale_factor``, ``add_offset``, ``_FillValue``, ``missing_value`` and ``_Unsigned`` count.
    stored
        Its dtype. Integers of up to 16 bits, and half and single precision, become float32, complex numbers stay what
        they are, all others become float64.

    References
    ----------
    CF Conventions 1.12, 8.1, Packed Data; NetCDF Users Guide, Attribute Conventions, ``_Unsigned``.
    """
    scale, offset = (_numbers(dataset, key)[:1] for key in ("scale_factor", "add_offset"))
    missing = [v for key in ("_FillValue", "missing_value") for v in _numbers(dataset, key)]
    bits = {"true": UNSIGNED, "false": SIGNED}.get(_signedness(dataset), {}).get(stored, stored)
    if scale in ([], [1]) and offset in ([], [0]) and not missing and bits is stored:
        return None
    small = bits.itemsize < 4 or bits is torch.float32
    dtype = bits if bits.is_complex else torch.float32 if small else torch.float64
    values = dict.fromkeys(v for m in missing for v in _as_stored(m, bits))
    return Decoding(float(*scale or [1]), float(*offset or [0]), tuple(values), bits, dtype)


def _as_stored(value: Any, dtype: torch.dtype) -> list[Any]:
    """Return a missing value as it is stored, -1 in unsigned bytes as 255; nothing where no number is like it."""
    if dtype is torch.bool:
        return [value]
    if dtype.is_floating_point or dtype.is_complex:
        # 1e20 of a half would be its infinity, which is a value
        like = torch.tensor(value, dtype=dtype, device="cpu").item()
        return [value] if cmath.isfinite(like) or not cmath.isfinite(value) else []
    if not math.isfinite(value) or value != int(value):
        return []
    low, high, value = torch.iinfo(dtype).min, torch.iinfo(dtype).max, int(value)
    span = high - low + 1
    fits = low <= value <= high
    turned = value + span if value < low else value - span
    return [value] if fits else [turned] if low <= turned <= high else []


def _signedness(dataset: Any) -> str:
    """Return what the attribute ``_Unsigned`` says, in lower case; nothing where there is none, or no text."""
    key = "_Unsigned"
    if key not in dataset.attrs:
        return ""
    try:
        own = dataset.attrs.get_id(key)
        kind = own.get_type()
        if kind.get_class() != import_h5py().h5t.STRING or own.get_storage_size() > _ATTRIBUTE_NBYTES:
            return ""
        if kind.is_variable_str():
            # it lies in a heap, which may be damaged
            with looked_at(Path(dataset.file.filename)) as file:
                value = file[dataset.name].attrs[key]
        else:
            value = dataset.attrs[key]
    except FileError:
        raise
    except Exception as e:
        raise _unreadable(dataset, key, "'true' or 'false'", f"{type(e).__name__}: {e}") from e
    value = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    return value.strip().lower() if isinstance(value, str) else ""


def _numbers(dataset: Any, key: str) -> list[Any]:
    """Return the numbers of an attribute, none where there is no such attribute or where it is text."""
    if key not in dataset.attrs:
        return []
    h5t = import_h5py().h5t
    try:
        own = dataset.attrs.get_id(key)
        nbytes = own.get_storage_size()
        if nbytes <= _ATTRIBUTE_NBYTES:
            # text and lists lie elsewhere, in a heap that may be damaged: HDF5 would never come back
            kinds: tuple[type, ...] = (int, float)
            number = own.get_type().get_class() in (h5t.INTEGER, h5t.FLOAT, h5t.ENUM)
            if own.dtype.kind == "c" and dataset.dtype.kind == "c" and key not in ("scale_factor", "add_offset"):
                kinds, number = (int, float, complex), True
            each = np.asarray(dataset.attrs[key]).ravel().tolist() if number else []
            numbers = [v for v in each if isinstance(v, kinds)]
            if numbers or key in ("_FillValue", "missing_value"):
                return numbers
        got: object = f"{nbytes} bytes" if nbytes > _ATTRIBUTE_NBYTES else "no number"
    except Exception as e:  # noqa: BLE001 (h5py raises what it likes)
        got = f"{type(e).__name__}: {e}"
    raise _unreadable(dataset, key, "a number", got)


def _unreadable(dataset: Any, key: str, expected: str, got: object) -> FileError:
    return FileError(
        f"read: attribute {key!r} of {dataset.name!r}",
        expected=expected,
        got=got,
        fix="read it with decode=False, or mend the attribute",
    )
