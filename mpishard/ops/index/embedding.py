"""Look-ups of integer ShardTensors in tables: embedding and one-hot."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.use import use
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedOperationError
from mpishard.layout import Layout
from mpishard.ops.rule.agreement import agreed, blank, in_range
from mpishard.ops.rule.align import meet
from mpishard.ops.rule.contraction import contract
from mpishard.ops.rule.dim import mapped, whole_along
from mpishard.ops.rule.empty_block import filled, unfilled
from mpishard.tensor.operand import mesh_of, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _refuse(option: str, why: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"embedding with {option} and ShardTensors",
        expected=f"an embedding without {option}",
        got=why,
        fix="leave the option out, or look up on every rank with indices.full_tensor()",
    )


def _with_options(
    weight: Any, input: Any, max_norm: float | None, norm_type: float, scale_grad_by_freq: bool, sparse: bool
) -> Any:
    """Return the weight for an embedding with options that look at the indices of all ranks. Collective with them."""
    if sparse:
        raise _refuse("sparse", "sparse gradients are not summed over ranks")
    if max_norm is None and not scale_grad_by_freq:
        return weight
    if max_norm is not None and isinstance(weight, ShardTensor):
        raise _refuse("max_norm", "a sharded weight, whose rows it would scale in place")
    if isinstance(input, ShardTensor):
        x = resolved(input)
        counts = agreed(lambda: _counted(x.block, weight.shape[0]), x.mesh, (x.sharding,))
        if x.sharding.sharded_mesh_dims:
            counts = blocking.all_reduce(counts, x.mesh.group(x.sharding.sharded_mesh_dims))
    else:
        counts = _counted(input, weight.shape[0])
    if max_norm is not None:
        torch.embedding_renorm_(weight.detach(), counts.nonzero()[:, 0], max_norm, norm_type)
    if scale_grad_by_freq and weight.requires_grad:
        scaled = weight * (1 / counts.clamp(min=1).to(weight.dtype)).unsqueeze(1)
        # the weight itself, with the gradient of the scaled one
        return weight.detach() + (scaled - scaled.detach())
    return weight


def _counted(index: Tensor, rows: int) -> Tensor:
    """Return how often each row is looked up."""
    if not in_range(index, 0, rows):
        raise IndexError("index out of range in self")
    return torch.bincount(index.reshape(-1), minlength=rows)


@implements(F.embedding, sharded="gathers")
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

    Indices of any layout look up in a plain weight; a weight sharded over its columns (dim 1) gives columns, one
    sharded over its rows is gathered (collective). For ``max_norm`` and ``scale_grad_by_freq`` the indices of all ranks
    are counted.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"embedding(): argument 'weight' (position 1) must be Tensor, not {type(weight).__name__}")
    if weight.ndim != 2:
        raise RuntimeError(f"'weight' must be 2-D, got {weight.ndim} dims")
    weight = _with_options(weight, input, max_norm, norm_type, scale_grad_by_freq, sparse)
    if isinstance(weight, ShardTensor) and 0 in weight.sharding.shard_dims:
        weight = whole_along(resolved(weight), (0,))
    if isinstance(input, ShardTensor) and not isinstance(weight, ShardTensor):
        x = resolved(input)
        layout = mapped(x.sharding, (*range(x.ndim), -1), (*x.sharding.shape, weight.shape[1]))
        rows = use(weight, x.mesh, layout.sharded_mesh_dims)
        return wrap(_agreed(x.block, rows, padding_idx, x.mesh, (layout,)), layout, x.mesh)
    labels = tuple(range(input.ndim))
    mesh = mesh_of((input, weight))
    layouts = [t.sharding for t in (input, weight) if isinstance(t, ShardTensor)]
    return contract(
        "embedding",
        lambda i, w: _agreed(i, w, padding_idx, mesh, layouts),
        (input, weight),
        (labels, ("rows", "columns")),
        (*labels, "columns"),
    )


def _agreed(index: Tensor, rows: Tensor, padding_idx: int | None, mesh: CartMesh, layouts: Sequence[Layout]) -> Tensor:
    """Look up rows of a block, or raise on every rank. Collective over the mesh dims that shard a layout."""
    shape = rows.shape
    return agreed(
        lambda i: _looked_up(i, rows, padding_idx),
        mesh,
        layouts,
        index,
        check=lambda i: in_range(i, 0, shape[0]) or F.embedding(i, blank(shape, i)),
    )


def _looked_up(index: Tensor, rows: Tensor, padding_idx: int | None) -> Tensor:
    """Look up rows of a block. Torch's gradient of the gradient fails where the result is empty: it gets cells."""
    shape = (*index.shape, rows.shape[1])
    if 0 not in shape or not len(rows) or not rows.requires_grad:
        return F.embedding(index, rows, padding_idx)
    return unfilled(F.embedding(filled(index), filled(rows), padding_idx), shape)


@implements(F.embedding_bag, sharded="gathers")
def embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> ShardTensor:
    """Look up rows and join those of a bag. The gradient of the weight is summed over the ranks.

    Collective where the weight, the dim of a bag, or indices with ``offsets`` are sharded: they are gathered.
    """
    if weight.dtype is torch.int64 and input.is_floating_point():
        warnings.warn(
            "embedding_bag(weight, input) is deprecated: now it is embedding_bag(input, weight)", stacklevel=2
        )
        input, weight = weight, input
    if scale_grad_by_freq:
        raise _refuse("scale_grad_by_freq", "bags: torch divides by the frequencies of other indices")
    weight = _with_options(weight, input, max_norm, norm_type, False, sparse)
    bags: tuple[Any, ...] = ("bag", None) if input.ndim == 2 else (None,)
    own = bags if per_sample_weights is not None else ()
    met = meet((input, weight, offsets, per_sample_weights), (bags, (None, None), (None,), own))
    index, rows, starts, factors = met.locals

    def look_up(i: Any, f: Any) -> Any:
        return F.embedding_bag(
            i, rows, starts, mode=mode, per_sample_weights=f, include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )  # fmt: skip

    def joined(index: Tensor) -> Tensor:
        if input.ndim == 2 and not index.shape[0]:  # keeps a graph, so that all ranks take part in backward
            return (rows.sum(0, keepdim=True) + (0 if factors is None else factors.sum()))[:0]  # type: ignore[no-any-return]
        return look_up(index, factors)  # type: ignore[no-any-return]

    count = rows.shape[0]

    def check(index: Tensor, *starts: Tensor) -> None:
        if starts or not in_range(index, 0, count):
            F.embedding_bag(index, index.new_zeros((count, 1), dtype=torch.float32), *starts, padding_idx=padding_idx)

    reads = (index,) if starts is None else (index, starts)
    local = agreed(lambda i, *_: joined(i), met.mesh, met.plan.operands, *reads, check=check)
    return met.result(local, ("bag", None) if input.ndim == 2 else (None, None))


@implements(F.one_hot, sharded="local")
def one_hot(input: ShardTensor, num_classes: int = -1) -> ShardTensor:
    """Add a last dim of classes. Not collective where their number is given."""
    x = resolved(input)
    if num_classes == -1:
        num_classes = int(torch.amax(x)) + 1

    def encoded(local: Tensor) -> Tensor:
        return F.one_hot(local, num_classes) if local.numel() else local.new_empty((*local.shape, num_classes))

    hot = agreed(encoded, x.mesh, (x.sharding,), x.block, check=lambda i: in_range(i, 0, num_classes) or encoded(i))
    return wrap(hot, mapped(x.sharding, (*range(x.ndim), -1), (*x.sharding.shape, num_classes)), x.mesh)
