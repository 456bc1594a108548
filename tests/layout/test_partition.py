"""The one rule by which a dim is cut, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.errors import LayoutError
from mpishard.layout import balanced, bounds, owner, sizes_of, weighted

sizes = st.lists(st.integers(0, 6), min_size=1, max_size=8).map(tuple)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_balanced_is_even_and_descending(n, count):
    cut = balanced(n, count)
    assert len(cut) == count
    assert sum(cut) == n
    assert max(cut) - min(cut) <= 1
    assert list(cut) == sorted(cut, reverse=True)
    assert cut == tuple(len(part) for part in np.array_split(np.empty(n), count))


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 16))
def test_borders_lie_on_multiples(n, count, multiple):
    cut = balanced(n, count, multiple)
    assert len(cut) == count
    assert sum(cut) == n
    assert all(size % multiple == 0 for size in cut[:-1])
    assert max(cut) - min(cut) < 2 * multiple


@given(sizes)
def test_bounds_and_sizes_are_inverse(cut):
    borders = bounds(cut)
    assert borders == (0, *np.cumsum(cut))
    assert sizes_of(borders) == cut


@given(sizes)
def test_owner_is_the_block_that_holds_the_cell(cut):
    who = np.repeat(np.arange(len(cut)), cut)
    assert [owner(bounds(cut), cell) for cell in range(sum(cut))] == list(who)


weights = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=12).filter(lambda w: sum(w) > 1e-6)


@given(st.integers(0, 10**6), weights.map(tuple))
def test_weighted_is_within_one_cell_of_exact(n, w):
    cut = weighted(n, w)
    assert sum(cut) == n
    assert len(cut) == len(w)
    for size, exact in zip(cut, n * np.array(w) / sum(w)):
        assert size >= 0
        assert abs(size - exact) < 1 + 1e-6


@given(st.integers(0, 1000), st.integers(1, 12), st.floats(0.1, 100))
def test_equal_weights_are_balanced(n, count, w):
    assert weighted(n, (w,) * count) == balanced(n, count)


def test_no_weight_gets_no_cells():
    assert weighted(10, (0.0, 1.0, 0.0, 3.0)) == (0, 3, 0, 7) or weighted(10, (0.0, 1.0, 0.0, 3.0)) == (0, 2, 0, 8)


@pytest.mark.parametrize("multiple", [0, -8, 1.5, "a", None])
def test_multiples_that_are_none(multiple):
    with pytest.raises(LayoutError, match="an integer >= 1"):
        balanced(10, 2, multiple)
