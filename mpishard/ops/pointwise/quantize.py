"""Numbers rounded to those that integers stand for, as a model sees them that is to be quantized."""

from __future__ import annotations

from typing import Any

import torch

from mpishard.errors import UnsupportedOperationError
from mpishard.ops.rule.dim import plain
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@implements(torch.fake_quantize_per_tensor_affine, sharded="local")
def fake_quantize_per_tensor_affine(
    input: ShardTensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> ShardTensor:
    """Round by one scale. Collective where scale or zero point are sharded: they are gathered."""
    x = resolved(input)
    scale, zero_point = plain(scale), plain(zero_point)
    local = torch.fake_quantize_per_tensor_affine(x.block, scale, zero_point, quant_min, quant_max)
    return wrap(local, x.sharding, x.mesh)


@implements(torch.fake_quantize_per_channel_affine, sharded="local")
def fake_quantize_per_channel_affine(
    input: ShardTensor, scale: Any, zero_point: Any, axis: int, quant_min: int, quant_max: int
) -> ShardTensor:
    """Round by one scale a channel. Collective where scale or zero point are sharded: they are gathered."""
    x = resolved(input)
    scale, zero_point = plain(scale), plain(zero_point)
    # what torch says of wrong arguments, to all ranks alike: a block has some of the scales only
    line = x.block.new_zeros([n if axis in (d, d - x.ndim) else 1 for d, n in enumerate(x.sharding.shape)])
    torch.fake_quantize_per_channel_affine(line, scale, zero_point, axis, quant_min, quant_max)
    lo, hi = x.sharding.interval(axis, x.mesh.coords)
    if lo == hi:  # torch wants a scale
        return wrap(x.block.clone(), x.sharding, x.mesh)
    local = torch.fake_quantize_per_channel_affine(x.block, scale[lo:hi], zero_point[lo:hi], axis, quant_min, quant_max)
    return wrap(local, x.sharding, x.mesh)


@implements(torch.fused_moving_avg_obs_fake_quant, sharded="reduction")
def fused_moving_avg_obs_fake_quant(
    input: ShardTensor,
    observer_on: Any,
    fake_quant_on: Any,
    running_min: Any,
    running_max: Any,
    scale: Any,
    zero_point: Any,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> ShardTensor:
    """Follow the smallest and largest value, and round by the scale they give. Collective where it is sharded."""
    if per_row_fake_quant:
        raise UnsupportedOperationError(
            "fused_moving_avg_obs_fake_quant: per_row_fake_quant with ShardTensors",
            expected="one scale for all cells",
            got="one scale a channel",
            fix="torch.ao.quantization.FakeQuantize, with an observer for each channel",
        )
    x = resolved(input)
    with torch.no_grad():
        # the two numbers that the observer looks for are those of all cells
        ends = torch.stack([plain(y) for y in torch.aminmax(x)]) if int(observer_on) else x.block.new_zeros(2)
        torch.fused_moving_avg_obs_fake_quant(
            ends,
            observer_on,
            fake_quant_on,
            running_min,
            running_max,
            scale,
            zero_point,
            averaging_const,
            quant_min,
            quant_max,
            ch_axis,
            per_row_fake_quant,
            symmetric_quant,
        )
    if not int(fake_quant_on):
        return x
    return fake_quantize_per_tensor_affine(x, scale, zero_point, quant_min, quant_max)
