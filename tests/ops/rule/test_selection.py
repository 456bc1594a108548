"""Selection where cells lie: values and positions against a sort of the whole, drawn with ties, NaN and all dtypes."""

from __future__ import annotations

import random

import pytest
import torch

import mpishard as ms
from mpishard.ops.rule.reduction import reduced
from mpishard.ops.rule.selection import Lines, selected, smallest, value_at
from tests.compare import WORLD, drawn_sizes, mesh_of, shard

pytestmark = pytest.mark.ranks(2, 3, 4)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ODD = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 5e-324)


def cells(rng, shape, dtype):
    """Few values that repeat, or any bits."""
    n = torch.Size(shape).numel()
    if rng.random() < 0.4:
        pool = list(ODD) if dtype.is_floating_point else [*range(3), torch.iinfo(dtype).min, torch.iinfo(dtype).max]
        return torch.tensor([rng.choice(pool) for _ in range(n)], dtype=dtype).reshape(shape)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    size = torch.empty(0, dtype=dtype).itemsize
    return torch.randint(0, 256, (n * size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cells_of_drawn_ranks(dtype):
    for seed in range(8):
        rng = random.Random(f"{seed} {dtype}")
        mesh = mesh_of((WORLD.size,))
        shape = (rng.randint(1, 3), rng.choice([1, 2, 5, 40]), rng.choice([1, 3]))
        dims = rng.choice([(1,), (1, 2), (0, 1), (0, 1, 2)])
        full = cells(rng, shape, dtype)
        x = shard(full, mesh, (ms.Shard(1),), {1: drawn_sizes(rng, shape[1], WORLD.size)})
        plan = reduced(x.sharding, dims)
        lines = Lines.of(x, plan)
        kept = [d for d in range(3) if d not in dims]
        whole = full.permute(*kept, *dims).reshape(-1, plan.count)
        own = lines.lines(x.block)
        assert torch.equal(lines.block(own), x.block) or full.is_floating_point()
        k = rng.randint(1, plan.count)
        wanted = torch.tensor([[rng.randrange(plan.count) for _ in range(3)] for _ in whole])
        position = selected(own, wanted, lines)
        assert torch.equal(position, whole.sort(dim=1, stable=True).indices.gather(1, wanted))
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[own.itemsize] if dtype in FLOATS else dtype
        assert torch.equal(value_at(own, position, lines).view(bits), whole.gather(1, position).view(bits))
        for largest in (False, True):
            best = smallest(own, k, lines, largest)
            values = whole.gather(1, best)
            expected = whole.topk(k, 1, largest).values
            torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
            assert all(len(set(row)) == k for row in best.tolist())
