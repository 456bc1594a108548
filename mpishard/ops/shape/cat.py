"""Joining tensors: every operand is brought to the result's layout, then joined block by block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.redistribute import redistribute
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError, described
from mpishard.layout import Layout, Placement, Replicate, Shard, bounds, layout_of
from mpishard.ops.rule.dim import wrapped
from mpishard.tensor.operand import mesh_of, replicated_layout, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Join(NamedTuple):
    """The layouts in which operands meet, and that of the result."""

    operands: tuple[Layout, ...]
    out: Layout


_joins: dict[Any, Join] = {}


def _first(operands: Sequence[Layout]) -> tuple[tuple[Placement, ...], tuple[Any, ...]]:
    """Return placements and block sizes of the result: those of the first operand that is sharded there."""
    placements = list(operands[0].placements)
    for layout in operands[1:]:
        for m, p in enumerate(layout.placements):
            if type(p) is Shard and type(placements[m]) is Replicate:
                placements[m] = p
    shards: dict[int, tuple[int, ...]] = {}
    for m, p in enumerate(placements):
        if type(p) is Shard:
            shards[p.dim] = (*shards.get(p.dim, ()), m)
    sizes = [
        next((o.sizes[d] for o in operands if o.shard_dims.get(d) == shards.get(d, ())), None)
        for d in range(operands[0].ndim)
    ]
    return tuple(placements), tuple(sizes)


def _check_extents(name: str, operands: Sequence[Layout], dim: int | None) -> None:
    for layout in operands:
        if layout.ndim != operands[0].ndim or any(
            n != m for d, (n, m) in enumerate(zip(layout.shape, operands[0].shape)) if d != dim
        ):
            raise LayoutError(
                described(
                    f"{name}: shapes do not fit",
                    expected="equal extents" + ("" if dim is None else f" in every dim but {dim}"),
                    got=[tuple(o.shape) for o in operands],
                    fix="bring the tensors to one shape",
                )
            )


def plan_cat(operands: Sequence[Layout], dim: int) -> Join:
    """Plan the concatenation of tensors in any layouts. Not collective.

    Where the joined dim is sharded, the result has balanced blocks; each operand is cut where these cut it.
    """
    _check_extents("cat", operands, dim)
    placements, sizes = _first(operands)
    mesh_shape = operands[0].mesh_shape
    ends = bounds(tuple(o.shape[dim] for o in operands))
    shape = (*operands[0].shape[:dim], ends[-1], *operands[0].shape[dim + 1 :])
    out = layout_of(mesh_shape, placements, shape, (*sizes[:dim], None, *sizes[dim + 1 :]))
    targets = []
    for o, start, stop in zip(operands, ends[:-1], ends[1:]):
        cut = None
        if out.sizes[dim] is not None:
            b = bounds(out.sizes[dim])
            cut = tuple(max(0, min(hi, stop) - max(lo, start)) for lo, hi in zip(b[:-1], b[1:]))
        targets.append(layout_of(mesh_shape, placements, o.shape, (*sizes[:dim], cut, *sizes[dim + 1 :])))
    return Join(tuple(targets), out)


def plan_stack(operands: Sequence[Layout], dim: int) -> Join:
    """Plan the stacking of tensors in any layouts along a new dim. Not collective."""
    _check_extents("stack", operands, None)
    placements, sizes = _first(operands)
    meet = layout_of(operands[0].mesh_shape, placements, operands[0].shape, sizes)
    moved = [Shard(p.dim + (p.dim >= dim)) if type(p) is Shard else p for p in placements]
    shape = (*meet.shape[:dim], len(operands), *meet.shape[dim:])
    out = layout_of(meet.mesh_shape, moved, shape, (*meet.sizes[:dim], None, *meet.sizes[dim:]))
    return Join((meet,) * len(operands), out)


def _aligned(tensors: Sequence[Any], dim: int, plan: Any) -> tuple[list[Tensor], Layout, CartMesh]:
    mesh = mesh_of(tensors)
    tensors = [resolved(t) if isinstance(t, ShardTensor) else t for t in tensors]
    key = (plan, dim, *[t.sharding if isinstance(t, ShardTensor) else t.shape for t in tensors])
    join = _joins.get(key)
    if join is None:
        # layouts of ShardTensors first: a plain tensor has none to follow
        layouts = [t.sharding if isinstance(t, ShardTensor) else replicated_layout(mesh, t.shape) for t in tensors]
        if len(_joins) > 65536:
            _joins.clear()
        join = _joins[key] = plan(layouts, dim)
    blocks = [
        redistribute(t.block, mesh, t.sharding, target)
        if isinstance(t, ShardTensor)
        else redistribute(t, mesh, replicated_layout(mesh, t.shape), target)
        for t, target in zip(tensors, join.operands)
    ]
    return blocks, join.out, mesh


@implements(torch.cat, torch.concat, torch.concatenate, sharded="moves")
def cat(tensors: Sequence[Any], dim: int = 0, *, axis: int | None = None) -> ShardTensor:
    """Concatenate. Collective where operands are laid out differently, or along a sharded dim.

    The result is laid out as the first operand that is sharded; along a sharded dim its blocks are balanced.
    """
    # torch skips the empty vectors that old code starts its lists with, but for the dtype
    cells = [t for t in tensors if tuple(t.shape) != (0,)] or list(tensors)
    if len(cells) < len(tensors):
        dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
        cells = [t.to(dtype) for t in cells]
    dim = dim if axis is None else axis
    if not any(isinstance(t, ShardTensor) for t in cells):
        return torch.cat(cells, dim)  # type: ignore[return-value]
    dim = wrapped(dim, cells[0].ndim)
    blocks, layout, mesh = _aligned(cells, dim, plan_cat)
    return wrap(torch.cat(blocks, dim), layout, mesh)


@implements(torch.stack, sharded="moves")
def stack(tensors: Sequence[Any], dim: int = 0) -> ShardTensor:
    """Join along a new dim. Collective where operands are laid out differently."""
    dim = wrapped(dim, tensors[0].ndim + 1)
    blocks, layout, mesh = _aligned(tensors, dim, plan_stack)
    return wrap(torch.stack(blocks, dim), layout, mesh)


def _join_rule(grow: Any, dim_of: Any) -> Any:
    def rule(tensors: Sequence[Any]) -> Any:
        grown = [grow(t) for t in tensors]
        return torch.cat(grown, dim_of(grown[0].ndim))

    return rule


def _as_column(x: Any) -> Any:
    return x.reshape(-1, 1) if x.ndim < 2 else x


implements(torch.hstack, sharded="moves")(_join_rule(torch.atleast_1d, lambda ndim: 0 if ndim == 1 else 1))
implements(torch.vstack, torch.row_stack, sharded="moves")(_join_rule(torch.atleast_2d, lambda _: 0))
implements(torch.dstack, sharded="moves")(_join_rule(torch.atleast_3d, lambda _: 2))
implements(torch.column_stack, sharded="moves")(_join_rule(_as_column, lambda _: 1))
