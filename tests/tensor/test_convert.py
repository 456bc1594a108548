"""Ways in and out of a ShardTensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.comm import guard
from mpishard.errors import MpishardError
from mpishard.layout import balanced, bounds
from tests.compare import layouts, mesh_of, mesh_shapes, shard, skew

SHAPE = (3, 9, 8)
# where whole calls are compared, a key that differs is told before what is wrong with it
DIFFERS = (ms.LayoutError, ms.DesyncError) if guard.DEBUG else ms.LayoutError


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
            assert x.sharding == shard(values(), mesh, placements, sizes).sharding


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
    assert x.sharding.sizes[1] == balanced(8 * mesh.size + 5, mesh.size, 8)
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
    for how in ("infer", {0: sizes}, {0: np.array(sizes)}, {0: torch.tensor(sizes)}, {0: [(n, 2) for n in sizes]}):
        x = ms.ShardTensor.from_local(block, mesh, (ms.Shard(0),), how)
        assert x.to_local() is block
        assert x.sharding.sizes[0] == sizes
        assert torch.equal(x.full_tensor(), full)
    x.sum().backward()
    assert torch.equal(block.grad, torch.ones_like(block))
    even = ms.ShardTensor.from_local(torch.ones(2, 3), mesh, (ms.Shard(0),), "chunk")
    assert even.shape == (2 * mesh.size, 3)
    with pytest.raises(ms.LayoutError, match="unknown sharding_shapes"):
        ms.ShardTensor.from_local(block, mesh, (ms.Shard(0),), "guess")
    for wrong in (5, None, "abc", [1.5] * mesh.size, [None] * mesh.size, [()] * mesh.size):
        with pytest.raises(ms.LayoutError, match="sizes along dim 0 are of another kind"):
            ms.ShardTensor.from_local(block, mesh, (ms.Shard(0),), {0: wrong})


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_are_told_different_sizes_raise_everywhere():
    mesh = mesh_of((-1,))
    odd, n = mesh.rank == mesh.size - 1, mesh.size
    ms.ShardTensor.from_local(torch.zeros(2, 3), mesh, (ms.Shard(0),), "chunk")
    for block, placement, told, error, text in (
        (torch.zeros(5 + odd, 3), ms.Shard(0), "chunk", ms.DesyncError, "ranks made different calls"),
        (torch.zeros(5 + odd, 3), ms.Replicate(), "chunk", ms.DesyncError, "ranks made different calls"),
        (
            torch.zeros(5, 3, requires_grad=bool(odd)),
            ms.Shard(0),
            "chunk",
            ms.DesyncError,
            "ranks made different calls",
        ),
        (torch.zeros(5, 3).to(torch.int if odd else torch.int8), ms.Shard(0), "chunk", ms.DesyncError, "torch.int32"),
        (torch.zeros(5, 3), ms.Shard(0), {0: (5 - odd, *(5,) * (n - 1))}, ms.DesyncError, "ranks made different calls"),
        (torch.zeros(5 + odd, 3), ms.Shard(0), {0: (5,) * n}, ms.LayoutError, "does not fit the given sizes"),
        (torch.zeros(5, 3), ms.Shard(0), {"q" if odd else 0: (5,) * n}, ms.MeshError, "no such mesh dim"),
        (None if odd else torch.zeros(5, 3), ms.Shard(0), "chunk", ms.UnsupportedOperationError, "no block"),
    ):
        with pytest.raises(error, match=text):
            ms.ShardTensor.from_local(block, mesh, (placement,), told)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("debug", [False, True])
def test_what_one_rank_gives_wrong_is_told_where_calls_are_compared_too(debug, monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", debug)
    mesh = ms.init_mesh((-1,), ("x",))
    odd, n, block = mesh.rank == mesh.size - 1, mesh.size, torch.zeros(5)
    for call, error, text in (
        (lambda: ms.ShardTensor.from_local(block[odd:], mesh, ms.Shard(0), {0: (5,) * n}), ms.LayoutError, "sizes"),
        (lambda: ms.ShardTensor.from_local(block, mesh, ms.Shard(int(odd)), "chunk"), ms.LayoutError, "do not fit"),
        (lambda: ms.distribute_tensor([] if odd else block, mesh), ms.UnsupportedOperationError, "no block"),
        (lambda: ms.ones(4, mesh=mesh, layout=5 if odd else torch.strided), ms.LayoutError, "layout= is of another"),
        (lambda: ms.all_reduce(block, mesh, op=5 if odd else "sum"), MpishardError, "op"),
    ):
        with pytest.raises(error, match=text):
            call()
    mesh.free()


@pytest.mark.ranks(2, 3)
def test_sizes_that_one_rank_alone_asks_for():
    mesh = mesh_of((-1,))
    odd, block = mesh.rank == mesh.size - 1, torch.zeros(4, 3)
    for mine, theirs in (("infer", "chunk"), ("chunks", "chunk"), ("infer", {0: (4,) * mesh.size})):
        with pytest.raises(ms.DesyncError, match="from_local"):
            ms.ShardTensor.from_local(block, mesh, ms.Shard(0), mine if odd else theirs)
    x = ms.ShardTensor.from_local(block, mesh, ms.Shard(0))
    for call in (
        lambda: x.as_strided((2, 3), (3, 1)),
        lambda: ms.ShardTensor.from_local(block, mesh, ms.Shard(0)),
    ):
        with pytest.raises(ms.DesyncError, match="different calls"):
            call() if odd else ms.all_reduce(torch.ones(7), mesh)


@pytest.mark.ranks(2, 3, 4)
def test_blocks_that_disagree_raise_everywhere():
    mesh = mesh_of((-1,))
    odd = mesh.rank == mesh.size - 1
    for block, text in (
        (torch.zeros(2, 3 + odd), "does not fit the others"),
        (torch.zeros(2, 3, requires_grad=bool(odd)), "with requires_grad"),
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
        assert all(y.sharding.sizes[d] == s for d, s in sizes.items())
        assert torch.equal(y.full_tensor(), values())
        (y * y).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * values())
        assert y.rebalance().sharding == x.sharding
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


def test_cells_that_are_known_are_not_a_partial():
    mesh = mesh_of((-1,))
    with pytest.raises(ms.LayoutError, match="scatter_tensor: Partial placements"):
        ms.scatter_tensor(values(), 0, mesh, (ms.Partial(),))


@pytest.mark.ranks(2, 3, 4)
def test_arguments_of_a_scatter_are_agreed():
    mesh = mesh_of((-1,))
    odd = mesh.rank == 1
    skewed = skew(9, mesh.size)
    for change in (
        {"src": int(odd)},
        {"placements": (ms.Shard(2 if odd else 1),)},
        {"placements": (ms.Shard(7 if odd else 1),)},
        {"sizes": {1: skewed[::-1] if odd else skewed}},
        {"multiple": 1 + odd},
    ):
        given = {"src": 0, "placements": (ms.Shard(1),), "sizes": None, "multiple": 1, **change}
        with pytest.raises(ms.DesyncError, match="scatter_tensor"):
            ms.scatter_tensor(values(), mesh=mesh, **given)


def test_integers_have_no_gradient_to_require():
    mesh = mesh_of((-1,))
    with pytest.raises(ms.UnsupportedDtypeError, match="without gradients"):
        ms.scatter_tensor(values().long(), 0, mesh, (ms.Shard(1),), requires_grad=True)


def test_distribute_of_a_sharded_tensor_honours_its_arguments():
    mesh = mesh_of((-1,))
    x = shard(values(), mesh, (ms.Shard(1),))
    skewed = skew(9, mesh.size)
    for given, sizes in (({}, balanced(9, mesh.size)), ({"sizes": {1: skewed}}, skewed)):
        y = ms.distribute_tensor(x, mesh, (ms.Shard(1),), **given)
        assert y.sharding.sizes[1] == sizes
        assert torch.equal(y.full_tensor(), values())
    y = ms.distribute_tensor(x, mesh, (ms.Shard(1),), multiple=4)
    assert y.sharding.sizes[1] == balanced(9, mesh.size, 4)
    with pytest.raises(ms.MeshError, match="different meshes"):
        ms.distribute_tensor(x, ms.init_mesh((-1,)), (ms.Shard(1),))


@pytest.mark.ranks(2, 3, 4)
def test_blocks_that_differ_are_told_apart_though_each_kind_came_before():
    mesh = mesh_of((-1,))
    float32, float64 = torch.ones(2, 3), torch.ones(2, 3).double()
    kinds = [float32, float64, float32.clone().requires_grad_(), torch.ones(2, 3, dtype=torch.int32)]
    for block in kinds:
        for _ in range(2):
            ms.ShardTensor.from_local(block, mesh, (ms.Shard(0),))
    for one, other in ((0, 1), (0, 2), (3, 0)):
        with pytest.raises(ms.LayoutError, match="does not fit the others"):
            ms.ShardTensor.from_local(kinds[one if mesh.rank else other], mesh, (ms.Shard(0),))


def test_from_local_takes_plain_tensors_only():
    mesh = mesh_of((-1,))
    x = shard(values(), mesh, (ms.Shard(1),))
    with pytest.raises(ms.UnsupportedOperationError, match="from_local"):
        ms.ShardTensor.from_local(x, mesh, (ms.Shard(1),))
    for unknown in (5, None):
        with pytest.raises(ms.LayoutError, match="unknown sharding_shapes"):
            ms.ShardTensor.from_local(values(), mesh, (ms.Replicate(),), unknown)


def test_one_placement_need_not_be_a_sequence():
    mesh = mesh_of((-1,))
    x = ms.zeros(5, mesh=mesh, placements=ms.Shard(0), sizes={-1: skew(5, mesh.size)})
    assert x.placements == (ms.Shard(0),)
    assert x.sharding.sizes == (skew(5, mesh.size),)
    with pytest.raises(ms.LayoutError, match="not sharded"):
        ms.zeros(5, 2, mesh=mesh, placements=ms.Shard(0), sizes={1: (1, 1)})


def test_a_refused_dtype_draws_no_seed():
    mesh = mesh_of((-1,))
    before = torch.get_rng_state()
    for draw in (ms.rand, ms.randn):
        with pytest.raises(ms.UnsupportedDtypeError, match="random numbers"):
            draw(4, mesh=mesh, placements=ms.Shard(0), dtype=torch.int64)
    assert torch.equal(torch.get_rng_state(), before)


def test_rebalance_knows_its_dims():
    mesh = mesh_of((-1,))
    x = shard(values(), mesh, (ms.Shard(1),))
    sizes = skew(9, mesh.size)
    for numbers in (list(sizes), np.array(sizes), torch.tensor(sizes)):
        assert x.rebalance({-2: numbers}).sharding.sizes[1] == sizes
    for dims in ({4: sizes}, {1: sizes, -2: sizes}):
        with pytest.raises(ms.LayoutError, match="no such dim, or one named twice"):
            x.rebalance(dims)
    unfit = [(value,) * mesh.size for value in (0, float("nan"), "a", None)]
    for numbers in (*unfit, "a" * 9, 3, np.array(3), torch.tensor(9)):
        with pytest.raises(ms.LayoutError, match="do not fit"):
            x.rebalance(numbers)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("wrong", [3, "a", [None]], ids=repr)
def test_what_is_no_weight_on_one_rank_reaches_all(wrong):
    mesh = mesh_of((-1,))
    x = shard(values(), mesh, (ms.Shard(1),))
    said = r"rank 1: call" if guard.DEBUG else r"do not fit[\s\S]*raised on: rank 1 of"
    with pytest.raises(DIFFERS, match=said):
        x.rebalance(wrong if mesh.rank == 1 else (1.0,) * mesh.size)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    "call",
    [
        lambda x, odd: x.redistribute(placements=None if odd else [ms.Replicate()]),
        lambda x, odd: x.redistribute(placements=[ms.Shard(0)], forward_dtype=torch.half if odd else None),
        lambda x, odd: ms.halo_exchange(x, 1 if odd else {1: 1}),
        lambda x, odd: ms.full((3,), "a" if odd else 2, mesh=x.mesh),
        lambda x, odd: ms.arange("a" if odd else 5, mesh=x.mesh),
        lambda x, odd: ms.arange(0, 5, 0 if odd else 1, mesh=x.mesh),
    ],
    ids=["no placements", "another dtype", "no widths", "no number", "no range", "no step"],
)
def test_an_argument_that_is_wrong_on_one_rank_raises_on_all(call):
    mesh = ms.init_mesh((-1,))  # of its own: no call is known
    with pytest.raises(ms.MpishardError, match=r"raised on: rank 1 of"):
        call(shard(values(), mesh, (ms.Shard(1),)), mesh.rank == 1)


def test_rebalance_of_no_cells():
    mesh = mesh_of((-1,))
    empty = shard(values()[:, :0], mesh, (ms.Shard(1),))
    assert empty.rebalance(empty.sharding.sizes[1]).sharding == empty.sharding


@pytest.mark.ranks(2, 3, 4)
def test_an_argument_that_one_rank_has_wrong_is_everybodys_error():
    mesh = mesh_of((-1,))
    x = shard(values(), mesh, (ms.Shard(1),))
    odd = mesh.rank == 1
    for call in (
        lambda: x.redistribute((ms.Shard(5 if odd else 2),)),
        lambda: x.rebalance({1 + 4 * odd: skew(9, mesh.size)}),
        lambda: ms.halo_exchange(x, {1: -1 if odd else 1}),
        lambda: ms.halo_exchange(x, {1 + 4 * odd: 1}),
    ):
        with pytest.raises(DIFFERS, match=r"raised on: rank 1 of|rank 1: call"):
            call()


@pytest.mark.parametrize(
    "sizes", [{0: (1.9,)}, {0: 2}, {0: "ab"}, {0: None}, {"a": (1,)}, {0.0: (1,)}, {0: (1.0,)}], ids=repr
)
def test_sizes_that_are_no_integers(sizes):
    mesh = mesh_of((-1,))
    x = torch.ones(mesh.size)
    own = {d: s * mesh.size if isinstance(s, tuple) else s for d, s in sizes.items()}
    expected = {0: (1,) * mesh.size}
    for call in (
        lambda sizes: ms.distribute_tensor(x, mesh, [ms.Shard(0)], sizes=sizes),
        lambda sizes: ms.scatter_tensor(x, 0, mesh, [ms.Shard(0)], sizes=sizes),
        lambda sizes: ms.zeros(mesh.size, mesh=mesh, placements=[ms.Shard(0)], sizes=sizes),
    ):
        assert call(expected).sharding is call({0: np.ones(mesh.size, int)}).sharding
        if own != {0: None}:
            with pytest.raises(ms.LayoutError):
                call(own)
