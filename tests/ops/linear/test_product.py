"""Products and distances of vectors, against torch on the whole tensor."""

from __future__ import annotations

import math

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard
from tests.ops.windows import check, field, refused_alike, same, sampled


def pair(f, a, b, dims, case=0, **options):
    """Compare a function of two tensors, sharded alike, differently and with one plain."""
    for k, (mesh, placements, sizes) in enumerate(sampled(a.shape, dims, case, 5)):
        others = [(ms.Shard(b.ndim - 1),) * mesh.ndim, (ms.Shard(0),) * mesh.ndim, None]
        operands = [(a, mesh, placements, sizes), (b, mesh, others[k % 3], None)]
        what = f"{mesh.shape} {placements} {sizes} {others[k % 3]}"
        compare(f, operands, what=what, **options)
        compare(lambda y, x: f(x, y), operands[::-1], what=what, **options)


def test_cross():
    pair(torch.linalg.cross, field(5, 4, 3), field(5, 1, 3), (0, 1, 2))
    pair(lambda a, b: torch.linalg.cross(a, b, dim=0), field(3, 4), field(3, 4) * 2, (0, 1))
    check(lambda x: torch.cross(x, x.flip(0), dim=1), field(4, 3, 3), (0, 1, 2), 1)
    refused_alike(lambda x: torch.linalg.cross(x, x), field(4, 4))


def test_inner_products():
    check(lambda x: torch.linalg.vecdot(x, x.flip(0)), field(6, 5), (0, 1), 0)
    check(lambda x: torch.linalg.vecdot(x, torch.ones(5, dtype=torch.float64), dim=-1), field(6, 5), (0, 1), 1)
    check(lambda x: torch.linalg.vander(x, N=4), field(6, 5), (0, 1), 2)
    check(torch.linalg.vander, field(2, 5), (0, 1), 2)
    same(lambda x: torch.vander(x, 3), field(7), (0,), 2, exact=False)
    for n in (0, 1):
        same(lambda x, n=n: torch.vander(x, n), field(7), (0,), n)
    same(lambda x: torch.linalg.vander(x.to(torch.uint16), N=3), field(2, 5).abs(), (0, 1), 1)
    same(lambda x: torch.vander(x, increasing=True), field(7), (0,), 3, exact=False)
    pair(torch.dist, field(6, 5), field(6, 5) * 2, (0, 1))
    pair(lambda a, b: torch.dist(a, b, 3), field(6, 5), field(5), (0, 1))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, float("inf")])
def test_distances(p):
    pair(lambda a, b: torch.cdist(a, b, p), field(7, 4), field(5, 4), (0, 1), int(min(p, 9)), rtol=1e-7, atol=1e-8)
    pair(lambda a, b: torch.cdist(a, b, p), field(3, 7, 4), field(5, 4), (0, 1, 2), 1, rtol=1e-7, atol=1e-8)


def test_distances_of_many_rows():
    pair(torch.cdist, field(40, 3), field(30, 3) + 1, (0, 1), 1, rtol=1e-6, atol=1e-7)
    check(torch.pdist, field(6, 3), (0, 1), 1)


@pytest.mark.parametrize("options", [{}, {"correction": 0}, {"w": 1}, {"w": 2}])
def test_covariances(options):
    options = dict(options)
    w = options.pop("w", 0)
    if w:
        options["aweights"] = torch.arange(1, 7).double() / 3
    if w > 1:
        options["fweights"] = torch.tensor([1, 2, 1, 3, 1, 2])
    check(lambda x: torch.cov(x, **options), field(4, 6), (0, 1), w, count=6)
    check(lambda x: torch.cov(x, **options), field(6), (0,), w)


@pytest.mark.filterwarnings("ignore:cov")
def test_one_row_of_covariances_is_a_number():
    for f in (torch.cov, torch.corrcoef):
        check(f, field(1, 6), (0, 1), 0)
        same(f, torch.arange(12).reshape(3, 4) ** 2, (0, 1), 1, exact=False)
        same(f, torch.arange(5), (0,), 2, exact=False)
        same(lambda x, f=f: torch.nan_to_num(f(x), 7.0), field(3, 0), (0,), 3)


