"""Padding and cropping of shards against torch's own on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from tests.compare import WORLD, mesh_of, shard
from tests.ops.windows import check, field, refused_alike, same

# shape, pad (last dim first), mode, value
CASES = [
    ((2, 3, 7), (2, 1), "constant", None),
    ((2, 3, 7), (9, 0), "constant", 1.5),  # wider than any shard
    ((2, 3, 7), (1, 1, 2, 0, 1, 3), "constant", -1.0),  # channels and batch too
    ((3, 8, 5), (-2, 3, 0, -1), "constant", None),
    ((2, 3, 8), (-3, -5), "constant", None),  # nothing is left
    ((2, 3, 8), (6, 5), "reflect", None),
    ((2, 1, 7, 6), (1, 2, 3, 0), "reflect", None),
    ((2, 1, 7, 6), (-1, 3, 2, -2), "reflect", None),
    ((1, 2, 4, 3, 5), (2, 1, 0, 2, 3, 3), "reflect", None),
    ((2, 3, 5), (4, 7), "replicate", None),
    ((2, 2, 5, 6), (1, 3, 2, 8), "replicate", None),
    ((2, 2, 5, 6), (-2, 3, 2, -1), "replicate", None),
    ((1, 2, 3, 4, 5), (2, 1, 0, 2, 4, 1), "replicate", None),
    ((2, 3, 8), (8, 5), "circular", None),
    ((2, 2, 7, 5), (2, 1, 1, 3), "circular", None),
    ((2, 2, 7, 5), (2, -1, -3, 2), "circular", None),  # torch wraps what is left after the crop
    ((1, 2, 4, 3, 5), (2, 1, 3, 2, 0, 1), "circular", None),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_pad(case):
    shape, widths, mode, value = CASES[case]
    dims = range(len(shape)) if mode == "constant" else range(1, len(shape))
    check(lambda x: F.pad(x, widths, mode, value), field(*shape), dims, case, count=5, second=case % 3 == 0)


def test_edge_blocks_grow_and_the_others_stay():
    n = WORLD.size
    x = shard(field(2, 1, 4 * n), mesh_of((n,)), (ms.Shard(2),))
    sizes = F.pad(x, (3, 1)).sharding.sizes[2]
    expected = [4] * n
    expected[0] += 3
    expected[-1] += 1
    assert list(sizes) == expected


def test_dtypes_without_gradient():
    same(lambda x: F.pad(x, (2, 1), value=7), field(2, 3, 6).mul(10).long(), (1, 2), 0)
    same(lambda x: F.pad(x, (2, 1), value=True), field(2, 3, 6) > 0, (1, 2), 1)
    same(lambda x: F.pad(x, (2, 1), "reflect"), field(2, 3, 6, dtype=torch.bfloat16), (1, 2), 2)


def test_result_is_never_the_argument():
    x = shard(field(2, 3, 6), mesh_of((WORLD.size,)), (ms.Shard(2),))
    F.pad(x, (0, 0)).zero_()
    assert x.full_tensor().ne(0).all()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.ZeroPad2d((1, 2, 3, 0)), (2, 3, 5, 6)),
        (nn.ConstantPad1d(2, 3.5), (2, 3, 7)),
        (nn.ReflectionPad3d(2), (2, 1, 4, 5, 3)),
        (nn.ReplicationPad2d(3), (2, 3, 5, 6)),
        (nn.CircularPad2d((1, 2, 2, 1)), (2, 3, 5, 6)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_modules(layer, shape):
    check(layer, field(*shape), range(1, len(shape)), 1)
    check(lambda x: torch.constant_pad_nd(x, (1, 0), 2.0), field(*shape), range(1, len(shape)), 2, count=2)


def test_torchs_own_errors():
    x = field(2, 3, 6)
    refused_alike(lambda t: F.pad(t, (6, 0), "reflect"), x)
    refused_alike(lambda t: F.pad(t, (7, 0), "circular"), x)
    refused_alike(lambda t: F.pad(t, (-4, -4)), x)
    refused_alike(lambda t: F.pad(t, (1, 1), "mirror"), x)
    refused_alike(lambda t: F.pad(t, (1, 1, 1)), x)
    refused_alike(lambda t: F.pad(t, (1, 1), "reflect", 1.0), x)


def test_a_number_that_the_dtype_does_not_hold_is_refused_on_every_rank():
    # the ranks at the edges alone would fill in cells
    x = torch.arange(18, dtype=torch.uint8).reshape(2, 9)
    for value in (300, -1, float("inf")):
        refused_alike(lambda t, value=value: F.pad(t, (1, 1), value=value), x)
    refused_alike(lambda t: F.pad(t.half(), (1, 0), value=1e9), x)
    check(lambda t: F.pad(t, (-1, 0), value=300), x, (0, 1), 1)
