"""Joining tensors: every operand is brought to the result's layout, then joined block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.redistribute import redistribute
from mpishard.errors import LayoutError
from mpishard.layout import Alignment, Layout, align, bounds, layout_of, moved_borders, sizes_of
from mpishard.layout.remembered import remembered
from mpishard.ops.rule.dim import normal_dim
from mpishard.tensor.function import block_of
from mpishard.tensor.operand import blocks_of
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _check_extents(name: str, operands: Sequence[Layout], dim: int | None) -> None:
    for layout in operands:
        if layout.ndim != operands[0].ndim or any(
            n != m for d, (n, m) in enumerate(zip(layout.shape, operands[0].shape)) if d != dim
        ):
            raise LayoutError(
                f"{name}: shapes do not fit",
                expected="equal extents" + ("" if dim is None else f" in every dim but {dim}"),
                got=[tuple(o.shape) for o in operands],
                fix="bring the tensors to one shape",
            )


Join = tuple[tuple[Layout, ...], Layout]  # where the operands meet, and the layout of the result


def _met(name: str, operands: Sequence[Layout], dim: int | None) -> Alignment:
    """Return where operands meet whose extents are equal but along ``dim``."""
    _check_extents(name, operands, dim)
    labels = tuple(range(operands[0].ndim))
    extents = {d: n for d, n in enumerate(operands[0].shape) if d != dim}
    return align(operands, [labels] * len(operands), extents)


@remembered
def plan_cat(operands: tuple[Layout, ...], dim: int) -> Join:
    """Plan the concatenation of tensors in any layouts. Not collective.

    Where the joined dim is sharded, the result has balanced blocks; each operand is cut where these cut it.
    """
    plan = _met("cat", operands, dim)
    ends = bounds(tuple(o.shape[dim] for o in operands))
    out = plan.result(range(operands[0].ndim), (*operands[0].shape[:dim], ends[-1], *operands[0].shape[dim + 1 :]))
    if out.sizes[dim] is None:
        return plan.operands, out
    targets = []
    for o, start, stop in zip(operands, ends[:-1], ends[1:]):
        cut = sizes_of(moved_borders(out.sizes[dim], 1, -start, 1, stop - start))
        targets.append(layout_of(out.mesh_shape, out.placements, o.shape, {**plan.sizes, dim: cut}))
    return tuple(targets), out


@remembered
def plan_stack(operands: tuple[Layout, ...], dim: int) -> Join:
    """Plan the stacking of tensors in any layouts along a new dim. Not collective."""
    plan = _met("stack", operands, None)
    shape, labels = list(operands[0].shape), list(range(operands[0].ndim))
    return plan.operands, plan.result((*labels[:dim], None, *labels[dim:]), (*shape[:dim], len(operands), *shape[dim:]))


def _concatenated(blocks: Sequence[Tensor], dim: int) -> Tensor:
    if all(x.ndim == 1 for x in blocks):
        # torch ends the graph of an empty vector, which old code starts its lists with: on this rank alone
        return torch.cat([x.unsqueeze(1) for x in blocks]).squeeze(1)
    return torch.cat(list(blocks), dim)


def _joined(func: Callable[..., Tensor], plan: Callable[..., Join], tensors: Sequence[Any], dim: int) -> ShardTensor:
    mesh, blocks, layouts = blocks_of(tensors)
    targets, out = plan(layouts, dim)
    blocks = [redistribute(x, mesh, *how) for x, *how in zip(blocks, layouts, targets)]
    return wrap(func(blocks, dim), out, mesh)


@implements(torch.cat, torch.concat, torch.concatenate, sharded="moves")
def cat(tensors: Sequence[Any], dim: int = 0, *, axis: int | None = None) -> ShardTensor:
    """Concatenate. Collective where operands are laid out differently, or along a sharded dim.

    The result is laid out as the first operand that is sharded; along a sharded dim its blocks are balanced.
    """
    # torch skips the empty vectors that old code starts its lists with, but for the dtype
    cells, empty = [t for t in tensors if tuple(t.shape) != (0,)] or list(tensors), []
    if len(cells) < len(tensors):
        dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
        cells = [t.to(dtype) for t in cells]
        # the graph goes on through them
        empty = [block_of(t).to(dtype) for t in tensors if t.requires_grad and tuple(t.shape) == (0,)]
    dim = dim if axis is None else axis
    if not any(isinstance(t, ShardTensor) for t in cells):
        return torch.cat([*empty, *cells], dim)  # type: ignore[return-value]
    for i, t in enumerate(cells):
        if not t.ndim:
            raise RuntimeError(f"zero-dimensional tensor (at position {i}) cannot be concatenated")
    dim = normal_dim(dim, cells[0].ndim)
    out = _joined(_concatenated, plan_cat, cells, dim)
    if not empty:
        return out
    return wrap(_concatenated([*empty, out.block], dim), out.sharding, out.mesh)


@implements(torch.stack, sharded="moves")
def stack(tensors: Sequence[Any], dim: int = 0) -> ShardTensor:
    """Join along a new dim. Collective where operands are laid out differently."""
    dim = normal_dim(dim, tensors[0].ndim + 1)
    return _joined(torch.stack, plan_stack, tensors, dim)


def _join_rule(grow: Any, dim_of: Any) -> Any:
    def rule(tensors: Sequence[Any]) -> Any:
        grown = [grow(t) for t in tensors]
        return torch.cat(grown, dim_of(grown[0].ndim))

    return rule


implements(torch.hstack, sharded="moves")(_join_rule(torch.atleast_1d, lambda ndim: 0 if ndim == 1 else 1))
implements(torch.vstack, torch.row_stack, sharded="moves")(_join_rule(torch.atleast_2d, lambda _: 0))
implements(torch.dstack, sharded="moves")(_join_rule(torch.atleast_3d, lambda _: 2))
implements(torch.column_stack, sharded="moves")(
    _join_rule(lambda x: x.reshape(-1, 1) if x.ndim < 2 else x, lambda _: 1)
)
