"""Logarithm of a sum of exponentials: of the block, then of the ranks' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.linear import differentiated, in_transform, node_of
from mpishard.autograd.use import use
from mpishard.comm.mesh import CartMesh
from mpishard.ops.rule.reduction import HALVES, Reduced, combined, dim_and_keepdim, reduced, wide_of
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@implements(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp, sharded="reduction")
def logsumexp(input: ShardTensor, dim: Any, keepdim: bool = False) -> ShardTensor:
    """Logarithm of the sum of exponentials, without overflow. Collective where a reduced dim is sharded."""
    dim, keepdim = dim_and_keepdim((dim, keepdim), {}, torch.logsumexp, named=True)
    if not keepdim and input.ndim and isinstance(dim, Sequence) and not dim:
        raise RuntimeError("logsumexp: dim=() needs keepdim=True; name the dims")  # as torch does
    return log_of_sum(resolved(input), dim, keepdim)


def log_of_sum(x: ShardTensor, dim: Any, keepdim: bool) -> ShardTensor:
    """Return the log-sum-exp. Collective where a reduced dim is sharded."""
    plan = reduced(x.sharding, dim, keepdim)
    if not plan.over:
        return wrap(torch.logsumexp(x.block, plan.dims, keepdim), plan.out, x.mesh)
    cells = wide_of(x.block)
    # in a transform, and in forward mode, it is composed of the ranks' own
    function = _node if differentiated(cells) and not in_transform() else _log_over_ranks
    y = function(cells, x.mesh, plan, keepdim)
    return wrap(y.to(x.block.dtype) if x.block.dtype in HALVES else y, plan.out, x.mesh)


def _log_over_ranks(cells: Tensor, mesh: CartMesh, plan: Reduced, keepdim: bool) -> Tensor:
    own = _log_of_block(cells, plan.dims, keepdim)
    return combined(
        own, mesh, plan.over, lambda parts: _log_of_block(parts, (0,), False), lambda parts: parts.logsumexp(0)
    )


class _LogSumExp(Function):
    """The log-sum-exp over ranks, with torch's derivative: that of the ranks' own is NaN beside an infinite cell."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, mesh: CartMesh, plan: Reduced, keepdim: bool) -> Tensor:
        """Reduce, and gather the ranks' own. Collective over ``plan.over``."""
        y = _log_over_ranks(cells, mesh, plan, keepdim)
        ctx.save_for_backward(cells, y)
        ctx.mesh, ctx.plan = mesh, plan
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the softmax times the cotangent. Not collective; its own backward is, over ``plan.over``."""
        cells, y = ctx.saved_tensors
        shape = [1 if d in ctx.plan.dims else n for d, n in enumerate(cells.shape)]
        y, g = (use(t.reshape(shape), ctx.mesh, ctx.plan.over) for t in (y, grads[0]))
        return g * (cells - y).exp().conj(), None, None, None


_node = node_of(_LogSumExp)


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
