"""Functions of lists of tensors, as optimizers call them."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, gathered, mesh_of, shard
from tests.ops.windows import field

SHAPES = [(4, 5), (3,), (2, 2, 7)]

CALLS = {
    "mul_": lambda a, b, c: torch._foreach_mul_(a, 2.0),
    "add_ alpha": lambda a, b, c: torch._foreach_add_(a, b, alpha=0.5),
    "lerp_": lambda a, b, c: torch._foreach_lerp_(a, b, 0.1),
    "addcmul_": lambda a, b, c: torch._foreach_addcmul_(a, b, c, 0.3),
    "addcdiv_ scalars": lambda a, b, c: torch._foreach_addcdiv_(a, b, c, [0.1, 0.2, 0.3]),
    "addcdiv_ vector": lambda a, b, c: torch._foreach_addcdiv_(a, b, c, torch.tensor([0.1, 0.2, 0.3])),
    "addcmul value": lambda a, b, c: torch._foreach_addcmul(a, b, c, value=2),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(c),
    "maximum_": lambda a, b, c: torch._foreach_maximum_(a, b),
    "minimum_ number": lambda a, b, c: torch._foreach_minimum_(a, 1.2),
    "maximum numbers": lambda a, b, c: torch._foreach_maximum(a, [0.1, 0.5, 1.5]),
    "copy_": lambda a, b, c: torch._foreach_copy_(a, b),
    "zero_": lambda a, b, c: torch._foreach_zero_(a),
    "neg": lambda a, b, c: torch._foreach_neg(b),
    "div_ scalars": lambda a, b, c: torch._foreach_div_(a, [1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_lists(name):
    mesh = mesh_of((WORLD.size,))
    lists = [[field(*s, 1)[..., 0] + k for s in SHAPES] for k in (0, 1)]
    lists.append([x.abs() + 1 for x in lists[1]])
    parts = [[shard(x, mesh, ms.Shard(x.ndim - 1)) for x in xs] for xs in lists]
    whole = [[x.clone() for x in xs] for xs in lists]
    expected, got = CALLS[name](*whole), CALLS[name](*parts)
    torch.testing.assert_close(gathered(parts[0]), whole[0])
    if expected is not None and name[-1] != "_":
        torch.testing.assert_close(gathered(list(got)), list(expected))


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, float("inf"), -float("inf"), -1])
@pytest.mark.parametrize("last", [False, True])
def test_norms_of_every_order(order, last):
    n, mesh = 3 * WORLD.size, mesh_of((WORLD.size,))
    whole = [field(n, 4, 1)[..., 0].clamp(min=0.3) - 0.3, torch.zeros(n, 2).double(), field(n, 1)[..., 0]]
    sizes = {0: (0,) * (WORLD.size - 1) + (n,)} if last else None
    got = torch._foreach_norm([shard(x, mesh, ms.Shard(0), sizes) for x in whole], order)
    torch.testing.assert_close([gathered(x) for x in got], [*torch._foreach_norm(whole, order)])
