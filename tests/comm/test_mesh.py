"""CartMesh: shapes, names, neighbours, sub-meshes, adoption, plans, freeing."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.comm import adoption, guard, lifetime, plans
from mpishard.comm import mesh as comm_mesh
from mpishard.comm.mesh import CartMesh, init_mesh
from mpishard.errors import DesyncError, LayoutError, MeshError, MpishardError, UnsupportedOperationError

WORLD = MPI.COMM_WORLD


def dims_create(ndim: int) -> tuple[int, ...]:
    return tuple(MPI.Compute_dims(WORLD.size, ndim))


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_all_extents_inferred(ndim):
    mesh = init_mesh((-1,) * ndim)
    assert mesh.shape == dims_create(ndim)
    assert mesh.size == WORLD.size
    assert mesh.rank == WORLD.rank
    assert mesh.mesh_dim_names == tuple(f"dim{i}" for i in range(ndim))
    assert mesh.periodic == (False,) * ndim


def test_a_size_that_is_called():
    from torch.distributed.fsdp import fully_shard

    mesh = init_mesh((-1,))
    for call in (mesh.size, lambda: mesh.size(0), lambda: fully_shard(torch.nn.Linear(2, 2), mesh=mesh)):
        with pytest.raises(MeshError, match="size is a number here"):
            call()
    assert pickle.loads(pickle.dumps(mesh.size)) == WORLD.size


def test_one_extent_inferred():
    assert init_mesh((1, -1)).shape == (1, WORLD.size)
    assert init_mesh((-1, 1)).shape == (WORLD.size, 1)
    assert init_mesh(-1).shape == (WORLD.size,)
    assert init_mesh((WORLD.size, -1), ("a", "b")).shape == (WORLD.size, 1)


@pytest.mark.ranks(4)
def test_extents_as_in_reshape():
    assert init_mesh((2, -1)).shape == (2, 2)
    assert init_mesh((-1, 4)).shape == (1, 4)
    assert init_mesh((-1, 2, -1)).shape == (2, 2, 1)


@pytest.mark.parametrize("shape", [(WORLD.size + 1,), (WORLD.size, 2), (WORLD.size + 1, -1), (0, -1), (-2,), ()])
def test_shape_that_does_not_fit(shape):
    with pytest.raises(MeshError, match="does not fit the number of ranks") as info:
        init_mesh(shape)
    # what every rank says is one text
    assert len(set(WORLD.allgather(str(info.value)))) == 1


@pytest.mark.parametrize("shape", [(1.5,), 1.0, ("2",)])
def test_extents_that_are_no_integers(shape):
    with pytest.raises(MeshError, match="not integers"):
        init_mesh(shape)
    assert init_mesh(np.int64(WORLD.size)).shape == (WORLD.size,)


@pytest.mark.parametrize("names", [("y",), ("y", "y"), ("y", 1), "xyz", 3])
def test_names_that_do_not_fit(names):
    with pytest.raises(MeshError, match="2 different names"):
        init_mesh((-1, 1), names)


@pytest.mark.parametrize("periodic", [(True,), ("y", "x"), "yx", (1.0, 0.0)], ids=repr)
def test_periodic_flags_that_do_not_fit(periodic):
    with pytest.raises(MeshError, match="periodic does not fit"):
        init_mesh((-1, 1), periodic=periodic)


def test_periodic_flags_of_numpy():
    assert init_mesh((-1, 1), periodic=np.array([True, False])).periodic == (True, False)
    assert init_mesh((-1, 1), periodic=np.True_).periodic == (True, True)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("names", [("y", "y"), 3], ids=repr)
def test_error_of_one_rank_is_everybodys(names):
    odd = WORLD.rank == 1
    with pytest.raises(MeshError, match=r"raised on: rank 1 of"):
        init_mesh((-1, 1), names if odd else ("y", "x"))
    with pytest.raises(MeshError, match=r"raised on: rank 1 of"):
        CartMesh.from_comm(WORLD.Create_cart((WORLD.size, 1)), names if odd else ("y", "x"))


class Unreadable:
    """Of which nothing can be asked."""

    def __iter__(self):
        raise RuntimeError("no names here")


@pytest.mark.ranks(2, 3, 4)
def test_what_python_raises_for_an_argument_of_one_rank_reaches_all():
    with pytest.raises(MpishardError, match=r"no names here[\s\S]*raised on: rank 1 of"):
        init_mesh((-1, 1), Unreadable() if WORLD.rank == 1 else ("y", "x"))


@pytest.mark.ranks(2, 3, 4)
def test_arguments_that_differ_between_ranks():
    with pytest.raises(DesyncError, match="periodic"):
        init_mesh((-1, 1), periodic=WORLD.rank == 0)


@pytest.mark.parametrize("periodic", [False, True])
def test_neighbours(periodic):
    mesh = init_mesh((-1, -1), ("y", "x"), periodic=periodic)
    for dim in (0, 1):
        for step in (-5, -2, -1, 0, 1, 2, 5):
            coords = list(mesh.coords)
            coords[dim] += step
            inside = 0 <= coords[dim] < mesh.shape[dim]
            coords[dim] %= mesh.shape[dim]
            expected = mesh.comm.Get_cart_rank(coords) if inside or periodic else None
            assert mesh.neighbour(dim, step) == expected
            assert mesh.neighbour(mesh.mesh_dim_names[dim], step) == expected


def test_coordinates_are_row_major():
    mesh = init_mesh((-1, -1, -1))
    assert mesh.rank_at(mesh.coords) == mesh.rank
    assert mesh.comm.Get_coords(mesh.rank) == list(mesh.coords)


def test_no_such_dim():
    mesh = init_mesh((-1, 1), ("y", "x"))
    for dim in ("z", 2, -3, 0.5, 1.0, None, torch.ones(1)):
        with pytest.raises(MeshError, match="no such mesh dim"):
            mesh.mesh_dim(dim)
        with pytest.raises(MeshError, match="no such mesh dim"):
            mesh[dim]
    assert mesh.mesh_dim(-1) == mesh.mesh_dim("x") == mesh.mesh_dim(np.int64(1)) == 1


def test_no_such_rank():
    mesh = init_mesh((-1, 1), ("y", "x"), periodic=True)
    for coords in ((mesh.shape[0], 0), (-1, 0), (0,), (0, 0, 0), (0.0, 0), 0, None, "ab"):
        with pytest.raises(MeshError, match="no rank at these coordinates"):
            mesh.rank_at(coords)
    assert mesh.rank_at(np.array(mesh.coords)) == mesh.rank
    for displacement in (0.5, 1.0, "a", None):
        with pytest.raises(MeshError, match="no displacement"):
            mesh.neighbour("y", displacement)


@pytest.mark.ranks(2, 4)
def test_groups_hold_the_ranks_along_their_dims():
    mesh = init_mesh((2, -1, 1))
    for dims in [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]:
        group = mesh.group(dims)
        together = group.comm.allgather(mesh.coords)
        assert together[group.rank] == mesh.coords
        assert len(together) == group.size == len(set(together))
        outside = [m for m in range(3) if m not in dims]
        assert all(c[m] == mesh.coords[m] for c in together for m in outside)
        # row-major in the dims of the group: peer indices of plans are ranks
        assert together == sorted(together)


@pytest.mark.ranks(4)
def test_sub_mesh():
    mesh = init_mesh((2, 2, 1), ("z", "y", "x"), periodic=(True, False, True))
    y = mesh["y"]
    assert (y.shape, y.coords, y.periodic, y.mesh_dim_names) == ((2,), mesh.coords[1:2], (False,), ("y",))
    assert y is mesh["y"] is mesh[1]
    assert y.comm is mesh.group((1,)).comm
    assert y.rank == mesh.coords[1]
    yx = mesh["y", "x"]
    assert yx.shape == (2, 1)
    assert yx.group((1,)).comm is mesh.group((2,)).comm
    assert yx["y"].group((0,)).comm is mesh.group((1,)).comm
    assert mesh["z", "y", "x"] is mesh
    assert y.neighbour("y", 1) == (1 if mesh.coords[1] == 0 else None)
    assert y.device == mesh.device
    for wrong in (("x", "y"), ("y", "y"), ()):
        with pytest.raises(MeshError, match="sub-mesh"):
            mesh[wrong]


@pytest.mark.ranks(4)
def test_sub_meshes_are_made_without_communication():
    mesh = init_mesh((2, 2), ("y", "x"))
    if mesh.rank == 0:  # the others do not take part, and nobody waits
        assert mesh["x"].shape == (2,)
    assert mesh.comm.allreduce(1) == 4


def test_sub_mesh_outlives_its_mesh():
    mesh = init_mesh((-1, 1), ("y", "x"))
    y = mesh["y"]
    shape = mesh.shape[:1]
    del mesh
    gc.collect()
    init_mesh((-1, 1))  # frees what all ranks dropped, which this is not
    assert y.shape == shape
    assert y.group((0,)).comm.allreduce(1) == y.size


@pytest.mark.parametrize("kind", ["object", "fortran", "c"])
def test_adopted_communicators(kind):
    dims = dims_create(2)
    cart = WORLD.Create_cart(dims, periods=(True, False))
    given = {"object": cart, "fortran": cart.py2f(), "c": cart.handle}[kind]
    mesh = CartMesh.from_comm(given, ("y", "x"), handle="c" if kind == "c" else "fortran")
    assert (mesh.shape, mesh.periodic, mesh.coords) == (dims, (True, False), tuple(cart.coords))
    assert mesh.comm != cart
    assert MPI.Comm.Compare(mesh.comm, cart) == MPI.CONGRUENT
    mesh.free()
    assert cart.allreduce(1) == WORLD.size  # the caller's own lives on
    cart.Free()


def test_general_communicator_as_base_class():
    cart = WORLD.Create_cart((WORLD.size,))
    mesh = CartMesh.from_comm(MPI.Comm(cart))
    assert mesh.shape == (WORLD.size,)
    mesh.free()
    cart.Free()


def test_communicators_that_cannot_be_adopted():
    for comm in (WORLD, MPI.COMM_NULL, WORLD.py2f(), WORLD.handle):
        handle = "c" if comm == WORLD.handle else "fortran"
        with pytest.raises(MeshError, match="not a Cartesian communicator"):
            CartMesh.from_comm(comm, handle=handle)
    with pytest.raises(MeshError, match="unknown handle kind"):
        CartMesh.from_comm(0, handle="pascal")
    with pytest.raises(MeshError, match="not an intra-communicator"):
        init_mesh((-1,), comm=MPI.COMM_NULL)
    for comm in (-7, 1 << 40, "world"):
        with pytest.raises(MeshError, match="not an intra-communicator"):
            CartMesh.from_comm(comm)


@pytest.mark.ranks(2, 3, 4)
def test_adoption_compares_names():
    cart = WORLD.Create_cart((WORLD.size,))
    with pytest.raises(DesyncError, match="from_comm"):
        CartMesh.from_comm(cart, ("a" if WORLD.rank else "b",))
    cart.Free()


@pytest.mark.ranks(3, 4)
def test_mesh_over_part_of_the_world():
    color = WORLD.rank % 2
    part = WORLD.Split(color)
    mesh = init_mesh((-1,), comm=part)
    assert mesh.size == part.size
    assert mesh.comm.allgather(WORLD.rank) == list(range(color, WORLD.size, 2))
    mesh.free()
    part.Free()


def test_device_and_place_on_the_node():
    mesh = init_mesh((-1,))
    node = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    assert mesh.local_rank == node.rank
    node.Free()
    if not torch.cuda.is_available():
        assert mesh.device == torch.device("cpu")
    assert init_mesh((-1,), device="meta").device == torch.device("meta")


def test_messages_do_not_meet_the_callers():
    mesh = init_mesh((-1,), periodic=True)
    to, of = mesh.neighbour(0, 1), mesh.neighbour(0, -1)
    first = WORLD.isend("the program's", to, tag=7)
    second = mesh.comm.isend("the mesh's", to, tag=7)
    assert mesh.comm.recv(source=of, tag=7) == "the mesh's"
    assert WORLD.recv(source=of, tag=7) == "the program's"
    MPI.Request.waitall([first, second])


def test_errors_of_an_adopted_communicator_raise():
    cart = WORLD.Create_cart((WORLD.size,))
    cart.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    mesh = CartMesh.from_comm(cart)
    with pytest.raises(MPI.Exception):
        mesh.comm.isend("", WORLD.size + 1)
    mesh.free()
    cart.Free()


# plans


def test_plans_are_built_once():
    mesh = init_mesh((-1,))
    built = []
    for _ in range(3):
        assert mesh.plan("key", lambda: built.append(1) or "plan") == "plan"
    assert built == [1]


@pytest.mark.ranks(2, 3, 4)
def test_error_in_a_plan_rises_on_every_rank_and_is_not_kept():
    mesh = init_mesh((-1,))

    def build():
        if mesh.rank == mesh.size - 1:
            raise LayoutError("the last rank's shard does not fit")
        return "plan"

    with pytest.raises(LayoutError, match="the last rank's shard does not fit"):
        mesh.plan("key", build)
    assert mesh.plan("key", lambda: "another") == "another"


@pytest.mark.ranks(2, 3, 4)
def test_any_error_in_a_plan_rises_on_every_rank():
    """Python's and torch's too, of arguments that nobody has looked at: as itself where every rank has it."""
    mesh = init_mesh((-1,))

    def build(ranks):
        return torch.zeros(3).view(2) if mesh.rank in ranks else "plan"

    with pytest.raises(MpishardError, match=r"^RuntimeError: shape .*\n  raised on: rank 1 of") as info:
        mesh.plan("key", lambda: build({1}))
    assert type(info.value) is MpishardError
    with pytest.raises(RuntimeError, match=r"^shape ") as info:
        mesh.plan("key", lambda: build(range(mesh.size)))
    assert any(entry.name == "build" for entry in info.traceback)
    assert mesh.plan("key", lambda: "another") == "another"


@pytest.mark.ranks(2, 3, 4)
def test_different_plans_on_different_ranks():
    mesh = init_mesh((-1,))
    with pytest.raises(DesyncError) as info:
        mesh.plan(("conv", mesh.rank == 0), lambda: "plan")
    assert "('conv', True)" in str(info.value)
    assert "('conv', False)" in str(info.value)


def test_addresses_in_keys_are_not_compared():
    mesh = init_mesh((-1,))
    kept = [object() for _ in range(mesh.rank)]  # so that the address differs
    assert mesh.plan((object(), "key"), lambda: "plan") == "plan"
    assert len(kept) == mesh.rank


@pytest.mark.ranks(4)
def test_plans_of_a_part_of_the_mesh():
    mesh = init_mesh((2, 2))
    if mesh.coords[0] == 0:
        assert mesh.plan("key", lambda: "plan", (1,)) == "plan"


def test_plans_that_were_not_used_for_long_go_on_all_ranks_alike(monkeypatch):
    monkeypatch.setattr(plans, "LIMIT_NBYTES", 200_000)
    mesh = init_mesh((-1,))
    built = []

    def use(key):
        # of another size on every rank
        return mesh.plan(key, lambda: (built.append(key), torch.zeros(100 * (1 + mesh.rank)))[1])

    for i in range(1000):
        use("often used")
        use(i)
    assert built.count("often used") == 1
    assert len(mesh.plans) < 400
    assert len(set(WORLD.allgather(tuple(mesh.plans)))) == 1
    use(0)
    assert built.count(0) == 2
    for i in range(1000):
        mesh.keep(i, lambda: torch.zeros(100))
    assert len(mesh.kept) < 400


def test_exchanges_go_with_their_plan():
    mesh = init_mesh((-1,), periodic=True)
    x = ms.distribute_tensor(torch.arange(8.0), mesh, (ms.Shard(0),))
    ms.halo_exchange(x, {0: 1}, mode="circular")
    made = len(mesh._holding.resources)
    assert made == (WORLD.size > 1)
    mesh.plans.clear()
    gc.collect()
    lifetime.free_discarded()
    assert len(mesh._holding.resources) == 0
    ms.halo_exchange(x, {0: 1}, mode="circular")


def test_one_thread_communicates():
    mesh = init_mesh((-1,))
    errors = []

    def work():
        try:
            ms.all_reduce(torch.ones(2), mesh)
        except UnsupportedOperationError as e:
            errors.append(e)

    def in_thread():
        thread = threading.Thread(target=work, name="second")
        thread.start()
        thread.join()

    for _ in range(2):
        in_thread()  # the one before has ended
    assert not errors
    ms.all_reduce(torch.ones(2), mesh)
    in_thread()
    if WORLD.size > 1:
        assert "thread 'second', while 'MainThread', which has done so, is alive" in str(errors[0])


def test_no_communicator_is_left():
    calls = []

    def make():
        calls.append(1)
        if len(calls) != 2:
            raise MPI.Exception(MPI.ERR_OTHER)
        return "made"

    assert lifetime.made("init_mesh", WORLD, make) == "made"
    with pytest.raises(MeshError, match="init_mesh: MPI makes no more communicators"):
        lifetime.made("init_mesh", WORLD, make)
    assert len(calls) == 4


@pytest.mark.parametrize("adopts", [False, True], ids=["from_comm", "adopt"])
def test_communicators_of_dropped_meshes_are_freed_for_a_host_s_mesh(monkeypatch, adopts):
    """Where one is lacking on the way, what is half made goes, and is made once more; the host's handler stays."""
    made, lacking = lifetime.made, []

    def lacks(what, comm, make):
        calls = []

        def make_all_but_one():
            calls.append(make())
            if len(calls) == 1:
                calls[0] = None
                lacking.append(comm.Get_errhandler())
                raise MPI.Exception(MPI.ERR_OTHER)
            return calls[1]

        return made(what, comm, make_all_but_one)

    for module in (lifetime, comm_mesh, adoption):
        monkeypatch.setattr(module, "made", lacks)
    cart = WORLD.Create_cart([WORLD.size, 1])
    cart.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    mesh = ms.CartMesh.from_comm(cart, ("y", "x")) if not adopts else ms.insitu.adopt(cart, (WORLD.size, 1)).mesh
    x = ms.ones(2 * WORLD.size, mesh=mesh, placements=(ms.Shard(0), ms.Replicate()))
    assert x.sum().item() == 2 * WORLD.size
    assert len(lacking) >= 2
    assert MPI.ERRORS_ARE_FATAL not in lacking
    assert cart.Get_errhandler() == MPI.ERRORS_ARE_FATAL
    mesh.free()
    cart.Free()


