"""Cross entropy of scores that are sharded along their classes: the scores stay, a few numbers per row travel."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.ops.rule.agreement import blank, checked, in_range
from mpishard.ops.rule.dim import local_shape
from mpishard.ops.rule.reduction import HALVES, reduced
from mpishard.tensor.operand import fitted
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def loss_of_cut_classes(
    x: ShardTensor,
    dim: int,
    target: Tensor,
    weight: Tensor | None,
    *,
    shares: bool,
    logits: bool,
    ignore: int,
    smoothing: float,
    reduction: str,
) -> ShardTensor:
    """Return the loss as torch composes it. Collective over the mesh dims that shard the classes.

    Parameters
    ----------
    x, dim
        The scores, and the dim of their classes.
    target, weight
        As torch takes them; the weight has no gradient, and every rank has it.
    shares, logits
        Whether targets are probabilities, and whether scores are logits or logarithms of probabilities.
    ignore, smoothing, reduction
        As torch takes them.
    """
    classes, out, mesh = x.shape[dim], reduced(x.sharding, dim).out, x.mesh
    scale = None if weight is None else weight.reshape(-1, *(1,) * (x.ndim - 1 - dim))

    def over_classes(shares: Any) -> Any:
        return -(shares if scale is None else shares * scale).sum(dim)

    count: Any = math.prod(out.shape)
    if shares:
        logs: Any = torch.log_softmax(x, dim) if logits else x
        loss = over_classes(logs * (target * (1 - smoothing) + smoothing / classes if smoothing else target))
    else:
        here = list(local_shape(out, mesh.coords))
        here.insert(dim, classes)

        def check(labels: Tensor) -> None:
            if not in_range(labels[labels.long() != ignore], 0, classes):
                F.nll_loss(blank(here, labels), labels, ignore_index=ignore)

        labels = checked(check, mesh, (out,), fitted(target, mesh, out))
        # of a byte -100 is a class
        given: Any = wrap(labels.long(), out, mesh)
        live = given != ignore
        given = torch.where(live, given, 0)
        logs = torch.log_softmax(x, dim) if logits else x
        loss, count = -torch.gather(logs, dim, given.unsqueeze(dim)).squeeze(dim), live.sum()
        if weight is not None:
            own = weight[given]
            loss, count = loss * own, torch.where(live, own, 0).sum()
        if smoothing:
            loss = (1 - smoothing) * loss + over_classes(logs) * (smoothing / classes)
        loss = loss.masked_fill(~live, 0)
    if reduction == "none":
        return loss  # type: ignore[no-any-return]
    total = (loss.float() if loss.dtype in HALVES else loss).sum()
    return (total if reduction == "sum" else total / count).to(loss.dtype)  # type: ignore[no-any-return]
