"""Differentiable collectives: values against numpy, adjoints, first and second gradients, forward mode.

Every case runs on every mesh that the ranks allow, over each of its dims and over all of them. Data are
drawn per mesh rank, so each rank knows what the others hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.layout import balanced
from mpishard.testing import check_gradient, check_jvp, check_second_gradient

SIZE = MPI.COMM_WORLD.size
MESHES = {1: [(1,), (1, 1)], 2: [(2,), (2, 1)], 3: [(3,), (1, 3)], 4: [(4,), (2, 2)], 6: [(6,), (2, 3)]}[SIZE]


class Place(NamedTuple):
    """A mesh, the mesh dims of a call, and the mesh ranks that take part with this one, in order."""

    mesh: ms.CartMesh
    mesh_dim: int | str | tuple[str, ...] | None
    ranks: tuple[int, ...]

    @property
    def me(self) -> int:
        return self.ranks.index(self.mesh.rank)


def group_ranks(mesh: ms.CartMesh, dims: tuple[int, ...]) -> tuple[int, ...]:
    spans = [range(n) if d in dims else (c,) for d, (n, c) in enumerate(zip(mesh.shape, mesh.coords, strict=True))]
    grids = np.meshgrid(*spans, indexing="ij")
    return tuple(mesh.rank_at(coords) for coords in np.stack([g.ravel() for g in grids], axis=1).tolist())


def places() -> list[tuple[tuple[int, ...], object]]:
    cases: list[tuple[tuple[int, ...], object]] = []
    for shape in MESHES:
        cases.append((shape, None))
        if len(shape) == 2:
            cases += [(shape, "y"), (shape, 1), (shape, ("y", "x"))]
    return cases


@pytest.fixture(params=places(), ids=str)
def place(request):
    shape, mesh_dim = request.param
    mesh = ms.init_mesh(shape, ("y", "x")[: len(shape)], periodic=(True, False)[: len(shape)])
    dims = {None: tuple(range(len(shape))), "y": (0,), 1: (1,), ("y", "x"): (0, 1)}[mesh_dim]
    yield Place(mesh, mesh_dim, group_ranks(mesh, dims))
    mesh.free()


@pytest.fixture
def mesh():
    mesh = ms.init_mesh((SIZE,), ("x",), periodic=True)
    yield mesh
    mesh.free()


def block(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(31 + rank), dtype=dtype)


EXTENTS = (3, 0, 1, 2, 0, 1)


class Case(NamedTuple):
    """An operation, the shape of a rank's argument, and the result from the arguments of the group."""

    call: Callable[..., torch.Tensor]
    shape: Callable[[int], tuple[int, ...]]  # of the mesh rank
    value: Callable[[list[np.ndarray], int], np.ndarray]  # the group's arguments, this rank's position


def transposed(blocks: list[np.ndarray], me: int) -> np.ndarray:
    cuts = np.cumsum(balanced(5, len(blocks)))[:-1]
    return np.concatenate([np.split(b, cuts, axis=1)[me] for b in blocks], axis=0)


def shuffled(blocks: list[np.ndarray], me: int) -> np.ndarray:
    return np.concatenate(
        [np.split(b, np.cumsum(balanced(b.shape[0], len(blocks)))[:-1], axis=0)[me] for b in blocks], axis=0
    )


