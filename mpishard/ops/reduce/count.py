"""Counts and tests of all cells: count_nonzero, any, all, equal, allclose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.redistribute import sum_partial
from mpishard.comm.collective import blocking
from mpishard.ops.rule.dim import require_dtype
from mpishard.ops.rule.reduction import dim_and_keepdim, reduced
from mpishard.tensor.operand import fitted, mesh_of, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@implements(torch.count_nonzero, torch.Tensor.count_nonzero, sharded="reduction")
def count_nonzero(input: ShardTensor, dim: Any = None) -> ShardTensor:
    """Count cells that are not zero. Collective where a reduced dim is sharded."""
    x = resolved(input)
    require_dtype(x, torch.count_nonzero)
    plan = reduced(x.sharding, dim)
    local = torch.count_nonzero(x.block, plan.dims)
    return wrap(sum_partial(local, x.mesh, plan.over), plan.out, x.mesh)


def _truth_rule(func: Callable[..., Tensor], op: str) -> Callable[..., ShardTensor]:
    def rule(input: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
        dim, keepdim = dim_and_keepdim(args, kwargs, func)
        x = resolved(input)
        if isinstance(dim, (tuple, list)) and not dim:  # no dim, where sums and maxima take all
            return wrap(func(x.block, (), keepdim), x.sharding, x.mesh)
        plan = reduced(x.sharding, dim, keepdim)
        local = func(x.block, plan.dims, keepdim) if plan.dims else func(x.block)
        if plan.over:
            local = blocking.all_reduce(local, x.mesh.group(plan.over), op)
        return wrap(local, plan.out, x.mesh)

    return rule


implements(torch.any, torch.Tensor.any, sharded="reduction")(_truth_rule(torch.any, "max"))
implements(torch.all, torch.Tensor.all, sharded="reduction")(_truth_rule(torch.all, "min"))


@implements(torch._is_any_true, sharded="reduction")
def _is_any_true(input: ShardTensor) -> ShardTensor:
    """Tell whether any cell of a boolean tensor is true. Collective."""
    _require_bool(input)
    return torch.any(input)  # type: ignore[return-value]


@implements(torch._is_all_true, sharded="reduction")
def _is_all_true(input: ShardTensor) -> ShardTensor:
    """Tell whether all cells of a boolean tensor are, as distributions look at their parameters. Collective."""
    _require_bool(input)
    return torch.all(input)  # type: ignore[return-value]


def _require_bool(x: ShardTensor) -> None:
    if x.dtype is not torch.bool:
        # torch's text
        torch._is_all_true(x.block.new_empty(0))


def _agreed(local: bool, x: ShardTensor) -> bool:
    """Whether it holds on every rank that holds other cells. Collective over them."""
    over = tuple(m for m in x.sharding.sharded_mesh_dims if x.mesh.shape[m] > 1)
    if not over:
        return local
    flag = torch.tensor(local, device="cpu")
    return bool(blocking.all_reduce(flag, x.mesh.group(over), "min"))


@implements(torch.equal, torch.Tensor.equal, sharded="reduction")
def equal(input: Any, other: Any) -> bool:
    """Tell whether shapes and all cells are the same. Collective."""
    if tuple(input.shape) != tuple(other.shape):
        return False
    mesh = mesh_of((input, other))
    x = resolved(input if isinstance(input, ShardTensor) else other)
    y = other if isinstance(input, ShardTensor) else input
    y = resolved(y)
    return _agreed(torch.equal(x.block, fitted(y, mesh, x.sharding)), x)


@implements(torch.allclose, torch.Tensor.allclose, sharded="reduction")
def allclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Tell whether all cells are close. Collective."""
    x = torch.isclose(input, other, rtol, atol, equal_nan)
    return _agreed(bool(x.block.all()), x)
