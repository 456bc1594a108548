"""Checkpoints without re-entry: calls are made again by all ranks at once, also where one lies in another."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from tests.compare import WORLD, gathered, mesh_of, shard
from tests.ops.windows import field
from tests.release import RELEASE


def kept(f, *operands):
    return checkpoint(f, *operands, use_reentrant=False)


WEIGHT = field(3, 3, 3)
FUNCTIONS = {
    # what the first and the last rank keep for backward may differ from what others keep
    "cummax": lambda x: x.cummax(0)[0],
    "cummin of sorted": lambda x: (x * x).sort(1)[0].cummin(0)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cumprod": lambda x: x.cumprod(0) * x,
    "conv": lambda x: F.conv1d(x.T[None], WEIGHT),
    "grid_sample": lambda x: F.grid_sample(x[None, None], x.reshape(1, -1, 3, 1)[:, :, :, [0, 0]], align_corners=False),
    "sum": lambda x: x.sum(0).sin() * x,
}
if RELEASE < (2, 13):  # without a second derivative
    del FUNCTIONS["grid_sample"]
WAYS = {"checkpoint": kept, "nested": lambda f, x: kept(lambda y: kept(f, kept(torch.sin, y)).exp(), x)}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_derivatives(name, way):
    whole = field(7, 3)
    for sizes in (None, (0,) * (WORLD.size - 1) + (7,), (7,) + (0,) * (WORLD.size - 1)):

        def derivatives(x, c):
            y = WAYS[way](FUNCTIONS[name], x)
            (g,) = torch.autograd.grad(y.sum() + (y * y).sum(), x, create_graph=True)
            return [g, *torch.autograd.grad((g * c).sum(), [x, c])]

        cotangent = field(7, 3) + 1
        expected = derivatives(whole.clone().requires_grad_(), cotangent.clone().requires_grad_())
        x, c = (
            shard(t, mesh_of((WORLD.size,)), (ms.Shard(0),), None if sizes is None else {0: sizes}, True)
            for t in (whole, cotangent)
        )
        for got, e in zip(derivatives(x, c), expected, strict=True):
            torch.testing.assert_close(gathered(got).detach(), e.detach())


@pytest.mark.parametrize("when", ["before", "after"])
def test_of_a_sum_under_way(when):
    """An argument that is a Partial, and is summed for another reason before the checkpoint's function runs again."""

    def derivative(x):
        y = x @ field(6, 4)
        if when == "before":
            y.detach()
        out = kept(lambda t: t.sin() * t, y)
        if when == "after":
            y.detach()
        return torch.autograd.grad((out * out).sum() + y.sum(), x)[0]

    whole = field(3, 6)
    got = derivative(shard(whole, mesh_of((WORLD.size,)), (ms.Shard(1),), None, True))
    torch.testing.assert_close(gathered(got), derivative(whole.clone().requires_grad_()))


def test_arguments_that_are_written_into():
    """It would run again with other values: refused as by torch."""
    x = shard(field(7, 3), mesh_of((WORLD.size,)), (ms.Shard(0),), None, True)
    y = kept(torch.atan, x)
    with torch.no_grad():
        x.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
