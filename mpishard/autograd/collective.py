"""Differentiable collectives on plain tensors, over a mesh or some of its dims.

Each is linear and has its true adjoint in the sum-over-ranks inner product: ``sum_r <f(x)_r, y_r> ==
sum_r <x_r, f*(y)_r>``, which `mpishard.dot_test` checks. So a loss that every rank computes from an
all-reduced value counts once per rank. ``replicated=True`` asks for the other convention, that of
placements: the cotangent of a result that is equal on all ranks is one value, which every rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpishard.autograd.argument import (
    MeshDims,
    are_whole,
    extents,
    fits_group,
    is_plain,
    mesh_dims,
    misfit,
    needs_grad,
    require,
    require_dense_on_all,
    require_mesh,
    require_rank,
    require_switches,
    tensor_dim,
    together,
    whole_number,
)
from mpishard.autograd.linear import Step, apply
from mpishard.autograd.plain import note_reduced
from mpishard.autograd.step import broadcast_step, gather_step, reducer, transpose_step
from mpishard.comm.collective.gather_sizes import asked_extents
from mpishard.comm.interruption import whole
from mpishard.comm.memory.buffer import followed
from mpishard.comm.memory.reduction_type import rule_of
from mpishard.comm.mesh import CartMesh, Group
from mpishard.layout import balanced, key_of


def _called(name: str, x: Tensor, mesh: CartMesh, mesh_dim: MeshDims) -> tuple[tuple[int, ...], Group]:
    """Return the mesh dims of a call, and their ranks; refuse what is no plain tensor. Collective as `together` is."""
    if not is_plain(x) or followed():
        require_dense_on_all(name, x, mesh, mesh_dim)
    require_mesh(name, mesh)
    dims = mesh_dims(mesh, mesh_dim)
    if x.requires_grad:
        note_reduced(x, mesh, dims)
    return dims, mesh.group(dims)


@whole
def all_reduce(
    x: Tensor,
    mesh: CartMesh,
    mesh_dim: MeshDims = None,
    *,
    op: str = "sum",
    replicated: bool = False,
    deterministic: bool | None = None,
) -> Tensor:
    """Reduce tensors of one shape elementwise over the ranks; every rank gets the result.

    Collective over ``mesh_dim``.

    Parameters
    ----------
    x
        Plain tensor of the same shape and dtype on every rank. Half types are accumulated in float32.
    mesh, mesh_dim
        Ranks that take part: those along a mesh dim (name or index) or several, or the whole mesh. Of none, as
        ``x.sharding.sharded_mesh_dims`` may be, the result is that of this rank alone.
    op
        ``"sum"``, ``"avg"``, ``"prod"``, ``"max"`` or ``"min"``. Booleans have ``"max"`` (any) and ``"min"``
        (all). The extrema propagate NaN.
    replicated
        Whether the cotangent of the result is one value held by every rank, as for placements.
    deterministic
        Whether to accumulate in an order that the ranks alone determine: the same bits in every run and with every
        MPI library. None:
        what ``MPISHARD_DETERMINISTIC`` says.

    Returns
    -------
    torch.Tensor
        The same on every rank.

    Raises
    ------
    UnsupportedDtypeError
        The dtype has no such reduction.
    DesyncError
        The ranks' shapes, dtypes or arguments differ (checked when a call is new, and on every call under
        ``MPISHARD_DEBUG=1``).

    Notes
    -----
    Adjoint: of the sum, the all-reduce of the cotangents (``replicated``: the identity); of the average, the
    same divided by the number of ranks. The gradient of an extremum goes to the ranks that attain it, in
    equal shares, as `torch.amax` does within a tensor; that of a product gathers the factors.

    MPI 4.1, section 6.9.6 (All-Reduce).

    Examples
    --------
    >>> total = ms.all_reduce(x.sum(), mesh)
    """
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or followed():
        require_dense_on_all("all_reduce", x, mesh, mesh_dim)
    if type(mesh) is not CartMesh:
        require_mesh("all_reduce", mesh)
    if type(op) is not str:  # MPI's, such as MPI.SUM, cannot be looked up
        with together("all_reduce", mesh, mesh_dims(mesh, mesh_dim)):
            require("all_reduce", "op", op, str, "name one of sum, avg, prod, max, min")
    if replicated.__class__ is not bool or not (deterministic is None or deterministic.__class__ is bool):
        require_switches(
            "all_reduce", mesh, mesh_dims(mesh, mesh_dim), replicated=replicated, deterministic=deterministic
        )
    if type(mesh_dim) is list:
        mesh_dim = tuple(mesh_dim)  # hashable
    recorded = x.requires_grad and torch.is_grad_enabled()
    key = ("all_reduce", mesh_dim, op, replicated, deterministic, x.shape, x.dtype, recorded)
    dims: Sequence[int]
    if mesh_dim is None:
        dims = range(len(mesh.shape))
        run = mesh.plans.get(key) or mesh.plan(
            key, lambda: reducer(mesh.group(tuple(dims)), op, x.dtype, replicated, deterministic)
        )
    elif type(mesh_dim) is tuple and not mesh_dim:  # a number of numpy's would compare itself with each of no dims
        dims, run = (), torch.clone
    else:
        dims = mesh_dims(mesh, mesh_dim)
        run = mesh.plan(key, lambda: reducer(mesh.group(dims), op, x.dtype, replicated, deterministic), dims)
    if x.requires_grad:
        note_reduced(x, mesh, dims)
    return run(x)  # type: ignore[no-any-return]


@whole
def all_gather(
    x: Tensor,
    mesh: CartMesh,
    mesh_dim: MeshDims = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    replicated: bool = False,
    deterministic: bool | None = None,
) -> Tensor:
    """Concatenate the ranks' tensors along ``dim`` in rank order; every rank gets the result.

    Collective over ``mesh_dim``.

    Parameters
    ----------
    x
        Plain tensor; shapes may differ along ``dim`` only.
    mesh, mesh_dim
        Ranks that take part: those along a mesh dim (name or index) or several, or the whole mesh.
    dim
        Tensor dim to concatenate along.
    sizes
        Extent of every rank's tensor along ``dim``. If not given, every call gathers them first (one small
        message), and checks that the ranks' calls fit each other.
    replicated
        Whether the cotangent of the result is one value held by every rank, as for placements.
    deterministic
        Of the sum in the adjoint; see `all_reduce`.

    Returns
    -------
    torch.Tensor
        The same on every rank.

    Raises
    ------
    LayoutError
        ``dim`` or ``sizes`` does not fit.
    DesyncError
        The ranks' calls do not fit each other.

    Notes
    -----
    Adjoint: `reduce_scatter` (``replicated``: each rank's own block).

    MPI 4.1, section 6.7 (Gather-to-all).

    Examples
    --------
    >>> whole = ms.all_gather(rows, mesh, "y", dim=0)
    """
    dims, group = _called("all_gather", x, mesh, mesh_dim)
    with together("all_gather", mesh, dims):
        dim = tensor_dim("all_gather", x, dim)
        given = None if sizes is None else extents("all_gather", "sizes", sizes)
    require_switches("all_gather", mesh, dims, replicated=replicated, deterministic=deterministic)
    call = (dim, replicated, deterministic, x.dtype, needs_grad(x))
    if given is None:
        every = asked_extents("all_gather", x.shape, dim, call, mesh, dims)
        key = ("all_gather", dims, key_of(every), *call)
        return apply(mesh.keep(key, lambda: gather_step(group, every, dim, replicated, deterministic)), x)
    fits = fits_group(given, group, x.shape[dim])
    key = ("all_gather of", dims, key_of(given), *call, fits or x.shape, *x.shape[:dim], *x.shape[dim + 1 :])

    def build() -> Step:
        if not fits or not are_whole(given):
            raise misfit("all_gather", f"{group.size} extents, that of rank {group.rank} {x.shape[dim]}", given)
        return gather_step(group, given, dim, replicated, deterministic)

    return apply(mesh.plan(key, build, dims), x)


@whole
def reduce_scatter(
    x: Tensor,
    mesh: CartMesh,
    mesh_dim: MeshDims = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Sum tensors of one shape over the ranks; every rank gets its block of the sum along ``dim``.

    Collective over ``mesh_dim``.

    Parameters
    ----------
    x
        Plain tensor of the same shape and dtype on every rank. Half types are accumulated in float32.
    mesh, mesh_dim
        Ranks that take part: those along a mesh dim (name or index) or several, or the whole mesh.
    dim
        Tensor dim to cut.
    sizes
        Extent of every rank's block; as even as it goes, larger blocks first, if not given.
    deterministic
        Whether to accumulate in a fixed order; see `all_reduce`.

    Returns
    -------
    torch.Tensor
        This rank's block.

    Raises
    ------
    LayoutError
        ``dim`` or ``sizes`` does not fit.
    UnsupportedDtypeError
        The dtype has no sum.
    DesyncError
        The ranks' calls differ.

    Notes
    -----
    Adjoint: `all_gather`, by both conventions.

    MPI 4.1, section 6.10 (Reduce-Scatter).

    Examples
    --------
    >>> mine = ms.reduce_scatter(contributions, mesh, "y", dim=0)
    """
    dims, group = _called("reduce_scatter", x, mesh, mesh_dim)
    with together("reduce_scatter", mesh, dims):
        dim = tensor_dim("reduce_scatter", x, dim)
        sizes = balanced(x.shape[dim], group.size) if sizes is None else extents("reduce_scatter", "sizes", sizes)
    require_switches("reduce_scatter", mesh, dims, deterministic=deterministic)
    key = ("reduce_scatter", dims, dim, key_of(sizes), deterministic, x.shape, x.dtype, needs_grad(x))

    def build() -> Step:
        rule_of("sum", x.dtype)
        if not fits_group(sizes, group) or not are_whole(sizes) or sum(sizes) != x.shape[dim]:
            raise misfit("reduce_scatter", f"{group.size} extents whose sum is {x.shape[dim]}", sizes)
        return gather_step(group, sizes, dim, False, deterministic).adjoint

    return apply(mesh.plan(key, build, dims), x)


@whole
def all_to_all(
    x: Tensor,
    mesh: CartMesh,
    mesh_dim: MeshDims = None,
    *,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Cut the tensor along one dim, send block r to rank r, and join what comes along another dim.

    Collective over ``mesh_dim``. A field sharded over ``concat_dim`` becomes one sharded over ``split_dim``:
    the transpose of a distributed FFT.

    Parameters
    ----------
    x
        Plain tensor; shapes may differ along ``concat_dim`` only.
    mesh, mesh_dim
        Ranks that take part: those along a mesh dim (name or index) or several, or the whole mesh.
    split_dim, concat_dim
        Tensor dims to cut and to join along; they may be the same.
    split_sizes
        Extent of the block for every rank; as even as it goes, larger blocks first, if not given.
    concat_sizes
        Extent of every rank's tensor along ``concat_dim``. If not given, every call gathers them first (one
        small message), and checks that the ranks' calls fit each other.

    Returns
    -------
    torch.Tensor
        Blocks from all ranks, in rank order.

    Raises
    ------
    LayoutError
        A dim or the sizes do not fit.
    DesyncError
        The ranks' calls do not fit each other.

    Notes
    -----
    Adjoint: the all-to-all back, which is also the inverse; by both conventions.

    MPI 4.1, section 6.8 (All-to-All Scatter/Gather).

    Examples
    --------
    >>> columns = ms.all_to_all(rows, mesh, "y", split_dim=1, concat_dim=0)
    """
    dims, group = _called("all_to_all", x, mesh, mesh_dim)
    with together("all_to_all", mesh, dims):
        split_dim, concat_dim = tensor_dim("all_to_all", x, split_dim), tensor_dim("all_to_all", x, concat_dim)
        split = None if split_sizes is None else tuple(extents("all_to_all", "split_sizes", split_sizes))
        joined = () if concat_sizes is None else extents("all_to_all", "concat_sizes", concat_sizes)
    call = (split_dim, concat_dim, split, x.dtype, needs_grad(x))
    # a rank whose sizes do not fit says so before any data moves: its key differs from the others'
    bad = split is not None and (not fits_group(split, group) or sum(split) != x.shape[split_dim])
    if concat_sizes is None:
        joined = asked_extents("all_to_all", x.shape, concat_dim, (*call, bad), mesh, dims)
    else:
        bad = bad or not fits_group(joined, group, x.shape[concat_dim])
    key = ("all_to_all", dims, key_of(joined), *call, bad, *x.shape[:concat_dim], *x.shape[concat_dim + 1 :])

    def build() -> Step:
        if bad or not are_whole(split or ()) or not (concat_sizes is None or are_whole(joined)):
            what = f"{group.size} extents: split_sizes of {x.shape[split_dim]}, concat_sizes with {x.shape[concat_dim]}"
            raise misfit("all_to_all", what, (split, joined))
        return transpose_step(group, x.shape, x.itemsize, split_dim, concat_dim, split, joined)

    if concat_sizes is None and not bad:
        return apply(mesh.keep(key, build), x)
    return apply(mesh.plan(key, build, dims), x)


@whole
def broadcast(
    x: Tensor,
    mesh: CartMesh,
    mesh_dim: MeshDims = None,
    *,
    root: int = 0,
    replicated: bool = False,
    deterministic: bool | None = None,
) -> Tensor:
    """Copy the root's tensor to every rank.

    Collective over ``mesh_dim``.

    Parameters
    ----------
    x
        Plain tensor of the same shape and dtype on every rank; its values count on the root only. It
        requires a gradient on every rank or on none.
    mesh, mesh_dim
        Ranks that take part: those along a mesh dim (name or index) or several, or the whole mesh.
    root
        Rank among those that take part.
    replicated
        Whether the cotangent of the result is one value held by every rank, as for placements.
    deterministic
        Of the sum in the adjoint; see `all_reduce`.

    Returns
    -------
    torch.Tensor
        The same on every rank.

    Raises
    ------
    MeshError
        There is no such root.
    DesyncError
        The ranks' calls differ.

    Notes
    -----
    Adjoint: the sum of the cotangents on the root (``replicated``: the root's own), zeros elsewhere.

    MPI 4.1, section 6.4 (Broadcast).

    Examples
    --------
    >>> same = ms.broadcast(x, mesh, root=0)
    """
    dims, group = _called("broadcast", x, mesh, mesh_dim)
    if type(root) is not int:
        with together("broadcast", mesh, dims):
            root = whole_number("broadcast", "root", root)
    require_switches("broadcast", mesh, dims, replicated=replicated, deterministic=deterministic)
    key = ("broadcast", dims, root, replicated, deterministic, x.shape, x.dtype, needs_grad(x))

    def build() -> Step:
        require_rank("broadcast: no such root", root, group)
        return broadcast_step(group, root, replicated, deterministic)

    return apply(mesh.plan(key, build, dims), x)
