"""Values of a field at points of a grid: affine_grid and grid_sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.compiled import by_values
from mpishard.autograd.use import use
from mpishard.autograd.window import fetch_box, window_op
from mpishard.comm import traced
from mpishard.comm.collective import blocking
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.mesh import CartMesh
from mpishard.layout import (
    Box,
    Layout,
    Placement,
    Replicate,
    Shard,
    bounds,
    layout_of,
    owner,
    plan_halo,
    repeated,
)
from mpishard.layout.partition import coords_of
from mpishard.ops.rule.align import Met, plan_meeting
from mpishard.ops.rule.dim import unsharded, whole_along
from mpishard.ops.rule.empty_block import filled, unfilled
from mpishard.ops.rule.whole import whole
from mpishard.ops.window.grid_sample_tap import taps_of, weighted_sum
from mpishard.tensor.operand import moved, on_mesh, resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap

_MODES = ("bilinear", "nearest", "bicubic")
_PADDINGS = ("zeros", "border", "reflection")
_FAR = 64  # so many ranks along a mesh dim are told one by one
_ODD = 1e6  # what is made of such coordinates, and of NaN, depends on torch's kernel, which then has the whole field
_WIDE = 0.75  # windows of more than this part of the field are no better than all of it


@implements(F.grid_sample, sharded="halo")
def grid_sample(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> ShardTensor:
    """Sample a field at the points of a grid, which may lie anywhere.

    Neighborwise collective where spatial dims of the field are sharded: ranks agree on how far they read, tell those
    within reach which part of the field they read, and get it from where it is. Where the points of a rank are spread
    over most of the field all of it travels to every rank, and also where the numbers are of a half type.

    The result is sharded as the grid; along mesh dims that shard the field, but not the grid, the grid is cut as the
    field. Where a mesh dim shards batch or channels of the field, the grid is whole along it.
    """
    corners = bool(align_corners)
    if not _fits(input, grid, mode, padding_mode):  # torch refuses, and says why
        blank = [torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape) for x in (input, grid)]
        F.grid_sample(*blank, mode, padding_mode, corners)
    spatial = tuple(f"point {d}" for d in range(input.ndim - 2))
    labels = (("batch", "channel", *(None,) * len(spatial)), ("batch", *spatial, None))
    if isinstance(input, ShardTensor):
        input = resolved(input)
        # whole coordinates first: what is cut along them alone is on every rank then, and is cut as the field
        grid = _cut_alike(whole_along(on_mesh(grid, input.mesh), (input.ndim - 1,)), input)
        input = _cut_batch(input, grid)
        if any(d > 1 for d in input.sharding.shard_dims) and input.dtype in (torch.float32, torch.float64):
            if traced.recording is None:
                return _by_reach(input, grid, labels, (mode, padding_mode, corners))
            return _compiled(input, grid, labels, (mode, padding_mode, corners))
    return _from_whole(input, grid, labels, (mode, padding_mode, corners))


def _from_whole(x: Any, grid: Any, labels: Any, how: tuple[str, str, bool]) -> ShardTensor:
    """Sample the whole field. Collective where it is sharded: it is gathered."""
    out = ("batch", "channel", *labels[1][1:-1])
    return whole(lambda x, points: F.grid_sample(x, points, *how), (x, grid), labels, out)  # type: ignore[no-any-return]


def _by_reach(x: ShardTensor, grid: ShardTensor, labels: Any, how: tuple[str, str, bool]) -> ShardTensor:
    """Sample windows of the field, or all of it where they are wide. Collective."""
    found = _from_windows(x, grid, labels, how)
    return _from_whole(x, grid, labels, how) if found is None else found


def _compiled(x: ShardTensor, grid: ShardTensor, labels: Any, how: tuple[str, str, bool]) -> ShardTensor:
    """Sample in a compiled program: how far the points reach, values say. Collective."""
    layouts, mesh = (x.sharding, grid.sharding), x.mesh
    plan = plan_meeting((unsharded(x.sharding, tuple(range(2, x.ndim))), grid.sharding), labels)
    points = plan.operands[1].local_shape(mesh.coords)[1:-1]
    shape = (plan.operands[0].local_shape(mesh.coords)[0], x.block.shape[1], *points)
    out = Met(mesh, (), plan).result

    def sample(*blocks: Tensor) -> Tensor:
        return _by_reach(*(wrap(b, layout, mesh) for b, layout in zip(blocks, layouts)), labels, how).block

    local = by_values("grid_sample", sample, (x.block, grid.block), shape)
    return out(local, ("batch", "channel", *labels[1][1:-1]))


@implements(*spellings("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), sharded="halo")
def grid_sampler(input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> ShardTensor:
    """Sample as `grid_sample`, with numbers for the modes. Neighborwise collective."""
    return grid_sample(input, grid, _MODES[interpolation_mode], _PADDINGS[padding_mode], align_corners)


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
    reads = [tap.interval() if points.numel() else None for tap in taps]
    # who reads nothing asks for a cell that is near
    first = [min(source.interval(d, mesh.coords)[0], layout.shape[d] - 1) for d in dims]
    own = [reads[d - 2] or (lo, lo + 1) for d, lo in zip(dims, first)]
    part = math.prod((hi - lo) / layout.shape[d] for d, (lo, hi) in zip(dims, own))
    if not float(flat.detach().abs().max()) < _ODD:
        part = 1.0
    told = torch.tensor([part, *_reach(source, mesh, dict(zip(dims, own)))], dtype=torch.float64, device="cpu")
    widest, *reach = blocking.all_reduce(told, mesh.all_ranks, "max").tolist()
    if widest > _WIDE:
        return None
    mine = torch.tensor([source.interval(d, mesh.coords) for d in dims], device="cpu")
    every = {**_readers(mesh, torch.tensor(own, device="cpu"), mine, [int(n) for n in reach]), mesh.rank: own}

    def window(coords: tuple[int, ...]) -> Box:
        box = list(source.box(coords))
        for d, interval in zip(dims, every[mesh.rank_at(coords)]):
            box[d] = interval
        return tuple(box)

    field = moved(x, source)
    used = tuple(m for m in plan.used[0] if type(source.placements[m]) is Replicate)
    cells = fetch_box(use(field.block, mesh, used), mesh, source, window, "grid_sample", sorted(every))
    origin = [lo for lo, _ in window(mesh.coords)[2:]]
    local = weighted_sum(filled(cells), taps, origin).unflatten(2, [max(n, 1) for n in points.shape[1:-1]])
    local = unfilled(local, (points.shape[0], cells.shape[1], *points.shape[1:-1]))
    return Met(mesh, (cells, points), plan).result(local, ("batch", "channel", *labels[1][1:-1]))


def _reach(source: Layout, mesh: CartMesh, reads: Mapping[int, tuple[int, int]]) -> list[int]:
    """Return how many coordinates away, along every mesh dim, the cells lie that this rank reads. Not collective."""
    reach = [0] * mesh.ndim
    for d, (lo, hi) in reads.items():
        borders, mesh_dims = bounds(source.sizes[d] or ()), source.shard_dims[d]
        extents = [mesh.shape[m] for m in mesh_dims]
        here, there = (coords_of(owner(borders, cell), extents) for cell in (lo, hi - 1))
        for k, m in enumerate(mesh_dims):
            ends = (here[k], there[k]) if here[:k] == there[:k] else (0, extents[k] - 1)
            reach[m] = max(abs(c - mesh.coords[m]) for c in ends)
    return reach


def _readers(mesh: CartMesh, own: Tensor, mine: Tensor, reach: Sequence[int]) -> dict[int, Any]:
    """Return what the ranks read that read of this rank's block.

    Neighborwise collective: ranks as far apart as the reach, per mesh dim, tell each other; where that is far, all.

    Parameters
    ----------
    own, mine
        Per dim the interval that this rank reads, and that of its block.
    reach
        Per mesh dim, the longest of all ranks.
    """
    table, origin, placements, halos = own.view((1,) * mesh.ndim + own.shape), list(mesh.coords), [], {}
    for m, n in enumerate(mesh.shape):
        far = 1 << (reach[m] - 1).bit_length() if reach[m] else 0  # of few lengths, as messages are kept
        placements.append(Replicate() if far > _FAR else Shard(m))
        if far > _FAR:
            table, origin[m] = blocking.all_gather(table, mesh.group((m,)), m, repeated(((1, n),))), 0
        elif far:
            halos[m] = far
            origin[m] -= far
    if halos:
        layout = layout_of(mesh.shape, placements, (*mesh.shape, *own.shape))

        def plan() -> WindowOp:
            ones = [plan_halo(m, (m,), layout.sizes[m] or (), n, n, "zeros", mesh.coords[m]) for m, n in halos.items()]
            return window_op(mesh, layout, table.dtype, ones, op="readers of grid_sample")

        table = mesh.plan(("grid_sample, readers", layout, *halos.items()), plan)(table)
    low, high = table.unbind(-1)
    near = ((low < mine[:, 1]) & (high > mine[:, 0])).all(-1).nonzero()
    found = zip((near + torch.tensor(origin, device="cpu")).tolist(), table[near.unbind(1)].tolist())
    return {mesh.rank_at(coords): intervals for coords, intervals in found}


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


def _cut_alike(grid: ShardTensor, input: ShardTensor) -> ShardTensor:
    """Return a grid that is cut along its points also where the field is cut along its cells."""
    layout = input.sharding
    placements: list[Placement] = [
        Shard(p.dim - 1) if type(q) is Replicate and type(p) is Shard and p.dim > 1 else q
        for p, q in zip(layout.placements, grid.sharding.placements)
    ]
    probe = layout_of(layout.mesh_shape, placements, grid.sharding.shape)
    sizes = list(probe.sizes)
    for d, mesh_dims in probe.shard_dims.items():
        if grid.sharding.shard_dims.get(d) == mesh_dims:
            sizes[d] = grid.sharding.sizes[d]
        elif layout.shard_dims.get(d + 1) == mesh_dims and layout.shape[d + 1] == grid.sharding.shape[d]:
            sizes[d] = layout.sizes[d + 1]
    return moved(grid, layout_of(layout.mesh_shape, placements, grid.sharding.shape, sizes))


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
        F.affine_grid(torch.zeros(x.shape, dtype=x.dtype, device="cpu"), list(size), bool(align_corners))

    def points(t: Tensor) -> Tensor:
        return F.affine_grid(t, [len(t), *size[1:]], bool(align_corners))

    rows = ("batch", None, None)
    return whole(points, (x,), (rows,), ("batch", *(None,) * (len(size) - 1)))  # type: ignore[no-any-return]
