"""Diagonals and triangles: by global rows and columns, whatever the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpishard.autograd.graph import replayed_views
from mpishard.layout import (
    Layout,
    Partial,
    Placement,
    Shard,
    as_block_sizes,
    bounds,
    layout_of,
    moved_borders,
    sizes_of,
)
from mpishard.layout.remembered import remembered
from mpishard.ops.rule.dim import integer, normal_dim, on_domain, settled, viewed
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


@remembered
def _diagonal(layout: Layout, offset: int, a: int, b: int) -> Layout:
    """Return the layout of a diagonal: each of its cells lies where its row and its column meet."""
    row, column = max(0, -offset), max(0, offset)
    n = max(0, min(layout.shape[a] - row, layout.shape[b] - column))
    mesh_dims = sorted(m for d in (a, b) for m in layout.shard_dims.get(d, ()))
    # along the diagonal neither the row nor the column goes back, so its blocks follow each other as the ranks do
    starts = {d: moved_borders(layout.sizes[d], 1, -at, 1, n) for d, at in ((a, row), (b, column)) if layout.sizes[d]}
    if len(starts) < 2:
        sizes = sizes_of(*starts.values()) if starts else None
    else:
        sizes = as_block_sizes(_met(layout, mesh_dims, starts).tolist())
    rest = [d for d in range(layout.ndim) if d not in (a, b)]
    last = len(rest)
    placements: list[Placement] = [
        Shard(rest.index(p.dim) if p.dim in rest else last) if type(p) is Shard else p for p in layout.placements
    ]
    cut = [*(layout.sizes[d] for d in rest), sizes]
    return layout_of(layout.mesh_shape, placements, [*(layout.shape[d] for d in rest), n], cut)


def _met(layout: Layout, mesh_dims: Sequence[int], starts: Mapping[int, Sequence[int]]) -> np.ndarray:
    """Return what every rank along some mesh dims has, where its parts of two dims, between borders, are the same."""
    ranks = np.indices([layout.mesh_shape[m] for m in mesh_dims]).reshape(len(mesh_dims), -1)
    lo, hi = 0, np.iinfo(np.int64).max
    for d, borders in starts.items():
        part = np.zeros(ranks.shape[1], np.int64)
        for m in layout.shard_dims[d]:
            part = part * layout.mesh_shape[m] + ranks[mesh_dims.index(m)]
        ends = np.array(borders)
        lo, hi = np.maximum(lo, ends[part]), np.minimum(hi, ends[part + 1])
    return np.maximum(hi - lo, 0)


@implements(torch.diagonal, torch.Tensor.diagonal, sharded="local")
def diagonal(input: ShardTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ShardTensor:
    """Return a diagonal of a plane as a last dim: of a sharded one its cells stay where they are. Not collective."""
    a, b = normal_dim(dim1, input.ndim), normal_dim(dim2, input.ndim)
    x = settled(input)
    (row, _), (column, _) = (x.sharding.interval(d, x.mesh.coords) for d in (a, b))

    def taken() -> torch.Tensor:
        return x.block.diagonal(integer(offset) + row - column, a, b)

    local = taken()
    if not local.numel():
        with replayed_views():
            local = taken()
    return viewed(x, local, _diagonal(x.sharding, offset, a, b), trodden(x, "diagonal", offset, a, b))


@implements(torch.linalg.diagonal, sharded="local")
def linalg_diagonal(A: ShardTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> ShardTensor:
    """Return a diagonal of a plane as a last dim: of a sharded one its cells stay where they are. Not collective."""
    return diagonal(A, offset, dim1, dim2)


@remembered
def _embedded(layout: Layout, offset: int, a: int, b: int) -> Layout:
    """Return the layout of a plane with a diagonal: each of its cells stays where it is, and its row with it."""
    rest = iter(range(layout.ndim - 1))
    sources = tuple(layout.ndim - 1 if d == a else -1 if d == b else next(rest) for d in range(layout.ndim + 1))
    n = layout.shape[-1] + abs(offset)
    shape = tuple(n if d in (a, b) else layout.shape[s] for d, s in enumerate(sources))
    sizes = [layout.sizes[s] if s >= 0 else None for s in sources]
    if (own := sizes[a]) is not None:
        # rows without a cell are those of the first rank, or of the last
        above = max(0, -offset)
        sizes[a] = sizes_of((0, *(above + k for k in bounds(own)[1:-1]), n))
    placements: list[Placement] = [Shard(sources.index(p.dim)) if type(p) is Shard else p for p in layout.placements]
    return layout_of(layout.mesh_shape, placements, shape, sizes)


@implements(torch.diag_embed, torch.Tensor.diag_embed, sharded="local")
def diag_embed(input: ShardTensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> ShardTensor:
    """Put the last dim on the diagonal of a new plane. Not collective: where it is sharded, rows of the plane are."""
    x = settled(input)
    on_domain(torch.diag_embed, x, offset, dim1, dim2)
    a, b = normal_dim(dim1, x.ndim + 1), normal_dim(dim2, x.ndim + 1)
    out = _embedded(x.sharding, offset, a, b)
    row, _ = out.interval(a, x.mesh.coords)
    plane = x.block.new_zeros(out.local_shape(x.mesh.coords))
    return wrap(torch.diagonal_scatter(plane, x.block, offset + row, a, b), out, x.mesh)


@implements(torch.diag, torch.Tensor.diag, sharded="local")
def diag(input: ShardTensor, diagonal_: int = 0, *, diagonal: int | None = None) -> ShardTensor:
    """Copy the diagonal of a matrix, or return the matrix of one. Not collective."""
    if input.ndim not in (1, 2):
        raise RuntimeError(f"diag(): Supports 1D or 2D tensors. Got {input.ndim}D")
    offset = diagonal_ if diagonal is None else diagonal
    return diag_embed(input, offset) if input.ndim == 1 else torch.diagonal(input, offset).clone()  # type: ignore[return-value]


@implements(torch.diagflat, torch.Tensor.diagflat, sharded="moves")
def diagflat(input: ShardTensor, offset: int = 0) -> ShardTensor:
    """Put all cells on the diagonal of a matrix. Collective where flattening is."""
    return torch.diag_embed(input.reshape(-1), offset)  # type: ignore[return-value]


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