CASES = {
    "all_reduce": Case(ms.all_reduce, lambda r: (2, 3), lambda b, me: sum(b)),
    "all_reduce of a scalar": Case(ms.all_reduce, lambda r: (), lambda b, me: sum(b)),
    "all_reduce of nothing": Case(ms.all_reduce, lambda r: (0, 3), lambda b, me: sum(b)),
    "avg": Case(lambda x, *a: ms.all_reduce(x, *a, op="avg"), lambda r: (2, 3), lambda b, me: sum(b) / len(b)),
    "in order": Case(lambda x, *a: ms.all_reduce(x, *a, deterministic=True), lambda r: (2, 3), lambda b, me: sum(b)),
    "all_gather": Case(ms.all_gather, lambda r: (EXTENTS[r], 2), lambda b, me: np.concatenate(b, axis=0)),
    "all_gather dim 1": Case(
        lambda x, *a: ms.all_gather(x, *a, dim=-1), lambda r: (2, EXTENTS[r]), lambda b, me: np.concatenate(b, axis=1)
    ),
    "reduce_scatter": Case(
        ms.reduce_scatter,
        lambda r: (3, 2),
        lambda b, me: np.split(sum(b), np.cumsum(balanced(3, len(b)))[:-1], axis=0)[me],
    ),
    "reduce_scatter dim 1": Case(
        lambda x, *a: ms.reduce_scatter(x, *a, dim=1),
        lambda r: (2, 5),
        lambda b, me: np.split(sum(b), np.cumsum(balanced(5, len(b)))[:-1], axis=1)[me],
    ),
    "all_to_all": Case(
        lambda x, *a: ms.all_to_all(x, *a, split_dim=1, concat_dim=0), lambda r: (EXTENTS[r], 5), transposed
    ),
    "all_to_all same dim": Case(
        lambda x, *a: ms.all_to_all(x, *a, split_dim=0, concat_dim=0), lambda r: (EXTENTS[r], 2), shuffled
    ),
    "broadcast": Case(ms.broadcast, lambda r: (2, 3), lambda b, me: b[0]),
}
LINEAR = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@LINEAR
def test_values(place, case):
    blocks = [block(r, case.shape(r)) for r in place.ranks]
    x = blocks[place.me].clone()
    y = case.call(x, place.mesh, place.mesh_dim)
    np.testing.assert_allclose(y.numpy(), case.value([b.numpy() for b in blocks], place.me), rtol=1e-13, atol=1e-13)
    assert torch.equal(x, blocks[place.me])
    assert y.data_ptr() != x.data_ptr() or not x.numel()


@LINEAR
def test_adjoint(place, case):
    def f(x):
        return case.call(x, place.mesh, place.mesh_dim)

    for dtype in (torch.float64, torch.complex128, torch.float32, torch.bfloat16):
        x = block(place.mesh.rank, case.shape(place.mesh.rank)).to(dtype)
        if dtype.is_complex:
            x = x + 1j * block(place.mesh.rank + 9, x.shape)
        result = ms.dot_test(f, x, mesh=place.mesh)
        assert result, result
        if dtype == torch.float64:
            assert float(result) < 1e-13


@LINEAR
def test_derivatives(place, case):
    def f(x):
        return case.call(x.sin(), place.mesh, place.mesh_dim) ** 2

    x = block(place.mesh.rank, case.shape(place.mesh.rank))
    check_gradient(f, x, mesh=place.mesh)
    check_second_gradient(f, x, mesh=place.mesh)
    check_jvp(f, x, mesh=place.mesh)


def test_complex_derivatives(mesh):
    z = block(mesh.rank, (3,), torch.complex128)
    for f in (
        lambda z: ms.all_reduce(z * z, mesh) ** 2,
        lambda z: ms.all_gather(z.conj() * z * z, mesh),
        lambda z: ms.all_to_all(z * z, mesh, split_dim=0, concat_dim=0),
        lambda z: ms.broadcast(z * z, mesh, root=mesh.size - 1).abs() ** 2,
    ):
        check_gradient(f, z, mesh=mesh)
        check_jvp(f, z, mesh=mesh)


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_other_reductions(place, op):
    blocks = [block(r, (2, 3)) for r in place.ranks]
    stack = np.stack([b.numpy() for b in blocks])
    wanted = {"max": np.max, "min": np.min, "prod": np.prod}[op](stack, axis=0)
    x = blocks[place.me]

    def f(x):
        return ms.all_reduce(x, place.mesh, place.mesh_dim, op=op)

    np.testing.assert_allclose(f(x).numpy(), wanted, rtol=1e-14)
    np.testing.assert_allclose(f(x.requires_grad_()).detach().numpy(), wanted, rtol=1e-14)
    check_gradient(lambda x: f(x.sin()) ** 2, x, mesh=place.mesh)
    check_second_gradient(lambda x: f(x.sin()) ** 2, x, mesh=place.mesh)
    check_jvp(lambda x: f(x.sin()) ** 2, x, mesh=place.mesh)


