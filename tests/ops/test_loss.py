"""Losses of shards against those of whole tensors: values and gradients, every kind of reduction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compare import compare, layouts

SHAPE = (3, 8, 10, 7)
REDUCTIONS = ("mean", "sum", "none")


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, T = values(0, *SHAPE), values(1, *SHAPE)
WEIGHT, POS_WEIGHT = values(2, 8).abs(), values(3, 8, 1, 1).abs()
LABELS = torch.randint(0, 8, (3, 10, 7), generator=torch.Generator().manual_seed(4))


def few():
    for i, (mesh, placements, sizes) in enumerate(layouts(SHAPE, (2, 3, 0))):
        if i % 4 == 0 or sizes:
            yield mesh, placements, sizes


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_losses_per_cell(loss, reduction):
    for where in few():
        compare(lambda a, b: loss(a, b, reduction=reduction), [(X, *where), (T, *where)], what=f"{where}")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_plain_targets_count_as_whole(reduction):
    for where in few():
        compare(lambda a, b: F.mse_loss(a, b, reduction=reduction), [(X, *where), (T, None, None, None)])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy_with_logits(reduction):
    for where in few():
        compare(
            lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid(), pos_weight=POS_WEIGHT, reduction=reduction),
            [(X, *where), (T, *where)],
        )


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_divergence(reduction):
    for where in few():
        compare(lambda a, b: F.kl_div(a, b.exp(), reduction=reduction), [(X, *where), (T, *where)])


CLASSES = [{}, {"weight": WEIGHT}, {"ignore_index": 2}, {"ignore_index": 5, "weight": WEIGHT}]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", CLASSES)
def test_classes(options, reduction):
    for where in few():
        what = f"{options} {where}"
        compare(lambda a: F.nll_loss(a, LABELS, reduction=reduction, **options), [(X, *where)], what=what)
        for smoothing in (0.0, 0.1):
            compare(
                lambda a, s=smoothing: F.cross_entropy(a, LABELS, reduction=reduction, label_smoothing=s, **options),
                [(X, *where)],
                what=what,
            )
