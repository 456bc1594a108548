"""Normalisation rules: statistics of the global tensor; torch's own kernels where they lie on one rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import apply
from mpishard.autograd.redistribute import redistribute, sum_partial
from mpishard.autograd.use import use
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm import traced
from mpishard.comm.collective import blocking
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.memory.buffer import cat
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Each, Layout, Replicate, Shard, bounds, layout_of, runs_of
from mpishard.ops.norm.channels_last import FORMATS
from mpishard.ops.norm.node import Rows, normalised
from mpishard.ops.rule.autocast import autocast_enabled
from mpishard.ops.rule.dim import int_list, on_domain, plain, real, strict_int, whole_along
from mpishard.ops.rule.empty_block import filled, unfilled
from mpishard.ops.rule.reduction import HALVES, reduced
from mpishard.tensor.function import block_of
from mpishard.tensor.operand import mesh_of, moved, on_mesh, replicated_layout, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _plan_rows(x: ShardTensor, groups: int) -> Rows:
    """Return the rows of a block of shape (N, C, ...); ``groups`` 0: statistics per channel over all samples."""
    layout, mesh = x.sharding, x.mesh
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
    used = tuple(m for m in layout.sharded_mesh_dims if layout.placements[m].dim != 1)  # type: ignore[union-attr]
    local = layout.local_shape(mesh.coords)
    n, c = local[:2]
    own = per_group * math.prod(local[d] for d in dims)
    count = per_group * math.prod(shape[d] for d in dims)
    return Rows(n, c, c // per_group if per_group and groups else 0, count, own, over, used)


def _rows_of(x: ShardTensor, groups: int) -> Rows:
    key = ("normalise", x.sharding, groups)
    rows = x.mesh.plans.get(key)
    if rows is None:
        rows = x.mesh.plan(key, lambda: _plan_rows(x, groups))
    return rows  # type: ignore[no-any-return]


def _per_channel(t: Any, x: ShardTensor, rows: Rows) -> Tensor | None:
    """Return this rank's part of a weight or bias, used over the mesh dims that shard the input."""
    if t is None:
        return None
    if isinstance(t, ShardTensor):
        t = t.full_tensor()
    layout, mesh = x.sharding, x.mesh
    t = use(t, mesh, rows.used)
    if layout.sizes[1] is None:
        return t  # type: ignore[no-any-return]
    lo, hi = layout.interval(1, mesh.coords)
    return use(t, mesh, layout.shard_dims[1])[lo:hi]


