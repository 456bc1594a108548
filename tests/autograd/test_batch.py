"""Batches of cotangents: of ShardTensors one by one, and refused by all ranks where torch batches the nodes."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.functional import hessian, jacobian

import mpishard as ms
from tests.compare import WORLD, gathered, mesh_of, shard


def values(*shape):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


X, W = values(2 * WORLD.size + 1, 4), values(4)


def sharded(**kwargs):
    return shard(X, mesh_of((WORLD.size,)), [ms.Shard(0)], **kwargs)


def of_sums(x, w):
    s = (x * w).sin().sum()
    return torch.autograd.grad(torch.stack([s, 2 * s]), x, torch.eye(2, dtype=X.dtype), is_grads_batched=True)


def of_cells(x, w):
    y = (x * w).sin()
    batch = torch.stack([torch.ones_like(y), 2 * torch.ones_like(y), y.detach()])
    return torch.autograd.grad([y, y.sum()], [w, x], [batch, batch[:, 0, 0]], is_grads_batched=True)


def of_what_is_not_used(x, w):
    return torch.autograd.grad(
        (x * 2).sum(), [x, w], torch.ones(3, dtype=X.dtype), allow_unused=True, is_grads_batched=True
    )


@pytest.mark.parametrize(
    "f",
    [
        of_sums,
        of_cells,
        of_what_is_not_used,
        lambda x, w: [jacobian(lambda z: z.sin().sum(0), x, vectorize=True)],
        lambda x, w: [jacobian(lambda w: (x * w).sin().mean(0), w, vectorize=True)],
        lambda x, w: [hessian(lambda z: z.sin().sum(), x, vectorize=True)],
    ],
)
def test_one_by_one(f):
    found = [f(x, W.clone().requires_grad_()) for x in (X.clone().requires_grad_(), sharded(requires_grad=True))]
    for expected, got in zip(*found, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(gathered(got), expected)


def of_a_whole_result(x):
    w = W.clone().requires_grad_()
    y = (x * w).sin().mean(0).full_tensor()
    torch.autograd.grad(y, w, torch.eye(4, dtype=X.dtype), is_grads_batched=True)


def of_torch_vmap(x):
    x.requires_grad_()
    y = x.sin().sum(0).full_tensor()
    torch.vmap(lambda g: torch.autograd.grad(y, x, g)[0])(torch.eye(4, dtype=X.dtype))


@pytest.mark.parametrize(
    "f",
    [
        of_a_whole_result,
        of_torch_vmap,
        lambda x: hessian(lambda w: (x * w).sin().sum(), W, vectorize=True),
        lambda x: jacobian(lambda w: (x * w).sin().mean(0), W, vectorize=True, strategy="forward-mode"),
        lambda x: jacobian(lambda z: z.sin().sum(0), x, vectorize=True, strategy="forward-mode"),
    ],
)
def test_refused(f):
    of_torch = BackwardCFunction.apply
    with pytest.raises(ms.UnsupportedOperationError, match=r"(?s)torch\.vmap.*vectorize=False"):
        f(sharded())
    assert BackwardCFunction.apply is of_torch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda x: torch.func.hessian(lambda w: (x * w).sum().full_tensor())(W), r"torch\.Tensor\.__mul__"),
        (lambda x: torch.vmap(lambda w: torch.add(x, w).to_local())(values(3, 4)), r"torch\.add"),
        (
            lambda x: torch.vmap(lambda w: ms.scatter_tensor(w, 0, x.mesh, [ms.Shard(0)]))(values(2, 4)),
            "scatter_tensor",
        ),
        (
            lambda x: torch.vmap(lambda w: ms.distribute_tensor(w, x.mesh, [ms.Shard(0)], src_data_rank=0))(
                values(2, 4)
            ),
            "distribute_tensor",
        ),
        (lambda x: torch.func.jacrev(lambda w: (x * w).mean(0).full_tensor())(W), "backward"),
    ],
)
def test_the_operation_is_named(f, name):
    with pytest.raises(ms.UnsupportedOperationError, match=rf"got: +{name} inside"):
        f(sharded())
