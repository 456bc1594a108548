"""Sliding blocks, columns and their sum, pixel and channel shuffles, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from tests.compare import WORLD, compare, mesh_of, shard
from tests.ops.windows import check, field, refused_alike

# shape, dim, size, step
ALONG = [
    ((2, 3, 11), 2, 3, 1),
    ((2, 3, 11), -1, 2, 4),  # cells between the windows are skipped
    ((9, 4), 0, 5, 2),
    ((2, 7, 6), 1, 1, 1),
    ((2, 7, 6), 1, 7, 3),  # one window, as long as the dim
]

# shape, kernel, dilation, padding, stride
COLUMNS = [
    ((2, 3, 8, 6), 2, 1, 0, 2),
    ((2, 3, 8, 6), 3, 1, 1, 1),
    ((3, 9, 5), (3, 2), (2, 1), (1, 0), (2, 1)),  # no batch dim
    ((2, 2, 11, 7), (2, 3), 1, (0, 1), (4, 2)),  # rows between the patches are skipped
    ((1, 4, 7, 6), 4, 1, 2, 3),
]


@pytest.mark.parametrize("case", range(len(ALONG)))
def test_unfold_along_a_dim(case):
    shape, *args = ALONG[case]
    check(lambda x: x.unfold(*args), field(*shape), range(len(shape)), case, second=case % 2 == 0)


@pytest.mark.parametrize("case", range(len(COLUMNS)))
def test_columns(case):
    shape, *args = COLUMNS[case]
    check(lambda x: F.unfold(x, *args), field(*shape), range(len(shape)), case, count=6, second=case % 2 == 0)


@pytest.mark.parametrize("case", range(len(COLUMNS)))
def test_fold(case):
    shape, *args = COLUMNS[case]
    columns = field(*F.unfold(field(*shape), *args).shape)
    dims = range(columns.ndim)
    check(lambda x: F.fold(x, shape[-2:], *args), columns, dims, case, count=6, second=case % 2 == 0)


def test_fold_sums_what_unfold_gave():
    def overlap_add(x):
        return F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1)

    check(overlap_add, field(2, 3, 9, 5), (0, 1, 2), 2, count=6)


def test_windows_of_other_ranks_cells_refuse_writes():
    x = shard(field(2, 3 * WORLD.size), mesh_of((WORLD.size,)), (ms.Shard(1),))
    y = x.unfold(1, 3, 1)
    if WORLD.size == 1:
        y.zero_()
        assert x.full_tensor().eq(0).all()
    else:
        with pytest.raises(ms.UnsupportedOperationError):
            y.zero_()


SHUFFLES = [
    (lambda x: F.pixel_shuffle(x, 2), (2, 8, 5, 3)),
    (lambda x: torch.pixel_shuffle(x, 3), (9, 4, 3)),
    (nn.PixelShuffle(2), (2, 2, 4, 3, 5)),
    (lambda x: F.pixel_unshuffle(x, 2), (2, 3, 10, 6)),
    (nn.PixelUnshuffle(3), (2, 9, 12)),
    (nn.ChannelShuffle(2), (2, 6, 4, 3)),
]


@pytest.mark.parametrize("case", range(len(SHUFFLES)))
def test_shuffles(case):
    f, shape = SHUFFLES[case]
    check(f, field(*shape), range(len(shape)), case, count=8, second=case % 3 == 0)


def test_a_block_that_ends_within_a_group_is_moved():
    n = 6 * WORLD.size
    sizes = [5 if i % 2 else 7 for i in range(WORLD.size)]
    sizes[-1] += n - sum(sizes)
    x = (field(1, 2, n, 4), mesh_of((WORLD.size,)), (ms.Shard(2),), {2: sizes})
    compare(lambda t: F.pixel_unshuffle(t, 2), [x])


def test_torchs_own_errors():
    refused_alike(lambda t: t.unfold(2, 7, 1), field(2, 3, 6))
    refused_alike(lambda t: t[0, 0].unfold(1, 1, 1), field(2, 3))
    refused_alike(lambda t: F.pixel_shuffle(t, 2), field(2, 3, 6, 6))
    refused_alike(lambda t: F.pixel_shuffle(t, 2), field(6, 6))
    refused_alike(lambda t: F.pixel_unshuffle(t, 4), field(2, 3, 6, 6))
    # without data, torch words this one differently
    with pytest.raises(RuntimeError, match="Given output_size"):
        F.fold(shard(field(2, 4, 6), mesh_of((WORLD.size,)), (ms.Shard(2),)), (4, 4), 2)
