"""Products and distances of vectors: cross and Kronecker products, covariances, distances between rows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import differentiated
from mpishard.layout import layout_of
from mpishard.ops.rule.autocast import autocast_enabled
from mpishard.ops.rule.dim import gathered, ints, normal_dim, on_domain, require_dtype
from mpishard.ops.rule.empty_block import scanned
from mpishard.ops.rule.whole import whole
from mpishard.ops.rule.write import kept, put_into
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@implements(torch.linalg.cross, sharded="gathers")
def linalg_cross(input: Any, other: Any, *, dim: int = -1) -> ShardTensor:
    """Cross product of vectors of three. Collective where their dim is sharded: it is gathered."""
    if input.ndim != other.ndim:
        raise RuntimeError(
            f"linalg.cross: inputs must have the same number of dimensions, got {input.ndim} and {other.ndim}"
        )
    d = normal_dim(dim, input.ndim)
    if input.shape[d] != 3 or other.shape[d] != 3:
        raise RuntimeError(
            f"linalg.cross: inputs dimension {dim} must have length 3. Got {input.shape[d]} and {other.shape[d]}"
        )
    labels = tuple(None if i == d else i for i in range(input.ndim))
    return whole(lambda a, b: torch.linalg.cross(a, b, dim=d), (input, other), (labels, labels), labels)  # type: ignore[no-any-return]


@implements(torch.cross, torch.Tensor.cross, sharded="reduction")
def cross(input: Any, other: Any, dim: int | None = None) -> ShardTensor:
    """Cross product along a dim, by default the first of three cells. As `linalg.cross`."""
    if dim is None:
        if 3 not in input.shape:
            raise RuntimeError("no dimension of size 3 in input")
        dim = tuple(input.shape).index(3)
    return linalg_cross(input, other, dim=dim)


@implements(torch.vander, sharded="local")
def falling_vander(x: ShardTensor, N: int | None = None, increasing: bool = False) -> Any:
    """Powers of every cell of a vector, the highest first. Not collective."""
    x = resolved(x)
    if x.ndim != 1 or (N is not None and N < 0):
        torch.vander(x.block.new_zeros([1] * x.ndim), N)  # raises torch's own error
    require_dtype(x, torch.vander)
    rising = _powers(x, x.shape[0] if N is None else N)
    return rising if increasing else torch.flip(rising, (-1,))


@implements(torch.linalg.vander, sharded="local")
def vander(x: ShardTensor, N: int | None = None) -> ShardTensor:
    """Powers of every cell along a new last dim. Not collective."""
    x = resolved(x)
    if not x.ndim:
        return vander(x.reshape(1), N)
    n = x.shape[-1] if N is None else N
    if n <= 1:
        raise RuntimeError(f"N must be greater than 1, but got {n}.")
    require_dtype(x, torch.linalg.vander)
    return _powers(x, n)


def _powers(x: ShardTensor, n: int) -> ShardTensor:
    same, more = x.block.unsqueeze(-1), max(n - 1, 0)
    rising = scanned(torch.cumprod, same.expand(*x.block.shape, more), x.ndim, {}, (*x.shape, more))
    ones = torch.ones((*x.block.shape, 1), dtype=rising.dtype, device=rising.device)
    layout = x.sharding
    out = layout_of(layout.mesh_shape, layout.placements, (*layout.shape, n), (*layout.sizes, None))
    return wrap(torch.cat([ones, rising], -1)[..., :n], out, x.mesh)


@implements(*spellings("cdist"), sharded="gathers")
def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> ShardTensor:
    """Distances between the rows of two matrices, where the rows are.

    Collective where the columns are sharded, or both by one mesh dim by their rows: the columns, and the rows of
    ``x2``, are gathered.
    """
    if x1.ndim < 2 or x2.ndim < 2:
        raise RuntimeError("cdist only supports at least 2D tensors, X1 and X2")
    if x1.shape[-1] != x2.shape[-1]:
        raise RuntimeError(f"X1 and X2 must have the same number of columns. X1: {x1.shape[-1]} X2: {x2.shape[-1]}")
    batches = [tuple(range(2 - x.ndim, 0)) for x in (x1, x2)]
    if compute_mode == "use_mm_for_euclid_dist_if_necessary":
        # torch looks at the number of rows: of the whole matrices, not of the blocks
        large = x1.shape[-2] > 25 or x2.shape[-2] > 25
        compute_mode = f"{'use' if large else 'donot_use'}_mm_for_euclid_dist"
    return whole(  # type: ignore[no-any-return]
        lambda a, b: torch.cdist(a, b, p, compute_mode),
        (x1, x2),
        ((*batches[0], "row", None), (*batches[1], "column", None)),
        (*max(batches, key=len), "row", "column"),
    )


@implements(torch.cov, torch.Tensor.cov, sharded="gathers")
def cov(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Covariances of the rows. Collective where observations are sharded; rows stay sharded, and are gathered once."""
    c = _covariances("cov", input, correction, fweights, aweights)
    return c.reshape(()) if c.shape[0] == 1 else c


