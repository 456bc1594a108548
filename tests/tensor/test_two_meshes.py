"""Tensors of two meshes never meet, by whatever way a second one comes: its blocks are of other cells."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import mpishard as ms
from tests.compare import WORLD, mesh_of

SHAPE = (7, 5)


def values():
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def backwards():
    """A mesh of the same shape on which the ranks stand in the opposite order."""
    own = WORLD.Split(0, -WORLD.rank)
    try:
        return ms.init_mesh((-1,), ("y",), comm=own)
    finally:
        own.Free()


def hooked(x, y):
    (z := x * 2).register_hook(lambda g: y)
    z.sum().backward()


def into(x, y):
    x[:] = y


def into_data(x, y):
    x.data = y


def into_data_of_the_gradient(x, y):
    x.sum().backward()
    x.grad.data = y


def dual(x, y):
    with forward_ad.dual_level():
        forward_ad.make_dual(x, y)


WAYS = {
    "backward": lambda x, y: (x * 2).backward(y),
    "grad": lambda x, y: torch.autograd.grad(x * 2, x, y),
    "hook": hooked,
    "x[:] =": lambda x, y: into(x.detach(), y),
    "data": into_data,
    "data of the gradient": into_data_of_the_gradient,
    "set_": lambda x, y: x.detach().set_(y),
    "dual": dual,
    "index": lambda x, y: x[ms.distribute_tensor(torch.arange(6), y.mesh, (ms.Shard(0),))],
    "index_copy": lambda x, y: x.detach().index_copy(0, torch.arange(7), y),
    "select_scatter": lambda x, y: x.detach().select_scatter(y[:, 0], 1, 2),
    "slice_scatter": lambda x, y: x.detach().slice_scatter(y[:3], 0, 1, 4),
    "out": lambda x, y: torch.add(x.detach(), 1, out=y),
    "bias": lambda x, y: F.linear(x, torch.ones(5, 5, dtype=x.dtype), y.sum(0)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("placement", [ms.Shard(0), ms.Shard(1)], ids=["rows", "columns"])
def test_a_second_mesh_is_refused(way, placement):
    mesh = mesh_of((-1,))
    x = ms.distribute_tensor(values(), mesh, (placement,)).requires_grad_()
    y = ms.distribute_tensor(values() + 1, backwards(), (placement,))
    with pytest.raises(ms.MeshError, match="different meshes"):
        WAYS[way](x, y)
    # nothing was sent, written or moved
    assert x.mesh is mesh
    torch.testing.assert_close(x.detach().full_tensor(), values())
    torch.testing.assert_close(y.full_tensor(), values() + 1)


def test_the_same_ways_on_one_mesh():
    mesh = mesh_of((-1,))
    for way in WAYS.values():
        x = ms.distribute_tensor(values(), mesh, (ms.Shard(0),)).requires_grad_()
        way(x, ms.distribute_tensor(values() + 1, mesh, (ms.Shard(1),)))
