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
from tests.compare import WORLD, gathered, mesh_of, shard

SIZE = WORLD.size
FULL = torch.rand((2 * SIZE + 1, 3), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


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