def _covariances(name: str, input: Any, correction: int, fweights: Any, aweights: Any) -> Any:
    """Return the matrix of covariances, also where it has one cell. Collective."""
    if input.ndim > 2:
        raise RuntimeError(
            f"{name}(): expected input to have two or fewer dimensions but got an input with {input.ndim} dimensions"
        )
    if input.dtype == torch.bool:
        raise RuntimeError(f"{name}(): bool dtype is not supported for input")
    x = input.reshape(1, -1) if input.ndim < 2 else input
    _require_weights(x, fweights, aweights)
    weights = None
    for w in (fweights, aweights):
        if w is not None:
            weights = w if weights is None else weights * w
    if weights is None:
        count: Any = x.shape[1]
        mean = x.sum(1, keepdim=True) / count if count else x.sum(1, keepdim=True) * math.nan
        norm = count - correction
    else:
        total = weights.sum()
        if bool(total == 0):
            raise RuntimeError("cov(): weights sum to zero, can't be normalized")
        mean = (x * weights).sum(1, keepdim=True) / total
        if aweights is None or correction == 0:
            norm = total - correction
        else:
            norm = total - correction * (weights * aweights).sum() / total
        norm = norm.full_tensor() if isinstance(norm, ShardTensor) else norm
    norm = norm.clamp_min(0) if isinstance(norm, Tensor) else max(norm, 0)
    off = x - mean
    scaled = off if weights is None else off * weights
    return torch.matmul(off, scaled.mT.conj()) / norm


def _require_weights(x: Any, fweights: Any, aweights: Any) -> None:
    """Refuse what torch refuses of the weights of observations. Collective where they are sharded."""
    for name, w in (("fweights", fweights), ("aweights", aweights)):
        if w is None:
            continue
        whole = not (w.is_floating_point() or w.is_complex() or w.dtype == torch.bool)
        if w.ndim > 1:
            problem = f"{name} to have one or fewer dimensions but got {name} with {w.ndim} dimensions"
        elif not (whole if name == "fweights" else w.is_floating_point()):
            kind = "integral" if name == "fweights" else "floating point"
            problem = f"{name} to have {kind} dtype but got {name} with {w.dtype} dtype"
        elif w.numel() != x.shape[1]:
            problem = (
                f"{name} to have the same numel as there are observations in the input but got "
                f"{w.numel()} != {x.shape[1]}"
            )
        elif w.numel() and bool((w < 0).any()):
            raise RuntimeError(f"cov(): {name} cannot be negative")
        else:
            continue
        raise RuntimeError(f"cov(): expected {problem}")


@implements(torch.corrcoef, torch.Tensor.corrcoef, sharded="reduction")
def corrcoef(input: Any) -> Any:
    """Correlations of the rows. As `cov`; the deviations of all rows are gathered."""
    c = _covariances("corrcoef", input, 1, None, None)
    if c.shape[0] == 1:
        c = c.reshape(())
        return c / c
    n = input.shape[1]
    off = input - input.sum(1, keepdim=True) / n if n else input * 1.0
    d = gathered(((off * off.conj()).real.sum(1) / max(n - 1, 0)).sqrt())
    c = c / d.unsqueeze(1) / d.unsqueeze(0)
    if c.is_complex():
        return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1))
    return c.clamp(-1, 1)


# -- arrangements of several tensors


