"""points.knn and points.radius: the neighbours and distances of the whole point sets, on every mesh, with gradients."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

import mpishard as ms
from mpishard.errors import DesyncError, LayoutError, MeshError, UnsupportedDtypeError
from mpishard.layout import layout_of
from mpishard.points import tiles
from tests.compare import WORLD, mesh_of, mesh_shapes, shard


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def lattice(n: int, ndim: int) -> Tensor:
    return torch.cartesian_prod(*[torch.arange(n, dtype=torch.float64)] * ndim).view(-1, ndim)


CLOUDS = {
    "in a cube": (drawn(37, 3), drawn(23, 3, seed=1)),
    "far apart": (drawn(19, 2), drawn(17, 2, seed=1) + 5),
    "equally far": (lattice(4, 2), lattice(4, 2) + 0.5),
    "at one place": (torch.full((12, 2), 0.25, dtype=torch.float64), drawn(5, 2)),
    "on a line": (drawn(31, 1).sort(0).values, drawn(8, 1, seed=2)),
    "of features": (drawn(21, 12), drawn(9, 12, seed=3)),
    "in clusters": (drawn(40, 2) * 0.01 + torch.randint(0, 3, (40, 1)) * 0.0 + lattice(2, 2).repeat(10, 1) * 100,
                    drawn(11, 2, seed=4) + lattice(2, 2)[:1] * 100),
    "no queries": (drawn(9, 2), drawn(0, 2)),
    "more ranks than queries": (drawn(9, 2), drawn(1, 2, seed=9)),
}  # fmt: skip


def nearest(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """By definition: a stable sort leaves equal distances in the order of the points."""
    far = torch.cdist(queries, points, compute_mode="donot_use_mm_for_euclid_dist")
    far, at = far.sort(dim=1, stable=True)
    return at[:, :k], far[:, :k]


def cut(n: int, m: int, seed: int = 0):
    """Meshes, and how points and queries lie on them: cut alike or not, replicated, with empty blocks."""
    draw = random.Random(seed)
    for shape in mesh_shapes(2):
        mesh = mesh_of(shape)
        choices = list(itertools.product((ms.Shard(0), ms.Replicate()), repeat=len(shape)))
        pairs = [(p, q) for p, q in itertools.product(choices, choices) if ms.Shard(0) in (*p, *q)]
        for p, q in [pairs[0], *draw.sample(pairs[1:], min(2, len(pairs) - 1))]:
            yield mesh, p, None, q, None
            if draw.random() < 0.5:
                yield mesh, p, sizes(n, shape, p, draw), q, sizes(m, shape, q, draw)


def sizes(n, shape, placements, draw):
    found = layout_of(shape, placements, (n,)).sizes[0]
    if found is None:
        return None
    borders = sorted(draw.randint(0, n) for _ in range(len(found) - 1))
    return {0: tuple(b - a for a, b in zip([0, *borders], [*borders, n]))}


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", CLOUDS)
def test_nearest(name, k):
    points, queries = CLOUDS[name]
    at, far = nearest(points, queries, k)
    for mesh, p, p_sizes, q, q_sizes in cut(len(points), len(queries), k):
        own = shard(queries, mesh, q, q_sizes)
        found = ms.points.knn(shard(points, mesh, p, p_sizes), own, k)
        assert torch.equal(found.indices.full_tensor(), at)
        torch.testing.assert_close(found.distances.full_tensor(), far, rtol=1e-13, atol=1e-13)
        for x in found:
            assert x.sharding.placements == own.sharding.placements
            assert x.to_local().shape[0] == own.to_local().shape[0]


def pairs(points: Tensor, queries: Tensor, radius: float, most: int | None):
    far = torch.cdist(queries, points, compute_mode="donot_use_mm_for_euclid_dist")
    found = [
        (i, int(j), d)
        for i, row in enumerate(far)
        for d, j in [e for e in zip(*row.sort(stable=True)) if e[0] <= radius][:most]
    ]
    counts = torch.zeros(len(queries), dtype=torch.int64)
    for i, *_ in found:
        counts[i] += 1
    of, at, lengths = zip(*found) if found else ((), (), ())
    return (
        counts,
        torch.tensor(of, dtype=torch.int64),
        torch.tensor(at, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.float64),
    )


@pytest.mark.parametrize(("radius", "most"), [(0.4, None), (1.0, 3), (float("inf"), 2)])
@pytest.mark.parametrize("name", CLOUDS)
def test_within(name, radius, most):
    points, queries = CLOUDS[name]
    counts, of, at, far = pairs(points, queries, radius, most)
    for mesh, p, p_sizes, q, q_sizes in cut(len(points), len(queries), len(name)):
        own = shard(queries, mesh, q, q_sizes)
        found = ms.points.radius(shard(points, mesh, p, p_sizes), own, radius, most)
        assert torch.equal(found.counts.full_tensor(), counts)
        assert found.counts.to_local().shape[0] == own.to_local().shape[0]
        assert torch.equal(found.queries.full_tensor(), of)
        assert torch.equal(found.indices.full_tensor(), at)
        torch.testing.assert_close(found.distances.full_tensor(), far, rtol=1e-13, atol=1e-13)
        lo, hi = own.sharding.interval(0, mesh.coords)
        assert torch.equal(found.queries.to_local(), of[(of >= lo) & (of < hi)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_themselves(dtype):
    """A point is the first of its own neighbours; distances of zero have no gradient, and no NaN."""
    x = drawn(50, 3, dtype=dtype)
    mesh = mesh_of((WORLD.size,))
    own = shard(x, mesh, (ms.Shard(0),), None, True)
    found = ms.points.knn(own, own, 5)
    assert torch.equal(found.indices.full_tensor()[:, 0], torch.arange(50))
    whole = x.clone().requires_grad_()
    at, _ = nearest(x, x, 5)
    assert torch.equal(found.indices.full_tensor(), at)
    far = torch.linalg.vector_norm(whole[:, None] - whole[at], dim=-1)
    weight = drawn(50, 5, seed=6, dtype=dtype)
    (expected,) = torch.autograd.grad((far * weight).sum(), whole)
    (got,) = torch.autograd.grad((found.distances * weight).sum(), own)
    torch.testing.assert_close(got.full_tensor(), expected)


def test_bits_do_not_depend_on_the_mesh():
    points, queries = drawn(60, 3, dtype=torch.float32), drawn(30, 3, seed=1, dtype=torch.float32)
    bits = None
    for mesh, p, p_sizes, q, q_sizes in cut(60, 30):
        for needs in (False, True):
            found = ms.points.knn(shard(points, mesh, p, p_sizes, needs), shard(queries, mesh, q, q_sizes), 3)
            far = found.distances.detach().full_tensor()
            bits = far if bits is None else bits
            assert torch.equal(far, bits)


@pytest.mark.parametrize("search", ["knn", "radius"])
@pytest.mark.parametrize("name", ["in a cube", "far apart", "more ranks than queries"])
def test_gradients(name, search):
    points, queries = CLOUDS[name]
    k = 3
    for mesh, p, p_sizes, q, q_sizes in cut(len(points), len(queries), 5):
        whole = [points.clone().requires_grad_(), queries.clone().requires_grad_()]
        own = [shard(points, mesh, p, p_sizes, True), shard(queries, mesh, q, q_sizes, True)]
        if search == "knn":
            at, _ = nearest(points, queries, k)
            far = torch.linalg.vector_norm(whole[1][:, None] - whole[0][at], dim=-1)
            found = ms.points.knn(*own, k).distances
        else:
            _, of, at, _ = pairs(points, queries, 6.0, 7)
            far = torch.linalg.vector_norm(whole[1][of] - whole[0][at], dim=-1)
            found = ms.points.radius(*own, 6.0, 7).distances
        expected = torch.autograd.grad(far.sin().sum(), whole, create_graph=True)
        got = torch.autograd.grad(found.sin().sum(), own, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in expected), whole)
        second_got = torch.autograd.grad(sum((g * g).sum() for g in got), own)
        for g, e in zip((*got, *second_got), (*expected, *second), strict=True):
            torch.testing.assert_close(g.detach().full_tensor(), e.detach(), rtol=1e-9, atol=1e-11)


def test_plain_points_and_plain_queries():
    points, queries = CLOUDS["in a cube"]
    mesh = mesh_of((WORLD.size,))
    at, _ = nearest(points, queries, 2)
    plain = points.clone().requires_grad_()
    found = ms.points.knn(plain, shard(queries, mesh, (ms.Shard(0),)), 2)
    assert torch.equal(found.indices.full_tensor(), at)
    found.distances.sum().backward()
    whole = points.clone().requires_grad_()
    torch.linalg.vector_norm(queries[:, None] - whole[at], dim=-1).sum().backward()
    torch.testing.assert_close(plain.grad, whole.grad)
    found = ms.points.knn(shard(points, mesh, (ms.Shard(0),)), queries, 2)
    assert torch.equal(found.indices.full_tensor(), at)


@pytest.mark.parametrize("pairs_at_once", [1, 7, 100])
def test_bounded_parts(pairs_at_once, monkeypatch):
    """Distances are computed a few at a time, whatever the numbers of points; what is found is the same."""
    monkeypatch.setattr(tiles, "_PAIRS", pairs_at_once)
    seen = []
    distances = tiles.distances
    monkeypatch.setattr(tiles, "distances", lambda q, p: seen.append(len(q) * len(p)) or distances(q, p))
    for name in ("in a cube", "equally far"):
        points, queries = CLOUDS[name]
        mesh = mesh_of((WORLD.size,))
        own = shard(points, mesh, (ms.Shard(0),)), shard(queries, mesh, (ms.Shard(0),))
        assert torch.equal(ms.points.knn(*own, 5).indices.full_tensor(), nearest(points, queries, 5)[0])
        found = ms.points.radius(*own, 1.0)
        assert torch.equal(found.indices.full_tensor(), pairs(points, queries, 1.0, None)[2])
    assert max(seen, default=0) <= pairs_at_once


def test_dims_do_not_take_room():
    """Of points of many dims no differences are kept in all dims at once."""
    mesh = mesh_of((WORLD.size,))
    own = shard(drawn(300, 64), mesh, (ms.Shard(0),))
    with ms.testing.LiveMemory() as memory:
        ms.points.knn(own, own, 3)
    # some numbers for each pair of a tile's queries and all points
    assert memory.peak < 8 * 300 * (tiles.QUERIES * 8 + 64 * 4)


def test_tiles_leave_out_what_is_far():
    n = 12000
    mesh = mesh_of((WORLD.size,))
    own = shard(drawn(n, 2), mesh, (ms.Shard(0),))
    own = own[ms.graph.partition(own)]
    seen = []
    distances = tiles.distances
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "distances", lambda q, p: seen.append(len(q) * len(p)) or distances(q, p))
        found = ms.points.knn(own, own, 6)
    full, some = own.full_tensor(), torch.arange(0, n, 97)
    assert torch.equal(found.indices.full_tensor()[some], nearest(full, full[some], 6)[0])
    assert sum(seen) < n * n / WORLD.size / 12


def test_only_points_that_may_be_near_travel():
    """Of points in order along a line, each block's queries need a few of the blocks beside, and no others."""
    mesh = mesh_of((WORLD.size,))
    n, size = 100 * WORLD.size, WORLD.size
    x = torch.arange(n, dtype=torch.float64)[:, None]
    own = shard(x, mesh, (ms.Shard(0),))
    with ms.comm_counter() as count:
        found = ms.points.radius(own, own, 3.0)
    assert found.indices.shape[0] == 7 * n - 12
    sent = count.by_op.get("points.radius")
    sides = (WORLD.rank > 0) + (WORLD.rank < size - 1)
    # three rows to each side, of a position and a number
    assert (sent.messages, sent.nbytes) == (2 * sides, 3 * 16 * sides) if sides else sent is None
    leaf = own.clone().detach().requires_grad_()
    found = ms.points.radius(leaf, leaf.detach(), 3.0)
    with ms.comm_counter() as count:
        found.distances.sum().backward()
    sent = count.by_op.get("points.radius")
    assert (sent.messages, sent.nbytes) == (sides, 3 * 8 * sides) if sides else sent is None


