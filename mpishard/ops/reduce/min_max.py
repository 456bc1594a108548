"""Extrema and their positions: global indices, first occurrence, gradients shared among ties as torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.linear import Chosen, Step, apply, differentiated
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.ops.rule.dim import normal_dim
from mpishard.ops.rule.reduction import Reduced, dim_and_keepdim, reduced, worst
from mpishard.ops.rule.selection import Lines
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap

_MAX_NDIM = 64
_NOWHERE = torch.iinfo(torch.int64).max
# of which torch has no extrema on the host, or (bool) no positions of them
_UNASKED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)


def _operand(input: ShardTensor, func: Callable[..., Any]) -> ShardTensor:
    """Return the operand of a search; torch's error for a dtype without order, also from a block without cells."""
    x = resolved(input)
    if x.block.is_complex() or x.dtype in _UNASKED:
        # of one cell, torch asks for no kernel
        func(x.block.new_zeros(2), 0)
    return x


def _check_cells(x: ShardTensor, dims: tuple[int, ...], func: Callable[..., Any]) -> None:
    name = func.__name__
    if x.ndim > _MAX_NDIM:  # torch refuses those, on a rank with cells
        func(x.block.new_zeros((1,) * x.ndim), dims[0])
    if any(x.shape[d] == 0 for d in dims):
        raise IndexError(f"{name}(): Expected reduction dim to have non-zero size.")


def same_value(a: Tensor, b: Tensor) -> Tensor:
    """Tell which cells are equal, or both NaN. Not collective."""
    return (a == b) | ((a != a) & (b != b)) if a.is_floating_point() else a == b


# -- values alone: amax, amin, max(), min()


def _local_extreme(local: Tensor, dims: tuple[int, ...], largest: bool) -> Tensor:
    """Return the extreme of a block with ``keepdim``; what never wins, where it has no cells."""
    if any(local.shape[d] == 0 for d in dims):
        shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
        return local.new_full(shape, worst(local.dtype, largest))
    return (torch.amax if largest else torch.amin)(local, dims, True)


def extreme(
    x: ShardTensor, plan: Reduced, keepdim: bool, largest: bool, same: Callable[[Tensor, Tensor], Tensor] = same_value
) -> ShardTensor:
    """Return the extreme over a sharded dim, whose cotangent goes to cells that are the ``same``.

    Collective over ``plan.over``.
    """
    group = x.mesh.group(plan.over)

    def find(t: Tensor) -> Tensor:
        return blocking.all_reduce(_local_extreme(t, plan.dims, largest), group, "max" if largest else "min")

    return shared(x, plan, keepdim, find, same)


def shared(
    x: ShardTensor,
    plan: Reduced,
    keepdim: bool,
    value_of: Callable[[Tensor], Tensor],
    same: Callable[[Tensor, Tensor], Tensor] = same_value,
) -> ShardTensor:
    """Return a value of cells, whose cotangent is shared evenly among all cells that are the ``same``.

    Collective over ``plan.over``. ``value_of`` gives it of the block, with its reduced dims, on every rank.
    """
    mesh, local = x.mesh, x.block
    group, wanted = mesh.group(plan.over), differentiated(local)
    weight: Tensor

    def find(t: Tensor) -> Tensor:
        nonlocal weight
        values = value_of(t)
        if wanted:
            mask = same(t, values)
            count = blocking.all_reduce(mask.sum(plan.dims, keepdim=True), group)
            weight = mask.to(values.dtype).div_(count)
        return values

    def spread(g: Tensor) -> Tensor:
        return g * weight

    def collect(t: Tensor) -> Tensor:
        return blocking.all_reduce((t * weight).sum(plan.dims, keepdim=True), group)

    # given which cells are extreme it is linear: the derivative collects from those
    values = apply(Chosen(find, spread, collect), local)
    return wrap(values if keepdim else values.squeeze(plan.dims), plan.out, mesh)


