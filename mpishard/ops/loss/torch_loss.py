"""Functions of ``torch`` that are one of ``torch.nn.functional`` with its reduction as a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from mpishard.tensor.registry import RULES, aten, implements

_REDUCTIONS = ("none", "mean", "sum")
# of torch's functions, if none is given: another one than their signatures say (docs/upstream.md)
_CELLS = torch.zeros(2, device="cpu")
_DEFAULT = "mean" if torch.kl_div(_CELLS, _CELLS).ndim == 0 else "none"

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


def _loss_rule(name: str, arguments: tuple[str, ...], default: str) -> Callable[..., Any]:
    func = getattr(F, name)

    def rule(*args: Any, **kwargs: Any) -> Any:
        """Reduce as the function of the same name. Collective where the loss is reduced."""
        named = {**dict(zip((*arguments, "reduction"), args)), **kwargs}
        named["reduction"] = _REDUCTIONS[named["reduction"]] if "reduction" in named else default
        return RULES[func](**named)

    return rule


for _name, _arguments in _LOSSES.items():
    implements(getattr(torch, _name), sharded="reduction")(_loss_rule(_name, _arguments, _DEFAULT))
    implements(*aten(_name), sharded="reduction")(_loss_rule(_name, _arguments, "mean"))


@implements(torch.embedding, sharded="local")
def embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """Look up rows. Not collective."""
    return F.embedding(indices, weight, None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq, sparse)


def _linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Any:
    """Take the cross entropy of a linear map. Collective where it is reduced, or classes or features are sharded.

    ``options``, which save memory on one device, are not used.
    """
    given, (classes, *more) = input.shape, linear_weight.shape[:-1] or (0,)
    fits = input.ndim in (1, 2) and linear_weight.ndim > 1 and given[-1] == linear_weight.shape[-1]
    if linear_bias is not None:
        fits = fits and tuple(linear_bias.shape) == (classes, *more)
    alike = tuple(target.shape) == (*given[:-1], classes, *more)
    if not fits or (more and input.ndim == 1) or (alike and ignore_index is not None):  # torch says what is wrong
        blank = [torch.zeros((), dtype=t.dtype, device="cpu").expand(t.shape) for t in (input, linear_weight, target)]
        bias = None if linear_bias is None else torch.zeros((), device="cpu").expand(linear_bias.shape)
        return F.linear_cross_entropy(*blank, linear_bias=bias, ignore_index=ignore_index)
    rows = linear_weight.reshape(-1, given[-1]) if more else linear_weight
    bias = linear_bias.reshape(-1) if more and linear_bias is not None else linear_bias
    scores = F.linear(input, rows, bias)
    if more:
        scores = scores.reshape(*given[:-1], classes, *more)
    return F.cross_entropy(
        scores,
        target,
        weight,
        ignore_index=-100 if ignore_index is None else ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


if hasattr(F, "linear_cross_entropy"):  # new in torch 2.12
    implements(F.linear_cross_entropy, sharded="reduction")(_linear_cross_entropy)
