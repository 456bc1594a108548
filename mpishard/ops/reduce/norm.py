"""Norms of vectors and matrices: a local part per rank, then the same over the parts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import differentiated
from mpishard.autograd.redistribute import sum_partial
from mpishard.ops.reduce.min_max import extreme
from mpishard.ops.rule.agreement import agreed
from mpishard.ops.rule.dim import normal_dim, whole_along
from mpishard.ops.rule.reduction import Reduced, in_parts, reduced, wide_of
from mpishard.tensor.operand import fitted, mesh_of, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _norm(x: Any, p: Any, dim: Any, keepdim: bool, dtype: Any = None) -> ShardTensor:
    """Vector norm over dims. Collective where one of them is sharded."""
    if isinstance(p, complex):
        raise RuntimeError("linalg.vector_norm: Expected a non-complex scalar as the order of norm.")
    x = resolved(x)
    plan, local = reduced(x.sharding, dim, keepdim), x.block
    if p is not None and p < 0 and not math.prod(x.shape):  # torch's own error, if it has one
        torch.linalg.vector_norm(torch.empty(x.shape, dtype=x.dtype, device="cpu"), p, dim, keepdim)
    p = 2.0 if p is None else float(p)
    if not plan.over and (local.numel() or (p >= 0 and p != math.inf) or not math.prod(x.shape)):
        return wrap(torch.linalg.vector_norm(local, p, plan.dims, keepdim, dtype=dtype), plan.out, x.mesh)
    result = torch.linalg.vector_norm(local.new_zeros(1), p, dtype=dtype).dtype
    if dtype is not None:
        x = x.to(dtype)
    x = wrap(wide_of(x.block), x.sharding, x.mesh)
    if abs(p) == math.inf:
        if plan.over and all(x.shape[d] for d in plan.dims):
            return extreme(x.abs(), plan, keepdim, p > 0).to(result)  # type: ignore[return-value]
        return (torch.amax if p > 0 else torch.amin)(x.abs(), plan.dims, keepdim).to(result)  # type: ignore[no-any-return]
    if p == 0:
        count = (x != 0).to(result).sum(plan.dims, keepdim)
        if differentiated(x.block):  # a zero gradient, as in torch, also of what is not finite
            cells = x.block.real if x.block.is_complex() else x.block
            none = wrap(cells.masked_fill(torch.ones_like(cells, dtype=torch.bool), 0), x.sharding, x.mesh)
            count = count + none.sum(plan.dims, keepdim, dtype=result)  # type: ignore[call-overload]
        return count  # type: ignore[no-any-return]

    if differentiated(x.block):
        return wrap(_differentiable_norm(x, p, plan, keepdim).to(result), plan.out, x.mesh)

    def part(t: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
        if p < 0 and any(t.shape[d] == 0 for d in dims):  # torch refuses, the norm of nothing is infinite
            return t.abs().sum(dims, keep) + math.inf
        return torch.linalg.vector_norm(t, p, dims, keep)

    return wrap(in_parts(x, plan, keepdim, part).to(result), plan.out, x.mesh)


def _differentiable_norm(x: ShardTensor, p: float, plan: Reduced, keepdim: bool) -> Tensor:
    """Return the norm through the sum of powers, whose derivatives exist where a rank holds only zeros."""
    size = x.block.abs()
    if p == 1:
        powers = size
    elif p == 2:
        powers = (x.block * x.block.conj()).real if x.block.is_complex() else x.block * x.block
    else:
        zero = size == 0
        powers = torch.where(zero, size if p > 0 else torch.inf, torch.where(zero, 1, size) ** p)
    total = sum_partial(powers.sum(plan.dims, keepdim), x.mesh, plan.over)
    if p == 1:
        return total
    # at zero torch's gradient is zero, that of the root is infinite
    zero = total == 0
    none = 0 * total if p > 0 else 0 * total + math.inf  # of infinite cells alone
    return torch.where(zero, none, torch.where(zero, 1, total) ** (1 / p))


@implements(torch.linalg.vector_norm, sharded="reduction")
def vector_norm(input: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> ShardTensor:
    """Vector norm over dims. Collective where one of them is sharded."""
    return _norm(input, ord, dim, keepdim, dtype)


@implements(torch.norm_except_dim, sharded="reduction")
def norm_except_dim(v: Any, pow: int = 2, dim: int = 0) -> ShardTensor:
    """Vector norm over all dims but one; -1: over all. Collective where one of them is sharded."""
    if dim == -1:
        return _norm(v, pow, None, False)
    kept = normal_dim(dim, v.ndim)
    if v.ndim == 0:
        raise IndexError(f"Dimension specified as {dim} but tensor has no dimensions")
    if v.ndim == 1:
        return _norm(v.unsqueeze(1), pow, 1, False)
    return _norm(v, pow, [d for d in range(v.ndim) if d != kept], True)


@implements(torch._weight_norm, sharded="reduction")
def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """Return ``v`` with norms ``g``, as weight norm makes a weight. Collective as `norm_except_dim` is."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


