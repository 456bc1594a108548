"""What stands in for the empty blocks that torch refuses, or whose graph it ends at the first gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def filled(x: Any, cells: int = 1) -> Any:
    """Return a block, or None, with ``cells`` along dims that have none, made of the block for its graph.

    Not collective.
    """
    return x.new_zeros([n or cells for n in x.shape]) + x.sum().to(x.dtype) if x is not None and 0 in x.shape else x


def unfilled(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return what belongs to a block of ``shape`` that was filled. Not collective."""
    return y[tuple(slice(n) for n in shape)] if 0 in shape else y
