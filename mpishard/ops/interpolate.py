"""F.interpolate over sharded dims: taps and weights of each output cell from its global index, dim by dim."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import apply
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.window import WindowOp
from mpishard.errors import UnsupportedOperationError, described
from mpishard.layout import Layout, bounds, layout_of, sizes_of
from mpishard.ops.geometry import pairs
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap

_CUBIC = -0.75  # torch's parameter of the cubic convolution kernel
_LINEAR = ("linear", "bilinear", "trilinear")
_NEAREST = ("nearest", "nearest-exact")


class Taps(NamedTuple):
    """Cells of the window along ``dim`` that each output cell reads, and their weights (None: one cell, whole)."""

    dim: int
    cells: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] | None
    empty: bool


class InterpolationPlan(NamedTuple):
    """What one interpolation on one layout does on this rank; ``rest`` are torch's arguments for whole dims."""

    window: WindowOp
    taps: tuple[Taps, ...]
    rest: dict[str, Any] | None
    out: Layout


def _scale(n: int, n_out: int, factor: float | None, align: bool, wide: torch.dtype) -> Tensor:
    """Return input cells per output cell as torch computes it, in the dtype in which torch does."""
    if align:
        return torch.tensor((n - 1) / (n_out - 1) if n_out > 1 else 0.0, dtype=wide)
    if factor is not None:
        return torch.tensor(1.0 / factor, dtype=wide)
    return torch.tensor(n, dtype=wide) / n_out


