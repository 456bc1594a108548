"""Dims split and merged: views of the local blocks, where they are blocks of the result, else cells move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mpishard.comm import traced
from mpishard.layout import (
    Layout,
    Placement,
    Replicate,
    Shard,
    balanced,
    bounds,
    layout_of,
    repeated,
    runs_of,
    scaled,
)
from mpishard.layout.remembered import remembered
from mpishard.ops.rule.dim import (
    base_in,
    int_list,
    ints,
    local_shape,
    normal_dim,
    origin,
    resized,
    settled,
    trivially_sharded,
    unsharded,
    viewed,
    whole_along,
)
from mpishard.ops.rule.write import shares_memory
from mpishard.ops.shape.reshape_exchange import DimGroup, cut_near, regrouped, spread
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, rebind, wrap
from mpishard.tensor.strides import exists, is_dense, is_known, trodden


class Reshape(NamedTuple):
    """The layout to bring the argument to first (its own, as a rule), that of the result, and how dims pair."""

    before: Layout
    out: Layout
    groups: tuple[DimGroup, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether cells change owner."""
        return any(g.moves for g in self.groups)


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Pair the smallest runs of old and new dims that hold the same cells; no extent is 0."""
    i = j = 0
    while i < len(old) and j < len(new):
        a, b = [i], [j]
        n, m = old[i], new[j]
        i, j = i + 1, j + 1
        while n != m:
            if n < m:
                n *= old[i]
                a.append(i)
                i += 1
            else:
                m *= new[j]
                b.append(j)
                j += 1
        yield a, b
    if i < len(old) or j < len(new):
        yield list(range(i, len(old))), list(range(j, len(new)))


def _full(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Return ``shape`` with -1 replaced."""
    known = math.prod(s for s in shape if s != -1)
    if shape.count(-1) == 1 and known > 0 and n % known == 0:
        shape = tuple(n // known if s == -1 else s for s in shape)
    if shape.count(-1) or min(shape, default=0) < 0 or math.prod(shape) != n:
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {n}")
    return shape


@remembered
def plan_reshape(layout: Layout, given: tuple[int, ...]) -> Reshape:
    """Plan the reshape of a tensor without Partial dims. Not collective."""
    shape = _full(given, math.prod(layout.shape))
    if 0 in shape:
        before = unsharded(layout, tuple(layout.shard_dims))
        return Reshape(before, layout_of(layout.mesh_shape, before.placements, shape))
    # dims of one cell, or on one rank as they are, are no blocks of a merged dim
    whole = []
    for old, new in (pairs := list(_groups(layout.shape, shape))):
        if len(old) != 1 or len(new) != 1:
            whole += [
                d for d in old if d in layout.shard_dims and (layout.shape[d] == 1 or trivially_sharded(layout, d))
            ]
    before = unsharded(layout, tuple(whole)) if whole else layout
    placements: list[Placement] = [Replicate() if type(p) is Shard else p for p in before.placements]
    sizes: list[tuple[int, ...] | None] = [None] * len(shape)
    groups = []
    for old, new in pairs:
        target, cuts, moves = _regroup(before, old, shape, new)
        for m, dim in target.items():
            placements[m] = Shard(dim)
        for dim, cut in cuts.items():
            sizes[dim] = cut
        groups.append(DimGroup(tuple(old), tuple(new), moves))
    return Reshape(before, layout_of(layout.mesh_shape, placements, shape, sizes), tuple(groups))


def _regroup(
    layout: Layout, old: list[int], shape: tuple[int, ...], new: list[int]
) -> tuple[dict[int, int], dict[int, tuple[int, ...] | None], bool]:
    """Return which mesh dims shard which new dims, block sizes where they are not balanced, and if cells move."""
    cut = [d for d in old if d in layout.shard_dims]
    mesh_dims = sorted(m for d in cut for m in layout.shard_dims[d])
    if not cut:
        return {}, {}, False
    if len(old) == len(new) == 1:
        return dict.fromkeys(mesh_dims, new[0]), {new[0]: layout.sizes[cut[0]]}, False
    if cut == [next(d for d in old if layout.shape[d] > 1)]:
        # shards of the leading dim are runs of cells: blocks of the first new dim, where borders fall on its cells
        first = next(d for d in new if shape[d] > 1)
        row = math.prod(layout.shape[d] for d in old if d > cut[0])
        new_row = math.prod(shape[d] for d in new if d > first)
        sizes = layout.sizes[cut[0]]
        if not any(size * row % new_row for size, _ in runs_of(sizes)):
            moved = repeated((size * row // new_row, count) for size, count in runs_of(sizes))
            return dict.fromkeys(mesh_dims, first), {first: moved}, False
        if shape[first] >= len(sizes):
            return dict.fromkeys(mesh_dims, first), {first: cut_near(bounds(scaled(sizes, row)), shape[first])}, True
    target = {m: new[i] for m, i in spread(layout.mesh_shape, mesh_dims, [shape[d] for d in new]).items()}
    cuts: dict[int, tuple[int, ...] | None] = {}
    if len(new) == 1:
        # whole rows of the dims behind the last shard, where there are enough of them
        row = math.prod(layout.shape[d] for d in old if d > cut[-1])
        count = math.prod(layout.mesh_shape[m] for m in mesh_dims)
        if shape[new[0]] // row >= count:
            cuts[new[0]] = balanced(shape[new[0]], count, row)
    return target, cuts, True


@implements(torch.reshape, torch.Tensor.reshape, sharded="moves")
def reshape(input: ShardTensor, *given: Any, shape: Any = None) -> ShardTensor:
    """Split and merge dims. Not collective where a sharded dim leads those that it is merged with or split into.

    That is, where it is the first of the dims that are merged, or is split where its block borders fall on cells of
    the first part. Elsewhere the cells move to other ranks in one exchange (collective over the ranks that share
    the merged or split dims), and the result is sharded in blocks that are as even as they can be.
    """
    return _reshaped(input, ints(given) if shape is None else int_list(shape), copies=True)


@implements(torch.Tensor.view, sharded="moves")
def view(self: ShardTensor, *given: Any, size: Any = None, dtype: torch.dtype | None = None) -> ShardTensor:
    """Split and merge dims without a copy, or read the bytes as another dtype. As `reshape`."""
    if dtype is not None or (len(given) == 1 and isinstance(given[0], torch.dtype)):
        return _view_dtype(self, dtype or given[0])
    return _reshaped(self, ints(given) if size is None else int_list(size), copies=False)


def _reshaped(self: ShardTensor, given: tuple[int, ...], *, copies: bool) -> ShardTensor:
    """Return a view where torch has one, else a copy: into one that torch has none of, writes go through."""
    x = settled(self) if self.sharding.partial_dims else self
    plan = plan_reshape(x.sharding, given)
    x, out = base_in(x, plan.before), plan.out
    steps = [n for n in x.sharding.shape if n != 1] == [n for n in out.shape if n != 1]
    trail = trodden(x, "view", out.shape)
    is_view = steps or exists(trail)
    # else a rank whose block does not tell how x lies takes for a copy what others take for a view
    sure = not copies or is_known(x)
    if plan.moves:
        y = wrap(regrouped(x.block, x.mesh, plan.before, out, plan.groups), out, x.mesh)
        if is_view:
            y._trail = trail
        y._gathered_view = is_view or not sure or not copies
        if sure and y._gathered_view:
            y._origin = origin(x, ("view", out.shape))
        return y
    shape = local_shape(out, x.mesh.coords)
    if is_view and (steps or x._halo is None):
        try:
            # of the same shape with the steps that it has, which torch forgets of dims of one cell
            local = x.block[...] if out.shape == x.sharding.shape else x.block.view(shape)
        except (RuntimeError, ValueError):  # the latter in the hands of a compiler
            if x._trail is None:
                _joined_up(self, x)
                return viewed(x, x.block.reshape(shape), out, trail, steps=steps)
        else:
            return viewed(x, local, out, trail, steps=steps)
    local = x.block.reshape(shape)
    # what lies in a larger array of the host's, of the user's or of another tensor stays there, on all ranks
    y = wrap(local.clone() if shares_memory(local, x.block) else local, out, x.mesh)
    if is_view or not copies:
        y._gathered_view, y._origin = True, origin(x, ("view", out.shape))
    elif x._gathered_view and not is_known(x):
        y._gathered_view = True  # as on ranks that take it for a view
    return y


def _joined_up(self: ShardTensor, x: ShardTensor) -> None:
    """Make the block of ``x``, and of ``self`` if it is the same, contiguous, so that views share its memory.

    It is cut out of a larger array by a rule, where torch's own tensor is contiguous. Not collective.
    """
    own = x.block
    if own.is_contiguous():
        return
    if own.is_leaf and own.requires_grad:
        if traced.recording is None:
            own.data = own.data.contiguous()
        return
    with torch.enable_grad():
        block = own.contiguous()
    if self is not x and self.block is own:
        rebind(self, block, self.sharding)
    rebind(x, block, x.sharding)


def _view_dtype(self: ShardTensor, dtype: torch.dtype) -> ShardTensor:
    """Read the bytes as another dtype. Collective where the last dim is sharded and its blocks do not fit: gathered."""
    x, last = settled(self), self.ndim - 1
    old, new = x.dtype.itemsize, dtype.itemsize
    sizes = x.sharding.sizes[last] if x.ndim else None
    if sizes is not None and any(n * old % new for n in sizes):
        x, sizes = whole_along(x, (last,)), None
    if not x.ndim:
        return viewed(x, x.block.view(dtype), x.sharding, x._trail, view=("view", dtype))
    layout = x.sharding
    if old != new:
        if x._halo is None and x._trail is None:
            _joined_up(self, x)
        elif x._halo is not None or not (is_known(x) and is_dense(x)):
            x = wrap(x.block.clone(memory_format=torch.contiguous_format), x.sharding, x.mesh)
            x._gathered_view = True
        n = layout.shape[last] * old // new
        layout = resized(layout, last, n, None if sizes is None else tuple(s * old // new for s in sizes))
    if x.block.numel() or not self.numel():
        local = x.block.view(dtype)
    else:  # torch finds fault with the strides of no cells
        local = x.block.new_empty(layout.local_shape(x.mesh.coords), dtype=dtype)
    # what is read in other pieces is dense
    return viewed(x, local, layout, x._trail if old == new else None, view=("view", dtype))


@implements(torch.flatten, torch.Tensor.flatten, sharded="moves")
def flatten(input: ShardTensor, start_dim: int = 0, end_dim: int = -1) -> ShardTensor:
    """Merge neighbouring dims. As `reshape`."""
    shape = input.sharding.shape
    a, b = normal_dim(start_dim, len(shape)), normal_dim(end_dim, len(shape))
    if a > b:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    if not shape:
        return reshape(input, 1)
    return input if a == b else reshape(input, *shape[:a], math.prod(shape[a : b + 1]), *shape[b + 1 :])


@implements(torch.unflatten, torch.Tensor.unflatten, sharded="moves")
def unflatten(input: ShardTensor, dim: int, sizes: Sequence[int]) -> ShardTensor:
    """Split a dim. As `reshape`."""
    shape = input.sharding.shape
    d, sizes = normal_dim(dim, len(shape)), int_list(sizes)
    if not sizes:
        raise RuntimeError("unflatten: sizes must be non-empty")
    return reshape(input, *shape[:d], *_full(sizes, shape[d]), *shape[d + 1 :])


implements(torch.Tensor.view_as, sharded="moves")(lambda self, other: self.view(tuple(other.shape)))
implements(torch.Tensor.reshape_as, sharded="moves")(lambda self, other: self.reshape(tuple(other.shape)))
implements(torch.ravel, torch.Tensor.ravel, sharded="moves")(
    lambda input: input.contiguous() if input.ndim == 1 else reshape(input.contiguous(), -1)
)
