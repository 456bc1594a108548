"""Cells in another order along a dim: roll, flip, rot90. Sharded dims are window fetches of another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.linear import apply
from mpishard.autograd.window import Wanted, intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Each, Layout, Run, bounds, near
from mpishard.ops.rule.dim import int_list, ints, normal_dim, strict_int
from mpishard.ops.shape.view import transpose
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _roll_op(mesh: CartMesh, layout: Layout, dtype: torch.dtype, dim: int, shift: int) -> WindowOp:
    b = bounds(layout.sizes[dim] or ())
    windows = Each(len(b) - 1, lambda i: (b[i] - shift, b[i + 1] - shift))
    wanted = intervals_wanted(layout.shape[dim], dim, windows, "circular")
    return window_op(mesh, layout, dtype, [wanted], op="roll")


def _flip_op(mesh: CartMesh, layout: Layout, dtype: torch.dtype, dim: int) -> WindowOp:
    n, sizes = layout.shape[dim], layout.sizes[dim] or ()
    b = bounds(sizes)
    blocks = Each(len(sizes), lambda i: (b[i], b[i + 1]))
    runs = Each(len(sizes), lambda i: (Run(0, sizes[i], n - 1 - b[i], -1),) if sizes[i] else ())
    wanted = Wanted(dim, runs, sizes, lambda lo, hi: near(blocks, n, "zeros", n - hi, n - lo))
    return window_op(mesh, layout, dtype, [wanted], op="flip")


def _reordered(x: Tensor, mesh: CartMesh, key: Any, build: Any) -> Tensor:
    op = mesh.plans.get(key) or mesh.plan(key, build)
    y = apply(op, x)
    # also where a rank's cells stay in their places, a copy: a node gives its argument back as a view
    return y.clone() if op.identity else y


@implements(torch.roll, torch.Tensor.roll, sharded="halo")
def roll(input: ShardTensor, shifts: Any, dims: Any = None) -> ShardTensor:
    """Move cells along dims, around the end. Neighborwise collective where a dim is sharded.

    The result has the layout of the argument.
    """
    shifts = ints((shifts,))
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        if len(shifts) != 1:
            raise RuntimeError(f"shifts and dimensions must align. shifts: {len(shifts)}, dims:0")
        out = roll(input.reshape(-1), shifts, 0).reshape(input.shape)
        out._gathered_view, out._origin = False, None  # of nothing but itself
        return out  # type: ignore[no-any-return]
    dims = ints((dims,))
    if len(shifts) != len(dims):
        raise RuntimeError(f"shifts and dimensions must align. shifts: {len(shifts)}, dims:{len(dims)}")
    x = resolved(input)
    layout, mesh, local = x.sharding, x.mesh, x.block
    if not x.ndim:
        local.roll(shifts, dims)  # raises torch's own error
    whole: list[tuple[int, int]] = []
    for shift, dim in zip(shifts, dims):
        d = normal_dim(dim, x.ndim)
        n = layout.shape[d]
        if layout.sizes[d] is None or n == 0:
            whole.append((shift, d))
            continue
        s = shift % n
        key = ("roll", layout, x.dtype, d, s)
        local = _reordered(local, mesh, key, lambda d=d, s=s: _roll_op(mesh, layout, x.dtype, d, s))
    if whole or local is x.block:
        local = local.roll([s for s, _ in whole], [d for _, d in whole]) if whole else local.clone()
    return wrap(local, layout, mesh)


@implements(torch.flip, torch.Tensor.flip, sharded="halo")
def flip(input: ShardTensor, *given: Any, dims: Any = None) -> ShardTensor:
    """Reverse dims. Neighborwise collective where one is sharded.

    The result has the layout of the argument.
    """
    x, dims = resolved(input), ints(given) if dims is None else int_list(dims)
    layout, mesh, local = x.sharding, x.mesh, x.block
    if not x.ndim:
        return wrap(local.flip(dims), layout, mesh)
    wanted = [normal_dim(d, x.ndim) for d in dims]
    if len(set(wanted)) != len(wanted):
        raise RuntimeError(f"dim {wanted[0]} appears multiple times in the list of dims")
    for d in wanted:
        if layout.sizes[d] is not None:
            key = ("flip", layout, x.dtype, d)
            local = _reordered(local, mesh, key, lambda d=d: _flip_op(mesh, layout, x.dtype, d))
    whole = [d for d in wanted if layout.sizes[d] is None]
    if whole or local is x.block:
        local = local.flip(whole)
    return wrap(local, layout, mesh)


@implements(torch.fliplr, torch.Tensor.fliplr, sharded="halo")
def fliplr(input: ShardTensor) -> ShardTensor:
    """Reverse dim 1. As `flip`."""
    if input.ndim < 2:
        raise RuntimeError("Input must be >= 2-d.")
    return flip(input, 1)


@implements(torch.flipud, torch.Tensor.flipud, sharded="halo")
def flipud(input: ShardTensor) -> ShardTensor:
    """Reverse dim 0. As `flip`."""
    if input.ndim < 1:
        raise RuntimeError("Input must be >= 1-d.")
    return flip(input, 0)


@implements(torch.rot90, torch.Tensor.rot90, sharded="halo")
def rot90(input: ShardTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> ShardTensor:
    """Turn a plane by quarter turns. As `flip`; where the dims swap, their shards do."""
    if len(dims) != 2 or normal_dim(dims[0], input.ndim) == normal_dim(dims[1], input.ndim):
        raise RuntimeError(f"expected total rotation dims == 2 and different, but got {list(dims)}")
    a, b = dims
    k = strict_int(k) % 4
    if k == 0:
        return input.clone()  # type: ignore[no-any-return]
    if k == 2:
        return flip(input, a, b)
    return transpose(flip(input, b if k == 1 else a), a, b).contiguous()  # type: ignore[no-any-return]
