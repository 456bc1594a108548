"""Segment tables against numpy, and the kernel's source, compiled for the host, against both."""

import ctypes
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpishard.comm.memory import copy_table
from mpishard.comm.memory.copy_table import Box, addresses, plan_table
from tests.emulated import launch

ITEMSIZES = (1, 2, 4, 8, 16)


@st.composite
def cases(draw):
    """An array of bytes, views of it with any strides, and where each lies packed."""
    itemsize = draw(st.sampled_from(ITEMSIZES))
    ndim = draw(st.integers(1, 6))
    shape = draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim))
    whole = np.arange(math.prod(shape) * itemsize, dtype=np.int64).astype(np.uint8).view(f"V{itemsize}").reshape(shape)
    whole = whole.transpose(draw(st.permutations(range(ndim))))
    views = []
    for _ in range(draw(st.integers(0, 3))):
        index = []
        for n in whole.shape:
            start = draw(st.integers(0, n))
            index.append(slice(start, draw(st.integers(start, n)), draw(st.sampled_from((1, 1, 2)))))
        turned = tuple(slice(None, None, draw(st.sampled_from((1, 1, -1)))) for _ in whole.shape)
        views.append(whole[tuple(index)][turned])
    return whole, views, draw(st.sampled_from((itemsize, 64)))


def boxes_of(whole, views, align):
    """Boxes with offsets from the array's first byte, and the packed bytes as numpy has them."""
    origin = whole.__array_interface__["data"][0]
    boxes, packed, at = [], b"", 0
    for view in views:
        offset = view.__array_interface__["data"][0] - origin
        boxes.append(Box(offset, view.shape, view.strides, whole.itemsize, at))
        packed = packed.ljust(at, b"\0") + view.tobytes()
        at = -(-len(packed) // align) * align
    return boxes, packed


@given(cases())
def test_every_unit_is_where_numpy_has_it(case):
    whole, views, align = case
    boxes, expected = boxes_of(whole, views, align)
    table = plan_table(boxes)
    origin = whole.__array_interface__["data"][0]
    memory = np.frombuffer((ctypes.c_uint8 * whole.nbytes).from_address(origin), np.uint8)
    out = np.zeros(len(expected), np.uint8)
    for source, packed in addresses(table):
        assert source % table.unit == packed % table.unit == 0
        out[packed : packed + table.unit] = memory[source : source + table.unit]
    assert out.tobytes() == expected


@given(cases())
def test_the_kernel_packs_and_unpacks_as_numpy_does(case):
    whole, views, align = case
    boxes, expected = boxes_of(whole, views, align)
    origin = whole.__array_interface__["data"][0]
    table = plan_table(boxes, alignment=origin & -origin)
    out = np.zeros(len(expected) + 32, np.uint8)
    shift = -out.ctypes.data % 16
    launch("pack", table, origin, out.ctypes.data + shift)
    assert out[shift : shift + len(expected)].tobytes() == expected
    # back to where it came from, over rubbish
    kept = whole.copy()
    for view in views:
        view[...] = np.zeros((), whole.dtype)
    launch("unpack", table, origin, out.ctypes.data + shift)
    assert whole.tobytes() == kept.tobytes()


@pytest.mark.parametrize("most", [1, 5, 64])
def test_segments_beyond_the_counters_are_cut(monkeypatch, most):
    monkeypatch.setattr(copy_table, "_MOST_UNITS", most)
    whole = np.arange(7 * 6 * 5, dtype=np.int32).reshape(7, 6, 5)
    view = whole[1:6, ::2, :]
    boxes, expected = boxes_of(whole, [view], 4)
    table = plan_table(boxes, alignment=4)
    assert max(s.units for s in table.segments) <= most
    out = np.zeros(len(expected), np.uint8)
    launch("pack", table, whole.ctypes.data, out.ctypes.data)
    assert out.tobytes() == expected


def test_runs_move_in_the_widest_units():
    assert plan_table([Box(0, (8, 64), (256, 4), 4, 0)]).unit == 16
    assert plan_table([Box(4, (8, 60), (256, 4), 4, 0)]).unit == 4
    assert plan_table([Box(0, (8, 2), (256, 4), 4, 0)]).unit == 8
    assert plan_table([Box(0, (8, 64), (256, 4), 4, 0)], alignment=8).unit == 8
    assert plan_table([Box(0, (64, 1), (256, 4), 4, 0)]).unit == 4
    # the narrowest of a launch serves all
    assert plan_table([Box(0, (16,), (4,), 4, 0), Box(64, (3,), (2,), 2, 64)]).unit == 2
