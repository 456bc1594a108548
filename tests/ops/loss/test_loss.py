"""Losses of shards against those of whole tensors: values and gradients, every kind of reduction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compare import compare, layouts, shard

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
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_weights_of_cells(loss, reduction):
    """Which torch's l1_loss does not hand on."""
    weight = values(9, *SHAPE).abs()
    for where in few():
        for own in (where, (None, None, None)):
            compare(
                lambda a, b, w: loss(a, b, weight=w, reduction=reduction),
                [(X, *where), (T, None, None, None), (weight, *own)],
                what=f"{where}",
            )
        plain = [(t, None, None, None) for t in (X, T)]
        compare(lambda a, b, w: loss(a, b, weight=w, reduction=reduction), [*plain, (weight, *where)])
    x = shard(X, *where)
    with pytest.raises(ValueError, match="same size"):
        loss(x, x + 1, weight=torch.ones(2))


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


POSITIVE = X.abs() + 0.1
SIGNS = torch.where(T > 0, 1.0, -1.0)

PER_CELL = [
    lambda a, r: F.binary_cross_entropy(a.sigmoid(), T.sigmoid(), reduction=r),
    lambda a, r: F.binary_cross_entropy(a.sigmoid(), T.sigmoid(), WEIGHT[:, None, None], reduction=r),
    lambda a, r: F.gaussian_nll_loss(a, T, POSITIVE, reduction=r),
    lambda a, r: F.gaussian_nll_loss(T, X, a.exp(), full=True, reduction=r),
    lambda a, r: F.poisson_nll_loss(a, POSITIVE, reduction=r),
    lambda a, r: F.poisson_nll_loss(a.exp(), POSITIVE, log_input=False, full=True, reduction=r),
    lambda a, r: F.hinge_embedding_loss(a, SIGNS, 0.7, reduction=r),
    lambda a, r: F.soft_margin_loss(a, SIGNS, reduction=r),
    lambda a, r: F.margin_ranking_loss(a, T, SIGNS, 0.2, reduction=r),
]


@pytest.mark.parametrize("case", range(len(PER_CELL)))
def test_rarer_losses_per_cell(case):
    for i, where in enumerate(few()):
        if (i + case) % 3 == 0:
            for reduction in REDUCTIONS:
                compare(lambda a, r=reduction: PER_CELL[case](a, r), [(X, *where)], what=f"{where} {reduction}")


SAMPLES, OTHERS, THIRD = values(5, 7, 6), values(6, 7, 6), values(7, 7, 6)
OF_SAMPLE = torch.randint(0, 6, (7,), generator=torch.Generator().manual_seed(8))
SEVERAL = torch.tensor([[1, 3, -1, 0, 0, 0], [5, -1, 0, 0, 0, 0]]).repeat(4, 1)[:7]

PER_SAMPLE = [
    lambda a, r: F.cosine_embedding_loss(a, OTHERS, torch.where(OF_SAMPLE > 2, 1, -1), 0.1, reduction=r),
    lambda a, r: F.triplet_margin_loss(a, OTHERS, THIRD, margin=3.0, swap=True, reduction=r),
    lambda a, r: F.triplet_margin_with_distance_loss(a, OTHERS, THIRD, margin=3.0, reduction=r),
    lambda a, r: F.multi_margin_loss(a, OF_SAMPLE, reduction=r),
    lambda a, r: F.multilabel_margin_loss(a, SEVERAL, reduction=r),
    lambda a, r: F.multilabel_soft_margin_loss(a, (OTHERS > 0).double(), WEIGHT[:6], reduction=r),
    lambda a, r: F.pairwise_distance(a, OTHERS, p=3),
    lambda a, r: F.cosine_similarity(a, OTHERS, dim=1),
]


@pytest.mark.parametrize("case", range(len(PER_SAMPLE)))
def test_losses_per_sample(case):
    for where in layouts((7, 6), (0, 1)):
        for reduction in REDUCTIONS:
            compare(lambda a, r=reduction: PER_SAMPLE[case](a, r), [(SAMPLES, *where)], what=f"{where} {reduction}")


@pytest.mark.parametrize("loss", [F.nll_loss, F.cross_entropy])
def test_labels_of_a_byte(loss):
    """In which -100, that is ignored, is the class 156."""
    scores, weight = values(11, 6, 200), values(12, 200).abs()
    labels = torch.tensor([156, 3, 2, 199, 156, 0], dtype=torch.uint8)
    for where in layouts((6, 200), (0, 1)):
        for w, ignore in ((None, -100), (weight, -100), (weight, 3)):
            compare(lambda x, w=w, ignore=ignore: loss(x, labels, w, ignore_index=ignore), [(scores, *where)])


@pytest.mark.parametrize("loss", [F.hinge_embedding_loss, F.poisson_nll_loss, F.soft_margin_loss, F.kl_div])
def test_losses_that_broadcast_without_a_warning(loss, recwarn):
    mesh, placements, sizes = next(iter(few()))
    loss(shard(X, mesh, placements, sizes), X[:1], reduction="sum")
    assert not recwarn.list


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.cross_entropy])
def test_only_kl_div_has_a_mean_over_the_batch(loss):
    mesh, placements, sizes = next(iter(few()))
    x = shard(X, mesh, placements, sizes)
    with pytest.raises(ValueError, match="batchmean is not a valid value"):
        loss(X, X, reduction="batchmean")
    with pytest.raises(ValueError, match="batchmean is not a valid value"):
        loss(x, x, reduction="batchmean")
