"""Writes by ``.data`` of a parameter, which torch does not count, and by ``.grad``.

What was gathered of a parameter must not outlive them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpishard.autograd.redistribute import redistribute
from mpishard.errors import UnsupportedOperationError
from mpishard.layout import Layout, Replicate, layout_of


def data_of(x: Any) -> Tensor:
    """Return the block outside autograd; of a parameter it counts what is written into it. Not collective."""
    if not getattr(x, "_is_param", False):
        return x.block.data  # type: ignore[no-any-return]
    known = x._by_data
    if known is None or known[0] is not x.block:
        known = x._by_data = x.block, x.block.data, written(x)
    return known[1].detach()  # type: ignore[no-any-return]


def note_set(x: Any) -> None:
    """Note that the block got other memory. Not collective."""
    if getattr(x, "_is_param", False):
        x._by_data = x.block, x.block.data, written(x) + 1


def written(param: Any) -> int:
    """Return how often a parameter was written by ``.data``, or got other memory. Not collective."""
    known = param._by_data
    return 0 if known is None else known[1]._version + known[2]  # type: ignore[no-any-return]


def gradient_block(value: Any, layout: Layout, x: Any) -> Tensor:
    """Return this rank's block, in ``layout``, of what is assigned to ``x.grad``. Collective where it lies differently.

    A plain tensor is the whole on every rank. Layouts, shapes and dtypes are the same on all: all raise, or none.
    """
    held = getattr(value, "sharding", None)
    if type(value) is Tensor:
        held = layout_of(layout.mesh_shape, [Replicate()] * len(layout.mesh_shape), tuple(value.shape))
    fits = held is not None and held.shape == layout.shape and value.dtype == x.dtype
    if held is None or not fits or getattr(value, "mesh", x.mesh) is not x.mesh:
        raise UnsupportedOperationError(
            "ShardTensor.grad: assignment of another kind of tensor",
            expected=f"None, or a tensor{[*layout.shape]} of {x.dtype}: a ShardTensor on the same mesh, or a plain one",
            got=f"{type(value).__name__}{[*getattr(value, 'shape', ())]} of {getattr(value, 'dtype', 'no dtype')}",
            fix="convert it first, with .to or view_as; shard it on that mesh, with distribute_tensor",
        )
    block = value if type(value) is Tensor else value.block
    return block if held == layout else redistribute(block, x.mesh, held, layout)
