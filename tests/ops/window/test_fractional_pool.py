"""Fractional max pooling, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from tests.compare import shard
from tests.ops.windows import check, field, sampled


def test_planes():
    samples = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check(lambda x: F.fractional_max_pool2d(x, 2, (4, 3), _random_samples=samples), field(2, 3, 9, 7), (0, 1, 2, 3), 0)
    pool = nn.FractionalMaxPool2d(3, output_ratio=0.5, return_indices=True, _random_samples=samples[:1])
    check(lambda x: pool(x)[0], field(3, 9, 8), (0, 1, 2), 1)
    check(lambda x: pool(x)[1], field(3, 9, 8), (0, 1, 2), 2)


def test_volumes():
    samples = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check(lambda x: F.fractional_max_pool3d(x, 2, 3, _random_samples=samples), field(2, 2, 6, 7, 5), (0, 1, 3), 3)


def test_samples_are_needed():
    mesh, placements, sizes = next(iter(sampled((2, 3, 9, 7), (0,), 0, 2)))
    with pytest.raises(ms.UnsupportedOperationError, match="_random_samples"):
        nn.FractionalMaxPool2d(2, output_size=3)(shard(field(2, 3, 9, 7), mesh, placements, sizes))
