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
    "pow of a number": lambda a, b, c: torch._foreach_pow(2.0, c),
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


@pytest.mark.parametrize("last", [False, True])
def test_a_gradient_scaler_sees_what_any_rank_sees(last):
    """A step is left out on all ranks where one has a cell that is not finite, and gradients are scaled back."""
    n, mesh = 3 * WORLD.size, mesh_of((WORLD.size,))
    sizes = {0: (0,) * (WORLD.size - 1) + (n,)} if last else None
    whole = field(n, 4)[..., 0]
    for bad in (None, 0, n - 1):
        p, plain = shard(whole, mesh, ms.Shard(0), sizes, True), torch.nn.Parameter(whole.sum(0))
        optimizer = torch.optim.SGD([p, plain], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        weight = torch.ones_like(whole)
        if bad is not None:
            weight[bad] = torch.inf
        scaler.scale((p * weight).sum() + (plain**2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2048 if bad is None else 512)
        torch.testing.assert_close(gathered(p.detach()), whole if bad is not None else whole - 0.5)
        torch.testing.assert_close(plain.detach(), whole.sum(0) * (bad is not None))


def test_a_gradient_scaler_of_parts_of_a_sum():
    part = ms.ShardTensor.from_local(torch.ones(3), mesh_of((WORLD.size,)), [ms.Partial()])
    with pytest.raises(ms.UnsupportedOperationError, match="Partial"):
        torch._amp_foreach_non_finite_check_and_unscale_([part], torch.zeros(1), torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float16])
def test_a_maximum_of_whole_numbers_and_a_fraction(dtype):
    full = torch.arange(-3, 5).to(dtype)
    x = shard(full, mesh_of((WORLD.size,)), [ms.Shard(0)])
    for number in (1.5, 2):
        for function in (torch._foreach_maximum, torch._foreach_minimum):
            (got,), (expected,) = function([x], number), function([full], number)
            assert got.dtype == expected.dtype
            assert torch.equal(gathered(got), expected)
