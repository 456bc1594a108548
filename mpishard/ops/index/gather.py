"""Gather and scatter: the index goes where the cells are that it names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.use import use
from mpishard.layout import Layout, Partial, Placement, Replicate, Shard, bounds, largest, layout_of, sizes_of
from mpishard.layout.remembered import remembered
from mpishard.ops.index import added
from mpishard.ops.index.advanced import require_long
from mpishard.ops.rule.agreement import agreed, blank, checked, in_range
from mpishard.ops.rule.dim import normal_dim, plain, require_complex_derivative, unsharded, whole_along
from mpishard.ops.rule.empty_block import filled
from mpishard.ops.rule.write import into_plain, prepare_write, require_writable
from mpishard.tensor.operand import mesh_of, moved, on_mesh
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Beside(NamedTuple):
    """Where a gather meets: layouts of tensor and index (and result), and the mesh dims that cut the index alone."""

    source: Layout
    index: Layout
    used: tuple[int, ...]


@remembered
def _plan(source: Layout, index: Layout, dim: int) -> Beside:
    """Plan a gather along ``dim``, which is whole in ``source``.

    The index goes where the cells are; dims of the index that are sharded and whole in the tensor stay so.
    """
    target = _beside(source, index.shape, dim)
    placements, sizes = list(target.placements), list(target.sizes)
    cut, cuts = list(source.placements), list(source.sizes)
    used = []
    for m, p in enumerate(index.placements):
        if type(p) is not Shard or type(placements[m]) is Shard or p.dim in source.shard_dims:
            continue
        if any(type(placements[o]) is Shard for o in index.shard_dims[p.dim]) and sizes[p.dim] is None:
            continue  # not all of its mesh dims are free
        placements[m], sizes[p.dim] = Shard(p.dim), index.sizes[p.dim]
        if p.dim == dim:
            used.append(m)
        else:
            # the tensor may be longer than the index: its last block has the rest
            own = index.sizes[p.dim] or ()
            cut[m], cuts[p.dim] = Shard(p.dim), (*own[:-1], own[-1] + source.shape[p.dim] - index.shape[p.dim])
    return Beside(
        layout_of(source.mesh_shape, cut, source.shape, cuts),
        layout_of(source.mesh_shape, placements, index.shape, sizes),
        tuple(used),
    )


@remembered
def _beside(layout: Layout, shape: tuple[int, ...], dim: int) -> Layout:
    """Return the layout of a tensor of ``shape`` whose cells lie where cells of the same index of ``layout`` do.

    It may be smaller in any dim but ``dim``, which is whole.
    """
    if len(shape) != layout.ndim or any(n > m for d, (n, m) in enumerate(zip(shape, layout.shape)) if d != dim):
        raise RuntimeError(
            f"Size does not match at some dim: index {list(shape)}, self {list(layout.shape)}, dim {dim}"
        )
    sizes = [
        None if cut is None else sizes_of(tuple(min(b, n) for b in bounds(cut))) for cut, n in zip(layout.sizes, shape)
    ]
    placements = [p if type(p) is Shard else Replicate() for p in layout.placements]
    return layout_of(layout.mesh_shape, placements, shape, sizes)


def as_vector(x: Any) -> Any:
    """Return a tensor without dims as one of one cell, a view of it. Not collective."""
    return x if x.ndim else x.view(1)


def _block(x: Any, mesh: Any, layout: Layout) -> Tensor:
    return moved(on_mesh(x, mesh), layout).block


@implements(torch.gather, torch.Tensor.gather, sharded="gathers")
def gather(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> ShardTensor:
    """Pick cells along a dim, one per cell of the index.

    Collective where tensor and index are laid out differently, and where the tensor is sharded along ``dim``: the
    owners of few cells are asked, for many the dim is gathered. The result lies where the index does, cut as the
    tensor is.
    """
    mesh = mesh_of((input, index))
    d = normal_dim(dim, input.ndim)
    if not index.numel():  # of any shape; its result keeps the graph
        where = on_mesh(index, mesh)
        none = torch.gather(on_mesh(input, mesh).block.reshape(-1), 0, where.block.reshape(-1).long())
        return wrap(none.reshape(where.block.shape), where.sharding, mesh)
    if not input.ndim or not index.ndim:
        found: Any = gather(as_vector(input), d, as_vector(index))
        return found if index.ndim else found.reshape(())
    x, where = on_mesh(input, mesh), on_mesh(index, mesh)
    asked = None if sparse_grad else _asked(x, where, d)
    if asked is not None:
        return asked
    x = whole_along(x, (d,))
    plan = _plan(x.sharding, where.sharding, d)
    local, cells = use(moved(x, plan.source).block, mesh, plan.used), moved(where, plan.index).block
    y = agreed(
        lambda cells: torch.gather(local, d, cells, sparse_grad=sparse_grad),
        mesh,
        (plan.source, plan.index),
        cells,
        check=_names_cells(local.shape, d),
    )
    return wrap(y, plan.index, mesh)


class Asked(NamedTuple):
    """How the owners of few cells are asked.

    Attributes
    ----------
    source, index
        Layouts of the tensor, still cut along the dim, and of the index, which all its owners have.
    used
        Mesh dims that cut the index alone.
    parts, out
        Layouts of what each owner has of the result, and of the result.
    """

    source: Layout
    index: Layout
    used: tuple[int, ...]
    parts: Layout
    out: Layout


@remembered
def _plan_asked(source: Layout, index: Layout, dim: int) -> Asked | None:
    """Plan a gather along a dim that is cut; None where the index has more cells than a block of the tensor."""
    over, cut = source.shard_dims.get(dim, ()), source.sizes[dim]
    if cut is None or len(cut) == 1:
        return None
    whole = unsharded(source, (dim,))
    told = unsharded(index, tuple(d for d, by in index.shard_dims.items() if set(by) & set(over)))
    beside = _plan(whole, told, dim)

    def with_owners(layout: Layout, held: Placement, sizes: Any) -> Layout:
        placements = [held if m in over else p for m, p in enumerate(layout.placements)]
        every = [*layout.sizes[:dim], sizes, *layout.sizes[dim + 1 :]]
        return layout_of(layout.mesh_shape, placements, layout.shape, every)

    own = with_owners(beside.source, Shard(dim), cut)
    if _cells(beside.index) > _cells(own):
        return None
    parts = with_owners(beside.index, Partial(), beside.index.sizes[dim])
    return Asked(own, beside.index, beside.used, parts, _plan(whole, index, dim).index)


def _cells(layout: Layout) -> int:
    """Return how many cells the largest block has."""
    return math.prod(n if sizes is None else largest(sizes) for n, sizes in zip(layout.shape, layout.sizes))


def _asked(x: ShardTensor, where: ShardTensor, dim: int) -> ShardTensor | None:
    """Pick few cells along a dim that is cut: each owner has its own, and a sum makes them whole; else None.

    Collective over the mesh dims that cut it.
    """
    plan, mesh = _plan_asked(x.sharding, where.sharding, dim), x.mesh
    if plan is None:
        return None
    block = filled(use(moved(x, plan.source).block, mesh, plan.used))
    lo, hi = plan.source.interval(dim, mesh.coords)
    shape = list(block.shape)
    shape[dim] = x.sharding.shape[dim]
    cells = checked(_names_cells(shape, dim), mesh, (plan.source, plan.index), moved(where, plan.index).block)
    found = torch.gather(block, dim, (cells - lo).clamp(0, max(hi - lo - 1, 0)))
    # of what is added to any number, only -0.0 leaves the sign of a zero as it is
    nothing = found.new_full(
        (), complex(-0.0, -0.0) if found.is_complex() else -0.0 if found.is_floating_point() else 0
    )
    own = torch.where((cells >= lo) & (cells < hi), found, nothing)
    if own.dtype == torch.bool:  # of these there is no sum
        return wrap(moved(wrap(own.byte(), plan.parts, mesh), plan.out).block.bool(), plan.out, mesh)
    return moved(wrap(own, plan.parts, mesh), plan.out)


def _names_cells(shape: Sequence[int], dim: int) -> Callable[[Tensor], object]:
    """Return a check of an index of a dim of a block, which raises torch's own error."""
    return lambda cells: in_range(cells, 0, shape[dim]) or torch.gather(blank(shape, cells), dim, cells)


