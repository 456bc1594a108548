"""Sums that travel until somebody asks for them: backward does not."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from mpishard.tensor.shard_tensor import _Pending
from tests.compare import WORLD, mesh_of, shard
from tests.ops.windows import field

LOSSES = {
    "mean": lambda x: (x**2).mean(),
    "sum": lambda x: (x**2).sum(),
    "mean of halves": lambda x: (x.to(torch.bfloat16) ** 2).mean(),
    "along a dim": lambda x: (x**3).mean(0, keepdim=True),
}


def both():
    full = field(3 * WORLD.size, 5)
    x = shard(full, mesh_of((WORLD.size,)), (ms.Shard(0),), requires_grad=True)
    return full.clone().requires_grad_(), x


def is_pending(loss) -> bool:
    return type(loss) is _Pending


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", LOSSES)
def test_backward_does_not_wait(name):
    full, x = both()
    loss, right = LOSSES[name](x), LOSSES[name](full)
    assert is_pending(loss)
    g = torch.full(right.shape, 0.5, dtype=right.dtype)
    loss.backward(ms.distribute_tensor(g, x.mesh, (ms.Replicate(),)), retain_graph=True)
    assert is_pending(loss)
    right.backward(g, retain_graph=True)
    close = {"rtol": 1e-2, "atol": 1e-2} if "halves" in name else {}
    torch.testing.assert_close(x.grad.full_tensor(), full.grad, **close)
    # the value comes when it is asked for, and its graph is there
    torch.testing.assert_close(loss.full_tensor(), right, **close)
    assert not is_pending(loss)
    loss.backward(ms.distribute_tensor(g, x.mesh, (ms.Replicate(),)))
    right.backward(g)
    torch.testing.assert_close(x.grad.full_tensor(), full.grad, **close)


@pytest.mark.ranks(2, 3)
def test_an_implicit_gradient():
    full, x = both()
    loss = LOSSES["mean"](x)
    loss.backward()
    assert is_pending(loss)
    LOSSES["mean"](full).backward()
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        LOSSES["along a dim"](x).backward()


@pytest.mark.ranks(2, 3)
def test_gradients_of_gradients():
    full, x = both()
    (g,) = torch.autograd.grad((x**3).mean(), x, create_graph=True)
    (right,) = torch.autograd.grad((full**3).mean(), full, create_graph=True)
    g.square().sum().backward()
    right.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)


@pytest.mark.ranks(2, 3)
def test_a_root_that_is_an_input_too():
    full, x = both()
    loss, right = LOSSES["mean"](x), LOSSES["mean"](full)
    found, expected = torch.autograd.grad(loss, [loss, x]), torch.autograd.grad(right, [right, full])
    for g, e in zip(found, expected):
        torch.testing.assert_close(g.full_tensor(), e)
    loss = LOSSES["mean"](x)
    loss.retain_grad()
    loss.backward()
    assert loss.grad.item() == 1


@pytest.mark.ranks(2)
def test_errors_name_the_public_class():
    _, x = both()
    with pytest.raises(ms.UnsupportedOperationError, match=r"got: +ShardTensor") as error:
        ms.all_reduce(x.sum(), x.mesh)
    assert "_Pending" not in str(error.value)