def _global_taps(
    n: int, n_out: int, factor: float | None, mode: str, align: bool, wide: torch.dtype
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Return the input cells of every output cell of a whole dim, and their weights."""
    if mode in _NEAREST:
        ramp = torch.arange(n, dtype=torch.float64).view(1, 1, n)
        # torch knows its own rounding
        if factor is not None:
            cells = F.interpolate(ramp, scale_factor=factor, mode=mode)
        else:
            cells = F.interpolate(ramp, size=n_out, mode=mode)
        return [cells.view(-1).long()], None
    at = torch.arange(n_out, dtype=wide)
    scale = _scale(n, n_out, factor, align, wide)
    # rounded once, as the fused multiply-add of torch's kernels rounds
    source = at * scale if align else ((at.double() + 0.5) * scale.double() - 0.5).to(wide)
    if mode in _LINEAR:
        source = source.clamp(min=0)
        first = source.long().clamp(max=n - 1)
        second = (source - first).clamp(0, 1)
        return [first, (first + 1).clamp(max=n - 1)], [1 - second, second]
    floor = source.floor()
    t, a = (source - floor).clamp(0, 1), _CUBIC
    cells = [(floor.long() + k).clamp(0, n - 1) for k in (-1, 0, 1, 2)]

    def near(d: Tensor) -> Tensor:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Tensor) -> Tensor:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return cells, [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _plan(
    x: ShardTensor, shape: tuple[int, ...], size: Any, factors: list[float | None], mode: str, align: bool
) -> InterpolationPlan:
    layout, mesh = x._layout, x._mesh
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    sizes, wanted, taps = list(layout.sizes), [], []
    for dim in range(2, x.ndim):
        own = layout.sizes[dim]
        if own is None:
            continue
        n, n_out = layout.shape[dim], shape[dim]
        inner = [b * n_out // n for b in bounds(own)]
        borders = (0, *inner[1:-1], n_out)
        sizes[dim] = sizes_of(borders)
        cells, weights = _global_taps(n, n_out, factors[dim - 2], mode, align, wide)
        windows = []
        for a, b in pairs(borders):
            read = torch.cat([c[a:b] for c in cells])
            windows.append((int(read.min()), int(read.max()) + 1))
        index = layout.index(dim, mesh.coords)
        (a, b), (lo, _) = pairs(borders)[index], windows[index]
        wanted.append(intervals_wanted(n, dim, windows))
        along = (-1, *[1] * (x.ndim - dim - 1))
        taps.append(
            Taps(
                dim,
                tuple((c[a:b] - lo).to(x.device) for c in cells),
                None if weights is None else tuple(w[a:b].view(along).to(x.device) for w in weights),
                borders[index] == borders[index + 1],
            )
        )
    whole = [d for d in range(2, x.ndim) if layout.sizes[d] is None]
    rest: dict[str, Any] | None = None
    if any(shape[d] != layout.shape[d] or factors[d - 2] not in (None, 1.0) for d in whole):
        rest = {"mode": mode, **({} if mode in _NEAREST else {"align_corners": align})}
        if size is None:
            rest["scale_factor"] = [factors[d - 2] if d in whole else 1.0 for d in range(2, x.ndim)]
        else:
            out = layout_of(layout.mesh_shape, layout.placements, shape, sizes).local_shape(mesh.coords)
            rest["size"] = [max(1, out[d]) for d in range(2, x.ndim)]
    return InterpolationPlan(
        window_op(mesh, layout, x.dtype, wanted, op="interpolate"),
        tuple(taps),
        rest,
        layout_of(layout.mesh_shape, layout.placements, shape, sizes),
    )


@implements(F.interpolate)
def interpolate(
    input: ShardTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> ShardTensor:
    """Interpolate: every output cell is computed from its global index. Neighborwise collective."""
    x = resolved(input)
    layout, mesh = x._layout, x._mesh
    # torch's own checks of the arguments, and its shape of the result
    probe = F.interpolate(
        torch.empty(layout.shape, dtype=x.dtype, device="meta"),
        size,
        scale_factor,
        mode,
        align_corners,
        recompute_scale_factor,
        antialias,
    )
    spatial = [d for d in layout.shard_dims if d >= 2]
    if not spatial:
        local = F.interpolate(x._local, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        return wrap(local, layout_of(layout.mesh_shape, layout.placements, probe.shape, layout.sizes), mesh)
    if mode == "area":
        return F.__dict__[f"adaptive_avg_pool{x.ndim - 2}d"](x, tuple(probe.shape[2:]))  # type: ignore[no-any-return]
    if antialias:
        raise UnsupportedOperationError(
            described(
                "interpolate: antialias=True over sharded dims",
                expected="antialias=False, or spatial dims that are whole on every rank",
                got=list(layout.placements),
                fix="redistribute to a batch or channel dim first, or smooth with avg_pool before interpolating",
            )
        )
    factors: list[float | None] = [None] * (x.ndim - 2)
    if scale_factor is not None and not recompute_scale_factor:
        given = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor] * (x.ndim - 2)
        factors = [float(f) for f in given]
    else:
        size = tuple(probe.shape[2:])
    key = ("interpolate", layout, x.dtype, tuple(probe.shape), tuple(factors), mode, bool(align_corners))
    plan = mesh.plans.get(key)
    if plan is None:
        plan = mesh.plan(key, lambda: _plan(x, tuple(probe.shape), size, factors, mode, bool(align_corners)))
    local = apply(plan.window, x._local)
    half = local.dtype in (torch.float16, torch.bfloat16)
    if half:
        local = local.float()
    for tap in plan.taps:
        local = _along(local, tap)
    if plan.rest is not None:
        local = F.interpolate(local, **plan.rest)
    for tap in plan.taps:
        if tap.empty:
            local = local.narrow(tap.dim, 0, 0)
    return wrap(local.to(x.dtype) if half else local, plan.out, mesh)


def _along(x: Tensor, taps: Taps) -> Tensor:
    if taps.weights is None:
        return x.index_select(taps.dim, taps.cells[0])
    out = x.index_select(taps.dim, taps.cells[0]) * taps.weights[0]
    for cells, weight in zip(taps.cells[1:], taps.weights[1:]):
        out = out + x.index_select(taps.dim, cells) * weight
    return out
