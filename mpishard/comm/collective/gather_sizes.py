"""What ranks hold along their dims, asked of each other, with a check that they agree on all else."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np
import torch
from mpi4py import MPI

from mpishard.comm import guard
from mpishard.comm.disagreement import digest_of
from mpishard.comm.mesh import CartMesh, Group
from mpishard.comm.transport.slot import slot_of
from mpishard.layout import as_block_sizes, repeated

_ROOM = (guard.SLOT_NBYTES - guard.MARK_NBYTES) // 16  # of each number there are two, of 8 bytes


def gather_extents(op: str, shape: torch.Size, dim: int, signature: object, group: Group) -> tuple[int, ...]:
    """Return the ranks' extents along ``dim``, of which ``shape`` has this rank's. Collective over the group.

    ``signature``, and the shape outside ``dim``, must be those of all, and no rank in another call: else `DesyncError`
    on every rank, of ``op``.
    """
    if group.size == 1:
        return (shape[dim],)
    rest = (*shape[:dim], -1, *shape[dim + 1 :])
    if guard.DEBUG:
        guard.check(group.comm, op, rest, signature)
    every = array("q", bytes(8 * group.size))
    with guard.waiting(op, (), group.comm):
        slot_of(group).meet(f"{op}, asks for extents: shape {rest}, {signature}", torch.int64, 8)
        group.comm.Allgather((array("q", (shape[dim],)), MPI.INT64_T), (every, MPI.INT64_T))
    return as_block_sizes(every) if every.count(every[0]) < group.size else repeated(((shape[dim], group.size),))


def asked_extents(
    op: str, shape: torch.Size, dim: int, signature: object, mesh: CartMesh, mesh_dims: tuple[int, ...]
) -> tuple[int, ...]:
    """Do what `gather_extents` does, over some mesh dims (ascending). Collective over them.

    A call that is new begins with the agreement that every new call begins with: an error of another rank is told.
    """
    rest = (*shape[:dim], -1, *shape[dim + 1 :])
    mesh.plan((op, "asks for extents: shape", rest, signature), lambda: True, mesh_dims)
    return gather_extents(op, shape, dim, signature, mesh.group(mesh_dims))


def are_alike(op: str, numbers: Sequence[int], group: Group) -> bool:
    """Tell whether all ranks of a group have the same numbers. Collective over the group, one small reduction.

    Where another rank is in another call, all raise `DesyncError`.
    """
    mark = guard.extreme_mark(crc32(op.encode()))
    if len(numbers) > _ROOM:
        numbers = (digest(list(numbers)),)
    count = len(numbers)
    mine = array("q", (*numbers, *(-n for n in numbers), *(0,) * (2 * (_ROOM - count)), *mark))
    most = array("q", bytes(guard.SLOT_NBYTES))
    with guard.waiting(op, (), group.comm):
        group.comm.Allreduce((mine, MPI.INT64_T), (most, MPI.INT64_T), MPI.MAX)
    if tuple(most[-2:]) != mark:
        raise guard.differing(group.comm, op)
    return not any(a + b for a, b in zip(most[:count], most[count:]))


def gather_blocks(
    op: str, mesh: CartMesh, shape: Sequence[int], mesh_dims: Mapping[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]] | None:
    """Return the block sizes along every dim that is sharded, or None on every rank where blocks do not fit each other.

    Collective over the mesh. The ranks along the mesh dims that shard a dim (``mesh_dims``: array dim -> those,
    ascending, the same on all ranks) tell each other their extents; what others have is compared by a number.
    ``shape`` is of this rank's block, ``op`` a name for the watchdog.
    """
    sizes: dict[int, tuple[int, ...]] = {}
    for dim, dims in mesh_dims.items():
        group = mesh.group(dims)
        every = array("q", bytes(8 * group.size))
        with guard.waiting(op, (), group.comm):
            group.comm.Allgather((array("q", (shape[dim],)), MPI.INT64_T), (every, MPI.INT64_T))
        sizes[dim] = as_block_sizes(every)
    told = [digest(sizes[dim]) if dim in sizes else n for dim, n in enumerate(shape)]
    return sizes if are_alike(op, told, mesh.all_ranks) else None


def first_misfit(
    op: str, mesh: CartMesh, shape: Sequence[int], mesh_dims: Mapping[int, tuple[int, ...]]
) -> tuple[int, int, int, tuple[int, ...]]:
    """Return what does not fit, of blocks of which `gather_blocks` has found that they do not fit each other.

    Collective over the mesh; no rank hears of all others. Parameters as there.

    Returns
    -------
    dim, rank, expected, shape
        A dim, the first rank whose extent there is not that of the first rank at its place, that extent, and its shape.
    """
    comm, expected = mesh.all_ranks.comm, []
    with guard.waiting(op, (), comm):
        for dim, n in enumerate(shape):
            extent = np.array([n], np.int64)
            alike = tuple(m for m in range(mesh.ndim) if m not in mesh_dims.get(dim, ()))
            if alike:
                mesh.group(alike).comm.Bcast([extent, MPI.INT64_T], 0)
            expected.append(int(extent[0]))
        first = np.array([mesh.size if n == e else mesh.rank for n, e in zip(shape, expected)], np.int64)
        lowest = np.empty_like(first)
        comm.Allreduce([first, MPI.INT64_T], [lowest, MPI.INT64_T], MPI.MIN)
        dim = int((lowest < mesh.size).argmax())
        told = np.array([expected[dim], *shape], np.int64)
        comm.Bcast([told, MPI.INT64_T], int(lowest[dim]))
    return dim, int(lowest[dim]), int(told[0]), tuple(told[1:].tolist())


def first_unlike(op: str, numbers: Sequence[int], group: Group) -> tuple[int, list[int], list[int]] | None:
    """Return the first rank whose numbers are not rank 0's, those of rank 0, and its own; or None. Collective."""
    common = np.array(numbers, np.int64)
    with guard.waiting(op, (), group.comm):
        group.comm.Bcast([common, MPI.INT64_T], 0)
        first = np.array([group.size if common.tolist() == [*numbers] else group.rank], np.int64)
        lowest = np.empty_like(first)
        group.comm.Allreduce([first, MPI.INT64_T], [lowest, MPI.INT64_T], MPI.MIN)
        if lowest[0] == group.size:
            return None
        own = np.array(numbers, np.int64)
        group.comm.Bcast([own, MPI.INT64_T], int(lowest[0]))
    return int(lowest[0]), common.tolist(), own.tolist()


def digest(what: object) -> int:
    """Return a number above 0 that tells values apart by their text. Not collective."""
    return digest_of(repr(what))
