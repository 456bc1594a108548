"""What compiled functions do with the lists, mappings and objects that ShardTensors are in."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import mpishard as ms
from mpishard.tensor import compiler
from tests.compare import WORLD, gathered, mesh_of, shard

SIZE = WORLD.size
FULL = torch.rand((2 * SIZE + 1, 3), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compiler, "_warned", True)


def field():
    return shard(FULL, mesh_of((SIZE,)), (ms.Shard(0),))


def compiled(f):
    return torch.compile(f, backend="aot_eager", fullgraph=True)


def put(d):
    d["y"] = d["x"] * 2
    d["x"] = d["x"] + d["y"]
    return d["x"].sum()


def put_inside(d):
    d["in"][0]["y"] = [d["in"][0]["x"] * 2]
    return d


def taken(d):
    return d.pop("x") * 2


def appended(values):
    values.append(values[0] * 2)
    values[0] = values[0] + 1
    return values


def filled(x, values):
    values.append(x * 2)
    return x + 1


ARGUMENTS = {
    put: lambda x: ({"x": x, "n": 1},),
    put_inside: lambda x: ({"in": [{"x": x}], "n": 1},),
    taken: lambda x: (collections.OrderedDict(x=x, n=1),),
    appended: lambda x: ([x, 2],),
    filled: lambda x: (x, []),
}


def leaves(value):
    return [gathered(x) if isinstance(x, torch.Tensor) else x for x in torch.utils._pytree.tree_leaves(value)]


@pytest.mark.parametrize("f", ARGUMENTS, ids=lambda f: f.__name__)
def test_what_is_written_into_an_argument_is_there(f):
    run = compiled(f)
    for _ in range(2):
        ours, theirs = ARGUMENTS[f](field()), ARGUMENTS[f](FULL.clone())
        torch.testing.assert_close(leaves((run(*ours), ours)), leaves((f(*theirs), theirs)))


def test_a_container_that_is_returned_is_the_callers_own():
    values = [field()]
    assert compiled(appended)(values) is values
    assert all(type(x) is ms.ShardTensor for x in values)


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


@dataclass
class Result:
    x: Any


class Keeping(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.queue, self.kept = how, collections.deque(maxlen=2), None

    def forward(self, x):
        if self.how == "deque":
            self.queue.append(x)
        elif self.how == "tuple":
            self.kept = (1, (x,))
        elif self.how == "closure":
            self.kept = lambda: x
        else:
            self.kept = Slots(x)
        return x * 2

    def found(self):
        if self.how == "deque":
            return self.queue[0]
        if self.how == "tuple":
            return self.kept[1][0]
        return self.kept() if self.how == "closure" else self.kept.x


@pytest.mark.parametrize("how", ["deque", "tuple", "closure", "slots"])
def test_what_keeps_an_argument_keeps_the_shards(how):
    model, x = Keeping(how), field()
    torch.compile(model, backend="aot_eager")(x)
    assert model.found() is x


def in_slots(x):
    return Slots(x)


@pytest.mark.parametrize(
    "made", [lambda x: Result((x,)), lambda x: Result([x]), in_slots], ids=["tuple", "list", "slots"]
)
def test_a_result_that_holds_an_argument_holds_the_shards(made):
    x = field()
    held = torch.compile(made, backend="aot_eager")(x).x
    assert (held if isinstance(held, torch.Tensor) else held[0]) is x


def by_attribute(x):
    scale = getattr(x, "scale", None)
    return x * 2 if scale is None else x * scale


@pytest.mark.parametrize("ranks", ["all", "one"])
def test_an_attribute_of_a_shard_tensor_is_seen(ranks):
    run = torch.compile(by_attribute, backend="aot_eager")
    torch.testing.assert_close(gathered(run(field())), 2 * FULL)
    x = field()
    if ranks == "all" or WORLD.rank == SIZE - 1:
        x.scale = 2.0 if ranks == "one" else 5.0
    torch.testing.assert_close(gathered(run(x)), (2.0 if ranks == "one" else 5.0) * FULL)


def test_an_attribute_that_is_set_is_there_and_not_on_the_next_argument():
    def tag(x):
        x.doubled = x * 2
        return x + 1

    run = compiled(tag)
    for _ in range(2):
        x = field()
        run(x)
        torch.testing.assert_close(gathered(x.doubled), 2 * FULL)


def test_a_hook_of_an_argument_is_called():
    def hooked(x):
        x.register_hook(lambda g: g * 10)
        return x.sin().sum()

    run = torch.compile(hooked, backend="aot_eager")
    for _ in range(2):
        x, whole = field().requires_grad_(), FULL.clone().requires_grad_()
        run(x).backward()
        hooked(whole).backward()
        torch.testing.assert_close(gathered(x.grad), whole.grad)
