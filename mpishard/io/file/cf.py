"""Packed values to numbers, by the attributes of the CF conventions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


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
    attrs = dataset.attrs
    scale, offset = (_number(attrs, key, value) for key, value in (("scale_factor", 1.0), ("add_offset", 0.0)))
    missing: list[Any] = []
    for key in ("_FillValue", "missing_value"):
        if key in attrs:
            missing += [v for v in np.asarray(attrs[key]).ravel().tolist() if isinstance(v, (int, float))]
    if scale == 1 and offset == 0 and not missing:
        return None
    small = stored in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.float32)
    return Decoding(scale, offset, tuple(dict.fromkeys(missing)), torch.float32 if small else torch.float64)


def _number(attrs: Any, key: str, value: float) -> float:
    return float(np.asarray(attrs[key]).ravel()[0]) if key in attrs else value
