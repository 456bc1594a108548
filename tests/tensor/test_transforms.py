"""Rules inside transforms of `torch.func`, of plain tensors: these wrap all that is made there, and what MPI reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp

import mpishard as ms
from tests.compare import WORLD, mesh_of, shard
from tests.release import RELEASE

X = torch.randn((2, 5, 7), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.5


def ones_beside(x):
    where = {"mesh": x.mesh, "placements": [ms.Replicate()]} if isinstance(x, ms.ShardTensor) else None
    return torch.ones(7, dtype=x.dtype) if where is None else ms.ones(7, dtype=x.dtype, **where)


FUNCTIONS = {
    "index": lambda x, _: x[..., torch.tensor([0, 3])],
    "index_select": lambda x, _: x.index_select(1, torch.tensor([4, 0])),
    "index_add": lambda x, _: x.index_add(1, torch.tensor([1, 3]), torch.ones(2, 2, 7, dtype=torch.float64)),
    "masked": lambda x, full: x[full > 0],
    "flags": lambda x, full: x * (2 if x.isfinite().all() and torch.equal(full, full) else 1),
    "nonzero": lambda x, full: x * (full > 0).nonzero().shape[0],
    "bincount": lambda x, full: x * torch.bincount((full > 0).long().flatten()).max(),
    "unique": lambda x, full: x * torch.unique((full > 0).long()).sum(),
    "one row": lambda x, _: x.transpose(1, 2).reshape(2, 7, 5, 1) * 2,
    "in place": lambda x, full: x.add_(full),
    "random": lambda x, full: x + 0 * torch.randn_like(full),
    "dropout": lambda x, _: F.dropout(x, 0.5, training=True).mul(0) + x,
    "made anew": lambda x, _: x + ones_beside(x),
    "low rank": lambda x, _: torch.svd_lowrank(x[0], 5)[1],
}
if RELEASE < (2, 13):  # torch 2.8 shows nobody what its transforms wrap
    for name in ("masked", "nonzero", "unique"):
        del FUNCTIONS[name]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dim", [1, 2])
def test_functions(name, dim):
    f = FUNCTIONS[name]

    def derivatives(full):
        def energy(w):
            return f(full * w, full).square().sum()

        yield grad(energy)(W)
        tangent = jvp(energy, (W,), (W,))[1]
        yield tangent.full_tensor() if isinstance(tangent, ms.ShardTensor) else tangent

    x = shard(X, mesh_of((WORLD.size,)), [ms.Shard(dim)])
    for expected, got in zip(derivatives(X), derivatives(x), strict=True):
        torch.testing.assert_close(got, expected)
