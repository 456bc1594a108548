"""Halos planned from the positions near a block, against those planned from the windows of all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.layout import bounds, halo, interval_runs, plan_halo, plan_stage
from mpishard.layout.stage import MODES
from tests.layout.strategies import cuts


def compared(sizes, los, his, mode):
    borders = bounds(sizes)
    ends = [(borders[i] - los[i], borders[i + 1] + his[i]) for i in range(len(sizes))]
    windows = [interval_runs(borders[-1], a, b, mode) for a, b in ends]
    for i in range(len(sizes)):
        found = plan_halo(3, (1,), sizes, los, his, mode, i)
        assert found == plan_stage(3, (1,), sizes, windows, [b - a for a, b in ends], i)


@given(
    st.integers(1, 8).flatmap(
        lambda p: st.tuples(cuts(p, 5), *[st.lists(st.integers(0, 12), min_size=p, max_size=p)] * 2)
    ),
    st.sampled_from(sorted(MODES)),
)
def test_the_same_as_from_all_windows(drawn, mode):
    compared(*drawn, mode)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_all_that_is_small(mode):
    """Halos of one side only, and empty blocks at the edges, are rare among drawn cases."""
    for sizes in itertools.product(range(3), repeat=3):
        for lo, hi in itertools.product(range(4), repeat=2):
            compared(sizes, (lo,) * 3, (hi,) * 3, mode)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_windows_far_away_are_not_looked_at(monkeypatch, mode):
    looked = []

    def counted(n, lo, hi, mode):
        looked.append((lo, hi))
        return interval_runs(n, lo, hi, mode)

    monkeypatch.setattr(halo, "interval_runs", counted)
    for index in (0, 1, 500, 999):
        looked.clear()
        plan_halo(0, (0,), (4,) * 1000, 1, 2, mode, index)
        assert len(looked) <= 5  # two neighbours, itself, and the two at the edges
