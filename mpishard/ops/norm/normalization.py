"""Normalisation rules: statistics of the global tensor; torch's own kernels where they lie on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.bucket import use
from mpishard.autograd.linear import apply
from mpishard.autograd.redistribute import redistribute, sum_partial
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.collective import blocking
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedOperationError, described
from mpishard.layout import Layout, Replicate, Shard, bounds, layout_of
from mpishard.ops.norm.channels_last import FORMATS
from mpishard.ops.norm.node import Rows, normalised
from mpishard.ops.rule.dim import whole_along
from mpishard.ops.rule.empty_block import cropped, filled
from mpishard.ops.rule.reduction import HALVES, counts_over, reduced
from mpishard.tensor.operand import mesh_of, moved, replicated_layout, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _plan_rows(x: ShardTensor, groups: int) -> Rows:
    """Return the rows of a block of shape (N, C, ...); ``groups`` 0: statistics per channel over all samples."""
    layout, mesh = x._layout, x._mesh
    shape = layout.shape
    if len(shape) < 2:
        raise ValueError(f"expected at least 2 dims, samples and channels (got shape {tuple(shape)})")
    if groups and shape[1] % groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(shape)} and num_groups={groups}"
        )
    per_group = shape[1] // groups if groups else 1
    dims = tuple(range(2, len(shape))) if groups else (0, *range(2, len(shape)))
    over = reduced(layout, dims).over if dims else ()
    counts = tuple(per_group * c for c in counts_over(mesh, layout, dims, over))
    used = tuple(m for m in layout.sharded_mesh_dims if layout.placements[m].dim != 1)  # type: ignore[union-attr]
    n, c = layout.local_shape(mesh.coords)[:2]
    count = per_group * math.prod(shape[d] for d in dims)
    return Rows(n, c, c // per_group if groups else 0, count, counts, over, used)


def _rows_of(x: ShardTensor, groups: int) -> Rows:
    key = ("normalise", x._layout, groups)
    rows = x._mesh.plans.get(key)
    if rows is None:
        rows = x._mesh.plan(key, lambda: _plan_rows(x, groups))
    return rows  # type: ignore[no-any-return]


def _input(name: str, x: Any) -> ShardTensor:
    if isinstance(x, ShardTensor):
        return resolved(x)
    raise UnsupportedOperationError(
        described(
            f"{name}: a plain input with ShardTensor parameters",
            expected="a ShardTensor as input",
            got=type(x).__name__,
            fix="distribute the input, or gather the parameters with full_tensor()",
        )
    )


def _per_channel(t: Any, x: ShardTensor, rows: Rows) -> Tensor | None:
    """Return this rank's part of a weight or bias, used over the mesh dims that shard the input."""
    if t is None:
        return None
    if isinstance(t, ShardTensor):
        t = t.full_tensor()
    layout, mesh = x._layout, x._mesh
    t = use(t, mesh, rows.used)
    if layout.sizes[1] is None:
        return t  # type: ignore[no-any-return]
    lo, hi = layout.interval(1, mesh.coords)
    return use(t, mesh, layout.shard_dims[1])[lo:hi]


def _in_autocast(x: ShardTensor, probe: Any) -> ShardTensor:
    """Return ``x`` in the dtype in which autocast would run the operation, as ``probe`` of a tiny tensor tells."""
    if not torch.is_autocast_enabled(x._local.device.type):
        return x
    with torch.no_grad():
        dtype = probe(x._local.new_zeros((1, x.shape[1], 2))).dtype
    return x if dtype == x._local.dtype else wrap(x._local.to(dtype), x._layout, x._mesh)


