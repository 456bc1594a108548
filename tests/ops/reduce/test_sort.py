"""Sorting, order statistics and scans along sharded and whole dims, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, compare, mesh_of, shard
from tests.ops.windows import check, field, sampled

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
    assert values.layout is x.layout
    assert index.layout is x.layout


def test_the_largest_of_each_block_travel_alone():
    x = shard(field(4, 8 * WORLD.size), mesh_of((WORLD.size,)), (ms.Shard(1),))
    x.topk(2, 1)
    with ms.comm_counter() as counter:
        x.topk(2, 1)
    # values and indices, two per row and block
    assert counter.nbytes <= 2 * 8 * 4 * 2 * max(1, WORLD.size - 1)


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
