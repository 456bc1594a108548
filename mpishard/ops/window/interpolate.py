"""Interpolation in every mode of torch, over sharded spatial dims.

A source cell depends on the global index and extents, which torch's own operation on a window does not know.
Where the ratio is a power of two it does not matter: a shifted window gives the same weights to the last bit.
Else the weights of the block's output cells are computed as torch does (`Along`), and applied dim by dim to the fetched
window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import apply
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.errors import UnsupportedOperationError
from mpishard.layout import Each, Layout, bounds, layout_of, moved_borders, sizes_of
from mpishard.layout.stencil import pairs
from mpishard.ops.rule.dim import frozen, integer, on_domain
from mpishard.ops.window.planes import cropped, on_planes
from mpishard.ops.window.taps import LINEAR, NEAREST, Along, Taps
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap

# cells that an output cell reads on each side of its centre, at most
_SUPPORT = {
    "nearest": 0,
    "nearest-exact": 0,
    "linear": 1,
    "bilinear": 1,
    "trilinear": 1,
    "bicubic": 2,
}

# extents of planes, added up, to which torch's kernel for "nearest" on a CPU is the one with short cuts
_PLANES = 128


class InterpolatePlan(NamedTuple):
    """What one interpolation on one layout does on this rank.

    Attributes
    ----------
    window
        Fetch of the source cells.
    taps
        Tensor dim -> its taps, in cells of the window.
    local
        Arguments of torch's own operation on what the taps leave, or None.
    crops
        (dim, start, length) of the local result.
    out
        Layout of the result.
    """

    window: WindowOp
    taps: tuple[tuple[int, Taps], ...]
    local: dict[str, Any] | None
    crops: tuple[tuple[int, int, int], ...]
    out: Layout


class _Request(NamedTuple):
    """The arguments of one call."""

    size: Any
    scale_factor: Any
    mode: str
    align_corners: bool | None
    recompute_scale_factor: bool
    antialias: bool

    def scales(self) -> tuple[float, ...] | None:
        """Return the scale per dim where torch computes coordinates from it, else None."""
        if self.scale_factor is None or self.recompute_scale_factor:
            return None
        return tuple(map(float, self.scale_factor))

    def extents(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the spatial extents of the result, or None where torch may refuse: asking it takes long."""
        given, ndim = self.size if self.scale_factor is None else self.scale_factor, len(shape) - 2
        if (self.size is None) == (self.scale_factor is None) or (self.recompute_scale_factor and self.size):
            return None
        if not isinstance(given, tuple) or len(given) != ndim or ndim not in (1, 2, 3) or 0 in shape:
            return None
        if self.scale_factor is None:
            return given if all(type(n) is int and n > 0 for n in given) else None
        if not all(type(s) in (int, float) and 0 < s < math.inf for s in given):
            return None
        out = tuple(int(n * float(s)) for n, s in zip(shape[2:], given))
        return out if all(out) else None

    def arguments(self, size: Sequence[int], scales: Sequence[float] | None) -> dict[str, Any]:
        """Return the arguments of the same interpolation to another size."""
        target = {"size": tuple(size)} if scales is None else {"scale_factor": tuple(scales)}
        return {**target, "mode": self.mode, "align_corners": self.align_corners, "antialias": self.antialias}


