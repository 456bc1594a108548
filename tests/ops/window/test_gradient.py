"""torch.gradient against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, layouts, shard
from tests.ops.windows import check, field, refused_alike, sampled

CASES = [
    {},
    {"dim": 1},
    {"dim": (0, 2), "spacing": 0.5},
    {"dim": (2, 0), "spacing": (2.0, 0.1)},
    {"edge_order": 2},
    {"edge_order": 2, "dim": -1, "spacing": 3.0},
    {"spacing": (torch.tensor([0.0, 0.5, 2.0, 2.5, 4.0, 7.0, 7.5]).double(),), "dim": 0},
    {"spacing": (torch.tensor([0.0, 0.5, 2.0, 2.5, 4.0, 7.0, 7.5]).double(),), "dim": 0, "edge_order": 2},
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_gradient(case):
    check(lambda x: torch.gradient(x, **CASES[case]), field(7, 5, 4), (0, 1, 2), case, count=6)


def test_every_layout_of_few_rows():
    for mesh, placements, sizes in layouts((5, 3), (0, 1)):
        compare(lambda x: torch.gradient(x, edge_order=2), [(field(5, 3), mesh, placements, sizes)])


def test_derivative_of_a_derivative():
    check(lambda x: torch.gradient(torch.gradient(x, dim=0)[0] ** 2, dim=0)[0], field(9, 4), (0, 1), 1)


def test_torchs_own_errors():
    assert WORLD.size
    refused_alike(lambda x: torch.gradient(x, dim=1, edge_order=2), field(6, 2))
    refused_alike(lambda x: torch.gradient(x, spacing=(1.0, 2.0, 3.0)), field(6, 4))
    refused_alike(lambda x: torch.gradient(x, edge_order=3), field(6, 4))


@pytest.mark.parametrize("edge_order", [1, 2])
def test_gradient_of_the_coordinates(edge_order):
    x, where = field(5, 6), torch.tensor([0.0, 1.0, 3.0, 4.0, 7.0, 7.5]).double()
    for mesh, placements, sizes in sampled(x.shape, (0, 1), 2, 6):
        c = where.clone().requires_grad_()
        compare(
            lambda x, c=c: torch.gradient(x, spacing=(c,), dim=1, edge_order=edge_order),
            [(x, mesh, placements, sizes)],
            [c],
        )
        for own in (ms.Replicate(), ms.Shard(0)):
            given = (where, mesh, [own] + [ms.Replicate()] * (mesh.ndim - 1), None)
            compare(
                lambda x, c: torch.gradient(x, spacing=(c,), dim=1, edge_order=edge_order),
                [(x, mesh, placements, sizes), given],
            )


def test_dtype_of_a_block_without_cells():
    for mesh, placements, sizes in sampled((6,), (0,), 0):
        x = shard(torch.arange(6.0), mesh, placements, sizes)
        assert torch.gradient(x, spacing=(torch.arange(6.0).double(),))[0].dtype == torch.float64
