"""Fractional max pooling, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ops.windows import check, field


def test_planes():
    samples = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check(lambda x: F.fractional_max_pool2d(x, 2, (4, 3), _random_samples=samples), field(2, 3, 9, 7), (0, 1, 2, 3), 0)
    pool = nn.FractionalMaxPool2d(3, output_ratio=0.5, return_indices=True, _random_samples=samples[:1])
    check(lambda x: pool(x)[0], field(3, 9, 8), (0, 1, 2), 1)
    check(lambda x: pool(x)[1], field(3, 9, 8), (0, 1, 2), 2)


def test_volumes():
    samples = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check(lambda x: F.fractional_max_pool3d(x, 2, 3, _random_samples=samples), field(2, 2, 6, 7, 5), (0, 1, 3), 3)


@pytest.mark.parametrize("shape", [(2, 3, 9, 7), (3, 9, 7), (2, 2, 6, 7, 5)])
def test_samples_are_drawn_as_torch_draws_them(shape):
    ndim = 3 if len(shape) == 5 else 2
    pool = nn.FractionalMaxPool3d(2, output_size=3) if ndim == 3 else nn.FractionalMaxPool2d(2, output_size=3)

    def f(x):
        torch.manual_seed(3)
        return pool(x)

    check(f, field(*shape), range(len(shape)), 1)
