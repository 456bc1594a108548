"""Packed values to numbers, by the attributes of the CF conventions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpishard.errors import FileError
from mpishard.io.file.open import import_h5py

# of one attribute: these are numbers, a few at most
_ATTRIBUTE_NBYTES = 1 << 16


class Decoding(NamedTuple):
    """``stored * scale + offset``, and NaN where ``stored`` is one of ``missing``."""

    scale: float
    offset: float
    missing: tuple[Any, ...]
    dtype: torch.dtype

    def __call__(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the decoded values of stored ones. Not collective."""
        out = raw.to(dtype)
        if out is raw and (self.scale != 1 or self.offset != 0 or self.missing):
            out = out.clone()
        if self.scale != 1:
            out.mul_(self.scale)
        if self.offset != 0:
            out.add_(self.offset)
        for value in self.missing:
            if value == value:  # NaN stays NaN without our help
                out.masked_fill_(raw == value, float("nan"))
        return out


def decoding_of(dataset: Any, stored: torch.dtype) -> Decoding | None:
    """Return how a dataset is decoded, or None where its attributes say nothing.

    Not collective.

    Parameters
    ----------
    dataset
        An h5py dataset; ``scale_factor``, ``add_offset``, ``_FillValue`` and ``missing_value`` count.
    stored
        Its dtype. Integers of up to 16 bits, and half and single precision, become float32, all others
        float64.
    """
    scale, offset = (_numbers(dataset, key)[:1] for key in ("scale_factor", "add_offset"))
    missing = [v for key in ("_FillValue", "missing_value") for v in _numbers(dataset, key)]
    if scale in ([], [1]) and offset in ([], [0]) and not missing:
        return None
    small = stored in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.float32)
    dtype = torch.float32 if small else torch.float64
    return Decoding(float(*scale or [1]), float(*offset or [0]), tuple(dict.fromkeys(missing)), dtype)


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
            number = own.get_type().get_class() in (h5t.INTEGER, h5t.FLOAT, h5t.ENUM)
            each = np.asarray(dataset.attrs[key]).ravel().tolist() if number else []
            numbers = [v for v in each if isinstance(v, (int, float))]
            if numbers or key in ("_FillValue", "missing_value"):
                return numbers
        got: object = f"{nbytes} bytes" if nbytes > _ATTRIBUTE_NBYTES else "no number"
    except Exception as e:  # noqa: BLE001 (h5py raises what it likes)
        got = f"{type(e).__name__}: {e}"
    raise FileError(
        f"read: attribute {key!r} of {dataset.name!r}",
        expected="a number",
        got=got,
        fix="read it with decode=False, or mend the attribute",
    )
