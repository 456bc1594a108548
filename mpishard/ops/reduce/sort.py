"""Sorting and order statistics: a dim that is cut is gathered, and what has its extent is cut again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.bucket import use
from mpishard.layout import Layout, Shard, layout_of
from mpishard.ops.rule.dim import whole_along
from mpishard.ops.rule.reduction import normal_dim, reduced
from mpishard.tensor.operand import moved, resolved
from mpishard.tensor.registry import implements, no_out, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _whole(x: ShardTensor, dim: int | None) -> tuple[ShardTensor, int | None]:
    """Return ``x`` with ``dim`` (None: all) whole, and ``dim`` counted from the front. Collective where it is cut."""
    own = None if dim is None else normal_dim(dim, x.ndim)
    if reduced(x._layout, own).over:
        x = whole_along(x, tuple(range(x.ndim)) if own is None else (own,))
    return x, own


def _resized(layout: Layout, dim: int | None, t: Tensor) -> Layout:
    if dim is None or not layout.ndim:
        return reduced(layout, None).out
    shape, sizes = list(layout.shape), list(layout.sizes)
    shape[dim] = t.shape[dim]
    if sizes[dim] is not None:
        sizes[dim] = (shape[dim],)
    return layout_of(layout.mesh_shape, layout.placements, shape, sizes)


def _without(layout: Layout, dim: int | None, t: Tensor) -> Layout:
    return reduced(layout, dim, t.ndim == layout.ndim).out


def _rule(
    func: Callable[..., Any], position: int, default: int | None, layout_after: Callable[[Layout, Any, Tensor], Layout]
) -> Callable[..., Any]:
    """Return the rule of a function whose ``dim`` is argument ``position`` (not counting the input)."""

    def rule(input: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        """Order cells along a dim. Collective where it is cut: it is gathered."""
        if kwargs.get("out") is not None:
            raise no_out(func)
        x = resolved(input)
        given = kwargs.get("dim", args[position] if len(args) > position else default)
        before = x._layout
        x, dim = _whole(x, given)
        args = tuple(a.full_tensor() if isinstance(a, ShardTensor) else a for a in args)
        found = func(x._local, *args, **kwargs)

        def result(t: Tensor) -> ShardTensor:
            y = wrap(t, layout_after(x._layout, dim, t), x._mesh)
            return moved(y, before) if y._layout.shape == before.shape else y

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
def topk(
    input: ShardTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None
) -> Any:
    """Return the largest cells along a dim. Collective where it is cut: the largest of each block are gathered."""
    if out is not None:
        raise no_out(torch.topk)
    x = resolved(input)
    d = normal_dim(dim, x.ndim)
    if not reduced(x._layout, d).over:
        return _topk(x, k, d, largest, sorted)
    sizes = x._layout.sizes[d] or ()
    lo, hi = x._layout.interval(d, x._mesh.coords)
    values, index = x._local.topk(min(max(k, 0), hi - lo), d, largest, False)
    counts = tuple(min(max(k, 0), n) for n in sizes)
    layout = layout_of(
        x._layout.mesh_shape,
        x._layout.placements,
        [sum(counts) if e == d else n for e, n in enumerate(x._layout.shape)],
        [counts if e == d else own for e, own in enumerate(x._layout.sizes)],
    )
    candidates = whole_along(wrap(values, layout, x._mesh), (d,))
    places = whole_along(wrap(index + lo, layout, x._mesh), (d,))
    best = _topk(candidates, k, d, largest, sorted)
    return type(best)([best.values, torch.gather(places, d, best.indices)])


for _function in spellings("msort"):
    implements(_function, sharded="gathers")(_rule(_function, 99, 0, _resized))


def _quantile_rule(func: Callable[..., Tensor]) -> Callable[..., ShardTensor]:

    def quantile(
        input: ShardTensor, q: Any, dim: int | None = None, keepdim: bool = False, **kwargs: Any
    ) -> ShardTensor:
        """Interpolate between ordered cells. Collective where the dim is cut: it is gathered."""
        if kwargs.get("out") is not None:
            raise no_out(func)
        x, own = _whole(resolved(input), dim)
        if isinstance(q, Tensor):
            q = q.full_tensor() if isinstance(q, ShardTensor) else q
            q = use(q, x._mesh, x._layout.sharded_mesh_dims)
        if own is not None and not x._local.numel() and x.shape[own]:
            # torch refuses blocks without rows; made of q, whose gradient is summed over all ranks
            func(x._local.new_zeros(1), q, **kwargs)
            local = x._local.sum(own, keepdim=keepdim)
            if isinstance(q, Tensor):
                local = local + q.reshape((*q.shape, *[1] * (q.ndim and local.ndim)))
        else:
            local = func(x._local, q, own, keepdim, **kwargs)
        out = reduced(x._layout, own, keepdim).out
        if isinstance(q, Tensor) and q.ndim == 1:  # one result after the other, along a new dim 0
            placements = [Shard(p.dim + 1) if type(p) is Shard else p for p in out.placements]
            out = layout_of(out.mesh_shape, placements, local.shape[:1] + torch.Size(out.shape), (None, *out.sizes))
        return wrap(local, out, x._mesh)

    return quantile


for _function in spellings("quantile", "nanquantile"):
    implements(_function, sharded="gathers")(_quantile_rule(_function))
