"""Pixel and channel shuffles: cells move between channels and space within a rank.

Blocks whose borders lie within a group of cells (or channels) that becomes one are moved to whole groups first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpishard.layout import Layout, bounds, layout_of, moved_borders, scaled, sizes_of
from mpishard.ops.rule.dim import require_dtype, whole_along
from mpishard.tensor.operand import moved, resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _sized(x: ShardTensor, shape: Any, sizes: list[Any]) -> Layout:
    return layout_of(x.sharding.mesh_shape, x.sharding.placements, shape, sizes)


def _shuffled(x: ShardTensor, factor: int) -> tuple[int, ...]:
    """Return the global shape of the shuffle, or raise torch's own error."""
    if x.ndim < 3 or factor <= 0 or x.shape[-3] % factor**2:
        torch.pixel_shuffle(_of_one_cell(x), factor)
    *lead, channels, height, width = x.shape
    return (*lead, channels // factor**2, height * factor, width * factor)


def _unshuffled(x: ShardTensor, factor: int) -> tuple[int, ...]:
    """Return the global shape of the inverse, or raise torch's own error."""
    if x.ndim < 3 or factor <= 0 or x.shape[-2] % factor or x.shape[-1] % factor:
        torch.pixel_unshuffle(_of_one_cell(x), factor)
    *lead, channels, height, width = x.shape
    return (*lead, channels * factor**2, height // factor, width // factor)


def _of_one_cell(x: ShardTensor) -> Tensor:
    # not a tensor without data: for those torch does not check these arguments (docs/upstream.md)
    return x.block.new_zeros(()).expand(x.shape)


def _grouped(sizes: tuple[int, ...] | None, factor: int) -> tuple[int, ...] | None:
    """Return how many whole groups of ``factor`` lie in each block, borders rounded to the nearest group."""
    return (
        None if sizes is None else sizes_of(moved_borders(sizes, 1, factor // 2, factor, bounds(sizes)[-1] // factor))
    )


def _times(sizes: tuple[int, ...] | None, factor: int) -> tuple[int, ...] | None:
    return None if sizes is None else scaled(sizes, factor)


def _plan_shuffle(x: ShardTensor, factor: int) -> tuple[Layout, Layout]:
    layout, channel = x.sharding, x.ndim - 3
    shape = _shuffled(x, factor)
    before, after = list(layout.sizes), list(layout.sizes)
    after[channel] = _grouped(layout.sizes[channel], factor**2)
    before[channel] = _times(after[channel], factor**2)
    for dim in (x.ndim - 2, x.ndim - 1):
        after[dim] = _times(layout.sizes[dim], factor)
    return _sized(x, layout.shape, before), _sized(x, shape, after)


def _plan_unshuffle(x: ShardTensor, factor: int) -> tuple[Layout, Layout]:
    layout, channel = x.sharding, x.ndim - 3
    shape = _unshuffled(x, factor)
    before, after = list(layout.sizes), list(layout.sizes)
    after[channel] = _times(layout.sizes[channel], factor**2)
    for dim in (x.ndim - 2, x.ndim - 1):
        after[dim] = _grouped(layout.sizes[dim], factor)
        before[dim] = _times(after[dim], factor)
    return _sized(x, layout.shape, before), _sized(x, shape, after)


def _shuffle_cell(x: Tensor) -> Tensor:
    return torch.pixel_shuffle(x.view(2, 1, 1), 1)


def _unshuffle_cell(x: Tensor) -> Tensor:
    return torch.pixel_unshuffle(x.view(2, 1, 1), 1)


def _run(name: str, plan_of: Any, func: Any, cell: Any, input: ShardTensor, factor: int) -> ShardTensor:
    x = resolved(input)
    require_dtype(x, cell)
    key = (name, x.sharding, factor)
    before, out = x.mesh.plans.get(key) or x.mesh.plan(key, lambda: plan_of(x, factor))
    local = moved(x, before).block
    # torch gives the result, or its gradient, the operand's shape where there are no cells (docs/upstream.md)
    y = func(local, factor) if local.numel() else local.reshape(out.local_shape(x.mesh.coords)).clone()
    return wrap(y, out, x.mesh)


@implements(*spellings("pixel_shuffle"), sharded="moves")
def pixel_shuffle(input: ShardTensor, upscale_factor: int) -> ShardTensor:
    """Move channels to space. Collective where a block ends within channels that become one, else not."""
    return _run("pixel_shuffle", _plan_shuffle, torch.pixel_shuffle, _shuffle_cell, input, upscale_factor)


@implements(*spellings("pixel_unshuffle"), sharded="moves")
def pixel_unshuffle(input: ShardTensor, downscale_factor: int) -> ShardTensor:
    """Move space to channels. Collective where a block ends within cells that become one, else not."""
    return _run("pixel_unshuffle", _plan_unshuffle, torch.pixel_unshuffle, _unshuffle_cell, input, downscale_factor)


@implements(*spellings("channel_shuffle"), sharded="gathers")
def channel_shuffle(input: ShardTensor, groups: int) -> ShardTensor:
    """Interleave groups of channels. Collective where the channels are sharded: they are gathered and cut again."""
    x = resolved(input)
    whole = whole_along(x, (1,))
    return moved(wrap(torch.channel_shuffle(whole.block, groups), whole.sharding, x.mesh), x.sharding)