@pytest.mark.parametrize(
    "options",
    [
        {"fweights": torch.ones(6)},
        {"fweights": torch.ones(5, dtype=torch.int64)},
        {"fweights": torch.tensor([1, 2, -1, 1, 1, 1])},
        {"aweights": torch.ones(6, dtype=torch.int64)},
        {"aweights": torch.ones(1, 6)},
        {"aweights": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, -6.0])},
    ],
)
def test_weights_that_torch_refuses(options):
    x = shard(field(4, 6).float(), mesh_of((WORLD.size,)), (ms.Shard(1),))
    with pytest.raises(RuntimeError, match="weights"):
        torch.cov(x, **options)
    if next(iter(options.values())).ndim == 1:
        cut = {k: shard(w, mesh_of((WORLD.size,)), (ms.Shard(0),)) for k, w in options.items()}
        with pytest.raises(RuntimeError, match="weights"):
            torch.cov(x, **cut)


def test_correlations():
    check(torch.corrcoef, field(4, 6), (0, 1), 0, count=6)
    check(torch.corrcoef, field(6), (0,), 0)


def test_arrangements():
    pair(torch.kron, field(4, 3), field(2, 5), (0, 1))
    check(lambda x: torch.kron(x, x), field(4, 3), (0, 1), 1)
    check(lambda x: torch.kron(x, torch.ones(2, dtype=x.dtype)), field(4, 3), (0, 1), 2)
    check(lambda x: torch.block_diag(x, torch.ones(2, 2, dtype=x.dtype), x), field(3, 4), (0, 1), 0)
    check(lambda x: torch.cartesian_prod(x, x[1:]), field(5), (0,), 0)
    check(lambda x: torch.cartesian_prod(x, torch.ones(2, dtype=x.dtype), x[:2]), field(5), (0,), 1)
    check(lambda x: torch.combinations(x, 3), field(5), (0,), 0)
    check(lambda x: torch.diagflat(x, 1), field(2, 3), (0, 1), 0)


def test_a_product_of_one_vector_is_that_vector():
    x = ms.distribute_tensor(torch.ones(5), mesh_of((WORLD.size,)), (ms.Shard(0),))
    assert torch.cartesian_prod(x) is x
    for wrong in (x.reshape(5, 1), x.sum()):
        with pytest.raises(RuntimeError, match="1D vector"):
            torch.cartesian_prod(wrong)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_renorm(dim):
    check(lambda x: torch.renorm(x, 2, dim, 1.5), field(4, 5, 3), (0, 1, 2), dim, rtol=1e-9)
    odd = field(4, 5, 3)
    odd[1, 1, 1], odd[2, 3] = math.nan, 0
    for p in (1, 2, 3, math.inf):  # slices that stay pass their gradient, NaN or not
        check(lambda x, p=p: torch.renorm(x, p, dim, 1.5), odd, (0, 1, 2), dim)
    for mesh, placements, sizes in layouts((4, 5), (0, 1)):
        x = shard(field(4, 5), mesh, placements, sizes)
        x.renorm_(1, dim, 0.5)
        torch.testing.assert_close(gathered(x), field(4, 5).renorm(1, dim, 0.5))


def test_sum_to_size():
    check(lambda x: x.sum_to_size(1, 3), field(4, 5, 3), (0, 1, 2), 0)
    check(lambda x: x.sum_to_size((4, 5, 1)), field(4, 5, 3), (0, 1, 2), 1)
    check(lambda x: x.sum_to_size(4, 5, 3) * 1, field(4, 5, 3), (0, 1, 2), 2)
    refused_alike(lambda x: x.sum_to_size(2, 3), field(4, 3))


def test_complex_vectors():
    x = torch.complex(field(5, 3), field(5, 3).flip(0))
    check(lambda a: torch.linalg.vecdot(a, a.flip(0)), x, (0, 1), 0)
    check(torch.cov, x, (0, 1), 1)
    check(lambda a: torch.linalg.cross(a, a.flip(0)), x, (0, 1), 2)
    check(lambda a: torch.kron(a, a), x[:2], (0, 1), 3)


def test_methods():
    check(lambda a: a.cov(), field(4, 6), (0, 1), 0)
    check(lambda a: a.corrcoef(), field(4, 6), (0, 1), 1)
    check(lambda a: a.kron(a), field(4, 2), (0, 1), 2)
    check(lambda a: a.dist(a * 2, 1), field(4, 6), (0, 1), 3)
    check(lambda a: a.diagflat(), field(5), (0,), 4)
    check(lambda a: a.renorm(2, 0, 1.0), field(4, 6), (0, 1), 5)
    check(lambda a: a.cross(a.flip(0), -1), field(4, 3), (0, 1), 6)