# the end of a mesh


def test_freed_mesh_says_so():
    mesh = init_mesh((-1, 1), ("y", "x"))
    sub = mesh["y"]
    freed = []
    mesh.own(lambda: freed.append("first"))
    sub.own(lambda: freed.append("second"))
    mesh.free()
    assert freed == ["second", "first"]
    mesh.free()
    assert freed == ["second", "first"]
    for used in (mesh, sub):
        assert used.freed
        assert "freed" in repr(used)
        with pytest.raises(MeshError, match="mesh used after free"):
            used.group((0,))
        with pytest.raises(MeshError, match="mesh used after free"):
            used.plan("key", lambda: "plan")
        for ask in (used.get_rank, lambda used=used: used.gpu_aware, lambda used=used: ms.process_group(used)):
            with pytest.raises(MeshError, match="mesh used after free"):
                ask()
    with pytest.raises(MeshError, match="mesh used after free"):
        mesh["x"]


def test_errors_have_one_text_on_all_ranks():
    mesh, freed = init_mesh((-1,), ("y",)), init_mesh((-1,), ("y",))
    freed.free()
    for call in (
        lambda: freed.group((0,)),
        lambda: pickle.dumps(mesh),
        lambda: CartMesh.from_comm(WORLD),
        lambda: init_mesh((-1,), comm=MPI.COMM_NULL),
    ):
        with pytest.raises(MeshError) as info:
            call()
        assert len(set(WORLD.allgather(str(info.value)))) == 1


