"""Operands of a rule: bring ShardTensors and plain tensors to one layout, by the placement rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, overload

import torch
from torch import Tensor

from mpishard.autograd import redistribute as autograd
from mpishard.autograd.linear import differentiated
from mpishard.autograd.plain import met
from mpishard.autograd.replica import meet
from mpishard.autograd.use import use_beside, use_part
from mpishard.comm.mesh import CartMesh
from mpishard.comm.mesh_argument import two_meshes
from mpishard.layout import Layout, Replicate, align, aligned_to, layout_of, without_partial
from mpishard.layout.remembered import KEPT, table
from mpishard.tensor.notice import gathers, notice_gather
from mpishard.tensor.refusal import refuse_dtensor
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def mesh_of(operands: Iterable[Any]) -> CartMesh:
    """Return the one mesh that all ShardTensors among ``operands`` live on. Not collective.

    Raises
    ------
    MeshError
        They live on different meshes.
    """
    mesh: CartMesh | None = None
    for x in operands:
        if isinstance(x, ShardTensor):
            if mesh is None:
                mesh = x.mesh
            elif x.mesh is not mesh:
                raise two_meshes(mesh, x.mesh)
    assert mesh is not None
    return mesh


def beside(item: Tensor, x: Tensor) -> Tensor:
    """Return a tensor of the host on the GPU that ``x`` lies on, if it lies on one. Not collective."""
    return item.to(x.device) if x.is_cuda and item.is_cpu else item


@overload
def resolved(x: ShardTensor) -> ShardTensor: ...


@overload
def resolved(x: Any) -> Any: ...


def resolved(x: Any) -> Any:
    """Return ``x`` with its Partial dims summed; what is no ShardTensor stays. Collective over them."""
    if not isinstance(x, ShardTensor) or not x.sharding.partial_dims:
        return x
    return moved(x, without_partial(x.sharding))


def moved(x: ShardTensor, target: Layout) -> ShardTensor:
    """Return ``x`` in the layout ``target``. Collective where it differs."""
    if x.sharding is target:
        return x
    return wrap(autograd.redistribute(x.block, x.mesh, x.sharding, target), target, x.mesh)


def shard_on(x: ShardTensor, mesh: CartMesh, target: Layout) -> Tensor:
    """Return this rank's block of ``x`` in the layout ``target``. Collective where it differs.

    Raises
    ------
    MeshError
        It lives on another mesh.
    """
    if x.mesh is not mesh:
        raise two_meshes(mesh, x.mesh)
    return moved(x, target).block


def replicated_layout(mesh: CartMesh, shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor that every rank holds whole. Not collective."""
    return _replicated(mesh.shape, shape if isinstance(shape, torch.Size) else torch.Size(shape))


@lru_cache(maxsize=1024)
def _replicated(mesh_shape: tuple[int, ...], shape: torch.Size) -> Layout:
    return layout_of(mesh_shape, (Replicate(),) * len(mesh_shape), shape)


def on_mesh(x: Tensor, mesh: CartMesh) -> ShardTensor:
    """Return an operand as a ShardTensor without Partial dims; a plain tensor counts as Replicate.

    Collective over Partial dims.

    Raises
    ------
    MeshError
        It lives on another mesh.
    """
    if isinstance(x, ShardTensor):
        if x.mesh is not mesh:
            raise two_meshes(mesh, x.mesh)
        return resolved(x)
    refuse_dtensor(x)
    meet(x, mesh)
    return wrap(met(x, mesh), replicated_layout(mesh, x.shape), mesh)


def blocks_of(operands: Sequence[Any]) -> tuple[CartMesh, list[Tensor], tuple[Layout, ...]]:
    """Return the mesh of operands, their local tensors and their layouts; a plain tensor counts as Replicate.

    Collective over Partial dims: they are summed.
    """
    mesh = mesh_of(operands)
    blocks, layouts = [], []
    for x in operands:
        if isinstance(x, ShardTensor):
            if x.sharding.partial_dims:
                x = resolved(x)
            blocks.append(x.block)
            layouts.append(x.sharding)
        else:
            refuse_dtensor(x)
            meet(x, mesh)
            blocks.append(met(x, mesh))
            layouts.append(replicated_layout(mesh, x.shape))
    return mesh, blocks, tuple(layouts)


