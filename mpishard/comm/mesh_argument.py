"""What the arguments of a mesh may be, and meshes of arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpishard.comm.mesh_device import as_device, told_device
from mpishard.comm.setting import first_agreement
from mpishard.errors import MeshError


def kind_of(comm: Any) -> str:
    """Return what a communicator is, for the texts of errors. Not collective."""
    if not isinstance(comm, MPI.Comm):
        return type(comm).__name__
    # not its repr, which holds an address
    return "MPI.COMM_NULL" if comm == MPI.COMM_NULL else f"{type(comm).__name__} of {comm.Get_size()} ranks"


def checked_comm(comm: MPI.Comm | None) -> MPI.Intracomm:
    """Return the communicator that `init_mesh` makes a mesh of. Not collective."""
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Comm) or comm == MPI.COMM_NULL or comm.Is_inter():
        raise MeshError(
            "init_mesh: not an intra-communicator",
            expected="a communicator that this rank belongs to",
            got=kind_of(comm),
            fix="call init_mesh only on the ranks of the communicator",
        )
    return comm  # type: ignore[return-value]


def of_handle(op: str, given: Any, handle: str) -> MPI.Comm:
    """Return the communicator that a host's handle means; one of ctypes' integers and pointers too. Not collective."""
    if handle not in ("fortran", "c"):
        raise MeshError(f"{op}: unknown handle kind", expected="'fortran' or 'c'", got=handle, fix="name one")
    try:
        number = operator.index(getattr(given, "value", given))
        comm = MPI.Comm.f2py(number) if handle == "fortran" else MPI.Comm.fromhandle(number)
        if comm != MPI.COMM_NULL:
            comm.Is_inter()  # MPI's own look at the handle
    except (TypeError, OverflowError, MPI.Exception):
        raise MeshError(
            f"{op}: not an intra-communicator",
            expected="an mpi4py communicator that this rank belongs to, or the integer handle of one",
            got=given if isinstance(given, int) else kind_of(given),
            fix="call it on the ranks of the communicator; in Fortran pass comm%MPI_VAL, in C MPI_Comm_c2f(comm), "
            "or comm itself with handle='c'",
        ) from None
    return comm


def checked_cart(comm: MPI.Comm | int, handle: str) -> MPI.Cartcomm:
    """Return the communicator that `CartMesh.from_comm` adopts, which may be given by its handle. Not collective."""
    if not isinstance(comm, MPI.Comm):
        comm = of_handle("from_comm", comm, handle)
    if comm == MPI.COMM_NULL or comm.Get_topology() != MPI.CART or MPI.Cartcomm(comm).Get_dim() == 0:
        raise MeshError(
            "from_comm: not a Cartesian communicator",
            expected="a communicator made by MPI_Cart_create (or a handle of one), of at least one dim",
            got=kind_of(comm),
            fix="use mpishard.init_mesh(shape, names, comm=comm), which makes the topology",
        )
    return comm  # type: ignore[return-value]


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


def listed(given: Any) -> tuple[Any, ...]:
    """Return what is given one by one, or one thing alone, which may be a text. Not collective."""
    return (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)


def checked_periods(periodic: bool | Sequence[bool] | None, ndim: int, what: str) -> tuple[bool, ...]:
    """Return one flag per dim. Not collective."""
    flags = listed(False if periodic is None else periodic)
    if not isinstance(periodic, Iterable):
        flags *= ndim
    # names of dims would all be true
    if len(flags) != ndim or not all(isinstance(f, (Integral, np.bool_)) for f in flags):
        raise MeshError(
            f"{what}: periodic does not fit the mesh",
            expected=f"{ndim} flags or one for all",
            got=periodic,
            fix="give one flag per mesh dim",
        )
    return tuple(map(bool, flags))


def checked_names(names: Sequence[str] | None, ndim: int, what: str) -> tuple[str, ...]:
    """Return one name per dim. Not collective."""
    if names is None:
        return tuple(f"dim{i}" for i in range(ndim))
    names = listed(names)
    if len(names) != ndim or len(set(names)) != ndim or not all(isinstance(n, str) for n in names):
        raise MeshError(
            f"{what}: names do not fit the mesh",
            expected=f"{ndim} different names",
            got=names,
            fix="give one name per mesh dim",
        )
    return names


def two_meshes(one: Any, other: Any) -> MeshError:
    """Return the error of operands that live on different meshes. Not collective."""
    return MeshError(
        "operands live on different meshes",
        expected=f"all on {one.outline}",
        got=f"another one: {other.outline}",
        fix="make every tensor of an operation on the same CartMesh object",
    )


def checked_coords(coords: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return coordinates if a rank has them. Not collective."""
    given = tuple(coords) if isinstance(coords, Iterable) else ()
    inside = (isinstance(at, (int, Integral)) and 0 <= at < n for at, n in zip(given, shape))
    if len(given) == len(shape) and all(inside):
        return given
    raise MeshError(
        "no rank at these coordinates",
        expected=f"an integer per mesh dim, from 0 to below {tuple(shape)}",
        got=coords,
        fix="mesh.neighbour(dim, displacement) counts around periodic dims",
    )


def checked_displacement(displacement: int) -> int:
    """Return a number of steps along a mesh dim. Not collective."""
    if not isinstance(displacement, (int, Integral)):
        raise MeshError(
            "no displacement along a mesh dim", expected="an integer", got=repr(displacement), fix="count whole ranks"
        )
    return int(displacement)


def no_mesh(call: str, given: Any) -> MeshError:
    """Return the error of who gives something else for a mesh. Not collective."""
    return MeshError(
        f"{call}: mesh= is no mesh",
        expected="a CartMesh",
        got=type(given).__name__,
        fix="make one with mpishard.init_mesh",
    )


def agreed(
    cart: MPI.Intracomm, given: Sequence[str] | None, device: torch.device | str | None
) -> tuple[tuple[str, ...], torch.device | None]:
    """Return names and device of a mesh that adopts ``cart``. Collective."""
    error: Exception | None = None
    names: tuple[str, ...] = ()
    on: torch.device | None = None
    try:
        names, on = checked_names(given, MPI.Cartcomm(cart).Get_dim(), "from_comm"), as_device(device)
    except Exception as e:  # noqa: BLE001 (Python's too, of other kinds of arguments)
        error = e
    first_agreement(cart, error, f"from_comm{names}{told_device(on)}")
    return names, on