def test_freed_sub_mesh_leaves_its_mesh():
    mesh = init_mesh((-1, 1), ("y", "x"))
    sub = mesh["y"]
    sub.free()
    with pytest.raises(MeshError, match="mesh used after free"):
        sub.group((0,))
    assert mesh.group((0,)).comm.allreduce(1) == mesh.shape[0]
    assert mesh["y"].group((0,)).comm.allreduce(1) == mesh.shape[0]
    assert mesh["y"] is mesh["y"]


def test_freeing_gives_every_communicator_back():
    mesh = init_mesh((-1, 1))
    comms = [mesh.comm, mesh.duplicate(), *(mesh.group(d).comm for d in ((0,), (1,)))]
    mesh.free()
    assert all(comm == MPI.COMM_NULL for comm in comms)


@pytest.mark.ranks(2, 3, 4)
def test_dropped_mesh_waits_for_the_other_ranks():
    mesh = init_mesh((-1, 1))
    freed = []
    mesh.own(lambda: freed.append(True))
    comm, alive = mesh.comm, weakref.ref(mesh)
    if WORLD.rank == 0:
        del mesh
        gc.collect()
        assert alive() is None
        lifetime.free_discarded()
        assert freed == [True]  # what is local waits for nobody
    init_mesh((-1,))
    assert comm != MPI.COMM_NULL  # rank 1 still has it
    if WORLD.rank != 0:
        assert not freed
        assert mesh.comm is comm
        del mesh
        gc.collect()
    init_mesh((-1,))
    assert comm == MPI.COMM_NULL


