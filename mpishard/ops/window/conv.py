"""Convolutions and transposed convolutions of any geometry, over sharded spatial dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.graph import apart
from mpishard.autograd.linear import apply, in_transform
from mpishard.autograd.use import use
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm import traced
from mpishard.comm.exchange.window import WindowOp
from mpishard.errors import LayoutError
from mpishard.layout import Each, Layout, bounds, layout_of, sizes_of
from mpishard.layout.stencil import Sliding, of_every_kind, paddings_meet, pairs, windows
from mpishard.ops.rule.autocast import autocast_enabled
from mpishard.ops.rule.dim import plain, whole_along
from mpishard.ops.rule.reduction import HALVES
from mpishard.ops.window.beside import read_beside
from mpishard.ops.window.conv_geometry import no_output, normal, sliding_dims, transposed_dims
from mpishard.ops.window.conv_kernel import Kernel, Local, convolved, kernel_for, kernel_of
from mpishard.ops.window.conv_node import Fetched, Form, block_conv
from mpishard.ops.window.conv_overlap import Overlapped, plan_overlapped
from mpishard.ops.window.conv_resident import Beside, plan_beside
from mpishard.ops.window.conv_traced import TracedConv
from mpishard.ops.window.planes import cropped
from mpishard.tensor.operand import mesh_of, on_mesh, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap

# for blocks of fewer cells, a copy costs less than the strips' own convolutions or another node
LARGE_CELLS = 1 << 17


class ConvPlan(NamedTuple):
    """What one convolution on one layout does on this rank.

    Attributes
    ----------
    window
        Fetch of the input cells.
    local
        Geometry of the local convolution, which pads the dims that are not fetched (or crops them, if transposed).
    kernel
        What computes it on this rank, and why where torch would choose otherwise.
    crops
        (dim, start, length) of the local result, for results with cells too many.
    out
        Layout of the result.
    used
        Mesh dims over which the weights are used.
    form
        How autograd sees the convolution; None: as a window and torch's own operation on it.
    reason
        Why the form is not that without a padded copy; empty where it is.
    """

    window: WindowOp
    local: Local
    kernel: Kernel
    crops: tuple[tuple[int, int, int], ...]
    out: Layout
    used: tuple[int, ...]
    form: Form | None
    reason: str


def _operands(input: Any, weight: Any, bias: Any, ndim: int) -> tuple[Any, ShardTensor, Any, Any]:
    """Return the mesh, the input with whole channels in the dtype it is convolved in, and weights as plain tensors.

    Collective where channels or weights are sharded: they are gathered.
    """
    mesh = mesh_of((input, weight, bias))
    if isinstance(input, ShardTensor):
        x = resolved(input)
        channel = x.ndim - ndim - 1
        if channel in x.sharding.shard_dims and channel in (0, 1):
            x = whole_along(x, (channel,))
    else:
        x = on_mesh(input, mesh)
    if autocast_enabled(x.block.device.type) and (local := _autocast(x.block)[0]) is not x.block:
        # before anything is planned: what travels is of this dtype
        x = wrap(local, x.sharding, mesh)
    return mesh, x, plain(weight), plain(bias)


def _check(x: ShardTensor, ndim: int, name: str) -> int:
    """Return the first spatial dim."""
    first = x.ndim - ndim
    if first not in (1, 2):
        raise LayoutError(
            f"{name}: input of {x.ndim} dims", expected=f"{ndim + 1} or {ndim + 2} dims", got=x.shape, fix="reshape"
        )
    return first


def _out_layout(x: ShardTensor, shape: list[int], borders: dict[int, tuple[int, ...]]) -> Layout:
    layout = x.sharding
    sizes = [sizes_of(borders[d]) if d in borders and s is not None else s for d, s in enumerate(layout.sizes)]
    return layout_of(layout.mesh_shape, layout.placements, shape, sizes)


def _plan_conv(
    x: ShardTensor, weight: Tensor, ndim: int, name: str, groups: int, stride: Any, padding: Any, dilation: Any
) -> ConvPlan:
    """Plan a convolution: which input cells this rank's output cells read, and what torch pads itself.

    Along a dim of ``n`` cells, with ``k`` weights, stride ``s``, dilation ``d`` and padding ``(l, h)``::

        y[j] = sum_t w[t] x[j s - l + t d],  0 <= t < k,  0 <= j < floor((n + l + h - r) / s) + 1,  r = (k - 1) d + 1

    with ``x = 0`` outside ``[0, n)``. Where the dim is cut at ``b[i]``, the results are cut so that a cell lies where
    the middle of its window does, and rank ``i`` reads (`Sliding.follow`, `Sliding.window`)::

        a[i] = min {j: j s - l + floor((r - 1) / 2) >= b[i]}
        [a[i] s - l,  (a[i + 1] - 1) s - l + r)

    For ``k = 3``, ``s = 1``, ``l = h = 1`` on two ranks::

        x         | 0 1 2 3 | 4 5 6 7 |
        rank 0    . 0 1 2 3   4             window [-1, 5): zeros at -1, and 4 comes from rank 1
        rank 1            3   4 5 6 7 .     window [3, 9)
        y         | 0 1 2 3 | 4 5 6 7 |

    The windows are fetched (``window``), with zeros beyond the domain, and torch's convolution pads nothing along
    these dims. A window that ends before the block does is longer where no more cells come out (`_with_block`). Nothing
    is fetched where all blocks are their own windows (`_stays`). Dims that are not cut are padded by torch where
    ``l = h``; else the window is the padded dim. A rank without output cells computes one, and crops it.

    Large blocks are not copied into a window: see ``form``.
    """
    first = _check(x, ndim, name)
    layout, mesh = x.sharding, x.mesh
    slides = sliding_dims(weight.shape[2:], stride, padding, dilation)
    shape, local_padding, crops = list(layout.shape), [0] * ndim, []
    shape[first - 1] = weight.shape[0] if x.shape[first - 1] else 0  # of no channels torch makes none
    wanted, borders, sharded = [], {}, {}
    for i, g in enumerate(slides):
        dim = first + i
        n = layout.shape[dim]
        if n + g.lo + g.hi < g.reach:
            raise no_output(name, dim, n + g.lo + g.hi, g.reach)
        shape[dim] = g.n_out(n)
        if layout.sizes[dim] is not None:
            borders[dim] = g.follow(layout.sizes[dim], shape[dim])
        if len(layout.sizes[dim] or ()) < 2:
            if g.lo == g.hi:
                local_padding[i] = g.lo
                continue
            intervals = reached = [g.window(0, shape[dim])]
        else:
            sharded[dim] = g
            read, at = windows(g, borders[dim]), bounds(layout.sizes[dim])
            intervals, reached = _with_blocks(g, read, at)
            index = layout.index(dim, mesh.coords)
            if borders[dim][index] == borders[dim][index + 1]:
                crops.append((dim, 0, 0))
        if not _stays(g, layout.sizes[dim] or (n,), borders.get(dim) or (0, shape[dim]), intervals):
            wanted.append(intervals_wanted(n, dim, intervals, reached=reached))
    window = window_op(mesh, layout, x.dtype, wanted, op=name)
    form: Form | None = None
    reason = _why_torch(x, first, bool(wanted))

    def local(padding: Sequence[int]) -> Local:
        strides, dilations = tuple(g.stride for g in slides), tuple(g.dilation for g in slides)
        return strides, tuple(padding), dilations, False, (0,) * ndim, groups

    if not reason:
        overlapped: Overlapped | str = "padding differs at the two ends"
        lows = [g.lo for g in slides]
        if lows == [g.hi for g in slides]:
            overlapped = plan_overlapped(window, layout, mesh.coords, first, sharded, borders, local(lows))
        if isinstance(overlapped, str):
            form, reason = Fetched(window, local(local_padding)), overlapped
        else:
            form = overlapped
    return ConvPlan(
        window,
        local(local_padding),
        kernel_for(x.block, window.out_shape, tuple(weight.shape), local(local_padding)),
        tuple(crops),
        _out_layout(x, shape, borders),
        layout.sharded_mesh_dims,
        form,
        reason,
    )


def _plan_beside(
    x: ShardTensor, weight: Tensor, ndim: int, stride: Any, padding: Any, dilation: Any, plan: ConvPlan, halo: Any
) -> Beside | str:
    """Plan the same from the halo in the storage of ``x``, or say why not. Not collective."""
    if x.dtype.is_complex:
        return "complex: torch convolves real and imaginary parts"
    first = x.ndim - ndim
    slides = sliding_dims(weight.shape[2:], stride, padding, dilation)
    borders = {first + i: bounds(s) for i, s in enumerate(plan.out.sizes[first:]) if s is not None}
    return plan_beside(x.mesh, x.sharding, x.dtype, first, slides, borders, halo)


def _plan_transposed(
    x: ShardTensor,
    weight: Tensor,
    ndim: int,
    name: str,
    groups: int,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
) -> ConvPlan:
    """Plan a transposed convolution: which input cells reach this rank's output cells, and what is cropped.

    Along a dim of ``n`` cells, with ``k`` weights, stride ``s``, dilation ``d``, padding ``l`` and output padding
    ``e``, input cell ``i`` adds ``w[t] x[i]`` to output cell ``i s - l + t d``::

        y[j] = sum of w[t] x[i] over i s - l + t d = j,   0 <= j < (n - 1) s - 2 l + r + e,   r = (k - 1) d + 1

    A result lies where the input cell in its middle does (`Transposed.follow`: a cut at ``b`` becomes one at
    ``b s - l + floor((r - 1) / 2)``), and output cells ``[a, b)`` read the input cells (`Transposed.window`)::

        ceil((a + l - r + 1) / s) <= i <= floor((b - 1 + l) / s)

    and one more on either side where ``r < s`` leaves gaps, so that what comes out covers them. From input cells
    ``[lo, hi)`` come the output cells ``[lo s - l, (hi - 1) s - l + r)``, of which ``before`` lie before ``a`` and
    ``after`` behind ``b``. Torch crops both ends alike, by its padding; the rest of the longer end is left out of a
    view (``crops``). For ``k = 3``, ``s = 2``, ``l = 1`` on two ranks, cell ``i`` adding to ``y[2 i - 1 .. 2 i + 1]``::

        x                     | 0   1 | 2   3 |
        y               (-1) | 0 1 2 3 | 4 5 6 | (7)
        rank 0 reads x[0:3): y[-1:6), torch crops one at either end, y[0:5), and a view leaves y[0:4)
        rank 1 reads x[2:4): y[3:8), torch crops one at either end

    Dims that are not cut are torch's own. A rank without output cells computes one, and crops it.
    """
    first = _check(x, ndim, name)
    layout, mesh = x.sharding, x.mesh
    spread = transposed_dims(weight.shape[2:], stride, padding, output_padding, dilation)
    shape, crops = list(layout.shape), []
    local_padding, local_extra = [g.lo for g in spread], [g.extra for g in spread]
    shape[first - 1] = weight.shape[1] * groups
    wanted, borders = [], {}
    for i, g in enumerate(spread):
        dim = first + i
        n = layout.shape[dim]
        shape[dim] = g.n_out(n)
        if shape[dim] <= 0:
            raise no_output(name, dim, shape[dim], 1)
        if layout.sizes[dim] is None:
            continue
        borders[dim] = g.follow(layout.sizes[dim], shape[dim])
        if len(layout.sizes[dim]) == 1:
            continue
        intervals, read, at = pairs(borders[dim]), windows(g, borders[dim]), bounds(layout.sizes[dim])
        some = of_every_kind(layout.sizes[dim], sizes_of(borders[dim]), g.stride, 1)
        if any(read[k] != (at[k], at[k + 1]) for k in some):
            wanted.append(intervals_wanted(n, dim, read))
        index = layout.index(dim, mesh.coords)
        a, b = borders[dim][index : index + 2]
        lo, hi = read[index]
        length = (hi - lo - 1) * g.stride + g.reach
        before = intervals[index][0] - (lo * g.stride - g.lo)
        # a rank without output cells computes one, and drops it
        after = length - before - (intervals[index][1] - intervals[index][0])
        # the local op crops alike on both sides; what is left is a view
        cut = max(0, min(before, after))
        if paddings_meet(g, cut, b - a):
            cut = 0
        local_padding[i], local_extra[i] = cut, 0
        if before != cut or after != cut or a == b:
            crops.append((dim, before - cut, b - a))
    window = window_op(mesh, layout, x.dtype, wanted, op=name)
    reason = _why_torch(x, first, bool(wanted))
    strides, dilations = tuple(g.stride for g in spread), tuple(g.dilation for g in spread)
    local = (strides, tuple(local_padding), dilations, True, tuple(local_extra), groups)
    return ConvPlan(
        window,
        local,
        kernel_for(x.block, window.out_shape, tuple(weight.shape), local),
        tuple(crops),
        _out_layout(x, shape, borders),
        layout.sharded_mesh_dims,
        None if reason else Fetched(window, local),
        reason or "transposed",
    )


def _with_block(g: Sliding, window: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return a window up to the end of the block, where that gives no more output cells: so it lies there in one piece.

    Not collective.
    """
    lo, hi = window
    longer = max(hi, block[1])
    alike = lo <= block[0] and (longer - lo - g.reach) // g.stride == (hi - lo - g.reach) // g.stride
    return (lo, longer) if alike else window


