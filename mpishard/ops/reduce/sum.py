"""Sums, means and their kin: exact over the global tensor, one small all-reduce where a sharded dim is reduced."""

from __future__ import annotations

from typing import Any

import torch

from mpishard.autograd.redistribute import sum_partial
from mpishard.comm.collective import blocking
from mpishard.ops.rule.reduction import HALVES, Reduced, dim_and_keepdim, reduced, summed
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@implements(torch.sum, torch.Tensor.sum, sharded="reduction")
def sum(input: ShardTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **named: Any) -> Any:
    """Sum over dims. Collective where a reduced dim is sharded."""
    if named:
        dim, keepdim = _by_name(dim, keepdim, named, torch.sum)
    x = resolved(input) if input.sharding.partial_dims else input
    plan, local = reduced(x.sharding, dim, keepdim), x.block
    if not plan.over:
        # without dtype=, torch parses its arguments several microseconds faster
        if dtype is None:
            return wrap(local.sum(plan.dims, keepdim), plan.out, x.mesh)
        return wrap(torch.sum(local, plan.dims, keepdim, dtype=dtype), plan.out, x.mesh)
    if dtype is torch.bool:
        return _any_summed(torch.sum, x, plan, keepdim)
    if (dtype or local.dtype) not in HALVES:
        return summed(torch.sum(local, plan.dims, keepdim, dtype=dtype), x.mesh, plan.over, plan.out)
    dtype = dtype or torch.sum(local.new_zeros(())).dtype
    total = torch.sum(local, plan.dims, keepdim, dtype=torch.float32)
    return summed(total, x.mesh, plan.over, plan.out, lambda t: t.to(dtype), dtype)


@implements(torch.mean, torch.Tensor.mean, sharded="reduction")
def mean(input: ShardTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **named: Any) -> Any:
    """Sum over dims by the global count. Collective where a reduced dim is sharded."""
    if named:
        dim, keepdim = _by_name(dim, keepdim, named, torch.mean)
    x = resolved(input) if input.sharding.partial_dims else input
    plan, local = reduced(x.sharding, dim, keepdim), x.block
    if not plan.over:
        if dtype is None:
            return wrap(local.mean(plan.dims, keepdim), plan.out, x.mesh)
        return wrap(torch.mean(local, plan.dims, keepdim, dtype=dtype), plan.out, x.mesh)
    result = dtype or local.dtype
    if result in HALVES or not (result.is_floating_point or result.is_complex):
        # torch's word on its dtype, also under autocast, or on why there is none
        result = torch.mean(local.new_zeros(1), dtype=dtype).dtype
    wide = torch.float32 if result in HALVES else result
    total = torch.sum(local, plan.dims, keepdim, dtype=wide)
    return summed(total, x.mesh, plan.over, plan.out, lambda t: (t / plan.count).to(result), result)


def _any_summed(func: Any, x: ShardTensor, plan: Reduced, keepdim: bool) -> ShardTensor:
    """Return a sum of truths, of which MPI has the largest. Collective."""
    local = func(x.block, plan.dims, keepdim, dtype=torch.bool)
    return wrap(blocking.all_reduce(local, x.mesh.group(plan.over), "max"), plan.out, x.mesh)


def _by_name(dim: Any, keepdim: bool, named: dict[str, Any], func: Any) -> tuple[Any, bool]:
    return dim_and_keepdim((), {"dim": dim, "keepdim": keepdim} | named, func)


@implements(torch.nansum, torch.Tensor.nansum, sharded="reduction")
def nansum(input: ShardTensor, *args: Any, dtype: Any = None, **kwargs: Any) -> ShardTensor:
    """Sum what is not NaN. Collective where a reduced dim is sharded."""
    dim, keepdim = dim_and_keepdim(args, kwargs, torch.nansum)
    x = resolved(input)
    plan = reduced(x.sharding, dim, keepdim)
    if not plan.over:
        return wrap(torch.nansum(x.block, plan.dims, keepdim, dtype=dtype), plan.out, x.mesh)
    if dtype is torch.bool:
        return _any_summed(torch.nansum, x, plan, keepdim)
    result = torch.nansum(x.block.new_zeros(1), dtype=dtype).dtype
    wide = torch.float32 if result in HALVES else result
    local = torch.nansum(x.block, plan.dims, keepdim, dtype=wide)
    return wrap(sum_partial(local, x.mesh, plan.over).to(result), plan.out, x.mesh)


@implements(torch.nanmean, torch.Tensor.nanmean, sharded="reduction")
def nanmean(input: ShardTensor, *args: Any, dtype: Any = None, **kwargs: Any) -> ShardTensor:
    """Mean of what is not NaN. Collective where a reduced dim is sharded."""
    dim, keepdim = dim_and_keepdim(args, kwargs, torch.nanmean)
    torch.nanmean(input.block.new_zeros(1), dtype=dtype)  # of a dtype without means
    wide = torch.float32 if (dtype or input.dtype) in HALVES else dtype
    total = torch.nansum(input, dim, keepdim, dtype=wide)
    live = (~torch.isnan(input.detach())).sum(dim, keepdim)
    return (total / live).to(dtype or input.dtype)  # type: ignore[no-any-return]
