"""Padding and cropping in every mode: the blocks at the domain's edges grow or shrink, the others stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import apply
from mpishard.autograd.window import Wanted, intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.layout import Each, Layout, Run, layout_of, near, sizes_of
from mpishard.layout.stencil import padded
from mpishard.ops.rule.dim import int_list, number_key, on_domain
from mpishard.ops.window.pad_resident import circular_beside
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class PadPlan(NamedTuple):
    """Fetch of the padded block, and the layout of the result."""

    window: WindowOp
    out: Layout


@implements(F.pad, torch._C._nn.pad, sharded="halo")
def pad(input: ShardTensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> ShardTensor:
    """Pad (or crop, where negative) as ``torch.nn.functional.pad``, at the edges of the global tensor.

    Neighborwise collective. A rank keeps its cells; the ranks at the edges get the new ones.
    """
    return _padded(input, pad, mode, value, F.pad)


def _padded(input: ShardTensor, pad: Sequence[int], mode: str, value: Any, func: Any) -> ShardTensor:
    x = resolved(input)
    if type(value) is Tensor and not value.ndim:
        value = value.item()
    mesh, widths, fill = x.mesh, int_list(pad), 0.0 if value is None else value
    key = ("pad", x.sharding, x.dtype, widths, mode, number_key(fill))
    plan = mesh.plans.get(key) or mesh.plan(key, lambda: _plan(x, widths, mode, value, func))
    if x._halo is not None and mode == "circular":
        found = circular_beside(x, widths, plan.window, plan.out, key)
        if found is not None:
            return found
    local = apply(plan.window, x.block)
    # torch's result is never its argument, nor a view of it, as autograd makes of one that comes back from a node
    return wrap(local.clone() if plan.window.identity else local, plan.out, mesh)


@implements(torch.constant_pad_nd, sharded="halo")
def constant_pad_nd(input: ShardTensor, pad_: Sequence[int], value: Any = 0) -> ShardTensor:
    """Pad with a constant. Neighborwise collective."""
    if isinstance(value, complex) and value.imag and not input.is_complex():
        raise RuntimeError(f"value {value} cannot be converted to {input.dtype}")

    def constant(t: Tensor, widths: Sequence[int], _mode: str, fill: Any) -> Tensor:
        return torch.constant_pad_nd(t, widths, fill)  # which knows complex numbers; F.pad does not

    return _padded(input, pad_, "constant", value, constant)


def _plan(x: ShardTensor, widths: tuple[int, ...], mode: str, value: Any, func: Any) -> PadPlan:
    layout, mesh = x.sharding, x.mesh
    shape = tuple(on_domain(func, x, widths, mode, value).shape)
    if mode == "constant" and max(widths, default=0) > 0:
        # a number that the dtype does not hold: only the ranks at the edges would find out
        func(x.block.new_zeros((1,) * x.ndim), [int(n > 0) for n in widths], mode, value)
    wanted, sizes = [], list(layout.sizes)
    for i in range(len(widths) // 2):
        dim, (lo, hi) = x.ndim - 1 - i, widths[2 * i : 2 * i + 2]
        if lo == hi == 0:
            continue
        own = layout.sizes[dim] or (layout.shape[dim],)
        borders = padded(own, lo, shape[dim])
        wanted.append(_wanted(dim, layout.shape[dim], lo, hi, borders, mode))
        if sizes[dim] is not None:
            sizes[dim] = sizes_of(borders)
    fill = 0.0 if value is None else value
    out = layout_of(layout.mesh_shape, layout.placements, shape, sizes)
    return PadPlan(window_op(mesh, layout, x.dtype, wanted, value=fill, op="pad"), out)


def _wanted(dim: int, n: int, lo: int, hi: int, borders: Sequence[int], mode: str) -> Wanted:
    if mode != "circular" or (lo >= 0 and hi >= 0):
        return intervals_wanted(n, dim, _shifted(borders, lo), mode)
    # torch crops first and wraps what is left
    first, kept = max(0, -lo), n + min(0, lo) + min(0, hi)
    ahead = max(0, lo)
    read = _shifted(borders, ahead)
    wanted = intervals_wanted(kept, dim, read, mode)
    runs = Each(len(read), lambda i: tuple(Run(r.dst, r.count, r.src + first, r.step) for r in wanted.runs[i]))
    return Wanted(
        dim, runs, wanted.n_outs, lambda lo, hi: near(read, kept, mode, max(lo - first, 0), min(hi - first, kept))
    )


def _shifted(borders: Sequence[int], by: int) -> Sequence[tuple[int, int]]:
    return Each(len(borders) - 1, lambda i: (borders[i] - by, borders[i + 1] - by))
