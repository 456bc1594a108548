"""Cells where a mask is true: as many as the data says, so the ranks tell each other how many they found.

Torch's order is row-major, so the cells lie in blocks of rows first: what is sharded over other dims moves. The
result is sharded along its first dim, in blocks of what each rank found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpishard.comm.collective.blocking import gather_counts
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, Replicate, Shard, layout_of
from mpishard.ops.rule.dim import require_dtype
from mpishard.tensor.operand import mesh_of, moved, on_mesh, resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _rows(layouts: list[Layout]) -> tuple[list[Any], tuple[int, ...] | None]:
    """Return placements by rows over all mesh dims that shard anything, and block sizes where all have the same."""
    over = {m for layout in layouts for m in layout.sharded_mesh_dims}
    placements = [Shard(0) if m in over else Replicate() for m in range(len(layouts[0].mesh_shape))]
    cuts = {layout.sizes[0] for layout in layouts if layout.shard_dims.get(0) == tuple(sorted(over))}
    return placements, cuts.pop() if len(cuts) == 1 else None


def _found(local: Tensor, rows: Layout, mesh: CartMesh) -> ShardTensor:
    """Return the rows that every rank found as one tensor. Collective over the mesh dims that cut the rows."""
    over = rows.sharded_mesh_dims
    sizes: list[tuple[int, ...] | None] = [None] * local.ndim
    total = local.shape[0]
    if over:
        group = mesh.group(over)
        counts = gather_counts("rows found", total, group, rows.shape)
        sizes[0] = tuple(counts.tolist())
        total = int(counts.sum())
    return wrap(local, layout_of(mesh.shape, rows.placements, (total, *local.shape[1:]), sizes), mesh)


def picked_where(x: Any, mask: Any) -> ShardTensor:
    """Return the cells of ``x`` where ``mask``, which covers its first dims, is true. Collective."""
    lead = tuple(mask.shape)
    if lead != tuple(x.shape[: len(lead)]):
        raise IndexError(
            f"The shape of the mask {list(lead)} does not match the shape of the indexed tensor {list(x.shape)}"
        )
    mesh = mesh_of((x, mask))
    x, mask = on_mesh(x, mesh), on_mesh(mask, mesh)
    placements, cut = _rows([x.sharding, mask.sharding])
    blocks = [
        moved(t, layout_of(mesh.shape, placements, t.sharding.shape, [cut, *[None] * (t.ndim - 1)])) for t in (x, mask)
    ]
    return _found(blocks[0].block[blocks[1].block.bool()], blocks[1].sharding, mesh)


def _selected(x: Tensor) -> Tensor:
    return x.masked_select(torch.ones(2, dtype=torch.bool, device=x.device))


@implements(*spellings("masked_select"), sharded="moves")
def masked_select(input: Any, mask: Any) -> ShardTensor:
    """Return the cells where a mask is true. Collective."""
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_select: expected BoolTensor for mask, but got {mask.dtype}")
    require_dtype(input, _selected)
    shape = torch.broadcast_shapes(input.shape, mask.shape) or (1,)
    return picked_where(input.expand(shape), mask.expand(shape))


@implements(*spellings("nonzero", "argwhere"), sharded="moves")
def nonzero(input: ShardTensor, *, as_tuple: bool = False) -> Any:
    """Return the global indices of cells that are not zero. Collective where the tensor is sharded."""
    x, mesh = resolved(input), input.mesh
    if as_tuple and not x.ndim:
        x = x.reshape(1)
    placements, cut = _rows([x.sharding])
    x = moved(x, layout_of(mesh.shape, placements, x.sharding.shape, [cut, *[None] * (x.ndim - 1)] if x.ndim else []))
    local = x.block.nonzero()
    if x.ndim:
        local[:, 0] += x.sharding.offset(mesh.coords)[0]
    found = _found(local, x.sharding, mesh)
    return found.unbind(1) if as_tuple else found


@implements(*spellings("nonzero_static"), sharded="moves")
def nonzero_static(input: ShardTensor, *, size: int, fill_value: int = -1) -> Any:
    """Return so many rows of `nonzero`, filled up where there are fewer. Collective where the tensor is sharded."""
    if size < 0:
        raise RuntimeError(f"nonzero_static: 'size' must be an non-negative integer, got {size}")
    found = nonzero(input)
    rest = size - found.shape[0]
    return found[:size] if rest <= 0 else torch.cat([found, found.new_full((rest, input.ndim), fill_value)])
