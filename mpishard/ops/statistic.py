"""Products, norms, variances, log-sum-exps and counts: a local part per rank, then the same over the parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import differentiated
from mpishard.autograd.redistribute import sum_partial
from mpishard.comm import collective
from mpishard.ops.dim import whole_along
from mpishard.ops.moments import is_large
from mpishard.ops.reduction import HALVES, Reduced, counts_over, dim_and_keepdim, normal_dim, reduced, stacked
from mpishard.tensor.operand import fitted, mesh_of, resolved
from mpishard.tensor.registry import RULES, implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap

Local = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALVES else x


def _in_parts(x: ShardTensor, plan: Reduced, keepdim: bool, part: Local, combine: Local) -> Tensor:
    """Reduce the local block, gather the ranks' parts as dim 0 of a small tensor, and reduce that."""
    parts = stacked(part(x._local, plan.dims, keepdim), x._mesh, plan.over)
    return combine(parts, (0,), False)


# -- product


def _product(local: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: Any = None) -> Tensor:
    if len(dims) == local.ndim and not keepdim:
        return torch.prod(local, dtype=dtype)
    for d in reversed(dims):
        local = torch.prod(local, d, keepdim, dtype=dtype)
    return local


@implements(torch.prod, torch.Tensor.prod)
def prod(input: ShardTensor, *args: Any, dtype: Any = None, **kwargs: Any) -> ShardTensor:
    """Multiply over one dim, or all. Collective where a reduced dim is sharded."""
    dim, keepdim = dim_and_keepdim(args, kwargs, torch.prod)
    x = resolved(input)
    plan, local = reduced(x._layout, dim, keepdim), x._local
    if not plan.over:
        return wrap(_product(local, plan.dims, keepdim, dtype), plan.out, x._mesh)
    result = torch.prod(local.new_ones(1), dtype=dtype).dtype
    wide = torch.float32 if result in HALVES else result
    parts = stacked(_product(local, plan.dims, keepdim, wide), x._mesh, plan.over)
    return wrap(torch.prod(parts, 0).to(result), plan.out, x._mesh)


# -- norms


