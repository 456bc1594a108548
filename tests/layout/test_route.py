"""Routes on meshes of any size: every dim is whole when it is worked on, and the way is as short as it can be."""

from __future__ import annotations

import itertools

import pytest

from mpishard.layout import Replicate, Shard, Trip, cut_elsewhere, layout_of, plan_route


def route(mesh_shape, placements, shape, dims, after=None, sizes=None, **order):
    source = layout_of(mesh_shape, placements, shape, sizes)
    target = layout_of(mesh_shape, placements, after or shape, None if after else source.sizes)
    return plan_route(Trip(source, target, dims, **order))


@pytest.mark.parametrize("mesh_shape", [(1,), (5,), (3, 2), (1, 4), (2, 2, 3)])
@pytest.mark.parametrize("order", [{}, {"first": 2}, {"last": 2}])
def test_every_dim_is_whole_once(mesh_shape, order):
    shape, after = (2, 7, 12, 9), (2, 7, 6, 11)
    for placements in itertools.product([Replicate(), *map(Shard, range(4))], repeat=len(mesh_shape)):
        legs = route(mesh_shape, placements, shape, (1, 3, 2), after, **order)
        worked = [d for leg in legs for d in leg.dims]
        assert sorted(worked) == [1, 2, 3]
        assert "first" not in order or 2 in next(leg.dims for leg in legs if leg.dims)
        assert "last" not in order or 2 in legs[-1].dims
        now = shape
        for leg in legs:
            assert leg.before.shape == now
            now = tuple(after[d] if d in leg.dims else n for d, n in enumerate(now))
            assert leg.after.shape == now
            assert leg.after.placements == leg.before.placements
            for d in leg.dims:
                assert len(leg.before.sizes[d] or (1,)) == 1
        assert now == after
        # a mesh dim that shards none of the dims keeps its placement
        for m, p in enumerate(placements):
            if p in (Replicate(), Shard(0)):
                assert all(leg.before.placements[m] == p for leg in legs)


def test_one_mesh_dim_takes_one_exchange():
    legs = route((4,), (Shard(0),), (64, 64), (0, 1))
    assert [leg.dims for leg in legs] == [(1,), (0,)]
    assert legs[1].before.placements == (Shard(1),)


def test_the_longest_free_dim_is_cut():
    legs = route((4,), (Shard(2),), (2, 32, 64), (2,))
    assert legs[-1].before.placements == (Shard(1),)


def test_two_mesh_dims_swap_together_or_one_after_the_other():
    together = route((4, 4), (Shard(0), Shard(1)), (64, 64, 64), (0, 1, 2))
    assert [leg.dims for leg in together] == [(2,), (0, 1)]
    # 64 x 64 ranks: no dim is as long as both mesh dims together
    apart = route((64, 64), (Shard(0), Shard(1)), (256, 256, 256), (0, 1, 2))
    assert len([leg for leg in apart if leg.dims]) == 3


def test_gathered_only_where_nothing_else_can_be_cut():
    (*_, last) = route((4,), (Shard(1),), (1, 64), (1,))
    assert last.before.placements == (Replicate(),)
    (*_, last) = route((4,), (Shard(1),), (2, 64), (1,))
    assert last.before.placements == (Shard(0),)


def test_block_sizes_are_kept_where_a_dim_keeps_its_mesh_dims():
    legs = route((2, 2), (Shard(0), Shard(1)), (9, 8, 16), (1,), sizes={0: (7, 2), 1: (0, 8)})
    assert all(leg.before.sizes[0] == (7, 2) for leg in legs)
    assert legs[0].before.sizes[1] == (0, 8)


def test_a_result_stays_where_it_is_cut_as_evenly():
    *_, last = route((4,), (Shard(2),), (1, 32, 64, 64), (2, 3), returns=False)
    assert last.after.placements == (Shard(3),)
    assert last.dims == (2,)
    # channels are not left cut; five modes are less even than 16 rows
    for shape, dims in (((1, 32, 64), (2,)), ((1, 32, 16, 5), (2, 3))):
        source = layout_of((4,), (Shard(2),), shape)
        *_, last = plan_route(Trip(source, source, dims, returns=False))
        assert last.after is source


@pytest.mark.parametrize("mesh_shape", [(1,), (5,), (3, 2), (1, 4), (2, 2, 3)])
def test_dims_are_whole_at_once_and_others_cut(mesh_shape):
    shape = (2, 7, 12, 9)
    for placements in itertools.product([Replicate(), *map(Shard, range(4))], repeat=len(mesh_shape)):
        source = layout_of(mesh_shape, placements, shape)
        for dims in ((1,), (1, 3), (3, 0), (0, 1, 2, 3)):
            there = cut_elsewhere(source, dims)
            assert not set(dims) & {d for d, sizes in enumerate(there.sizes) if sizes and len(sizes) > 1}
            # what shards none of them stays
            stay = [m for m, p in enumerate(placements) if type(p) is not Shard or p.dim not in dims]
            assert all(there.placements[m] == placements[m] for m in stay)
            assert there.shape == shape


def test_the_dim_that_leaves_the_smallest_blocks_is_cut():
    def there(mesh_shape, placements, shape, dims):
        return cut_elsewhere(layout_of(mesh_shape, placements, shape), dims).placements

    assert there((4,), (Shard(0),), (100, 3, 8), (0,)) == (Shard(2),)
    # two of them in turn, the longer one first
    assert there((4, 4), (Shard(0), Shard(0)), (100, 4, 8), (0,)) == (Shard(2), Shard(1))
    assert there((4,), (Shard(0),), (100, 1), (0,)) == (Replicate(),)
    assert there((4,), (Shard(0),), (100, 8), (0, 1)) == (Replicate(),)
    assert there((100,), (Shard(0),), (100, 2), (0,)) == (Shard(1),)
