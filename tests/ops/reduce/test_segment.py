"""Reductions of segments, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, layouts, mesh_of, shard, skew
from tests.ops.windows import check, field

LENGTHS = torch.tensor([2, 0, 4, 1])
ROWS = torch.tensor([[2, 3, 2], [0, 7, 0], [1, 1, 5], [4, 3, 0]])
CASES = [
    (field(7), "sum", {"lengths": LENGTHS}),
    (field(7), "max", {"lengths": LENGTHS, "initial": -9}),
    (field(7, 3), "mean", {"offsets": torch.tensor([0, 2, 2, 6])}),
    (field(4, 7), "min", {"lengths": ROWS, "axis": 1}),
    (field(4, 7, 2), "prod", {"lengths": ROWS, "axis": 1, "unsafe": True}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_segments(case):
    full, reduce, options = CASES[case]
    check(lambda x: torch.segment_reduce(x, reduce, **options), full, range(full.ndim), case)
    (name, borders) = next(iter(options.items()))
    rest = {k: v for k, v in options.items() if k != name}
    for mesh, placements, sizes in layouts(borders.shape, range(borders.ndim), 1):
        for own in (None, [ms.Shard(0)]):
            compare(
                lambda x, b: torch.segment_reduce(x, reduce, **{name: b}, **rest),
                [(full, mesh, own, None), (borders, mesh, placements, sizes)],
            )


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_second_derivatives_are_refused_beside_an_empty_block(reduce):
    """Torch has none: a rank without cells must say so too, or it waits for the others."""
    full = field(7, 3)
    for sizes in (None, {1: skew(3, WORLD.size)}):
        x = shard(full, mesh_of((WORLD.size,)), [ms.Shard(1)], sizes, requires_grad=True)
        y = torch.segment_reduce(x * x, reduce, lengths=LENGTHS)
        (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="_segment_reduce_backward is not implemented"):
            torch.autograd.grad((g * g).sum(), x)


def test_torchs_own_errors():
    x = shard(field(4, 7), mesh_of((WORLD.size,)), [ms.Shard(0)])
    for options in (
        {},
        {"lengths": LENGTHS},
        {"lengths": ROWS, "axis": 0},
        {"lengths": ROWS - 1, "axis": 1},
        {"lengths": ROWS + 1, "axis": 1},
        {"lengths": ROWS.double(), "axis": 1},
        {"offsets": torch.tensor([0, 3, 2, 4])},
    ):
        for t in (x, x.full_tensor()):
            with pytest.raises((RuntimeError, NotImplementedError)):
                torch.segment_reduce(t, "sum", **options)
