"""grid_sample and affine_grid, against torch on the whole tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, compare, layouts, mesh_of, skew
from tests.ops.windows import check, field, refused_alike, sampled
from tests.release import RELEASE

KINDS = list(itertools.product(("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (True, False)))


def points(*shape):
    """Points of which some lie outside."""
    return field(*shape) * 0.8


@pytest.mark.parametrize("case", range(len(KINDS)))
def test_planes(case):
    mode, padding, corners = KINDS[case]

    def f(x, g):
        return F.grid_sample(x, g, mode, padding, corners)

    x, g = field(2, 3, 6, 5), points(2, 4, 7, 2)
    for k, (mesh, placements, sizes) in enumerate(sampled(x.shape, (0, 1, 2, 3), case, 3)):
        alike = tuple(p if p.is_shard(0) else ms.Replicate() if p.is_shard(1) else ms.Shard(1) for p in placements)
        other = [(ms.Shard(1),) * mesh.ndim, None, alike][k]
        compare(f, [(x, mesh, placements, sizes), (g, mesh, other, None)], what=f"{placements} {sizes} {other}")
    mesh, placements, sizes = list(sampled(g.shape, (0, 1, 2, 3), case, 3))[case % 2]
    compare(f, [(x, mesh, None, None), (g, mesh, placements, sizes)], what=f"plain field, {placements} {sizes}")


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_volumes(mode):
    x, g = field(2, 2, 4, 3, 5), points(2, 3, 4, 2, 3)
    for mesh, placements, sizes in sampled(x.shape, (0, 2, 3, 4), len(mode), 5):
        compare(
            lambda a, b: F.grid_sample(a, b, mode, "border", align_corners=True),
            [(x, mesh, placements, sizes), (g, mesh, (ms.Shard(2),) * mesh.ndim, None)],
        )


def test_modes_by_number():
    for x, g, f in (
        (field(2, 3, 6, 5), points(2, 4, 7, 2), lambda x, g: torch.grid_sampler_2d(x, g, 2, 1, True)),
        (field(2, 2, 4, 3, 5), points(2, 3, 4, 2, 3), lambda x, g: torch.grid_sampler_3d(x, g, 0, 2, False)),
        (field(2, 3, 6, 5), points(2, 4, 7, 2), lambda x, g: torch.ops.aten.grid_sampler(x, g, 1, 0, False)),
    ):
        for mesh, placements, sizes in sampled(x.shape, range(x.ndim), 0, 3):
            compare(f, [(x, mesh, placements, sizes), (g, mesh, None, None)], what=f"{placements} {sizes}")


def test_a_plain_grid_is_cut_as_the_field():
    mesh = mesh_of((WORLD.size,))
    x = ms.distribute_tensor(field(2, 3, 8, 8), mesh, (ms.Shard(2),))
    y = F.grid_sample(x, points(2, 8, 8, 2), align_corners=False)
    assert y.sharding == x.sharding
    assert F.grid_sample(x, points(2, 5, 8, 2), align_corners=False).placements == (ms.Shard(2),)


def test_affine_grid():
    theta = field(4, 2, 3)
    for corners in (True, False):
        check(lambda t: F.affine_grid(t, (4, 3, 5, 6), corners), theta, (0, 1, 2), int(corners), count=5)
    check(lambda t: F.affine_grid(t, [4, 3, 2, 5, 6], False), field(4, 3, 4), (0, 1, 2), 2, count=5)
    for mesh, placements, sizes in layouts((4, 2, 3), (0,), 1):
        x = field(4, 2, 6, 5)
        compare(
            lambda t, a: F.grid_sample(a, F.affine_grid(t, (4, 2, 6, 5), False), align_corners=False),
            [(theta, mesh, placements, sizes), (x, mesh, (ms.Shard(2),), None)],
        )


def test_torchs_own_errors():
    refused_alike(lambda x: F.grid_sample(x, points(3, 4, 5, 2), align_corners=False), field(2, 3, 6, 5))
    refused_alike(lambda x: F.grid_sample(x, points(2, 4, 5, 3), align_corners=False), field(2, 3, 6, 5))
    refused_alike(lambda x: F.grid_sample(x, points(2, 4, 5, 2), "linear", align_corners=False), field(2, 3, 6, 5))
    refused_alike(lambda t: F.affine_grid(t, (3, 1, 5, 6), False), field(4, 2, 3))


def warped(shape, ndim, seed=1.0):
    """An identity grid that is shifted and bent a little, and in part lies exactly on cells."""
    theta = torch.eye(ndim, ndim + 1, dtype=torch.float64).expand(shape[0], -1, -1).contiguous()
    theta[0, 0, -1] = 0.05 * seed
    grid = F.affine_grid(theta, list(shape), False)
    grid[:, 1::2] += 0.02 * seed * field(*grid[:, 1::2].shape)
    return grid


@pytest.mark.parametrize("case", range(len(KINDS)))
def test_windows_of_a_plane(case):
    mode, padding, corners = KINDS[case]
    x = field(2, 3, 24, 12)
    for scale in (1.0, 2.0):
        g = warped(x.shape, 2) * scale if scale == 1 else warped((2, 3, 30, 8), 2, 3.0)
        for mesh, placements, sizes in sampled(x.shape, (2, 3), case, 3):
            compare(
                lambda a, b: F.grid_sample(a, b, mode, padding, corners),
                [(x, mesh, placements, sizes), (g, mesh, None, None)],
                what=f"{KINDS[case]} {placements} {sizes}",
            )


@pytest.mark.parametrize("case", range(12))
def test_windows_of_a_volume(case):
    mode, padding, corners = [k for k in KINDS if k[0] != "bicubic"][case]
    x = field(2, 2, 6, 5, 16)
    g = warped(x.shape, 3)
    for mesh, placements, sizes in sampled(x.shape, (0, 1, 2, 4), case, 3):
        compare(
            lambda a, b: F.grid_sample(a, b, mode, padding, corners),
            [(x, mesh, placements, sizes), (g, mesh, None, None)],
            what=f"{mode} {padding} {corners} {placements} {sizes}",
        )


@pytest.mark.parametrize(("ndim", "case"), [*itertools.product((2,), range(18)), *itertools.product((3,), range(12))])
def test_cells_that_are_no_numbers(ndim, case):
    """As the land of an ocean's field: what does not count beside a border may be NaN."""
    mode, padding, corners = KINDS[case]
    g = torch.Generator().manual_seed(case)
    full = torch.randn(2, 2, 12, *(5, 6)[: ndim - 1], generator=g, dtype=torch.float64)
    drawn = torch.rand(full.shape, generator=g, dtype=torch.float64)
    full[drawn < 0.1], full[drawn > 0.95] = torch.nan, torch.inf
    eye = torch.eye(ndim, ndim + 1, dtype=torch.float64).repeat(2, 1, 1)
    grid = F.affine_grid(eye, list(full.shape), align_corners=corners) * 1.15
    mesh = ms.init_mesh((-1,), ("y",))
    found = []
    for sharded in (False, True):
        x, p = full.clone(), grid.clone()
        if sharded:
            x, p = ms.distribute_tensor(x, mesh, (ms.Shard(2),)), ms.distribute_tensor(p, mesh, (ms.Shard(1),))
        x, p = x.requires_grad_(), p.requires_grad_()
        y = F.grid_sample(x, p, mode, padding, corners)
        y.sum().backward()
        found.append([t.full_tensor() if sharded else t for t in (y.detach(), x.grad, p.grad)])
    for t, u in zip(*found):
        if mode == "bicubic":  # of infinities of both signs, the order of sums tells
            t, u = (torch.where(v.isfinite(), v, 7.0) for v in (t, u))
        torch.testing.assert_close(u, t, equal_nan=True)


