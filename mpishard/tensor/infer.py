"""The layout of a tensor, found out from the blocks that the ranks hold, or told."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.argument import together
from mpishard.comm import guard
from mpishard.comm.collective.gather_sizes import are_alike, digest, first_misfit, first_unlike, gather_blocks
from mpishard.comm.mesh import CartMesh, Group
from mpishard.errors import LayoutError, MpishardError, described
from mpishard.layout import Layout, as_placements, bounds, layout_of, repeated
from mpishard.tensor.foreign import shared

# what else a caller says that is wrong of a layout
Misfit = Callable[[Layout], MpishardError | None]
_DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]


def inferred(
    local: Tensor, mesh: CartMesh, placements: Any, error: MpishardError | None, misfit: Misfit
) -> tuple[Layout, bool]:
    """Return the layout of blocks whose sizes are gathered, and whether any is cut out of a larger array, or turned.

    Collective; an error of one rank is one of all, as is what ``misfit`` says of the layout.

    In a loop over time steps the same blocks come again, and one reduction tells all ranks so.
    """
    given = tuple(placements) if isinstance(placements, Iterable) else (placements,)
    try:
        hash(given)
    except TypeError:
        given = tuple(map(repr, given))  # no placements: refused below, on every rank
    group = mesh.all_ranks
    if guard.DEBUG:
        guard.check(group.comm, "from_local", None, None)
    kind = () if error else (local.ndim, _DTYPES.index(local.dtype), local.requires_grad)
    dense = error is not None or local.is_contiguous()
    key = ("from_local", kind, None if error else local.shape, given, dense)
    # a number of the last layout that such a block was part of, and of what it was, and that layout
    last: list[Any] = mesh.keep(key, lambda: [0, None])
    known = 0 if last[0] and misfit(last[1][0]) else last[0]
    if are_alike("from_local", (known,), group) and known:
        return last[1]  # type: ignore[no-any-return]
    layout = _found(local, mesh, given, kind, group)
    if layout is None:
        guard.agree(group.comm, error, "from_local")
        raise guard.common(LayoutError(_misfit(local, mesh, given, kind, group)), group.comm)
    guard.agree(group.comm, misfit(layout), "from_local")
    gapped = not are_alike("from_local", (dense,), group) or not dense
    last[:] = digest((kind, layout, gapped)), (layout, gapped)
    return layout, gapped


def _found(
    local: Tensor, mesh: CartMesh, placements: tuple[Any, ...], kind: tuple[Any, ...], group: Group
) -> Layout | None:
    """Return the layout of blocks, or None on every rank where they do not fit each other. Collective.

    Raises
    ------
    LayoutError
        The placements, which are the same on every rank, do not fit the mesh or the blocks.
    """
    # before ranks along some mesh dims meet: those of others might go another way
    if not are_alike("from_local", (len(kind), digest((kind, placements))), group) or not kind:
        return None
    own = as_placements(placements, mesh.ndim, local.ndim)
    probe = layout_of(mesh.shape, own, (0,) * local.ndim)
    sizes = gather_blocks("from_local", mesh, local.shape, probe.shard_dims)
    if sizes is None:
        return None
    shape = [bounds(sizes[d])[-1] if d in sizes else n for d, n in enumerate(local.shape)]
    return layout_of(mesh.shape, own, shape, sizes)


def _misfit(local: Tensor, mesh: CartMesh, placements: tuple[Any, ...], kind: tuple[Any, ...], group: Group) -> str:
    """Return what does not fit, of blocks that do not. Collective."""

    def unfit(rank: int, expected: object, got: object) -> str:
        return described(
            f"from_local: the block of rank {rank} does not fit the others",
            expected=expected,
            got=got,
            fix="pass blocks of one dtype that agree in every dim that the placements do not shard between them",
        )

    def said(ndim: int, dtype: int, requires_grad: int) -> str:
        return f"{ndim} dims of {_DTYPES[dtype]}{', with requires_grad' if requires_grad else ''}"

    unlike = first_unlike("from_local", kind, group)
    if unlike is not None:
        rank, first, other = unlike
        return unfit(rank, f"{said(*first)}, as rank 0 has", said(*other))
    unlike = first_unlike("from_local", (digest(placements),), group)
    if unlike is not None:
        return unfit(unlike[0], "the placements that rank 0 gives", "others")
    probe = layout_of(mesh.shape, as_placements(placements, mesh.ndim, local.ndim), (0,) * local.ndim)
    dim, rank, expected, shape = first_misfit("from_local", mesh, local.shape, probe.shard_dims)
    return unfit(rank, f"{expected} cells along dim {dim}", f"shape {shape}")


def unknown(sharding_shapes: Any) -> LayoutError:
    """Return the error of who says of the sizes what nobody understands. Not collective."""
    return LayoutError(
        "from_local: unknown sharding_shapes",
        expected="'infer', 'chunk' or {mesh_dim: sizes}",
        got=repr(sharding_shapes),
        fix="use one of them",
    )


def told(local: Tensor, mesh: CartMesh, placements: Any, sharding_shapes: Any, misfit: Misfit) -> tuple[Tensor, Layout]:
    """Return this rank's block, and the layout of all by what the caller says of their sizes.

    Collective the first time that a layout occurs: ranks that were told different ones would compute on, each on a
    tensor of its own.
    """
    with together("from_local", mesh):
        local = shared("from_local", local, mesh)
        layout = _told(local, mesh, placements, sharding_shapes)
        if error := misfit(layout):
            raise error
    return local, mesh.plan(("from_local", layout, local.dtype, local.requires_grad), lambda: layout)


def _told(local: Tensor, mesh: CartMesh, placements: Any, sharding_shapes: Any) -> Layout:
    own = as_placements(placements, mesh.ndim, local.ndim)
    # of one rank, for which mesh dims shard each dim: sizes of all ranks would be made for nothing
    probe = layout_of((1,) * mesh.ndim, own, (0,) * local.ndim)
    shape, sizes = list(local.shape), {}
    for dim, mesh_dims in probe.shard_dims.items():
        if isinstance(sharding_shapes, str):
            count = math.prod(mesh.shape[m] for m in mesh_dims)
            sizes[dim], shape[dim] = repeated(((local.shape[dim], count),)), local.shape[dim] * count
        else:
            given = {mesh.mesh_dim(m): s for m, s in sharding_shapes.items()}
            if mesh_dims[0] not in given:
                raise LayoutError(
                    "from_local: sizes of a sharded dim are missing",
                    expected=f"an entry for mesh dim {mesh_dims[0]}",
                    got=sorted(given),
                    fix="give {mesh_dim: sizes} for every mesh dim that shards, or 'infer'",
                )
            sizes[dim] = _told_sizes(given[mesh_dims[0]], dim)
            shape[dim] = sum(sizes[dim])
    layout = layout_of(mesh.shape, own, shape, sizes)
    expected = layout.local_shape(mesh.coords)
    if expected != tuple(local.shape):
        raise LayoutError(
            f"from_local: the block of the rank at {mesh.coords} does not fit the given sizes",
            expected=expected,
            got=tuple(local.shape),
            fix="give the sizes of the blocks that the ranks hold, or 'infer'",
        )
    return layout


def _told_sizes(given: Any, dim: int) -> tuple[int, ...]:
    try:
        # numbers, numpy's and torch's too; PhysicsNeMo lists whole shapes
        return tuple(operator.index(s[dim] if len(np.shape(s)) else s) for s in given)
    except (TypeError, ValueError, IndexError):
        raise LayoutError(
            f"from_local: sizes along dim {dim} are of another kind",
            expected="an integer, or a whole shape, for each block",
            got=given,
            fix="give {mesh_dim: sizes}, or 'infer'",
        ) from None
