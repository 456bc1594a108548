"""Pooling of every kind on shards against torch's own on the whole tensor."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from tests.compare import WORLD, compare, gathered, mesh_of, shard, skew
from tests.ops.windows import check, field, refused_alike, same, sampled
from tests.release import RELEASE

# shape, kernel, stride, padding, dilation, ceil_mode
MAX = [
    ((2, 3, 11), 2, None, 0, 1, False),
    ((3, 12), 3, 2, 1, 1, True),  # no batch dim
    ((2, 3, 13), 3, 4, 1, 2, True),  # a stride wider than the kernel
    ((2, 2, 8, 7), 2, 2, 0, 1, False),
    ((2, 2, 8, 7), 3, 1, 1, 1, False),
    ((2, 9, 11), (3, 2), (2, 3), (1, 0), (2, 1), True),
    ((1, 2, 11, 5), (4, 3), (1, 2), (2, 1), 1, True),
    ((1, 2, 6, 5, 7), 2, 2, 0, 1, False),
    ((1, 2, 7, 6, 5), (3, 2, 3), (2, 1, 3), (1, 1, 0), (1, 2, 1), True),
]

# shape, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override
AVG = [
    ((2, 3, 11), 3, 2, 1, True, True, None),
    ((3, 12), 3, 2, 1, True, False, None),
    ((2, 2, 8, 7), 2, None, 0, False, True, None),
    ((2, 2, 8, 7), 3, 2, 1, True, True, None),
    ((2, 2, 8, 7), 3, 2, 1, True, False, None),
    ((2, 2, 9, 7), (4, 3), (3, 1), (2, 1), True, True, 5),
    ((2, 9, 7), (3, 2), 1, (1, 0), False, False, None),
    ((1, 2, 7, 5, 6), 2, 2, 1, True, True, None),
    ((1, 2, 7, 5, 6), (3, 2, 4), (2, 1, 3), (1, 1, 2), True, False, 3),
]


def pool(kind: str, shape, *args, **kwargs):
    ndim = len(args[0]) if isinstance(args[0], tuple) else max(1, len(shape) - 2)
    function = getattr(F, f"{kind}_pool{ndim}d")
    return lambda x: function(x, *args, **kwargs)


@pytest.mark.parametrize("case", range(len(MAX)))
def test_max_pool(case):
    shape, *args = MAX[case]
    f = pool("max", shape, *args)
    check(f, field(*shape), range(len(shape)), case, second=case % 3 == 1)


@pytest.mark.parametrize("case", range(len(MAX)))
def test_max_pool_indices_are_global(case):
    shape, *args = MAX[case]
    f = pool("max", shape, *args, return_indices=True)
    x = field(*shape)
    if case % 2:
        x = x.round()  # equals: the first counts
    if case % 3 == 0:
        x[x < 0.8] = -torch.inf  # windows without a value
    check(f, x, range(len(shape)), case + 3)


@pytest.mark.parametrize("case", range(len(AVG)))
def test_avg_pool(case):
    shape, *args = AVG[case]
    if len(shape) < 4 and not isinstance(args[0], tuple):
        args = args[:-1]  # no divisor to override in one dim
    check(pool("avg", shape, *args), field(*shape), range(len(shape)), case, second=case % 3 == 0)


@pytest.mark.parametrize(
    ("shape", "args"),
    [((2, 3, 11), (3, 3, 2, True)), ((2, 2, 8, 7), (2, (2, 3), None, True)), ((2, 2, 5, 6, 4), (3.0, 2, 1))],
)
def test_lp_pool(shape, args):
    function = getattr(F, f"lp_pool{len(shape) - 2}d")
    check(lambda x: function(x.abs() + 1, *args), field(*shape), range(len(shape)), 1, second=True)


@pytest.mark.skipif(RELEASE < (2, 13), reason="torch 2.8 makes ones of them")
@pytest.mark.parametrize("norm_type", [math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(2, 3, 11), (2, 2, 8, 7), (1, 2, 5, 6, 4)])
def test_lp_pool_of_the_largest_cells(shape, norm_type):
    function = getattr(F, f"lp_pool{len(shape) - 2}d")
    check(lambda x: function(x, norm_type, 3, 2, True), field(*shape), range(len(shape)), 1)


# shape, output size
ADAPTIVE = [
    ((2, 3, 12), 1),
    ((2, 3, 12), 4),
    ((2, 3, 13), 5),
    ((3, 7), 11),  # more cells than there were
    ((2, 2, 8, 7), 1),
    ((2, 2, 8, 12), (4, 6)),
    ((2, 2, 11, 7), (4, 3)),
    ((2, 2, 8, 7), (2, None)),
    ((2, 9, 6), (3, 5)),
    ((1, 2, 5, 6, 7), (1, 3, 1)),
    ((1, 2, 7, 5, 6), (5, 2, 4)),
]


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("case", range(len(ADAPTIVE)))
def test_adaptive_pool(case, kind):
    shape, size = ADAPTIVE[case]
    ndim = len(size) if isinstance(size, tuple) else max(1, len(shape) - 2)
    function = getattr(F, f"adaptive_{kind}_pool{ndim}d")
    x = field(*shape)
    check(lambda t: function(t, size), x, range(len(shape)), case, second=case % 3 == 0)
    if kind == "max":
        x = x.round() if case % 2 else x
        check(lambda t: function(t, size, return_indices=True), x, range(len(shape)), case + 1)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_second_derivatives_where_some_ranks_have_one_cell(kind, ndim):
    """Of one cell torch takes the mean, whose gradient is not made of the argument, as that of more cells is."""
    cells = WORLD.size + 1
    x, size = field(2, 2, 2 * cells, *[3] * (ndim - 1)), (cells, *[1] * (ndim - 1))
    function = getattr(F, f"adaptive_{kind}_pool{ndim}d")
    for sizes in (None, {2: skew(2 * cells, WORLD.size)}):
        compare(lambda t: function(t, size), [(x, mesh_of((WORLD.size,)), (ms.Shard(2),), sizes)], second=True)


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("size", [(0,), (0, 3), (2, 0), (0, 0), (None, 0), (1, 0, 2)], ids=str)
def test_adaptive_pool_to_no_cells(size, kind):
    function, x = getattr(F, f"adaptive_{kind}_pool{len(size)}d"), field(2, 3, *(5, 4, 6)[: len(size)])
    given = size[0] if len(size) == 1 else size
    indices = {"return_indices": True} if kind == "max" else {}
    for mesh, placements, sizes in sampled(x.shape, range(x.ndim), len(size)):
        compare(lambda t: function(t, given, **indices), [(x, mesh, placements, sizes)], differentiable=[False])
    s = shard(x, mesh_of((WORLD.size,)), (ms.Shard(2),), requires_grad=True)
    function(s, given).sum().backward()  # torch refuses it
    assert not gathered(s.grad).any()
    s = shard(x.long(), mesh_of((WORLD.size,)), (ms.Shard(2),))
    with pytest.raises((RuntimeError, NotImplementedError)):
        function(s, given)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_windows_of_several_lengths_read_no_other_cells(number):
    full = field(2, 3, 12)
    full[0, 0, 0] = full[1, 1, 5] = number
    for sizes in (None, (0,) * (WORLD.size - 1) + (12,)):
        x = shard(full, mesh_of((WORLD.size,)), (ms.Shard(2),), sizes and {2: sizes})
        torch.testing.assert_close(
            gathered(F.adaptive_avg_pool1d(x, 5)), F.adaptive_avg_pool1d(full, 5), equal_nan=True
        )


def test_fewer_cells_out_than_blocks_are_whole_on_every_rank():
    x = shard(field(2, 3, 4 * WORLD.size), mesh_of((WORLD.size,)), (ms.Shard(2),))
    with ms.comm_counter() as counter:
        y = F.adaptive_avg_pool1d(x, 1)
    assert y.placements == (ms.Replicate(),)
    assert counter.nbytes <= 64 * WORLD.size  # partial results travel, not the field
    assert F.adaptive_max_pool1d(x, 1).placements == (ms.Replicate(),)
    assert F.adaptive_avg_pool1d(x, WORLD.size + 1).placements == (ms.Shard(2),)


# shape of the unpooled field, kernel, stride, padding
UNPOOL = [
    ((2, 3, 12), 2, None, 0),
    ((3, 13), 3, 2, 1),
    ((2, 2, 8, 6), 2, 2, 0),
    ((2, 2, 9, 7), (3, 2), (2, 2), (1, 0)),
    ((1, 2, 6, 4, 8), 2, None, 0),
]


@pytest.mark.parametrize("case", range(len(UNPOOL)))
def test_max_unpool(case):
    shape, *args = UNPOOL[case]
    ndim = len(args[0]) if isinstance(args[0], tuple) else max(1, len(shape) - 2)
    down, up = getattr(F, f"max_pool{ndim}d"), getattr(F, f"max_unpool{ndim}d")

    def f(x):
        values, indices = down(x, *args, return_indices=True)
        return up(values, indices, *args, output_size=shape[-ndim:])

    check(f, field(*shape), range(len(shape)), case, second=case % 2 == 0)


@pytest.mark.parametrize("case", range(len(UNPOOL)))
def test_max_unpool_of_plain_values_or_indices(case):
    shape, *args = UNPOOL[case]
    ndim = len(args[0]) if isinstance(args[0], tuple) else max(1, len(shape) - 2)
    values, indices = getattr(F, f"max_pool{ndim}d")(field(*shape), *args, return_indices=True)
    up = partial(getattr(F, f"max_unpool{ndim}d"), kernel_size=args[0], stride=args[1], padding=args[2])
    for mesh, placements, sizes in sampled(values.shape, range(len(shape)), case, 3):
        sharded, plain = (mesh, placements, sizes), (mesh, None, None)
        for a, b in ((sharded, plain), (plain, sharded)):
            compare(lambda v, i: up(v, i, output_size=shape[-ndim:]), [(values, *a), (indices, *b)])


def test_max_unpool_refuses_indices_that_lie_elsewhere():
    n = 4 * WORLD.size
    for mesh, placements, sizes in sampled((1, 1, n), [2], 0, 2):
        values = shard(field(1, 1, n), mesh, placements, sizes)
        indices = shard(torch.arange(2 * n - 2, -2, -2).reshape(1, 1, n), mesh, placements, sizes)
        with pytest.raises(ms.UnsupportedOperationError, match="outside the window"):
            F.max_unpool1d(values, indices, 2)


def test_max_unpool_refuses_indices_of_another_dtype_at_every_call():
    values, indices = F.max_pool1d(field(1, 2, 4 * WORLD.size), 2, return_indices=True)
    for mesh, placements, sizes in sampled(values.shape, range(3), 0, 3):
        x, at = (shard(t, mesh, placements, sizes) for t in (values, indices))
        for _ in range(2):
            F.max_unpool1d(x, at, 2)
            with pytest.raises(RuntimeError, match="type int64"):
                F.max_unpool1d(x, at.int(), 2)


def test_dtypes():
    same(lambda x: F.max_pool2d(x, 3, 2, 1), field(2, 2, 8, 7, dtype=torch.bfloat16), range(4), 0)
    same(lambda x: F.max_pool2d(x, 3, 2, 1), field(2, 2, 8, 7).mul(100).long(), range(4), 1)
    # with indices torch takes another kernel, which knows integers
    same(lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True)[1], field(2, 3, 13).mul(100).long(), range(3), 1)
    same(lambda x: F.adaptive_max_pool2d(x, (3, 1)), field(2, 2, 8, 7, dtype=torch.float16), range(4), 2)
    same(lambda x: F.adaptive_avg_pool2d(x, (3, 1)), field(2, 2, 8, 7, dtype=torch.bfloat16), range(4), 3, exact=False)
    # a mean of 16-bit numbers is summed in 32 bits: nothing is lost where the partial sums would overflow
    big = torch.full((1, 1, 4096), 60000.0, dtype=torch.float16)
    same(lambda x: F.adaptive_avg_pool1d(x, 1), big, [2], 0)
    # of one cell it is torch's mean, which knows complex numbers
    spectrum = field(2, 3, 4, 5, dtype=torch.complex128)
    for f in (
        lambda x: F.adaptive_avg_pool1d(x[0], output_size=1),
        lambda x: F.adaptive_avg_pool2d(x, (1, 1)),
        nn.AdaptiveAvgPool3d(1),
    ):
        check(f, spectrum, range(4), 4, count=4)
    refused_alike(lambda x: F.adaptive_avg_pool2d(x, (1, 2)), spectrum)
    with pytest.raises(RuntimeError, match=r"mean.* either a floating point or complex dtype"):
        F.adaptive_avg_pool2d(shard(spectrum.real.long(), mesh_of((WORLD.size,)), (ms.Shard(2),)), 1)


def test_autocast_keeps_torchs_dtypes():
    full = field(2, 2, 8, 6, 4, dtype=torch.bfloat16)
    calls = [
        lambda x: F.adaptive_avg_pool3d(x, 1),
        lambda x: F.adaptive_max_pool3d(x, (3, 1, 2)),
        lambda x: F.avg_pool3d(x, 2),
        lambda x: F.max_pool3d(x, 2),
    ]
    x = shard(full, mesh_of((WORLD.size,)), (ms.Shard(2),))
    with torch.autocast("cpu", torch.bfloat16):
        for f in calls:
            expected = f(full)
            got = f(x)
            assert got.dtype == expected.dtype
            torch.testing.assert_close(gathered(got), expected)


def test_modules():
    net = nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    check(net, field(2, 3, 9, 11), (0, 2, 3), 1, count=6)


def test_a_stride_of_nothing():
    x = shard(field(1, 1, 4, 6), mesh_of((WORLD.size,)), (ms.Shard(2),))
    y, at = F.max_pool2d(x, 2, return_indices=True)
    for args in ((0,), (2, 0), ((2, 2), (1, 0))):
        with pytest.raises(ms.LayoutError, match="max_unpool2d: a stride of 0"):
            F.max_unpool2d(y, at, *args)


def test_torchs_own_errors():
    x = field(2, 3, 6)
    refused_alike(lambda t: F.max_pool1d(t, 2, padding=2), x)
    refused_alike(lambda t: F.avg_pool2d(t[None], 3, divisor_override=0), x)
    refused_alike(lambda t: F.max_pool3d(t, 2), x)
    refused_alike(lambda t: F.adaptive_avg_pool2d(t, (1, 2, 3)), x)
