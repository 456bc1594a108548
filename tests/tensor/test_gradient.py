"""Gradients with respect to a Partial, which is summed on the way: of any order, kept anywhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, gathered, mesh_of, shard


def values(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


A, B = values(3, 8), values(8, 5)


def product(a):
    """A Partial where ``a`` is sharded, which has a gradient."""
    b = shard(B, a.mesh, [ms.Shard(0)]) if isinstance(a, ms.ShardTensor) else B
    z = a @ b
    assert WORLD.size == 1 or not isinstance(a, ms.ShardTensor) or z.sharding.partial_dims
    return z


def equal(f):
    """Compare what ``f`` returns, and the gradient of ``a``, with torch."""
    found = []
    for a in (A.clone().requires_grad_(), shard(A, mesh_of((WORLD.size,)), [ms.Shard(1)], requires_grad=True)):
        out = f(a, product(a))
        found.append([*map(gathered, out), *([] if a.grad is None else [gathered(a.grad)])])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_of_second_order():
    def f(a, z):
        (g,) = torch.autograd.grad((z**3).sum(), z, create_graph=True)
        return g, *torch.autograd.grad((g**2).sum(), a)

    equal(f)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_of_a_gradient_that_is_retained():
    def f(a, z):
        z.retain_grad()
        (z**3).sum().backward(create_graph=True)
        a.grad = None
        return z.grad, *torch.autograd.grad((z.grad**2).sum(), a)

    equal(f)


def test_of_a_gradient_that_a_hook_keeps():
    def f(a, z):
        kept = []
        z.register_hook(kept.append)
        torch.autograd.grad((z**3).sum(), a, create_graph=True)
        return torch.autograd.grad((kept[0] ** 2).sum(), a)

    equal(f)


def test_of_a_parameter_that_a_hook_uses():
    w = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)

    def f(a, z):
        z.register_hook(lambda g: g * w)
        (g,) = torch.autograd.grad((z * z).sum(), a, create_graph=True)
        return torch.autograd.grad((g * g).sum(), [w, a])

    equal(f)


@pytest.mark.parametrize(
    "look",
    [
        lambda z: z.t().sum(),
        lambda z: z.detach().sum() + z.sum(),
        lambda z: z.reshape(-1)[3:].sum(),
        lambda z: z.double().sum(),
        lambda z: z[1].sum() + z[2].sum(),
    ],
)
def test_a_view_takes_no_path_away(look):
    def f(a, z):
        early = (z * z).sum()
        return torch.autograd.grad(early + look(z), [z, a])

    equal(f)

    def g(a, z):
        z.retain_grad()
        early = (z * z).sum()
        (early + look(z)).backward()
        return (z.grad,)

    equal(g)


def test_a_view_that_is_written_into():
    def f(a, z):
        early = (z * 3).sum()
        z.t().mul_(2)
        return torch.autograd.grad(early + (z * z).sum(), [z, a])

    equal(f)


def leaf():
    mesh = mesh_of((WORLD.size,))
    return ms.ShardTensor.from_local(torch.ones(2, 3, dtype=torch.float64), mesh, ms.Partial()).requires_grad_()


def test_a_leaf_stays_one():
    x = leaf()
    early = (x * x).sum()
    assert x.reshape(6, 1).detach().sum().item() == 6 * WORLD.size
    (early + x.t().sum()).backward()
    assert x.is_leaf
    torch.testing.assert_close(gathered(x.grad), torch.full((2, 3), 2.0 * WORLD.size + 1, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)
    with torch.no_grad():
        x.add_(1)
    x.grad = None
    (x * x).sum().backward()
    torch.testing.assert_close(gathered(x.grad), torch.full((2, 3), 2.0 * (WORLD.size + 1), dtype=torch.float64))
    x.requires_grad_(False)
    assert not (x * 2).requires_grad
    x.add_(1)
    torch.testing.assert_close(gathered(x), torch.full((2, 3), WORLD.size + 2.0, dtype=torch.float64))


def test_an_optimizer_steps_a_partial():
    x = leaf()
    plain = torch.full((2, 3), float(WORLD.size), dtype=torch.float64, requires_grad=True)
    for t in (x, plain):
        steps = torch.optim.SGD([t], lr=0.1, momentum=0.9)
        for _ in range(3):
            steps.zero_grad()
            (t**3).sum().backward()
            steps.step()
    torch.testing.assert_close(gathered(x), plain.detach())


class Nothing(torch.autograd.Function):
    """What has no gradient, and says so by None."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return None


@pytest.mark.parametrize("f", [Nothing.apply, lambda y: torch.linalg.slogdet(y)[0]])
@pytest.mark.parametrize("placement", [ms.Shard(0), ms.Replicate()])
def test_a_hook_where_there_is_no_cotangent(f, placement):
    """Torch calls it with None."""
    whole = torch.eye(2, dtype=torch.float64).repeat(5, 1, 1)
    for x in (whole.clone().requires_grad_(), shard(whole, mesh_of((WORLD.size,)), [placement], requires_grad=True)):
        seen, y = [], x * 3
        y.register_hook(seen.append)
        f(y).sum().backward()
        assert seen == [None]
        assert x.grad is None


@pytest.mark.parametrize("norm", [F.instance_norm, lambda x: F.batch_norm(x, None, None, training=True)])
@pytest.mark.parametrize("placement", [ms.Shard(0), ms.Shard(1), ms.Replicate()])
def test_a_normalization_where_there_is_no_cotangent(norm, placement):
    x = shard(values(3, 4, 5, 5), mesh_of((WORLD.size,)), [placement], requires_grad=True)
    Nothing.apply(norm(x)).sum().backward()
    assert x.grad is None or not gathered(x.grad).any()
