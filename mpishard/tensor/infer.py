"""The layout of a tensor, found out from the blocks that the ranks hold, or told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError, MpishardError, described
from mpishard.layout import Layout, as_placements, layout_of

_MAX_NDIM = 16
_DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]


def inferred(local: Tensor, mesh: CartMesh, placements: Any, error: MpishardError | None) -> Layout:
    """Return the layout of blocks whose sizes are gathered; an error of one rank is one of all. Collective."""
    mine = np.full(_MAX_NDIM + 3, -1, np.int64)
    if error is None:
        mine[:3] = local.ndim, _DTYPES.index(local.dtype), local.requires_grad
        mine[3 : 3 + local.ndim] = local.shape
    # placements are checked after this: a rank that fails earlier would leave the others waiting
    everyone = np.empty((mesh.size, len(mine)), np.int64)
    comm = mesh.group(tuple(range(mesh.ndim))).comm
    if guard.DEBUG:
        guard.check(comm, "from_local", None, None)
    with guard.waiting("from_local", (), comm):
        comm.Allgather(mine, everyone)
    if everyone[:, 0].min() < 0:
        guard.agree(comm, error, "from_local")
    given = tuple(placements) if isinstance(placements, Iterable) else (placements,)
    found = _layout_of_blocks(everyone[:, : 3 + local.ndim].tobytes(), mesh.shape, given)
    if isinstance(found, str):
        raise guard.common(LayoutError(found), comm)
    return found


# in a loop over time steps the same blocks come again, and to go through those of thousands of ranks takes a while;
# few are kept: each is known by the shapes of all ranks
@lru_cache(maxsize=32)
def _layout_of_blocks(gathered: bytes, mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> Layout | str:
    """Return the layout of blocks, given ndim, dtype, requires_grad and shape of all, or what does not fit."""
    count = math.prod(mesh_shape)
    everyone = np.frombuffer(gathered, np.int64).reshape(count, -1)

    def unfit(rank: int, expected: object, got: object) -> str:
        return described(
            f"from_local: the block of rank {rank} does not fit the others",
            expected=expected,
            got=got,
            fix="pass blocks of one dtype that agree in every dim that the placements do not shard between them",
        )

    ndim = int(everyone[0, 0])

    def kind(rank: int) -> str:
        n, dtype, requires_grad = everyone[rank, :3]
        return f"{n} dims of {_DTYPES[dtype]}{', with requires_grad' if requires_grad else ''}"

    odd = np.flatnonzero((everyone[:, :3] != everyone[0, :3]).any(1))
    if len(odd):
        return unfit(int(odd[0]), f"{kind(0)}, as rank 0 has", kind(odd[0]))
    shapes = everyone[:, 3:]
    own = as_placements(placements, len(mesh_shape), ndim)
    probe = layout_of(mesh_shape, own, (0,) * ndim)
    shape, sizes = [int(n) for n in shapes[0]], {}
    coords = [np.unravel_index(r, mesh_shape) for r in range(count)]
    for dim in range(ndim):
        seen: dict[int, int] = {}
        for rank in range(count):
            position = probe.index(dim, [int(c) for c in coords[rank]])
            n = int(shapes[rank, dim])
            if seen.setdefault(position, n) != n:
                return unfit(
                    rank, f"{seen[position]} cells along dim {dim}", f"shape {tuple(int(s) for s in shapes[rank])}"
                )
        if dim in probe.shard_dims:
            sizes[dim] = [seen[i] for i in range(len(seen))]
            shape[dim] = sum(sizes[dim])
    return layout_of(mesh_shape, own, shape, sizes)


def told(local: Tensor, mesh: CartMesh, placements: Any, sharding_shapes: Any) -> Layout:
    """Return the layout of blocks by what the caller says of their sizes. Not collective."""
    if sharding_shapes != "chunk" and not isinstance(sharding_shapes, Mapping):
        raise LayoutError(
            described(
                "from_local: unknown sharding_shapes",
                expected="'infer', 'chunk' or {mesh_dim: sizes}",
                got=repr(sharding_shapes),
                fix="use one of them",
            )
        )
    own = as_placements(placements, mesh.ndim, local.ndim)
    probe = layout_of(mesh.shape, own, (0,) * local.ndim)
    shape, sizes = list(local.shape), {}
    for dim, mesh_dims in probe.shard_dims.items():
        count = len(probe.sizes[dim] or ())
        if isinstance(sharding_shapes, str):
            sizes[dim] = (local.shape[dim],) * count
        else:
            given = {mesh.mesh_dim(m): s for m, s in sharding_shapes.items()}
            if mesh_dims[0] not in given:
                raise LayoutError(
                    described(
                        "from_local: sizes of a sharded dim are missing",
                        expected=f"an entry for mesh dim {mesh_dims[0]}",
                        got=sorted(given),
                        fix="give {mesh_dim: sizes} for every mesh dim that shards, or 'infer'",
                    )
                )
            # PhysicsNeMo lists whole shapes
            sizes[dim] = tuple(int(s if isinstance(s, int) else s[dim]) for s in given[mesh_dims[0]])
        shape[dim] = sum(sizes[dim])
    layout = layout_of(mesh.shape, own, shape, sizes)
    expected = layout.local_shape(mesh.coords)
    if expected != tuple(local.shape):
        raise LayoutError(
            described(
                f"from_local: the block of the rank at {mesh.coords} does not fit the given sizes",
                expected=expected,
                got=tuple(local.shape),
                fix="give the sizes of the blocks that the ranks hold, or 'infer'",
            )
        )
    return layout