def _in_autocast(x: ShardTensor, probe: Any) -> ShardTensor:
    """Return ``x`` in the dtype in which autocast would run the operation, as ``probe`` of a tiny tensor tells.

    What torch refuses to normalise is refused by it, on ranks without cells too.
    """
    tiny = (1, *x.shape[1:2], 2)  # of one dim, there are no channels
    if not x.is_floating_point():
        probe(x.block.new_zeros(tiny))
    if not autocast_enabled(x.block.device.type):
        return x
    with torch.no_grad():
        dtype = probe(x.block.new_zeros(tiny)).dtype
    return x if dtype == x.block.dtype else wrap(x.block.to(dtype), x.sharding, x.mesh)


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
    x, num_groups, eps = on_mesh(input, mesh), strict_int(num_groups), real(eps)
    if num_groups <= 0:
        raise RuntimeError(f"Expected num groups to be greater than 0, got {num_groups}")
    if not x.numel():
        on_domain(torch.group_norm, x, num_groups)  # from torch 2.15 on an error
    before = x.sharding
    sizes = before.sizes[1] if x.ndim > 1 else None
    if sizes is not None and any(s % max(1, x.shape[1] // num_groups) for s, _ in runs_of(sizes)):
        x = whole_along(x, (1,))
    rows = _rows_of(x, num_groups)
    _require_channels(x, weight=weight, bias=bias)
    weight, bias = _per_channel(weight, x, rows), _per_channel(bias, x, rows)
    if rows.over and x.numel():
        x = _in_autocast(x, lambda t: torch.group_norm(t, num_groups))
        y = normalised(x.block, weight, bias, rows, mesh, eps)
    else:
        # as many channels as a group of none is given
        y = torch.group_norm(_spread(x.block), rows.groups or 1, filled(weight, 2), filled(bias, 2), eps)
        y = unfilled(y, x.block.shape)
    return moved(wrap(y, x.sharding, mesh), before)


def _update(running: Any, value: Tensor, momentum: float, x: ShardTensor) -> None:
    """Move running statistics, however they lie, towards this batch's, which every rank has for its own channels."""
    if running is None:
        return
    # first of one dtype: in which a block's kernel has them depends on its cells
    value = value.detach().to(running.dtype)
    if x.sharding.sizes[1] is not None:
        value = _whole_channels(value, x.sharding, x.mesh)
    if isinstance(running, ShardTensor):
        value = wrap(value, replicated_layout(x.mesh, value.shape), x.mesh)
    running.lerp_(value, momentum)


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
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


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
    if not isinstance(training, bool):
        raise TypeError(f"batch_norm(): argument 'training' must be bool, not {type(training).__name__}")
    if eps < 0 or (training and eps == 0):  # this spelling alone
        raise ValueError(f"batch_norm eps must be positive, or 0 out of training, but got {eps}")
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> ShardTensor:
    mesh = mesh_of((input, weight, bias, running_mean, running_var))
    x, momentum, eps = on_mesh(input, mesh), real(momentum), real(eps)
    if not math.prod(x.shape):
        return _of_no_cells(x, weight, bias)
    rows = _rows_of(x, 0)
    _require_channels(x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    for name, running in (("running_mean", running_mean), ("running_var", running_var)):
        if running is not None and running.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"The function 'native_batch_norm' is not differentiable with respect to argument '{name}'. This "
                "input cannot have requires_grad True."
            )
    weight, bias = _per_channel(weight, x, rows), _per_channel(bias, x, rows)
    if training:
        _require_both(running_mean, running_var)
        if rows.count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        if not rows.over and _is_torchs(x, weight, bias, running_mean, running_var):
            y = torch.batch_norm(x.block, weight, bias, running_mean, running_var, True, momentum, eps, False)
            return wrap(_with_right_gradient(y), x.sharding, mesh)
        x = _in_autocast(x, lambda t: torch.batch_norm(t, None, None, None, None, True, 0.0, eps, False))

        def told(mean: Tensor, var: Tensor) -> None:
            # as by torch, whose checkpoints would refuse what they were given and finds changed
            running = [block_of(r) for r in (running_mean, running_var) if r is not None]
            with torch.autograd._unsafe_preserve_version_counter(tuple(r for r in running if not r.is_inference())):
                _update(running_mean, mean, momentum, x)
                _update(running_var, var * (rows.count / max(1, rows.count - 1)), momentum, x)

        kept = running_mean is not None or running_var is not None
        return wrap(normalised(x.block, weight, bias, rows, mesh, eps, told if kept else None), x.sharding, mesh)
    lo, hi = x.sharding.interval(1, mesh.coords)
    weight, bias, mean, var = map(filled, (weight, bias, plain(running_mean)[lo:hi], plain(running_var)[lo:hi]))
    block = filled(x.block)
    y = _with_right_gradient(torch.batch_norm(block, weight, bias, mean, var, False, momentum, eps, False))
    return wrap(unfilled(y, x.block.shape), x.sharding, mesh)


def _require_both(*running: Any) -> None:
    """Raise what torch does of one running statistic without the other."""
    if sum(r is None for r in running) == 1:
        given = [None if r is None else torch.ones(1, device="cpu") for r in running]
        torch.batch_norm(torch.zeros((2, 1), device="cpu"), None, None, *given, True, 0.0, 1.0, False)  # type: ignore[arg-type]


def _is_torchs(x: ShardTensor, *numbers: Any) -> bool:
    """Tell whether torch's own function takes a block with all of the channels, and their numbers, as they are."""
    plain = all(t is None or (not isinstance(t, ShardTensor) and t.dtype == x.dtype) for t in numbers)
    return plain and x.sharding.sizes[1] is None and x.dtype not in HALVES and traced.recording is None


def _of_no_cells(x: ShardTensor, weight: Any, bias: Any) -> ShardTensor:
    """Return a copy, linked to the first of the weights: that is what torch does."""
    y: Any = x.clone()
    y = y if weight is None else y * weight[0]
    return y if bias is None else y + bias[0]  # type: ignore[no-any-return]


def _require_channels(x: ShardTensor, **numbers: Any) -> None:
    """Refuse what has not one number per channel, as torch does."""
    for name, t in numbers.items():
        if t is not None and t.numel() != x.shape[1]:
            raise RuntimeError(f"{name} should contain {x.shape[1]} elements not {t.numel()}")
        if t is not None and t.ndim != 1:
            # as torch's kernels do, which blocks without cells do not reach
            raise RuntimeError(f"{name} should be a vector of {x.shape[1]} elements, not of shape {list(t.shape)}")
    _require_dtype(x, **numbers)


def _require_dtype(x: ShardTensor, **numbers: Any) -> None:
    """Refuse numbers of a dtype that torch's kernels do not take beside ``x``: others would be cast, or promote."""
    if not x.is_floating_point() or autocast_enabled(x.block.device.type):
        return
    for name, t in numbers.items():
        if t is not None and t.dtype != x.dtype and not (t.dtype == torch.float32 and x.dtype in HALVES):
            raise RuntimeError(f"mixed dtype: expected {name} of {x.dtype}, got {t.dtype}")


def _spread(block: Tensor) -> Tensor:
    """Return what stands in for a block without cells, with a variance: that of zeros may be divided by."""
    y = filled(block, 2)
    return y if y is block else y + torch.arange(y.numel(), device=y.device).to(y.dtype).view(y.shape)


def _with_right_gradient(y: Tensor) -> Tensor:
    """Return what torch's batch_norm or instance_norm gave, with cotangents in its own memory format.

    Of one sample, their backward (docs/upstream.md) misreads a cotangent that came through
    ``flatten(2).transpose(1, 2)``: its batch stride is that of no format, and the cells are taken in another order.
    """
    if y.requires_grad:
        last = FORMATS.get(y.ndim)
        is_last = last is not None and not y.is_contiguous() and y.is_contiguous(memory_format=last)
        memory_format = last if is_last else torch.contiguous_format
        y.register_hook(lambda g: None if g is None else g.contiguous(memory_format=memory_format))
    return y


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
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    _require_both(running_mean, running_var)
    mesh = mesh_of((input, weight, bias, running_mean, running_var))
    x, momentum, eps = on_mesh(input, mesh), real(momentum), real(eps)
    rows = _rows_of(x, x.shape[1])
    if rows.count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {x.shape}")
    _require_channels(x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    weight, bias = _per_channel(weight, x, rows), _per_channel(bias, x, rows)
    if not rows.over and running_mean is None and running_var is None:
        weight, bias = filled(weight, 2), filled(bias, 2)
        y = torch.instance_norm(_spread(x.block), weight, bias, None, None, True, 0.0, eps, False)
        y = _with_right_gradient(y)
        return wrap(unfilled(y, x.block.shape), x.sharding, mesh)
    x = _in_autocast(x, lambda t: torch.instance_norm(t, None, None, None, None, True, 0.0, eps, False))
    found: list[Tensor] = []
    kept = running_mean is not None or running_var is not None
    y = normalised(x.block, weight, bias, rows, mesh, eps, (lambda *both: found.extend(both)) if kept else None)
    # only now, as in torch: where a checkpoint makes again what it needs, this is no longer done
    if running_mean is not None:
        _update(running_mean, _over_samples(found[0], x, rows), momentum, x)
    if running_var is not None:
        var = _over_samples(found[1], x, rows)
        _update(running_var, var * (rows.count / max(1, rows.count - 1)), momentum, x)
    return wrap(y, x.sharding, mesh)


def _over_samples(value: Tensor, x: ShardTensor, rows: Rows) -> Tensor:
    """Return the mean over the samples of all ranks of a number per sample and channel."""
    total = value.view(rows.n, rows.c).sum(0)
    over = reduced(x.sharding, 0).over
    return (blocking.all_reduce(total, x.mesh.group(over)) if over else total) / x.shape[0]


# -- norms over the last dims


def _last_dims(x: ShardTensor, normalized_shape: Any, **numbers: Any) -> tuple[int, ...]:
    """Return the dims to normalise; refuse numbers of another shape, which would broadcast."""
    shape = normalized_shape
    if type(shape) is not tuple or any(n.__class__ is not int for n in shape):
        shape = int_list(shape)
    if not shape or tuple(x.shape[x.ndim - len(shape) :]) != shape:
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape {['*', *shape]}, "
            f"but got input of size {list(x.shape)}"
        )
    for name, t in numbers.items():
        if t is not None and tuple(t.shape) != shape:
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape {list(t.shape)} "
                f"and normalized_shape = {list(shape)}"
            )
    return tuple(range(x.ndim - len(shape), x.ndim))


def _used(t: Any, x: ShardTensor) -> Any:
    """Return a weight that every rank uses whole."""
    if t is None:
        return None
    return use(t.full_tensor() if isinstance(t, ShardTensor) else t, x.mesh, x.sharding.sharded_mesh_dims)


def _plan_last(x: ShardTensor, dims: tuple[int, ...], over: tuple[int, ...]) -> Rows:
    local = x.sharding.local_shape(x.mesh.coords)
    own = math.prod(local[d] for d in dims)
    return Rows(math.prod(local[: dims[0]]), 1, 1, reduced(x.sharding, dims).count, own, over, ())


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
    x, eps = on_mesh(input, mesh), real(eps)
    dims = _last_dims(x, normalized_shape, weight=weight, bias=bias)
    _require_dtype(x, weight=weight, bias=bias)
    over = reduced(x.sharding, dims).over
    if not over:
        y = torch.layer_norm(x.block, tuple(normalized_shape), _used(weight, x), _used(bias, x), eps)
        return wrap(y, x.sharding, mesh)
    x = _in_autocast(x, lambda t: torch.layer_norm(t, (2,)))
    if not x.numel():
        y = x.block * 1
    else:
        key = ("layer_norm", x.sharding, dims)
        rows = mesh.plans.get(key) or mesh.plan(key, lambda: _plan_last(x, dims, over))
        # rows of one channel: what is normalised comes after the samples
        flat = x.block.reshape(rows.n, 1, math.prod(x.block.shape[dims[0] :]))
        y = normalised(flat, None, None, rows, mesh, eps).view(x.block.shape)
    out = wrap(y, x.sharding, mesh)
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(y.dtype)


@implements(F.rms_norm, torch.rms_norm, sharded="reduction")
def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Divide by the root mean square over the last dims. Collective where one of them is sharded."""
    mesh = mesh_of((input, weight))
    x, eps = on_mesh(input, mesh), None if eps is None else real(eps)
    dims = _last_dims(x, normalized_shape, weight=weight)
    plan = reduced(x.sharding, dims, True)
    if not plan.over:
        return wrap(torch.rms_norm(x.block, tuple(normalized_shape), _used(weight, x), eps), x.sharding, mesh)
    x = _in_autocast(x, lambda t: torch.rms_norm(t, (2,)))
    wide = x.block.float() if x.block.dtype in HALVES else x.block
    square = sum_partial((wide * wide).sum(dims, keepdim=True), mesh, plan.over) / plan.count
    scale = (square + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    out = wrap((wide * use(scale, mesh, plan.over)).to(x.block.dtype), x.sharding, mesh)
    out = out if weight is None else out * weight
    return out.to(x.block.dtype)


# -- local response


@implements(F.local_response_norm, sharded="halo")
def local_response_norm(input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> ShardTensor:
    """Divide by the squares of nearby channels. Neighborwise collective where the channels are sharded."""
    x = resolved(input)
    mesh, layout = x.mesh, x.sharding
    if x.ndim < 3:
        raise ValueError(f"Expected 3D or higher dimensionality input (got {x.ndim} dimensions)")
    integers = not (x.is_floating_point() or x.is_complex())
    if integers or x.is_complex():  # torch's word on those, on every rank alike
        F.local_response_norm(x.block.new_zeros((1,) * x.ndim), 1)
    squares = x.block * x.block
    if reduced(layout, 1).over:
        key = ("local_response_norm", layout, x.block.dtype, size)
        squares = apply(mesh.plan(key, lambda: _plan_response(x, size)), squares)
    else:
        # not F.pad: torch 2.8 refuses blocks without cells
        n, _, *rest = squares.shape
        beside = [squares.new_zeros((n, width, *rest)) for width in (size // 2, (size - 1) // 2)]
        squares = cat((beside[0], squares, beside[1]), 1)
    if not x.block.shape[1]:
        means = squares.narrow(1, 0, 0)
    else:
        windows = squares.unfold(1, size, 1)
        means = windows.sum(-1) // size if integers else windows.mean(-1)  # as torch's pooling divides
    return wrap(x.block / (means * alpha + k).pow(beta), layout, mesh)


def _plan_response(x: ShardTensor, size: int) -> WindowOp:
    layout = x.sharding
    n, b = layout.shape[1], bounds(layout.sizes[1] or (layout.shape[1],))
    windows = Each(len(b) - 1, lambda i: (b[i] - size // 2, b[i + 1] + (size - 1) // 2))
    return window_op(x.mesh, layout, x.block.dtype, [intervals_wanted(n, 1, windows)], op="local_response_norm")
