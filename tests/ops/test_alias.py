"""Functions of torch that are one of torch.nn.functional, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch

from tests.ops.windows import check, field

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


@pytest.mark.parametrize("name", CASES)
def test_losses(name):
    for reduction in range(3):
        check(lambda x: CASES[name](x, reduction), field(6, 5), (0, 1), reduction + len(name), count=3)