@implements(torch.take_along_dim, torch.Tensor.take_along_dim, sharded="gathers")
def take_along_dim(input: Any, indices: Any, dim: int | None = None) -> ShardTensor:
    """Pick cells along a dim; the other dims of tensor and index broadcast. As `gather`."""
    if dim is None:
        return gather(input.reshape(-1), 0, indices.reshape(-1))
    require_long("take_along_dim", indices)
    d = normal_dim(dim, input.ndim)
    if input.ndim != indices.ndim:
        raise RuntimeError(
            f"torch.take_along_dim(): input and indices should have the same number of dimensions, but got "
            f"{input.ndim} dimensions for input, and {indices.ndim} dimensions for indices"
        )
    shape = torch.broadcast_shapes(*[(*x.shape[:d], 1, *x.shape[d + 1 :]) for x in (input, indices)])
    sizes = [(*shape[:d], x.shape[d], *shape[d + 1 :]) for x in (input, indices)]
    n = input.shape[d]
    # as torch does it here, alone: any number counts, around the end
    around = indices.expand(sizes[1]) % n if n else indices.expand(sizes[1])
    return gather(input.expand(sizes[0]), d, around)


def _as_source(a: Any) -> Any:
    return as_vector(a) if isinstance(a, Tensor) else a


def _first(src: Any, shape: Sequence[int]) -> Any:
    """Return the cells of a source that an index of ``shape`` reads. Not collective."""
    if src.ndim != len(shape) or any(n > m for n, m in zip(shape, src.shape)):
        raise RuntimeError(f"Expected index {list(shape)} to be no larger than src {list(src.shape)}")
    for d, n in enumerate(shape):
        src = src if src.shape[d] == n else src.narrow(d, 0, n)
    return src


