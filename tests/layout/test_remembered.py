"""Layouts that values say, as of a mask on thousands of ranks, are forgotten."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import mpishard as ms
from mpishard.layout import Layout, bounds, layout_of, remembered


@pytest.fixture
def drawn(monkeypatch):
    """Return what makes layouts of 1,000 ranks, each with other counts, and have room for ten of them."""
    monkeypatch.setattr(remembered, "ROOM", 10_000)
    generator = np.random.default_rng(0)

    def make():
        counts = generator.integers(0, 1000, 1000).tolist()
        return layout_of((1000,), (ms.Shard(0),), (sum(counts), 3), [counts, None])

    return make


def test_layouts_that_nobody_holds_go(drawn):
    for _ in range(25):
        drawn()
    held = [x for x in gc.get_objects() if type(x) is Layout and x.mesh_shape == (1000,)]
    assert 0 < len(held) <= 10


def test_what_is_made_again_is_the_same(drawn):
    first = drawn()
    swapped, ends = first.with_placements((ms.Shard(1),)), bounds(first.sizes[0])
    for _ in range(25):
        drawn()
    again = layout_of((1000,), (ms.Shard(0),), first.shape, first.sizes)
    assert again == first
    assert hash(again) == hash(first)
    assert again.with_placements((ms.Shard(1),)) == swapped
    assert bounds(again.sizes[0]) == ends


def test_a_few_ranks_and_even_cuts_are_kept(monkeypatch):
    monkeypatch.setattr(remembered, "ROOM", 10)
    even = layout_of((100_000,), (ms.Shard(0),), (400_003,))
    few = layout_of((4,), (ms.Shard(0),), (20,), [(3, 9, 1, 7)])
    assert layout_of((100_000,), (ms.Shard(0),), (400_003,)) is even
    assert layout_of((4,), (ms.Shard(0),), (20,), [(3, 9, 1, 7)]) is few


def test_a_table_goes_with_the_rest(drawn):
    kept = remembered.table()
    kept["a"] = drawn()
    for _ in range(11):
        drawn()
    assert not kept
