"""Blocks of window operations: cropped to their part, and batches without planes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mpishard.autograd.graph import apart
from mpishard.ops.rule.empty_block import filled


def cropped(y: Tensor, crops: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the part (dim, start, length) of ``y`` along some dims. Not collective."""
    for dim, start, length in crops:
        y = y.narrow(dim, start, length)
    return apart(y) if crops else y


def on_planes(func: Callable[[Tensor], Any], x: Tensor, ndim: int) -> Any:
    """Return ``func(x)`` for a function of the last ``ndim`` dims, which may refuse a block without planes.

    Not collective.
    """
    lead = x.shape[:-ndim]
    if 0 not in lead:
        return func(x)
    # torch allows no cells along the batch dim alone, and not every kernel of a GPU does (docs/upstream.md)
    out = func(filled(x.reshape(0, 1, *x.shape[-ndim:])))
    shaped = [apart(t[:0].reshape(*lead, *t.shape[2:])) for t in (out if isinstance(out, tuple) else (out,))]
    return tuple(shaped) if isinstance(out, tuple) else shaped[0]
