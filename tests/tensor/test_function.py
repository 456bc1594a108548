"""A user's own autograd.Function: on ShardTensors what it is on whole tensors, in every derivative that it has."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from tests.compare import gathered, layouts, shard
from tests.models.twin import seeded
from tests.release import RELEASE

SHAPE = (2, 3, 11, 6)


def values(*shape, seed=1):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class StraightThrough(Function):
    @staticmethod
    def forward(ctx, x, steps):
        ctx.save_for_backward(x)
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return g * (x.abs() < 1.5), None


class Exponential(Function):
    """It keeps its result, and knows its derivative along a direction."""

    @staticmethod
    def forward(x, base=torch.e):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        assert inputs[1] == torch.e
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y, None

    @staticmethod
    def jvp(ctx, t, _):
        (y,) = ctx.saved_for_forward
        return t * y


class Sine(Function):
    """It keeps another tensor for `jvp` than for backward, and asks for either by the same name."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos())
        ctx.save_for_forward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (slope,) = ctx.saved_tensors
        return g * slope

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * x.cos()


class Centred(Function):
    """Sums over sharded dims, several results, one of them whole numbers, one that nobody uses."""

    @staticmethod
    def forward(ctx, x, weight):
        mean = x.mean((0, 2, 3), keepdim=True)
        y, largest = (x - mean) * weight.view(1, -1, 1, 1), x.argmax(2)
        ctx.save_for_backward(x, weight, mean, None)
        ctx.mark_non_differentiable(largest)
        ctx.cells = x.numel() // x.shape[1]
        return y, largest, mean

    @staticmethod
    def backward(ctx, g, g_largest, g_mean):
        x, weight, mean, nothing = ctx.saved_tensors
        assert nothing is None
        inner = g * weight.view(1, -1, 1, 1)
        gx = inner - inner.mean((0, 2, 3), keepdim=True) + g_mean / ctx.cells
        return gx, (g * (x - mean)).sum((0, 2, 3))


class Neighbours(Function):
    """Reads beyond the block, in backward too."""

    @staticmethod
    def forward(ctx, x, kernel):
        ctx.save_for_backward(x, kernel)
        return F.conv2d(x, kernel, padding=1)

    @staticmethod
    def backward(ctx, g):
        x, kernel = ctx.saved_tensors
        with torch.enable_grad():
            a, b = x.detach().requires_grad_(), kernel.detach().requires_grad_()
            return torch.autograd.grad(F.conv2d(a, b, padding=1), (a, b), g)


