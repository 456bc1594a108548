"""compare_module finds agreement, and every kind of difference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import mpishard as ms
from tests.compare import WORLD, mesh_of


class Net(nn.Module):
    """With buffers, two inputs, a mapping of outputs, and a complex one."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.unused = nn.Linear(2, 2)
        self.steps = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, t):
        y = self.norm(self.conv(x)) + self.steps * t
        return {"y": y, "more": [torch.fft.rfft(y), y.argmax(1)]}


INPUTS = torch.randn(2, 2, 7, 6, generator=torch.Generator().manual_seed(3)).double(), torch.tensor([2.0]).double()
COUNTS = ["output", "input gradient", "parameter gradient", "buffer"]


@pytest.mark.parametrize("grid", [(WORLD.size,), (2, WORLD.size // 2)] if WORLD.size % 2 == 0 else [(WORLD.size,)])
def test_agreement(grid):
    mesh = mesh_of(grid)
    torch.manual_seed(mesh.rank)  # another model on every rank: that of rank 0 counts
    module = Net().double()
    before = [p.clone() for p in module.parameters()]
    found = ms.compare_module(module, *INPUTS, mesh=mesh, placements=[ms.Shard(2), ms.Shard(3)][: mesh.ndim])
    assert list(found) == COUNTS
    assert max(found.values()) < 1e-12, found
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(module.parameters(), before))


class Wrong(nn.Module):
    """Wrong on shards alone, in one respect."""

    def __init__(self, what):
        super().__init__()
        self.what, self.weight = what, nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        on_shards = isinstance(x, ms.ShardTensor)
        y = x * self.weight.view(1, 2, 1, 1)
        if not on_shards or self.what == "nothing":
            return y
        if self.what == "output":
            return y + 1e-3
        if self.what == "nan":
            return y / torch.zeros_like(y) * 0
        if self.what == "input gradient":
            return y + x - x.detach()
        if self.what == "parameter gradient":
            return y + x.detach() * (2 * self.weight - 2 * self.weight.detach()).view(1, 2, 1, 1)
        if self.what == "buffer":
            self.seen += 1
            return y
        last = WORLD.rank == WORLD.size - 1
        if self.what == "shape":
            return y[:, :1]
        if self.what == "shape of the last":
            return y.full_tensor()[:, : 1 if last else 2]
        if self.what == "plain of the last":
            return y.full_tensor() + 1e-3 * last
        return x.detach() * self.weight.view(1, 2, 1, 1)


def compared(what):
    mesh = mesh_of((WORLD.size,))
    return ms.compare_module(Wrong(what), INPUTS[0], mesh=mesh, placements=[ms.Shard(2)])


@pytest.mark.parametrize("what", COUNTS)
def test_a_difference_is_found(what):
    found = compared(what)
    assert found[what] > 1e-4, found
    assert all(found[other] < 1e-12 for other in COUNTS if other != what), found


def test_differences_that_have_no_size():
    assert max(compared("nothing").values()) < 1e-12
    assert compared("nan")["output"] == float("inf")
    with pytest.raises(AssertionError, match="shapes of outputs"):
        compared("shape")
    with pytest.raises(AssertionError, match="what has a gradient"):
        compared("no gradient")
    # found in one process, and before on several, whose gradients differ
    with pytest.raises((AssertionError, ms.DesyncError), match=r"shapes of outputs|differs between ranks"):
        compared("shape of the last")


class Odd(nn.Module):
    """Another last cell on shards, behind one that is ``first`` on both."""

    def __init__(self, first):
        super().__init__()
        self.first, self.linear = first, nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        apart = 1.1 if isinstance(x, ms.ShardTensor) else 1.0
        self.seen.copy_(torch.tensor([self.first, 1.0, apart]))
        return self.linear(x) * torch.tensor([self.first, 1.0, apart])


@pytest.mark.parametrize("first", [float("nan"), float("inf")])
def test_a_difference_beside_what_is_not_finite(first):
    mesh = mesh_of((WORLD.size,))
    found = ms.compare_module(Odd(first), torch.ones(6, 3), mesh=mesh, placements=[ms.Shard(0)])
    assert found["buffer"] == pytest.approx(0.1)
    assert all(found[key] > 0.01 for key in ("output", "parameter gradient"))


def test_plain_outputs_are_those_of_every_rank():
    assert compared("plain of the last")["output"] > 1e-4


class Unruled(nn.Module):
    """Calls what has no rule, and is right in one process."""

    def forward(self, x):
        return x.to_dense()


@dataclasses.dataclass
class Result:
    y: torch.Tensor
    more: dict[str, torch.Tensor]


class Returning(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.made, self.scale = made, nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return self.made(self.scale * x)


def test_outputs_in_a_dataclass_are_compared():
    mesh = mesh_of((WORLD.size,))
    right = Returning(lambda y: Result(y.sin(), {"more": y}))
    wrong = Returning(lambda y: Result(y.sin(), {"more": y + isinstance(y, ms.ShardTensor)}))
    found = ms.compare_module(right, INPUTS[0], mesh=mesh, placements=[ms.Shard(2)])
    assert max(found.values()) < 1e-12, found
    assert ms.compare_module(wrong, INPUTS[0], mesh=mesh, placements=[ms.Shard(2)])["output"] > 0.1


def test_an_output_without_tensors_is_no_agreement():
    hidden = Returning(lambda y: object())
    with pytest.raises(ms.UnsupportedOperationError, match="nothing to compare"):
        ms.compare_module(hidden, INPUTS[0], mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(2)])


def test_a_function_without_a_rule_is_named():
    with pytest.raises(ms.NoShardingRule, match="to_dense"):
        ms.compare_module(Unruled(), INPUTS[0], mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(2)])


@torch.library.custom_op("compare::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Holder(nn.Module):
    """Holds what Python does not copy: an operator, a library of them, and a weight that its forward makes anew."""

    def __init__(self):
        super().__init__()
        self.half, self.library = half, torch.ops.aten
        with pytest.warns(FutureWarning, match="weight_norm"):
            self.conv = torch.nn.utils.weight_norm(nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64))

    def forward(self, x):
        return self.library.relu(self.conv(x)) * self.half(self.conv.bias.detach()).view(-1, 1, 1)


def test_a_model_that_python_does_not_copy():
    found = ms.compare_module(Holder(), INPUTS[0], mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(2)])
    assert max(found.values()) < 1e-12, found


def test_cotangents_are_not_the_inputs():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm = nn.BatchNorm1d(4, dtype=torch.float64)  # lets nothing through of a cotangent like its input
    found = ms.compare_module(norm, x, mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(0)])
    assert max(found.values()) < 1e-13, found


def test_an_input_that_lacks_a_negative_dim_is_replicated():
    class Scaled(nn.Module):
        def forward(self, x, factor):
            return x * factor

    x = torch.arange(15.0, dtype=torch.float64).reshape(5, 3)
    found = ms.compare_module(Scaled(), x, x[0], mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(-2)])
    assert max(found.values()) < 1e-15, found


@pytest.mark.ranks(2, 3)
def test_a_module_that_one_rank_cannot_copy_raises_on_all():
    module = nn.LazyBatchNorm2d() if WORLD.rank == 1 else nn.BatchNorm2d(2)
    with pytest.raises(ms.MpishardError, match="uninitialized parameter"):
        ms.compare_module(module, INPUTS[0], mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(2)])
