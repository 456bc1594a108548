"""Softmax and its kin: along a sharded dim with one exchange of the largest value and one of the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.linear import in_transform
from mpishard.autograd.redistribute import sum_partial
from mpishard.autograd.use import use
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.ops.reduce.logsumexp import log_of_sum
from mpishard.ops.rule.dim import normal_dim
from mpishard.ops.rule.reduction import HALVES, Reduced, reduced, worst
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import RULES, implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Softmax(Function):
    """Softmax, or its logarithm, that keeps its result alone, as torch's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: CartMesh, plan: Reduced, log: bool) -> Tensor:
        """Exchange the largest value, then the sum. Collective over ``plan.over``."""
        group, (dim,) = mesh.group(plan.over), plan.dims
        if x.shape[dim]:
            top = x.amax(dim, keepdim=True)
        else:
            shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
            top = x.new_full(shape, worst(x.dtype, largest=True))
        y = x.float() if x.dtype in HALVES else x
        y = y - blocking.all_reduce(top, group, "max")
        if log:
            y -= blocking.all_reduce(y.exp().sum(dim, keepdim=True), group).log_()
        else:
            y.exp_()
            y /= blocking.all_reduce(y.sum(dim, keepdim=True), group)
        y = y.to(x.dtype)
        ctx.save_for_backward(y)
        ctx.mesh, ctx.plan, ctx.log = mesh, plan, log
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Exchange one sum. Collective over ``plan.over``."""
        (y,) = ctx.saved_tensors
        g, dtype = grads[0], y.dtype
        if dtype in HALVES:
            g, y = g.float(), y.float()
        part = (g if ctx.log else g * y).sum(ctx.plan.dims, keepdim=True)
        total = use(sum_partial(part, ctx.mesh, ctx.plan.over), ctx.mesh, ctx.plan.over)
        dx = g - y.exp() * total if ctx.log else y * (g - total)
        return dx.to(dtype), None, None, None


def soft(x: ShardTensor, dim: int, log: bool) -> ShardTensor:
    """Return the softmax along a sharded dim, or its logarithm. Collective."""
    plan, mesh = reduced(x.sharding, dim, True), x.mesh
    if in_transform():
        y = x - log_of_sum(x, dim, True)
        return y if log else y.exp()
    return wrap(Softmax.apply(x.block, mesh, plan, log), x.sharding, mesh)  # type: ignore[no-untyped-call]


def _rule(func: Callable[..., Tensor], log: bool) -> Callable[..., ShardTensor]:
    def rule(input: ShardTensor, dim: int, dtype: Any = None) -> ShardTensor:
        x = resolved(input)
        dim = normal_dim(dim, x.ndim)
        local = x.block
        if not reduced(x.sharding, dim).over:
            return wrap(func(local, dim, dtype=dtype), x.sharding, x.mesh)
        # torch's own dtype, also under autocast, and its own error for integers
        result = func(local.new_zeros(1), 0, dtype=dtype).dtype
        return soft(wrap(local.to(result), x.sharding, x.mesh), dim, log)

    rule.__name__ = func.__name__
    return rule


implements(*spellings("softmax"), sharded="reduction")(_rule(torch.softmax, False))
implements(*spellings("log_softmax"), sharded="reduction")(_rule(torch.log_softmax, True))


def _functional(rule: Callable[..., ShardTensor]) -> Callable[..., ShardTensor]:
    """Return the rule of ``functional.softmax``, which may choose the dim; its third argument is a stack level."""

    def functional(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> ShardTensor:
        if dim is None:
            dim = F._get_softmax_dim(rule.__name__, input.ndim, _stacklevel)
        return rule(input, dim, dtype)

    return functional


implements(F.softmax, sharded="reduction")(_functional(RULES[torch.softmax]))
implements(F.log_softmax, sharded="reduction")(_functional(RULES[torch.log_softmax]))


@implements(F.softmin, sharded="reduction")
def softmin(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """Softmax of the negative. Collective where the dim is sharded."""
    if dim is None:
        dim = F._get_softmax_dim("softmin", input.ndim, _stacklevel)
    return F.softmax(-input, dim, dtype=dtype)