def test_a_graph_of_what_is_near():
    x = drawn(40, 2)
    mesh = mesh_of((WORLD.size,))
    own = shard(x, mesh, (ms.Shard(0),))
    found = ms.points.radius(own, own, 0.3)
    graph = ms.graph.halo(torch.stack([found.indices, found.queries]), own)
    got = graph.sum(graph.ends(own)[0])
    near = (torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") <= 0.3).double()
    torch.testing.assert_close(got.full_tensor(), near @ x)


MISTAKES = {
    "too few points": (lambda p, q: ms.points.knn(p, q, 10), LayoutError, "fewer points than neighbours"),
    "no neighbours": (lambda p, q: ms.points.knn(p, q, 0), LayoutError, "no number of neighbours"),
    "half a neighbour": (lambda p, q: ms.points.knn(p, q, 1.5), LayoutError, "no number of neighbours"),
    "other dims": (lambda p, q: ms.points.knn(p[:, :2], q, 2), LayoutError, "positions of other shapes"),
    "a vector": (lambda p, q: ms.points.radius(p[:, 0], q, 2), LayoutError, "positions of other shapes"),
    "other dtypes": (lambda p, q: ms.points.radius(p.float(), q, 2), UnsupportedDtypeError, "of other dtypes"),
    "integers": (lambda p, q: ms.points.knn(p.long(), q.long(), 2), UnsupportedDtypeError, "of other dtypes"),
    "not finite": (lambda p, q: ms.points.knn(p / (p - p[4:5]), q, 2), LayoutError, "points are not finite"),
    "radius beyond all doubles": (lambda p, q: ms.points.radius(p, q, 10**400), LayoutError, "no radius"),
    "negative radius": (lambda p, q: ms.points.radius(p, q, -1.0), LayoutError, "no radius"),
    "no most": (lambda p, q: ms.points.radius(p, q, 1.0, 0), LayoutError, "no number of points"),
    "no shards": (lambda p, q: ms.points.knn(p.full_tensor(), q.full_tensor(), 1), LayoutError, "another kind"),
    "no tensor": (lambda p, q: ms.points.knn(p, [1.0], 1), LayoutError, "another kind"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    call, error, text = MISTAKES[mistake]
    mesh = mesh_of((WORLD.size,))
    own = shard(drawn(9, 3) + 1, mesh, (ms.Shard(0),)), shard(drawn(7, 3), mesh, (ms.Shard(0),))
    with pytest.raises(error, match=text) as raised:
        call(*own)
    assert len(set(WORLD.allgather(str(raised.value).partition("raised on")[0]))) == 1


def test_two_meshes():
    mesh, other = mesh_of((WORLD.size,)), ms.init_mesh((-1,))
    with pytest.raises(MeshError):
        ms.points.knn(shard(drawn(9, 3), mesh, (ms.Shard(0),)), shard(drawn(9, 3), other, (ms.Shard(0),)), 1)
    other.free()


@pytest.mark.ranks(2, 3, 4)
def test_calls_that_differ():
    mesh = mesh_of((WORLD.size,))
    x = shard(drawn(9, 3), mesh, (ms.Shard(0),))
    with pytest.raises(DesyncError):
        ms.points.knn(x, x, 2 + (WORLD.rank == 1))
    with pytest.raises(DesyncError, match="max_points"):
        ms.points.radius(x, x, 1.0, 2 + (WORLD.rank == 1))
    with pytest.raises(DesyncError, match="max_points"):
        ms.points.radius(x, x, 1.0, None if WORLD.rank == 1 else 3)
    assert torch.equal(
        ms.points.radius(x, x, 1.0, 2**70).counts.full_tensor(), ms.points.radius(x, x, 1.0).counts.full_tensor()
    )
    with pytest.raises(LayoutError, match="fewer points"):
        ms.points.knn(x, x, 20 if WORLD.rank == 1 else 2)
    for call in (ms.points.knn, ms.points.radius):
        with pytest.raises(DesyncError):
            call(x, drawn(3, 3).requires_grad_(WORLD.rank == 1), 2)


@pytest.mark.ranks(2, 3, 4)
def test_a_wrong_argument_where_points_travel_by_a_plan_that_is_there():
    mesh = mesh_of((WORLD.size,))
    x, queries = shard(drawn(9, 3), mesh, (ms.Shard(1),)), drawn(4, 3)
    for call in (ms.points.knn, ms.points.radius):
        call(x, queries, 2)
        with pytest.raises(LayoutError, match="positions of other shapes"):
            call(x, queries[:, : 2 if WORLD.rank == 1 else 3], 2)
        with pytest.raises(LayoutError, match=r"no (number of neighbours|radius)"):
            call(x, queries, -1 if WORLD.rank == 1 else 2)


@pytest.mark.parametrize("scale", [1e308, 1e160, 1e-160, 5e-324])
def test_at_the_ends_of_a_double(scale, recwarn):
    """Distances that are infinite, or zero, are distances: each query has its points, in the order of their numbers."""
    x = torch.tensor([[1.0], [-1.0], [0.5], [0.0], [1.0], [-1.0], [0.0]], dtype=torch.float64) * scale
    mesh = mesh_of((WORLD.size,))
    own = shard(x, mesh, (ms.Shard(0),))
    far, at = tiles.lengths(x[:, None] - x).sort(dim=1, stable=True)
    found = ms.points.knn(own, own, 5)
    assert torch.equal(found.indices.full_tensor(), at[:, :5])
    assert torch.equal(found.distances.full_tensor(), far[:, :5])
    everything = ms.points.radius(own, own, float("inf"))
    assert torch.equal(everything.indices.full_tensor(), at.reshape(-1))
    assert sorted(ms.graph.partition(own).full_tensor().tolist()) == list(range(7))
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
