"""Hilbert's curve goes through every cell once, from each to one beside it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpishard.layout.curve import along_curve, bits_of


@pytest.mark.parametrize(("ndim", "bits"), [(1, 5), (2, 1), (2, 4), (3, 1), (3, 3), (4, 2), (5, 1)])
def test_from_cell_to_cell_beside(ndim, bits):
    cells = np.array(list(itertools.product(range(1 << bits), repeat=ndim)))
    places = along_curve(cells, bits)
    assert sorted(places.tolist()) == list(range(len(cells)))
    steps = np.abs(np.diff(cells[np.argsort(places)], axis=0)).sum(1)
    assert (steps == 1).all()


@pytest.mark.parametrize("ndim", range(1, 9))
def test_places_fit_a_number(ndim):
    bits = bits_of(ndim)
    ends = np.array(list(itertools.product((0, (1 << bits) - 1), repeat=ndim)))
    places = along_curve(ends, bits)
    assert places.min() == 0
    assert places.max() < 1 << 62
    assert len(set(places.tolist())) == len(ends)