@implements(torch.kron, torch.Tensor.kron, sharded="gathers")
def kron(input: Any, other: Any) -> Any:
    """Kronecker product, sharded as ``input`` is. Collective where ``other`` is sharded: it is gathered."""
    n = max(input.ndim, other.ndim)
    b = gathered(other)
    a, b = (t.reshape((1,) * (n - t.ndim) + tuple(t.shape)) for t in (input, b))
    shape = [i * j for i, j in zip(a.shape, b.shape)]
    rows = a.reshape([i for s in a.shape for i in (s, 1)])
    return (rows * b.reshape([i for s in b.shape for i in (1, s)])).reshape(shape)


@implements(torch.renorm, torch.Tensor.renorm, sharded="reduction")
def renorm(input: ShardTensor, p: Any, dim: int, maxnorm: Any) -> Any:
    """Scale slices down to a norm. Collective where other dims than ``dim`` are sharded."""
    d = normal_dim(dim, input.ndim)
    if input.ndim < 2:
        raise RuntimeError(f"renorm: input needs at least 2 dimensions, got {input.ndim} dimensions")
    torch.renorm(input.block.new_zeros((1,) * input.ndim), p, d, maxnorm)  # what torch says to the numbers
    over = [i for i in range(input.ndim) if i != d]
    norm = torch.linalg.vector_norm(input, p, over, True)
    large = norm > maxnorm
    if not differentiated(input):
        # torch's own constant against division by zero
        return input * torch.where(large, maxnorm / (norm + 1e-7), torch.ones_like(norm))
    # what stays as it is has no part in a norm, whose gradient may be NaN
    cut = torch.where(large, input, torch.ones_like(norm))
    norm = torch.linalg.vector_norm(cut, p, over, True)
    return torch.where(large, cut * (maxnorm / (norm + 1e-7)), input)


implements(torch.Tensor.renorm_, sharded="reduction")(
    lambda self, p, dim, maxnorm: put_into(self, renorm(kept(self), p, dim, maxnorm))
)


@implements(torch.Tensor.sum_to_size, sharded="reduction")
def sum_to_size(self: ShardTensor, *size: Any) -> Any:
    """Sum over the dims that a smaller shape would broadcast. Collective where they are sharded."""
    shape = ints(size)
    lead = self.ndim - len(shape)
    if lead < 0 or any(n not in (1, m) for n, m in zip(shape, self.shape[lead:])):
        raise RuntimeError(f"size {{{list(shape)}}} is not expandable to size {{{list(self.shape)}}}.")
    x: Any = self.sum(tuple(range(lead))) if lead else self
    dims = tuple(d for d, n in enumerate(shape) if n == 1 and x.shape[d] != 1)
    return x.sum(dims, keepdim=True) if dims else x


@implements(torch.linalg.vecdot, sharded="reduction")
def vecdot(x: Any, y: Any, *, dim: int = -1) -> Any:
    """Products of vectors along a dim. Collective where it is sharded."""
    if x.dtype != y.dtype and not autocast_enabled(x.device.type):
        raise RuntimeError(f"linalg.vecdot: Expected x and y to have the same dtype, but found {x.dtype} and {y.dtype}")
    return (x.conj() * y).sum(dim)


@implements(torch.dist, torch.Tensor.dist, sharded="reduction")
def dist(input: Any, other: Any, p: Any = 2) -> Any:
    """Norm of a difference. Collective where it is sharded."""
    if not isinstance(other, Tensor):
        raise TypeError(f"dist(): argument 'other' must be Tensor, not {type(other).__name__}")
    return torch.linalg.vector_norm(input - other, float(p))


implements(*spellings("pdist"), sharded="gathers")(
    lambda input, p=2: whole(lambda t: F.pdist(t, p), (input,), checked=True)
)
implements(*spellings("block_diag"), sharded="gathers")(lambda *tensors: whole(torch.block_diag, tensors))
implements(torch.combinations, sharded="gathers")(
    lambda input, r=2, with_replacement=False: whole(lambda t: torch.combinations(t, r, with_replacement), (input,))
)


@implements(*spellings("cartesian_prod"), sharded="gathers")
def cartesian_prod(*tensors: Any) -> Any:
    """Pair cells of vectors. Collective where they share a mesh dim (one is gathered), and to lay pairs in a row."""
    on_domain(torch.cartesian_prod, *tensors)  # torch's own errors
    if len(tensors) == 1:
        return tensors[0]
    grids = torch.meshgrid(*tensors, indexing="ij")
    return torch.stack([grid.reshape(-1) for grid in grids], 1)