@implements(torch.linalg.norm, sharded="reduction")
def linalg_norm(
    input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> ShardTensor:
    """Vector norms, and the Frobenius norm of matrices. Collective where a reduced dim is sharded."""
    if ord is not None and dim is None and input.ndim not in (1, 2):
        raise RuntimeError(
            f"linalg.norm: If dim is not specified but ord is, the input must be 1D or 2D. Got {input.ndim}D."
        )
    vector = ord is None or (input.ndim == 1 if dim is None else isinstance(dim, int) or len(dim) == 1)
    if vector:
        return _norm(input, 2 if ord is None else ord, dim, keepdim, dtype)
    return matrix_norm(input, ord, (0, 1) if dim is None else dim, keepdim, dtype=dtype)


@implements(torch.linalg.matrix_norm, sharded="gathers")
def matrix_norm(
    input: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> ShardTensor:
    """Matrix norms. Collective where matrices are sharded, which the nuclear and spectral ones gather; these always."""
    x = resolved(input)
    if isinstance(dim, int) or len(dim) != 2:
        raise RuntimeError(f"linalg.matrix_norm: dim must be a 2-tuple. Got {dim}")
    rows, columns = (normal_dim(d, x.ndim) for d in dim)
    plan = reduced(x.sharding, (rows, columns), keepdim)
    if not plan.over:
        local = _matrix_norm(x, ord, (rows, columns), keepdim, dtype)
        return wrap(local, plan.out, x.mesh)
    torch.linalg.matrix_norm(x.block.new_zeros(1, 1), ord, dtype=dtype)  # torch's own error for an order or a dtype
    if dtype is not None:
        x = x.to(dtype)
    if ord == "fro":
        return _norm(x, 2, (rows, columns), keepdim)
    if ord in (1, -1, math.inf, -math.inf) and x.shape[rows] and x.shape[columns]:
        inner, outer = (rows, columns) if abs(ord) == 1 else (columns, rows)
        sums = x.abs().sum(inner, keepdim=True)
        y = (torch.amax if ord > 0 else torch.amin)(sums, (inner, outer), True)
        return y if keepdim else y.sum((inner, outer))  # type: ignore[no-any-return]
    x = whole_along(x, (rows, columns))
    return wrap(_matrix_norm(x, ord, (rows, columns), keepdim), plan.out, x.mesh)


def _matrix_norm(x: ShardTensor, ord: Any, dims: tuple[int, int], keepdim: bool, dtype: Any = None) -> Tensor:
    """Return the norms of this rank's whole matrices. Collective where decompositions may not converge on a rank."""

    def norms(block: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(block, ord, dims, keepdim, dtype=dtype)

    return agreed(norms, x.mesh, (x.sharding,), x.block) if ord in ("nuc", 2, -2) else norms(x.block)


@implements(torch.nuclear_norm, sharded="gathers")
def nuclear_norm(input: Any, dim: Any = (-2, -1), keepdim: bool = False) -> ShardTensor:
    """Sum of singular values. Collective where the matrices are sharded: they are gathered."""
    if isinstance(dim, bool):  # nuclear_norm(input, keepdim)
        dim, keepdim = (-2, -1), dim
    return matrix_norm(input, "nuc", dim, keepdim)


@implements(torch.norm, torch.functional.norm, torch.Tensor.norm, sharded="reduction")
def norm(input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> ShardTensor:
    """Vector norm, the old spelling. Collective where a reduced dim is sharded."""
    if p == "nuc":
        return matrix_norm(input, "nuc", tuple(range(input.ndim)) if dim is None else dim, keepdim, dtype=dtype)
    return _norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype)


@implements(torch.cosine_similarity, F.cosine_similarity, sharded="reduction")
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Cosine between vectors along a dim. Collective where it is sharded."""
    mesh = mesh_of((x1, x2))
    common = torch.result_type(x1, x2)
    if not common.is_floating_point:
        raise RuntimeError(f"expected common dtype to be floating point, yet common dtype is {common}")
    # of floats, each norm is rounded as its own operand
    x1, x2 = (t if t.is_floating_point() else t.to(common) for t in (x1, x2))
    a, b = torch.broadcast_tensors(x1, x2) if tuple(x1.shape) != tuple(x2.shape) else (x1, x2)
    a, b = (t if isinstance(t, ShardTensor) else _like(t, a if isinstance(a, ShardTensor) else b, mesh) for t in (a, b))
    sizes = [_at_least(_norm(t, 2, dim, True), eps) for t in (a, b)]
    return ((a / sizes[0]) * (b / sizes[1])).sum(dim)


def _at_least(norm: Any, eps: float) -> Any:
    """Return ``norm.clamp_min(eps)`` with the derivative of ``norm``: torch clamps it outside of the graph."""
    return norm + (eps - norm.detach()).clamp_min(0)


def _like(t: Tensor, other: ShardTensor, mesh: Any) -> ShardTensor:
    other = resolved(other)
    return wrap(fitted(t, mesh, other.sharding), other.sharding, mesh)


implements(torch.frobenius_norm, sharded="reduction")(lambda input, dim, keepdim=False: _norm(input, 2, dim, keepdim))
implements(F.normalize, sharded="reduction")(
    lambda input, p=2.0, dim=1, eps=1e-12: input / norm(input, p, dim, True).clamp_min(eps)
)