def test_ties_share_the_gradient_as_amax_does(mesh):
    rows = torch.tensor([[1.0, 2.0, 0.0], [1.0, 1.0, 0.0], [0.0, 2.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    rows = rows.repeat(2, 1)[: mesh.size]
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    whole = rows.clone().requires_grad_()
    (whole.amax(0) * weights).sum().backward()
    x = rows[mesh.rank].clone().requires_grad_()
    (ms.all_reduce(x, mesh, op="max", replicated=True) * weights).sum().backward()
    assert torch.allclose(x.grad, whole.grad[mesh.rank])
    x.grad = None
    # each rank's loss counts once
    (ms.all_reduce(x, mesh, op="max") * weights).sum().backward()
    assert torch.allclose(x.grad, mesh.size * whole.grad[mesh.rank])


def test_product_with_zeros_has_its_gradient(mesh):
    rows = torch.tensor([[0.0, 2.0], [3.0, 0.0], [1.0, 2.0], [2.0, 0.0]], dtype=torch.float64)
    rows = rows.repeat(2, 1)[: mesh.size]
    whole = rows.clone().requires_grad_()
    whole.prod(0).sum().backward()
    x = rows[mesh.rank].clone().requires_grad_()
    ms.all_reduce(x, mesh, op="prod", replicated=True).sum().backward()
    assert torch.equal(x.grad, whole.grad[mesh.rank])


@pytest.mark.parametrize("displacement", [0, 1, -1, 2, 5])
def test_shift(place, displacement):
    for mesh_dim in place.mesh.mesh_dim_names:
        dim = place.mesh.mesh_dim(mesh_dim)
        x = block(place.mesh.rank, (2, 3))
        source = place.mesh.neighbour(dim, -displacement)
        wanted = torch.zeros(2, 3, dtype=x.dtype) if source is None else block(source, (2, 3))

        def f(x, mesh_dim=mesh_dim):
            return ms.shift(x, place.mesh, mesh_dim, displacement)

        assert torch.equal(f(x), wanted)
        assert ms.dot_test(f, x, mesh=place.mesh)
        check_gradient(lambda x, f=f: f(x.sin()) ** 2, x, mesh=place.mesh)
        check_second_gradient(lambda x, f=f: f(x.sin()) ** 2, x, mesh=place.mesh)
        check_jvp(lambda x, f=f: f(x.sin()) ** 2, x, mesh=place.mesh)


def test_send_recv_along_a_chain_of_unequal_tensors(mesh):
    dest = mesh.rank + 1 if mesh.rank + 1 < mesh.size else None
    source = mesh.rank - 1 if mesh.rank else None
    shape = (mesh.rank, 2) if mesh.rank else (3,)

    def f(x):
        return ms.send_recv(x, mesh, dest=dest, source=source, shape=shape)

    x = block(mesh.rank, (mesh.rank + 1, 2))
    wanted = block(source, (mesh.rank, 2)) if mesh.rank else torch.zeros(3, dtype=x.dtype)
    assert torch.equal(f(x), wanted)
    assert ms.dot_test(f, x, mesh=mesh)
    check_gradient(lambda x: f(x.sin()) ** 2, x, mesh=mesh)
    check_second_gradient(lambda x: f(x.sin()) ** 2, x, mesh=mesh)
    check_jvp(lambda x: f(x.sin()) ** 2, x, mesh=mesh)


def test_replicated_results_have_one_cotangent(mesh):
    """What every rank computes from a replicated result is one loss, not as many as there are ranks."""
    weights = torch.arange(1.0, 4.0, dtype=torch.float64)
    x = block(mesh.rank, (3,)).requires_grad_()
    for op, scale in (("sum", 1.0), ("avg", 1.0 / mesh.size)):
        (g,) = torch.autograd.grad((ms.all_reduce(x, mesh, op=op, replicated=True) * weights).sum(), x)
        assert torch.allclose(g, scale * weights)
        (g,) = torch.autograd.grad((ms.all_reduce(x, mesh, op=op) * weights).sum(), x)
        assert torch.allclose(g, mesh.size * scale * weights)
    whole = torch.arange(3.0 * mesh.size, dtype=torch.float64)
    (g,) = torch.autograd.grad((ms.all_gather(x, mesh, replicated=True) * whole).sum(), x)
    assert torch.equal(g, whole[3 * mesh.rank : 3 * mesh.rank + 3])
    (g,) = torch.autograd.grad((ms.all_gather(x, mesh) * whole).sum(), x)
    assert torch.equal(g, mesh.size * whole[3 * mesh.rank : 3 * mesh.rank + 3])
    (g,) = torch.autograd.grad((ms.broadcast(x, mesh, replicated=True) * weights).sum(), x)
    assert torch.equal(g, weights * (mesh.rank == 0))


def test_replicated_second_derivatives_match_one_process(mesh):
    """Gradient penalty of a loss over sharded data: the whole function in one process is the reference."""
    rows = torch.stack([block(r, (3,)) for r in range(mesh.size)])

    def penalty(x, total):
        loss = total(x**3) ** 2
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return total(g**2)

    whole = rows.clone().requires_grad_()
    wanted = penalty(whole, lambda t: t.sum())
    wanted.backward()
    x = rows[mesh.rank].clone().requires_grad_()
    got = penalty(x, lambda t: ms.all_reduce(t.sum(), mesh, replicated=True))
    got.backward()
    assert torch.allclose(got, wanted, rtol=1e-12)
    assert torch.allclose(x.grad, whole.grad[mesh.rank], rtol=1e-12)


def test_given_sizes_save_a_message(mesh):
    sizes = EXTENTS[: mesh.size]
    x = block(mesh.rank, (sizes[mesh.rank], 4))
    whole = ms.all_gather(x, mesh)
    with ms.comm_counter() as count:
        assert torch.equal(ms.all_gather(x, mesh, sizes=sizes), whole)
        columns = ms.all_to_all(x, mesh, split_dim=1, concat_dim=0, concat_sizes=sizes)
    assert torch.equal(columns, whole.split(list(balanced(4, mesh.size)), 1)[mesh.rank])
    gathers = "broadcast" if sum(map(bool, sizes)) == 1 else "all_gather"  # where one rank has all
    assert set(count.by_op) == (set() if mesh.size == 1 else {gathers, "all_to_all"})
    back = ms.all_to_all(columns, mesh, split_dim=0, concat_dim=1, split_sizes=sizes)
    assert torch.equal(back, x)


def test_dtypes(mesh):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int32, torch.int64, torch.uint8):
        x = torch.ones(3, dtype=dtype)
        assert torch.equal(ms.all_reduce(x, mesh), x * mesh.size)
        assert torch.equal(ms.reduce_scatter(x.repeat(mesh.size), mesh), x * mesh.size)
        assert torch.equal(ms.all_gather(x, mesh), x.repeat(mesh.size))
        assert torch.equal(ms.shift(x, mesh, "x", 1), x)
    flag = torch.tensor([mesh.rank == 0, True, False])
    assert ms.all_reduce(flag, mesh, op="max").tolist() == [True, True, False]
    assert ms.all_reduce(flag, mesh, op="min").tolist() == [mesh.size == 1, True, False]
    assert torch.equal(ms.broadcast(flag, mesh), torch.tensor([True, True, False]))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, m: ms.all_reduce(x.bool(), m), ms.UnsupportedDtypeError, "no reduction 'sum' of torch.bool"),
        (lambda x, m: ms.all_reduce(x.int(), m, op="avg"), ms.UnsupportedDtypeError, "no reduction 'avg'"),
        (lambda x, m: ms.all_reduce(x, m, op=MPI.SUM), ms.LayoutError, "op= is of another kind"),
        (lambda x, m: ms.all_reduce(x, m, op="mode"), ms.UnsupportedDtypeError, "avg, sum, prod, max, min"),
        (lambda x, m: ms.all_reduce(x, m, "z"), ms.MeshError, "no such mesh dim"),
        (lambda x, m: ms.all_reduce(x, m, ("x", "x")), ms.MeshError, "out of order"),
        (lambda x, m: ms.all_reduce(x, m[()]), ms.MeshError, "no dims"),
        (lambda x, m: ms.all_reduce(1.0, m), ms.UnsupportedOperationError, "plain tensors"),
        (lambda x, m: ms.all_gather(x, m, dim=2), ms.LayoutError, "no such dim"),
        (lambda x, m: ms.all_gather(x, m, sizes=(7,) * m.size), ms.LayoutError, "sizes do not fit"),
        (lambda x, m: ms.reduce_scatter(x, m, sizes=(1,) * (m.size + 1)), ms.LayoutError, "sizes do not fit"),
        (lambda x, m: ms.reduce_scatter(x.bool(), m), ms.UnsupportedDtypeError, "no reduction"),
        (
            lambda x, m: ms.all_to_all(x, m, split_dim=0, concat_dim=1, split_sizes=(9,) * m.size),
            ms.LayoutError,
            "sizes do not fit",
        ),
        (lambda x, m: ms.broadcast(x, m, root=m.size), ms.MeshError, "no such root"),
        (lambda x, m: ms.send_recv(x, m, dest=m.size, source=None), ms.MeshError, "no such dest"),
    ],
)
def test_errors_on_every_rank(mesh, call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(3, 2), mesh)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    "call",
    [
        ms.all_reduce,
        lambda x, m: ms.all_gather(x, m, dim=1),
        ms.reduce_scatter,
        lambda x, m: ms.all_to_all(x, m, split_dim=0, concat_dim=1),
        ms.broadcast,
        lambda x, m: ms.shift(x, m, "x", 1),
    ],
    ids=["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift"],
)
def test_ranks_that_disagree(mesh, call):
    odd = mesh.rank == 1
    with pytest.raises(ms.DesyncError, match=r"shape|Size"):
        call(torch.ones(4 if odd else 3, 2), mesh)
    with pytest.raises(ms.DesyncError, match="float64"):
        call(torch.ones(3, 2, dtype=torch.float64 if odd else torch.float32), mesh)
    with pytest.raises(ms.DesyncError, match="True"):
        call(torch.ones(3, 2, requires_grad=odd), mesh)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    "call",
    [
        lambda x, m, odd: ms.all_gather(x, m, dim=2 if odd else 1),
        lambda x, m, odd: ms.all_gather(x, m, dim="y" if odd else 0),
        lambda x, m, odd: ms.all_gather(x, m, sizes=7 if odd else (7,) * m.size),
        lambda x, m, odd: ms.reduce_scatter(x, m, dim=2 if odd else 1),
        lambda x, m, odd: ms.reduce_scatter(x, m, sizes=7 if odd else None),
        lambda x, m, odd: ms.all_to_all(x, m, split_dim=2 if odd else 1, concat_dim=0),
        lambda x, m, odd: ms.all_to_all(x, m, split_dim=0, concat_dim=1, concat_sizes=7 if odd else (3,) * m.size),
        lambda x, m, odd: ms.broadcast(x, m, root="x" if odd else 0),
        lambda x, m, odd: ms.shift(x, m, 0, 0.5 if odd else 1),
    ],
    ids=lambda call: f"line {call.__code__.co_firstlineno}",
)
def test_an_argument_that_is_wrong_on_one_rank_raises_on_all(call):
    mesh = ms.init_mesh((-1,), ("y",))  # of its own: no call is known
    with pytest.raises(ms.LayoutError, match=r"raised on: rank 1 of"):
        call(torch.ones(7, 3), mesh, mesh.rank == 1)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift"])
