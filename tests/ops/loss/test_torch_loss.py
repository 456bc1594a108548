"""Functions of torch that are one of torch.nn.functional, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import compare
from tests.ops.windows import check, field, refused_alike, sampled

OTHER = field(6, 5).flip(0)
SIGNS = (OTHER > 0).double() * 2 - 1

CASES = {
    "binary cross entropy": lambda x, r: torch.binary_cross_entropy_with_logits(x, OTHER.sigmoid(), reduction=r),
    "hinge": lambda x, r: torch.hinge_embedding_loss(x, SIGNS, 0.5, r),
    "divergence": lambda x, r: torch.kl_div(x.log_softmax(1), OTHER.softmax(1), r),
    "ranking": lambda x, r: torch.margin_ranking_loss(x, OTHER, SIGNS, 0.1, r),
    "triplet": lambda x, r: torch.triplet_margin_loss(x, OTHER, OTHER * 2, reduction=r),
    "cosine": lambda x, r: torch.cosine_embedding_loss(x, OTHER, SIGNS[:, 0], reduction=r),
    "Poisson": lambda x, r: torch.poisson_nll_loss(x, OTHER.abs(), True, False, 1e-8, r),
}


DEFAULTS = {
    "hinge": lambda of, x: of.hinge_embedding_loss(x, SIGNS),
    "divergence": lambda of, x: of.kl_div(x.log_softmax(1), OTHER.softmax(1)),
    "ranking": lambda of, x: of.margin_ranking_loss(x, OTHER, SIGNS),
    "triplet": lambda of, x: of.triplet_margin_loss(x, OTHER, OTHER * 2),
    "cosine": lambda of, x: of.cosine_embedding_loss(x, OTHER, SIGNS[:, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_losses(name):
    for reduction in range(3):
        check(lambda x: CASES[name](x, reduction), field(6, 5), (0, 1), reduction + len(name), count=3)


def test_losses_without_a_reduction():
    for name, loss in DEFAULTS.items():
        for of in (torch, torch.ops.aten):
            check(lambda x: loss(of, x), field(6, 5), (0, 1), len(name), count=2)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="older torch")
def test_linear_cross_entropy():
    weight, bias = field(4, 5).requires_grad_(), field(4).requires_grad_()
    wide, heights = field(4, 3, 5).requires_grad_(), field(4, 3).requires_grad_()
    classes = torch.arange(6) % 4
    cases = [
        lambda x, t: F.linear_cross_entropy(x, weight, t, linear_bias=bias),
        lambda x, t: F.linear_cross_entropy(x, weight, t, reduction="none", ignore_index=2, weight=bias.detach().abs()),
        lambda x, t: F.linear_cross_entropy(
            x, weight, (x.detach() @ weight.detach().T).softmax(1), label_smoothing=0.1
        ),
        lambda x, t: F.linear_cross_entropy(x, wide, t[:, None].expand(-1, 3), linear_bias=heights),
    ]
    for k, f in enumerate(cases):
        for mesh, placements, sizes in sampled((6, 5), (0, 1), k, 4):
            other = placements if all(p in (ms.Shard(0), ms.Replicate()) for p in placements) else None
            operands = [(field(6, 5), mesh, placements, sizes), (classes, mesh, other, None)]
            compare(f, operands, [[weight, bias], [weight], [weight], [wide, heights]][k], what=f"{k} {placements}")
    refused_alike(lambda x: F.linear_cross_entropy(x, weight[:, :3], classes), field(6, 5))
