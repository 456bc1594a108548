from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpishard.layout.slab import slabs


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=4), st.integers(1, 40))
def test_slabs_cover_the_box_once_in_row_major_order(box, cells):
    box = [(lo, lo + n) for lo, n in box]
    shape = [hi for _, hi in box]
    index = np.arange(math.prod(shape)).reshape(shape)
    whole = index[tuple(slice(lo, hi) for lo, hi in box)].ravel()
    parts = [index[tuple(slice(lo, hi) for lo, hi in slab)].ravel() for slab in slabs(box, cells)]
    assert all(0 < part.size <= cells for part in parts)
    assert np.array_equal(np.concatenate([*parts, whole[:0]]), whole)
