"""Values of a field at points of a grid: affine_grid and grid_sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mpishard.layout import Placement, Replicate, Shard, layout_of
from mpishard.ops.meet import meet
from mpishard.tensor.operand import moved, on_mesh, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor

_MODES = ("bilinear", "nearest", "bicubic")
_PADDINGS = ("zeros", "border", "reflection")


@implements(F.grid_sample)
def grid_sample(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> ShardTensor:
    """Sample a field at the points of a grid, which may lie anywhere.

    Collective where spatial dims of the field are sharded: these dims, not batch and channels, are gathered, since
    every rank may need any cell. The result is sharded as the grid; a plain grid is cut as the field was. Where a
    mesh dim shards batch or channels of the field, the grid is whole along it.
    """
    corners = bool(align_corners)
    if not _fits(input, grid, mode, padding_mode):  # torch refuses, and says why
        blank = [torch.zeros((), dtype=x.dtype).expand(x.shape) for x in (input, grid)]
        F.grid_sample(*blank, mode, padding_mode, corners)
    if isinstance(input, ShardTensor) and not isinstance(grid, ShardTensor):
        grid = _cut_alike(grid, input)
    spatial = tuple(f"point {d}" for d in range(input.ndim - 2))
    met = meet((input, grid), (("batch", "channel", *(None,) * len(spatial)), ("batch", *spatial, None)))
    cells, points = met.locals
    if 0 in cells.shape[:2] or 0 in points.shape:
        # torch refuses some blocks without cells; both stay in the graph
        shape = (points.shape[0], cells.shape[1], *points.shape[1:-1])
        local = (cells.sum() + points.sum()) * 0 + cells.new_zeros(shape)
    else:
        local = F.grid_sample(cells, points, mode, padding_mode, corners)
    return met.wrapped(local, ("batch", "channel", *spatial))


def _fits(input: Any, grid: Any, mode: str, padding_mode: str) -> bool:
    spatial = input.ndim - 2
    return (
        mode in _MODES[: 3 if spatial == 2 else 2]
        and padding_mode in _PADDINGS
        and spatial in (2, 3)
        and grid.ndim == input.ndim
        and grid.shape[0] == input.shape[0]
        and grid.shape[-1] == spatial
        and grid.dtype == input.dtype
        and 0 not in input.shape[2:]
    )


def _cut_alike(grid: torch.Tensor, input: ShardTensor) -> ShardTensor:
    """Return a plain grid as a ShardTensor, cut along the points where the field is cut along its cells."""
    layout, mesh = input._layout, input._mesh
    placements: list[Placement] = [
        Shard(p.dim - 1) if type(p) is Shard and p.dim > 1 else Replicate() for p in layout.placements
    ]
    sizes = [None, *layout.sizes[2:], None]
    same = [n if s is not None and n == m else None for n, m, s in zip(grid.shape[1:-1], layout.shape[2:], sizes[1:])]
    cut = [None, *(sizes[d + 1] if n is not None else None for d, n in enumerate(same)), None]
    target = layout_of(mesh.shape, placements, tuple(grid.shape), cut)
    return moved(on_mesh(grid, mesh), target)


@implements(F.affine_grid)
def affine_grid(theta: ShardTensor, size: Any, align_corners: bool | None = None) -> ShardTensor:
    """Points of affine maps, one per cell of the batch.

    Collective where the matrices are sharded by rows or columns: they are gathered. The result is sharded along
    the batch.
    """
    size = tuple(int(n) for n in size)
    x = resolved(theta)
    if x.ndim != 3 or not size or size[0] != x.shape[0]:
        F.affine_grid(torch.zeros(x.shape, dtype=x.dtype), list(size), bool(align_corners))
    met = meet((x,), (("batch", None, None),))
    (local,) = met.locals
    if local.shape[0]:
        points = F.affine_grid(local, [local.shape[0], *size[1:]], bool(align_corners))
    else:  # torch refuses an empty batch
        points = F.affine_grid(local.sum() + local.new_zeros(1, *local.shape[1:]), [1, *size[1:]], bool(align_corners))
        points = points[:0]
    return met.wrapped(points, ("batch", *(None,) * (points.ndim - 1)))
