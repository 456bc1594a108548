"""Fields on a host's arrays: the same memory, its global shape, its ghost cells; for every way to hand one over."""

from __future__ import annotations

import array as python_array
import itertools
import math

import numpy as np
import pytest
import torch

import mpishard as ms
from tests.insitu.hosts import WORLD, Host, cut

SIZE = WORLD.size
GRIDS = [
    grid for ndim in (1, 2, 3) for grid in itertools.product(range(1, SIZE + 1), repeat=ndim) if math.prod(grid) == SIZE
]
EXTENTS = (11, 9, 7)


def check(host, sim, u, array):
    """Assert that a field is the host's memory, both ways, and that its exchange is right."""
    tensor = u.tensor
    assert tuple(tensor.shape) == host.shape
    np.testing.assert_array_equal(tensor.full_tensor().numpy(), host.whole)
    expected = host.exchanged(array)
    u.exchange()
    assert u.halo_valid
    np.testing.assert_array_equal(array, expected)
    tensor.add_(1)
    assert not u.halo_valid
    np.testing.assert_array_equal(array[host.interior], host.whole[host.box] + 1)
    array[host.interior] -= 1
    np.testing.assert_array_equal(tensor.to_local().numpy(), host.whole[host.box])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", ["uneven", "empty", "periodic", "fortran", "padded", "integers"])
def test_fields(grid, kind):
    ndim = len(grid)
    sizes = [cut(n, p, empty=kind == "empty") for n, p in zip(EXTENTS, grid)]
    widths = [(2, 1), (0, 3), (1, 1)][:ndim]
    periodic = [kind == "periodic"] * ndim
    host = Host(grid, sizes, widths, periodic, "int32" if kind == "integers" else "float64")
    array = host.array("F" if kind == "fortran" else "C", pad=3 if kind == "padded" else 0)
    with ms.insitu.adopt(host.cart, host.shape, widths, names=("x", "y", "z")[:ndim]) as sim:
        assert sim.mesh.shape == grid
        u = sim.field("u", array)
        check(host, sim, u, array)
        assert u.array.data_ptr() == array.ctypes.data
        other = host.array("F" if kind == "fortran" else "C", pad=3 if kind == "padded" else 0)
        u.rebind(other)
        check(host, sim, u, other)
    host.free()


def column_major(rank, grid):
    return tuple(int(c) for c in np.unravel_index(rank, grid, order="F"))


@pytest.mark.parametrize("way", ["cart", "plain", "column", "fortran", "c"])
def test_communicators(way):
    grid = (SIZE, 1)
    host = Host(grid, [cut(9, SIZE), (6,)], [(1, 1)] * 2)
    array = host.array()
    plain = WORLD.Dup()
    names = ("x", "y")
    if way == "cart":
        sim = ms.insitu.adopt(host.cart, host.shape, 1, names)
    elif way == "plain":
        sim = ms.insitu.adopt(plain, host.shape, 1, names, grid=grid, coords=host.coords)
    elif way == "column":
        # ranks in another order than row-major
        coords = column_major(SIZE - 1 - WORLD.rank, grid)
        host = Host(grid, host.sizes, host.widths)
        host.coords = coords
        host.starts = [sum(s[:c]) for s, c in zip(host.sizes, coords)]
        host.own = tuple(s[c] for s, c in zip(host.sizes, coords))
        host.interior = tuple(slice(1, 1 + n) for n in host.own)
        host.box = tuple(slice(a, a + n) for a, n in zip(host.starts, host.own))
        array = host.array()
        sim = ms.insitu.adopt(plain, host.shape, 1, names, grid=grid, coords=coords)
        assert sim.mesh.coords == coords
    elif way == "fortran":
        sim = ms.insitu.adopt(host.cart.py2f(), host.shape, 1, names)
    else:
        sim = ms.insitu.adopt(host.cart.handle, host.shape, 1, names, handle="c")
    check(host, sim, sim.field("u", array), array)
    sim.release()
    plain.Free()
    host.free()


def test_one_process_without_a_communicator():
    whole = np.random.default_rng(WORLD.rank).random((6, 5))
    array = np.pad(whole, 1)
    sim = ms.insitu.adopt(None, (6, 5), 1, ("x", "y"), periodic=True)
    u = sim.field("u", array)
    u.exchange()
    np.testing.assert_array_equal(array, np.pad(whole, 1, mode="wrap"))
    assert sim.mesh.size == 1
    sim.release()


