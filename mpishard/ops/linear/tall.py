"""Tall matrices whose rows are sharded: QR and singular values where the rows are.

Each rank factorises its own rows. What is left are small triangles, one on every rank, which are one matrix to the
distributed Householder reflections that follow: a reduction of two rows for each column. So a rank holds its rows and
a triangle, among thousands of ranks as among two.

Sources: J. Demmel, L. Grigori, M. Hoemmen and J. Langou, "Communication-optimal parallel and sequential QR and LU
factorizations" (SIAM J. Sci. Comput. 34, 2012), for rows first and triangles then; R. Schreiber and C. Van Loan, "A
storage-efficient WY representation" (SIAM J. Sci. Stat. Comput. 10, 1989); G. Ballard et al., "Reconstructing
Householder vectors from tall-skinny QR" (J. Parallel Distrib. Comput. 85, 2015), for the signs that LAPACK would have
found.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.linear import in_transform
from mpishard.comm import traced
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import Group
from mpishard.ops.rule.dim import resized, unsharded, whole_along
from mpishard.tensor.function import apply_function
from mpishard.tensor.operand import resolved
from mpishard.tensor.shard_tensor import ShardTensor, wrap

# so many cells are gathered in less time than the steps for their columns take
FEW = 1 << 16


def is_tall(x: Any) -> bool:
    """Tell whether rows of matrices are sharded, many, and on an average rank not fewer than columns. Not collective.

    A compiled program gathers them, and so does forward mode.
    """
    if not isinstance(x, ShardTensor) or x.ndim < 2 or traced.recording is not None or in_transform():
        return False
    parts = len(x.sharding.sizes[-2] or ())
    return parts > 1 and x.numel() > FEW and x.shape[-2] >= parts * x.shape[-1]


def tall_qr(x: ShardTensor) -> tuple[ShardTensor, ShardTensor]:
    """Return Q, whose rows lie as those of ``x``, and R, which every rank of them has.

    Collective over the mesh dims that shard the rows.

    Notes
    -----
    Adjoint: that of `torch.linalg.qr`, with the products over all rows. Signs are those of LAPACK, unless they hang on
    rounding.
    """
    found: tuple[ShardTensor, ShardTensor] = apply_function(_QR, (whole_along(resolved(x), (x.ndim - 1,)),))
    return found


def tall_svd(x: ShardTensor) -> tuple[ShardTensor, ShardTensor, ShardTensor]:
    """Return U, whose rows lie as those of ``x``, and S and V^H, which every rank of them has.

    Collective over the mesh dims that shard the rows.

    Notes
    -----
    Adjoint: that of `torch.linalg.svd`, with the products over all rows.
    """
    found: tuple[ShardTensor, ShardTensor, ShardTensor]
    found = apply_function(_SVD, (whole_along(resolved(x), (x.ndim - 1,)),))
    return found


def _factors(x: ShardTensor) -> tuple[ShardTensor, ShardTensor]:
    layout, mesh, rows = x.sharding, x.mesh, x.ndim - 2
    n, sizes = x.shape[-1], layout.sizes[rows]
    assert sizes is not None
    group = mesh.group(layout.shard_dims[rows])
    q, r = torch.linalg.qr(x.block)
    first = 0
    for size in islice(sizes, group.rank):
        if first >= n:  # no row of these is a pivot
            break
        first += min(size, n)
    scale = _scale(r, group).unsqueeze(-2)
    part, r = _reflected(r * scale, first, group)
    # a diagonal that is positive, and then that of LAPACK
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1).real < 0, -1, 1).to(r.dtype)
    q, r = (q @ part) * signs.unsqueeze(-2), (r / scale) * signs.unsqueeze(-1)
    signs = _signs(q, layout.offset(mesh.coords)[rows], group)
    whole = resized(unsharded(layout, (rows,)), rows, n)
    return wrap(q * signs.unsqueeze(-2), layout, mesh), wrap(r * signs.unsqueeze(-1), whole, mesh)


def _scale(rows: Tensor, group: Group) -> Tensor:
    """Return a power of two for each column, whose squares then neither overflow nor vanish. Collective."""
    own = rows.abs()
    # of no rows there is no largest
    most = torch.cat([own, own.new_zeros(*own.shape[:-2], 1, own.shape[-1])], -2).amax(-2)
    most = blocking.all_reduce(most, group, "max")
    usable = most.isfinite() & (most >= torch.finfo(most.dtype).tiny)
    # exact: a number by its mantissa is a power of two
    return torch.where(usable, 4 * torch.frexp(most).mantissa / torch.where(usable, most, 1), 1)


def _reflected(rows: Tensor, first: int, group: Group) -> tuple[Tensor, Tensor]:
    """Factorise the ranks' rows as one matrix, of which this rank's begin at ``first``: its rows of Q, and R.

    Collective: a reduction for every column, and one more.
    """
    *batch, k, n = rows.shape
    left, found, made = rows.clone(), rows.new_zeros(*batch, n, n), torch.zeros_like(rows)
    factors = rows.new_zeros(*batch, n)
    for j in range(n):
        own = j - first if 0 <= j - first < k else None
        below = min(max(j + 1 - first, 0), k)
        tail = left[..., below:, j:]
        mine = left[..., own, j:] if own is not None else left.new_zeros(*batch, n - j)
        both = torch.stack([(tail[..., :1].mH @ tail).squeeze(-2), mine])
        products, row = blocking.all_reduce(both, group)
        square, alpha = products[..., 0].real, row[..., 0]
        norm = torch.sqrt(square + (alpha * alpha.conj()).real)
        beta = -torch.copysign(norm, alpha.real).to(alpha.dtype)
        # nothing is to be reflected: as LAPACK has it
        done = (square == 0) & (alpha.imag == 0 if alpha.is_complex() else torch.ones_like(square, dtype=torch.bool))
        pivot = torch.where(done, 1, alpha - beta)
        factor = torch.where(done, 0, (beta - alpha) / torch.where(beta == 0, 1, beta))
        across = factor.conj()[..., None] * (row + products / pivot.conj()[..., None])
        found[..., j, j:] = row - across
        made[..., below:, j] = tail[..., 0] / pivot[..., None]
        factors[..., j] = factor
        left[..., below:, j:] = tail - made[..., below:, j, None] * across[..., None, :]
        if own is not None:
            made[..., own, j] = 1
    # I - V T V^H, of which the first columns are wanted
    top = _first_rows(made, first, n)
    inner, top = blocking.all_reduce(torch.stack([made.mH @ made, top]), group)
    t = torch.diag_embed(factors)
    for j in range(1, n):
        ahead = t[..., :j, :j] @ inner[..., :j, j, None]
        t[..., :j, j] = -factors[..., j, None] * ahead[..., 0]
    unit = torch.eye(n, dtype=rows.dtype, device=rows.device)
    return _rows_of(unit, first, k) - made @ (t @ top.mH), found.triu()


def _first_rows(x: Tensor, first: int, n: int) -> Tensor:
    """Return the first ``n`` rows of a matrix whose rows from ``first`` on are given, and zeros for others."""
    out = x.new_zeros(*x.shape[:-2], n, x.shape[-1])
    if first < n:
        own = x[..., : n - first, :]
        out[..., first : first + own.shape[-2], :] = own
    return out


def _rows_of(unit: Tensor, first: int, k: int) -> Tensor:
    """Return ``k`` rows of the identity from ``first`` on, zeros beyond its end."""
    out = unit.new_zeros(k, unit.shape[-1])
    own = unit[first : first + k]
    out[: len(own)] = own
    return out


def _signs(q: Tensor, first: int, group: Group) -> Tensor:
    """Return the signs of the diagonal of R that reflections of the whole matrix give. Collective.

    Those of the first rows of Q, eliminated as its reflections would: +1 where the number in the place of the pivot is
    negative. What is within rounding of 0 counts as 0.
    """
    n = q.shape[-1]
    left = blocking.all_reduce(_first_rows(q, first, n), group)
    signs = left.new_zeros(*left.shape[:-2], n).real
    least = 100 * torch.finfo(signs.dtype).eps
    for j in range(n):
        at = left[..., j, j]
        sign = torch.where(at.real < -least, 1.0, -1.0).to(signs.dtype)
        signs[..., j] = sign
        pivot = at - sign
        column = left[..., j + 1 :, j, None] / pivot[..., None, None]
        left[..., j + 1 :, j + 1 :] -= column * left[..., j, None, j + 1 :]
    return signs


class _QR(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardTensor) -> Any:
        q, r = _factors(x)
        ctx.save_for_backward(q, r)
        return q, r

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        q, r = ctx.saved_tensors
        g, h = cotangents
        m = h @ r.mH - q.mH @ g
        upper = m.triu(1)
        m = upper + upper.mH + torch.diag_embed(m.diagonal(dim1=-2, dim2=-1).real)
        return (g + q @ m.to(q.dtype)) @ _inverse(r).mH


def _inverse(r: Any) -> Any:
    unit = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
    return torch.linalg.solve_triangular(r, unit.expand(r.shape), upper=True)


class _SVD(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardTensor) -> Any:
        q, r = _factors(x)
        u, s, vh = torch.linalg.svd(r, full_matrices=False)
        u = q @ u
        ctx.save_for_backward(u, s, vh)
        return u, s, vh

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        u, s, vh = ctx.saved_tensors
        gu, gs, gvh = cotangents
        across, down = s.unsqueeze(-2), s.unsqueeze(-1)
        apart = across * across - down * down
        of_u, of_v = u.mH @ gu, vh @ gvh.mH
        inner = _over(_skew(of_u), apart) * across + down * _over(_skew(of_v), apart) + torch.diag_embed(gs)
        if u.is_complex():
            turned = _phases(of_u)
            if not torch.allclose(turned, -_phases(of_v), rtol=1e-2, atol=1e-2):
                raise RuntimeError(
                    "svd_backward: The singular vectors in the complex case are specified up to multiplication by "
                    "e^{i phi}. The specified loss function depends on this phase term, making it ill-defined."
                )
            inner = inner + torch.diag_embed(_over(turned * 1j, s))
        return (u @ inner + _over(gu - u @ of_u, across)) @ vh


def _phases(m: Any) -> Any:
    return m.diagonal(dim1=-2, dim2=-1).imag


def _skew(m: Any) -> Any:
    """Return a matrix less its adjoint, without the diagonal: a phase, which no loss may depend on."""
    m = m - m.mH
    return m - torch.diag_embed(m.diagonal(dim1=-2, dim2=-1)) if m.is_complex() else m


def _over(g: Any, by: Any) -> Any:
    """Divide, but what has no cotangent: equal singular values whose vectors nobody has asked for."""
    return g / torch.where((by == 0) & (g == 0), 1, by)
