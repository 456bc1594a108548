"""torch.masked, which is composed of other functions and asks tensors for their torch layout."""

import itertools

import pytest
import torch
from torch import masked

import mpishard as ms
from tests.compare import WORLD, compare, mesh_of, skew

REDUCTIONS = "sum prod amax amin mean logsumexp var std".split()
ALONG = "softmax log_softmax softmin cumsum cumprod median argmax argmin".split()

VALUES = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
MASK = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)


@pytest.mark.parametrize("name", [*REDUCTIONS, *ALONG, "norm", "normalize", "logaddexp"])
def test_masked(name):
    func, mesh = getattr(masked, name), mesh_of((WORLD.size,))
    dims = (0, 1) if name in ALONG or name == "normalize" else (0, 1, None)
    cuts = (ms.Shard(0), None), (ms.Shard(1), None), (ms.Shard(0), {0: skew(5, WORLD.size)})
    for dim, (placement, sizes), mask_too in itertools.product(dims, cuts, (True, False)):
        own = (VALUES, mesh, (placement,), sizes)
        where = (MASK, mesh, (placement,), sizes) if mask_too else (MASK, None, None, None)

        def call(x, m, dim=dim):
            if name in ("norm", "normalize"):
                return func(x, 2.0, dim, mask=m)
            if name == "logaddexp":
                return func(x, 2 * x, input_mask=m, other_mask=m)
            y = func(x, dim, mask=m)
            return torch.where(m, y, 0) if "softm" in name else y

        compare(call, [own, where], what=f"{name} {dim} {placement} {sizes} {mask_too}")


def test_layout_is_that_of_any_tensor():
    x = ms.zeros(4, 3, mesh=mesh_of((WORLD.size,)), placements=(ms.Shard(0),))
    assert x.layout is torch.strided
    assert x.sharding.shape == (4, 3)
