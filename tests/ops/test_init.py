"""`torch.nn.init` of ShardTensors, and modules that are filled or converted anew."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mpishard as ms
from tests.compare import WORLD, gathered, layouts, mesh_of, shard

EXACT = {
    "constant_": lambda t: nn.init.constant_(t, 0.3),
    "eye_": nn.init.eye_,
    "ones_": nn.init.ones_,
}
DRAWN = {
    "uniform_": (lambda t: nn.init.uniform_(t, -2, 3), -2, 3),
    "kaiming_uniform_": (lambda t: nn.init.kaiming_uniform_(t, a=5**0.5), -(40**-0.5), 40**-0.5),
    "normal_": (lambda t: nn.init.normal_(t, 1.0, 0.1), 0, 2),
    "xavier_uniform_": (nn.init.xavier_uniform_, -((6 / 100) ** 0.5), (6 / 100) ** 0.5),
}


@pytest.mark.parametrize("name", EXACT)
def test_values(name):
    expected = EXACT[name](torch.zeros(7, 5))
    for mesh, placements, sizes in layouts((7, 5), (0, 1)):
        x = shard(torch.zeros(7, 5), mesh, placements, sizes, True)
        assert EXACT[name](x) is x
        torch.testing.assert_close(gathered(x.detach()), expected)


@pytest.mark.parametrize("name", DRAWN)
def test_numbers_are_the_same_on_every_mesh(name):
    fill, low, high = DRAWN[name]
    found = []
    for mesh, placements, sizes in layouts((60, 40), (0, 1)):
        x = shard(torch.zeros(60, 40), mesh, placements, sizes, True)
        torch.manual_seed(7)
        fill(x)
        found.append(gathered(x.detach()))
    assert low <= found[0].min() < found[0].max() <= high
    assert found[0].unique().numel() > 2000
    assert all(torch.equal(t, found[0]) for t in found)


def test_eye_of_another_shape():
    with pytest.raises(RuntimeError, match="eye"):
        torch.eye(3, out=ms.zeros(4, 4, mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(0)]))


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.to("cpu"), lambda m: m.double(), lambda m: m.bfloat16().float(),
     lambda m: m.to(memory_format=torch.channels_last)],
)  # fmt: skip
def test_a_module_of_sharded_parameters_is_converted(convert):
    plain = nn.Sequential(nn.Conv2d(2, 6, 1), nn.Conv2d(6, 2, 3, padding=1))
    mesh = ms.init_mesh((-1,), ("data",), device="cpu")
    ours = ms.distribute_module(copy.deepcopy(plain), mesh, shard_parameters="data")
    convert(ours)
    convert(plain)
    x = torch.linspace(-1, 1, 4 * 2 * 9).view(4, 2, 3, 3).to(next(plain.parameters()).dtype)
    for model, y in ((plain, plain(x)), (ours, ours(ms.distribute_tensor(x, mesh, [ms.Shard(0)])))):
        y.square().mean().backward()
        if model is ours:
            torch.testing.assert_close(gathered(y.detach()), plain(x).detach())
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.dtype == q.dtype
        torch.testing.assert_close(gathered(p.grad), q.grad)
    mesh.free()


def test_data_that_lies_otherwise_is_brought_to_the_parameter():
    mesh = mesh_of((WORLD.size,))
    w = torch.arange(24.0).view(6, 4)
    p = nn.Parameter(shard(w, mesh, (ms.Shard(0),)))
    for placement in (ms.Shard(1), ms.Replicate(), ms.Shard(0)):
        p.data = shard(
            2 * w, mesh, (placement,), {0: (6, *(0,) * (WORLD.size - 1))} if placement == ms.Shard(0) else None
        )
        assert p.sharding == shard(w, mesh, (ms.Shard(0),)).sharding
        torch.testing.assert_close(gathered(p.detach()), 2 * w)
    p.data = shard(w.double(), mesh, (ms.Shard(0),))  # as torch takes it
    torch.testing.assert_close(gathered(p.detach()), w.double())