def _scatter_rule(name: str) -> Any:
    in_place = getattr(torch.Tensor, f"{name}_")

    @into_plain(in_place)
    def rule(self: ShardTensor, dim: int, index: Any, *args: Any, **kwargs: Any) -> ShardTensor:
        """Write or add cells along a dim.

        Collective where that dim is sharded: it is gathered, and cut again. Many values for few cells are summed.
        """
        require_writable(self, f"{name}_")
        d = normal_dim(dim, self.ndim)
        prepare_write(self)
        if not index.numel():
            return self
        mesh = mesh_of((self, index, *args, *kwargs.values()))
        if not self.ndim or not index.ndim:
            named = {k: _as_source(a) for k, a in kwargs.items()}
            rule(as_vector(self), d, as_vector(index), *map(_as_source, args), **named)
            return self
        if name == "scatter_add" and added.add(self, d, index, *args, **kwargs, call=_scattered(d)):
            return self
        x = whole_along(self, (d,))
        target = _beside(x.sharding, tuple(index.shape), d)
        cells = _block(index, mesh, target)

        def block(a: Any) -> Any:
            if not isinstance(a, Tensor) or a.ndim == 0:
                return plain(a)
            return _block(_first(a, index.shape), mesh, target)

        own, named = tuple(map(block, args)), {k: block(a) for k, a in kwargs.items()}
        agreed(
            lambda cells: in_place(x.block, d, cells, *own, **named),
            mesh,
            (x.sharding, target),
            cells,
            check=_names_cells(x.block.shape, d),
        )
        if x.block is not self.block:
            self.block.copy_(moved(x, self.sharding).block)
        return self

    return rule


def _scattered(dim: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda zeros, cells, values: zeros.scatter_add(dim, cells, values)


def _cut_as(x: ShardTensor, index: ShardTensor, dim: int) -> ShardTensor:
    """Return a tensor that every rank holds whole in the layout of an index, but for ``dim``. Not collective."""
    layout, whole = index.sharding, normal_dim(dim, x.ndim)
    if layout.ndim != x.ndim:
        return x
    dims = [d for d in layout.shard_dims if d != whole and layout.shape[d] == x.sharding.shape[d]]
    placements = [p if type(p) is Shard and p.dim in dims else Replicate() for p in layout.placements]
    sizes = [s if d in dims else None for d, s in enumerate(layout.sizes)]
    return moved(x, layout_of(layout.mesh_shape, placements, x.sharding.shape, sizes))


def _reduced(x: Tensor, reduce: str) -> Tensor:
    return torch.scatter_reduce(x, 0, torch.zeros(1, dtype=torch.int64, device="cpu"), x[:1], reduce)


_REDUCED = {reduce: partial(_reduced, reduce=reduce) for reduce in ("sum", "prod", "mean", "amax", "amin")}


def _out_of_place(name: str, in_place: Any) -> Any:
    def rule(input: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> ShardTensor:
        if name == "scatter_reduce":
            reduced = _REDUCED.get(kwargs.get("reduce", args[-1] if args else None))
            if reduced is not None:
                require_complex_derivative(reduced, input, *args, *kwargs.values())
        if not isinstance(input, ShardTensor):
            others = [a for a in (index, *args, *kwargs.values()) if isinstance(a, ShardTensor)]
            input = _cut_as(on_mesh(input, mesh_of(others)), others[0], dim)
        return in_place(input.clone(), dim, index, *args, **kwargs)  # type: ignore[no-any-return]

    return rule


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    _rule = _scatter_rule(_name)
    implements(getattr(torch.Tensor, f"{_name}_"), sharded="gathers")(_rule)
    implements(getattr(torch, _name), getattr(torch.Tensor, _name), sharded="gathers")(_out_of_place(_name, _rule))
