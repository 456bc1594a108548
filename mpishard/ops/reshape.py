"""Dims split and merged, where the shards of the result are blocks again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from mpishard.errors import LayoutError, described
from mpishard.layout import Layout, Placement, Shard, bounds, layout_of, sizes_of
from mpishard.ops.dim import CACHED, base_in, local_shape, settled, trivially_sharded, unsharded, viewed, wrapped
from mpishard.ops.view import ints
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor


class Reshape(NamedTuple):
    """The layout to bring the argument to first (its own, as a rule), and that of the result."""

    before: Layout
    out: Layout


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


def _not_blocks(layout: Layout, shape: tuple[int, ...], dim: int, why: str) -> NoReturn:
    raise LayoutError(
        described(
            f"reshape of {tuple(layout.shape)} to {shape}: the shards of dim {dim} would not be blocks of the result",
            expected=why,
            got=f"{list(layout.placements)}, blocks of {layout.sizes[dim]} cells along dim {dim}",
            fix="redistribute to a dim that stays, x.redistribute(placements), or move the block borders, "
            "x.rebalance(sizes)",
        )
    )


@lru_cache(maxsize=CACHED)
def plan_reshape(layout: Layout, given: tuple[int, ...]) -> Reshape:
    """Plan the reshape of a tensor without Partial dims. Not collective."""
    shape = _full(given, math.prod(layout.shape))
    if 0 in shape:
        before = unsharded(layout, tuple(layout.shard_dims))
        return Reshape(before, layout_of(layout.mesh_shape, before.placements, shape))
    gathered: list[int] = []
    target: dict[int, int] = {}
    sizes: list[tuple[int, ...] | None] = [None] * len(shape)
    for old, new in _groups(layout.shape, shape):
        leading = next((d for d in old if layout.shape[d] > 1), None)
        for dim in old:
            cut = layout.sizes[dim]
            if cut is None:
                continue
            if len(old) == len(new) == 1:
                target[dim], sizes[new[0]] = new[0], cut
            elif layout.shape[dim] == 1 or trivially_sharded(layout, dim):
                gathered.append(dim)  # of one cell, or on one rank as it is
            elif dim != leading:
                _not_blocks(layout, shape, dim, f"only the first dim of {tuple(layout.shape[d] for d in old)} sharded")
            else:
                first = next(d for d in new if shape[d] > 1)
                row = math.prod(layout.shape[d] for d in old if d > dim)
                new_row = math.prod(shape[d] for d in new if d > first)
                borders = [b * row for b in bounds(cut)]
                if any(b % new_row for b in borders):
                    _not_blocks(
                        layout, shape, dim, f"block borders at multiples of {new_row} cells (they are at {borders})"
                    )
                target[dim], sizes[first] = first, sizes_of(tuple(b // new_row for b in borders))
    before = unsharded(layout, tuple(gathered)) if gathered else layout
    placements: list[Placement] = [Shard(target[p.dim]) if type(p) is Shard else p for p in before.placements]
    return Reshape(before, layout_of(layout.mesh_shape, placements, shape, sizes))


def _prepared(x: ShardTensor, shape: tuple[int, ...]) -> tuple[ShardTensor, Layout]:
    x = settled(x) if x._layout.partial_dims else x
    plan = plan_reshape(x._layout, shape)
    return base_in(x, plan.before), plan.out


@implements(torch.reshape, torch.Tensor.reshape)
def reshape(input: ShardTensor, *given: Any, shape: Any = None) -> ShardTensor:
    """Split and merge dims. Not collective, unless a dim of one cell is sharded.

    A sharded dim may be merged with dims after it, and split where its block borders fall on the first part.
    """
    x, out = _prepared(input, ints(given) if shape is None else tuple(shape))
    return viewed(x, x._local.reshape(local_shape(out, x._mesh.coords)), out)


@implements(torch.Tensor.view)
def view(self: ShardTensor, *given: Any, size: Any = None, dtype: torch.dtype | None = None) -> ShardTensor:
    """Split and merge dims without a copy, or read the bytes as another dtype. As `reshape`."""
    if dtype is not None or (len(given) == 1 and isinstance(given[0], torch.dtype)):
        return _view_dtype(self, dtype or given[0])
    x, out = _prepared(self, ints(given) if size is None else tuple(size))
    shape = local_shape(out, x._mesh.coords)
    try:
        local = x._local.view(shape)
    except RuntimeError:
        # the block is cut out of a larger array, where torch's own result would be contiguous: make it so
        # first, so that the view shares memory with its base
        if not (x._local.is_leaf and x._local.requires_grad):
            with torch.enable_grad():
                block = x._local.contiguous()
            if self._local is x._local:
                self._local = block
            x._local = block
        local = x._local.reshape(shape)
    return viewed(x, local, out)


def _view_dtype(self: ShardTensor, dtype: torch.dtype) -> ShardTensor:
    x = settled(self)
    local = x._local.view(dtype)
    layout, last = x._layout, x.ndim - 1
    if dtype.itemsize != x.dtype.itemsize:
        if last in layout.shard_dims:
            raise LayoutError(
                described(
                    f"view({dtype}): the last dim is sharded, and its extent changes",
                    expected=f"a dtype of {x.dtype.itemsize} bytes, or the last dim whole",
                    got=list(layout.placements),
                    fix="redistribute to another dim first",
                )
            )
        shape = (*layout.shape[:-1], local.shape[-1])
        layout = layout_of(layout.mesh_shape, layout.placements, shape, layout.sizes)
    return viewed(x, local, layout)


@implements(torch.Tensor.view_as)
def view_as(self: Any, other: Tensor) -> Any:
    """View in the shape of another tensor. As `reshape`."""
    return self.view(tuple(other.shape))


@implements(torch.Tensor.reshape_as)
def reshape_as(self: Any, other: Tensor) -> Any:
    """Reshape to the shape of another tensor. As `reshape`."""
    return self.reshape(tuple(other.shape))


@implements(torch.flatten, torch.Tensor.flatten)
def flatten(input: ShardTensor, start_dim: int = 0, end_dim: int = -1) -> ShardTensor:
    """Merge neighbouring dims. As `reshape`."""
    shape = input._layout.shape
    if not shape:
        return reshape(input, 1)
    a, b = wrapped(start_dim, len(shape)), wrapped(end_dim, len(shape))
    if a > b:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    return input if a == b else reshape(input, *shape[:a], math.prod(shape[a : b + 1]), *shape[b + 1 :])


@implements(torch.unflatten, torch.Tensor.unflatten)
def unflatten(input: ShardTensor, dim: int, sizes: Sequence[int]) -> ShardTensor:
    """Split a dim. As `reshape`."""
    shape = input._layout.shape
    d = wrapped(dim, len(shape))
    return reshape(input, *shape[:d], *_full(tuple(sizes), shape[d]), *shape[d + 1 :])


@implements(torch.ravel, torch.Tensor.ravel)
def ravel(input: ShardTensor) -> ShardTensor:
    """Merge all dims. As `reshape`."""
    return reshape(input, -1)
