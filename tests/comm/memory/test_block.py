"""Strided copies against numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.comm.memory.block import Block, copy_views

pytestmark = pytest.mark.ranks(1)


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