def broadcast_layout(operands: Sequence[Any]) -> Layout:
    """Return the layout of a pointwise result of ``operands`` (ShardTensors without Partial, tensors, numbers).

    A mesh dim shards the result as it shards the largest operand that is sharded there (the first of equals); block
    sizes are those of the first in that order with the same mesh dims on that dim. Not collective.
    """
    shape = torch.broadcast_shapes(*[tuple(x.shape) for x in operands if isinstance(x, Tensor)])
    # what is laid out differently moves: rather the smaller one
    layouts = [x.sharding for x in operands if isinstance(x, ShardTensor)]
    layouts.sort(key=lambda layout: -math.prod(layout.shape))
    of = tuple(range(-len(shape), 0))
    return align(layouts, [of[len(of) - o.ndim :] for o in layouts], dict(zip(of, shape))).result(of, shape)


def fitted(x: Any, mesh: CartMesh, out: Layout) -> Any:
    """Return the local tensor of an operand that broadcasts against blocks of ``out``.

    A plain tensor counts as Replicate: it is cut where ``out`` is sharded and the operand has the whole extent,
    and used (see `use`) where it has none. Collective where the operand has another layout.

    Raises
    ------
    MeshError
        It lives on another mesh: of other ranks its block may have the right shape.
    """
    held: Layout | torch.Size
    if isinstance(x, ShardTensor):
        if x.mesh is not mesh:
            raise two_meshes(mesh, x.mesh)
        held, local = x.sharding, x.block
        if held is out:
            return local
    elif isinstance(x, Tensor):
        refuse_dtensor(x)
        meet(x, mesh)
        if x.ndim == 0 and not differentiated(x):
            return x
        held, local = x.shape, met(x, mesh)
    else:
        return x
    source, target, used, gathered = _fits.get((held, out)) or _fit(held, out, mesh)
    if gathered:
        notice_gather(mesh, source, target, local.itemsize)
    return use_part(local, mesh, source, target, used)


_Fit = tuple[Layout, Layout, tuple[int, ...], bool]
_fits: dict[tuple[Layout | torch.Size, Layout], _Fit] = table()


def _fit(held: Layout | torch.Size, out: Layout, mesh: CartMesh) -> _Fit:
    """Return an operand's layout, that in which it meets ``out``, over which mesh dims it is used, and if it gathers.

    ``held`` is its layout, or the shape of a plain tensor.
    """
    source = held if isinstance(held, Layout) else replicated_layout(mesh, held)
    target, used = aligned_to(out, source)
    fit = source, target, used, gathers(source, target)
    if len(_fits) > KEPT:
        _fits.clear()
    _fits[held, out] = fit
    return fit


_broadcasts: dict[tuple[Any, ...], Layout] = table()


def broadcast_of(operands: list[Any]) -> tuple[Any, Layout]:
    """Return the mesh and the result layout of a pointwise operation, cached. Not collective."""
    mesh = mesh_of(operands)
    key = tuple(x.sharding if isinstance(x, ShardTensor) else x.shape for x in operands if isinstance(x, Tensor))
    layout = _broadcasts.get(key)
    if layout is None:
        if len(_broadcasts) > KEPT:
            _broadcasts.clear()
        layout = _broadcasts[key] = broadcast_layout(operands)
    return mesh, layout


_beside: dict[tuple[Layout, torch.Size], tuple[int, ...] | None] = table()


def used_beside(x: Tensor, other: ShardTensor) -> Tensor | None:
    """Return a plain operand of a pointwise operation with ``other``, where that is all that is done to it.

    Not collective. None where a rank has a part of ``x``, or the result is laid out differently from ``other``, which
    has no Partial: `broadcast_of` and `fitted` are for all cases.
    """
    refuse_dtensor(x)
    layout = other.sharding
    key = layout, x.shape
    try:
        mesh_dims = _beside[key]
    except KeyError:
        mesh, out = broadcast_of([other, x])
        source, target, used, _ = _fit(x.shape, layout, mesh) if out is layout else (None, layout, (), False)
        if len(_beside) > KEPT:
            _beside.clear()
        mesh_dims = _beside[key] = used if source is target else None
    if mesh_dims is None:
        return None
    return use_beside(met(x, other.mesh), other.mesh, mesh_dims, layout)
