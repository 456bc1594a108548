"""Variance and standard deviation: of the block, then combined as Chan does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.linear import apply, differentiated, pair
from mpishard.comm import traced
from mpishard.ops.rule.moments import any_large
from mpishard.ops.rule.reduction import Reduced, combined, dim_and_keepdim, reduced, wide_of
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _double(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _variance(x: ShardTensor, dim: Any, correction: Any, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Return variance and mean over ranks, by Chan's combination of the ranks' own. Collective."""
    plan, local = reduced(x.sharding, dim, keepdim), x.block
    wide = wide_of(local)
    if wide.numel():
        var, mean = torch.var_mean(wide, plan.dims, correction=0, keepdim=keepdim)
        if traced.recording is not None or any_large(mean.detach().abs(), var.detach()):
            # rounded to float32, the ranks' means would differ by more than they do
            var, mean = torch.var_mean(_double(wide), plan.dims, correction=0, keepdim=keepdim)
    else:
        mean = wide.sum(plan.dims, keepdim)
        var = mean.abs()
    mean = _double(mean)
    count = torch.full_like(mean, math.prod(local.shape[d] for d in plan.dims))
    mean, var, _ = combined(torch.stack([mean, var.to(mean.dtype), count]), x.mesh, plan.over, _joined)
    if not plan.count:
        mean = mean + math.nan
    free = plan.count - correction
    if free > 0 or not differentiated(x.block):
        return var.real * plan.count / max(free, 0), mean
    return _without_freedom(x, plan, var.real * plan.count, mean, free, dim is None), mean


def _without_freedom(x: ShardTensor, plan: Reduced, squares: Tensor, mean: Tensor, free: float, every: bool) -> Tensor:
    """Return the variance of no more cells than the correction: infinite or NaN, with torch's gradient.

    Torch divides the gradient by the negative number; by none, or of all cells at once, it is infinite or NaN.
    """
    value = squares.detach() / 0
    if free and not every:
        own = squares / free
        return own + (value - own.detach())
    with torch.no_grad():
        kept = mean.reshape(plan.kept.local_shape(x.mesh.coords))
        off = _double(wide_of(x.block)) - kept
        slope = torch.where(off == 0, math.nan, math.inf) if every else off * math.inf
        slope = slope.to(x.block.dtype)

    def back(g: Tensor) -> Tensor:
        return slope * g.reshape(kept.shape).to(slope.dtype)

    return apply(pair(lambda _: value, back), x.block)


def _joined(parts: Tensor) -> Tensor:
    """Return mean, variance and count of the cells of all parts, which have theirs along dim 1."""
    means, variances, counts = parts.movedim(1, 0)
    counts = counts.real
    live, count = counts > 0, counts.sum(0)
    cells = count.clamp(min=1)
    # relative to a number near the mean: weighted sums of large numbers would round
    shift = torch.where(live, means.detach(), 0).sum(0) / live.sum(0).clamp(min=1)
    mean = shift + (torch.where(live, means - shift, 0) * counts).sum(0) / cells
    off = torch.where(live, means - mean, 0)
    var = ((variances + off * off.conj()).real * counts).sum(0) / cells
    return torch.stack([mean, var.to(mean.dtype), count.to(mean.dtype)])


def _deviation(var: Tensor) -> Tensor:
    """Return the root, with torch's gradient of a standard deviation of zero: zero."""
    zero = var == 0
    return torch.where(zero, 0 * var, torch.where(zero, 1, var).sqrt())


def _dim_and_correction(args: Any, kwargs: Any, func: Any) -> tuple[Any, Any, bool]:
    """Read both families of arguments: (unbiased), (dim, unbiased, keepdim) and (dim, *, correction, keepdim)."""
    args, kwargs = list(args), dict(kwargs)
    correction = kwargs.pop("correction", None)
    unbiased = kwargs.pop("unbiased", None)
    if args and isinstance(args[0], bool):
        unbiased = args.pop(0)
    elif len(args) > 1 and isinstance(args[1], bool):
        unbiased = args.pop(1)
    dim, keepdim = dim_and_keepdim(args, kwargs, func)
    if None not in (correction, unbiased):
        func(torch.zeros(2, device="cpu"), correction=correction, unbiased=unbiased)  # raises torch's own error
    elif correction.__class__ not in (int, float, type(None)):
        with warnings.catch_warnings():  # of two cells, it may be too many
            warnings.simplefilter("ignore")
            func(torch.zeros(2, device="cpu"), correction=correction)  # as well
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    return dim, correction, keepdim


def _variance_rule(func: Callable[..., Any], pick: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    def rule(input: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        dim, correction, keepdim = _dim_and_correction(args, kwargs, func)
        x = resolved(input)
        plan, mesh = reduced(x.sharding, dim, keepdim), x.mesh
        if plan.over or not x.block.numel():
            func(x.block.new_zeros(2))  # torch's own error for a dtype
        if plan.over:
            var, mean = _variance(x, dim, correction, keepdim)
            real = x.block.real.dtype if x.block.is_complex() else x.block.dtype
            found = pick(var.to(real), mean.to(x.block.dtype))
        elif x.block.numel() or not math.prod(x.shape):
            dims = None if dim is None else plan.dims  # torch's gradients differ where there are too few cells
            found = func(x.block, dims, correction=correction, keepdim=keepdim)
        else:  # a result without cells, of which torch would say that it has too few
            squares = (x.block * x.block.conj()).real.sum(plan.dims, keepdim)
            found = pick(squares, x.block.sum(plan.dims, keepdim))
        if isinstance(found, tuple):
            return tuple(wrap(t, plan.out, mesh) for t in found)
        return wrap(found, plan.out, mesh)

    return rule


implements(torch.var, torch.Tensor.var, sharded="reduction")(_variance_rule(torch.var, lambda var, _: var))
implements(torch.std, torch.Tensor.std, sharded="reduction")(_variance_rule(torch.std, lambda var, _: _deviation(var)))
implements(torch.var_mean, sharded="reduction")(
    # a copy, as it may be one of several views, into which torch lets nobody write
    _variance_rule(torch.var_mean, lambda var, mean: (var, mean.clone()))
)
implements(torch.std_mean, sharded="reduction")(
    _variance_rule(torch.std_mean, lambda var, mean: (_deviation(var), mean.clone()))
)
