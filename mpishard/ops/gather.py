"""Gather and scatter along a whole dim: the index lies with the cells that it names."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.redistribute import redistribute
from mpishard.layout import Layout, Replicate, Shard, bounds, layout_of, sizes_of
from mpishard.ops.dim import CACHED, free_of_shards, require_writable, settled, wrapped
from mpishard.ops.pointwise import no_out
from mpishard.tensor.operand import mesh_of, replicated_layout, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


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
    if isinstance(x, ShardTensor):
        x = resolved(x)
        return redistribute(x._local, mesh, x._layout, layout)
    return redistribute(x, mesh, replicated_layout(mesh, x.shape), layout)


@implements(torch.gather, torch.Tensor.gather)
def gather(input: Any, dim: int, index: Any, *, sparse_grad: bool = False, out: Any = None) -> ShardTensor:
    """Pick cells along a whole dim, one per cell of the index.

    Collective where tensor and index are laid out differently. The layout is that of the tensor, or of the index
    if the tensor is plain.
    """
    if out is not None:
        raise no_out(torch.gather)
    mesh = mesh_of((input, index))
    d = wrapped(dim, input.ndim)
    if isinstance(input, ShardTensor):
        input = free_of_shards("gather", settled(input), (d,))
        target = _beside(input._layout, tuple(index.shape), d)
        local = input._local
    else:
        index = free_of_shards("gather", resolved(index), (d,))
        target = index._layout
        shape = tuple(input.shape)
        if any(n < m for e, (n, m) in enumerate(zip(shape, index.shape)) if e != d):
            raise RuntimeError(f"Size does not match: index {list(index.shape)}, self {list(shape)}, dim {d}")
        for e, n in enumerate(index.shape):
            if e != d and n != shape[e]:
                input = input.narrow(e, 0, n)
        local = _block(input, mesh, layout_of(mesh.shape, target.placements, tuple(input.shape), target.sizes))
    return wrap(torch.gather(local, d, _block(index, mesh, target), sparse_grad=sparse_grad), target, mesh)


@implements(torch.take_along_dim, torch.Tensor.take_along_dim)
def take_along_dim(input: Any, indices: Any, dim: int | None = None, *, out: Any = None) -> ShardTensor:
    """Pick cells along a whole dim; the other dims of tensor and index broadcast. As `gather`."""
    if out is not None:
        raise no_out(torch.take_along_dim)
    if dim is None:
        return gather(input.reshape(-1), 0, indices.reshape(-1))
    d = wrapped(dim, input.ndim)
    shape = torch.broadcast_shapes(*[(*x.shape[:d], 1, *x.shape[d + 1 :]) for x in (input, indices)])
    sizes = [(*shape[:d], x.shape[d], *shape[d + 1 :]) for x in (input, indices)]
    return gather(input.expand(sizes[0]), d, indices.expand(sizes[1]))


def _scatter_rule(name: str) -> Any:
    in_place = getattr(torch.Tensor, f"{name}_")

    def rule(self: ShardTensor, dim: int, index: Any, *args: Any, **kwargs: Any) -> ShardTensor:
        require_writable(self, f"{name}_")
        d = wrapped(dim, self.ndim)
        x = settled(self)
        free_of_shards(name, x, (d,))
        mesh = mesh_of((x, index, *args, *kwargs.values()))
        local_index = _block(index, mesh, _beside(x._layout, tuple(index.shape), d))

        def block(a: Any) -> Any:
            if not isinstance(a, Tensor) or a.ndim == 0:
                return a
            return _block(a, mesh, _beside(x._layout, tuple(a.shape), d))

        in_place(x._local, d, local_index, *map(block, args), **{k: block(a) for k, a in kwargs.items()})
        return x

    return rule


def _out_of_place(name: str, in_place: Any) -> Any:
    def rule(input: Any, dim: int, index: Any, *args: Any, out: Any = None, **kwargs: Any) -> ShardTensor:
        if out is not None:
            raise no_out(getattr(torch, name))
        if not isinstance(input, ShardTensor):
            mesh = mesh_of((index, *args, *kwargs.values()))
            input = wrap(input, replicated_layout(mesh, input.shape), mesh)
        return in_place(input.clone(), dim, index, *args, **kwargs)  # type: ignore[no-any-return]

    return rule


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    _rule = _scatter_rule(_name)
    implements(getattr(torch.Tensor, f"{_name}_"))(_rule)
    implements(getattr(torch, _name), getattr(torch.Tensor, _name))(_out_of_place(_name, _rule))
