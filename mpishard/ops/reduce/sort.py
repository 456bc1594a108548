"""Sorting and order statistics: a dim that is cut is gathered, and what has its extent is cut again."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mpishard.layout import Layout, layout_of, repeated, runs_of, total
from mpishard.ops.rule.dim import integer, normal_dim, whole_along
from mpishard.ops.rule.reduction import reduced
from mpishard.ops.rule.whole import one_cell, whole
from mpishard.tensor.operand import moved, resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _whole(x: ShardTensor, dim: int | None) -> tuple[ShardTensor, int | None]:
    """Return ``x`` with ``dim`` (None: all) whole, and ``dim`` counted from the front. Collective where it is cut."""
    own = None if dim is None else normal_dim(dim, x.ndim)
    if reduced(x.sharding, own).over:
        x = whole_along(x, tuple(range(x.ndim)) if own is None else (own,))
    return x, own


def _resized(layout: Layout, dim: int | None, t: Tensor) -> Layout:
    if dim is None or not layout.ndim:
        return reduced(layout, None).out
    return layout if t.shape[dim] == layout.shape[dim] else _of_extent(layout, dim, t.shape[dim])


@lru_cache(maxsize=1024)
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
        """Order cells along a dim. Collective where it is cut: it is gathered."""
        x = resolved(input)
        given = kwargs.get("dim", args[position] if len(args) > position else default)
        before = x.sharding
        x, dim = _whole(x, given)
        args = tuple(a.full_tensor() if isinstance(a, ShardTensor) else a for a in args)
        found = func(x.block, *args, **kwargs)

        def result(t: Tensor) -> ShardTensor:
            y = wrap(t, layout_after(x.sharding, dim, t), x.mesh)
            return moved(y, before) if y.sharding.shape == before.shape else y

        return result(found) if isinstance(found, Tensor) else type(found)([result(t) for t in found])

    return rule


for _names, _position, _default, _after in (
    ("sort argsort", 0, -1, _resized),
    ("kthvalue", 1, -1, _without),
    ("mode", 0, -1, _without),
    ("median nanmedian", 0, None, _without),
):
    for _function in spellings(*_names.split()):
        implements(_function, sharded="gathers")(_rule(_function, _position, _default, _after))
_topk = _rule(torch.topk, 1, -1, _resized)


@implements(*spellings("topk"), sharded="gathers")
def topk(input: ShardTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the largest cells along a dim. Collective where it is cut: the largest of each block are gathered."""
    x, k = resolved(input), integer(k)
    d = normal_dim(dim, x.ndim)
    if not reduced(x.sharding, d).over:
        return _topk(x, k, d, largest, sorted)
    sizes = x.sharding.sizes[d] or ()
    lo, hi = x.sharding.interval(d, x.mesh.coords)
    values, index = x.block.topk(min(max(k, 0), hi - lo), d, largest, False)
    counts = repeated((min(max(k, 0), n), blocks) for n, blocks in runs_of(sizes))
    layout = layout_of(
        x.sharding.mesh_shape,
        x.sharding.placements,
        [total(counts) if e == d else n for e, n in enumerate(x.sharding.shape)],
        [counts if e == d else own for e, own in enumerate(x.sharding.sizes)],
    )
    candidates = whole_along(wrap(values, layout, x.mesh), (d,))
    places = whole_along(wrap(index + lo, layout, x.mesh), (d,))
    best = _topk(candidates, k, d, largest, sorted)
    return type(best)([best.values, torch.gather(places, d, best.indices)])


for _function in spellings("msort"):
    implements(_function, sharded="gathers")(_rule(_function, 99, 0, _resized))


def _quantile_rule(func: Callable[..., Tensor]) -> Callable[..., ShardTensor]:

    def quantile(input: Any, q: Any, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> ShardTensor:
        """Interpolate between ordered cells. Collective where the dim is cut: it is gathered."""
        own = range(input.ndim) if dim is None else (normal_dim(dim, input.ndim),)
        labels = [None if d in own else d for d in range(input.ndim)]
        rest = [d for i, d in enumerate(labels) if keepdim or i not in own]
        of_q = (None,) * q.ndim if isinstance(q, Tensor) else ()  # one result after the other, along a new dim 0
        return whole(  # type: ignore[no-any-return]
            lambda x, q: func(x, q, dim, keepdim, **kwargs),
            (input, q),
            (tuple(labels), of_q),
            (*of_q, *rest),
            spare=one_cell if math.prod(input.shape) else None,
        )

    return quantile


for _function in spellings("quantile", "nanquantile"):
    implements(_function, sharded="gathers")(_quantile_rule(_function))
