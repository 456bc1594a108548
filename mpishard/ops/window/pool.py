"""Maximum, average and power-average pooling over sharded spatial dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.graph import unseen
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.layout import Each, Layout, layout_of, sizes_of
from mpishard.layout.stencil import Sliding, pairs, per_dim
from mpishard.ops.rule.dim import frozen, on_domain
from mpishard.ops.window.beside import fetched
from mpishard.ops.window.planes import cropped, on_planes
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class PoolPlan(NamedTuple):
    """What one pooling on one layout does on this rank.

    Attributes
    ----------
    window
        Fetch of the input cells, never past the domain's edge: there torch pads, so that its rules for
        divisors, indices and cells without a value hold.
    padding
        What the local pooling pads, on both sides.
    crops
        (dim, start, length) of the local result: torch pads the inner side too.
    intervals
        Tensor dim -> cells [lo, hi) that each position fetches.
    offsets, extents
        Global index of the window's first cell, and global extent, per spatial dim.
    out
        Layout of the result.
    """

    window: WindowOp
    intervals: dict[int, Sequence[tuple[int, int]]]
    padding: tuple[int, ...]
    crops: tuple[tuple[int, int, int], ...]
    offsets: tuple[int, ...]
    extents: tuple[int, ...]
    out: Layout


def clipped(g: Sliding, n: int, a: int, b: int) -> tuple[int, int, int, int]:
    """Return (lo, hi, padding, first): pool ``[lo, hi)`` with ``padding``; outputs ``[a, b)`` start at ``first``.

    Not collective.
    """
    lo, hi = g.window(a, b)
    if lo >= 0 and hi <= n:
        return lo, hi, 0, 0
    # torch pads both sides alike: start early enough that what it adds in front is dropped
    start = max(a + (-g.lo // g.stride), 0)
    # avg_pool3d refuses fewer cells than its kernel has, however they are padded
    hi = min(max(hi, start * g.stride + g.reach), n)
    while start > 0 and hi - start * g.stride < g.reach:
        start -= 1
    return start * g.stride, hi, g.lo, a - start


def _clipped(g: Sliding, n: int, cells: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int, int, int]]:
    return Each(len(cells), lambda i: clipped(g, n, *cells[i]))


def _reached(g: Sliding, n: int, cells: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return intervals that hold the windows that `clipped` gives, whose ends do not fall. Not collective."""

    def interval(i: int) -> tuple[int, int]:
        a, b = cells[i]
        first = min(a + (-g.lo // g.stride), (n - g.reach) // g.stride)
        return max(first, 0) * g.stride, min(max((b - 1) * g.stride - g.lo, 0) + g.reach, n)

    return Each(len(cells), interval)


def _ends(windows: Sequence[tuple[int, int, int, int]]) -> Sequence[tuple[int, int]]:
    return Each(len(windows), lambda i: windows[i][:2])


def _plan(
    x: ShardTensor, ndim: int, kernel: Any, stride: Any, padding: Any, dilation: Any, shape: Sequence[int], name: str
) -> PoolPlan:
    layout, mesh = x.sharding, x.mesh
    kernels, pads, dilations = per_dim(kernel, ndim), per_dim(padding, ndim), per_dim(dilation, ndim)
    strides = per_dim(stride, ndim)
    first = x.ndim - ndim
    local_padding, offsets, crops, sizes, wanted = list(pads), [0] * ndim, [], list(layout.sizes), []
    intervals = {}
    for i in range(ndim):
        dim = first + i
        own, n = layout.sizes[dim], layout.shape[dim]
        if own is None:
            continue
        g = Sliding(kernels[i], strides[i], dilations[i], pads[i], pads[i])
        borders = g.follow(own, shape[dim])
        cells = pairs(borders)
        windows = _clipped(g, n, cells)
        intervals[dim] = _ends(windows)
        wanted.append(intervals_wanted(n, dim, intervals[dim], reached=_reached(g, n, cells)))
        sizes[dim] = sizes_of(borders)
        index = layout.index(dim, mesh.coords)
        offsets[i], _, local_padding[i], drop = windows[index]
        crops.append((dim, drop, sizes[dim][index]))
    return PoolPlan(
        window_op(mesh, layout, x.dtype, wanted, op=name),
        intervals,
        tuple(local_padding),
        tuple(crops),
        tuple(offsets),
        layout.shape[first:],
        layout_of(layout.mesh_shape, layout.placements, shape, sizes),
    )


def global_indices(local: Tensor, window: Sequence[int], offsets: Sequence[int], extents: Sequence[int]) -> Tensor:
    """Return flat indices into a window of the domain as flat indices into the domain.

    Not collective.

    Parameters
    ----------
    local
        Row-major indices into an array of shape ``window``.
    window, offsets, extents
        Shape of the window, global index of its first cell, shape of the domain.
    """
    if tuple(window[1:]) == tuple(extents[1:]):
        return local + offsets[0] * int(torch.Size(extents[1:]).numel())
    out, scale = torch.zeros_like(local), 1
    for n_local, offset, n in reversed(list(zip(window, offsets, extents))):
        out += (local % n_local + offset) * scale
        local = local // n_local
        scale *= n
    return out


def _max_rule(ndim: int, always_indices: bool) -> Callable[..., Any]:
    func = getattr(F, f"max_pool{ndim}d")
    name = f"max_pool{ndim}d"

    def max_pool(
        input: ShardTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        x = resolved(input)
        mesh = x.mesh
        kernel, pads, spread = frozen(kernel_size, ndim), frozen(padding, ndim), frozen(dilation, ndim)
        step = frozen(stride, ndim) or kernel
        indices = always_indices or return_indices
        key = (name, x.sharding, x.dtype, kernel, step, pads, spread, ceil_mode, indices)

        def build() -> PoolPlan:
            shape = on_domain(func, x, kernel_size, stride, padding, dilation, ceil_mode).shape
            # torch has a kernel of its own for this one, which is looked for where there are cells, and no modes
            if ndim == 1 and not indices:
                with unseen():
                    func(torch.zeros((1, 1), dtype=x.dtype, device=x.block.device), 1)
            return _plan(x, ndim, kernel, step, pads, spread, shape, name)

        plan = mesh.plans.get(key) or mesh.plan(key, build)
        window = fetched(x, plan.window, key, plan.intervals)
        y = on_planes(
            lambda w: func(w, kernel, step, plan.padding, spread, ceil_mode, return_indices=indices), window, ndim
        )
        if not indices:
            return wrap(cropped(y, plan.crops), plan.out, mesh)
        values, at = (cropped(t, plan.crops) for t in y)
        at = global_indices(at, window.shape[-ndim:], plan.offsets, plan.extents)
        return wrap(values, plan.out, mesh), wrap(at, plan.out, mesh)

    return max_pool


def _avg_rule(ndim: int) -> Callable[..., ShardTensor]:
    func, name = getattr(F, f"avg_pool{ndim}d"), f"avg_pool{ndim}d"

    def avg_pool(
        input: ShardTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> ShardTensor:
        x = resolved(input)
        mesh = x.mesh
        kernel, pads = frozen(kernel_size, ndim), frozen(padding, ndim)
        step = frozen(stride, ndim) or kernel
        # torch's 1-D average has no divisor to override
        rest = (ceil_mode, count_include_pad) if ndim == 1 else (ceil_mode, count_include_pad, divisor_override)
        key = (name, x.sharding, x.dtype, kernel, step, pads, *rest)

        def build() -> PoolPlan:
            shape = on_domain(func, x, kernel_size, () if stride is None else stride, padding, *rest).shape
            return _plan(x, ndim, kernel, step, pads, 1, shape, name)

        plan = mesh.plans.get(key) or mesh.plan(key, build)
        window = fetched(x, plan.window, key, plan.intervals)
        y = on_planes(lambda w: func(w, kernel, step, plan.padding, *rest), window, ndim)
        return wrap(cropped(y, plan.crops), plan.out, mesh)

    return avg_pool


def _lp_rule(ndim: int) -> Callable[..., ShardTensor]:
    average, largest = getattr(F, f"avg_pool{ndim}d"), getattr(F, f"max_pool{ndim}d")

    def lp_pool(
        input: ShardTensor, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False
    ) -> ShardTensor:
        if norm_type == math.inf:
            return largest(input.abs(), kernel_size, stride, 0, 1, ceil_mode)
        if norm_type == -math.inf:
            return -largest(-input.abs(), kernel_size, stride, 0, 1, ceil_mode)
        mean = average(input.pow(norm_type), kernel_size, kernel_size if stride is None else stride, 0, ceil_mode)
        cells = int(torch.Size(per_dim(kernel_size, ndim)).numel())
        return (torch.sign(mean) * F.relu(torch.abs(mean))).mul(cells).pow(1.0 / norm_type)

    return lp_pool


for _n in (1, 2, 3):
    implements(*spellings(f"max_pool{_n}d"), sharded="halo")(_max_rule(_n, False))
    implements(*spellings(f"max_pool{_n}d_with_indices"), sharded="halo")(_max_rule(_n, True))
    implements(*spellings(f"avg_pool{_n}d"), sharded="halo")(_avg_rule(_n))
    implements(getattr(F, f"lp_pool{_n}d"), sharded="halo")(_lp_rule(_n))
