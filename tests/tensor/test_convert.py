"""Ways in and out of a ShardTensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.layout import balanced, bounds
from tests.compare import layouts, mesh_of, mesh_shapes, shard, skew

SHAPE = (3, 9, 8)


def values():
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(31))


def test_scatter_and_gather():
    for mesh, placements, sizes in layouts(SHAPE, (1, 2)):
        for src in {0, mesh.size - 1}:
            full = values() if mesh.rank == src else None
            x = ms.scatter_tensor(full, src, mesh, placements, requires_grad=True, sizes=sizes)
            assert torch.equal(x.full_tensor(), values())
            assert x.is_leaf
            assert x.requires_grad
            assert x.layout == shard(values(), mesh, placements, sizes).layout


def test_scatter_without_a_tensor_raises_everywhere():
    mesh = mesh_of((-1,))
    with pytest.raises(ms.LayoutError, match="nothing to scatter"):
        ms.scatter_tensor(None, 0, mesh, (ms.Shard(0),))
    with pytest.raises(ms.LayoutError, match="source rank"):
        ms.scatter_tensor(values(), mesh.size, mesh, (ms.Shard(0),))


def test_distribute_takes_a_copy_of_the_block():
    full = values().requires_grad_()
    for mesh, placements, sizes in layouts(SHAPE, (1, 2)):
        x = ms.distribute_tensor(full, mesh, placements, sizes=sizes)
        assert torch.equal(x.detach().full_tensor(), full)
        (g,) = torch.autograd.grad((x * x).sum(), full)
        torch.testing.assert_close(g, 2 * full.detach())


def test_borders_on_multiples():
    mesh = mesh_of((-1,))
    x = ms.distribute_tensor(torch.zeros(1, 8 * mesh.size + 5), mesh, (ms.Shard(1),), multiple=8)
    assert x.layout.sizes[1] == balanced(8 * mesh.size + 5, mesh.size, 8)
    assert x.to_local().shape[1] == 8 + 5 * (mesh.rank == mesh.size - 1)


def test_from_local_shares_the_memory_of_arrays():
    mesh = mesh_of(mesh_shapes(1)[0])
    block = np.full((2, 3), float(mesh.rank))
    x = ms.ShardTensor.from_local(block, mesh, (ms.Shard(0),))
    block += 1
    assert torch.equal(x.to_local(), torch.full((2, 3), mesh.rank + 1.0, dtype=torch.float64))
    assert np.from_dlpack(x.to_local()).ctypes.data == block.ctypes.data


def test_from_local_three_ways():
    mesh = mesh_of((-1,))
    sizes = tuple(range(1, mesh.size + 1))
    n = sum(sizes)
    full = torch.randn(n, 2, generator=torch.Generator().manual_seed(1))
    b = bounds(sizes)
    block = full[b[mesh.rank] : b[mesh.rank + 1]].clone().requires_grad_()
    for how in ("infer", {0: sizes}):
        x = ms.ShardTensor.from_local(block, mesh, (ms.Shard(0),), how)
        assert x.to_local() is block
        assert x.layout.sizes[0] == sizes
        assert torch.equal(x.full_tensor(), full)
    x.sum().backward()
    assert torch.equal(block.grad, torch.ones_like(block))
    even = ms.ShardTensor.from_local(torch.ones(2, 3), mesh, (ms.Shard(0),), "chunk")
    assert even.shape == (2 * mesh.size, 3)
    with pytest.raises(ms.LayoutError, match="unknown sharding_shapes"):
        ms.ShardTensor.from_local(block, mesh, (ms.Shard(0),), "guess")


@pytest.mark.ranks(2, 3, 4)
def test_blocks_that_disagree_raise_everywhere():
    mesh = mesh_of((-1,))
    odd = mesh.rank == mesh.size - 1
    for block, text in (
        (torch.zeros(2, 3 + odd), "does not fit the others"),
        (torch.zeros(2, 3, dtype=torch.float64 if odd else torch.float32), "float64"),
        (torch.zeros((2, 3, 1) if odd else (2, 3)), "3 dims"),
    ):
        with pytest.raises(ms.LayoutError, match=text):
            ms.ShardTensor.from_local(block, mesh, (ms.Shard(0),))


def test_rebalance():
    for mesh_shape in mesh_shapes(2):
        mesh = mesh_of(mesh_shape)
        placements = [ms.Shard(1 + m) for m in range(mesh.ndim)]
        x = ms.distribute_tensor(values(), mesh, placements).requires_grad_()
        sizes = {1 + m: skew(SHAPE[1 + m], n) for m, n in enumerate(mesh_shape)}
        y = x.rebalance(sizes)
        assert all(y.layout.sizes[d] == s for d, s in sizes.items())
        assert torch.equal(y.full_tensor(), values())
        (y * y).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * values())
        assert y.rebalance().layout == x.layout
        weighted = x.rebalance({1: [1.0 + i for i in range(mesh_shape[0])]})
        assert torch.equal(weighted.full_tensor(), values())
    with pytest.raises(ms.LayoutError, match="do not fit"):
        x.rebalance({0: [1, 2]})


def test_placements_that_do_not_fit():
    mesh = mesh_of((-1,))
    for placements, text in (
        ((ms.Shard(3),), "do not fit the tensor"),
        ((ms.Shard(0), ms.Shard(1)), "do not fit the mesh"),
        (("Shard",), "unknown placement"),
    ):
        with pytest.raises(ms.LayoutError, match=text):
            ms.distribute_tensor(values(), mesh, placements)


def test_torch_placements_are_accepted():
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of((-1,))
    x = ms.distribute_tensor(values(), mesh, (Shard(1),))
    assert x.placements == (Shard(1),)
    assert x.redistribute((Replicate(),)).placements == (ms.Replicate(),)
