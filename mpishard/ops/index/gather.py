"""Gather and scatter: the index goes where the cells are that it names."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.bucket import use
from mpishard.layout import Layout, Replicate, Shard, bounds, layout_of, sizes_of
from mpishard.ops.rule.dim import CACHED, into_plain, require_writable, settle, whole_along, wrapped
from mpishard.tensor.operand import mesh_of, moved, on_mesh
from mpishard.tensor.registry import implements, no_out
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Beside(NamedTuple):
    """Where a gather meets: layouts of tensor and index (and result), and the mesh dims that cut the index alone."""

    source: Layout
    index: Layout
    used: tuple[int, ...]


@lru_cache(maxsize=CACHED)
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


@lru_cache(maxsize=CACHED)
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


def _block(x: Any, mesh: Any, layout: Layout) -> Tensor:
    return moved(on_mesh(x, mesh), layout)._local


@implements(torch.gather, torch.Tensor.gather, sharded="gathers")
def gather(input: Any, dim: int, index: Any, *, sparse_grad: bool = False, out: Any = None) -> ShardTensor:
    """Pick cells along a dim, one per cell of the index.

    Collective where tensor and index are laid out differently, and where the tensor is sharded along ``dim``, which
    is then gathered. The result lies where the index does, cut as the tensor is.
    """
    if out is not None:
        raise no_out(torch.gather)
    mesh = mesh_of((input, index))
    d = wrapped(dim, input.ndim)
    x, where = whole_along(on_mesh(input, mesh), (d,)), on_mesh(index, mesh)
    plan = _plan(x._layout, where._layout, d)
    local = use(moved(x, plan.source)._local, mesh, plan.used)
    y = torch.gather(local, d, moved(where, plan.index)._local, sparse_grad=sparse_grad)
    return wrap(y, plan.index, mesh)


@implements(torch.take_along_dim, torch.Tensor.take_along_dim, sharded="gathers")
def take_along_dim(input: Any, indices: Any, dim: int | None = None, *, out: Any = None) -> ShardTensor:
    """Pick cells along a dim; the other dims of tensor and index broadcast. As `gather`."""
    if out is not None:
        raise no_out(torch.take_along_dim)
    if dim is None:
        return gather(input.reshape(-1), 0, indices.reshape(-1))
    d = wrapped(dim, input.ndim)
    if input.ndim != indices.ndim:
        raise RuntimeError(
            f"torch.take_along_dim(): input and indices should have the same number of dimensions, but got "
            f"{input.ndim} dimensions for input, and {indices.ndim} dimensions for indices"
        )
    shape = torch.broadcast_shapes(*[(*x.shape[:d], 1, *x.shape[d + 1 :]) for x in (input, indices)])
    sizes = [(*shape[:d], x.shape[d], *shape[d + 1 :]) for x in (input, indices)]
    return gather(input.expand(sizes[0]), d, indices.expand(sizes[1]))


def _scatter_rule(name: str) -> Any:
    in_place = getattr(torch.Tensor, f"{name}_")

    @into_plain(in_place)
    def rule(self: ShardTensor, dim: int, index: Any, *args: Any, **kwargs: Any) -> ShardTensor:
        """Write or add cells along a dim. Collective where that dim is sharded: it is gathered, and cut again."""
        require_writable(self, f"{name}_")
        d = wrapped(dim, self.ndim)
        settle(self)
        mesh = mesh_of((self, index, *args, *kwargs.values()))
        x = whole_along(self, (d,))
        local_index = _block(index, mesh, _beside(x._layout, tuple(index.shape), d))

        def block(a: Any) -> Any:
            if not isinstance(a, Tensor) or a.ndim == 0:
                return a
            return _block(a, mesh, _beside(x._layout, tuple(a.shape), d))

        in_place(x._local, d, local_index, *map(block, args), **{k: block(a) for k, a in kwargs.items()})
        if x._local is not self._local:
            self._local.copy_(moved(x, self._layout)._local)
        return self

    return rule


def _cut_as(x: ShardTensor, index: ShardTensor, dim: int) -> ShardTensor:
    """Return a tensor that every rank holds whole in the layout of an index, but for ``dim``. Not collective."""
    layout, whole = index._layout, wrapped(dim, x.ndim)
    if layout.ndim != x.ndim:
        return x
    dims = [d for d in layout.shard_dims if d != whole and layout.shape[d] == x._layout.shape[d]]
    placements = [p if type(p) is Shard and p.dim in dims else Replicate() for p in layout.placements]
    sizes = [s if d in dims else None for d, s in enumerate(layout.sizes)]
    return moved(x, layout_of(layout.mesh_shape, placements, x._layout.shape, sizes))


def _out_of_place(name: str, in_place: Any) -> Any:
    def rule(input: Any, dim: int, index: Any, *args: Any, out: Any = None, **kwargs: Any) -> ShardTensor:
        if out is not None:
            raise no_out(getattr(torch, name))
        if not isinstance(input, ShardTensor):
            others = [a for a in (index, *args, *kwargs.values()) if isinstance(a, ShardTensor)]
            input = _cut_as(on_mesh(input, mesh_of(others)), others[0], dim)
        return in_place(input.clone(), dim, index, *args, **kwargs)  # type: ignore[no-any-return]

    return rule


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    _rule = _scatter_rule(_name)
    implements(getattr(torch.Tensor, f"{_name}_"), sharded="gathers")(_rule)
    implements(getattr(torch, _name), getattr(torch.Tensor, _name), sharded="gathers")(_out_of_place(_name, _rule))
