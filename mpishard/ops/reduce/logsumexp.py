"""Logarithm of a sum of exponentials: of the block, then of the ranks' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpishard.ops.rule.reduction import HALVES, dim_and_keepdim, in_parts, reduced, wide_of
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@implements(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp, sharded="reduction")
def logsumexp(input: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
    """Logarithm of the sum of exponentials, without overflow. Collective where a reduced dim is sharded."""
    dim, keepdim = dim_and_keepdim(args, kwargs, torch.logsumexp)
    return log_of_sum(resolved(input), dim, keepdim)


def log_of_sum(x: ShardTensor, dim: Any, keepdim: bool) -> ShardTensor:
    """Return the log-sum-exp. Collective where a reduced dim is sharded."""
    plan = reduced(x.sharding, dim, keepdim)
    if not plan.over:
        return wrap(torch.logsumexp(x.block, plan.dims, keepdim), plan.out, x.mesh)
    y = in_parts(wrap(wide_of(x.block), x.sharding, x.mesh), plan, keepdim, _log_of_block, torch.logsumexp)
    return wrap(y.to(x.block.dtype) if x.block.dtype in HALVES else y, plan.out, x.mesh)


def _log_of_block(t: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Return the log-sum-exp of a block whose derivative is zero where its cells are all -inf: torch's is NaN."""
    if not (t.is_floating_point() or t.is_complex()):
        t = t.to(torch.get_default_dtype())
    real = t.detach().real if t.is_complex() else t.detach()
    top = real.sum(dims, True) if any(t.shape[d] == 0 for d in dims) else real.amax(dims, True)
    top = torch.where(top.isfinite(), top, 0)
    total = (t - top).exp().sum(dims, True)
    nothing = total == 0
    # nothing is masked: where the whole tensor is -inf the cotangent is NaN, as torch's gradient
    y = (total + nothing).log() + torch.where(nothing, -torch.inf, top)
    return y if keepdim else y.squeeze(dims)
