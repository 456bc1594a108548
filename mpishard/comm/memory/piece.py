"""Cells of a block that a planned piece reads, writes or repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpishard.layout import Piece


def repeats(p: Piece) -> bool:
    """Whether one cell travels for several of the window. Not collective."""
    return p.step == 0 and p.count > 1


def cells(x: Tensor, dim: int, src: int, count: int, step: int) -> Tensor:
    """Return ``count`` cells of ``x`` from ``src`` in steps (a repeated cell once). Not collective."""
    if step == 1:
        return x.narrow(dim, src, count)
    if step == 0:
        return x.narrow(dim, src, min(count, 1))
    low = src if step > 0 else src + (count - 1) * step
    stride = abs(step)
    view = x.narrow(dim, low, (count - 1) * stride + 1)
    if stride > 1:
        view = view[(slice(None),) * dim + (slice(None, None, stride),)]
    return view if step > 0 else view.flip(dim)


def add_cells(x: Tensor, dim: int, src: int, count: int, step: int, values: Tensor) -> None:
    """Add ``values`` to the cells that `cells` reads: its adjoint. Not collective."""
    if step == 0:
        x.narrow(dim, src, 1).add_(values.sum(dim, keepdim=True) if values.shape[dim] != 1 else values)
    elif step > 0:
        cells(x, dim, src, count, step).add_(values)
    else:
        cells(x, dim, src + (count - 1) * step, count, -step).add_(values.flip(dim))


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last_of(x: Tensor) -> torch.memory_format | None:
    """Return the memory format of ``x`` where its channels are last in memory, else None. Not collective."""
    if x.is_contiguous():
        return None
    memory_format = _CHANNELS_LAST.get(x.ndim)
    return memory_format if memory_format is not None and x.is_contiguous(memory_format=memory_format) else None


def like_in_memory(x: Tensor, y: Tensor) -> Tensor:
    """Return ``y``, which is contiguous, in the memory format of ``x``. Not collective."""
    memory_format = channels_last_of(x)
    return y if memory_format is None else y.contiguous(memory_format=memory_format)


def empty_as(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an empty tensor of ``shape`` in the memory format of ``x``. Not collective."""
    memory_format = channels_last_of(x)
    if memory_format is None:
        return x.new_empty(tuple(shape))
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device, memory_format=memory_format)
