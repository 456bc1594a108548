"""What HaloExchanger refuses: in the constructor on every rank with one text, in a call where the field is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpishard.comm.halo.exchanger import HaloExchanger
from mpishard.comm.mesh import init_mesh
from mpishard.errors import (
    DesyncError,
    LayoutError,
    MeshError,
    UnsupportedDtypeError,
    UnsupportedOperationError,
)

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size


@pytest.fixture
def make_mesh():
    meshes = []

    def make(shape, periodic=False):
        meshes.append(init_mesh(shape, periodic=periodic))
        return meshes[-1]

    yield make
    for mesh in meshes:
        mesh.free()


def raised_everywhere(kind, call):
    """Check that ``call`` raises on all ranks, with one text."""
    with pytest.raises(kind) as info:
        call()
    texts = WORLD.allgather(str(info.value))
    assert len(set(texts)) == 1, texts
    for word in ("expected:", "got:", "fix:"):
        assert word in texts[0]
    return texts[0]


@pytest.mark.parametrize(
    ("shape", "width", "dtype", "options", "kind"),
    [
        ((6, 6), (1,), "f4", {}, LayoutError),
        ((6, 6), (1, -1), "f4", {}, LayoutError),
        ((6, 6), (1, (1, 1, 1)), "f4", {}, LayoutError),
        ((6, 6), (1, "wide"), "f4", {}, LayoutError),
        ((6, 6), (1, 1.5), "f4", {}, LayoutError),
        ((6, 6), 1.0, "f4", {}, LayoutError),
        ((6, 6), (4, 4), "f4", {}, LayoutError),
        ((6, 6, 6), (1, 1, 1), "f4", {}, LayoutError),
        ((6, 6), (1, 1), object, {}, UnsupportedDtypeError),
        ((6, 6), (1, 1), "no dtype", {}, UnsupportedDtypeError),
        ((6, 6), (1, 1), "f4", {"order": "K"}, LayoutError),
        ((6, 6), (1, 1), "f4", {"dims": {0: 0, 1: 0}}, LayoutError),
        ((6, 6), (1, 1), "f4", {"dims": {2: 0}}, LayoutError),
        ((6, 6), (1, 1), "f4", {"dims": {0: 0, 1.0: 1}}, LayoutError),
        ((6, 6), (1, 1), "f4", {"dims": {"a": 0}}, LayoutError),
        ((6, 6), (1, 1), "f4", {"dims": [0, 0]}, LayoutError),
        ((6, 6), (1, 1), "f4", {"dims": [0]}, LayoutError),
        ((6.5, 6), (1, 1), "f4", {}, LayoutError),
        (None, (1, 1), "f4", {}, LayoutError),
        ((6, 6), (1, 1), "f4", {"dims": {0: "nowhere"}}, MeshError),
        ((6, 6), (1, 1), "f4", {"dims": {0: 0}}, LayoutError),
    ],
)
def test_constructor_refuses(make_mesh, shape, width, dtype, options, kind):
    mesh = make_mesh((SIZE, 1))
    raised_everywhere(kind, lambda: HaloExchanger(mesh, shape, width, dtype, **options))


def test_widths_of_any_integers(make_mesh):
    mesh = make_mesh((SIZE, 1))
    for width in (np.int64(1), np.array([1, 1]), [np.array([1, 1]), (1, 1)]):
        assert HaloExchanger(mesh, (6, 6), width, "f4").halo_width == ((1, 1), (1, 1))


def test_one_rank_with_an_error_is_enough(make_mesh):
    mesh = make_mesh((SIZE, 1))
    raised_everywhere(LayoutError, lambda: HaloExchanger(mesh, (6, 6 if mesh.rank else 1), 1, "f4"))


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_disagree(make_mesh):
    mesh = make_mesh((SIZE, 1))
    text = raised_everywhere(LayoutError, lambda: HaloExchanger(mesh, (6, 6 + (mesh.rank == 1)), 1, "f4"))
    assert "rank 1" in text
    for width, dtype in (((1, 1 + mesh.rank), "f4"), ((1, 1), "f4" if mesh.rank else "f8")):
        with pytest.raises(DesyncError):
            HaloExchanger(mesh, (9, 9), width, dtype)


@pytest.mark.ranks(4)
def test_extents_follow_their_own_mesh_dim(make_mesh):
    mesh = make_mesh((2, 2))
    uneven = (6 + mesh.coords[1], 6)
    text = raised_everywhere(LayoutError, lambda: HaloExchanger(mesh, uneven, 1, "f4"))
    assert "'dim0'" in text


def test_halo_wider_than_the_domain(make_mesh):
    raised_everywhere(LayoutError, lambda: HaloExchanger(make_mesh(SIZE), (2 + SIZE + 1 + 1,), (SIZE * 2 + 1,), "f4"))
    mesh = make_mesh(SIZE)
    wide = 2 * SIZE + 1
    raised_everywhere(LayoutError, lambda: HaloExchanger(mesh, (2 + wide,), ((wide, 0),), "f4"))
    HaloExchanger(make_mesh(SIZE, True), (2 + wide,), ((wide, 0),), "f4")
    raised_everywhere(LayoutError, lambda: HaloExchanger(make_mesh(SIZE, True), (2,), 1, "f4"))


def read_only():
    field = np.zeros((5, 5), np.float32)
    field.flags.writeable = False
    return field


@pytest.mark.parametrize(
    ("field", "kind", "word"),
    [
        (lambda: np.zeros((5, 6), np.float32), LayoutError, "another shape"),
        (lambda: np.zeros(25, np.float32), LayoutError, "another shape"),
        (lambda: np.zeros((5, 5)), UnsupportedDtypeError, "float64"),
        (lambda: np.zeros((5, 5), ">f4"), UnsupportedDtypeError, ">f4"),
        (lambda: torch.zeros(5, 5, dtype=torch.bfloat16), UnsupportedDtypeError, "bfloat16"),
        (read_only, UnsupportedOperationError, "read-only"),
        (lambda: np.broadcast_to(np.zeros(5, np.float32), (5, 5)), UnsupportedOperationError, "read-only"),
        (lambda: torch.zeros(5, dtype=torch.float32).expand(5, 5), UnsupportedOperationError, "share memory"),
        (lambda: torch.zeros(5, 5, requires_grad=True), UnsupportedOperationError, "requires grad"),
        (lambda: torch.zeros(5, 5, device="meta"), MeshError, "meta"),
        (lambda: torch.zeros(5, 5).to_sparse(), UnsupportedOperationError, "no array"),
        (lambda: [[0.0] * 5] * 5, UnsupportedOperationError, "no array"),
    ],
)
def test_fields_that_do_not_fit(make_mesh, field, kind, word):
    h = HaloExchanger(make_mesh((SIZE, 1), True), (5, 5), 1, np.float32)
    field = field()
    good = np.zeros((5, 5), np.float32)
    for call in (lambda: h(field), lambda: h.start(good, field)):
        assert word in raised_everywhere(kind, call)
    h(good)
    with pytest.raises(UnsupportedOperationError, match="nothing is in flight"):
        h.finish()


def test_conjugated_views_are_refused(make_mesh):
    h = HaloExchanger(make_mesh(SIZE, True), (5,), 1, torch.complex64)
    x = torch.zeros(5, dtype=torch.complex64)
    h(x)
    raised_everywhere(UnsupportedOperationError, lambda: h(x.conj()))


def test_a_field_that_becomes_read_only(make_mesh):
    h = HaloExchanger(make_mesh(SIZE, True), (5,), 1, "f4")
    field = np.zeros(5, np.float32)
    h(field)
    field.flags.writeable = False
    raised_everywhere(UnsupportedOperationError, lambda: h(field))


def test_number_of_fields(make_mesh):
    mesh = make_mesh(SIZE, True)
    u, v = np.zeros(5, np.float32), np.zeros(5, np.int64)
    h = HaloExchanger(mesh, (5,), 1, (u.dtype, v.dtype))
    h(u, v)
    raised_everywhere(LayoutError, lambda: h(u))
    raised_everywhere(LayoutError, h)
    raised_everywhere(UnsupportedDtypeError, lambda: h(v, u))


def test_misuse_in_flight(make_mesh):
    h = HaloExchanger(make_mesh(SIZE, True), (5,), 1, "f4")
    u, v = np.zeros((2, 5), np.float32)
    with pytest.raises(UnsupportedOperationError, match="nothing is in flight"):
        h.finish()
    assert h.poke()
    assert "cannot travel together" in raised_everywhere(UnsupportedOperationError, lambda: h(u, u))
    h.start(u)
    for call in (lambda: h.start(u), lambda: h(v, u)):
        raised_everywhere(UnsupportedOperationError, call)
    h.start(v)
    h.finish()
    with pytest.raises(UnsupportedOperationError, match="nothing is in flight"):
        h.finish()
    h(u, v)


def test_freed_mesh(make_mesh):
    mesh = make_mesh(SIZE, True)
    u = np.zeros(5, np.float32)
    h = HaloExchanger(mesh, (5,), 1, "f4")
    h(u)
    mesh.free()
    for call in (lambda: h(u), lambda: h.start(u), lambda: HaloExchanger(mesh, (5,), 1, "f4")):
        with pytest.raises(MeshError, match="after free"):
            call()


def test_more_dims_than_the_mesh(make_mesh):
    mesh = make_mesh((SIZE, 1))
    text = raised_everywhere(LayoutError, lambda: HaloExchanger(mesh, (3, 6, 6), 1, "f4"))
    assert "dims={1: " in text
    assert "halo_width=(1, 1, 0)" in text
    for options in ({"dims": {1: 0, 2: 1}}, {"halo_width": (1, 1, 0)}):
        HaloExchanger(mesh, (3, 6, 6), **{"halo_width": 1, "dtype": "f4", **options})
