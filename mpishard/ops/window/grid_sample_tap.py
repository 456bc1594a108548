"""Which cells a point of a grid reads, with which weights: the arithmetic of grid_sample along one dim, and its sums.

Torch's own function takes coordinates relative to the whole field: given a window of it, they would be rounded
otherwise, and a point on a cell could read its other neighbour.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.graph import unpacked

_A = -0.75  # of the cubic convolution, as torch has it


class PointTaps(NamedTuple):
    """What points read along one dim.

    Attributes
    ----------
    index
        (taps, batch, points): cells of the whole dim, always inside.
    weight
        The same shape.
    inside
        Which of them count (None: all); the weight of the others is zero, and what lies there, NaN maybe, is not read.
    """

    index: Tensor
    weight: Tensor
    inside: Tensor | None

    def interval(self) -> tuple[int, int] | None:
        """Return the cells from the first to the last that counts, or None where no cell does. Not collective."""
        cells = self.index if self.inside is None else self.index[self.inside]
        return (int(cells.min()), int(cells.max()) + 1) if cells.numel() else None


def taps_of(grid: Tensor, n: int, ndim: int, mode: str, padding_mode: str, align_corners: bool) -> PointTaps:
    """Return what points read along a dim of ``n`` cells.

    Not collective.

    Parameters
    ----------
    grid
        (batch, points), from -1 to 1 within the field.
    n, ndim
        Extent of the dim, and number of spatial dims.
    mode, padding_mode, align_corners
        As of ``torch.nn.functional.grid_sample``.
    """
    place = _place(grid, n, align_corners, ndim)
    if mode != "bicubic":
        place = _padded(place, n, padding_mode, align_corners)
    if mode == "nearest":
        # half to even, as torch; in the graph all the same, with a zero gradient
        first, steps = place.detach().round(), range(1)
        weights = [torch.where(torch.zeros_like(first, dtype=torch.bool), place, 1)]
    else:
        first = place.detach().floor()
        t = place - first
        if mode == "bilinear":
            weights, steps = [1 - t, t], range(2)
        else:
            weights, steps = [_far(t + 1), _near(t), _near(1 - t), _far(2 - t)], range(-1, 3)
    # what is so far outside, or not a number, has no index
    whole = first.nan_to_num(nan=-(2.0**40)).clamp(-(2.0**40), 2.0**40).long()
    index = torch.stack([whole + k for k in steps])
    weight = torch.stack(weights)
    inside = None
    if padding_mode == "zeros" or mode == "bilinear":
        inside = (index >= 0) & (index < n)
        weight = torch.where(inside, weight, 0)
    elif mode == "bicubic" and padding_mode == "reflection":
        index = _mirrored(index, n, align_corners)
    return PointTaps(index.clamp(0, n - 1), weight, inside)


def _place(grid: Tensor, n: int, align_corners: bool, ndim: int) -> Tensor:
    """Return the points as places among the cells, to the last bit as torch has them."""
    if align_corners:
        return (grid + 1) * ((n - 1) / 2)
    place = (grid + 1) * (n / 2) - 0.5
    if _rounds_once(ndim, grid.dtype, grid.device):
        place = place + (_rounded_once(grid.detach() + 1, n) - place.detach())
    return place


def _rounded_once(x: Tensor, n: int) -> Tensor:
    """Return ``x * n / 2 - 0.5`` with one rounding instead of two, as a fused multiply-add has it."""
    if x.dtype == torch.float32:
        return (x.double() * (n / 2) - 0.5).float()
    # the products of both parts are exact
    high = x.float().double()
    return (high * (n / 2) - 0.5) + (x - high) * (n / 2)


@functools.cache
def _rounds_once(ndim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether torch multiplies and subtracts in one instruction here: asked at a place where it matters."""
    for n in range(3, 1000):
        x = (torch.arange(n, dtype=dtype, device="cpu") * 2 + 1) / n
        places = x * (n / 2) - 0.5, _rounded_once(x, n)
        differs = (places[0].floor() != places[1].floor()).nonzero()
        if not len(differs) or not 0 < places[0][k := int(differs[0])] < n - 1:
            continue
        point = (x[k] - 1).item()
        if x[k] != torch.tensor(point, dtype=dtype, device="cpu") + 1:
            continue
        # in a checkpoint it counts for nothing: it is not made again with the rest
        with torch.inference_mode(False), torch.enable_grad(), unpacked():
            grid = torch.zeros((1,) * (ndim + 1) + (ndim,), dtype=dtype, device=device)
            grid[..., 0] = point
            grid.requires_grad_()
            # the slope between the cells of squares tells which two they are
            squares = torch.arange(n, dtype=dtype, device=device).square().expand(*(1,) * (ndim + 1), n)
            value = torch.nn.functional.grid_sample(squares, grid, "bilinear", "border", align_corners=False)
            (slope,) = torch.autograd.grad(value.sum(), grid)
        return round(slope.flatten()[0].item() / n - 0.5) == int(places[1][k].floor())
    return False


def _padded(place: Tensor, n: int, padding_mode: str, align_corners: bool) -> Tensor:
    """Return places brought inside; their derivative is zero on the border itself, as torch has it."""
    if padding_mode == "zeros":
        return place
    if padding_mode == "reflection":
        low, period = (0.0, 2.0 * (n - 1)) if align_corners else (-0.5, 2.0 * n)
        if not period:
            return (place * 0).nan_to_num()
        away = (place - low).abs()
        rest = away - (away.detach() / period).trunc() * period
        place = torch.where(rest > period - rest, period - rest, rest) + low
    within = (place > 0) & (place < n - 1)
    whole = place.detach()
    # times zero, as torch does: a cotangent that is not a number stays none
    return whole.nan_to_num(nan=0.0).clamp(0, n - 1) + (place - whole) * within


def _mirrored(index: Tensor, n: int, align_corners: bool) -> Tensor:
    if align_corners:
        period = max(2 * (n - 1), 1)
        rest = index.abs() % period
        return torch.minimum(rest, period - rest)
    rest = torch.where(index < 0, -1 - index, index) % (2 * n)
    return torch.minimum(rest, 2 * n - 1 - rest)


def _near(x: Tensor) -> Tensor:
    return ((_A + 2) * x - (_A + 3)) * x * x + 1


def _far(x: Tensor) -> Tensor:
    return ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A


def weighted_sum(field: Tensor, taps: Sequence[PointTaps], origin: Sequence[int]) -> Tensor:
    """Return the values at points, by batch and channel.

    Not collective.

    Parameters
    ----------
    field
        Batch, channels, extents: all cells that count.
    taps
        Per spatial dim.
    origin
        Index of the field's first cell, per spatial dim.
    """
    extents = field.shape[2:]
    cells, channels = field.flatten(2), field.shape[1]
    total = None
    for combination in itertools.product(*(range(len(t.index)) for t in taps)):
        # cells that do not count may lie outside the window
        steps = [
            (tap.index[k] - origin[d]).clamp(0, extents[d] - 1) * math.prod(extents[d + 1 :])
            for d, (k, tap) in enumerate(zip(combination, taps))
        ]
        at = functools.reduce(torch.add, steps)
        weight = functools.reduce(torch.mul, [tap.weight[k] for k, tap in zip(combination, taps)])
        values = cells.gather(2, at[:, None].expand(-1, channels, -1))
        for k, tap in zip(combination, taps):
            if tap.inside is not None and not tap.inside[k].all():
                values = torch.where(tap.inside[k][:, None], values, 0)
        part = values * weight[:, None]
        total = part if total is None else total + part
    assert total is not None
    return total
