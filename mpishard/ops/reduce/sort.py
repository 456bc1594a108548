"""Sorting and order statistics.

What is sorted needs its dim whole: another is cut in its place, and what has its extent comes back. A few cells by
their rank, as a median, are selected where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.comm import traced
from mpishard.layout import Layout, cut_elsewhere, layout_of, most_cells
from mpishard.layout.remembered import remembered
from mpishard.ops.reduce.min_max import shared
from mpishard.ops.rule.dim import gathered, integer, mapped, normal_dim, on_domain, plain, require_dtype, resized
from mpishard.ops.rule.reduction import Reduced, dim_and_keepdim, reduced
from mpishard.ops.rule.selection import BUCKETS, Lines, ordered_count, selected, smallest, taken, value_at
from mpishard.ops.rule.whole import one_cell, whole, whole_elsewhere
from mpishard.tensor.operand import fitted, moved, resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap

# what a cell's bits cost a selection: reductions of counts, as a rule
_STEPS = 8
# cells that may travel where no other dim has room for those of the dim that is cut
_MOST = 1 << 20


def _resized(layout: Layout, dim: int | None, t: Tensor) -> Layout:
    if dim is None or not layout.ndim:
        return reduced(layout, None).out
    return layout if t.shape[dim] == layout.shape[dim] else _of_extent(layout, dim, t.shape[dim])


@remembered
def _of_extent(layout: Layout, dim: int, n: int) -> Layout:
    shape, sizes = list(layout.shape), list(layout.sizes)
    shape[dim] = n
    if sizes[dim] is not None:
        sizes[dim] = (n,)
    return layout_of(layout.mesh_shape, layout.placements, shape, sizes)


def _without(layout: Layout, dim: int | None, t: Tensor) -> Layout:
    return reduced(layout, dim, t.ndim == layout.ndim).out


def _rule(
    func: Callable[..., Any], position: int, default: int | None, layout_after: Callable[[Layout, Any, Tensor], Layout]
) -> Callable[..., Any]:
    """Return the rule of a function whose ``dim`` is argument ``position`` (not counting the input)."""

    def rule(input: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        """Order cells along a dim. Collective where it is cut."""
        x = resolved(input)
        given = kwargs.get("dim", args[position] if len(args) > position else default)
        before, dim = x.sharding, None if given is None else normal_dim(given, x.ndim)
        if reduced(before, dim).over:
            x = whole_elsewhere(x, tuple(range(x.ndim)) if dim is None else (dim,))
        args = tuple(a.full_tensor() if isinstance(a, ShardTensor) else a for a in args)
        found = func(x.block, *args, **kwargs)

        def result(t: Tensor) -> ShardTensor:
            y = wrap(t, layout_after(x.sharding, dim, t), x.mesh)
            return moved(y, before) if y.sharding.shape == before.shape else y

        return result(found) if isinstance(found, Tensor) else type(found)([result(t) for t in found])

    return rule


for _names, _position, _default, _after in (
    ("sort argsort", 0, -1, _resized),
    ("msort", 99, 0, _resized),
    ("mode", 0, -1, _without),
):
    for _function in spellings(*_names.split()):
        implements(_function, sharded="moves")(_rule(_function, _position, _default, _after))


# -- cells by their rank in order


@remembered
def _stays(layout: Layout, plan: Reduced, n: int) -> bool:
    """Tell whether cells are selected where they lie, or their dims become whole. Not collective.

    ``n`` is how many cells' worth would travel for every line.
    """
    length = plan.count // math.prod(layout.mesh_shape[m] for m in plan.over)
    if n <= length:
        return True
    cells = math.prod(layout.shape) // math.prod(layout.mesh_shape[m] for m in layout.sharded_mesh_dims)
    roomy = 2 * most_cells(cut_elsewhere(layout, plan.dims)) <= 3 * cells
    return not roomy and n * cells <= _MOST * max(1, length)


def _refuse(func: Callable[..., Any], x: ShardTensor, *args: Any) -> Any:
    """Return what torch gives of zeros of the global shape: its error, as a rule. Not collective."""
    return func(x.block.new_zeros(1).expand(x.shape), *args)


def _kthvalue(
    func: Callable[..., Any],
    x: ShardTensor,
    dim: int | None,
    keepdim: bool,
    rank_of: Callable[[Tensor, int], Tensor],
) -> Any:
    """Return the cell of every line that comes ``rank_of`` in order, of how many are no NaN and how many there are.

    Collective over the ranks that hold other cells of the lines.
    """
    plan = reduced(x.sharding, dim, keepdim)
    lines = Lines.of(x, plan)

    def find(cells: Tensor) -> Tensor:
        return selected(cells, rank_of(ordered_count(cells, lines), plan.count)[:, None], lines)

    if dim is None:

        def value_of(t: Tensor) -> Tensor:
            cells = lines.lines(t)
            return value_at(cells, find(cells), lines).reshape((1,) * t.ndim)

        return shared(x, plan, False, value_of)
    found = taken(x, lines, find)
    shape = plan.out.local_shape(x.mesh.coords)
    return getattr(torch.return_types, func.__name__)([wrap(t.reshape(shape), plan.out, x.mesh) for t in found])


def _median_rule(func: Callable[..., Any], rank_of: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    otherwise = _rule(func, 0, None, _without)

    def median(input: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        """Take the cell in the middle. Collective where the dim is cut: counts of cells travel, or the cells."""
        dim, keepdim = dim_and_keepdim(args, kwargs, func, named=True)
        dim, x = None if dim is None else normal_dim(dim, input.ndim), resolved(input)
        plan = reduced(x.sharding, dim)
        if not plan.over:
            return otherwise(x, *args, **kwargs)
        require_dtype(x, func)
        if not plan.count:
            return _refuse(func, x, dim) if dim is not None else wrap(_refuse(func, x), plan.out, x.mesh)
        if not _stays(x.sharding, plan, _STEPS * BUCKETS):
            return otherwise(x, *args, **kwargs)
        return _kthvalue(func, x, dim, keepdim, rank_of)

    return median


# as torch has it, a NaN is the median of a line that has one
for _function in spellings("median"):
    implements(_function, sharded="reduction")(
        _median_rule(torch.median, lambda ordered, n: torch.where(ordered < n, ordered, (n - 1) // 2))
    )
for _function in spellings("nanmedian"):
    implements(_function, sharded="reduction")(
        _median_rule(torch.nanmedian, lambda ordered, _: (ordered - 1).clamp(min=0) // 2)
    )
_kthvalue_whole = _rule(torch.kthvalue, 1, -1, _without)


@implements(*spellings("kthvalue"), sharded="reduction")
def kthvalue(input: ShardTensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Take the k-th smallest cell along a dim. Collective where it is cut: counts of cells travel, or the cells."""
    x, k = resolved(input), integer(k)
    d = normal_dim(dim, x.ndim)
    plan = reduced(x.sharding, d)
    if plan.over:
        require_dtype(x, torch.median)  # of the same dtypes
        if not 1 <= k <= plan.count:
            return _refuse(torch.kthvalue, x, k, d)
        if _stays(x.sharding, plan, _STEPS * BUCKETS):
            return _kthvalue(torch.kthvalue, x, d, keepdim, lambda ordered, _: torch.full_like(ordered, k - 1))
    return _kthvalue_whole(x, k, d, keepdim)


