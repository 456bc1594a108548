"""What reductions are made of: which dims and ranks, the layout of the result, and parts of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.linear import apply, pair, same
from mpishard.autograd.redistribute import start_sum_partial
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, Placement, Replicate, Shard, layout_of, repeated
from mpishard.layout.remembered import KEPT, remembered, table
from mpishard.ops.rule.dim import ints, normal_dim
from mpishard.tensor.shard_tensor import ShardTensor, wrap, wrap_pending

HALVES = (torch.float16, torch.bfloat16)
# ranks whose parts are gathered at once, where several mesh dims have them
_TOGETHER = 64

Part = Callable[[Tensor], Tensor]


class Reduced(NamedTuple):
    """How a reduction over some dims of a layout goes.

    Attributes
    ----------
    dims
        The dims that are reduced, not negative, ascending.
    over
        Mesh dims whose ranks hold different cells of the reduced dims.
    out
        Layout of the result.
    count
        Global cells per result cell.
    kept
        Layout of the result with ``keepdim=True``.
    """

    dims: tuple[int, ...]
    over: tuple[int, ...]
    out: Layout
    count: int  # type: ignore[assignment]
    kept: Layout


_reduced: dict[tuple[Layout, Any, bool], Reduced] = table()


def reduced(layout: Layout, dim: Any, keepdim: bool = False) -> Reduced:
    """Return the plan of a reduction over ``dim`` (an int, several, or None for all), cached. Not collective."""
    if dim is not None and type(dim) is not int:
        dim = ints((dim,))  # 1.0 must not find what 1 made
    key = (layout, dim, keepdim)
    plan = _reduced.get(key)
    if plan is None:
        if len(_reduced) > KEPT:
            _reduced.clear()
        plan = _reduced[key] = _plan(layout, _dims(layout.ndim, dim), keepdim)
    return plan


def _dims(ndim: int, dim: Any) -> tuple[int, ...]:
    every = dim is None or (not isinstance(dim, int) and len(dim) == 0)
    wanted = range(ndim) if every else (dim,) if isinstance(dim, int) else dim
    dims = [normal_dim(d, ndim) for d in wanted]
    if len(set(dims)) != len(dims):
        raise RuntimeError(f"dim {dims[0]} appears multiple times in the list of dims")
    return tuple(sorted(dims)) if ndim else ()


@remembered
def _plan(layout: Layout, dims: tuple[int, ...], keepdim: bool) -> Reduced:
    over = tuple(
        m for m, p in enumerate(layout.placements) if type(p) is Shard and p.dim in dims and layout.mesh_shape[m] > 1
    )
    count = 1
    for d in dims:
        count *= layout.shape[d]
    kept = _without(layout, dims, True)
    return Reduced(dims, over, kept if keepdim else _without(layout, dims, False), count, kept)


def _without(layout: Layout, dims: Sequence[int], keepdim: bool) -> Layout:
    """Return the layout after reducing ``dims``: replicated over the mesh dims that sharded them."""
    left = [d for d in range(layout.ndim) if keepdim or d not in dims]
    new = {d: i for i, d in enumerate(left)}
    placements: list[Placement] = [
        p if type(p) is not Shard else Replicate() if p.dim in dims else Shard(new[p.dim]) for p in layout.placements
    ]
    shape = [1 if d in dims else layout.shape[d] for d in left]
    sizes = [None if d in dims else layout.sizes[d] for d in left]
    return layout_of(layout.mesh_shape, placements, shape, sizes)


def summed(
    local: Tensor,
    mesh: CartMesh,
    over: tuple[int, ...],
    out: Layout,
    then: Callable[[Tensor], Tensor] = same,
    dtype: torch.dtype | None = None,
) -> ShardTensor:
    """Return ``then`` of the sum of the ranks' ``local`` as a ShardTensor of dtype ``dtype``, if that is another.

    Collective over ``over``; the sum travels until somebody asks for the result, so that several travel together.
    ``then`` makes a tensor of a tensor by operations whose gradients keep none.
    """
    if not over:
        return wrap(then(local), out, mesh)
    y, settle = start_sum_partial(local, mesh, over, then)
    if settle is None:
        return wrap(y, out, mesh)
    return wrap_pending(settle, y, dtype or y.dtype, out, mesh)


def dim_and_keepdim(args: Sequence[Any], kwargs: dict[str, Any], func: Any, *, named: bool = False) -> tuple[Any, bool]:
    """Return (dim, keepdim) of a call such as ``f(x, 0, True)`` or ``f(x, dim=0, keepdim=True)``. Not collective.

    ``named``: torch takes no None as ``dim``, and ``keepdim`` with a dim alone.
    """
    given = {**dict(zip(("dim", "keepdim"), args)), **kwargs}
    unnamed = named and bool(given) and given.get("dim") is None
    keepdim = given.pop("keepdim", False)
    dim = given.pop("dim", None)
    if given or len(args) > 2 or not isinstance(keepdim, bool) or unnamed:
        raise TypeError(f"{func.__name__}() received an invalid combination of arguments: {args}, {kwargs}")
    return dim, keepdim


def stacked(x: Tensor, mesh: CartMesh, over: tuple[int, ...]) -> Tensor:
    """Return what the ranks along ``over`` hold, in rank order along a new dim 0. Collective over ``over``.

    Notes
    -----
    Adjoint: each rank takes its own row of the cotangent, which must be the same on every rank.
    """
    key = ("stacked", over)
    step = mesh.kept.get(key)
    if step is None:
        group = mesh.group(over)
        ones = repeated(((1, group.size),))
        step = mesh.keep(
            key,
            lambda: pair(
                lambda t: blocking.all_gather(t.unsqueeze(0), group, 0, ones),
                lambda g: g[group.rank].clone(),
            ),
        )
    return apply(step, x)


def _stages(mesh_shape: tuple[int, ...], over: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Cut mesh dims into runs of few ranks each, or of one dim: never all ranks of a large mesh at once."""
    some: tuple[int, ...] = ()
    for m in over:
        if some and math.prod(mesh_shape[k] for k in (*some, m)) > _TOGETHER:
            yield some
            some = ()
        some = (*some, m)
    if some:
        yield some


def combined(part: Tensor, mesh: CartMesh, over: tuple[int, ...], combine: Part, last: Part | None = None) -> Tensor:
    """Return ``combine`` of what the ranks along ``over`` hold, along a new dim 0. Collective over ``over``.

    Where they are many, of the ranks along some mesh dims, then of these results along the next: ``combine`` is
    associative. The last time it is ``last``, if given.
    """
    stages = [*_stages(mesh.shape, over)]
    for some in stages:
        part = (last if last and some is stages[-1] else combine)(stacked(part, mesh, some))
    return part


def worst(dtype: torch.dtype, largest: bool) -> Any:
    """Return the value that never wins. Not collective."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -torch.inf if largest else torch.inf
    limits = torch.iinfo(dtype)
    return limits.min if largest else limits.max


Local = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def wide_of(x: Tensor) -> Tensor:
    """Return a block in a dtype to add up in: halves as float32. Not collective."""
    if x.dtype == torch.complex32:
        return x.to(torch.complex64)
    return x.float() if x.dtype in HALVES else x


def in_parts(x: ShardTensor, plan: Reduced, keepdim: bool, part: Local) -> Tensor:
    """Reduce the block, gather the ranks' parts as dim 0 of a small tensor, and reduce that in the same way.

    Collective over ``plan.over``.
    """
    return combined(part(x.block, plan.dims, keepdim), x.mesh, plan.over, lambda parts: part(parts, (0,), False))