def _amax_rule(func: Callable[..., Tensor], largest: bool) -> Callable[..., ShardTensor]:
    def rule(input: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
        dim, keepdim = dim_and_keepdim(args, kwargs, func)
        x = _operand(input, func)
        plan = reduced(x.sharding, dim, keepdim)
        if not plan.over:
            return wrap(func(x.block, plan.dims, keepdim), plan.out, x.mesh)
        _check_cells(x, plan.dims, func)
        # as torch has it, NaN is no cell's here, and the derivative of a NaN one of all
        return extreme(x, plan, keepdim, largest, torch.eq)

    return rule


implements(torch.amax, torch.Tensor.amax, sharded="reduction")(_amax_rule(torch.amax, True))
implements(torch.amin, torch.Tensor.amin, sharded="reduction")(_amax_rule(torch.amin, False))


@implements(torch.aminmax, torch.Tensor.aminmax, sharded="reduction")
def aminmax(input: ShardTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Smallest and largest value. Collective where the dim is sharded."""
    return torch.return_types.aminmax(  # type: ignore[attr-defined]
        (torch.amin(input, () if dim is None else dim, keepdim), torch.amax(input, () if dim is None else dim, keepdim))
    )


# -- values with positions: max(dim), min(dim), argmax, argmin


def first_of(
    values: Tensor, index: Tensor, mesh: CartMesh, over: tuple[int, ...], largest: bool
) -> tuple[Tensor, Tensor]:
    """Return over ranks the extreme value and the smallest index that has it. Collective over ``over``."""
    group = mesh.group(over)
    best = blocking.all_reduce(values, group, "max" if largest else "min")
    return best, blocking.all_reduce(torch.where(same_value(values, best), index, _NOWHERE), group, "min")


def _with_index(x: ShardTensor, dim: int, plan: Reduced, keepdim: bool, largest: bool) -> tuple[Tensor, Tensor]:
    mesh, shape = x.mesh, x.block.shape
    lo, hi = x.sharding.interval(dim, mesh.coords)
    index: Tensor

    def find(t: Tensor) -> Tensor:
        nonlocal index
        if hi > lo:
            values, index = (torch.max if largest else torch.min)(t, dim, keepdim=True)
            index = index + lo
        else:
            one = [1 if d == dim else n for d, n in enumerate(shape)]
            values = t.new_full(one, worst(t.dtype, largest))
            index = torch.full(one, _NOWHERE, device=t.device)
        values, index = first_of(values, index, mesh, plan.over, largest)
        return values

    def own(t: Tensor) -> Tensor:
        return torch.where((index >= lo) & (index < hi), t, 0)

    def spread(g: Tensor) -> Tensor:
        cells = g.new_zeros(shape)
        return cells.scatter_(dim, (index - lo).clamp(0, hi - lo - 1), own(g)) if hi > lo else cells

    def collect(t: Tensor) -> Tensor:
        found = t.gather(dim, (index - lo).clamp(0, hi - lo - 1)) if hi > lo else t.sum(dim, keepdim=True)
        return blocking.all_reduce(own(found), mesh.group(plan.over))

    values = apply(Chosen(find, spread, collect), x.block)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def _max_rule(func: Callable[..., Any], binary: Callable[..., Any], largest: bool) -> Callable[..., Any]:
    name = func.__name__
    kind = getattr(torch.return_types, name)

    def rule(input: Any, *args: Any, **kwargs: Any) -> Any:
        other = kwargs.pop("other", None)
        if other is not None or (args and isinstance(args[0], Tensor)):
            return binary(input, other if other is not None else args[0], *args[1:], **kwargs)
        x = _operand(input, func)
        dim, keepdim = dim_and_keepdim(args, kwargs, func, named=True)
        if dim is None:
            plan = reduced(x.sharding, None)
            if not plan.over:
                return wrap(func(x.block), plan.out, x.mesh)
            _check_cells(x, plan.dims, func)
            return extreme(x, plan, False, largest)
        dim = normal_dim(dim, x.ndim)
        plan = reduced(x.sharding, dim, keepdim)
        if not plan.over:
            pairs = func(x.block, dim, keepdim)
        else:
            _check_cells(x, plan.dims, func)
            pairs = _with_index(x, dim, plan, keepdim, largest)
        return kind(tuple(wrap(t, plan.out, x.mesh) for t in pairs))

    return rule


implements(torch.max, torch.Tensor.max, sharded="reduction")(_max_rule(torch.max, torch.maximum, True))
implements(torch.min, torch.Tensor.min, sharded="reduction")(_max_rule(torch.min, torch.minimum, False))


def _arg_rule(func: Callable[..., Tensor], largest: bool) -> Callable[..., ShardTensor]:
    def rule(input: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
        dim, keepdim = dim_and_keepdim(args, kwargs, func)
        x = _operand(input, func)
        x = wrap(x.block.detach(), x.sharding, x.mesh)
        plan = reduced(x.sharding, dim, keepdim)
        if not plan.over:
            return wrap(func(x.block, dim, keepdim), plan.out, x.mesh)
        _check_cells(x, plan.dims, func)
        if dim is not None:
            dim = normal_dim(dim, x.ndim)
            return wrap(_with_index(x, dim, plan, keepdim, largest)[1], plan.out, x.mesh)

        lines = Lines.of(x, plan)

        def find(t: Tensor) -> Tensor:
            if t.numel():
                at = func(t)
                value, index = t.take(at), lines.position(at)
            else:
                value = t.new_full((), worst(t.dtype, largest))
                index = torch.full((), _NOWHERE, device=value.device)
            return first_of(value, index, x.mesh, plan.over, largest)[1]

        index = apply(Step(find), x.block)
        return wrap(index.reshape(plan.out.shape), plan.out, x.mesh)

    return rule


implements(torch.argmax, torch.Tensor.argmax, sharded="reduction")(_arg_rule(torch.argmax, True))
implements(torch.argmin, torch.Tensor.argmin, sharded="reduction")(_arg_rule(torch.argmin, False))
