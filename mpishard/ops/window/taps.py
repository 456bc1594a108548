"""Which cells of a long dim an interpolation reads, and with what weights, found for the cells of a block alone.

torch takes the place of an output cell from its global index, in the dtype in which it adds: in float32 a place among
a million cells is rounded to a sixteenth of one. So the places here are those of the same arithmetic, and the weights
follow from them. What torch adds up differs from what is added here by rounding, and by no more.

Source: PyTorch, ``aten/src/ATen/native/UpSample.h`` and ``cpu/UpSampleKernel.cpp``; R. Keys, "Cubic convolution
interpolation for digital image processing", IEEE Trans. ASSP 29 (1981).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpishard.layout import Each

Cells = NDArray[np.int64]
Places = NDArray[np.floating]

NEAREST = ("nearest", "nearest-exact")
LINEAR = ("linear", "bilinear", "trilinear")

# half the width of a filter, in cells
_FILTERS = {"bilinear": 1, "bicubic": 2, "lanczos": 3}


class Taps(NamedTuple):
    """Which cells every output cell along a dim reads, and their weights (None: one cell, as it is).

    Attributes
    ----------
    index, weight
        (taps, cells out).
    """

    index: Tensor
    weight: Tensor | None

    def beyond(self, first: int, device: torch.device) -> Taps:
        """Return the same on a device, counted from cell ``first``."""
        return Taps((self.index - first).to(device), None if self.weight is None else self.weight.to(device))


class Along:
    """What the output cells along one dim read, as torch has it. Nothing here is collective, or as long as the dim.

    Parameters
    ----------
    n, n_out
        Extents of the dim: cells that are read, and that come out.
    scale
        Output cells for one that is read, where torch computes places from it; else the extents say it.
    mode
        As of ``torch.nn.functional.interpolate``, but "area".
    corners, antialias
        Likewise.
    dtype
        In which places are computed: float32 or float64.
    """

    def __init__(
        self,
        n: int,
        n_out: int,
        scale: float | None,
        mode: str,
        *,
        corners: bool = False,
        antialias: bool = False,
        dtype: type[np.floating] = np.float32,
    ) -> None:
        self.n, self.n_out, self.mode, self.antialias, self.dtype = n, n_out, mode, antialias, dtype
        # antialiasing has its places between the cells in any case
        self.aligned = corners and not antialias
        if corners:
            self.exact = (n - 1) / (n_out - 1) if n_out > 1 else 0.0
            self.ratio = dtype(n - 1) / dtype(n_out - 1) if n_out > 1 else dtype(0)
        else:
            self.exact = 1 / scale if scale else n / n_out
            self.ratio = dtype(1 / scale) if scale else dtype(n) / dtype(n_out)
        # how much wider than over cells a filter is
        self.stretch = max(self.ratio, dtype(1))

    def first_beyond(self, borders: Sequence[int]) -> list[int]:
        """Return for borders between cells that are read the first output cell whose place lies beyond each."""
        wanted = np.array(borders, np.float64)
        middle = np.clip(wanted / self.exact if self.exact else 0 * wanted, 0, self.n_out).astype(np.int64)
        reach = 2
        while True:  # once, but for dims so long that rounding moves a place by cells
            low, high = np.maximum(middle - reach, 0), np.minimum(middle + reach, self.n_out)
            before = (low == 0) | (self._centres(low - 1) < wanted)
            if np.all(before & ((high == self.n_out) | (self._centres(high) >= wanted))):
                break
            reach *= 4
        while np.any(low < high):
            middle = (low + high) // 2
            under = (middle < high) & (self._centres(middle) < wanted)
            low, high = np.where(under, middle + 1, low), np.where(under, high, middle)
        return low.tolist()  # type: ignore[no-any-return]

    def _centres(self, j: Cells) -> NDArray[np.float64]:
        """Return where output cells belong: a block has those that lie in it."""
        if self.mode in NEAREST:
            return self._reach(j)[0].astype(np.float64)
        return (j * self.exact if self.aligned else (j + 0.5) * self.exact - 0.5) + 0.5

    def _places(self, j: Cells) -> Places:
        """Return the places of output cells among those that are read, rounded as torch rounds them."""
        ratio = np.float64(self.ratio)  # its products with indices are exact
        if self.mode == "nearest":
            return j.astype(self.dtype) * self.ratio
        if self.antialias or self.mode == "nearest-exact":
            return ((j + 0.5) * ratio).astype(self.dtype)
        if self.aligned:
            return j.astype(self.dtype) * self.ratio
        # multiplied and subtracted in one, as compilers have it
        places = ((j.astype(self.dtype) + self.dtype(0.5)) * ratio - 0.5).astype(self.dtype)
        return np.maximum(places, 0) if self.mode in LINEAR else places

    def _reach(self, j: Cells) -> tuple[Cells, Cells]:
        """Return the first cell that output cells read, and the one after the last: neither falls."""
        places = self._places(j)
        if self.antialias:
            half = _FILTERS[self.mode] * self.stretch
            first = np.maximum((places - half + self.dtype(0.5)).astype(np.int64), 0)
            return first, np.minimum((places + half + self.dtype(0.5)).astype(np.int64), self.n)
        first = self._floor(places)
        if self.mode in NEAREST:
            return first, first + 1
        if self.mode == "bicubic":
            return np.maximum(first - 1, 0), np.minimum(first + 3, self.n)
        return first, np.minimum(first + 2, self.n)

    def _floor(self, places: Places) -> Cells:
        # torch's function for it is that of float32, also for float64
        return np.minimum(np.floor(places.astype(np.float32)).astype(np.int64), self.n - 1)

    def windows(self, cells: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Return the first cell that blocks of output cells read, and the one after the last: none falls."""

        def window(i: int) -> tuple[int, int]:
            a, b = cells[i]
            first, beyond = self._reach(np.array([a, b - 1]))
            return int(first[0]), int(beyond[1])

        return Each(len(cells), window)

    def taps(self, a: int, b: int) -> Taps:
        """Return the taps of the output cells from ``a`` to ``b``."""
        j = np.arange(a, b)
        if self.mode in NEAREST:
            return Taps(torch.from_numpy(self._reach(j)[0][None]), None)
        places = self._places(j)
        index, weight = self._filtered(j, places) if self.antialias else self._between(places)
        return Taps(torch.from_numpy(index), torch.from_numpy(weight))

    def _between(self, places: Places) -> tuple[Cells, Places]:
        first = self._floor(places)
        t = np.clip(places - first.astype(self.dtype), 0, 1)
        if self.mode == "bicubic":
            first, weight = first - 1, _cubic(np.stack([t + 1, t, 1 - t, 2 - t]), -0.75)
        else:
            weight = np.stack([1 - t, t])
        return np.clip(first + np.arange(len(weight))[:, None], 0, self.n - 1), weight

    def _filtered(self, j: Cells, places: Places) -> tuple[Cells, Places]:
        first, beyond = self._reach(j)
        index = first + np.arange((beyond - first).max())[:, None]
        x = (index.astype(self.dtype) - places + self.dtype(0.5)) / self.stretch
        weight = np.where(index < beyond, _filter(self.mode, x), self.dtype(0))
        return np.minimum(index, beyond - 1), weight / weight.sum(0)


def _cubic(x: Places, a: float) -> Places:
    """Return the weights of cells at distances of at most 2, by Keys."""
    a = x.dtype.type(a)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    return np.where(x <= 1, near, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a)


def _filter(mode: str, x: Places) -> Places:
    """Return the weights that antialiasing has for cells at distances ``x``, in widths of the filter's cells."""
    x = np.abs(x)
    if mode == "bilinear":
        return np.maximum(1 - x, 0)
    if mode == "bicubic":
        return np.where(x < 2, _cubic(x, -0.5), x.dtype.type(0))
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0).astype(x.dtype)
