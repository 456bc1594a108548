"""Who holds which cells: against what every rank's box says."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.layout import Replicate, Shard, as_block_sizes, blocks_of, holders, layout_of, spans_of
from mpishard.layout.partition import rank_of


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.sampled_from((1, 3, 40)))
def test_blocks_of(sizes, times):
    """However sizes are kept: few one by one, many as runs."""
    sizes = [s for s in sizes for _ in range(times)]
    expected = [block for block, size in enumerate(sizes) for _ in range(size)]
    assert blocks_of(as_block_sizes(sizes), np.arange(sum(sizes))).tolist() == expected


LAYOUTS = [
    layout_of((2, 3), (Shard(0), Shard(1)), (5, 4)),
    layout_of((2, 3), (Shard(1), Shard(0)), (5, 4), {0: (2, 0, 3)}),
    layout_of((2, 3), (Shard(1), Shard(1)), (2, 9)),
    layout_of((2, 3), (Replicate(), Shard(0)), (7, 2)),
    layout_of((3, 2, 2), (Shard(0), Replicate(), Shard(0)), (40, 2)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_holders(layout):
    """The rank whose block has a cell, among those that agree with this one in what shards neither dim."""
    indices = np.unravel_index(np.arange(np.prod(layout.shape)), layout.shape)
    for coords in product(*map(range, layout.mesh_shape)):
        ranks = holders(layout, (0, 1), indices, coords)
        for cell, rank in zip(zip(*indices), ranks.tolist()):
            found = [
                rank_of(other, layout.mesh_shape)
                for other in product(*map(range, layout.mesh_shape))
                if all(lo <= i < hi for i, (lo, hi) in zip(cell, layout.box(other)))
                and all(other[m] == coords[m] for m, p in enumerate(layout.placements) if p == Replicate())
            ]
            assert [rank] == found


@given(st.lists(st.integers(0, 6)))
def test_spans(ranks):
    ranks = sorted(ranks)
    told = [(rank, cell) for rank, (lo, hi) in spans_of(np.array(ranks, np.int64)) for cell in range(lo, hi)]
    assert told == [(rank, cell) for cell, rank in enumerate(ranks)]
    assert len(spans_of(np.array(ranks, np.int64))) == len(set(ranks))
