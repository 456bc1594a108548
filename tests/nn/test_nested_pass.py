"""Derivatives that are taken while a backward pass goes on: they are returned, and stay out of that pass's sums."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.autograd import Function

import mpishard as ms
from tests.compare import gathered, layouts, shard
from tests.models.twin import data, seeded

SHAPE = (2, 3, 9, 6)


def with_grad(model, x, g, how):
    """Gradients of a layer's input and parameters, found in a pass of their own."""
    x, parameters = x.detach().requires_grad_(), list(model.parameters())
    with torch.enable_grad():
        y = model(x)
        loss = (y * g).sum()
    if how == "plain" and isinstance(loss, ms.ShardTensor):
        loss = loss.full_tensor()
    if how == "grad_outputs":
        return torch.autograd.grad(y, (x, *parameters), g)
    if how == "plain":
        return torch.zeros_like(x), *torch.autograd.grad(loss, parameters)
    if how == "grad":
        return torch.autograd.grad(loss, (x, *parameters))
    own = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    loss.backward(inputs=[x, *parameters])
    found = [x.grad, *(p.grad for p in parameters)]
    for p, before in zip(parameters, own):
        p.grad = before
    return found


class Adjoint(Function):
    """A layer whose backward runs it again, as the adjoint of an ordinary differential equation does."""

    @staticmethod
    def forward(ctx, model, how, x, *parameters):
        ctx.model, ctx.how = model, how
        ctx.save_for_backward(x)
        return model(x)

    @staticmethod
    def backward(ctx, g):
        return None, None, *(0.1 * found for found in with_grad(ctx.model, ctx.saved_tensors[0], g, ctx.how))


class Layers(nn.Module):
    """``again`` is used in the pass around, too, before and after."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.again = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1))

    def forward(self, x):
        x = self.again(self.norm(self.first(x)))
        x = Adjoint.apply(self.again, self.how, x, *self.again.parameters())
        return self.again(self.norm(x))


class Hooked(Layers):
    """The gradient that passes is changed by derivatives of another path."""

    def forward(self, x):
        x = self.norm(self.first(x))
        y = x + 0
        if y.requires_grad:
            y.register_hook(lambda g: g + sum((f * f).sum() for f in with_grad(self.again, x, g, self.how)))
        return self.again(y)


# of plain tensors: where parameters are plain, too
@pytest.mark.parametrize(
    ("how", "parameters"),
    [("plain", "whole"), *itertools.product(["grad", "grad_outputs", "inputs"], ["whole", "sharded"])],
)
@pytest.mark.parametrize("kind", [Layers, Hooked])
def test_of_derivatives_inside(kind, how, parameters):
    x = data(*SHAPE)
    reference = seeded(lambda: kind(how), x.dtype)
    reference(x).square().mean().backward()
    for mesh, placements, sizes in list(layouts(SHAPE, (0, 2)))[::3]:
        options = {"shard_parameters": 0} if parameters == "sharded" else {}
        model = ms.distribute_module(seeded(lambda: kind(how), x.dtype), mesh, **options)
        model(shard(x, mesh, placements, sizes)).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            got = gathered(p.grad) if isinstance(p, ms.ShardTensor) else p.grad
            torch.testing.assert_close(got, q.grad, rtol=1e-9, atol=1e-12, msg=lambda m: f"{name}: {m}")
