"""Cumulative operations and differences: local scans joined by the totals of the ranks before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.graph import apart
from mpishard.autograd.linear import apply, differentiated
from mpishard.autograd.use import use
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.layout import Layout, layout_of, sizes_of
from mpishard.layout.stencil import Sliding, windows
from mpishard.ops.rule.dim import normal_dim, strict_int, whole_along
from mpishard.ops.rule.empty_block import filled, scanned, unfilled
from mpishard.ops.rule.reduction import HALVES, reduced, stacked, worst
from mpishard.tensor.operand import moved, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _before(total: Tensor, x: ShardTensor, over: tuple[int, ...]) -> Tensor:
    """Return, along a new dim 0, the totals of the ranks that hold the cells before. Collective over ``over``.

    Notes
    -----
    Adjoint: a rank's total gathers the cotangents of the ranks behind it.
    """
    every = use(stacked(total, x.mesh, over), x.mesh, over)
    return every[: x.mesh.group(over).rank]


def _scan_rule(
    func: Callable[..., Tensor],
    total_of: Callable[[Tensor, int], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
) -> Callable[..., ShardTensor]:
    """Return the rule of a scan.

    ``total_of`` reduces a dim and keeps it; ``join`` combines a local scan with the totals before it, stacked
    along dim 0.
    """

    def rule(input: ShardTensor, dim: int, *, dtype: Any = None) -> ShardTensor:
        x = resolved(input)
        dim = normal_dim(dim, x.ndim)
        over = reduced(x.sharding, dim).over
        extra, shape = {} if dtype is None else {"dtype": dtype}, x.sharding.shape
        if not over:
            return wrap(scanned(func, x.block, dim, extra, shape), x.sharding, x.mesh)
        if func is torch.logcumsumexp and differentiated(x.block):
            # its graph differs between the first rank and the others: gradients of gradients, and tangents, would
            # not meet, so the dim is gathered
            whole = whole_along(x, (dim,))
            return moved(wrap(scanned(func, whole.block, dim, extra, shape), whole.sharding, x.mesh), x.sharding)
        result = func(x.block.new_zeros(1), 0, **extra).dtype
        wide = x.block.to(torch.float32 if result in HALVES else result)
        before = _before(total_of(wide, dim), x, over)
        return wrap(join(scanned(func, wide, dim, {}, shape), before).to(result), x.sharding, x.mesh)

    return rule


implements(torch.cumsum, torch.Tensor.cumsum, sharded="reduction")(
    _scan_rule(torch.cumsum, lambda t, dim: t.sum(dim, keepdim=True), lambda scan, before: scan + before.sum(0))
)
implements(torch.cumprod, torch.Tensor.cumprod, sharded="reduction")(
    _scan_rule(torch.cumprod, lambda t, dim: t.prod(dim, keepdim=True), lambda scan, before: scan * before.prod(0))
)
implements(torch.logcumsumexp, torch.Tensor.logcumsumexp, sharded="reduction")(
    _scan_rule(
        torch.logcumsumexp,
        lambda t, dim: torch.logsumexp(t, dim, keepdim=True),
        lambda scan, before: torch.logaddexp(scan, torch.logsumexp(before, 0)) if len(before) else scan + before.sum(0),
    )
)


def _cumulative_extreme_rule(func: Callable[..., Any], largest: bool) -> Callable[..., Any]:
    kind = getattr(torch.return_types, func.__name__)

    def rule(input: ShardTensor, dim: int) -> Any:
        x = resolved(input)
        dim = normal_dim(dim, x.ndim)
        over = reduced(x.sharding, dim).over

        def scan(t: Tensor, dim: int) -> Iterator[Tensor]:
            # of no cells, torch's gradient is the argument itself, which requires one
            return (unfilled(y, t.shape) for y in func(filled(t) if math.prod(x.shape) else t, dim))

        values, index = scan(x.block, dim)
        if over:
            lo, hi = x.sharding.interval(dim, x.mesh.coords)
            if hi > lo:
                total, at = values.narrow(dim, hi - lo - 1, 1), index.narrow(dim, hi - lo - 1, 1) + lo
            else:  # keeps a graph, so that all ranks take part in backward
                total = x.block.sum(dim, keepdim=True).to(values.dtype) + worst(values.dtype, largest)
                at = torch.zeros(total.shape, dtype=torch.int64, device=total.device)
            # with the worst in front, so that the first rank has what others have, and their graph
            totals = torch.cat([torch.full_like(total, worst(values.dtype, largest))[None], _before(total, x, over)])
            positions = torch.cat([torch.zeros_like(at)[None], _before(at, x, over)])
            best, row = (t[-1:] for t in scan(totals, 0))
            # of equal values the last counts, as in torch; NaN wins and stays
            stays = ((values >= best[0]) if largest else (values <= best[0])) | (values != values)
            values = torch.where(stays, values, best[0])
            index = torch.where(stays, index + lo, positions.gather(0, row)[0])
        return kind((wrap(values, x.sharding, x.mesh), wrap(index, x.sharding, x.mesh)))

    return rule


implements(torch.cummax, torch.Tensor.cummax, sharded="reduction")(_cumulative_extreme_rule(torch.cummax, True))
implements(torch.cummin, torch.Tensor.cummin, sharded="reduction")(_cumulative_extreme_rule(torch.cummin, False))


# -- differences of neighbours


def _neighbours(x: ShardTensor, dim: int, cells: int) -> tuple[Tensor, int, Layout]:
    """Return the block with the ``cells`` that follow it, how many results it gives, and their layout.

    Neighborwise collective.
    """
    key = ("neighbours", x.sharding, x.block.dtype, dim, cells)
    plan = x.mesh.plans.get(key) or x.mesh.plan(key, lambda: _plan_neighbours(x, dim, cells))
    op, own, out = plan
    return apply(op, x.block), own, out


def _plan_neighbours(x: ShardTensor, dim: int, cells: int) -> tuple[WindowOp, int, Layout]:
    layout, mesh = x.sharding, x.mesh
    slide = Sliding(cells + 1, 1, 1, 0, 0)
    n = layout.shape[dim]
    borders = slide.follow(layout.sizes[dim], n - cells)
    wanted = intervals_wanted(n, dim, windows(slide, borders))
    op = window_op(mesh, layout, x.block.dtype, [wanted], op="neighbours")
    shape, sizes = list(layout.shape), list(layout.sizes)
    shape[dim], sizes[dim] = n - cells, sizes_of(borders)
    own = sizes[dim][layout.index(dim, mesh.coords)]
    return op, own, layout_of(layout.mesh_shape, layout.placements, shape, sizes)


def _shortened(x: ShardTensor, dim: int, cells: int, local: Callable[[Tensor], Tensor]) -> ShardTensor:
    """Return what ``local`` makes of every ``cells + 1`` neighbours along ``dim``. Neighborwise collective."""
    n = x.shape[dim]
    if reduced(x.sharding, dim).over and n > cells:
        window, own, out = _neighbours(x, dim, cells)
        return wrap(apart(local(window).narrow(dim, 0, own)), out, x.mesh)
    layout, kept = x.sharding, max(n - cells, 0)
    shape, sizes = list(layout.shape), list(layout.sizes)
    shape[dim] = kept
    if sizes[dim] is not None:
        sizes[dim] = tuple(kept if s == n else 0 for s in sizes[dim]) if kept else (0,) * len(sizes[dim])
    y = local(x.block) if kept else x.block.narrow(dim, 0, 0)
    return wrap(y, layout_of(layout.mesh_shape, layout.placements, shape, sizes), x.mesh)


@implements(torch.diff, torch.Tensor.diff, sharded="halo")
def diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> ShardTensor:
    """Differences of neighbours along a dim, ``n`` times. Neighborwise collective where it is sharded."""
    n = strict_int(n)
    if n < 0:
        raise RuntimeError(f"order must be non-negative but got {n}")
    if not input.ndim:
        raise RuntimeError("diff expects input to be at least one-dimensional")
    parts = [t for t in (prepend, input, append) if t is not None]
    x = resolved(torch.cat(parts, dim) if len(parts) > 1 else input)
    if n == 0:
        return input.clone()  # type: ignore[no-any-return]
    dim = normal_dim(dim, x.ndim)
    return _shortened(x, dim, n, lambda t: torch.diff(t, n, dim))


def _areas(y: Any, x: Any, dim: int) -> tuple[Any, int]:
    """Return twice the areas of the trapezoids between neighbours, and the dim from the front; by torch's steps.

    Those of integers are not halved before they are added up: they go around where torch's do.
    """
    if isinstance(y, ShardTensor):
        y = resolved(y)
    if not y.ndim:
        raise IndexError(f"Dimension specified as {dim} but tensor has no dimensions")
    dim = normal_dim(dim, y.ndim)

    def both(t: Tensor) -> Tensor:
        n = t.shape[dim] - 1
        return t.narrow(dim, 0, n) + t.narrow(dim, 1, n)

    sums = _shortened(y, dim, 1, both) if isinstance(y, ShardTensor) else both(y)
    if x is None:
        return sums, dim
    if x.dtype == torch.bool:
        raise NotImplementedError("trapezoid: received a bool input for `x` or `y`, but bool is not supported")
    if x.ndim == 1:
        return sums * torch.diff(x).reshape(-1, *[1] * (y.ndim - 1 - dim)), dim
    return sums * torch.diff(x, dim=dim - y.ndim), dim


@implements(torch.trapezoid, torch.trapz, sharded="reduction")
def trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
    """Integrate along a dim by trapezoids. Collective where it is sharded."""
    # by torch's steps, where another order goes around or overflows: sums of a half type are added up in float32
    if x is None and (y.dtype in HALVES or not (y.is_floating_point() or y.is_complex())) and y.shape[dim]:
        return (y.sum(dim) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * dx
    areas, dim = _areas(y, x, dim)
    return areas.sum(dim) / 2 if x is not None else areas.sum(dim) / 2 * dx


@implements(torch.cumulative_trapezoid, sharded="reduction")
def cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
    """Integrals up to every cell along a dim. Collective where it is sharded."""
    areas, dim = _areas(y, x, dim)
    return areas.cumsum(dim) / 2 if x is not None else areas.cumsum(dim) / 2 * dx
