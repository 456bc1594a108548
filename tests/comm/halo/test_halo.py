"""HaloExchanger against a numpy reference cut from the whole field, on every mesh that the ranks allow."""

from __future__ import annotations

import gc
import itertools
import math
import weakref

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpishard.comm import lifetime
from mpishard.comm.counter import comm_counter
from mpishard.comm.halo.exchanger import HaloExchanger
from mpishard.comm.mesh import init_mesh
from mpishard.errors import MpishardError, UnsupportedDtypeError

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
SHAPES = [
    shape
    for ndim in (1, 2, 3)
    for shape in itertools.product(range(1, SIZE + 1), repeat=ndim)
    if math.prod(shape) == SIZE
]
DTYPES = ["bool", "int8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


@pytest.fixture
def make_mesh():
    meshes = []

    def make(shape, periodic=False):
        meshes.append(init_mesh(shape, periodic=periodic))
        return meshes[-1]

    yield make
    for mesh in meshes:
        mesh.free()


class Case:
    """A global field, this rank's ghosted block of it, and what the block must be after the exchange.

    Every cell that is not owned holds noise of this rank before, so that "untouched" is checked as well.
    """

    def __init__(self, mesh, sizes, widths, dims=None, extra=()):
        self.mesh, self.widths = mesh, widths
        self.dims = {d: d for d in range(min(len(widths), mesh.ndim))} if dims is None else dims
        self.sizes = sizes  # per array dim: interior extents along its mesh dim, or one extent
        self.at = [mesh.coords[self.dims[d]] if d in self.dims else 0 for d in range(len(widths))]
        self.extents = [sum(s) for s in sizes]
        self.starts = [sum(s[:c]) for s, c in zip(sizes, self.at, strict=True)]
        self.interior = [s[c] for s, c in zip(sizes, self.at, strict=True)]
        self.shape = tuple(n + lo + hi for n, (lo, hi) in zip(self.interior, widths, strict=True))
        self.noise = np.random.default_rng(1000 + mesh.rank)

    def exchanger(self, dtype, **options):
        return HaloExchanger(self.mesh, self.shape, self.widths, dtype, dims=self.dims, **options)

    def field(self, dtype, seed=0, order="C", backend="numpy"):
        """Return (field as the exchanger gets it, its cells as bytes to look at, what they must become)."""
        torch_dtype = getattr(torch, dtype)
        cells = torch.empty(0, dtype=torch_dtype).element_size()
        plain = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}[cells]
        rng = np.random.default_rng(seed)
        whole = random_cells(rng, self.extents, plain, dtype)
        expected = random_cells(self.noise, self.shape, plain, dtype)
        initial = expected.copy()
        owned = tuple(slice(lo, lo + n) for n, (lo, _) in zip(self.interior, self.widths, strict=True))
        mine = tuple(slice(a, a + n) for a, n in zip(self.starts, self.interior, strict=True))
        initial[owned] = whole[mine]
        # cells of the domain that this block covers: numpy's wrap, then the edges cut off
        index, inside = [], []
        for d, (lo, hi) in enumerate(self.widths):
            cells = np.arange(self.starts[d] - lo, self.starts[d] + self.interior[d] + hi)
            if d in self.dims and self.mesh.periodic[self.dims[d]]:
                cells = np.pad(np.arange(self.extents[d]), (lo, hi), mode="wrap")[cells + lo]
            valid = (cells >= 0) & (cells < self.extents[d])
            index.append(cells[valid])
            inside.append(np.flatnonzero(valid))
        expected[np.ix_(*inside)] = whole[np.ix_(*index)]
        memory = stored(initial, order)
        if backend == "numpy":
            native = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
            return memory.view(native) if memory.ndim else memory, memory, expected
        signed = {1: "i1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}[memory.itemsize]
        return torch.from_numpy(memory.view(signed)).view(torch_dtype), memory, expected


def random_cells(rng, shape, plain, dtype):
    if dtype == "bool":
        return rng.integers(0, 2, shape, np.uint8)
    if plain is np.complex128:
        return rng.random(shape) + 1j * rng.random(shape)
    return rng.integers(0, np.iinfo(plain).max, shape, plain, endpoint=True)


def stored(array, order):
    """Copy ``array`` into memory of another order: the same cells, other strides."""
    if order in ("C", "F"):
        return np.array(array, order=order)
    if order == "strided":
        roomy = np.zeros([2 * n for n in array.shape], array.dtype)
        view = roomy[(slice(None, None, 2),) * array.ndim]
    elif order == "negative":
        view = np.zeros(array.shape, array.dtype)[(slice(None, None, -1),) * array.ndim]
    else:  # channels first in meaning, last in memory
        view = np.moveaxis(np.zeros((*array.shape[1:], array.shape[0]), array.dtype), -1, 0)
    view[...] = array
    return view


def assert_same(memory, expected):
    assert memory.tobytes() == expected.tobytes(), f"{np.argwhere(memory != expected)[:5]} differ"


def blocks(extent, count):
    return tuple(extent // count + (i < extent % count) for i in range(count))


def periodicities(ndim):
    every = list(itertools.product((True, False), repeat=ndim))
    return every if ndim < 3 else [every[0], every[2], every[-1]]


@pytest.mark.parametrize(("order", "backend"), [("C", "numpy"), ("F", "torch")])
@pytest.mark.parametrize(("shape", "periodic"), [(s, p) for s in SHAPES for p in periodicities(len(s))])
def test_every_mesh_with_corners(make_mesh, shape, periodic, order, backend):
    mesh = make_mesh(shape, periodic)
    case = Case(mesh, [blocks(5 + 2 * n, n) for n in shape], [(2, 1), (1, 2), (1, 1)][: len(shape)])
    field, memory, expected = case.field("float32", order=order, backend=backend)
    h = case.exchanger(np.float32, order=order)
    h(field)
    assert_same(memory, expected)
    h(field)
    assert_same(memory, expected)


@pytest.mark.parametrize("seed", range(40))
def test_random_geometry(make_mesh, seed):
    """Uneven and empty blocks, wide and one-sided halos, several hops, arrays of more dims than the mesh."""
    rng = np.random.default_rng(seed)
    shape = SHAPES[rng.integers(len(SHAPES))]
    mesh = make_mesh(shape, [bool(p) for p in rng.integers(0, 2, len(shape))])
    ndim = len(shape) + int(rng.integers(0, 2))
    on = [int(d) for d in rng.permutation(ndim)[: len(shape)]]
    dims = dict(zip(on, range(len(shape)), strict=True))
    sizes, widths = [], []
    for d in range(ndim):
        count = shape[dims[d]] if d in dims else 1
        size = [int(n) for n in rng.integers(0, 5, count)]
        size[int(rng.integers(count))] += 1
        limit = sum(size) if d in dims and not mesh.periodic[dims[d]] else 7
        lo, hi = (int(rng.integers(0, min(limit, 7) + 1)) for _ in range(2))
        sizes.append(tuple(size))
        widths.append((lo, hi) if d in dims else (0, 0))
    case = Case(mesh, sizes, widths, dims)
    names = [DTYPES[i] for i in rng.integers(0, len(DTYPES), rng.integers(1, 4))]
    # strides and kinds of arrays are every rank's own affair
    own = np.random.default_rng([seed, mesh.rank])
    fields = []
    for k, name in enumerate(names):
        backend = "torch" if name == "bfloat16" or own.integers(2) else "numpy"
        orders = ("C", "F", "strided", "permuted") + (("negative",) if backend == "numpy" else ())
        fields.append(case.field(name, k, orders[own.integers(len(orders))], backend))
    h = case.exchanger([getattr(torch, n) for n in names], order="CF"[seed % 2])
    if seed % 3:
        h(*(f for f, _, _ in fields))
    else:
        h.start(*(f for f, _, _ in fields))
        h.poke()
        h.finish()
    for _, memory, expected in fields:
        assert_same(memory, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(make_mesh, dtype):
    case = Case(make_mesh((SIZE, 1), True), [blocks(4 * SIZE + 1, SIZE), (5,)], [(1, 1), (2, 2)])
    backends = ["torch"] if dtype == "bfloat16" else ["numpy", "torch"]
    fields = [case.field(dtype, k, backend=b) for k, b in enumerate(backends)]
    case.exchanger(getattr(torch, dtype))(*(f for f, _, _ in fields))
    for _, memory, expected in fields:
        assert_same(memory, expected)


def test_structured_cells(make_mesh):
    mesh = make_mesh(SIZE, True)
    record = np.dtype([("rho", "f4"), ("u", "f8", 3)])
    field = np.zeros(6, record)
    field["rho"][1:-1] = mesh.rank
    field["u"][1:-1] = mesh.rank + 0.5
    HaloExchanger(mesh, field.shape, 1, record)(field)
    assert field["rho"][0] == (mesh.rank - 1) % SIZE
    assert (field["u"][-1] == (mesh.rank + 1) % SIZE + 0.5).all()


@pytest.mark.ranks(2)
def test_two_ranks_on_a_periodic_dim_keep_directions_apart(make_mesh):
    mesh = make_mesh(2, True)
    field = np.zeros(6)
    field[1:-1] = 10 * mesh.rank + np.arange(4)
    HaloExchanger(mesh, field.shape, 1, field.dtype)(field)
    other = 10 * (1 - mesh.rank)
    assert field[0] == other + 3
    assert field[-1] == other


@pytest.mark.parametrize("periodic", [False, True])
def test_halo_wider_than_every_block(make_mesh, periodic):
    case = Case(make_mesh(SIZE, periodic), [(1,) * SIZE], [(SIZE, SIZE)])
    field, memory, expected = case.field("int64")
    case.exchanger(np.int64)(field)
    assert_same(memory, expected)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_ranks_without_cells(make_mesh, backend):
    """Only the last rank owns cells, and there is no halo along the other dim: the others' arrays are empty."""
    case = Case(make_mesh((1, SIZE), (False, True)), [(4,), (0,) * (SIZE - 1) + (3,)], [(1, 1), (0, 0)])
    fields = [case.field("float32", k, backend=backend) for k in range(2)]
    h = case.exchanger(np.float32)
    h.start(*(f for f, _, _ in fields))
    h.finish()
    for _, memory, expected in fields:
        assert_same(memory, expected)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_start_poke_finish(make_mesh, backend):
    mesh = make_mesh((SIZE, 1), True)
    case = Case(mesh, [blocks(4 * SIZE, SIZE), (6,)], [(1, 2), (2, 1)])
    h = case.exchanger(np.float64)
    first, second, third = (case.field("float64", k, "CFC"[k], backend) for k in range(3))
    for _ in range(3):
        h.start(first[0], second[0])
        inside = np.array(first[1][h.interior]).sum()
        h.poke()
        h.start(third[0])
        while not h.poke():
            pass
        h.finish()
        for _, memory, expected in (first, second, third):
            assert_same(memory, expected)
        assert np.array(first[1][h.interior]).sum() == inside
    h(first[0])
    assert_same(first[1], first[2])


def test_exchangers_in_flight_do_not_meet(make_mesh):
    """Two exchangers, the same tags' worth of dims, poked in another order on every rank."""
    mesh = make_mesh((1, SIZE), True)
    case = Case(mesh, [(4,), blocks(3 * SIZE, SIZE)], [(1, 1), (1, 1)])
    one, two = case.exchanger(np.float32), case.exchanger(np.float32)
    for trial in range(20):
        a, b, c = (case.field("float32", 3 * trial + k) for k in range(3))
        one.start(a[0])
        if (mesh.rank + trial) % 2:
            one.poke()
        two.start(b[0])
        for h in (two, one) if mesh.rank % 2 else (one, two):
            h.poke()
        one(c[0])
        two.finish()
        if trial % 2:
            one.finish() if one._flying else None
        for _, memory, expected in (a, b, c) if trial % 2 else (b, c):
            assert_same(memory, expected)
        if not trial % 2:
            one.finish()
            assert_same(a[1], a[2])


def test_many_fields_travel_in_one_message_per_peer(make_mesh):
    mesh = make_mesh((SIZE, 1), True)
    case = Case(mesh, [(4,) * SIZE, (8,)], [(1, 1), (2, 2)])
    h = case.exchanger(np.float32)
    fields = [case.field("float32", k) for k in range(4)]
    with comm_counter() as one:
        h(fields[0][0])
    with comm_counter() as many:
        h(*(f for f, _, _ in fields))
    assert many.calls == one.calls == 1
    # both directions, none where this rank is its own neighbour
    assert many.messages == one.messages == (2 if SIZE > 1 else 0)
    assert one.nbytes == (2 * 12 * 4 if SIZE > 1 else 0)
    assert many.nbytes == 4 * one.nbytes
    for _, memory, expected in fields:
        assert_same(memory, expected)


def test_a_dim_with_one_rank_and_an_edge_needs_nothing(make_mesh):
    case = Case(make_mesh((SIZE, 1), (False, False)), [(3,) * SIZE, (4,)], [(0, 0), (1, 1)])
    field, memory, expected = case.field("float32")
    with comm_counter() as count:
        case.exchanger(np.float32)(field)
    assert count.messages == 0
    assert_same(memory, expected)


def test_component_dim_before_the_mesh_dims(make_mesh):
    mesh = make_mesh((1, SIZE), True)
    case = Case(mesh, [(3,), (5,), blocks(3 * SIZE + 1, SIZE)], [(0, 0), (1, 1), (2, 2)], {1: 0, 2: 1})
    for dims in ({1: "dim0", -1: "dim1"}, (None, 0, "dim1")):
        field, memory, expected = case.field("float64", backend="torch")
        HaloExchanger(mesh, case.shape, (0, 1, (2, 2)), torch.float64, dims=dims)(field)
        assert_same(memory, expected)
    for dims in ((0, 1), (None, 0, 0), (None, 0, 2)):
        with pytest.raises(MpishardError, match="dim"):
            HaloExchanger(mesh, case.shape, (0, 1, (2, 2)), torch.float64, dims=dims)


def test_views_of_larger_arrays(make_mesh):
    mesh = make_mesh((SIZE, 1), True)
    case = Case(mesh, [(3,) * SIZE, (4,)], [(1, 1), (1, 1)])
    _, initial, expected = case.field("float32")
    room = np.full((2, *(n + 3 for n in case.shape)), 7, np.uint32)
    view = room[1, 2:-1, 1:-2]
    view[...] = initial
    case.exchanger(np.float32)(torch.from_numpy(room.view(np.float32))[1, 2:-1, 1:-2])
    assert_same(view, expected)
    view[...] = 7
    assert (room == 7).all()


def test_fields_are_not_kept_alive(make_mesh):
    mesh = make_mesh((SIZE, 1), True)
    case = Case(mesh, [(3,) * SIZE, (4,)], [(1, 1), (1, 1)])
    h = case.exchanger(np.float32)
    field, _, _ = case.field("float32", order="strided")
    gone = weakref.ref(field.base)
    h.start(field)
    h.finish()
    del field, _
    gc.collect()
    assert gone() is None


def test_plans_are_bounded_and_reused(make_mesh):
    case = Case(make_mesh((1, SIZE), True), [(3,), (3,) * SIZE], [(1, 1), (1, 1)])
    h = case.exchanger(np.float32)
    fields = [case.field("float32", k) for k in range(100)]
    for field, memory, expected in fields + fields[::-1]:
        h(field)
        assert_same(memory, expected)
    assert len(h._kept) == 64
    kept = list(h._kept.values())
    h(fields[0][0])
    assert list(h._kept.values()) == kept


def test_memory_that_another_array_takes_over(make_mesh):
    """A plan holds an address only: another array there, of the same geometry, is served by it."""
    mesh = make_mesh(SIZE, True)
    h = HaloExchanger(mesh, (6,), 1, np.float32)
    memory = np.zeros(24, np.uint8)
    for value in (1, 2):
        field = np.frombuffer(memory, np.float32)
        field[1:-1] = 10 * value + mesh.rank
        h(field)
        assert field[0] == 10 * value + (mesh.rank - 1) % SIZE
        del field
    with pytest.raises(UnsupportedDtypeError):
        h(np.frombuffer(memory, np.int32))


def test_dropped_exchangers_free_their_requests(make_mesh):
    mesh = make_mesh((SIZE, 1), True)
    case = Case(mesh, [(3,) * SIZE, (4,)], [(1, 1), (1, 1)])
    field, memory, expected = case.field("float32")
    h = case.exchanger(np.float32)
    h(field)
    kept, channel = next(iter(h._kept.values())), h._channel
    del h
    gc.collect()
    lifetime.free_discarded()
    assert not kept._steps
    assert not channel.exchangers
    # dropped in flight, it lives until it is done
    h = case.exchanger(np.float32)
    h.start(field)
    del h
    gc.collect()
    assert len(channel.exchangers) == 1
    channel.flying[0][0].finish()
    assert_same(memory, expected)


def test_autograd_notices(make_mesh):
    mesh = make_mesh(SIZE, True)
    u = torch.ones(6)
    w = torch.ones(6, requires_grad=True)
    loss = (u * w).sum()
    HaloExchanger(mesh, (6,), 1, torch.float32)(u)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors(make_mesh):
    mesh = make_mesh(SIZE, True)
    with torch.inference_mode():
        u = torch.full((6,), float(mesh.rank))
        HaloExchanger(mesh, (6,), 1, torch.float32)(u)
        assert u[0] == (mesh.rank - 1) % SIZE


def test_repr_names_the_geometry(make_mesh):
    h = HaloExchanger(make_mesh(SIZE, True), (7,), ((2, 1),), torch.bfloat16)
    assert "(7,)" in repr(h)
    assert "((2, 1),)" in repr(h)
    assert "bfloat16" in repr(h)
    assert h.interior == (slice(2, 6),)
