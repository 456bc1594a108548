"""Adaptive pooling to any output size: windows of varying length, or partial results where few cells come out.

An output that is cut like the input is pooled from fetched windows. An output with fewer cells than there are
blocks along the dim (a single cell above all) is whole on every rank: each reduces its own block, and only the
partial results travel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.graph import apart
from mpishard.autograd.linear import apply
from mpishard.autograd.redistribute import redistribute, sum_partial
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError
from mpishard.layout import Layout, Placement, Replicate, Shard, balanced, layout_of, sizes_of
from mpishard.layout.stencil import Adaptive, pairs, windows
from mpishard.ops.rule.autocast import autocast_enabled
from mpishard.ops.rule.dim import frozen, on_domain, unsharded
from mpishard.ops.rule.reduction import HALVES
from mpishard.ops.window.planes import cropped, on_planes
from mpishard.ops.window.pool import global_indices
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap

_NOWHERE = torch.iinfo(torch.int64).max


class Cuts(NamedTuple):
    """The local cells of every output cell along one dim.

    Attributes
    ----------
    index
        (cells out, longest window): local cells, padded with 0.
    inside
        Which entries of ``index`` count.
    lengths
        Length of each output cell's window in the domain.
    spare
        Which do not, in the flat ``index``; None where all count.
    """

    index: Tensor
    inside: Tensor
    lengths: Tensor
    spare: Tensor | None


class AdaptivePlan(NamedTuple):
    """What one adaptive pooling on one layout does on this rank.

    Attributes
    ----------
    window
        Fetch of the input cells; None where no cells come out.
    local
        Output size of torch's own adaptive pooling on the window, where that gives this rank's block (possibly
        to be cropped); None where windows or partial results differ.
    cuts
        Per spatial dim, where ``local`` is None.
    reduced
        Mesh dims over which partial results are combined.
    crops
        (dim, start, length) of the local result.
    offsets, extents
        Global index of the window's first cell, and global extent, per spatial dim.
    stacked, whole
        Layouts in which partial maxima are gathered, or None.
    out
        Layout of the result.
    """

    window: WindowOp | None
    local: tuple[int, ...] | None
    cuts: tuple[Cuts, ...]
    reduced: tuple[int, ...]
    crops: tuple[tuple[int, int, int], ...]
    offsets: tuple[int, ...]
    extents: tuple[int, ...]
    stacked: Layout | None
    whole: Layout | None
    out: Layout


def _plan(x: ShardTensor, ndim: int, shape: Sequence[int], name: str) -> AdaptivePlan:
    """Plan an adaptive pooling: per dim, what is fetched and who has the result.

    A dim of ``n`` cells becomes one of ``m``; output cell ``j`` is the mean, or the largest, of the input cells::

        [floor(j n / m), ceil((j + 1) n / m))

    Windows overlap unless ``m`` divides ``n``. For ``n = 10``, ``m = 4``, cut in blocks of 6 and 4::

        x       | 0 1 2 3 4 5 | 6 7 8 9 |
        y[0]      0 1 2
        y[1]          2 3 4                   rank 0 has y[0:2), which read [0, 5)
        y[2]                5   6 7
        y[3]                      7 8 9       rank 1 has y[2:4), which read [5, 10): cell 5 is fetched

    Each of the dims is one of three:

    1. whole in the input: whole in the result.
    2. cut, and ``m`` is 1 or less than the blocks: the result is whole on every rank (``reduced``). Each reduces the
       part of every window that lies in its block; parts are summed and divided by the window's length, or, for the
       maximum, stacked along a new dim and gathered (``stacked`` to ``whole``), and the first of the largest wins.
    3. cut otherwise: an output cell lies where the middle of its window does (`Adaptive.follow`), and the windows of
       each rank's cells are fetched.

    Where ``m`` divides ``n`` in every cut dim, and no dim is reduced, a fetched window has ``n / m`` cells for each of
    its ``local`` output cells, and torch's own function of that size finds the same windows. Elsewhere it would find
    others, and cells are taken by index (``cuts``), dim by dim.

    A rank without output cells computes one, and crops it.
    """
    layout, mesh = x.sharding, x.mesh
    first = x.ndim - ndim
    if 0 in shape[first:]:
        kept = unsharded(layout, tuple(range(first, x.ndim)))
        out = layout_of(layout.mesh_shape, kept.placements, shape, kept.sizes)
        return AdaptivePlan(None, None, (), (), (), (), layout.shape[first:], None, None, out)
    placements, sizes = list(layout.placements), list(layout.sizes)
    wanted, crops, reduced, intervals, outputs, regular = [], [], [], [], [], True
    for dim in range(first, x.ndim):
        own, n, n_out = layout.sizes[dim], layout.shape[dim], shape[dim]
        g = Adaptive(n, n_out)
        if own is None:
            intervals.append((0, n))
            outputs.append((0, n_out))
            continue
        if n_out == 1 or n_out < len(own):
            regular = False
            for m in layout.shard_dims[dim]:
                placements[m] = Replicate()
                reduced.append(m)
            sizes[dim] = None
            intervals.append(layout.interval(dim, mesh.coords))
            outputs.append((0, n_out))
            continue
        borders = g.follow(own)
        read = windows(g, borders)
        wanted.append(intervals_wanted(n, dim, read))
        sizes[dim] = sizes_of(borders)
        index = layout.index(dim, mesh.coords)
        intervals.append(read[index])
        outputs.append(pairs(borders)[index])
        if borders[index] == borders[index + 1]:
            crops.append((dim, 0, 0))
        # windows of one length that do not overlap: torch sees the same on a block as on the whole
        regular = regular and n % n_out == 0
    out = layout_of(layout.mesh_shape, placements, shape, sizes)
    cuts: list[Cuts] = []
    if not regular:
        cuts = [
            _cuts(Adaptive(layout.shape[first + i], shape[first + i]), outputs[i], intervals[i], x.device)
            for i in range(ndim)
        ]
    stacked = whole = None
    if reduced:
        count = int(torch.Size(mesh.shape[m] for m in reduced).numel())
        stacks: list[Placement] = [
            Shard(0) if m in reduced else Shard(p.dim + 1) if type(p) is Shard else p for m, p in enumerate(placements)
        ]
        shape_, sizes_ = (count, *shape), [balanced(count, count), *sizes]
        stacked = layout_of(layout.mesh_shape, stacks, shape_, sizes_)
        stacks = [Replicate() if m in reduced else p for m, p in enumerate(stacks)]
        whole = layout_of(layout.mesh_shape, stacks, shape_, [None, *sizes])
    return AdaptivePlan(
        window_op(mesh, layout, x.dtype, wanted, op=name),
        tuple(b - a for a, b in outputs) if regular else None,
        tuple(cuts),
        tuple(sorted(reduced)),
        tuple(crops),
        tuple(lo for lo, _ in intervals),
        layout.shape[first:],
        stacked,
        whole,
        out,
    )


def _cuts(g: Adaptive, cells: tuple[int, int], interval: tuple[int, int], device: torch.device) -> Cuts:
    """Return the cells of ``interval`` (as local indices) that the output ``cells`` read."""
    lo, hi = interval
    starts, stops, lengths = [], [], []
    for j in range(*cells):
        a, b = g.window(j, j + 1)
        lengths.append(b - a)
        starts.append(min(max(a, lo), hi) - lo)
        stops.append(min(max(b, lo), hi) - lo)
    start, stop = torch.tensor(starts, device=device), torch.tensor(stops, device=device)
    own = [b - a for a, b in zip(starts, stops)]
    longest = max(own)
    index = start[:, None] + torch.arange(longest, device=device)
    inside = index < stop[:, None]
    spare = None
    if min(own) < longest:
        # by numbers of the host: a planning mesh's device has none
        beyond = torch.arange(longest, device="cpu") >= torch.tensor(own, device="cpu")[:, None]
        spare = beyond.flatten().nonzero().squeeze(1).to(device)
    return Cuts(index * inside, inside, torch.tensor(lengths, device=device), spare)


def _windows(x: Tensor, dim: int, cuts: Cuts, beyond: float) -> Tensor:
    """Return ``x`` with ``dim`` replaced by (cells out, longest window); ``beyond`` stands behind shorter windows."""
    index = cuts.index
    if index.shape[0] == 1 and index.shape[1] == x.shape[dim]:
        return x.unsqueeze(dim)  # one cell out, which reads the whole block
    cells = x.index_select(dim, index.flatten())
    if cuts.spare is not None:
        # not a product with 0: what does not count may be NaN
        cells.index_fill_(dim, cuts.spare, beyond)
    return cells.unflatten(dim, index.shape)


def _of_no_cells(x: ShardTensor, plan: AdaptivePlan, ndim: int, name: str) -> Tensor:
    """Return the block of a result without cells, in the graph of all ranks."""
    first = x.ndim - ndim
    sums = x.block.to(_result_dtype(name, ndim, x.block)).sum(tuple(range(first, x.ndim)), keepdim=True)
    return apart(sums.expand(*sums.shape[:first], *plan.out.shape[first:]))


# Of one cell torch takes the mean, whose second derivative has another graph than that of the ranks with more cells.
_POOLED: dict[int, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    1: lambda w, size: torch.ops.aten._adaptive_avg_pool2d(w.unsqueeze(-2), (1, *size)).squeeze(-2),
    2: torch.ops.aten._adaptive_avg_pool2d,
    3: torch.ops.aten._adaptive_avg_pool3d,
}


def _along(v: Tensor, dim: int, ndim: int) -> Tensor:
    """Return ``v`` so that it broadcasts along the dims of ``x`` that start with ``dim``."""
    return v.reshape(*v.shape, *[1] * (ndim - dim - v.ndim))


@lru_cache(maxsize=256)
def _probed(
    name: str, ndim: int, dtype: torch.dtype, device: torch.device, autocast: torch.dtype | None
) -> torch.dtype:
    # torch's own choice under autocast, and its own error for a dtype that it does not pool
    del autocast
    y = getattr(F, name)(torch.zeros((1,) * (ndim + 2), dtype=dtype, device=device), (1,) * ndim)
    return (y[0] if isinstance(y, tuple) else y).dtype


def _result_dtype(name: str, ndim: int, x: Tensor) -> torch.dtype:
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if autocast_enabled(device) else None
    return _probed(name, ndim, x.dtype, x.device, autocast)


def _average(x: Tensor, plan: AdaptivePlan, ndim: int, mesh: CartMesh) -> Tensor:
    first = x.ndim - ndim
    for i, cuts in enumerate(plan.cuts):
        dim, index = first + i, cuts.index
        if index.shape[1] == 0:
            # this rank has no cell of any window, but takes part in what follows
            x = x.sum(dim, keepdim=True).expand([len(index) if d == dim else s for d, s in enumerate(x.shape)])
            continue
        x = _windows(x, dim, cuts, 0).sum(dim + 1) / _along(cuts.lengths.to(x.dtype), dim, x.ndim)
    return sum_partial(x, mesh, plan.reduced)


def _maximum(x: Tensor, plan: AdaptivePlan, ndim: int, mesh: CartMesh) -> tuple[Tensor, Tensor]:
    first, at, scale = x.ndim - ndim, None, 1
    # last dim first, and the first of equals each time: the first in row-major order, as torch has it
    for i in reversed(range(ndim)):
        dim, cuts = first + i, plan.cuts[i]
        index, inside = cuts.index, cuts.inside
        if index.shape[1] == 0:
            shape = [len(index) if d == dim else s for d, s in enumerate(x.shape)]
            x = x.sum(dim, keepdim=True).expand(shape) - torch.inf
            at = torch.full(shape, _NOWHERE, device=x.device)
            continue
        windows = _windows(x, dim, cuts, -torch.inf)
        x, chosen = windows.max(dim + 1)
        cell = _along(index + plan.offsets[i], dim, windows.ndim).expand(windows.shape)
        cell = cell.gather(dim + 1, chosen.unsqueeze(dim + 1)).squeeze(dim + 1) * scale
        if at is not None:
            before = _windows(at, dim, cuts, _NOWHERE).gather(dim + 1, chosen.unsqueeze(dim + 1)).squeeze(dim + 1)
            cell = torch.where(before == _NOWHERE, before, before + cell)
        at = cell.masked_fill(~_along(inside.any(1), dim, cell.ndim), _NOWHERE)
        scale *= plan.extents[i]
    assert at is not None
    if plan.stacked is None or plan.whole is None:
        return x, at
    every = redistribute(x.unsqueeze(0), mesh, plan.stacked, plan.whole)
    places = redistribute(at.unsqueeze(0), mesh, plan.stacked, plan.whole)
    best = every.detach().amax(0)
    places = places.masked_fill((every != best) & ~every.isnan(), _NOWHERE)
    chosen = places.argmin(0, keepdim=True)
    return every.gather(0, chosen).squeeze(0), places.gather(0, chosen).squeeze(0)


def _avg_rule(ndim: int) -> Callable[..., ShardTensor]:
    name = f"adaptive_avg_pool{ndim}d"
    func = getattr(F, name)

    def adaptive_avg_pool(input: ShardTensor, output_size: Any) -> ShardTensor:
        x = resolved(input)
        plan = _planned(x, func, name, ndim, output_size)
        if plan.window is None:
            return wrap(_of_no_cells(x, plan, ndim, name), plan.out, x.mesh)
        window, local = apply(plan.window, x.block), plan.local
        if local is not None and max(local) == 1 < max(plan.out.shape[-ndim:]):
            dtype = _result_dtype(name, ndim, window)
            y = on_planes(lambda w: _POOLED[ndim](w.to(dtype), local), window, ndim)
        elif local is not None:
            y = on_planes(lambda w: func(w, local), window, ndim)
        else:
            dtype = _result_dtype(name, ndim, window)
            wide = torch.float32 if window.dtype in HALVES else window.dtype
            y = _average(window.to(wide), plan, ndim, x.mesh).to(dtype)
        return wrap(cropped(y, plan.crops), plan.out, x.mesh)

    return adaptive_avg_pool


def _max_rule(ndim: int, always_indices: bool) -> Callable[..., Any]:
    name = f"adaptive_max_pool{ndim}d"
    func = getattr(F, name)

    def adaptive_max_pool(input: ShardTensor, output_size: Any, return_indices: bool = False) -> Any:
        x = resolved(input)
        plan = _planned(x, func, name, ndim, output_size)
        if plan.window is None:
            values = _of_no_cells(x, plan, ndim, name)
            y = wrap(values, plan.out, x.mesh)
            return (y, wrap(values.detach().long(), plan.out, x.mesh)) if always_indices or return_indices else y
        window = apply(plan.window, x.block)
        if plan.local is not None:
            values, at = on_planes(lambda w: func(w, plan.local, return_indices=True), window, ndim)
            at = global_indices(at, window.shape[-ndim:], plan.offsets, plan.extents)
        else:
            dtype = _result_dtype(name, ndim, window)
            values, at = _maximum(window.to(dtype), plan, ndim, x.mesh)
        values, at = cropped(values, plan.crops), cropped(at, plan.crops)
        y = wrap(values, plan.out, x.mesh)
        return (y, wrap(at, plan.out, x.mesh)) if always_indices or return_indices else y

    return adaptive_max_pool


def _extents(x: ShardTensor, ndim: int, output_size: Any) -> Any:
    """Return the extents of the result as they are part of a key; None: those of the argument."""
    given = frozen(output_size, ndim)
    if type(given) is tuple and len(given) == ndim < x.ndim:
        return tuple(n if own is None else operator.index(own) for n, own in zip(x.sharding.shape[-ndim:], given))
    return given


def _planned(x: ShardTensor, func: Callable[..., Any], name: str, ndim: int, output_size: Any) -> AdaptivePlan:
    key = (name, x.sharding, x.dtype, _extents(x, ndim, output_size))

    def build() -> AdaptivePlan:
        shape = on_domain(func, x, output_size).shape
        if 0 in x.sharding.shape[-ndim:]:
            raise LayoutError(
                f"{name}: no cells to pool",
                expected="at least one cell along every dim",
                got=f"{tuple(x.sharding.shape)} to {tuple(shape)}",
                fix="leave out tensors without cells",
            )
        return _plan(x, ndim, tuple(shape), name)

    return x.mesh.plans.get(key) or x.mesh.plan(key, build)


for _n in (1, 2, 3):
    implements(*spellings(f"adaptive_avg_pool{_n}d"), sharded="halo")(_avg_rule(_n))
    for _func in spellings(f"adaptive_max_pool{_n}d", f"adaptive_max_pool{_n}d_with_indices"):
        # only functional's own takes return_indices; the others always give both
        implements(_func, sharded="halo")(_max_rule(_n, _func is not getattr(F, f"adaptive_max_pool{_n}d")))
