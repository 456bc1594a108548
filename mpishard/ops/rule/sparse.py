"""Sparse matrices, which every rank holds whole, as operands of products with ShardTensors."""

from __future__ import annotations

import torch
from torch import Tensor

from mpishard.autograd.linear import differentiated
from mpishard.autograd.use import use
from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedOperationError
from mpishard.layout import Layout, Shard


def require_sparse_gradient(name: str, x: Tensor) -> None:
    """Refuse a sparse matrix whose gradient torch would make dense. Not collective.

    Raises
    ------
    UnsupportedOperationError
        It has a gradient, and ``name`` is not of ``torch.sparse``.
    """
    if differentiated(x) and not name.startswith("sparse"):
        raise UnsupportedOperationError(
            f"{name}: the gradient of a sparse matrix times a ShardTensor",
            expected="torch.sparse.mm or torch.sparse.addmm, of which it is as sparse as the matrix",
            got=f"{name}, of which it is dense",
            fix="take torch.sparse.mm, or detach the matrix",
        )


def sparse_block(x: Tensor, mesh: CartMesh, target: Layout, used: tuple[int, ...]) -> Tensor:
    """Return what a product needs of a sparse matrix: the entries whose rows and columns ``target`` gives this rank.

    Not collective.

    Notes
    -----
    Adjoint: gradients of entries are summed over the mesh dims that shard the matrix or the other operand.
    """
    cuts = [(d, target.interval(d, mesh.coords)) for d in target.shard_dims]
    learns = differentiated(x)
    if not cuts and not learns:
        return x
    over = tuple(m for m, p in enumerate(target.placements) if m in used or type(p) is Shard)
    if not cuts and x.layout is torch.sparse_csr:
        values = use(x.values(), mesh, over)
        return torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False)
    x = x if x.layout is torch.sparse_coo else x.to_sparse_coo()
    if learns:
        x = x.coalesce()
        index, values = x.indices(), use(x.values(), mesh, over)
    else:
        index, values = x._indices(), x._values()
    shape = list(x.shape)
    for d, (lo, hi) in cuts:
        own = ((index[d] >= lo) & (index[d] < hi)).nonzero().squeeze(1)
        index, values, shape[d] = index[:, own], values[own], hi - lo
        index[d] -= lo
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=False)