@implements(F.group_norm, torch.group_norm, sharded="gathers")
def group_norm(
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> ShardTensor:
    """Normalise over groups of channels and the spatial dims. Collective where a spatial dim is sharded.

    Channels that are cut within a group are gathered, and the result is cut again.
    """
    mesh = mesh_of((input, weight, bias))
    x = _input("group_norm", input)
    before = x._layout
    sizes = before.sizes[1] if x.ndim > 1 else None
    if sizes is not None and num_groups > 0 and any(s % max(1, x.shape[1] // num_groups) for s in sizes):
        x = whole_along(x, (1,))
    rows = _rows_of(x, num_groups)
    weight, bias = _per_channel(weight, x, rows), _per_channel(bias, x, rows)
    if rows.over:
        x = _in_autocast(x, lambda t: torch.group_norm(t, num_groups))
        y = normalised(x._local, weight, bias, rows, mesh, eps)[0]
    else:
        y = torch.group_norm(filled(x._local), rows.groups or 1, filled(weight), filled(bias), eps)
        y = cropped(y, x._local.shape)
    return moved(wrap(y, x._layout, mesh), before)


def _running(t: Any, name: str) -> Any:
    """Return running statistics as a plain tensor that can be written in place."""
    if isinstance(t, ShardTensor):
        if not t._layout.is_replicated:
            raise UnsupportedOperationError(
                described(
                    f"{name}: sharded running statistics",
                    expected="plain or replicated running_mean and running_var",
                    got=list(t._layout.placements),
                    fix="keep the buffers of the module as plain tensors",
                )
            )
        return t._local
    return t


def _update(running: Tensor | None, value: Tensor, momentum: float, x: ShardTensor) -> None:
    """Move running statistics towards this batch's, which every rank has for its own channels."""
    if running is None:
        return
    value = value.detach()
    if x._layout.sizes[1] is not None:
        value = _whole_channels(value, x._layout, x._mesh)
    running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def _whole_channels(value: Tensor, layout: Layout, mesh: CartMesh) -> Tensor:
    """Return a number per channel of all ranks. Collective over the mesh dims that shard the channels."""
    placements = [Shard(0) if p == Shard(1) else Replicate() for p in layout.placements]
    source = layout_of(mesh.shape, placements, (layout.shape[1],), (layout.sizes[1],))
    return redistribute(value, mesh, source, replicated_layout(mesh, source.shape))


@implements(torch.batch_norm, sharded="reduction")
def torch_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> ShardTensor:
    """Normalise channels by the statistics of the global batch, or by the running ones. Collective in training."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@implements(F.batch_norm, sharded="reduction")
def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardTensor:
    """Normalise channels by the statistics of the global batch, or by the running ones. Collective in training."""
    mesh = mesh_of((input, weight, bias, running_mean, running_var))
    x = _input("batch_norm", input)
    running_mean, running_var = _running(running_mean, "batch_norm"), _running(running_var, "batch_norm")
    rows = _rows_of(x, 0)
    weight, bias = _per_channel(weight, x, rows), _per_channel(bias, x, rows)
    if training:
        if rows.count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        x = _in_autocast(x, lambda t: torch.batch_norm(t, None, None, None, None, True, 0.0, eps, False))
        y, mean, var = normalised(x._local, weight, bias, rows, mesh, eps)
        _update(running_mean, mean, momentum, x)
        _update(running_var, var * (rows.count / max(1, rows.count - 1)), momentum, x)
        return wrap(y, x._layout, mesh)
    lo, hi = x._layout.interval(1, mesh.coords)
    weight, bias, mean, var = map(filled, (weight, bias, running_mean[lo:hi], running_var[lo:hi]))
    block = filled(x._local)
    y = torch.batch_norm(block, weight, bias, mean, var, False, momentum, eps, False)
    if y.requires_grad:
        y.register_hook(_in_format_of(block))
    return wrap(cropped(y, x._local.shape), x._layout, mesh)


def _in_format_of(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a hook that gives a cotangent the memory format of ``x``.

    Of one sample, torch's batch_norm backward (seen in 2.13) misreads a cotangent that came through
    ``flatten(2).transpose(1, 2)``: its batch stride is that of no format, and the cells are taken in another order.
    """
    row_major = torch.contiguous_format
    memory_format = row_major if x.is_contiguous() else FORMATS.get(x.ndim, row_major)
    return lambda g: g.contiguous(memory_format=memory_format)


@implements(torch.instance_norm, sharded="reduction")
def torch_instance_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> ShardTensor:
    """Normalise every channel of every sample. Collective where a spatial dim is sharded."""
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


@implements(F.instance_norm, sharded="reduction")
def instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardTensor:
    """Normalise every channel of every sample. Collective where a spatial dim is sharded."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    mesh = mesh_of((input, weight, bias, running_mean, running_var))
    x = _input("instance_norm", input)
    running_mean, running_var = _running(running_mean, "instance_norm"), _running(running_var, "instance_norm")
    rows = _rows_of(x, x.shape[1])
    if rows.count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {x.shape}")
    weight, bias = _per_channel(weight, x, rows), _per_channel(bias, x, rows)
    if not rows.over and running_mean is None and running_var is None:
        weight, bias = filled(weight, 2), filled(bias, 2)
        y = torch.instance_norm(filled(x._local, 2), weight, bias, None, None, True, 0.0, eps, False)
        return wrap(cropped(y, x._local.shape), x._layout, mesh)
    x = _in_autocast(x, lambda t: torch.instance_norm(t, None, None, None, None, True, 0.0, eps, False))
    y, mean, var = normalised(x._local, weight, bias, rows, mesh, eps)
    _update(running_mean, _over_samples(mean, x, rows), momentum, x)
    _update(running_var, _over_samples(var, x, rows) * (rows.count / max(1, rows.count - 1)), momentum, x)
    return wrap(y, x._layout, mesh)


def _over_samples(value: Tensor, x: ShardTensor, rows: Rows) -> Tensor:
    """Return the mean over the samples of all ranks of a number per sample and channel."""
    total = value.view(rows.n, rows.c).sum(0)
    over = reduced(x._layout, 0).over
    return (blocking.all_reduce(total, x._mesh.group(over)) if over else total) / x.shape[0]


# -- norms over the last dims


def _last_dims(x: ShardTensor, normalized_shape: Any) -> tuple[int, ...]:
    shape = tuple(normalized_shape)
    if not shape or tuple(x.shape[x.ndim - len(shape) :]) != shape:
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape {['*', *shape]}, "
            f"but got input of size {list(x.shape)}"
        )
    return tuple(range(x.ndim - len(shape), x.ndim))


def _used(t: Any, x: ShardTensor) -> Any:
    """Return a weight that every rank uses whole."""
    if t is None:
        return None
    return use(t.full_tensor() if isinstance(t, ShardTensor) else t, x._mesh, x._layout.sharded_mesh_dims)


def _plan_last(x: ShardTensor, dims: tuple[int, ...], over: tuple[int, ...]) -> Rows:
    local = x._layout.local_shape(x._mesh.coords)
    counts = counts_over(x._mesh, x._layout, dims, over)
    return Rows(math.prod(local[: dims[0]]), 1, 1, reduced(x._layout, dims).count, counts, over, ())


@implements(F.layer_norm, torch.layer_norm, sharded="reduction")
def layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Normalise over the last dims. Collective where one of them is sharded."""
    mesh = mesh_of((input, weight, bias))
    x = _input("layer_norm", input)
    dims = _last_dims(x, normalized_shape)
    over = reduced(x._layout, dims).over
    if not over:
        y = torch.layer_norm(x._local, tuple(normalized_shape), _used(weight, x), _used(bias, x), eps)
        return wrap(y, x._layout, mesh)
    key = ("layer_norm", x._layout, dims)
    rows = mesh.plans.get(key) or mesh.plan(key, lambda: _plan_last(x, dims, over))
    x = _in_autocast(x, lambda t: torch.layer_norm(t, (2,)))
    # rows of one channel: what is normalised comes after the samples
    flat = x._local.reshape(rows.n, 1, math.prod(x._local.shape[dims[0] :]))
    y = normalised(flat, None, None, rows, mesh, eps)[0].view(x._local.shape)
    out = wrap(y, x._layout, mesh)
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(y.dtype)


@implements(F.rms_norm, torch.rms_norm, sharded="reduction")
def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Divide by the root mean square over the last dims. Collective where one of them is sharded."""
    mesh = mesh_of((input, weight))
    x = _input("rms_norm", input)
    dims = _last_dims(x, normalized_shape)
    plan = reduced(x._layout, dims, True)
    if not plan.over:
        return wrap(torch.rms_norm(x._local, tuple(normalized_shape), _used(weight, x), eps), x._layout, mesh)
    x = _in_autocast(x, lambda t: torch.rms_norm(t, (2,)))
    wide = x._local.float() if x._local.dtype in HALVES else x._local
    square = sum_partial((wide * wide).sum(dims, keepdim=True), mesh, plan.over) / plan.count
    scale = (square + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    out = wrap((wide * use(scale, mesh, plan.over)).to(x._local.dtype), x._layout, mesh)
    out = out if weight is None else out * weight
    return out.to(x._local.dtype)


# -- local response


@implements(F.local_response_norm, sharded="halo")
def local_response_norm(input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> ShardTensor:
    """Divide by the squares of nearby channels. Neighborwise collective where the channels are sharded."""
    x = _input("local_response_norm", input)
    mesh, layout = x._mesh, x._layout
    if x.ndim < 3:
        raise ValueError(f"Expected 3D or higher dimensionality input (got {x.ndim} dimensions)")
    squares = x._local * x._local
    if reduced(layout, 1).over:
        key = ("local_response_norm", layout, x._local.dtype, size)
        squares = apply(mesh.plan(key, lambda: _plan_response(x, size)), squares)
    else:
        squares = F.pad(squares, (*[0] * (2 * (x.ndim - 2)), size // 2, (size - 1) // 2))
    if not x._local.shape[1]:
        means = squares.narrow(1, 0, 0)
    else:
        means = squares.unfold(1, size, 1).mean(-1)
    return wrap(x._local / (means * alpha + k).pow(beta), layout, mesh)


def _plan_response(x: ShardTensor, size: int) -> WindowOp:
    layout = x._layout
    n, b = layout.shape[1], bounds(layout.sizes[1] or (layout.shape[1],))
    windows = [(b[i] - size // 2, b[i + 1] + (size - 1) // 2) for i in range(len(b) - 1)]
    return window_op(x._mesh, layout, x._local.dtype, [intervals_wanted(n, 1, windows)], op="local_response_norm")
