"""Halo strips against the window planner, and strided copies against numpy's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.comm.memory.block import Block, copy_views
from mpishard.layout.halo import plan_strips
from mpishard.layout.partition import bounds
from mpishard.layout.stage import interval_runs, plan_stage

pytestmark = pytest.mark.ranks(1)


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    lo=st.integers(0, 9),
    hi=st.integers(0, 9),
    periodic=st.booleans(),
)
def test_strips_agree_with_the_window_planner(sizes, lo, hi, periodic):
    borders = bounds(tuple(sizes))
    mode = "circular" if periodic else "zeros"
    windows = [interval_runs(borders[-1], borders[i] - lo, borders[i + 1] + hi, mode) for i in range(len(sizes))]
    n_outs = [n + lo + hi for n in sizes]
    for i, n in enumerate(sizes):
        stage = plan_stage(0, (0,), sizes, windows, n_outs, i)
        strips = plan_strips(sizes, lo, hi, periodic, i)

        def cells(found, base):
            return sorted((peer, at + k - base) for peer, at, count in found for k in range(count))

        recvs = [(s.peer, s.at, s.count) for s in strips.recvs]
        assert cells(recvs, 0) == cells([(p, x.dst, x.count) for p, pieces in stage.recvs for x in pieces], 0)
        sends = [(s.peer, s.at, s.count) for s in strips.sends]
        assert cells(sends, lo) == cells([(p, x.src, x.count) for p, pieces in stage.sends for x in pieces], 0)
        own = {(x.src + k, x.dst + k) for x in stage.local for k in range(x.count)}
        if stage.resident is not None:
            own |= {(k, stage.resident + k) for k in range(n)}
        own -= {(k, lo + k) for k in range(n)}  # the interior itself stays where it is
        assert {(src + k - lo, dst + k) for src, dst, count in strips.local for k in range(count)} == own


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    lo=st.integers(0, 7),
    hi=st.integers(0, 7),
    periodic=st.booleans(),
)
def test_both_ends_list_the_same_messages(sizes, lo, hi, periodic):
    plans = [plan_strips(sizes, lo, hi, periodic, i) for i in range(len(sizes))]
    for a, b in itertools.permutations(range(len(sizes)), 2):
        for side in (0, 1):
            sent = [s.count for s in plans[a].sends if (s.peer, s.side) == (b, side)]
            received = [s.count for s in plans[b].recvs if (s.peer, s.side) == (a, side)]
            assert sent == received


def block_of(array: np.ndarray) -> Block:
    return Block(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)


BOXES = [
    ((0, 6), (0, 7), (0, 8)),
    ((1, 5), (2, 6), (0, 2)),
    ((1, 5), (0, 1), (0, 8)),
    ((2, 3), (0, 7), (3, 4)),
    ((0, 0), (0, 7), (3, 4)),
]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16", "V12"])
@pytest.mark.parametrize("layout", ["C", "F", "strided", "negative", "permuted"])
def test_copies_in_any_layout(box, dtype, layout):
    def array(seed):
        cells = np.random.default_rng(seed).integers(0, 256, (12, 14, 16 * np.dtype(dtype).itemsize), np.uint8)
        base = cells.view(dtype)
        if layout == "F":
            return np.asfortranarray(base[:6, :7, :8])
        if layout == "strided":
            return base[::2, ::2, ::2]
        if layout == "negative":
            return base[5::-1, :7, 7::-1]
        if layout == "permuted":
            return np.ascontiguousarray(base[:6, :7, :8].transpose(1, 2, 0)).transpose(2, 0, 1)
        return np.ascontiguousarray(base[:6, :7, :8])

    source, target = array(0), array(1)
    expected = target.copy()
    cells = tuple(slice(*r) for r in box)
    expected[cells] = source[cells]
    dst, src = block_of(target).box(box), block_of(source).box(box)
    packed = np.empty(dst.nbytes, np.uint8)
    np.copyto(*copy_views(dst.dense(packed.ctypes.data), src))
    assert packed.tobytes() == source[cells].tobytes()
    np.copyto(*copy_views(dst, dst.dense(packed.ctypes.data)))
    assert target.tobytes() == expected.tobytes()


def test_short_runs_are_copied_as_one_element():
    array = np.zeros((66, 66, 66), np.float32)
    block = block_of(array)
    dst, src = copy_views(block.box(((1, 65), (1, 65), (0, 2))), block.box(((1, 65), (1, 65), (62, 64))))
    assert dst.shape == src.shape == (64, 64)
    assert dst.itemsize == 8


def test_whole_slabs_are_dense():
    block = block_of(np.zeros((6, 7, 8)))
    assert block.box(((2, 4), (0, 7), (0, 8))).is_dense
    assert block.box(((2, 3), (1, 2), (0, 8))).is_dense
    assert not block.box(((2, 4), (0, 6), (0, 8))).is_dense
    assert not block_of(np.zeros((6, 7), order="F")).is_dense