@pytest.mark.parametrize("wrong", [None, 1.5, [1.0], "ShardTensor"])
def test_what_is_no_tensor_on_one_rank_raises_on_all(name, wrong):
    of = {"all_to_all": {"split_dim": 0, "concat_dim": 1}, "shift": {"mesh_dim": 0, "displacement": 1}}
    options = of.get(name, {})
    mesh = ms.init_mesh((-1,), ("y",))
    x = torch.ones(mesh.size, 3)
    if wrong == "ShardTensor":
        wrong = ms.distribute_tensor(x, mesh, (ms.Shard(0),))
    with pytest.raises(ms.UnsupportedOperationError, match=r"plain tensors(.|\n)*raised on: rank 1 of"):
        getattr(ms, name)(wrong if mesh.rank == 1 else x, mesh, **options)
    getattr(ms, name)(x, mesh, **options)
    with pytest.raises(ms.UnsupportedOperationError, match="plain tensors"):
        ms.all_reduce(wrong, mesh, ())


def test_mesh_after_free():
    mesh = ms.init_mesh((SIZE,), ("x",))
    x = torch.ones(3)
    ms.all_reduce(x, mesh)
    mesh.free()
    for call in (ms.all_reduce, ms.all_gather, ms.broadcast):
        with pytest.raises(ms.MeshError, match="after free"):
            call(x, mesh)