_topk_whole = _rule(torch.topk, 1, -1, _resized)


def _topk_of_two(x: Tensor) -> Any:
    return x.topk(1)


@implements(*spellings("topk"), sharded="reduction")
def topk(input: ShardTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the largest cells along a dim. Collective where it is cut: those of two ranks meet, again and again."""
    x, k = resolved(input), integer(k)
    d = normal_dim(dim, x.ndim)
    plan = reduced(x.sharding, d)
    if plan.over:
        require_dtype(x, _topk_of_two)
        if not 0 <= k <= plan.count:
            return _refuse(torch.topk, x, k, d)
        meetings = x.mesh.group(plan.over).size.bit_length()
        if k < plan.count and _stays(x.sharding, plan, 2 * k * meetings):
            lines = Lines.of(x, plan)
            found = taken(x, lines, lambda cells: smallest(cells, k, lines, largest))
            out = resized(plan.kept, d, k)
            return torch.return_types.topk([wrap(t.movedim(-1, d), out, x.mesh) for t in found])  # type: ignore[attr-defined]
    return _topk_whole(x, k, d, largest, sorted)


def _quantile_rule(func: Callable[..., Tensor]) -> Callable[..., ShardTensor]:

    def quantile(input: Any, q: Any, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> Any:
        """Interpolate between ordered cells. Collective where the dim is cut: counts of cells travel, or the cells."""
        own = range(input.ndim) if dim is None else (normal_dim(dim, input.ndim),)
        _check_fractions(q)
        if isinstance(input, ShardTensor):
            x = resolved(input)
            plan = reduced(x.sharding, None if dim is None else own[0])
            each = 2 * (q.numel() if isinstance(q, Tensor) else 1)
            if plan.over and plan.count and each and _stays(x.sharding, plan, _STEPS * BUCKETS * each):
                return _quantile(func, x, q, plan, (dim, keepdim), **kwargs)
        labels = [None if d in own else d for d in range(input.ndim)]
        rest = [d for i, d in enumerate(labels) if keepdim or i not in own]
        of_q = (None,) * q.ndim if isinstance(q, Tensor) else ()  # one result after the other, along a new dim 0
        return whole(
            lambda x, q: func(x, q, dim, keepdim, **kwargs),
            (input, q),
            (tuple(labels), of_q),
            (*of_q, *rest),
            elsewhere=True,
            spare=one_cell if math.prod(input.shape) else None,
        )

    return quantile


def _check_fractions(q: Any) -> None:
    """Raise what torch does of fractions on the host, also under a dispatch mode, where it does not look."""
    if isinstance(q, Tensor) and traced.recording is None:
        fractions = plain(q).detach()
        if fractions.is_cpu and fractions.is_floating_point() and not bool(((fractions >= 0) & (fractions <= 1)).all()):
            raise RuntimeError("quantile() q values must be in the range [0, 1]")


def _quantile(
    func: Callable[..., Tensor],
    x: ShardTensor,
    q: Any,
    plan: Reduced,
    given: tuple[int | None, bool],
    *,
    interpolation: str = "linear",
) -> Any:
    """Interpolate as torch does, between cells that are selected where they lie. Collective over ``plan.over``."""
    # torch's own errors, of the other arguments and of the shape
    _q = plain(q).detach() if isinstance(q, Tensor) else q
    func(x.block.new_zeros(1), _q, interpolation=interpolation)
    on_domain(func, x, _q, *given)
    lines = Lines.of(x, plan)
    q = gathered(q) if isinstance(q, Tensor) else torch.tensor(q, dtype=x.dtype, device=x.device)
    many, last = q.ndim, plan.count - 1
    q = q.reshape(-1, *(1,) * x.ndim)
    ordered = ordered_count(lines.lines(x.block.detach()), lines).reshape(plan.kept.local_shape(x.mesh.coords))
    ordered = wrap(ordered, plan.kept, x.mesh)
    if func is torch.nanquantile:
        rank = (q * (ordered - 1)).clamp(min=0)
    else:
        rank = (q * last).where(ordered > last, last)
    if interpolation in ("lower", "higher", "nearest"):
        rank = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](rank)
    below = rank.detach().long()
    wanted = [below] if interpolation in ("lower", "higher", "nearest") else [below, rank.detach().ceil().long()]
    out = mapped(plan.kept, (-1, *range(x.ndim)), (q.shape[0], *plan.kept.shape))
    local = torch.cat([fitted(t, x.mesh, out).reshape(q.shape[0], -1) for t in wanted]).T
    values, _ = taken(x, lines, lambda cells: selected(cells, local, lines))
    shape = (len(wanted), *out.local_shape(x.mesh.coords))
    found = [wrap(t, out, x.mesh) for t in values.movedim(-1, 0).reshape(shape)]
    weight = torch.full_like(rank, 0.5) if interpolation == "midpoint" else rank - below
    result = found[0] if len(found) == 1 else torch.lerp(found[0], found[1], weight)
    gone = [d + 1 for d in plan.dims if not given[1]]
    return result.squeeze([*gone] if many else [0, *gone])


for _function in spellings("quantile"):
    implements(_function, sharded="reduction")(_quantile_rule(torch.quantile))
for _function in spellings("nanquantile"):
    implements(_function, sharded="reduction")(_quantile_rule(torch.nanquantile))
