"""Sliding blocks: Tensor.unfold along a dim, and columns of image patches with their transpose."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from mpishard.autograd.linear import apply
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.layout import Layout, Shard, bounds, layout_of, scaled, sizes_of
from mpishard.layout.stencil import Sliding, per_dim, windows
from mpishard.ops.rule.dim import frozen, normal_dim, on_domain, origin, viewed
from mpishard.ops.window.planes import cropped
from mpishard.tensor.operand import moved, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.strides import trodden


class UnfoldPlan(NamedTuple):
    """Fetch of the cells, padding of the dims that stay whole, (dim, start, length) to keep, and the result."""

    window: WindowOp
    padding: tuple[int, ...]
    crops: tuple[tuple[int, int, int], ...]
    out: Layout


class DimPlan(NamedTuple):
    """Fetch of the cells of a dim that is cut, what to keep, and the result."""

    window: WindowOp | None
    crops: tuple[tuple[int, int, int], ...]
    out: Layout


class FoldPlan(NamedTuple):
    """What one fold on one layout does on this rank.

    Attributes
    ----------
    columns
        Layout in which each rank holds whole rows of columns.
    size, padding
        Arguments of the local fold: the rows that this rank's columns touch, unpadded where the dim is cut.
    spare
        Columns of zeros that a rank without any folds instead.
    window
        From this rank's rows to the rows that its columns touch; the fold is followed by its adjoint.
    out
        Layout of the result.
    """

    columns: Layout
    size: tuple[int, int]
    padding: tuple[int, int]
    spare: int
    window: WindowOp
    out: Layout


@implements(torch.Tensor.unfold, sharded="halo")
def unfold_dim(self: ShardTensor, dimension: int, size: int, step: int) -> ShardTensor:
    """Return windows of ``size`` cells along a dim as a new last dim. Neighborwise collective.

    A window lies with the rank that has its middle cell. Along a dim that is cut, cells of other ranks are part
    of it: the result is then a copy; what is written into it reaches the tensor where no two windows share a cell, and
    is refused elsewhere.
    """
    x = resolved(self)
    if not x.ndim:
        normal_dim(dimension, 0)
        if size > 1:
            raise RuntimeError(f"maximum size for tensor at dimension 0 is 1 but size is {size}")
        return x.reshape(1)[:size]  # type: ignore[no-any-return]
    dim = normal_dim(dimension, x.ndim)
    key = ("Tensor.unfold", x.sharding, x.dtype, dim, size, step)
    plan = x.mesh.plans.get(key) or x.mesh.plan(key, lambda: _plan_dim(x, dim, size, step))
    if plan.window is None:
        trail = trodden(x, "unfold", dim, size, step)
        return viewed(x, x.block.unfold(dim, size, step), plan.out, trail, view=None if step >= size else ())
    out = wrap(cropped(apply(plan.window, x.block).unfold(dim, size, step), plan.crops), plan.out, x.mesh)
    out._gathered_view, out._trail = True, trodden(x, "unfold", dim, size, step)
    if step >= size:
        out._origin = origin(x, ("unfold", dim, size, step))
    return out


def _plan_dim(x: ShardTensor, dim: int, size: int, step: int) -> DimPlan:
    layout, mesh = x.sharding, x.mesh
    found = on_domain(torch.Tensor.unfold, x, dim, size, step)
    sizes, own = [*layout.sizes, None], layout.sizes[dim]
    window, crops = None, []
    if own is not None:
        g = Sliding(int(size), int(step), 1, 0, 0)
        borders = g.follow(own, found.shape[dim])
        sizes[dim] = sizes_of(borders)
        if len(own) > 1:
            wanted = intervals_wanted(layout.shape[dim], dim, windows(g, borders))
            window = window_op(mesh, layout, x.dtype, [wanted], op="unfold")
            index = layout.index(dim, mesh.coords)
            if borders[index] == borders[index + 1]:
                crops.append((dim, 0, 0))
    out = layout_of(layout.mesh_shape, layout.placements, tuple(found.shape), sizes)
    return DimPlan(window, tuple(crops), out)


def _of_rows(layout: Layout) -> Layout:
    """Return the layout with blocks of the last dim cut along the dim before it: their columns lie together."""
    row, column = len(layout.shape) - 2, len(layout.shape) - 1
    if column not in layout.shard_dims:
        return layout
    placements = [Shard(row) if p == Shard(column) else p for p in layout.placements]
    sizes = [None if d in (row, column) else s for d, s in enumerate(layout.sizes)]
    return layout_of(layout.mesh_shape, placements, layout.shape, sizes)


@implements(F.unfold, sharded="halo")
def unfold(input: ShardTensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> ShardTensor:
    """Return patches as columns, whose blocks are the blocks of the rows. Neighborwise collective.

    Where the last dim is sharded, a rank's columns would lie scattered: the blocks become blocks of rows first
    (collective).
    """
    x = resolved(input)
    x = moved(x, _of_rows(x.sharding))
    arguments = tuple(frozen(v, 2) for v in (kernel_size, dilation, padding, stride))
    key = ("unfold", x.sharding, x.dtype, *arguments)
    plan = x.mesh.plans.get(key) or x.mesh.plan(key, lambda: _plan_columns(x, *arguments))
    kernel, spread, _, step = arguments
    window = apply(plan.window, x.block)
    lead = window.shape[:-3]
    if 0 in window.shape[:-2]:  # torch allows no cells along the batch dim alone
        y = F.unfold(window.reshape(0, 1, *window.shape[-2:]), kernel, spread, plan.padding, step)
        y = y.reshape(*lead, window.shape[-3] * y.shape[1], y.shape[2])
    else:
        y = F.unfold(window, kernel, spread, plan.padding, step)
    return wrap(cropped(y, plan.crops), plan.out, x.mesh)


def _plan_columns(x: ShardTensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> UnfoldPlan:
    layout, mesh = x.sharding, x.mesh
    shape = tuple(on_domain(F.unfold, x, kernel, dilation, padding, stride).shape)
    channel, row, column = x.ndim - 3, x.ndim - 2, x.ndim - 1
    kernels, spreads, pads, steps = (per_dim(v, 2) for v in (kernel, dilation, padding, stride))
    wanted, crops, local_padding = [], [], list(pads)
    across = Sliding(kernels[1], steps[1], spreads[1], pads[1], pads[1]).n_out(layout.shape[column])
    # (batch,) channels * kernel cells, rows * columns: batch and channels keep their blocks, rows become columns
    sizes: list[tuple[int, ...] | None] = list(layout.sizes[:column])
    cells = kernels[0] * kernels[1]
    if sizes[channel] is not None:
        sizes[channel] = scaled(sizes[channel], cells)  # type: ignore[arg-type]
    own = layout.sizes[row]
    if own is not None:
        g = Sliding(kernels[0], steps[0], spreads[0], pads[0], pads[0])
        borders = g.follow(own, g.n_out(layout.shape[row]))
        wanted.append(intervals_wanted(layout.shape[row], row, windows(g, borders)))
        sizes[row] = scaled(sizes_of(borders), across)
        local_padding[0] = 0
        index = layout.index(row, mesh.coords)
        if borders[index] == borders[index + 1]:
            crops.append((row, 0, 0))
    out = layout_of(layout.mesh_shape, layout.placements, shape, sizes)
    return UnfoldPlan(window_op(mesh, layout, x.dtype, wanted, op="unfold"), tuple(local_padding), tuple(crops), out)


@implements(F.fold, sharded="halo")
def fold(
    input: ShardTensor,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> ShardTensor:
    """Add columns up to a field, whose rows are cut as the columns are.

    Neighborwise collective; columns that are not cut between rows, or channels, are moved first (collective).

    Notes
    -----
    Rows that several ranks' columns touch are summed where they lie: the adjoint of the fetch of `unfold`.
    """
    x = resolved(input)
    arguments = tuple(frozen(v, 2) for v in (output_size, kernel_size, dilation, padding, stride))
    key = ("fold", x.sharding, x.dtype, *arguments)
    plan = x.mesh.plans.get(key) or x.mesh.plan(key, lambda: _plan_fold(x, *arguments))
    _, kernel, spread, _, step = arguments
    y = moved(x, plan.columns).block
    if plan.spare:
        y = F.pad(y, (0, plan.spare))
    lead, cells = y.shape[:-2], int(torch.Size(per_dim(kernel, 2)).numel())
    if 0 in y.shape[:-1]:
        channels = y.shape[-2] // cells
        y = F.fold(y.reshape(0, cells, y.shape[-1]), plan.size, kernel, spread, plan.padding, step)
        y = y.reshape(*lead, channels, *y.shape[-2:])
    else:
        y = F.fold(y, plan.size, kernel, spread, plan.padding, step)
    return wrap(y if plan.window.identity else apply(plan.window.adjoint, y), plan.out, x.mesh)


def _plan_fold(x: ShardTensor, output_size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> FoldPlan:
    layout, mesh = x.sharding, x.mesh
    shape = tuple(on_domain(F.fold, x, output_size, kernel, dilation, padding, stride).shape)
    entry, column = x.ndim - 2, x.ndim - 1
    extents, kernels, spreads, pads, steps = (per_dim(v, 2) for v in (output_size, kernel, dilation, padding, stride))
    down = Sliding(kernels[0], steps[0], spreads[0], pads[0], pads[0])
    across = Sliding(kernels[1], steps[1], spreads[1], pads[1], pads[1]).n_out(extents[1])
    before, sizes = list(layout.sizes), [*layout.sizes, None]
    cells = kernels[0] * kernels[1]
    if before[entry] is not None:
        # whole channels: each border to the nearest
        sizes[entry] = sizes_of(tuple(round(b / cells) for b in bounds(before[entry])))  # type: ignore[arg-type]
        before[entry] = scaled(sizes[entry], cells)  # type: ignore[arg-type]
    wanted, spare, local_size, local_padding = [], 0, list(extents), list(pads)
    own = before[column]
    if own is not None:
        # whole rows of columns: each border to the nearest
        rows = [round(b / across) for b in bounds(own)]
        before[column] = tuple((b - a) * across for a, b in zip(rows[:-1], rows[1:]))
        # a row of the field lies with the columns that it is in the middle of
        half = (down.reach - 1) // 2
        inner = [min(max(r * down.stride - down.lo + half, 0), extents[0]) for r in rows[1:-1]]
        borders = (0, *inner, extents[0])
        # a rank without columns folds a row of zeros, as others do theirs
        read = windows(down, rows)
        wanted.append(intervals_wanted(extents[0], x.ndim - 1, read))
        sizes[column] = sizes_of(borders)
        index = layout.index(column, mesh.coords)
        spare = across if rows[index] == rows[index + 1] else 0
        local_size[0] = read[index][1] - read[index][0]
        local_padding[0] = 0
    out = layout_of(layout.mesh_shape, layout.placements, shape, sizes)
    return FoldPlan(
        layout_of(layout.mesh_shape, layout.placements, layout.shape, before),
        (local_size[0], local_size[1]),
        (local_padding[0], local_padding[1]),
        spare,
        window_op(mesh, out, x.dtype, wanted, op="fold"),
        out,
    )
