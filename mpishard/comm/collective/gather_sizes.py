"""What ranks hold along a dim, asked of each other, with a check that they agree on all else."""

from __future__ import annotations

from array import array
from functools import lru_cache
from zlib import crc32

import torch
from mpi4py import MPI

from mpishard.comm import guard
from mpishard.comm.mesh import Group


def gather_extents(op: str, shape: torch.Size, dim: int, signature: object, group: Group) -> tuple[int, ...]:
    """Return the ranks' extents along ``dim``, after checking that they agree on everything else.

    Collective over the group.

    Parameters
    ----------
    op
        Name for the error.
    shape
        This rank's shape.
    dim
        The dim that may differ.
    signature
        What must agree besides the shape outside ``dim``.
    group
        Ranks that take part.

    Returns
    -------
    tuple of int

    Raises
    ------
    DesyncError
        On every rank, where ranks disagree.
    """
    if group.size == 1:
        return (shape[dim],)
    rest = (*shape[:dim], -1, *shape[dim + 1 :])
    if guard.DEBUG:
        guard.check(group.comm, op, rest, signature)
    mine = array("q", (shape[dim], _digest(rest, signature)))
    every = array("q", bytes(16 * group.size))
    with guard.waiting(op, (), group.comm):
        group.comm.Allgather((mine, MPI.INT64_T), (every, MPI.INT64_T))
    digests = every[1::2]
    if digests.count(digests[0]) != group.size:
        guard.agree(group.comm, None, f"{op}, shape {tuple(shape)} (dim {dim} is free), {signature}")
    return tuple(every[::2])


@lru_cache(maxsize=4096)
def _digest(*parts: object) -> int:
    return crc32(repr(parts).encode())
