"""Softmax along sharded and whole dims against that of whole tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard


def values(*shape: int) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


SOFT = {
    "softmax": lambda x: F.softmax(x, 1),
    "softmax last": lambda x: x.softmax(-1),
    "softmax dtype": lambda x: torch.softmax(x.float(), 1, dtype=torch.float64),
    "log_softmax": lambda x: F.log_softmax(x, dim=1),
    "log_softmax first": lambda x: torch.log_softmax(x, 0),
    "softmin": lambda x: F.softmin(x, 1),
}


@pytest.mark.parametrize("name", SOFT)
def test_softmax(name):
    x = values(4, 7, 5)
    for i, (mesh, placements, sizes) in enumerate(layouts(x.shape, (1, 0, 2), 2)):
        if i % 3 == 0 or sizes:
            what = f"{name} {placements} {sizes}"
            compare(SOFT[name], [(x, mesh, placements, sizes)], second=i % 2 == 0, what=what)


def test_large_values_do_not_overflow():
    x = values(3, 8) * 1e4
    x[1] = -1e300
    x[2, :5] = -torch.inf
    s = shard(x, mesh_of((WORLD.size,)), [ms.Shard(1)])
    torch.testing.assert_close(gathered(s.softmax(1)), x.softmax(1))
    torch.testing.assert_close(gathered(s.log_softmax(1)), x.log_softmax(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    x = values(3, 64).to(dtype)
    s = shard(x, mesh_of((WORLD.size,)), [ms.Shard(1)], requires_grad=True)
    t = x.clone().requires_grad_()
    for f in (torch.softmax, torch.log_softmax):
        got, expected = f(s, 1), f(t, 1)
        assert got.dtype == dtype
        torch.testing.assert_close(gathered(got), expected.detach())
        (g,) = torch.autograd.grad((got * got).sum(), s)
        # torch adds up the cotangent in the half type, where we do in float32: the exact gradient is the judge
        exact = x.double().requires_grad_()
        (e,) = torch.autograd.grad((f(exact, 1) ** 2).sum(), exact)
        (theirs,) = torch.autograd.grad((expected * expected).sum(), t)
        error = (gathered(g) - e).abs().max()
        assert error <= torch.finfo(dtype).eps * e.abs().max() + (theirs - e).abs().max()


def test_keeps_the_result_alone():
    x = shard(values(3, 64), mesh_of((WORLD.size,)), [ms.Shard(1)], requires_grad=True)
    saved = []

    def pack(t):
        saved.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        x.softmax(1)
    assert sum(saved) == x.to_local().numel()


@pytest.mark.ranks(2, 4)
def test_exchanges_two_numbers_per_row():
    x = shard(values(3, 64), mesh_of((WORLD.size,)), [ms.Shard(1)])
    with ms.comm_counter() as count:
        x.softmax(1)
    assert (count.calls, count.nbytes) == (2, 2 * 3 * 8)


def test_forward_mode():
    x, v = values(3, 8), values(3, 8).flip(0)
    mesh = mesh_of((WORLD.size,))
    fwd = torch.autograd.forward_ad
    s, t = shard(x, mesh, [ms.Shard(1)]), shard(v, mesh, [ms.Shard(1)])
    with fwd.dual_level():
        expected = fwd.unpack_dual(fwd.make_dual(x, v).softmax(1)).tangent
        dual = ms.ShardTensor.from_local(fwd.make_dual(s.to_local(), t.to_local()), mesh, [ms.Shard(1)])
        tangent = fwd.unpack_dual(dual.softmax(1).to_local()).tangent
        got = ms.ShardTensor.from_local(tangent, mesh, [ms.Shard(1)]).full_tensor()
    torch.testing.assert_close(got, expected)


def test_integers_raise_as_torch():
    s = shard(torch.arange(12).view(3, 4), mesh_of((WORLD.size,)), [ms.Shard(1)])
    with pytest.raises(RuntimeError):
        s.softmax(1)


@pytest.mark.parametrize("f", [torch.softmax, torch.log_softmax])
def test_forward_mode_where_a_block_is_masked(f):
    x, v = values(3, 8), values(3, 8).flip(0)
    x[:, :6] = -torch.inf
    mesh = mesh_of((WORLD.size,))
    fwd = torch.autograd.forward_ad
    s, t = shard(x, mesh, [ms.Shard(1)]), shard(v, mesh, [ms.Shard(1)])
    with fwd.dual_level():
        expected = fwd.unpack_dual(f(fwd.make_dual(x, v), 1)).tangent
        dual = ms.ShardTensor.from_local(fwd.make_dual(s.to_local(), t.to_local()), mesh, [ms.Shard(1)])
        tangent = fwd.unpack_dual(f(dual, 1).to_local()).tangent
        got = ms.ShardTensor.from_local(tangent, mesh, [ms.Shard(1)]).full_tensor()
    torch.testing.assert_close(got, expected)
