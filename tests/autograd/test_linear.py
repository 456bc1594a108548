"""The one Function, with operations that need no communication: what autograd does with an adjoint pair."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from mpishard.autograd.linear import apply, pair
from mpishard.errors import UnsupportedOperationError

MATRIX = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 4.0]], dtype=torch.float64)


@pytest.fixture
def op():
    return pair(lambda x: MATRIX @ x, lambda g: MATRIX.t() @ g)


@pytest.fixture
def x():
    return torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def test_without_gradient_there_is_no_node(op, x):
    y = apply(op, x)
    assert torch.equal(y, MATRIX @ x)
    assert y.grad_fn is None
    with torch.no_grad():
        assert apply(op, x.clone().requires_grad_()).grad_fn is None


def test_all_derivatives(op, x):
    def f(x):
        return apply(op, x).sin()

    x = x.requires_grad_()
    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_undefined_grad=False)
    assert torch.autograd.gradgradcheck(f, x, check_fwd_over_rev=True, check_undefined_grad=False)


def test_complex_cotangents_are_not_conjugated_twice(x):
    op = pair(lambda x: MATRIX.to(x.dtype) @ x, lambda g: MATRIX.t().to(g.dtype) @ g)
    z = (x + 1j * x.flip(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: apply(op, z) ** 2, z, check_undefined_grad=False)


def test_forward_mode_without_requires_grad(op, x):
    t = torch.ones_like(x)
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(apply(op, forward_ad.make_dual(x, t)))
        assert torch.equal(y, MATRIX @ x)
        assert torch.equal(tangent, MATRIX @ t)
        assert forward_ad.unpack_dual(apply(op, x)).tangent is None


def test_function_transforms(op, x):
    def f(x):
        return (apply(op, x) ** 2).sum()

    gradient = 2 * MATRIX.t() @ MATRIX @ x
    assert torch.allclose(torch.func.grad(f)(x), gradient)
    tangent = torch.func.jvp(torch.func.grad(f), (x,), (x,))[1]
    assert torch.allclose(tangent, gradient)
    assert torch.allclose(torch.func.vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0], gradient)


def test_vmap_is_refused(op, x):
    with pytest.raises(UnsupportedOperationError, match=r"torch\.vmap"):
        torch.vmap(lambda x: apply(op, x))(x.expand(2, 3))


def test_undefined_gradients_arrive_as_zeros(x):
    seen = []

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return None

    def adjoint(g):
        seen.append(g.clone())
        return g

    x = x.requires_grad_()
    y = Silent.apply(apply(pair(lambda x: 2 * x, adjoint), x))
    (y.sum() + x.sum()).backward()
    assert [g.tolist() for g in seen] == [[0.0, 0.0, 0.0]]


def test_identity_keeps_its_node(x):
    """A replicated value that is used with sharded data: nothing to do, but a sum to come back."""
    use = pair(lambda x: x, lambda g: 3 * g)
    x = x.requires_grad_()
    y = apply(use, x)
    assert y is not x
    (g,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    assert torch.allclose(g, 6 * x)
    (gg,) = torch.autograd.grad(g.sum(), x)
    # the cotangent of g is used like x; the one of y comes back like y's
    assert torch.allclose(gg, torch.full_like(x, 6.0))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones(3, dtype=x.dtype))
        assert torch.equal(forward_ad.unpack_dual(apply(use, dual)).tangent, torch.ones(3, dtype=x.dtype))


def test_adjoint_of_adjoint_is_the_operation(op):
    assert op.adjoint is not op
    assert op.adjoint.adjoint is op
