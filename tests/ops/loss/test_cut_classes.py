"""Cross entropy where the classes are sharded: against torch on the whole, and what travels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard, skew
from tests.ops.windows import field

SHAPE = (3, 9, 4)
X, WEIGHT = field(*SHAPE), field(9).abs()
LABELS = torch.randint(9, (3, 4), generator=torch.Generator().manual_seed(4))
SHARES = field(9, 3, 4).softmax(0).movedim(0, 1).contiguous()


def cut():
    for i, where in enumerate(layouts(SHAPE, (1, 0, 2))):
        if any(p == ms.Shard(1) for p in where[1]) and (i % 2 == 0 or where[2]):
            yield where


OPTIONS = [
    {},
    {"weight": WEIGHT},
    {"ignore_index": 2},
    {"ignore_index": 5, "weight": WEIGHT},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.3, "weight": WEIGHT, "ignore_index": int(LABELS[0, 0])},
]


@pytest.mark.parametrize("options", OPTIONS, ids=", ".join)
def test_cross_entropy(options):
    for case, where in enumerate(cut()):
        how = {"reduction": ("mean", "sum", "none")[(case + len(options)) % 3], **options}
        labels = (LABELS, where[0], (ms.Shard(0),) * len(where[1]), None) if case % 2 else (LABELS, *(None,) * 3)
        what = f"{how} {where} {labels[1:]}"
        compare(lambda x, t: F.cross_entropy(x, t, **how), [(X, *where), labels], second=case == 2, what=what)
        if "label_smoothing" not in options:
            compare(lambda x, t: F.nll_loss(x, t, **how), [(X, *where), labels], what=what)
        if "ignore_index" not in options:
            for own in (where, (None, None, None)):
                compare(lambda x, t: F.cross_entropy(x, t, **how), [(X, *where), (SHARES, *own)], what=what)


def test_one_sample_and_all_ignored():
    for where in layouts((9,), (0,)):
        compare(lambda x: F.cross_entropy(x, torch.tensor(7), WEIGHT), [(X[0, :, 0], *where)])
        compare(lambda x: F.nll_loss(x, torch.tensor(7), ignore_index=7), [(X[0, :, 0], *where)])
        compare(lambda x: F.cross_entropy(x, x.detach().softmax(0)), [(X[0, :, 0], *where)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_odd_scores(dtype):
    full = (field(6, 9) * 3).to(dtype)
    full[0, 4], full[1, 2], full[2] = torch.nan, torch.inf, -torch.inf
    full[3, 8] = -torch.inf
    labels = torch.tensor([4, 2, 0, 8, 1, 5])
    for sizes in (None, {1: skew(9, WORLD.size)}):
        for smoothing in (0.0, 0.2):
            got, want = (
                F.cross_entropy(x, labels, reduction="none", label_smoothing=smoothing)
                for x in (shard(full, mesh_of((WORLD.size,)), (ms.Shard(1),), sizes), full)
            )
            assert got.dtype == dtype
            torch.testing.assert_close(
                gathered(got), want, equal_nan=True, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
            )
            mean = F.cross_entropy(shard(full[4:], mesh_of((WORLD.size,)), (ms.Shard(1),), sizes), labels[4:])
            assert mean.dtype == dtype


WRONG = {
    "a class that is not there": lambda x: F.cross_entropy(x, torch.tensor([[1, 2, 3, 9]]).repeat(3, 1)),
    "a negative one": lambda x: F.nll_loss(x, torch.tensor([[1, 2, 3, -1]]).repeat(3, 1)),
    "labels of 32 bits": lambda x: F.nll_loss(x, LABELS.int()),
    "scores of integers": lambda x: F.cross_entropy(x.detach().long(), LABELS),
    "weights": lambda x: F.cross_entropy(x, LABELS, WEIGHT[:3]),
    "weights of another dtype": lambda x: F.cross_entropy(x, LABELS, WEIGHT.float()),
    "smoothing": lambda x: F.cross_entropy(x, LABELS, label_smoothing=1.5),
    "ignored probabilities": lambda x: F.cross_entropy(x, SHARES, ignore_index=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_refuses(name):
    with pytest.raises((RuntimeError, IndexError, ValueError)) as expected:
        WRONG[name](X)
    for sizes in (None, {1: skew(9, WORLD.size)}):
        with pytest.raises(type(expected.value)):
            WRONG[name](shard(X, mesh_of((WORLD.size,)), (ms.Shard(1),), sizes))


@pytest.mark.ranks(2, 3, 4)
def test_scores_stay():
    rows, classes = 6, 64 * WORLD.size
    x = shard(field(rows, classes), mesh_of((WORLD.size,)), (ms.Shard(1),), requires_grad=True)
    labels = torch.arange(rows) * 7
    for _ in range(2):
        with ms.comm_counter() as count:
            F.cross_entropy(x, labels).backward()
    assert count.nbytes <= 8 * rows * 8  # a block has 64 in a row