@implements(F.interpolate, sharded="halo")
def interpolate(
    input: ShardTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> ShardTensor:
    """Interpolate as ``torch.nn.functional.interpolate`` does on the whole tensor. Neighborwise collective.

    Raises
    ------
    UnsupportedOperationError
        Integers in a mode with weights, unless every ratio along a sharded dim is a power of two.
    """
    x = resolved(input)
    ndim = x.ndim - 2
    extents = frozen(size, ndim)
    if type(extents) is tuple:
        extents = tuple(map(integer, extents))
    request = _Request(
        extents, frozen(scale_factor, ndim), mode, align_corners, bool(recompute_scale_factor), bool(antialias)
    )
    key = ("interpolate", x.sharding, x.dtype, *request)
    plan = x.mesh.plans.get(key) or x.mesh.plan(key, lambda: _plan(x, request))
    if not isinstance(plan, InterpolatePlan):  # "area": the output size
        return getattr(F, f"adaptive_avg_pool{len(plan)}d")(x, plan)  # type: ignore[no-any-return]
    y = apply(plan.window, x.block)
    if plan.taps:
        y = _tapped(y, plan.taps)
    if plan.local is not None:
        aside = () if mode in NEAREST else tuple(dim for dim, _ in plan.taps)
        y = on_planes(lambda t: _with_channels(lambda u: F.interpolate(u, **plan.local), t, aside), y, ndim)
    return wrap(cropped(y.to(x.dtype), plan.crops), plan.out, x.mesh)


def _upsample_rule(mode: str, antialias: bool) -> Any:
    corners = mode in ("linear", "bilinear", "bicubic", "trilinear", "lanczos")

    def rule(input: ShardTensor, output_size: Any, *rest: Any, **named: Any) -> ShardTensor:
        """Interpolate, as torch's own functions do below `interpolate`. Neighborwise collective."""
        rest, align = list(rest), False
        if corners:
            align = bool(named.pop("align_corners") if "align_corners" in named else rest.pop(0))
        scales = [*rest, *named.values()]
        # of one argument for all dims, or of one argument for each
        scales = scales[0] if len(scales) == 1 and isinstance(scales[0], (list, tuple)) else scales
        given = [s for s in scales or () if s is not None]
        how = {"mode": mode, "align_corners": align if corners else None, "antialias": antialias}
        if output_size is None:
            return interpolate(input, scale_factor=tuple(given), **how)
        size = tuple(int(n) for n in output_size)
        if not given or align:
            return interpolate(input, size, **how)
        if tuple(int(n * s) for n, s in zip(input.shape[2:], given)) != size:
            raise UnsupportedOperationError(
                f"upsampling in mode {mode!r}: scales and an output size",
                expected=f"scales that lead from {list(input.shape[2:])} to {list(size)}, or none",
                got=given,
                fix="use torch.nn.functional.interpolate with one of both",
            )
        return interpolate(input, scale_factor=tuple(given), **how)

    return rule


for _name, _mode in {
    "upsample_linear1d": "linear",
    "upsample_bilinear2d": "bilinear",
    "upsample_bicubic2d": "bicubic",
    "upsample_trilinear3d": "trilinear",
    **{f"upsample_nearest{_n}d": "nearest" for _n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{_n}d": "nearest-exact" for _n in (1, 2, 3)},
    "_upsample_bilinear2d_aa": "bilinear",
    "_upsample_bicubic2d_aa": "bicubic",
    "_upsample_lanczos2d_aa": "lanczos",
}.items():
    implements(*spellings(_name), sharded="halo")(_upsample_rule(_mode, _name.endswith("_aa")))


def _plan(x: ShardTensor, request: _Request) -> InterpolatePlan | tuple[int, ...]:
    layout, ndim = x.sharding, x.ndim - 2
    extents = request.extents(layout.shape)
    if extents is None:
        extents = _refused_or_extents(x, request)
    # torch's own error for a mode, or a dtype that it does not interpolate
    F.interpolate(x.block.new_zeros((1,) * x.ndim), **request.arguments((1,) * ndim, None))
    if request.mode == "area":
        return extents
    shape = (*layout.shape[:2], *extents)
    scales = request.scales()
    sharded = [d for d in range(2, x.ndim) if layout.sizes[d] is not None]
    every = {d: _shift_exact(layout.shape[d], shape[d], scales and scales[d - 2]) for d in range(2, x.ndim)}
    ratios = {d: every[d] for d in sharded}
    own_ways = request.align_corners or request.antialias or (_by_size(request, ndim) and not all(every.values()))
    if not sharded or (not own_ways and all(ratios.values())):
        return _plan_shifted(x, request, shape, ratios, scales)
    if request.mode not in NEAREST and not x.dtype.is_floating_point:
        raise UnsupportedOperationError(
            f"interpolate: mode {request.mode!r} of integers by this ratio over a sharded dim",
            expected="a floating-point tensor, or ratios that are powers of two",
            got=x.dtype,
            fix="convert with x.float() and round the result",
        )
    return _plan_tapped(x, request, shape, sharded, scales)


def _by_size(request: _Request, ndim: int) -> bool:
    """Return whether torch has two kernels that round differently, one for small tensors, as a block may be."""
    return ndim == 2 and request.mode in NEAREST


def _interpolated(whole: Tensor, request: _Request) -> Tensor:
    # torch's check of no samples fails on tensors without data
    return F.interpolate(whole if len(whole) else whole.new_empty((1, *whole.shape[1:])), *request)


def _refused_or_extents(x: ShardTensor, request: _Request) -> tuple[int, ...]:
    """Return the spatial extents of an unusual request's result, or raise torch's own error."""
    layout = x.sharding
    try:
        return tuple(on_domain(_interpolated, x, request).shape[2:])
    except Exception:
        # what is refused without data is refused with data before any work, and in other words
        F.interpolate(x.block.new_zeros(()).expand(1, 1, *layout.shape[2:]), *request)
        raise


def _shift_exact(n: int, n_out: int, scale: float | None) -> int:
    """Return the ratio where it is a power of two, so that coordinates are exact in binary; else 0."""
    s = n_out // n if n else 0
    return s if s * n == n_out and s & (s - 1) == 0 and scale in (None, s) else 0


def _plan_shifted(
    x: ShardTensor,
    request: _Request,
    shape: Sequence[int],
    ratios: Mapping[int, int],
    scales: Sequence[float] | None,
) -> InterpolatePlan:
    """Plan torch's own interpolation of windows: what lies beyond this rank's cells is dropped."""
    layout, mesh = x.sharding, x.mesh
    wanted, crops, sizes, local_size = [], [], list(layout.sizes), list(shape[2:])
    for dim, s in ratios.items():
        n, reach = layout.shape[dim], _SUPPORT[request.mode]
        borders = moved_borders(layout.sizes[dim] or (n,), s, 0, 1, n * s)
        cells = pairs(borders)
        windows = _around(cells, s, reach, n)
        wanted.append(intervals_wanted(n, dim, windows))
        sizes[dim] = sizes_of(borders)
        index = layout.index(dim, mesh.coords)
        lo, hi = windows[index]
        local_size[dim - 2] = (hi - lo) * s
        crops.append((dim, cells[index][0] - lo * s, sizes[dim][index]))  # type: ignore[index]
    return InterpolatePlan(
        window_op(mesh, layout, x.dtype, wanted, op="interpolate"),
        (),
        request.arguments(local_size, scales),
        tuple(crops),
        layout_of(layout.mesh_shape, layout.placements, shape, sizes),
    )


def _around(cells: Sequence[tuple[int, int]], s: int, reach: int, n: int) -> Sequence[tuple[int, int]]:
    """Return the input cells that output cells, ``s`` for one, read. Not collective."""
    return Each(len(cells), lambda i: (max(cells[i][0] // s - reach, 0), min(-(-cells[i][1] // s) + reach, n)))


def _plan_tapped(
    x: ShardTensor, request: _Request, shape: Sequence[int], sharded: Sequence[int], scales: Sequence[float] | None
) -> InterpolatePlan:
    """Plan the weighted sums along the sharded dims, and torch's own interpolation along the others."""
    layout, mesh, ndim = x.sharding, x.mesh, x.ndim - 2
    wanted, crops, taps, sizes = [], [], [], list(layout.sizes)
    local_size, local_scales = list(shape[2:]), list(scales or ())
    # Whole dims are torch's, with exceptions that are wrong there where no dim of a block changes its size, the block
    # is small, or one cell comes out along the last: extents that stay though the scale is not 1, what `_by_size`
    # says, and antialiasing (docs/upstream.md).
    for dim in range(2, x.ndim):
        stays = shape[dim] == layout.shape[dim] and scales is not None and scales[dim - 2] != 1
        # torch interpolates by cubic functions in two dims alone
        every = request.antialias or request.mode == "bicubic" or _by_size(request, ndim)
        if dim not in sharded and not (stays or every):
            continue
        n, own = layout.shape[dim], layout.sizes[dim] or (layout.shape[dim],)
        along = _along(x, request, shape, dim, scales)
        borders = (0, *along.first_beyond(bounds(own)[1:-1]), shape[dim])
        cells = pairs(borders)
        index = layout.index(dim, mesh.coords)
        (a, b), lo = cells[index], 0
        if dim in sharded:
            windows = along.windows(cells)
            lo = windows[index][0]
            wanted.append(intervals_wanted(n, dim, windows))
            sizes[dim] = sizes_of(borders)
        taps.append((dim, along.taps(a, b).beyond(lo, x.device)))
        local_size[dim - 2] = b - a
        if scales:
            local_scales[dim - 2] = 1.0
        if borders[index] == borders[index + 1]:
            crops.append((dim, 0, 0))
    local = None
    if rest := sorted({*range(ndim)} - {dim - 2 for dim, _ in taps}):
        if request.mode not in NEAREST:
            request = request._replace(mode=LINEAR[len(rest) - 1])
            local_size, local_scales = ([v[i] for i in rest if v] for v in (local_size, local_scales))
        local = request.arguments(local_size, local_scales or None)
    return InterpolatePlan(
        window_op(mesh, layout, x.dtype, wanted, op="interpolate"),
        tuple(taps),
        local,
        tuple(crops),
        layout_of(layout.mesh_shape, layout.placements, shape, sizes),
    )


def _along(x: ShardTensor, request: _Request, shape: Sequence[int], dim: int, scales: Sequence[float] | None) -> Along:
    """Return what is read along a dim, with the short cuts that torch takes."""
    n, n_out, mode, cpu = x.shape[dim], shape[dim], request.mode, x.device.type in ("cpu", "meta")
    scale, dtype = scales and scales[dim - 2], np.float64 if x.dtype == torch.float64 else np.float32
    if mode in NEAREST:
        planes = cpu and _by_size(request, x.ndim - 2) and sum(shape[2:]) <= _PLANES
        if planes and mode == "nearest" and n_out in (n, 2 * n):
            scale = None
        if planes or not cpu:
            dtype = np.float32
    elif n == n_out and scale not in (None, 1) and not request.align_corners and _copied(x, request, shape):
        return Along(n, n, None, "nearest")
    return Along(n, n_out, scale, mode, corners=bool(request.align_corners), antialias=request.antialias, dtype=dtype)


def _copied(x: ShardTensor, request: _Request, shape: Sequence[int]) -> bool:
    """Ask torch whether a dim whose extent stays is copied, though its scale is not 1."""
    stays = tuple(shape[2:]) == tuple(x.shape[2:])
    cells = torch.arange(4.0, device="cpu" if x.device.type == "meta" else x.device)
    scales = (1.2, *[1.2 if stays else 2.0] * (x.ndim - 3))
    answer = F.interpolate(cells.reshape(1, 1, 4, *[1] * (x.ndim - 3)), **request.arguments((), scales))
    return torch.equal(answer.reshape(4, -1)[:, 0], cells)


def _with_channels(f: Callable[[Tensor], Tensor], x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return ``f(x)`` along the other dims, those of ``dims`` as channels: by weights of 0 it would spread a NaN.

    Not as a dim of one cell either, which torch adds to itself by such a weight: of an infinite number that is NaN.
    """
    if not dims:
        return f(x)
    to, others = tuple(range(2, 2 + len(dims))), [d for d in range(2, x.ndim) if d not in dims]
    extents = [x.shape[d] for d in dims]
    y = f(x.movedim(dims, to).reshape(len(x), x.shape[1] * math.prod(extents), *(x.shape[d] for d in others)))
    return y.reshape(len(x), x.shape[1], *extents, *y.shape[2:]).movedim(to, dims)


def _tapped(x: Tensor, taps: Sequence[tuple[int, Taps]]) -> Tensor:
    # products of 16-bit cells are added in 32 bits, as torch does; the caller converts back
    for dim, (index, weight) in taps:
        if weight is None:
            x = x.index_select(dim, index[0])
            continue
        x = x.to(weight.dtype)
        shape = [-1 if d == dim else 1 for d in range(x.ndim)]
        parts = [x.index_select(dim, i) * w.reshape(shape) for i, w in zip(index, weight)]
        x = parts[0]
        for part in parts[1:]:
            x = x + part
    return x
