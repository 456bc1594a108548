"""Pixel and channel shuffles: cells move between channels and space within a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpishard.errors import UnsupportedOperationError, described
from mpishard.layout import Layout, bounds, layout_of, sizes_of
from mpishard.tensor.operand import moved, resolved
from mpishard.tensor.registry import RULES, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _refuse_channels(name: str, x: ShardTensor) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        described(
            f"{name}: the channels are sharded",
            expected="shards of spatial or batch dims",
            got=list(x._layout.placements),
            fix="redistribute to a spatial dim: x.redistribute(placements)",
        )
    )


def _sized(x: ShardTensor, shape: Any, sizes: list[Any]) -> Layout:
    return layout_of(x._layout.mesh_shape, x._layout.placements, shape, sizes)


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
    # not a tensor without data: for those torch does not check these arguments
    return x._local.new_zeros(()).expand(x.shape)


def _plan_shuffle(x: ShardTensor, factor: int) -> Layout:
    shape = _shuffled(x, factor)
    if x.ndim - 3 in x._layout.shard_dims:
        raise _refuse_channels("pixel_shuffle", x)
    sizes = list(x._layout.sizes)
    for dim in (x.ndim - 2, x.ndim - 1):
        own = sizes[dim]
        sizes[dim] = None if own is None else tuple(s * factor for s in own)
    return _sized(x, shape, sizes)


def _plan_unshuffle(x: ShardTensor, factor: int) -> tuple[Layout, Layout]:
    layout = x._layout
    shape = _unshuffled(x, factor)
    if x.ndim - 3 in layout.shard_dims:
        raise _refuse_channels("pixel_unshuffle", x)
    before, after = list(layout.sizes), list(layout.sizes)
    for dim in (x.ndim - 2, x.ndim - 1):
        own = layout.sizes[dim]
        if own is not None:
            # no block may end within a group of cells that becomes one
            after[dim] = sizes_of(tuple((b + factor // 2) // factor for b in bounds(own)))
            before[dim] = tuple(s * factor for s in after[dim])
    return _sized(x, layout.shape, before), _sized(x, shape, after)


def pixel_shuffle(input: ShardTensor, upscale_factor: int) -> ShardTensor:
    """Move channels to space. Not collective.

    Raises
    ------
    UnsupportedOperationError
        The channels are sharded.
    """
    x = resolved(input)
    key = ("pixel_shuffle", x._layout, upscale_factor)
    out = x._mesh.plans.get(key)
    if out is None:
        out = x._mesh.plan(key, lambda: _plan_shuffle(x, upscale_factor))
    return wrap(torch.pixel_shuffle(x._local, upscale_factor), out, x._mesh)


def pixel_unshuffle(input: ShardTensor, downscale_factor: int) -> ShardTensor:
    """Move space to channels. Collective where a block ends within a group of cells that becomes one.

    Raises
    ------
    UnsupportedOperationError
        The channels are sharded.
    """
    x = resolved(input)
    key = ("pixel_unshuffle", x._layout, downscale_factor)
    plan = x._mesh.plans.get(key)
    if plan is None:
        plan = x._mesh.plan(key, lambda: _plan_unshuffle(x, downscale_factor))
    before, out = plan
    return wrap(torch.pixel_unshuffle(moved(x, before)._local, downscale_factor), out, x._mesh)


def channel_shuffle(input: ShardTensor, groups: int) -> ShardTensor:
    """Interleave groups of channels. Not collective.

    Raises
    ------
    UnsupportedOperationError
        The channels are sharded.
    """
    x = resolved(input)
    if 1 in x._layout.shard_dims:
        raise _refuse_channels("channel_shuffle", x)
    return wrap(torch.channel_shuffle(x._local, groups), x._layout, x._mesh)


for _rule in (pixel_shuffle, pixel_unshuffle, channel_shuffle):
    for _func in spellings(_rule.__name__):
        RULES[_func] = _rule
