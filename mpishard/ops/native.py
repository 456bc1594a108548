"""Functions of ``torch.ops.aten`` and kin that libraries call, and torch's decompositions: below the public ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.graph import underivable
from mpishard.layout import Replicate, Shard
from mpishard.ops.norm.normalization import group_norm, layer_norm, torch_batch_norm
from mpishard.ops.pointwise.pointwise import pointwise
from mpishard.ops.rule.dim import normal_dim, real
from mpishard.ops.rule.reduction import HALVES
from mpishard.tensor.operand import mesh_of, on_mesh
from mpishard.tensor.registry import aten, implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap

# cotangents of pointwise functions
pointwise(
    *aten(
        *"""
        elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
        leaky_relu_backward log_sigmoid_backward logit_backward mish_backward native_dropout_backward
        rrelu_with_noise_backward sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward
        threshold_backward
        """.split()
    )
)


# -- softmax


@implements(*spellings("_safe_softmax"), sharded="reduction")
def safe_softmax(input: Any, dim: int, dtype: Any = None) -> Any:
    """As ``torch.softmax``, and zeros where every number is minus infinity. Collective where the dim is sharded."""
    nothing = (input == -torch.inf).all(dim, keepdim=True)
    return torch.softmax(input.masked_fill(nothing, 0), dim, dtype).masked_fill(nothing, 0)


@implements(*spellings("_softmax_backward_data"), sharded="reduction")
def softmax_backward(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    """Return the cotangent of the input of softmax. Collective where the dim is sharded."""
    dtype = _result_dtype(torch.ops.aten._softmax_backward_data, grad_output, output, input_dtype)
    g, y = _wide(grad_output), _wide(output)
    return (y * (g - (g * y).sum(dim, keepdim=True))).to(dtype)


@implements(*spellings("_log_softmax_backward_data"), sharded="reduction")
def log_softmax_backward(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    """Return the cotangent of the input of log_softmax. Collective where the dim is sharded."""
    dtype = _result_dtype(torch.ops.aten._log_softmax_backward_data, grad_output, output, input_dtype)
    g, y = _wide(grad_output), _wide(output)
    return (g - y.exp() * g.sum(dim, keepdim=True)).to(dtype)


def _result_dtype(func: Any, grad_output: Any, output: Any, input_dtype: Any) -> torch.dtype:
    """Return torch's dtype of the result, or raise what it raises of these. Not collective."""
    cells = (torch.ones(1, dtype=x.dtype, device=x.device) for x in (grad_output, output))
    return func(*cells, 0, input_dtype).dtype  # type: ignore[no-any-return]


def _wide(x: Any) -> Any:
    return x.float() if x.dtype in HALVES else x


# -- normalisation, with the statistics


def _moments(x: ShardTensor, dims: Sequence[int], eps: float, keepdim: bool) -> tuple[Any, Any]:
    """Return mean and 1/std over dims. Collective where one is sharded."""
    var, mean = torch.var_mean(_wide(x), tuple(dims), correction=0, keepdim=keepdim)
    return mean.to(x.dtype), (var + real(eps)).rsqrt().to(x.dtype)


@implements(*spellings("native_layer_norm"), sharded="reduction")
def native_layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """As ``layer_norm``, with mean and 1/std. Collective where one of the last dims is sharded."""
    x = on_mesh(input, mesh_of((input, weight, bias)))
    y = layer_norm(x, normalized_shape, weight, bias, eps)
    return y, *_moments(x.detach(), tuple(range(x.ndim - len(tuple(normalized_shape)), x.ndim)), eps, True)


