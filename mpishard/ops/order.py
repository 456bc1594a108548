"""Sorting and order statistics, along dims that every rank holds whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.errors import UnsupportedOperationError, described
from mpishard.layout import Layout, Shard, layout_of
from mpishard.ops.pointwise import no_out
from mpishard.ops.reduction import normal_dim, reduced
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import RULES, name_of, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _whole_dim(x: ShardTensor, dim: int | None, name: str) -> int | None:
    """Return ``dim`` counted from the front, after checking that no rank holds only part of it."""
    own = None if dim is None else normal_dim(dim, x.ndim)
    if reduced(x._layout, own).over:
        raise UnsupportedOperationError(
            described(
                f"{name} along a dim that is cut between ranks",
                expected="a dim that every rank holds whole",
                got=f"dim={dim} of {list(x._layout.placements)}",
                fix="redistribute to another dim, or gather with full_tensor()",
            )
        )
    return own


def _resized(layout: Layout, dim: int | None, t: Tensor) -> Layout:
    if dim is None or not layout.ndim:
        return reduced(layout, None).out
    shape, sizes = list(layout.shape), list(layout.sizes)
    shape[dim] = t.shape[dim]
    if sizes[dim] is not None:
        sizes[dim] = (shape[dim],)
    return layout_of(layout.mesh_shape, layout.placements, shape, sizes)


def _without(layout: Layout, dim: int | None, t: Tensor) -> Layout:
    return reduced(layout, dim, t.ndim == layout.ndim).out


def _rule(
    func: Callable[..., Any], position: int, default: int | None, layout_after: Callable[[Layout, Any, Tensor], Layout]
) -> Callable[..., Any]:
    """Return the rule of a function whose ``dim`` is argument ``position`` (not counting the input)."""
    name = name_of(func)

    def rule(input: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            raise no_out(func)
        x = resolved(input)
        given = kwargs.get("dim", args[position] if len(args) > position else default)
        dim = _whole_dim(x, given, name)
        args = tuple(a.full_tensor() if isinstance(a, ShardTensor) else a for a in args)
        found = func(x._local, *args, **kwargs)
        if isinstance(found, Tensor):
            return wrap(found, layout_after(x._layout, dim, found), x._mesh)
        return type(found)([wrap(t, layout_after(x._layout, dim, t), x._mesh) for t in found])

    return rule


for _names, _position, _default, _after in (
    ("sort argsort", 0, -1, _resized),
    ("topk", 1, -1, _resized),
    ("kthvalue", 1, -1, _without),
    ("mode", 0, -1, _without),
    ("median nanmedian", 0, None, _without),
):
    for _function in spellings(*_names.split()):
        RULES[_function] = _rule(_function, _position, _default, _after)
for _function in spellings("msort"):
    RULES[_function] = _rule(_function, 99, 0, _resized)


def _quantile_rule(func: Callable[..., Tensor]) -> Callable[..., ShardTensor]:
    name = name_of(func)

    def quantile(
        input: ShardTensor, q: Any, dim: int | None = None, keepdim: bool = False, **kwargs: Any
    ) -> ShardTensor:
        if kwargs.get("out") is not None:
            raise no_out(func)
        x = resolved(input)
        own = _whole_dim(x, dim, name)
        q = q.full_tensor() if isinstance(q, ShardTensor) else q
        local = func(x._local, q, own, keepdim, **kwargs)
        out = reduced(x._layout, own, keepdim).out
        if isinstance(q, Tensor) and q.ndim == 1:  # one result after the other, along a new dim 0
            placements = [Shard(p.dim + 1) if type(p) is Shard else p for p in out.placements]
            out = layout_of(out.mesh_shape, placements, local.shape[:1] + torch.Size(out.shape), (None, *out.sizes))
        return wrap(local, out, x._mesh)

    return quantile


for _function in spellings("quantile", "nanquantile"):
    RULES[_function] = _quantile_rule(_function)