def test_mesh_dims_in_a_list():
    mesh = ms.init_mesh((-1, 1), ("y", "x"))
    x = torch.ones(3)
    for dims in (["y", "x"], [0], []):
        assert torch.equal(ms.all_reduce(x, mesh, dims), ms.all_reduce(x, mesh, tuple(dims)))


def test_mesh_dims_of_numpy():
    mesh = ms.init_mesh((-1, 1), ("y", "x"))
    x = torch.ones(3)
    for call in (ms.all_reduce, ms.all_gather, ms.reduce_scatter, ms.broadcast):
        for dim in (0, 1, -2):
            assert torch.equal(call(x, mesh, np.int64(dim)), call(x, mesh, dim))


def test_shard_tensors_are_refused(mesh):
    x = ms.distribute_tensor(torch.ones(4, 2), mesh, (ms.Shard(0),))
    with pytest.raises(ms.UnsupportedOperationError, match="to_local"):
        ms.all_reduce(x, mesh)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("count", [4, 1 << 17])
def test_roots_that_take_each_other_for_the_root(count):
    mesh, x = ms.init_mesh((-1,)), torch.ones(count)
    for root in range(mesh.size):  # all plans are there
        ms.broadcast(x, mesh, root=root)
    with pytest.raises(ms.DesyncError, match="different calls"):
        ms.broadcast(x, mesh, root=(mesh.rank + 1) % mesh.size)
    assert ms.broadcast(x * mesh.rank, mesh, root=1)[0] == 1
