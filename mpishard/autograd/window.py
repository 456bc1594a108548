"""Window fetch and halo exchange as differentiable operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.linear import apply, pair
from mpishard.comm import guard
from mpishard.comm.collective.transfer import run_transfer
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.halo.exchanger import Width, width_pair
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError
from mpishard.layout import (
    Box,
    Each,
    Layout,
    Runs,
    Stage,
    by_dim,
    check_mode,
    interval_runs,
    near,
    plan_fetch,
    plan_halo,
    plan_stage,
)

# of blocks with fewer cells, halos of several dims travel at once: a wait costs more than the corners' own messages
SMALL_CELLS = 1 << 14


class Wanted(NamedTuple):
    """What every position along one tensor dim needs: runs and window extents, one per position.

    ``near`` gives the positions, ascending, whose windows may hold cells of an interval; None: all may.
    """

    dim: int
    runs: Sequence[Runs]
    n_outs: Sequence[int]
    near: Callable[[int, int], Sequence[int]] | None = None


def intervals_wanted(
    n: int,
    dim: int,
    intervals: Sequence[tuple[int, int]],
    mode: str = "zeros",
    reached: Sequence[tuple[int, int]] | None = None,
) -> Wanted:
    """Return the windows ``[lo, hi)`` of every position along ``dim`` of ``n`` cells, extended by ``mode``.

    Not collective.

    Parameters
    ----------
    n, dim, mode
        As for `interval_runs`.
    intervals
        Windows. Only those of the positions that are near this one's block are looked at.
    reached
        Intervals that hold the windows; their ends do not fall from one position to the next. The windows themselves,
        if not given.
    """
    count, reached = len(intervals), intervals if reached is None else reached
    return Wanted(
        dim,
        Each(count, lambda i: interval_runs(n, *intervals[i], mode)),
        Each(count, lambda i: max(0, intervals[i][1] - intervals[i][0])),
        lambda lo, hi: near(reached, n, mode, lo, hi),
    )


def window_op(
    mesh: CartMesh,
    layout: Layout,
    dtype: torch.dtype,
    wanted: Sequence[Wanted | Stage],
    *,
    value: float = 0.0,
    op: str = "window",
) -> WindowOp:
    """Plan the fetch of windows along some dims of a sharded tensor, for `apply`.

    Not collective: every rank plans from what all ranks know. Callers keep the result in ``mesh.plan``.

    Parameters
    ----------
    mesh, layout, dtype
        Of the tensor.
    wanted
        One entry per tensor dim that changes: the windows of all positions, or this rank's stage.
    value
        What cells beyond the domain hold (the window is then affine; its derivative is that of zero).
    op
        Name for counters and the watchdog.

    Returns
    -------
    WindowOp
        Local block in, local window out.
    """
    stages = []
    for entry in wanted:
        stage = entry if isinstance(entry, Stage) else _staged(mesh, layout, entry)
        unchanged = stage.resident == 0 and stage.n_in == stage.n_out
        # calls are compared on all ranks, also where this one has nothing to do
        if guard.DEBUG or not (unchanged and not stage.sends and not stage.recvs):
            stages.append(stage)
    rounds = sum(entry.dim in layout.shard_dims for entry in wanted)
    small = math.prod(layout.shape) <= SMALL_CELLS * mesh.size
    block = layout.local_shape(mesh.coords)
    return WindowOp(mesh, stages, block, dtype, rounds=rounds, small=small, value=value, op=op)


def _staged(mesh: CartMesh, layout: Layout, wanted: Wanted) -> Stage:
    dim, runs, n_outs, near = wanted
    sizes, mesh_dims = layout.sizes[dim] or (layout.shape[dim],), layout.shard_dims.get(dim, ())
    others = near and near(*layout.interval(dim, mesh.coords))
    return plan_stage(dim, mesh_dims, sizes, runs, n_outs, layout.index(dim, mesh.coords), near=others)


def fetch_box(
    local: Tensor,
    mesh: CartMesh,
    layout: Layout,
    wanted: Callable[[tuple[int, ...]], Box],
    op: str,
    near: Iterable[int] | None = None,
) -> Tensor:
    """Return a box of a tensor that is another one in every call, so that nothing is kept for the next.

    Collective over the mesh dims that shard the tensor.

    Parameters
    ----------
    local, mesh, layout
        This rank's block, without Partial placements.
    wanted
        Coordinates of a rank -> its box, within the tensor; the same function on every rank.
    op
        Name for counters and the watchdog.
    near
        The ranks, ascending, whose boxes may have cells of this rank's block; all of them, if not given.

    Notes
    -----
    Adjoint: cotangents travel home and are added.
    """
    plan = plan_fetch(layout, wanted, mesh.coords, near)
    box = [hi - lo for lo, hi in wanted(mesh.coords)]
    own = tuple(local.shape)
    step = pair(
        lambda x: run_transfer(mesh, plan, x, box, op, call=layout),
        lambda g: run_transfer(mesh, plan.reverse, g, own, f"adjoint of {op}", accumulate=True, call=layout),
    )
    return apply(step, local)


def halo_exchange(
    local: Tensor,
    mesh: CartMesh,
    layout: Layout,
    widths: Mapping[int, Width],
    mode: str | None = None,
) -> Tensor:
    """Return the local block with its halo on both sides of the given dims.

    Neighborwise collective.

    Parameters
    ----------
    local
        This rank's block.
    mesh, layout
        Of the tensor.
    widths
        Tensor dim -> width of the halo, an int or (lo, hi).
    mode
        What fills the halo beyond the domain's edge: ``"zeros"``, ``"reflect"``, ``"replicate"`` or
        ``"circular"``. A dim that lies on a periodic mesh dim wraps whatever the mode. None: zeros, and a
        halo wider than the global extent is an error.

    Returns
    -------
    torch.Tensor
        Local plain tensor, corners filled.

    Raises
    ------
    LayoutError
        Unknown dim or mode, negative width, or a halo wider than the extent with no mode to fill it.

    Notes
    -----
    Adjoint: halo accumulation. Each halo cell's cotangent is added to the cell that it is a copy of.

    Examples
    --------
    >>> padded = ms.halo_exchange(x, {2: (1, 1), 3: (2, 0)}, mode="zeros")
    """
    try:
        widths = halo_widths("halo_exchange", widths, layout.ndim)
        told: object = tuple(sorted(widths.items()))
    except LayoutError:
        # never kept: the plan raises on all ranks. As text, so that 1.0 does not find what 1 made
        told = repr(widths)
    key = ("halo_exchange", layout, local.dtype, told, mode)
    op = mesh.plans.get(key) or mesh.plan(key, lambda: _halo_op(mesh, layout, local.dtype, widths, mode))
    return apply(op, local)


def halo_widths(what: str, widths: Mapping[int, Width], ndim: int) -> dict[int, tuple[int, int]]:
    """Return the (lo, hi) of every dim, counted from the front.

    Not collective.

    Raises
    ------
    LayoutError
        Unknown dims, one named twice, or what is no width.
    """
    given = by_dim(what, widths, ndim)
    try:
        return {dim: width_pair(width) for dim, width in given.items()}
    except (TypeError, ValueError):
        raise LayoutError(
            f"{what}: not a width",
            expected="an integer or two, (lo, hi), per dim",
            got=given,
            fix="give {dim: (lo, hi)}",
        ) from None


def _halo_op(
    mesh: CartMesh, layout: Layout, dtype: torch.dtype, widths: Mapping[int, Width], mode: str | None
) -> WindowOp:
    if mode is not None:
        check_mode(mode)  # a plan of periodic dims does not look at it
    wanted = []
    for dim, (lo, hi) in sorted(halo_widths("halo_exchange", widths, layout.ndim).items()):
        n = layout.shape[dim]
        periodic = any(mesh.periodic[m] for m in layout.shard_dims.get(dim, ()))
        if lo < 0 or hi < 0:
            raise LayoutError(
                f"halo_exchange: negative width along dim {dim}",
                expected="widths (lo, hi) >= 0",
                got=(lo, hi),
                fix="slice the tensor to make it smaller",
            )
        limit = n - 1 if mode == "reflect" else n
        if max(lo, hi) > limit and not periodic and mode in (None, "reflect"):
            raise LayoutError(
                f"halo_exchange: halo wider than the global extent along dim {dim}",
                expected=f"widths of at most {limit}, a periodic mesh dim, or a mode that fills the outside",
                got=(lo, hi),
                fix="give mode='zeros', 'replicate' or 'circular', or make the mesh dim periodic",
            )
        sizes, mesh_dims = layout.sizes[dim] or (n,), layout.shard_dims.get(dim, ())
        fill = "circular" if periodic else mode or "zeros"
        wanted.append(plan_halo(dim, mesh_dims, sizes, lo, hi, fill, layout.index(dim, mesh.coords)))
    return window_op(mesh, layout, dtype, wanted, op="halo_exchange")