class Reversed(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def vjp(ctx, g):  # torch's other name for backward
        return -g


class Same(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x, y * 2

    @staticmethod
    def backward(ctx, g, h):
        return g * 3, torch.zeros(SHAPE, dtype=torch.float64) if h is None else h * 2


WEIGHT, KERNEL = values(3, seed=2), values(3, 3, 3, 3, seed=3)
CALLS = {
    "straight through": lambda x, w, k: StraightThrough.apply(x * 1, 4.0),
    "exponential": lambda x, w, k: Exponential.apply(x).sum(2),
    "sine": lambda x, w, k: Sine.apply(x) * w.view(1, -1, 1, 1),
    "centred": lambda x, w, k: Centred.apply(x, w)[0].square(),
    "centred, both": lambda x, w, k: sum(Centred.apply(x.sin(), w)[::2]),
    "neighbours": lambda x, w, k: Neighbours.apply(x, k).sin(),
    "reversed": lambda x, w, k: Reversed.apply(x.cos()) * w.view(1, -1, 1, 1),
    "same": lambda x, w, k: Same.apply(x, x)[0] * 2,
    "in a checkpoint": lambda x, w, k: checkpoint(
        lambda x: Exponential.apply(x) * StraightThrough.apply(x, 2.0), x, use_reentrant=False
    ),
    "in a checkpoint that runs again": lambda x, w, k: checkpoint(
        lambda x: Centred.apply(x, w)[0], x.sin(), use_reentrant=True
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("saved", ["here", "on the host"])
def test_values_and_gradients(name, saved):
    hooks = torch.autograd.graph.save_on_cpu if saved == "on the host" else contextlib.nullcontext
    found = []
    x = values(*SHAPE)
    for case in [None, *list(layouts(SHAPE, (2, 3)))[::2]]:
        leaf = x.clone().requires_grad_() if case is None else shard(x, *case, True)
        weight, kernel = (t.clone().requires_grad_() for t in (WEIGHT, KERNEL))
        with hooks():
            y = CALLS[name](leaf, weight, kernel)
        y.square().sum().backward()
        found.append([y.detach(), leaf.grad, *(t.grad for t in (weight, kernel) if t.grad is not None)])
        for got, expected in zip(found[-1], found[0], strict=True):
            torch.testing.assert_close(gathered(got), expected, msg=lambda m: f"{case}: {m}")


@pytest.mark.skipif(RELEASE == (2, 8), reason="torch itself takes none before 2.9")
@pytest.mark.parametrize(
    "call", [lambda x: StraightThrough.apply(steps=4.0, x=x * 1), lambda x: Exponential.apply(base=torch.e, x=x)]
)
def test_arguments_by_name(call):
    x = values(*SHAPE)
    y = call(leaf := x.clone().requires_grad_())
    y.square().sum().backward()
    for case in [*layouts(SHAPE, (2, 3))][::3]:
        z = call(own := shard(x, *case, True))
        z.square().sum().backward()
        torch.testing.assert_close(gathered(z), y.detach())
        torch.testing.assert_close(gathered(own.grad), leaf.grad)


@pytest.mark.parametrize("name", ["exponential", "centred", "centred, both", "straight through"])
def test_second_derivatives(name):
    found = []
    x = values(*SHAPE)
    for case in [None, *list(layouts(SHAPE, (2, 3)))[::3]]:
        leaf = x.clone().requires_grad_() if case is None else shard(x, *case, True)
        weight = WEIGHT.clone().requires_grad_()
        (g,) = torch.autograd.grad(CALLS[name](leaf, weight, None).square().sum(), leaf, create_graph=True)
        g.square().sum().backward()
        found.append([g.detach(), leaf.grad, *([] if weight.grad is None else [weight.grad])])
        for got, expected in zip(found[-1], found[0], strict=True):
            torch.testing.assert_close(gathered(got), expected, msg=lambda m: f"{case}: {m}")


def test_once_differentiable():
    for case in list(layouts(SHAPE, (2,)))[:3]:
        x = shard(values(*SHAPE), *case, True)
        (g,) = torch.autograd.grad(Reversed.apply(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError):
            g.square().sum().backward()


def test_forward_mode():
    x, t = values(*SHAPE), values(*SHAPE, seed=5)
    for case in list(layouts(SHAPE, (2, 3)))[::2]:
        with forward_ad.dual_level():
            got = forward_ad.unpack_dual(Exponential.apply(forward_ad.make_dual(shard(x, *case), shard(t, *case))))
        torch.testing.assert_close(gathered(got.tangent), x.exp() * t)
        with forward_ad.dual_level():
            got = forward_ad.unpack_dual(Sine.apply(forward_ad.make_dual(shard(x, *case), shard(t, *case))))
        torch.testing.assert_close(gathered(got.tangent), x.cos() * t)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
            StraightThrough.apply(forward_ad.make_dual(shard(x, *case), shard(t, *case)), 2.0)


class Written(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Kernel(Function):
    """It reads memory past the rules."""

    @staticmethod
    def forward(ctx, x):
        return x.data_ptr()

    @staticmethod
    def backward(ctx, g):
        raise AssertionError("not reached")


def test_what_is_refused():
    x = shard(values(*SHAPE), *next(iter(layouts(SHAPE, (2,)))))
    with pytest.raises(ms.UnsupportedOperationError, match="mark_dirty"):
        Written.apply(x)
    with pytest.raises(ms.MpishardError):
        Kernel.apply(x)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Conv2d(3, 3, 3, padding=1), nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, x):
        return Centred.apply(self.first(x), self.weight)[0].relu()


@pytest.mark.parametrize("parameters", ["whole", "sharded"])
@pytest.mark.parametrize("accumulated", [False, True])
def test_in_a_model(parameters, accumulated):
    """Gradients of parameters are summed once, also where they are sharded, and where another pass sums."""
    x = values(*SHAPE)
    reference = seeded(Scaled, x.dtype)
    (reference(x).square().mean() + reference(x * 2).square().mean()).backward()
    for mesh, placements, sizes in list(layouts(SHAPE, (0, 2)))[::3]:
        options = {"shard_parameters": 0} if parameters == "sharded" else {}
        model = ms.distribute_module(seeded(Scaled, x.dtype, mesh.rank), mesh, **options)
        own = shard(x, mesh, placements, sizes)
        with ms.no_sync() if accumulated else contextlib.nullcontext():
            model(own).square().mean().backward()
        model(own * 2).square().mean().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(gathered(p.grad) if isinstance(p, ms.ShardTensor) else p.grad, q.grad)
