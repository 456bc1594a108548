"""Functions of ``torch`` that are one of ``torch.nn.functional`` with its reduction as a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from mpishard.tensor.registry import RULES, implements

_REDUCTIONS = ("none", "mean", "sum")

# arguments of torch's function before the reduction, in its order
_LOSSES: dict[str, tuple[str, ...]] = {
    "binary_cross_entropy_with_logits": ("input", "target", "weight", "pos_weight"),
    "cosine_embedding_loss": ("input1", "input2", "target", "margin"),
    "hinge_embedding_loss": ("input", "target", "margin"),
    "kl_div": ("input", "target"),
    "margin_ranking_loss": ("input1", "input2", "target", "margin"),
    "triplet_margin_loss": ("anchor", "positive", "negative", "margin", "p", "eps", "swap"),
    "poisson_nll_loss": ("input", "target", "log_input", "full", "eps"),
}


def _loss_rule(name: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    func = getattr(F, name)

    def rule(*args: Any, **kwargs: Any) -> Any:
        """Reduce as the function of the same name. Collective where the loss is reduced."""
        named = {**dict(zip((*arguments, "reduction"), args)), **kwargs}
        named["reduction"] = _REDUCTIONS[named.get("reduction", 1)]
        return RULES[func](**named)

    return rule


for _name, _arguments in _LOSSES.items():
    RULES[getattr(torch, _name)] = _loss_rule(_name, _arguments)


@implements(torch.embedding)
def embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """Look up rows. Not collective."""
    return F.embedding(indices, weight, None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq, sparse)
