"""Fake quantization of activations, and the observers that choose its scales."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver

import mpishard as ms
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard
from tests.ops.windows import field, refused_alike

SCALES = torch.tensor([0.1, 0.02, 0.3, 0.05], dtype=torch.float32)
POINTS = torch.tensor([0, 3, -2, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    "round_",
    [
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7),
        lambda x: torch.fake_quantize_per_tensor_affine(x * 2, SCALES[:1], POINTS[:1], -8, 7),
        lambda x: torch.fake_quantize_per_channel_affine(x, SCALES, POINTS, 1, -8, 7),
        lambda x: torch.fake_quantize_per_channel_affine(x.transpose(0, 1), SCALES, POINTS, 0, -8, 7),
    ],
)
def test_rounded_by_given_scales(round_):
    full = field(3, 4, 5).float()
    for mesh, placements, sizes in layouts(full.shape, (1, 2)):
        compare(round_, [(full, mesh, placements, sizes)], rtol=0, atol=0)


def test_wrong_scales():
    refused_alike(lambda x: torch.fake_quantize_per_channel_affine(x, SCALES[:3], POINTS[:3], 1, -8, 7), field(3, 4))
    refused_alike(lambda x: torch.fake_quantize_per_channel_affine(x, SCALES, POINTS, -1, -8, 7), field(3, 4))
    refused_alike(lambda x: torch.fake_quantize_per_channel_affine(x, SCALES, POINTS + 6, 1, -8, 7), field(3, 4))


@pytest.mark.parametrize("symmetric", [torch.per_tensor_affine, torch.per_tensor_symmetric])
@pytest.mark.parametrize("kind", [FakeQuantize, FusedMovingAvgObsFakeQuantize])
def test_observed(kind, symmetric):
    """Scales follow the values of all ranks; without the observer they stay, without rounding nothing changes."""
    options = {"observer": MovingAverageMinMaxObserver, "quant_min": -128, "quant_max": 127}
    own = kind(dtype=torch.qint8, qscheme=symmetric, **options)
    reference = copy.deepcopy(own)
    for change in ("", "disable_observer", "disable_fake_quant"):
        for m in (own, reference):
            if change:
                getattr(m, change)()
        for seed in range(3):
            full = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(seed))
            x = shard(full, mesh_of((WORLD.size,)), [ms.Shard(2)], requires_grad=True)
            whole = full.requires_grad_()
            got, expected = own(x), reference(whole)
            torch.testing.assert_close(gathered(got), expected.detach(), rtol=0, atol=0)
            got.sin().sum().backward()
            expected.sin().sum().backward()
            torch.testing.assert_close(gathered(x.grad), whole.grad)
            whole.grad = None
        for (name, a), b in zip(own.state_dict().items(), reference.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, msg=name)


def test_one_scale_a_channel_and_observed():
    m = FusedMovingAvgObsFakeQuantize(
        observer=torch.ao.quantization.MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        dtype=torch.qint8,
    )
    x = shard(torch.ones(3, 2 * WORLD.size), mesh_of((WORLD.size,)), [ms.Shard(1)])
    with pytest.raises(ms.UnsupportedOperationError, match="per_row_fake_quant"):
        nn.Sequential(m)(x)