def _with_blocks(
    g: Sliding, read: Sequence[tuple[int, int]], at: Sequence[int]
) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
    """Return the windows of all positions, each `_with_block`, and intervals that hold them. Not collective."""
    count = len(read)
    return (
        Each(count, lambda i: _with_block(g, read[i], (at[i], at[i + 1]))),
        Each(count, lambda i: (read[i][0], max(read[i][1], at[i + 1]))),
    )


def _stays(g: Sliding, sizes: Sequence[int], borders: Sequence[int], read: Sequence[tuple[int, int]]) -> bool:
    """Tell whether every rank's block gives its output cells, all of them and no others. Not collective."""
    at = bounds(sizes)
    for i in of_every_kind(sizes, sizes_of(borders), 1, g.stride):
        (a, b), (lo, hi) = at[i : i + 2], read[i]
        if not (lo == a and lo < hi <= b and (b - a - g.reach) // g.stride == (hi - lo - g.reach) // g.stride):
            return False
    return True


def _why_torch(x: ShardTensor, first: int, fetches: bool) -> str:
    """Tell why torch's own operation on the window is used, and not a form; empty where a form is."""
    if not fetches:
        return "no halo"
    if first != 2:
        return "no batch dim"
    if 0 in x.shape:
        return "empty"
    if x.dtype.is_complex:
        return "complex: torch convolves real and imaginary parts"
    if math.prod(x.shape) // x.mesh.size < LARGE_CELLS:
        return "small: a copy costs less"
    return ""


def _convolved(
    plan: ConvPlan,
    windowed: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Convolve the block ``x`` in the form of the plan; ``windowed`` is torch's operation on the window."""
    if autocast_enabled(weight.device.type):
        weight, bias = _autocast(weight, bias)
    if bias is not None and bias.dtype is not x.dtype:
        # the operations below torch's own functions do not look at it
        raise RuntimeError(f"Input type ({x.dtype}) and bias type ({bias.dtype}) should be the same")
    if plan.form is None or in_transform():
        return cropped(windowed(x, weight, bias), plan.crops)
    if traced.recording is not None:
        return cropped(TracedConv.apply(plan.form, x, weight, bias), plan.crops)  # type: ignore[no-untyped-call]
    return cropped(block_conv(plan.form, windowed, x, weight, bias), plan.crops)


def _autocast(first: Tensor, *rest: Tensor | None) -> tuple[Any, ...]:
    """Cast as autocast casts the operands of a convolution. Not collective."""
    operands, device = (first, *rest), first.device.type
    if not autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in operands
    )


def _rule(func: Callable[..., Tensor], ndim: int, plan_of: Callable[..., ConvPlan]) -> Callable[..., ShardTensor]:
    """Return the rule of ``func``; ``geometry`` are the last arguments of ``plan_of``."""
    name = func.__name__

    def rule(input: Any, weight: Any, bias: Any, groups: int, *geometry: Any) -> ShardTensor:
        mesh, x, weight, bias = _operands(input, weight, bias, ndim)
        for i, value in enumerate(geometry):
            # 1, (1, 1) and [1, 1] are one plan
            if type(value) is not tuple or len(value) != ndim:
                geometry = (*geometry[:i], normal(value, ndim), *geometry[i + 1 :])
        key = (name, x.sharding, x.dtype, weight.shape, groups, geometry)
        plan = mesh.plans.get(key)
        if plan is None:
            plan = mesh.plan(key, lambda: plan_of(x, weight, ndim, name, groups, *geometry))
        weight, bias = use(weight, mesh, plan.used), bias if bias is None else use(bias, mesh, plan.used)
        halo = x._halo
        if halo is not None and plan_of is _plan_conv and not in_transform():
            beside = mesh.plans.get((key, halo.key))
            if beside is None:
                beside = mesh.plan((key, halo.key), lambda: _plan_beside(x, weight, ndim, *geometry, plan, halo))
            window = None
            if not isinstance(beside, str):
                saved = weight.requires_grad or x.block.requires_grad
                window = read_beside(x, beside.window, beside.extents, saved=saved)
            if window is not None:
                stride, _, dilation = geometry
                weight, bias = _autocast(weight, bias)
                local = (stride, beside.padding, dilation, False, (0,) * ndim, groups)
                # the window may be wider than that of the plan
                if window.dtype in HALVES and not (kernel := kernel_of(window, weight, local)).is_torch:
                    y = convolved(kernel, local, window, weight, bias)
                else:
                    geometry = (stride, beside.padding, dilation, groups)
                    y = _of_window(func, window, weight, bias, geometry, x.shape)
                return wrap(cropped(y, beside.crops), plan.out, mesh)

        def windowed(local: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            window = apply(plan.window, local)
            if not plan.kernel.is_torch and len(window):
                return convolved(plan.kernel, plan.local, window, weight, bias)
            stride, padding, dilation, transposed, extra, groups = plan.local
            geometry = (extra, groups, dilation) if transposed else (dilation, groups)
            return _of_window(func, window, weight, bias, (stride, padding, *geometry), x.shape)

        return wrap(_convolved(plan, windowed, x.block, weight, bias), plan.out, mesh)

    return rule


def _of_window(
    func: Callable[..., Tensor],
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Sequence[Any],
    shape: Sequence[int],
) -> Tensor:
    """Convolve the window of a tensor of ``shape``: of no samples, torch ends the graph at the first gradient."""
    if len(window) or not shape[0]:
        return func(window, weight, bias, *geometry)
    # of no channels there are none on other ranks either
    one = window.new_zeros([n or int(d != 1) for d, n in enumerate(window.shape)]) + window.sum().to(window.dtype)
    return apart(func(one, weight, bias, *geometry)[:0])


def _conv_rule(func: Callable[..., Tensor], ndim: int) -> Callable[..., ShardTensor]:
    rule = _rule(func, ndim, _plan_conv)

    def conv(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> ShardTensor:
        return rule(input, weight, bias, groups, stride, padding, dilation)

    return conv


def _transposed_rule(func: Callable[..., Tensor], ndim: int) -> Callable[..., ShardTensor]:
    rule = _rule(func, ndim, _plan_transposed)

    def conv_transpose(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> ShardTensor:
        return rule(input, weight, bias, groups, stride, padding, output_padding, dilation)

    return conv_transpose


for _ndim in (1, 2, 3):
    for _func in {getattr(F, f"conv{_ndim}d"), getattr(torch, f"conv{_ndim}d")}:
        implements(_func, sharded="halo")(_conv_rule(getattr(F, f"conv{_ndim}d"), _ndim))
    for _func in {getattr(F, f"conv_transpose{_ndim}d"), getattr(torch, f"conv_transpose{_ndim}d")}:
        implements(_func, sharded="halo")(_transposed_rule(getattr(F, f"conv_transpose{_ndim}d"), _ndim))