def test_dropped_meshes_do_not_pile_up():
    gc.collect()
    init_mesh((-1, 1)).free()
    before = sum(map(len, lifetime._dropped.values()))
    for _ in range(20):
        init_mesh((-1, 1))
    assert sum(map(len, lifetime._dropped.values())) <= before + 1


def test_mesh_is_neither_pickled_nor_copied():
    mesh = init_mesh((-1,))
    with pytest.raises(MeshError, match="cannot be pickled"):
        pickle.dumps(mesh)
    assert copy.deepcopy(mesh) is mesh


def test_a_mesh_that_compares_calls_can_be_freed(monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", True)
    mesh = init_mesh((-1,))
    assert mesh.plan("a plan", lambda: [1]) == mesh.plan("a plan", lambda: [2]) == [1]
    mesh.free()
    assert mesh.freed


@pytest.mark.ranks(2, 3, 4)
def test_devices_of_other_kinds():
    with pytest.raises(DesyncError, match="meta"):
        init_mesh((-1,), device="meta" if WORLD.rank else "cpu")


@pytest.mark.parametrize("wrong", ["gpu", "cuda:x", 1.5, "n" * 10**5, "cuda:99"])
def test_a_device_that_one_rank_gets_wrong(wrong):
    """All raise the same before any makes a communicator."""
    given = wrong if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1 else "cpu"
    with pytest.raises(MeshError, match="device of a mesh"):
        ms.init_mesh((-1,), device=given)
    cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size])
    with pytest.raises(MeshError, match="device of a mesh"):
        ms.CartMesh.from_comm(cart, device=given)
    cart.Free()


def test_a_copy_is_the_mesh_itself():
    mesh = init_mesh((-1, 1), ("y", "x"))
    assert copy.copy(mesh) is copy.deepcopy(mesh) is mesh
    assert mesh[["y", "x"]] is mesh
    assert mesh[["y"]] is mesh["y"]
