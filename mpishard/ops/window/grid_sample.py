"""Values of a field at points of a grid: affine_grid and grid_sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.bucket import use
from mpishard.autograd.window import fetch_box
from mpishard.comm.collective import blocking
from mpishard.layout import Box, Layout, Placement, Replicate, Shard, layout_of, repeated
from mpishard.ops.rule.align import Met, plan_meeting
from mpishard.ops.rule.dim import unsharded, whole_along
from mpishard.ops.rule.empty_block import filled, unfilled
from mpishard.ops.rule.whole import whole
from mpishard.ops.window.grid_sample_tap import taps_of, weighted_sum
from mpishard.tensor.operand import moved, on_mesh, resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor

_MODES = ("bilinear", "nearest", "bicubic")
_PADDINGS = ("zeros", "border", "reflection")
_WIDE = 0.75  # windows of more than this part of the field are no better than all of it


@implements(F.grid_sample, sharded="halo")
def grid_sample(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> ShardTensor:
    """Sample a field at the points of a grid, which may lie anywhere.

    Neighborwise collective where spatial dims of the field are sharded: ranks agree on the part of the field that
    each of them reads, and get it from where it is. Where the points of a rank are spread over most of the field
    all of it travels to every rank, and also where the numbers are of a half type.

    The result is sharded as the grid; along mesh dims that shard the field, but not the grid, the grid is cut as the
    field. Where a mesh dim shards batch or channels of the field, the grid is whole along it.
    """
    corners = bool(align_corners)
    if not _fits(input, grid, mode, padding_mode):  # torch refuses, and says why
        blank = [torch.zeros((), dtype=x.dtype).expand(x.shape) for x in (input, grid)]
        F.grid_sample(*blank, mode, padding_mode, corners)
    spatial = tuple(f"point {d}" for d in range(input.ndim - 2))
    labels = (("batch", "channel", *(None,) * len(spatial)), ("batch", *spatial, None))
    if isinstance(input, ShardTensor):
        input = resolved(input)
        grid = whole_along(_cut_alike(grid, input), (input.ndim - 1,))
        input = _cut_batch(input, grid)
        if any(d > 1 for d in input.sharding.shard_dims) and input.dtype in (torch.float32, torch.float64):
            found = _from_windows(input, grid, labels, (mode, padding_mode, corners))
            if found is not None:
                return found
    return whole(  # type: ignore[no-any-return]
        lambda x, points: F.grid_sample(x, points, mode, padding_mode, corners),
        (input, grid),
        labels,
        ("batch", "channel", *spatial),
    )


@implements(*spellings("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), sharded="halo")
def grid_sampler(input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> ShardTensor:
    """Sample as `grid_sample`, with numbers for the modes. Neighborwise collective."""
    return grid_sample(input, grid, _MODES[interpolation_mode], _PADDINGS[padding_mode], align_corners)


def _of_points(local: Tensor, cells: Tensor, points: Tensor) -> Tensor:
    """Return the values of as many points and channels as there are."""
    return unfilled(local, (points.shape[0], cells.shape[1], *points.shape[1:-1]))


def _from_windows(x: ShardTensor, grid: ShardTensor, labels: Any, how: tuple[str, str, bool]) -> ShardTensor | None:
    """Sample windows of the field, or return None on every rank where the windows are wide. Collective."""
    layout, mesh = x.sharding, x.mesh
    whole = tuple(range(2, x.ndim))
    plan = plan_meeting((unsharded(layout, whole), grid.sharding), labels)
    wanted = plan.operands[0]
    source = layout_of(
        mesh.shape,
        [p if type(p) is Shard and p.dim > 1 else q for p, q in zip(layout.placements, wanted.placements)],
        layout.shape,
        [*wanted.sizes[:2], *layout.sizes[2:]],
    )
    points = use(moved(grid, plan.operands[1]).block, mesh, plan.used[1])
    flat = filled(points).flatten(1, -2)
    # the last coordinate belongs to the first spatial dim
    taps = [taps_of(flat[..., x.ndim - 1 - d], layout.shape[d], x.ndim - 2, *how) for d in whole]
    dims = [d for d in whole if layout.sizes[d] is not None]
    reads = [(0, 1) if 0 in points.shape else taps[d - 2].interval() or (0, 1) for d in dims]
    every = blocking.all_gather(
        torch.tensor([reads], dtype=torch.int64),
        mesh.group(tuple(range(mesh.ndim))),
        0,
        repeated(((1, mesh.size),)),
    )
    lows, highs = every.unbind(-1)
    parts = (highs - lows) / torch.tensor([layout.shape[d] for d in dims], dtype=torch.float64)
    if parts.prod(1).max() > _WIDE:
        return None

    def window(coords: tuple[int, ...]) -> Box:
        box = list(source.box(coords))
        for d, (lo, hi) in zip(dims, every[mesh.rank_at(coords)].tolist()):
            box[d] = (lo, hi)
        return tuple(box)

    field = moved(x, source)
    used = tuple(m for m in plan.used[0] if type(source.placements[m]) is Replicate)
    first, stop = torch.tensor([source.interval(d, mesh.coords) for d in dims]).unbind(1)
    near = ((lows < stop) & (highs > first)).all(1).nonzero().flatten().tolist()
    cells = fetch_box(use(field.block, mesh, used), mesh, source, window, "grid_sample", near)
    origin = [lo for lo, _ in window(mesh.coords)[2:]]
    local = weighted_sum(filled(cells), taps, origin).unflatten(2, [max(n, 1) for n in points.shape[1:-1]])
    return Met(mesh, (cells, points), plan).result(
        _of_points(local, cells, points), ("batch", "channel", *labels[1][1:-1])
    )


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


def _cut_alike(grid: Any, input: ShardTensor) -> ShardTensor:
    """Return a grid that is cut along its points also where the field is cut along its cells."""
    mesh, layout = input.mesh, input.sharding
    grid = on_mesh(grid, mesh)
    placements: list[Placement] = [
        Shard(p.dim - 1) if type(q) is Replicate and type(p) is Shard and p.dim > 1 else q
        for p, q in zip(layout.placements, grid.sharding.placements)
    ]
    probe = layout_of(mesh.shape, placements, grid.sharding.shape)
    sizes = list(probe.sizes)
    for d, mesh_dims in probe.shard_dims.items():
        if grid.sharding.shard_dims.get(d) == mesh_dims:
            sizes[d] = grid.sharding.sizes[d]
        elif layout.shard_dims.get(d + 1) == mesh_dims and layout.shape[d + 1] == grid.sharding.shape[d]:
            sizes[d] = layout.sizes[d + 1]
    return moved(grid, layout_of(mesh.shape, placements, grid.sharding.shape, sizes))


def _cut_batch(input: ShardTensor, grid: ShardTensor) -> ShardTensor:
    """Return a field that is cut along the batch where the grid is: its cells change ranks."""
    layout: Layout = input.sharding
    placements = [
        q if type(p) is Shard and p.dim > 1 and q == Shard(0) else p
        for p, q in zip(layout.placements, grid.sharding.placements)
    ]
    probe = layout.with_placements(placements)
    sizes = list(probe.sizes)
    if probe.shard_dims.get(0) == grid.sharding.shard_dims.get(0):
        sizes[0] = grid.sharding.sizes[0]
    return moved(input, layout_of(layout.mesh_shape, placements, layout.shape, sizes))


@implements(F.affine_grid, sharded="gathers")
def affine_grid(theta: ShardTensor, size: Any, align_corners: bool | None = None) -> ShardTensor:
    """Points of affine maps, one per cell of the batch.

    Collective where the matrices are sharded by rows or columns: they are gathered. The result is sharded along
    the batch.
    """
    size = tuple(int(n) for n in size)
    x = resolved(theta)
    if x.ndim != 3 or not size or size[0] != x.shape[0]:
        F.affine_grid(torch.zeros(x.shape, dtype=x.dtype), list(size), bool(align_corners))

    def points(t: Tensor) -> Tensor:
        return F.affine_grid(t, [len(t), *size[1:]], bool(align_corners))

    rows = ("batch", None, None)
    return whole(points, (x,), (rows,), ("batch", *(None,) * (len(size) - 1)))  # type: ignore[no-any-return]
