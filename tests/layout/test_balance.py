"""Cuts that follow the costs of blocks, in one process for any number of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.errors import LayoutError
from mpishard.layout import balanced, bounds
from mpishard.layout.balance import CostDensity, moved_borders
from tests.layout import balance_by_loops

costs = st.lists(st.floats(0, 100, allow_subnormal=False), min_size=1, max_size=60)


def blocks_of(true, borders):
    return [float(np.sum(true[lo:hi])) for lo, hi in zip(borders, borders[1:])]


@given(costs, st.integers(1, 8), st.data())
def test_what_was_measured_is_what_is_expected(true, count, data):
    density = CostDensity(len(true))
    for _ in range(3):
        borders = bounds(
            tuple(
                np.bincount(
                    data.draw(st.lists(st.integers(0, count - 1), min_size=len(true), max_size=len(true))),
                    minlength=count,
                ).tolist()
            )
        )
        measured = blocks_of(true, borders)
        density.learn(borders, measured)
        assert all(c >= -1e-12 for c in density.costs(range(len(true) + 1)))
        if sum(measured):
            np.testing.assert_allclose(density.costs(borders), np.array(measured) / sum(measured), atol=1e-6)


@given(st.integers(1, 90), st.integers(1, 40), st.data())
def test_as_number_by_number(n, count, data):
    """Densities and borders are those of loops over blocks and borders."""
    density, loops = CostDensity(n), balance_by_loops.CostDensity(n)
    borders = bounds(balanced(n, count))
    how = {"relaxation": data.draw(st.sampled_from([0.8, 1.0])), "multiple": data.draw(st.integers(1, 3))}
    fits = n >= (count - 1) * how["multiple"] + 1
    for _ in range(5):
        measured = data.draw(st.lists(st.integers(1000, 1 << 20), min_size=count, max_size=count))
        density.learn(borders, measured)
        loops.learn(borders, measured)
        np.testing.assert_allclose(density.costs(borders), loops.costs(borders), rtol=1e-9, atol=1e-14)
        target = density.equal(count)
        # where cells cost nothing, rounding says where a border lies: their costs are compared
        upto = [np.interp(where, density._at, density._upto) for where in (target, loops.equal(count))]
        np.testing.assert_allclose(*upto, rtol=1e-9, atol=1e-14)
        if fits:
            moved = moved_borders(borders, target, **how)
            assert moved == balance_by_loops.moved_borders(borders, target.tolist(), **how)
        middle = st.lists(st.integers(0, n), min_size=count - 1, max_size=count - 1)
        borders = moved if fits and data.draw(st.booleans()) else (0, *sorted(data.draw(middle)), n)


@given(costs.filter(lambda c: sum(c) > 1e-3), st.integers(1, 8))
def test_equal_borders_cost_the_same(cells, count):
    density = CostDensity(len(cells))
    density.learn(range(len(cells) + 1), cells)
    borders = density.equal(count)
    assert len(borders) == count + 1
    assert (borders[0], borders[-1]) == (0, len(cells))
    upto = np.interp(borders, range(len(cells) + 1), np.concatenate([[0], np.cumsum(cells)]))
    np.testing.assert_allclose(np.diff(upto), sum(cells) / count, atol=1e-6)


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 6), st.integers(1, 9), st.floats(0.1, 1), st.data())
def test_borders_keep_what_blocks_need(n, count, min_cells, multiple, relaxation, data):
    target = [0, *sorted(data.draw(st.lists(st.floats(0, n), min_size=count - 1, max_size=count - 1))), n]
    width = -(-min_cells // multiple) * multiple
    how = {"relaxation": relaxation, "min_cells": min_cells, "multiple": multiple}
    if n < (count - 1) * width + min_cells:
        with pytest.raises(LayoutError, match="at least"):
            moved_borders(bounds(balanced(n, count)), target, **how)
        return
    borders = moved_borders(bounds(balanced(n, count)), target, **how)
    assert (borders[0], borders[-1]) == (0, n)
    assert min(np.diff(borders)) >= min_cells
    assert all(b % multiple == 0 for b in borders[:-1])


@given(st.integers(20, 200), st.integers(2, 6), st.data())
def test_borders_go_where_they_are_sent(n, count, data):
    target = [0, *sorted(data.draw(st.lists(st.floats(0, n), min_size=count - 1, max_size=count - 1))), n]
    if min(np.diff(target)) < 2:
        return
    borders = moved_borders(bounds(balanced(n, count)), target)
    assert max(abs(b - t) for b, t in zip(borders, target)) <= 0.5


CELLS = np.arange(240)
WORKLOADS = {
    "one rank": np.where(CELLS < 60, 4.0, 1.0),
    "a spot at the end": np.where(CELLS < 12, 20.0, 1.0),
    "a spot inside a block": np.where((CELLS >= 100) & (CELLS < 115), 15.0, 1.0),
    "a slope": 1.0 + CELLS / 20,
    "waves": 3 + 2.5 * np.sin(CELLS / 7),
    "a front": np.where(CELLS < 170, 0.2, 5.0),
}


@pytest.mark.parametrize("count", [2, 3, 4, 16])
@pytest.mark.parametrize("relaxation", [0.8, 1.0])
@pytest.mark.parametrize("name", WORKLOADS)
def test_costs_become_alike(name, relaxation, count):
    true = WORKLOADS[name]
    borders, density = bounds(balanced(len(true), count)), CostDensity(len(true))
    first = max(blocks_of(true, borders))
    for _ in range(10):
        density.learn(borders, blocks_of(true, borders))
        borders = moved_borders(borders, density.equal(count), relaxation=relaxation)
    ideal = sum(true) / count
    last = max(blocks_of(true, borders))
    # a block cannot be cut inside a cell
    assert last - ideal <= max([0.2 * (first - ideal), *true])
