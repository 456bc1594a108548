"""Decompositions of low rank, against torch on the whole tensor with the same draws."""

from __future__ import annotations

import pytest
import torch

from tests.compare import compare, layouts, shard
from tests.ops.windows import check, field

TALL, WIDE = field(9, 3) @ field(3, 7), field(2, 5, 3) @ field(2, 3, 8)
FULL = field(6, 5)
CASES = [
    (TALL, lambda x: torch.svd_lowrank(x, 3)),
    (WIDE, lambda x: torch.svd_lowrank(x, q=3, niter=1)),
    (FULL, lambda x: torch.svd_lowrank(x, 4, 1, x * 0.5 + 1)),
    (FULL, lambda x: torch.pca_lowrank(x, 3)),
    (TALL, lambda x: torch.pca_lowrank(x, q=3, center=False)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_decompositions(case):
    full, f = CASES[case]

    def product(x):
        torch.manual_seed(5)
        u, s, v = f(x)
        return (u * s.unsqueeze(-2)) @ v.mH, s, u.abs()

    check(product, full, range(full.ndim), case, rtol=1e-7, atol=1e-8)


def test_a_sharded_mean():
    for mesh, placements, sizes in list(layouts((6, 5), (0, 1), 1))[::2]:

        def f(x, m):
            torch.manual_seed(5)
            u, s, v = torch.svd_lowrank(x, 3, M=m)
            return (u * s) @ v.mH

        operands = [(FULL, mesh, None, None), (FULL * 0.3 + 1, mesh, placements, sizes)]
        compare(f, operands, rtol=1e-7, atol=1e-8)


def test_torchs_own_errors():
    for options in ({"q": 6}, {"niter": -1}):
        for t in (FULL, shard(FULL, *next(layouts((6, 5), (0, 1), 1)))):
            with pytest.raises(ValueError, match="must be non-negative integer"):
                torch.pca_lowrank(t, **options)
