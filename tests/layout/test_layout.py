"""Layouts: the blocks of all ranks are the tensor, once per copy."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.errors import LayoutError
from mpishard.layout import Partial, Replicate, Shard, balanced, layout_of
from tests.layout.strategies import cuts, layouts


@given(layouts(partial=True))
def test_blocks_tile_the_tensor_once_per_copy(layout):
    seen = np.zeros(layout.shape, int)
    for coords in product(*map(range, layout.mesh_shape)):
        box = layout.box(coords)
        seen[tuple(slice(lo, hi) for lo, hi in box)] += 1
        assert layout.local_shape(coords) == tuple(hi - lo for lo, hi in box)
        assert layout.offset(coords) == tuple(lo for lo, _ in box)
        assert box == tuple(layout.interval(d, coords) for d in range(layout.ndim))
    copies = math.prod(s for s, p in zip(layout.mesh_shape, layout.placements) if type(p) is not Shard)
    assert (seen == copies).all()


@given(layouts(partial=True))
def test_what_a_layout_says_of_itself(layout):
    for d, (n, sizes) in enumerate(zip(layout.shape, layout.sizes)):
        mesh_dims = tuple(m for m, p in enumerate(layout.placements) if p == Shard(d))
        assert layout.shard_dims.get(d, ()) == mesh_dims
        assert (sizes is None) == (not mesh_dims)
        if sizes is not None:
            assert sum(sizes) == n
            assert len(sizes) == math.prod(layout.mesh_shape[m] for m in mesh_dims)
        # blocks follow each other in the row-major order of their mesh dims
        position = {c: i for i, c in enumerate(product(*(range(layout.mesh_shape[m]) for m in mesh_dims)))}
        for coords in product(*map(range, layout.mesh_shape)):
            assert layout.index(d, coords) == position[tuple(coords[m] for m in mesh_dims)]
    assert layout.sharded_mesh_dims == tuple(m for m, p in enumerate(layout.placements) if isinstance(p, Shard))
    assert layout.partial_dims == tuple(m for m, p in enumerate(layout.placements) if isinstance(p, Partial))
    assert layout.is_replicated == all(isinstance(p, Replicate) for p in layout.placements)


@given(layouts(partial=True), layouts(partial=True))
def test_equal_layouts_are_one_object(a, b):
    for x in (a, b):
        again = layout_of(list(x.mesh_shape), list(x.placements), list(x.shape), list(x.sizes))
        assert again is x
        by_dim = {d: s for d, s in enumerate(x.sizes) if s is not None}
        assert layout_of(x.mesh_shape, x.placements, x.shape, by_dim) is x
    assert (a == b) == (a is b) == (repr(a) == repr(b))
    assert a != b or hash(a) == hash(b)
    assert a != "layout"


@given(layouts(), st.data())
def test_other_placements_keep_the_cuts_they_share(layout, data):
    kinds = st.one_of(st.integers(0, layout.ndim - 1).map(Shard), st.just(Replicate()))
    placements = tuple(data.draw(kinds) for _ in layout.mesh_shape)
    other = layout.with_placements(placements)
    assert (other.shape, other.mesh_shape, other.placements) == (layout.shape, layout.mesh_shape, placements)
    for d, mesh_dims in other.shard_dims.items():
        kept = layout.shard_dims.get(d) == mesh_dims
        assert other.sizes[d] == (layout.sizes[d] if kept else balanced(layout.shape[d], len(other.sizes[d])))
    assert layout.with_placements(layout.placements) is layout


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4))
def test_two_mesh_dims_on_one_tensor_dim(n, p, q):
    layout = layout_of((p, q), (Shard(0), Shard(0)), (n,))
    assert layout.sizes == (balanced(n, p * q),)
    assert layout.index(0, (p - 1, q - 1)) == p * q - 1


@pytest.mark.parametrize(
    "sizes", [(4, 4), (4, 4, 4), (5, -1, 6), (10,), ()], ids=["few", "sum", "negative", "one", "none"]
)
def test_block_sizes_that_do_not_fit(sizes):
    with pytest.raises(LayoutError, match="block sizes of dim 1") as info:
        layout_of((3,), (Shard(1),), (2, 10), {1: sizes})
    assert "3 sizes >= 0 with sum 10" in str(info.value)


@given(cuts(3))
def test_block_sizes_that_fit(sizes):
    layout = layout_of((3,), (Shard(1),), (2, sum(sizes)), {1: sizes})
    assert [layout.local_shape((i,)) for i in range(3)] == [(2, s) for s in sizes]


def test_sizes_of_dims_counted_from_the_end():
    layout = layout_of((3,), (Shard(1),), (2, 10), {-1: (5, 0, 5), 0: (2,)})
    assert layout.sizes == (None, (5, 0, 5))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({2: (5, 0, 5)}, "no such dim"),
        ({-3: (5, 0, 5)}, "no such dim"),
        ({"x": (5, 0, 5)}, "no such dim"),
        ({1: (5, 0, 5), -1: (5, 0, 5)}, "named twice"),
        ({0: (1, 1)}, "dim 0, which is not sharded"),
    ],
)
def test_sizes_that_say_nothing_are_refused(sizes, says):
    with pytest.raises(LayoutError, match=says):
        layout_of((3,), (Shard(1),), (2, 10), sizes)


def test_a_layout_is_frozen_and_can_be_copied():
    layout = layout_of((3,), (Shard(1),), (2, 10))
    for name in ("shape", "sizes", "other"):
        with pytest.raises(AttributeError, match="shared"):
            setattr(layout, name, (1,))
    assert layout.shape == (2, 10)
    assert pickle.loads(pickle.dumps(layout)) is copy.deepcopy(layout) is layout
