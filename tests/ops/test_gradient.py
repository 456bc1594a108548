"""torch.gradient against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch

from tests.compare import WORLD, compare, layouts
from tests.ops.windows import check, field, refused_alike

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
