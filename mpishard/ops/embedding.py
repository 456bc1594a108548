"""Look-ups of integer ShardTensors in tables: embedding and one-hot."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mpishard.autograd.bucket import use
from mpishard.errors import UnsupportedOperationError, described
from mpishard.ops.contract import contract
from mpishard.ops.dim import mapped
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _refuse(option: str, why: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        described(
            f"embedding with {option} and ShardTensors",
            expected=f"an embedding without {option}",
            got=why,
            fix="leave the option out, or look up on every rank with indices.full_tensor()",
        )
    )


@implements(F.embedding)
def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ShardTensor:
    """Look up rows. Not collective; the gradient of the weight is summed over the ranks.

    Indices of any layout look up in a plain weight; a weight sharded over its columns (dim 1) gives columns.
    """
    if max_norm is not None:
        raise _refuse("max_norm", "it would rescale rows on some ranks only")
    if scale_grad_by_freq:
        raise _refuse("scale_grad_by_freq", "it would count each rank's own indices")
    if sparse:
        raise _refuse("sparse", "sparse gradients are not summed over ranks")
    if isinstance(weight, ShardTensor) and 0 in weight._layout.shard_dims:
        raise UnsupportedOperationError(
            described(
                "embedding: a weight sharded over its rows",
                expected="a plain weight, or one sharded over dim 1",
                got=list(weight._layout.placements),
                fix="redistribute the weight to dim 1",
            )
        )
    if isinstance(input, ShardTensor) and not isinstance(weight, ShardTensor):
        x = resolved(input)
        layout = mapped(x._layout, (*range(x.ndim), -1), (*x._layout.shape, weight.shape[1]))
        rows = use(weight, x._mesh, layout.sharded_mesh_dims)
        return wrap(F.embedding(x._local, rows, padding_idx), layout, x._mesh)
    labels = tuple(range(input.ndim))
    return contract(
        "embedding",
        lambda i, w: F.embedding(i, w, padding_idx),
        (input, weight),
        (labels, ("rows", "columns")),
        (*labels, "columns"),
    )


@implements(F.one_hot)
def one_hot(input: ShardTensor, num_classes: int = -1) -> ShardTensor:
    """Add a last dim of classes. Not collective where their number is given."""
    x = resolved(input)
    if num_classes == -1:
        num_classes = int(torch.amax(x)) + 1
    local = x._local
    if local.numel():
        local = F.one_hot(local, num_classes)
    else:
        local = local.new_empty((*local.shape, num_classes))
    return wrap(local, mapped(x._layout, (*range(x.ndim), -1), (*x._layout.shape, num_classes)), x._mesh)
