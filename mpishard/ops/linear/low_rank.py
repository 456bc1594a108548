"""Decompositions of low rank, by random projections: products with the sharded matrix, and thin matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mpishard.tensor.operand import mesh_of, on_mesh
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor
from mpishard.tensor.stream import drawn_once


def _basis(a: Any, q: int, niter: int) -> Any:
    """Return orthonormal columns that span nearly what ``a`` maps to: algorithm 4.4 of Halko et al., 2009."""
    drawn = drawn_once(a.mesh, partial(torch.randn, a.shape[-1], q, dtype=a.dtype, device=a.device))
    found = torch.linalg.qr(a @ drawn).Q
    for _ in range(niter):
        found = torch.linalg.qr(a.mH @ found).Q
        found = torch.linalg.qr(a @ found).Q
    return found


@implements(torch.svd_lowrank, sharded="gathers")
def svd_lowrank(A: Any, q: int | None = 6, niter: int | None = 2, M: Any = None) -> tuple[Any, Any, Any]:
    """Return U, S, V of ``q`` columns. Collective as products with the matrix, and `torch.linalg.qr`, are."""
    mesh = mesh_of((A, M))
    a = on_mesh(A, mesh) if M is None else A - M.broadcast_to(A.shape)
    return _decomposed(a, 6 if q is None else q, 2 if niter is None else niter)


def _decomposed(a: ShardTensor, q: int, niter: int) -> tuple[Any, Any, Any]:
    m, n = a.shape[-2:]
    a = a.mH if m < n else a
    basis = _basis(a, q, niter)
    u, s, vh = torch.linalg.svd(basis.mH @ a, full_matrices=False)
    u, v = basis @ u, vh.mH
    return (v, s, u) if m < n else (u, s, v)


@implements(torch.pca_lowrank, sharded="gathers")
def pca_lowrank(A: ShardTensor, q: int | None = None, center: bool = True, niter: int = 2) -> tuple[Any, Any, Any]:
    """Return the principal components of the rows of a matrix, as `svd_lowrank` does."""
    m, n = A.shape[-2:]
    if q is None:
        q = min(6, m, n)
    elif not 0 <= q <= min(m, n):
        raise ValueError(f"q(={q}) must be non-negative integer and not greater than min(m, n)={min(m, n)}")
    if niter < 0:
        raise ValueError(f"niter(={niter}) must be non-negative integer")
    a = on_mesh(A, A.mesh)
    return _decomposed(a - a.mean(-2, keepdim=True) if center else a, q, niter)