def _norm(x: Any, p: Any, dim: Any, keepdim: bool, dtype: Any = None) -> ShardTensor:
    """Vector norm over dims. Collective where one of them is sharded."""
    x = resolved(x)
    plan, local = reduced(x._layout, dim, keepdim), x._local
    p = float(p)
    if not plan.over and (local.numel() or (p >= 0 and p != math.inf) or not math.prod(x.shape)):
        return wrap(torch.linalg.vector_norm(local, p, plan.dims, keepdim, dtype=dtype), plan.out, x._mesh)
    result = torch.linalg.vector_norm(local.new_zeros(1), p, dtype=dtype).dtype
    if dtype is not None:
        x = x.to(dtype)
    x = wrap(_wide(x._local), x._layout, x._mesh)
    if abs(p) == math.inf:
        extreme = torch.amax if p > 0 else torch.amin
        return extreme(x.abs(), plan.dims, keepdim).to(result)  # type: ignore[no-any-return]
    if p == 0:
        count = (x != 0).to(result).sum(plan.dims, keepdim)
        if differentiated(x._local):  # a zero gradient, as in torch, also of what is not finite
            cells = x._local.real if x._local.is_complex() else x._local
            none = wrap(cells.masked_fill(torch.ones_like(cells, dtype=torch.bool), 0), x._layout, x._mesh)
            count = count + none.sum(plan.dims, keepdim, dtype=result)  # type: ignore[call-overload]
        return count  # type: ignore[no-any-return]

    if differentiated(x._local):
        return wrap(_differentiable_norm(x, p, plan, keepdim).to(result), plan.out, x._mesh)

    def part(t: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
        if p < 0 and any(t.shape[d] == 0 for d in dims):  # torch refuses, the norm of nothing is infinite
            return t.abs().sum(dims, keep) + math.inf
        return torch.linalg.vector_norm(t, p, dims, keep)

    return wrap(_in_parts(x, plan, keepdim, part, part).to(result), plan.out, x._mesh)


def _differentiable_norm(x: ShardTensor, p: float, plan: Reduced, keepdim: bool) -> Tensor:
    """Return the norm through the sum of powers, whose derivatives exist where a rank holds only zeros."""
    size = x._local.abs()
    if p == 1:
        powers = size
    elif p == 2:
        powers = (x._local * x._local.conj()).real if x._local.is_complex() else x._local * x._local
    else:
        zero = size == 0
        powers = torch.where(zero, size if p > 0 else torch.inf, torch.where(zero, 1, size) ** p)
    total = sum_partial(powers.sum(plan.dims, keepdim), x._mesh, plan.over)
    if p == 1:
        return total
    # at zero torch's gradient is zero, that of the root is infinite
    zero = total == 0
    return torch.where(zero, 0 * total, torch.where(zero, 1, total) ** (1 / p))


@implements(torch.linalg.vector_norm)
def vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> ShardTensor:
    """Vector norm over dims. Collective where one of them is sharded."""
    return _norm(x, ord, dim, keepdim, dtype)


@implements(torch.linalg.norm)
def linalg_norm(A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> ShardTensor:
    """Vector norms, and the Frobenius norm of matrices. Collective where a reduced dim is sharded."""
    if ord is not None and dim is None and A.ndim not in (1, 2):
        raise RuntimeError(
            f"linalg.norm: If dim is not specified but ord is, the input must be 1D or 2D. Got {A.ndim}D."
        )
    vector = ord is None or (A.ndim == 1 if dim is None else isinstance(dim, int) or len(dim) == 1)
    if vector:
        return _norm(A, 2 if ord is None else ord, dim, keepdim, dtype)
    return matrix_norm(A, ord, (0, 1) if dim is None else dim, keepdim, dtype=dtype)


@implements(torch.linalg.matrix_norm)
def matrix_norm(
    A: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> ShardTensor:
    """Matrix norms. Collective where the matrices are sharded: the nuclear and spectral ones gather them."""
    x = resolved(A)
    rows, columns = (normal_dim(d, x.ndim) for d in dim)
    plan = reduced(x._layout, (rows, columns), keepdim)
    if not plan.over:
        local = torch.linalg.matrix_norm(x._local, ord, (rows, columns), keepdim, dtype=dtype)
        return wrap(local, plan.out, x._mesh)
    if dtype is not None:
        x = x.to(dtype)
    if ord == "fro":
        return _norm(x, 2, (rows, columns), keepdim)
    if ord in (1, -1, math.inf, -math.inf):
        inner, outer = (rows, columns) if abs(ord) == 1 else (columns, rows)
        sums = x.abs().sum(inner, keepdim=True)
        y = (torch.amax if ord > 0 else torch.amin)(sums, (inner, outer), True)
        return y if keepdim else y.sum((inner, outer))  # type: ignore[no-any-return]
    x = whole_along(x, (rows, columns))
    return wrap(torch.linalg.matrix_norm(x._local, ord, (rows, columns), keepdim), plan.out, x._mesh)


@implements(torch.frobenius_norm)
def frobenius_norm(input: Any, dim: Any, keepdim: bool = False) -> ShardTensor:
    """Root of the sum of squares over dims. Collective where one of them is sharded."""
    return _norm(input, 2, dim, keepdim)


@implements(torch.nuclear_norm)
def nuclear_norm(input: Any, dim: Any = (-2, -1), keepdim: bool = False) -> ShardTensor:
    """Sum of singular values. Collective where the matrices are sharded: they are gathered."""
    if isinstance(dim, bool):  # nuclear_norm(input, keepdim)
        dim, keepdim = (-2, -1), dim
    return matrix_norm(input, "nuc", dim, keepdim)


@implements(torch.norm, torch.functional.norm, torch.Tensor.norm)
def norm(input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> ShardTensor:
    """Vector norm, the old spelling. Collective where a reduced dim is sharded."""
    if p == "nuc":
        return matrix_norm(input, "nuc", (0, 1) if dim is None else dim, keepdim, dtype=dtype)
    return _norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype)


@implements(F.normalize)
def normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Any:
    """Divide by the norm along dims. Collective where they are sharded."""
    return input / _norm(input, p, dim, True).clamp_min(eps)


@implements(torch.cosine_similarity, F.cosine_similarity)
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Cosine between vectors along a dim. Collective where it is sharded."""
    mesh = mesh_of((x1, x2))
    a, b = torch.broadcast_tensors(x1, x2) if tuple(x1.shape) != tuple(x2.shape) else (x1, x2)
    a, b = (t if isinstance(t, ShardTensor) else _like(t, a if isinstance(a, ShardTensor) else b, mesh) for t in (a, b))
    return ((a / _norm(a, 2, dim, True).clamp_min(eps)) * (b / _norm(b, 2, dim, True).clamp_min(eps))).sum(dim)


def _like(t: Tensor, other: ShardTensor, mesh: Any) -> ShardTensor:
    other = resolved(other)
    return wrap(fitted(t, mesh, other._layout), other._layout, mesh)


# -- log-sum-exp


@implements(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp)
def logsumexp(input: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
    """Logarithm of the sum of exponentials, without overflow. Collective where a reduced dim is sharded."""
    dim, keepdim = dim_and_keepdim(args, kwargs, torch.logsumexp)
    return log_of_sum(resolved(input), dim, keepdim)


def log_of_sum(x: ShardTensor, dim: Any, keepdim: bool) -> ShardTensor:
    """Return the log-sum-exp. Collective where a reduced dim is sharded."""
    plan = reduced(x._layout, dim, keepdim)
    if not plan.over:
        return wrap(torch.logsumexp(x._local, plan.dims, keepdim), plan.out, x._mesh)
    y = _in_parts(wrap(_wide(x._local), x._layout, x._mesh), plan, keepdim, _log_of_block, torch.logsumexp)
    return wrap(y.to(x._local.dtype) if x._local.dtype in HALVES else y, plan.out, x._mesh)


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


# -- variance


def _double(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _variance(x: ShardTensor, dim: Any, correction: Any, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Return variance and mean over ranks, by Chan's combination of the ranks' own. Collective."""
    plan, local = reduced(x._layout, dim, keepdim), x._local
    wide = _wide(local)
    if wide.numel():
        var, mean = torch.var_mean(wide, plan.dims, correction=0, keepdim=keepdim)
        if is_large(mean.detach().abs(), var.detach()).any():
            # rounded to float32, the ranks' means would differ by more than they do
            var, mean = torch.var_mean(_double(wide), plan.dims, correction=0, keepdim=keepdim)
    else:
        mean = wide.sum(plan.dims, keepdim)
        var = mean.abs()
    mean = _double(mean)
    counts = torch.tensor(
        counts_over(x._mesh, x._layout, plan.dims, plan.over), dtype=mean.real.dtype, device=mean.device
    ).view(-1, *[1] * mean.ndim)
    means, variances = stacked(torch.stack([mean, var.to(mean.dtype)]), x._mesh, plan.over).movedim(1, 0)
    live = counts > 0
    # relative to a number near the mean: weighted sums of large numbers would round
    shift = torch.where(live, means.detach(), 0).sum(0) / live.sum(0)
    mean = shift + (torch.where(live, means - shift, 0) * counts).sum(0) / plan.count
    off = torch.where(live, means - mean, 0)
    m2 = ((variances + off * off.conj()).real * counts).sum(0)
    return m2 / max(plan.count - correction, 0), mean


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
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    return dim, correction, keepdim


def _variance_rule(func: Callable[..., Any], pick: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    def rule(input: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        dim, correction, keepdim = _dim_and_correction(args, kwargs, func)
        x = resolved(input)
        plan, mesh = reduced(x._layout, dim, keepdim), x._mesh
        if plan.over:
            torch.var(x._local.new_zeros(2))  # torch's own error for integers
            var, mean = _variance(x, dim, correction, keepdim)
            real = x._local.real.dtype if x._local.is_complex() else x._local.dtype
            found = pick(var.to(real), mean.to(x._local.dtype))
        elif x._local.numel() or not math.prod(x.shape):
            found = func(x._local, plan.dims, correction=correction, keepdim=keepdim)
        else:  # a result without cells, of which torch would say that it has too few
            squares = (x._local * x._local.conj()).real.sum(plan.dims, keepdim)
            found = pick(squares, x._local.sum(plan.dims, keepdim))
        if isinstance(found, tuple):
            return tuple(wrap(t, plan.out, mesh) for t in found)
        return wrap(found, plan.out, mesh)

    return rule


RULES[torch.var] = RULES[torch.Tensor.var] = _variance_rule(torch.var, lambda var, _: var)
RULES[torch.std] = RULES[torch.Tensor.std] = _variance_rule(torch.std, lambda var, _: _deviation(var))
RULES[torch.var_mean] = _variance_rule(torch.var_mean, lambda var, mean: (var, mean))
RULES[torch.std_mean] = _variance_rule(torch.std_mean, lambda var, mean: (_deviation(var), mean))


# -- counts and tests


@implements(torch.count_nonzero, torch.Tensor.count_nonzero)
def count_nonzero(input: ShardTensor, dim: Any = None) -> ShardTensor:
    """Count cells that are not zero. Collective where a reduced dim is sharded."""
    x = resolved(input)
    plan = reduced(x._layout, dim)
    local = torch.count_nonzero(x._local, plan.dims)
    return wrap(sum_partial(local, x._mesh, plan.over), plan.out, x._mesh)


@implements(torch.nansum, torch.Tensor.nansum)
def nansum(input: ShardTensor, *args: Any, dtype: Any = None, **kwargs: Any) -> ShardTensor:
    """Sum what is not NaN. Collective where a reduced dim is sharded."""
    dim, keepdim = dim_and_keepdim(args, kwargs, torch.nansum)
    x = resolved(input)
    plan = reduced(x._layout, dim, keepdim)
    if not plan.over:
        return wrap(torch.nansum(x._local, plan.dims, keepdim, dtype=dtype), plan.out, x._mesh)
    result = torch.nansum(x._local.new_zeros(1), dtype=dtype).dtype
    wide = torch.float32 if result in HALVES else result
    local = torch.nansum(x._local, plan.dims, keepdim, dtype=wide)
    return wrap(sum_partial(local, x._mesh, plan.over).to(result), plan.out, x._mesh)


@implements(torch.nanmean, torch.Tensor.nanmean)
def nanmean(input: ShardTensor, *args: Any, dtype: Any = None, **kwargs: Any) -> ShardTensor:
    """Mean of what is not NaN. Collective where a reduced dim is sharded."""
    dim, keepdim = dim_and_keepdim(args, kwargs, torch.nanmean)
    wide = torch.float32 if (dtype or input.dtype) in HALVES else dtype
    total = torch.nansum(input, dim, keepdim, dtype=wide)
    live = (~torch.isnan(input.detach())).sum(dim, keepdim)
    return (total / live).to(dtype or input.dtype)  # type: ignore[no-any-return]


def _truth_rule(func: Callable[..., Tensor], op: str) -> Callable[..., ShardTensor]:
    def rule(input: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
        dim, keepdim = dim_and_keepdim(args, kwargs, func)
        x = resolved(input)
        plan = reduced(x._layout, dim, keepdim)
        local = func(x._local, plan.dims, keepdim) if plan.dims else func(x._local)
        if plan.over:
            local = collective.all_reduce(local, x._mesh.group(plan.over), op)
        return wrap(local, plan.out, x._mesh)

    return rule


RULES[torch.any] = RULES[torch.Tensor.any] = _truth_rule(torch.any, "max")
RULES[torch.all] = RULES[torch.Tensor.all] = _truth_rule(torch.all, "min")


def _agreed(local: bool, x: ShardTensor) -> bool:
    """Whether it holds on every rank that holds other cells. Collective over them."""
    over = tuple(m for m in x._layout.sharded_mesh_dims if x._mesh.shape[m] > 1)
    if not over:
        return local
    flag = torch.tensor(local)
    return bool(collective.all_reduce(flag, x._mesh.group(over), "min"))


@implements(torch.equal, torch.Tensor.equal)
def equal(input: Any, other: Any) -> bool:
    """Tell whether shapes and all cells are the same. Collective."""
    if tuple(input.shape) != tuple(other.shape):
        return False
    mesh = mesh_of((input, other))
    x = resolved(input if isinstance(input, ShardTensor) else other)
    y = other if isinstance(input, ShardTensor) else input
    y = resolved(y) if isinstance(y, ShardTensor) else y
    return _agreed(torch.equal(x._local, fitted(y, mesh, x._layout)), x)


@implements(torch.allclose, torch.Tensor.allclose)
def allclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Tell whether all cells are close. Collective."""
    x = torch.isclose(input, other, rtol, atol, equal_nan)
    return _agreed(bool(x._local.all()), x)