@implements(*spellings("native_group_norm"), sharded="reduction")
def native_group_norm(
    input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    """As ``group_norm``, with mean and 1/std. Collective where a spatial dim is sharded."""
    x = on_mesh(input, mesh_of((input, weight, bias)))
    rows: Any = x if tuple(x.shape[:2]) == (N, C) else x.reshape(N, C, HxW)
    y: Any = group_norm(rows, group, weight, bias, eps)
    grouped = rows.unflatten(1, (group, C // group))
    mean, rstd = _moments(grouped, tuple(range(2, grouped.ndim)), eps, False)
    if not x.requires_grad:
        # torch gives these a gradient where any operand has one: that of weight and bias is zero
        for param in (weight, bias):
            if isinstance(param, Tensor) and param.requires_grad:
                mean, rstd = mean + param[:0].sum(), rstd + param[:0].sum()
    return y.reshape(x.shape), mean, rstd


def _native_batch_norm(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """As ``batch_norm``, with mean and 1/std of the batch. Collective in training."""
    x = on_mesh(input, mesh_of((input, weight, bias, mean, var)))
    y = torch_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    if not training:
        return y, x.new_empty(0), x.new_empty(0)
    return y, *_moments(x.detach(), (0, *range(2, x.ndim)), eps, False)


def _native_batch_norm_legit(input: Any, weight: Any, bias: Any, *rest: Any, **named: Any) -> Any:
    """As ``native_batch_norm``, with or without running statistics. Collective in training."""
    if "training" in named or (rest and isinstance(rest[0], bool)):
        return _native_batch_norm(input, weight, bias, None, None, *rest, **named)
    stats = dict(zip(("mean", "var"), (named.pop(n) for n in ("running_mean", "running_var") if n in named)))
    return _native_batch_norm(input, weight, bias, *rest, **stats, **named)


def _batch_norm_with_update(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    """As ``native_batch_norm`` in training, with what cuDNN would keep. Collective."""
    found = _native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return *found, found[0].new_empty(0, dtype=torch.uint8)


implements(*spellings("native_batch_norm", "_native_batch_norm_legit"), sharded="reduction")(_native_batch_norm_legit)
implements(*spellings("_batch_norm_with_update"), *aten("_batch_norm_with_update"), sharded="reduction")(
    _batch_norm_with_update
)


# -- other


@implements(*aten("_to_copy"), sharded="local")
def to_copy(input: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> Any:
    """As ``to``, of a copy. Not collective."""
    how = {} if memory_format is None else {"memory_format": memory_format}
    return input.to(device=device or input.device, dtype=dtype or input.dtype, copy=True, **how)


@implements(*spellings("convolution"), sharded="halo")
def convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    """As ``conv1d`` and kin, transposed or not. Neighborwise collective where a spatial dim is sharded."""
    name = f"conv{'_transpose' if transposed else ''}{weight.ndim - 2}d"
    rest = (output_padding, groups, dilation) if transposed else (dilation, groups)
    return getattr(F, name)(input, weight, bias, stride, padding, *rest)


@implements(*aten("convolution_backward"), sharded="halo")
def convolution_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """Return the cotangents of a convolution's input, weight and bias: it is computed again.

    Collective where a gradient of the weight is asked for, else neighborwise.
    """
    mesh = mesh_of((grad_output, input, weight))
    g, x = (on_mesh(t, mesh) for t in (grad_output, input))
    if not x.sharding.sharded_mesh_dims:
        # torch.nn.grad gives one cell in place of an input that is not needed
        x = x.redistribute(placements=[Replicate() if p == Shard(1) else p for p in g.placements])
    again = torch.is_grad_enabled() and any(t.requires_grad for t in (g, x, weight))
    given = [t if again and t.requires_grad else t.detach().requires_grad_() for t in (x, weight)]
    with torch.enable_grad():
        y = convolution(*given, None, stride, padding, dilation, transposed, output_padding, groups)
    wanted = [t for t, need in zip(given, output_mask) if need]
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=again) if wanted else ())
    own = [next(found) if need else None for need in output_mask[:2]]
    return own[0], own[1], g.sum([0, *range(2, g.ndim)]) if output_mask[2] else None


def _max_pool_backward(pool: Any) -> Any:
    def rule(
        grad_output: Any,
        self: Any,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        indices: Any,
    ) -> Any:
        """Return the cotangent of the input of max_pool, which is pooled again. Neighborwise collective."""
        own = on_mesh(self, mesh_of((grad_output, self, indices)))
        x: Any = own.detach().requires_grad_()
        with torch.enable_grad():
            y = pool(x, kernel_size, stride or kernel_size, padding, dilation, ceil_mode)
        again = torch.is_grad_enabled() and grad_output.requires_grad
        out: Any = torch.autograd.grad(y, x, grad_output, create_graph=again)[0]
        # of the input it depends as a step does: with a gradient of zeros
        return wrap(out.block + own.block[:0].sum(), out.sharding, out.mesh)

    return rule


implements(*aten("max_pool2d_with_indices_backward"), sharded="halo")(_max_pool_backward(F.max_pool2d))
implements(*aten("max_pool3d_with_indices_backward"), sharded="halo")(_max_pool_backward(F.max_pool3d))


def _within(x: Any, indices: Sequence[Any]) -> list[Any]:
    return [None if i is None else i.clamp(-n, n - 1) for i, n in zip(indices, x.shape)]


@implements(*spellings("_unsafe_masked_index"), sharded="reduction")
def unsafe_masked_index(input: Any, mask: Any, indices: Sequence[Any], fill: Any) -> Any:
    """Pick cells by indices, which count where a mask is true. Collective as indexing is."""
    if not input.numel():
        return mask.new_full(mask.shape, fill, dtype=input.dtype)
    at = tuple(slice(None) if i is None else i for i in _within(input, indices))
    return input[at].masked_fill(~mask, fill)


@implements(*spellings("_unsafe_masked_index_put_accumulate"), sharded="reduction")
def unsafe_masked_index_put_accumulate(input: Any, mask: Any, indices: Sequence[Any], values: Any) -> Any:
    """Add values by indices, which count where a mask is true. Collective as indexing is."""
    if not input.numel():
        return input.clone()
    input = on_mesh(input, mesh_of((input, mask, values, *indices)))
    return torch.index_put(input, _within(input, indices), values.masked_fill(~mask, 0), accumulate=True)


@implements(*spellings("_chunk_cat"), sharded="reduction")
def chunk_cat(tensors: Sequence[Any], dim: int, num_chunks: int) -> Any:
    """Cut a dim of each tensor into chunks, filled up with zeros, and join them, flattened. Collective: cells move.

    As in torch, no gradient goes through it.
    """
    if num_chunks <= 0:
        raise RuntimeError("_chunk_cat expects positive num_chunks")
    if not all(t.numel() for t in tensors):
        raise RuntimeError("_chunk_cat expects non-empty tensor")
    parts = []
    for t in tensors:
        d = normal_dim(dim, t.ndim)
        n = -(-t.shape[d] // num_chunks) * num_chunks
        t = F.pad(t, (0, 0) * (t.ndim - 1 - d) + (0, n - t.shape[d]))
        parts.append(t.reshape(*t.shape[:d], num_chunks, -1))
    joined = torch.cat(parts, normal_dim(dim, tensors[0].ndim) + 1)
    operands = [t.block if isinstance(t, ShardTensor) else t for t in tensors]
    return wrap(underivable("aten::_chunk_cat", joined.block.detach(), operands), joined.sharding, joined.mesh)


implements(*spellings("_softmax"), sharded="reduction")(
    lambda input, dim, half_to_float: torch.softmax(input, dim, torch.float32 if half_to_float else None)
)
implements(*spellings("_log_softmax"), sharded="reduction")(
    lambda input, dim, half_to_float: torch.log_softmax(input, dim, torch.float32 if half_to_float else None)
)
implements(*aten("index"), sharded="reduction")(
    lambda input, indices: input[tuple(slice(None) if i is None else i for i in indices)]
)
implements(*aten("_unsafe_view"), sharded="reduction")(lambda input, size: input.reshape(size))
