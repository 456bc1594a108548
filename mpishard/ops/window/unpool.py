"""Partial inverses of maximum pooling: values go back to the cells that they came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import apply
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.errors import LayoutError, UnsupportedOperationError
from mpishard.layout import Each, Layout, layout_of, sizes_of
from mpishard.layout.stencil import Transposed, per_dim
from mpishard.ops.rule.agreement import checked, in_range
from mpishard.ops.rule.dim import frozen, on_domain
from mpishard.ops.rule.whole import whole
from mpishard.tensor.operand import fitted, mesh_of, moved, on_mesh, resolved
from mpishard.tensor.registry import RULES, implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class UnpoolPlan(NamedTuple):
    """What one unpooling on one layout does on this rank.

    Attributes
    ----------
    values, indices
        Fetches of the cells whose windows meet this rank's output.
    reaches
        Per sharded spatial dim: (position among the spatial dims, stride, padding, kernel, first own cell).
    box
        This rank's output interval per spatial dim.
    extents
        Global output extent per spatial dim.
    out
        Layout of the result.
    """

    values: WindowOp
    indices: WindowOp
    reaches: tuple[tuple[int, int, int, int, int], ...]
    box: tuple[tuple[int, int], ...]
    extents: tuple[int, ...]
    out: Layout


def _windows(g: Transposed, n: int, borders: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Return the input cells, at least one, that every position's output cells read. Not collective."""

    def window(i: int) -> tuple[int, int]:
        a, b = borders[i], borders[i + 1]
        lo, hi = g.window(a, max(b, a + 1))
        lo = min(max(lo, 0), n - 1)
        return lo, min(max(hi, lo + 1), n)

    return Each(len(borders) - 1, window)


def _plan(
    x: ShardTensor, ndim: int, kernel: Any, stride: Any, padding: Any, shape: Sequence[int], name: str
) -> UnpoolPlan:
    layout, mesh = x.sharding, x.mesh
    kernels, pads = per_dim(kernel, ndim), per_dim(padding, ndim)
    strides = per_dim(stride, ndim)
    first = x.ndim - ndim
    sizes, wanted, reaches = list(layout.sizes), [], []
    for i in range(ndim):
        dim = first + i
        own, n = layout.sizes[dim], layout.shape[dim]
        if own is None:
            continue
        g = Transposed(kernels[i], strides[i], 1, pads[i], 0)
        borders = g.follow(own, shape[dim])
        wanted.append(intervals_wanted(n, dim, _windows(g, n, borders)))
        sizes[dim] = sizes_of(borders)
        reaches.append((i, strides[i], pads[i], kernels[i], layout.interval(dim, mesh.coords)[0]))
    out = layout_of(layout.mesh_shape, layout.placements, shape, sizes)
    return UnpoolPlan(
        window_op(mesh, layout, x.dtype, wanted, op=name),
        window_op(mesh, layout, torch.int64, wanted, op=name),
        tuple(reaches),
        out.box(mesh.coords)[first:],
        tuple(shape[first:]),
        out,
    )


def _coordinates(flat: Tensor, extents: Sequence[int]) -> list[Tensor]:
    found = []
    for n in reversed(extents):
        found.append(flat % n)
        flat = flat // n
    return found[::-1]


def _refuse_far_indices(indices: Tensor, plan: UnpoolPlan, name: str) -> None:
    """Raise where an index lies outside the window of its cell. Not collective."""
    ndim, cells = len(plan.extents), math.prod(plan.extents)
    if not in_range(indices, 0, cells):
        raise RuntimeError(f"Found an invalid max index: output volumes are of size {list(plan.extents)}")
    coordinates = _coordinates(indices, plan.extents)
    far = torch.zeros((), dtype=torch.bool, device=indices.device)
    for i, stride, pad, kernel, lo in plan.reaches:
        dim = indices.ndim - ndim + i
        start = (torch.arange(indices.shape[dim], device=indices.device) + lo) * stride - pad
        start = start.reshape(-1, *[1] * (ndim - 1 - i))
        far = far | ((coordinates[i] < start) | (coordinates[i] >= start + kernel)).any()
    if bool(far):
        raise UnsupportedOperationError(
            f"{name}: an index lies outside the window of its cell",
            expected="indices that max_pool gave with the same kernel, stride and padding, and no dilation",
            got="an index that belongs to cells further away",
            fix="redistribute both operands, so that the spatial dims are whole on every rank",
        )


def _rule(ndim: int) -> Callable[..., ShardTensor]:
    name = f"max_unpool{ndim}d"
    func = getattr(F, name)

    def max_unpool(
        input: Any,
        indices: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        output_size: Any = None,
    ) -> ShardTensor:
        mesh = mesh_of((input, indices))
        x = on_mesh(input, mesh)
        if not isinstance(input, ShardTensor) and x.sharding.shape == indices.sharding.shape:
            x = moved(x, resolved(indices).sharding)
        at = fitted(resolved(indices), mesh, x.sharding)
        kernel, pads, size = frozen(kernel_size, ndim), frozen(padding, ndim), frozen(output_size, ndim)
        step = kernel if stride is None else frozen(stride, ndim)
        key = (name, x.sharding, x.dtype, tuple(indices.shape), indices.dtype, kernel, step, pads, size)

        def build() -> UnpoolPlan:
            if type(step) is tuple and 0 in step:
                raise LayoutError(f"{name}: a stride of 0", expected="steps >= 1", got=step, fix="give the pool's")
            shape = on_domain(func, x, indices, kernel_size, stride, padding, output_size).shape
            return _plan(x, ndim, kernel, step, pads, shape, name)

        plan = mesh.plans.get(key) or mesh.plan(key, build)
        at = checked(lambda at: _refuse_far_indices(at, plan, name), mesh, (x.sharding,), at)
        return wrap(_scattered(apply(plan.values, x.block), apply(plan.indices, at), plan), plan.out, mesh)

    return max_unpool


def _anywhere_rule(func: Callable[..., Tensor], ndim: int) -> Callable[..., ShardTensor]:
    def rule(input: Any, indices: Any, output_size: Any, *window: Any) -> ShardTensor:
        """Scatter to cells anywhere in the plane. Collective where spatial dims are sharded: they are gathered."""
        labels = (*range(-input.ndim, -ndim), *(None,) * ndim)
        return whole(  # type: ignore[no-any-return]
            lambda x, at: func(x, at, output_size, *window), (input, indices), (labels, labels), labels, checked=True
        )

    return rule


def _scattered(values: Tensor, indices: Tensor, plan: UnpoolPlan) -> Tensor:
    ndim = len(plan.extents)
    flat, inside = torch.zeros_like(indices), torch.ones_like(indices, dtype=torch.bool)
    for c, (lo, hi) in zip(_coordinates(indices, plan.extents), plan.box):
        inside &= (c >= lo) & (c < hi)
        flat = flat * (hi - lo) + (c - lo)
    shape = [hi - lo for lo, hi in plan.box]
    cells = int(torch.Size(shape).numel())
    # values for other ranks' cells go to one cell more, which is dropped
    flat = flat.masked_fill(~inside, cells).flatten(-ndim)
    out = values.new_zeros((*values.shape[:-ndim], cells + 1)).scatter(-1, flat, values.flatten(-ndim))
    return out[..., :cells].unflatten(-1, shape)


for _n in (1, 2, 3):
    implements(getattr(F, f"max_unpool{_n}d"), sharded="halo")(_rule(_n))
for _n in (2, 3):
    for _func in set(spellings(f"max_unpool{_n}d")) - RULES.keys():
        implements(_func, sharded="moves")(_anywhere_rule(_func, _n))
