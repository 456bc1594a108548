"""What the arguments of a mesh may be."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from mpi4py import MPI

from mpishard.errors import MeshError


def kind_of(comm: Any) -> str:
    """Return what a communicator is, for the texts of errors. Not collective."""
    if not isinstance(comm, MPI.Comm):
        return type(comm).__name__
    # not its repr, which holds an address
    return "MPI.COMM_NULL" if comm == MPI.COMM_NULL else f"{type(comm).__name__} of {comm.Get_size()} ranks"


def checked_extents(shape: Sequence[int] | int) -> tuple[int, ...]:
    """Return the extents as integers. Not collective."""
    try:
        return tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        raise MeshError(
            "init_mesh: extents that are not integers", expected="integers", got=shape, fix="give integers"
        ) from None


def inferred(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the extents with the missing ones inferred. Not collective."""
    known = math.prod(s for s in shape if s != -1)
    valid = shape and all(s > 0 or s == -1 for s in shape)
    if valid and known and size % known == 0 and (-1 in shape or known == size):
        return tuple(MPI.Compute_dims(size, [0 if s == -1 else s for s in shape]))
    raise MeshError(
        "init_mesh: the mesh shape does not fit the number of ranks",
        expected=f"extents > 0 (or -1) whose product is, or divides where there is a -1, {size} ranks",
        got=f"{shape} (product of the given extents: {known})",
        fix="change the shape, put -1 for an extent to infer, or start another number of ranks",
    )


def checked_periods(periodic: bool | Sequence[bool], ndim: int) -> tuple[bool, ...]:
    """Return one flag per dim. Not collective."""
    periods = tuple(map(bool, periodic)) if isinstance(periodic, Sequence) else (bool(periodic),) * ndim
    if len(periods) != ndim:
        raise MeshError(
            "init_mesh: periodic does not fit the shape",
            expected=f"{ndim} flags or one for all",
            got=periods,
            fix="give one flag per mesh dim",
        )
    return periods


def checked_names(names: Sequence[str] | None, ndim: int, what: str) -> tuple[str, ...]:
    """Return one name per dim. Not collective."""
    if names is None:
        return tuple(f"dim{i}" for i in range(ndim))
    names = (names,) if isinstance(names, str) else tuple(names)
    if len(names) != ndim or len(set(names)) != ndim or not all(isinstance(n, str) for n in names):
        raise MeshError(
            f"{what}: names do not fit the mesh",
            expected=f"{ndim} different names",
            got=names,
            fix="give one name per mesh dim",
        )
    return names