@pytest.mark.parametrize("case", range(len(KINDS)))
def test_points_that_are_nowhere(case):
    """All points of some ranks, or one: what torch makes of them depends on its kernels."""
    (mode, padding, corners), odd = KINDS[case], (torch.nan, torch.inf, -torch.inf, 1e30)[case % 4]
    mesh = ms.init_mesh((-1,), ("y",))
    for x, p in ((field(2, 2, 8, 5), points(2, 4, 7, 2)), (field(2, 2, 8, 5, 3), points(2, 4, 3, 2, 3))):
        if mode == "bicubic" and p.shape[-1] == 3:
            continue
        for some in ((slice(None), slice(0, 2)), (0, 1, 1), slice(None)):
            q = p.clone()
            q[some] = odd
            y = F.grid_sample(
                ms.distribute_tensor(x, mesh, (ms.Shard(2),)), ms.distribute_tensor(q, mesh, (ms.Shard(1),)),
                mode, padding, corners,
            )  # fmt: skip
            torch.testing.assert_close(y.full_tensor(), F.grid_sample(x, q, mode, padding, corners), equal_nan=True)


@pytest.mark.parametrize("whole", [False, True], ids=["windows", "the field"])
def test_field_and_points_cut_along_any_dims(whole):
    x, g = field(2, 3, 12, 9), points(2, 5, 4, 2) * (1.0 if whole else 0.3)
    mesh = mesh_of((WORLD.size,))
    kinds = [*(ms.Shard(d) for d in range(4)), ms.Replicate()]
    for p, q in itertools.product(kinds, repeat=2):
        compare(
            lambda a, b: F.grid_sample(a, b, align_corners=False),
            [(x, mesh, (p,), None), (g, mesh, (q,), None)],
            what=f"{p} {q}",
        )


def test_overlapping_windows_add_up():
    mesh = mesh_of((WORLD.size,))
    grid = F.affine_grid(torch.eye(2, 3, dtype=torch.float64)[None] * 0.9, [1, 1, 20, 2], False)
    for sizes in (None, {2: skew(31, WORLD.size)}):
        compare(
            lambda x: F.grid_sample(x, grid, align_corners=False), [(field(1, 1, 31, 2), mesh, (ms.Shard(2),), sizes)]
        )


def test_a_window_travels_not_the_field():
    mesh = mesh_of((WORLD.size,))
    n = 64 * WORLD.size
    x = ms.distribute_tensor(field(1, 1, n, 4), mesh, (ms.Shard(2),)).requires_grad_(True)
    g = F.affine_grid(torch.eye(2, 3, dtype=torch.float64)[None], [1, 1, n, 4], False) * 0.99
    with ms.comm_counter() as counted:
        F.grid_sample(x, g, align_corners=False).sum().backward()
    if WORLD.size > 1:
        assert counted.nbytes < 64 * 4 * 8


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_second_gradients_where_a_rank_has_no_points(mode):
    """Gradients of a linear function of the values: every rank's depend on field and grid."""
    mesh, x, g = mesh_of((WORLD.size,)), field(1, 2, 32, 4), field(1, 3, 2, 2) * 0.05 - 0.85
    for dims in ((2, 1), (3, 2), (1, 2)):
        for sizes in (None, {dims[1]: skew(g.shape[dims[1]], WORLD.size)}):
            compare(
                lambda a, b: F.grid_sample(a, b, mode, align_corners=False),
                [(x, mesh, (ms.Shard(dims[0]),), None), (g, mesh, (ms.Shard(dims[1]),), sizes)],
                second=RELEASE >= (2, 13),  # torch 2.8 has none to compare with
                what=f"{dims} {sizes}",
            )
