"""Finite differences on a grid: torch.gradient by windows of the neighbours' cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.graph import apart
from mpishard.autograd.linear import apply
from mpishard.autograd.use import use
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.layout import Each, bounds
from mpishard.ops.rule.dim import normal_dim, plain
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Neighbourhood(NamedTuple):
    """Fetch of a block with the cells beside it, and where the block starts and ends in what is fetched."""

    window: WindowOp
    first: int
    cells: int
    start: int


@implements(torch.gradient, sharded="halo")
def gradient(input: Any, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> tuple[ShardTensor, ...]:
    """Return derivatives along dims by central differences, one-sided at the ends of the domain.

    Neighborwise collective where a dim is sharded; coordinates given as tensors are whole on every rank (gathered
    if they are sharded).
    """
    spacing = 1 if spacing is None else spacing
    if not isinstance(input, ShardTensor):
        return torch.gradient(input, spacing=plain(spacing), dim=dim, edge_order=edge_order)
    x = resolved(input)
    given = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = [normal_dim(d, x.ndim) for d in given]
    if isinstance(spacing, Tensor) and not spacing.ndim:
        spacing = spacing.item()
    if isinstance(spacing, (int, float, complex)):
        spacings: Sequence[Any] = [spacing] * len(dims)
    else:
        spacings = [spacing] if isinstance(spacing, Tensor) else list(spacing)
    spacings = [s.full_tensor() if isinstance(s, ShardTensor) else s for s in spacings]
    _check(x, dims, spacings, dim, edge_order)
    return tuple(_along(x, d, s, edge_order) for d, s in zip(dims, spacings))


def _check(x: ShardTensor, dims: list[int], spacings: Sequence[Any], given: Any, edge_order: int) -> None:
    """Let torch refuse wrong arguments, on a few cells in place of all."""
    sizes = [min(n, 4) for n in x.shape]
    few: list[Any] = []
    for k, s in enumerate(spacings):
        if isinstance(s, Tensor) and s.ndim:
            fits = k < len(dims) and tuple(s.shape) == (x.shape[dims[k]],)
            few.append(torch.arange(sizes[dims[k]], device="cpu").to(s.dtype) if fits else s.detach().cpu())
        else:
            few.append(s)
    if 0 not in sizes:
        torch.gradient(torch.zeros(sizes, dtype=x.dtype, device="cpu"), spacing=few, dim=given, edge_order=edge_order)


def _along(x: ShardTensor, dim: int, spacing: Any, edge_order: int) -> ShardTensor:
    key = ("gradient", x.sharding, x.dtype, dim, edge_order)
    plan = x.mesh.plans.get(key) or x.mesh.plan(key, lambda: _plan(x, dim, edge_order))
    cells = apply(plan.window, x.block)
    if isinstance(spacing, Tensor) and spacing.ndim:
        spacing = use(spacing, x.mesh, x.sharding.sharded_mesh_dims)
        spacing = spacing[plan.first : plan.first + cells.shape[dim]]
    if 0 in cells.shape:
        # no cells, but made of the coordinates: their gradient is summed over all ranks
        local = cells.narrow(dim, 0, plan.cells) / (spacing.sum(0, True) if isinstance(spacing, Tensor) else 1)
    else:
        (every,) = torch.gradient(cells, spacing=[spacing], dim=[dim], edge_order=edge_order)
        local = apart(every.narrow(dim, plan.start, plan.cells))
    return wrap(local, x.sharding, x.mesh)


def _plan(x: ShardTensor, dim: int, edge_order: int) -> Neighbourhood:
    layout, n = x.sharding, x.shape[dim]
    at = bounds(layout.sizes[dim] or (n,))

    def window(i: int) -> tuple[int, int]:
        a, b = at[i], at[i + 1]
        # as many cells at an end of the domain as the one-sided difference takes
        lo = max(0, min(a - 1, n - edge_order - 1 if b == n else a))
        hi = min(n, max(b + 1, edge_order + 1 if a == 0 else b))
        return (lo, hi) if a < b else (a, a)

    def most(i: int) -> tuple[int, int]:
        return max(0, min(at[i] - 1, n - edge_order - 1)), min(n, max(at[i + 1] + 1, edge_order + 1))

    windows, reached = (Each(len(at) - 1, of) for of in (window, most))
    i = layout.index(dim, x.mesh.coords) if layout.sizes[dim] else 0
    a, b = at[i], at[i + 1]
    op = window_op(x.mesh, layout, x.dtype, [intervals_wanted(n, dim, windows, reached=reached)], op="gradient")
    return Neighbourhood(op, windows[i][0], b - a, a - windows[i][0])
