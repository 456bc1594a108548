"""Diagonals and triangles: by global rows and columns, whatever the shards."""

from __future__ import annotations

from typing import Any

import torch

from mpishard.layout import Partial, Shard, layout_of
from mpishard.ops.rule.dim import integer, mapped, normal_dim, settled, viewed, whole_along
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.strides import trodden


def _triangle_rule(func: Any) -> Any:
    def rule(input: ShardTensor, diagonal: int = 0) -> ShardTensor:
        x = settled(input)
        if x.ndim < 2:
            raise RuntimeError(f"{func.__name__}: input tensor must have at least 2 dimensions")
        (row, _), (column, _) = (x.sharding.interval(d, x.mesh.coords) for d in (x.ndim - 2, x.ndim - 1))
        return wrap(func(x.block, integer(diagonal) + row - column), x.sharding, x.mesh)

    return rule


for _func in (torch.tril, torch.triu):
    implements(_func, getattr(torch.Tensor, _func.__name__), sharded="local")(_triangle_rule(_func))


def _triangle_in_place(name: str) -> Any:
    rule = _triangle_rule(getattr(torch, name))
    return lambda self, diagonal=0: self.copy_(rule(self, diagonal))


for _name in ("tril", "triu"):
    implements(getattr(torch.Tensor, f"{_name}_"), sharded="local")(_triangle_in_place(_name))


@implements(torch.diagonal, torch.Tensor.diagonal, sharded="gathers")
def diagonal(input: ShardTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ShardTensor:
    """Return a diagonal of a plane as a last dim. Collective where one of its dims is sharded: it is gathered."""
    a, b = normal_dim(dim1, input.ndim), normal_dim(dim2, input.ndim)
    x = whole_along(settled(input), (a, b))
    local = x.block.diagonal(offset, a, b)
    rest = tuple(d for d in range(x.ndim) if d not in (a, b))
    shape = (*(x.sharding.shape[d] for d in rest), local.shape[-1])
    return viewed(x, local, mapped(x.sharding, (*rest, -1), shape), trodden(x, "diagonal", offset, a, b))


@implements(torch.linalg.diagonal, sharded="gathers")
def linalg_diagonal(A: ShardTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> ShardTensor:
    """Return a diagonal of a plane as a last dim. Collective where one of its dims is sharded: it is gathered."""
    return diagonal(A, offset, dim1, dim2)


@implements(torch.diag_embed, torch.Tensor.diag_embed, sharded="gathers")
def diag_embed(input: ShardTensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> ShardTensor:
    """Put the last dim on the diagonal of a new plane. Collective where it is sharded: it is gathered."""
    x = whole_along(settled(input), (input.ndim - 1,))
    a, b = normal_dim(dim1, x.ndim + 1), normal_dim(dim2, x.ndim + 1)
    local = torch.diag_embed(x.block, offset, a, b)
    rest = iter(range(x.ndim - 1))
    sources = tuple(-1 if d in (a, b) else next(rest) for d in range(x.ndim + 1))
    n = local.shape[a]
    shape = tuple(n if s < 0 else x.sharding.shape[s] for s in sources)
    return wrap(local, mapped(x.sharding, sources, shape), x.mesh)


@implements(torch.diag, torch.Tensor.diag, sharded="gathers")
def diag(input: ShardTensor, diagonal_: int = 0, *, diagonal: int | None = None) -> ShardTensor:
    """Copy the diagonal of a matrix, or return the matrix of one. Collective where it gathers sharded dims."""
    if input.ndim not in (1, 2):
        raise RuntimeError(f"diag(): Supports 1D or 2D tensors. Got {input.ndim}D")
    offset = diagonal_ if diagonal is None else diagonal
    return diag_embed(input, offset) if input.ndim == 1 else torch.diagonal(input, offset).clone()  # type: ignore[return-value]


@implements(torch.trace, torch.Tensor.trace, sharded="reduction")
def trace(input: ShardTensor) -> ShardTensor:
    """Sum the diagonal of a matrix. Collective where it is sharded."""
    if input.ndim != 2:
        raise RuntimeError(f"trace: expected a matrix, but got tensor with dim {input.ndim}")
    x = settled(input)
    (row, stop), (column, end) = x.sharding.box(x.mesh.coords)
    first = max(row, column)
    n = max(0, min(stop, end) - first)
    # the part of the diagonal that lies in the block
    block = x.block[first - row : first - row + n, first - column : first - column + n]
    return partial_sum(x, block.diagonal().sum())


def partial_sum(x: ShardTensor, local: torch.Tensor) -> ShardTensor:
    """Return the sum of a number per block of ``x``. Collective over the mesh dims that shard it."""
    placements = [Partial() if type(p) is Shard else p for p in x.sharding.placements]
    return resolved(wrap(local, layout_of(x.sharding.mesh_shape, placements, ()), x.mesh))