class Interface:
    """An object that shows its memory by one protocol alone."""

    def __init__(self, name, array):
        if name == "__dlpack__":
            self.__dlpack__ = array.__dlpack__
            self.__dlpack_device__ = array.__dlpack_device__
        else:
            self.__array_interface__ = array.__array_interface__


class Celsius(np.ndarray):
    """A subclass, as of arrays with units."""


HANDED = {
    "torch": torch.from_numpy,
    "dlpack": lambda a: Interface("__dlpack__", a),
    "array interface": lambda a: Interface("__array_interface__", a),
    "address": lambda a: (a.ctypes.data, a.dtype, a.shape, a.strides),
    "dense address": lambda a: (a.ctypes.data, "f8", a.shape, None),
    "torch dtype": lambda a: (a.ctypes.data, torch.float64, a.shape, a.strides),
    "subclass": lambda a: a.view(Celsius),
    "buffer": memoryview,
}


@pytest.mark.parametrize("way", HANDED)
def test_arrays(way):
    host = Host((SIZE, 1), [cut(9, SIZE), (6,)], [(1, 1), (2, 0)])
    array = host.array()
    with ms.insitu.adopt(host.cart, host.shape, host.widths) as sim:
        u = sim.field("u", HANDED[way](array))
        check(host, sim, u, array)
    host.free()


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128", "int8", "bool", "uint8"])
def test_dtypes(dtype):
    host = Host((SIZE,), [cut(9, SIZE)], [(1, 2)], dtype=dtype)
    array = host.array()
    with ms.insitu.adopt(host.cart, host.shape, host.widths) as sim:
        u = sim.field("u", array)
        assert str(u.tensor.dtype) == f"torch.{dtype}"
        expected = host.exchanged(array)
        u.exchange()
        np.testing.assert_array_equal(array, expected)
    host.free()


def test_bfloat16_by_address():
    memory = torch.arange(8, dtype=torch.bfloat16)
    with ms.insitu.adopt(None, (6,), 1) as sim:
        u = sim.field("u", (memory.data_ptr(), torch.bfloat16, (8,), None))
        assert u.tensor.dtype == torch.bfloat16
        u.tensor.mul_(2)
    assert memory.tolist() == [0, 2, 4, 6, 8, 10, 12, 7]


def test_python_buffers():
    memory = python_array.array("d", range(6))
    with ms.insitu.adopt(None, (4,), 1) as sim:
        sim.field("u", memory).tensor.neg_()
    assert memory.tolist() == [0, -1, -2, -3, -4, 5]


@pytest.mark.parametrize("order", ["before", "after", "both", "swapped"])
def test_other_dims(order):
    host = Host((SIZE, 1), [cut(9, SIZE), (6,)], [(1, 1), (2, 1)])
    block = host.array()
    dims = {"before": (None, 0, 1), "after": (0, 1, None), "both": (None, 0, 1, None), "swapped": ("y", None, "x")}[
        order
    ]
    with ms.insitu.adopt(host.cart, host.shape, host.widths, names=("x", "y")) as sim:
        if order == "swapped":
            array = np.ascontiguousarray(np.stack([block.T, 2 * block.T], 1))
            cells = [array[:, k, :].T for k in range(2)]
        else:
            shape = [n if (n := {0: block.shape[0], 1: block.shape[1]}.get(d)) else 2 for d in dims]
            array = np.zeros(shape)
            levels = [array[tuple(slice(None) if d is not None else k for d in dims)] for k in range(2)]
            for k, level in enumerate(levels):
                level[...] = (k + 1) * block
            cells = levels
        u = sim.field("u", array, dims=dims)
        expected = host.exchanged(block)
        u.exchange()
        np.testing.assert_array_equal(cells[0], expected)
        whole = u.tensor.full_tensor()
        sharded = [d for d, m in enumerate(dims) if m is not None]
        assert [whole.shape[d] for d in sharded] == [
            host.shape[("x", "y").index(m) if m in ("x", "y") else m] for m in dims if m is not None
        ]
        assert u.tensor.placements == tuple(
            ms.Shard(list(dims).index(m)) for m in (("x", "y") if order == "swapped" else (0, 1))
        )
    host.free()


