"""What stands in for the empty blocks that torch refuses, or whose graph it ends at the first gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.graph import apart
from mpishard.comm.memory.buffer import cat


def filled(x: Any, cells: int = 1) -> Any:
    """Return a block, or None, with ``cells`` along dims that have none, made of the block for its graph.

    Not collective.
    """
    return x.new_zeros([n or cells for n in x.shape]) + x.sum().to(x.dtype) if x is not None and 0 in x.shape else x


def unfilled(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return what belongs to a block of ``shape`` that was filled. Not collective."""
    return apart(y[tuple(slice(n) for n in shape)]) if 0 in shape else y


def scanned(func: Callable[..., Tensor], x: Tensor, dim: int, extra: dict[str, Any], shape: tuple[int, ...]) -> Tensor:
    """Scan a block of a tensor of ``shape``: torch's graph for one cell or none alone ends at the first gradient.

    Not collective.
    """
    if x.numel() > 1 or not (x.requires_grad and shape):
        return func(x, dim, **extra)
    cells = min(shape[dim], 2)  # of one, it may end on every rank
    if x.numel():
        more = cat([x, torch.ones_like(x)], dim) if cells > 1 else x
    else:
        more = x.new_ones([max(n, cells if d == dim else 1) for d, n in enumerate(x.shape)]) + x.sum()
    # a copy: torch may keep the result for its derivative
    return func(more, dim, **extra)[tuple(slice(n) for n in x.shape)].clone()
