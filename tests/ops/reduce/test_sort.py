"""Sorting, order statistics and scans along sharded and whole dims, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, compare, mesh_of, shard, skew
from tests.ops.windows import check, field, refused_alike, same, sampled

SHAPE = (5, 7, 6)

FUNCTIONS = [
    lambda x: x.sort(1),
    lambda x: torch.sort(x, dim=0, descending=True, stable=True),
    lambda x: x.argsort(2),
    torch.msort,
    lambda x: x.topk(3, 1),
    lambda x: torch.topk(x, 5, dim=0, largest=False),
    lambda x: x.topk(1, -1, sorted=False),
    lambda x: x.kthvalue(2, 1),
    lambda x: x.kthvalue(4, 0, keepdim=True),
    lambda x: x.median(),
    lambda x: x.median(1),
    lambda x: x.nanmedian(2, keepdim=True),
    lambda x: torch.quantile(x, 0.3, dim=1),
    lambda x: torch.quantile(x, torch.tensor([0.1, 0.8], dtype=x.dtype), dim=0, keepdim=True),
    lambda x: torch.nanquantile(x, 0.5),
    lambda x: x.round().mode(1)[0],
    lambda x: x.cumsum(1),
    lambda x: x.cumprod(0),
    lambda x: x.logcumsumexp(1),
    lambda x: x.logcumsumexp(2),
    lambda x: x.cummax(1),
    lambda x: x.diagonal(0, 0, 1),
    lambda x: torch.diag_embed(x[:, 0]),
    lambda x: F.group_norm(x, 7),
    lambda x: F.group_norm(x.transpose(1, 2), 2),
    lambda x: torch.stack(torch.meshgrid(x[0, :, 0], x[1, :, 1], indexing="ij")),
]


@pytest.mark.parametrize("case", range(len(FUNCTIONS)))
def test_functions(case):
    check(FUNCTIONS[case], field(*SHAPE), range(3), case, count=7)


def test_what_is_sorted_is_cut_as_before():
    x = shard(field(*SHAPE), mesh_of((WORLD.size,)), (ms.Shard(1),))
    values, index = x.sort(1)
    assert values.sharding is x.sharding
    assert index.sharding is x.sharding


def test_the_largest_of_two_ranks_meet():
    x = shard(field(4, 8 * WORLD.size), mesh_of((WORLD.size,)), (ms.Shard(1),))
    x.topk(2, 1)
    with ms.comm_counter() as counter:
        x.topk(2, 1)
    # keys and positions, two per row, in each meeting; and the values
    assert counter.nbytes <= 4 * 2 * (16 * (WORLD.size.bit_length()) + 8)


HOW = ("linear", "lower", "higher", "midpoint", "nearest")
# of a whole field, of a vector, and of two long lines
SELECTED = [
    (
        (3, 5, 4),
        [
            torch.median,
            torch.nanmedian,
            *(lambda x, how=how: torch.quantile(x, 0.3, interpolation=how) for how in HOW),
            lambda x: torch.nanquantile(x, torch.tensor([0.0, 0.77, 1.0], dtype=x.dtype), keepdim=True),
        ],
    ),
    (
        (23,),
        [
            lambda x: x.median(0),
            lambda x: x.nanmedian(-1, keepdim=True),
            lambda x: x.kthvalue(3),
            lambda x: x.kthvalue(23, 0, True),
            lambda x: x.topk(4),
            lambda x: x.topk(5, 0, largest=False),
            *(lambda x, how=how: torch.nanquantile(x, 0.3, 0, interpolation=how) for how in HOW),
            lambda x: torch.quantile(x, torch.tensor([0.5, 0.2, 0.9], dtype=x.dtype), 0),
        ],
    ),
    (
        (2, 9001),
        [
            lambda x: x.median(1),
            lambda x: x.nanmedian(1, keepdim=True),
            lambda x: x.kthvalue(1234, 1),
            lambda x: x.topk(7, 1),
            lambda x: torch.quantile(x, 0.25, 1),
            lambda x: torch.nanquantile(x, 0.25, 1, True),
        ],
    ),
]


@pytest.mark.parametrize("which", range(len(SELECTED)))
def test_order_statistics_of_sharded_lines(which):
    shape, functions = SELECTED[which]
    full = field(*shape)
    for case, f in enumerate(functions):
        check(f, full, range(len(shape)), case, count=3, second=which == 0)
    full = full.clone()
    full.view(-1)[7] = torch.nan  # of several, which one has the gradient is torch's to say
    for case, f in enumerate(functions):
        check(f, full, range(len(shape)), case, count=2)
    full.view(-1)[::7] = torch.nan
    for case, f in enumerate((torch.median, torch.nanmedian, lambda x: x.median(-1), lambda x: x.nanmedian(-1))):
        check(f, full, range(len(shape)), case, count=2)


def test_the_gradient_of_a_median_is_shared_among_ties():
    for full in (torch.tensor([2.0, 0.0, -0.0, 1.0, 0.0, -3.0, 0.0]), torch.zeros(5), torch.full((4,), torch.nan)):
        check(torch.median, full, (0,), 0, rtol=1e-6)
        check(torch.nanmedian, full, (0,), 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float16])
def test_order_statistics_of_other_dtypes(dtype):
    full = (field(31) * 40).to(dtype)
    for case, f in enumerate((torch.median, torch.nanmedian, lambda x: x.median(0)[0], lambda x: x.kthvalue(9)[0])):
        same(f, full, (0,), case)
    for largest in (False, True):
        same(lambda x, largest=largest: x.topk(6, 0, largest)[0], full, (0,), 4)


REFUSED = [
    (lambda x: x.kthvalue(0), field(7)),
    (lambda x: x.kthvalue(8, 0), field(7)),
    (lambda x: x.kthvalue(True), field(7)),
    (lambda x: x.topk(8), field(7)),
    (lambda x: x.topk(-1), field(7)),
    (lambda x: x.median(1), field(7)),
    (lambda x: x.median(0), field(0)),
    (lambda x: x.kthvalue(1), field(0)),
    (lambda x: x.median(), field(7) > 0),
    (lambda x: x.topk(1), field(7) > 0),
    (lambda x: x.median(), field(7).to(torch.complex64)),
    (lambda x: torch.quantile(x, 1.5), field(7)),
    (lambda x: torch.quantile(x, torch.tensor([0.5, -1], dtype=x.dtype)), field(7)),
    (lambda x: torch.quantile(x, torch.tensor([0.5])), field(7)),
    (lambda x: torch.quantile(x, torch.tensor([[0.5]], dtype=x.dtype)), field(7)),
    (lambda x: torch.quantile(x, 0.5, interpolation="none"), field(7)),
    (lambda x: torch.quantile(x, 0.5), field(7).half()),
    (lambda x: torch.quantile(x, 0.5), field(0)),
]


@pytest.mark.parametrize("which", range(len(REFUSED)))
def test_wrong_arguments_are_refused_as_torch_does(which):
    refused_alike(*REFUSED[which])


def test_no_rank_holds_a_whole_field():
    n = 20000
    x = shard(field(n), mesh_of((WORLD.size,)), (ms.Shard(0),))
    for f in (torch.median, torch.nanmedian, lambda x: torch.quantile(x, 0.9), lambda x: x.kthvalue(n // 3)):
        f(x)
        with ms.comm_counter() as counter:
            f(x)
        assert counter.nbytes <= 12 * 2 * 256 * 8 + 64


MOVED = {
    "sort": lambda x: x.sort(1)[0],
    "median": lambda x: x.median(1)[0],
    "mode": lambda x: x.mode(1)[0],
    "quantile": lambda x: torch.quantile(x, 0.4, 1),
    "kthvalue": lambda x: x.kthvalue(3, 1)[0],
    "inverse": torch.linalg.pinv,
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", MOVED)
def test_another_dim_is_cut_in_place_of_one_that_must_be_whole(name):
    x = shard(field(8 * WORLD.size, 8, 3), mesh_of((WORLD.size,)), (ms.Shard(1),))
    MOVED[name](x)
    with ms.comm_counter() as counter:
        y = MOVED[name](x)
    assert counter.nbytes <= 2 * x.block.nbytes + 1000
    assert y.sharding.placements == (ms.Shard(1 if name == "sort" else 0),)


def test_rows_of_a_sharded_table():
    index = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(1))
    mesh = mesh_of((WORLD.size,))
    for own in (ms.Shard(0), ms.Shard(1)):
        compare(F.embedding, [(index, mesh, (ms.Shard(1),), None), (field(11, 3), mesh, (own,), None)])


@pytest.mark.parametrize("f", [torch.quantile, torch.nanquantile])
def test_gradient_of_the_fraction(f):
    one = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    two = torch.tensor([0.15, 0.8], dtype=torch.float64, requires_grad=True)
    x = field(4, 6)
    for case, (mesh, placements, sizes) in enumerate(sampled(x.shape, (0, 1), 3, 6)):
        q = (one, two)[case % 2]
        compare(lambda x, q=q: f(x, q, 1, keepdim=q is two), [(x, mesh, placements, sizes)], [q])
        for own in (ms.Replicate(), ms.Shard(0)):
            given = (two.detach(), mesh, [own] + [ms.Replicate()] * (mesh.ndim - 1), None)
            compare(lambda x, q: f(x, q, 1), [(x, mesh, placements, sizes), given])


@pytest.mark.parametrize("how", ["linear", "lower", "higher", "midpoint", "nearest"])
def test_gradient_of_the_fraction_beside_an_empty_block(how):
    """Where q's gradient stops is torch's to say, and the same on every rank."""
    q = torch.tensor([0.15, 0.8], dtype=torch.float64, requires_grad=True)
    mesh, x = mesh_of((WORLD.size,)), field(4, 6)
    for sizes in (None, {0: skew(4, WORLD.size)}):
        own = (x, mesh, (ms.Shard(0),), sizes)
        compare(lambda x: torch.quantile(x, q, 1, interpolation=how), [own], [q], what=f"{how} {sizes}")
        compare(lambda x: torch.nanquantile(x * q.sum(), 0.3, 1, interpolation=how), [own], [q], what=f"{how} {sizes}")
    given = (q.detach(), mesh, (ms.Shard(0),), None)
    compare(lambda x, q: torch.quantile(x, q, 0, interpolation=how), [(x, None, None, None), given])