def test_ghosts_only_inside_and_only_outside():
    sizes = [cut(9, SIZE), (6,)]
    last = SIZE - 1
    for inside in (True, False):
        at = WORLD.rank
        x = (2 if (at > 0) == inside else 0, 1 if (at < last) == inside else 0)
        host = Host((SIZE, 1), sizes, [x, (1, 0)])
        array = host.array()
        with ms.insitu.adopt(host.cart, host.shape, host.widths) as sim:
            check(host, sim, sim.field("u", array), array)
        host.free()


def test_names_are_no_periodic_flags():
    with pytest.raises(ms.MeshError, match="adopt: periodic does not fit"):
        ms.insitu.adopt(None, (6, 5), 1, ("x", "y"), periodic=("x", "y"))


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("shared", [True, False])
def test_faces(periodic, shared):
    """A face between two ranks is owned by the rank above; arrays may hold it on both, or on the owner alone."""
    cells, at = cut(9, SIZE), WORLD.rank
    last = at == SIZE - 1 and not periodic
    n = cells[at]
    start = sum(cells[:at])
    faces = np.random.default_rng(5).random(9 if periodic else 10)
    array = np.full(n + 3 + (shared or last), -1.0)
    owned = faces[start : start + n + last]
    array[1 : 1 + len(owned)] = owned
    with ms.insitu.adopt(WORLD, (9,), (1, 2), ("x",), grid=(SIZE,), periodic=periodic, sizes=(n,)) as sim:
        u = sim.field("u", array, location="x")
        assert tuple(u.tensor.shape) == faces.shape
        assert u.tensor.to_local().shape == owned.shape
        np.testing.assert_array_equal(u.tensor.full_tensor().numpy(), faces)
        u.exchange()
        index = np.arange(start - 1, start - 1 + len(array))
        there = np.ones(len(index), bool) if periodic else (index >= 0) & (index < len(faces))
        np.testing.assert_array_equal(array[there], faces[index[there] % len(faces)])
        assert (array[~there] == -1).all()
        # cells beside them
        c = sim.field("c", np.zeros(n + 3))
        assert tuple(c.tensor.shape) == (9,)


def test_read_only_fields():
    host = Host((SIZE,), [cut(9, SIZE)], [(1, 1)])
    array = host.array()
    array.flags.writeable = False
    with ms.insitu.adopt(host.cart, host.shape, 1) as sim:
        with pytest.raises(ms.UnsupportedOperationError, match="read-only"):
            sim.field("u", array)
        u = sim.field("u", array, writable=False)
        np.testing.assert_array_equal(u.tensor.full_tensor().numpy(), host.whole)
        with pytest.raises(ms.UnsupportedOperationError, match="writable"):
            u.exchange()
        with pytest.raises(ms.UnsupportedOperationError):
            u.tensor.add_(1)
        with pytest.raises(ms.UnsupportedOperationError, match="writable"):
            sim.hook(lambda: None, [], ["u"])
        # a model may read it
        assert u.tensor.sum().item() == host.whole.sum()
    host.free()


def test_fields_alike():
    """A field like one before costs one reduction; not where another rank's is not, or has another name."""
    host = Host((SIZE, 1), [cut(9, SIZE), (6,)], [(1, 1), (2, 0)])
    with ms.insitu.adopt(host.cart, host.shape, host.widths) as sim:
        sim.field("a", host.array())
        sim.field("b", host.array("F"))
        for name, order in (("c", "C"), ("d", "F")):
            array = host.array(order)
            u = sim.field(name, array)
            check(host, sim, u, array)
            assert sim.fields[name] is u
            assert u.array.data_ptr() == array.ctypes.data
        # one rank's array is laid out otherwise: found out as for a new one
        array = host.array("F" if WORLD.rank == SIZE - 1 else "C")
        check(host, sim, sim.field("e", array), array)
        with pytest.raises(ms.LayoutError, match="used twice"):
            sim.field("c", host.array())
        if SIZE > 1:
            with pytest.raises(ms.DesyncError):
                sim.field("f" if WORLD.rank else "g", host.array())
            with pytest.raises(ms.MpishardError, match="'h'"):
                sim.field("h", host.array() if WORLD.rank else host.array().astype(object))
        released = sim.field("i", host.array())
    with pytest.raises(ms.UnsupportedOperationError, match="'i' was released"):
        _ = released.tensor
    host.free()
