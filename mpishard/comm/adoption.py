"""A simulation's own communicator and decomposition, taken over as a mesh; what its ranks must agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpishard.comm import guard
from mpishard.comm.exit import require_mpi
from mpishard.comm.halo.channel import channel_of
from mpishard.comm.lifetime import duplicated, made
from mpishard.comm.mesh import CartMesh
from mpishard.comm.mesh_argument import checked_names, checked_periods, of_handle
from mpishard.comm.mesh_device import as_device
from mpishard.comm.setting import first_agreement
from mpishard.errors import MeshError, MpishardError
from mpishard.layout.partition import rank_of

Periodic = bool | Sequence[bool] | None


def adopted_mesh(
    comm: Any,
    names: Sequence[str],
    *,
    periodic: Periodic = None,
    grid: Sequence[int] | None = None,
    coords: Sequence[int] | None = None,
    handle: str = "fortran",
    device: torch.device | str | None = None,
    error: Exception | None = None,
) -> CartMesh:
    """Return a mesh over the ranks of a host program's communicator, placed as the host has placed them.

    Collective over ``comm``, which is duplicated and otherwise left alone.

    Parameters
    ----------
    comm
        A communicator, with or without Cartesian topology; its handle as an integer; or None for this process alone.
    names
        One per mesh dim.
    periodic, grid, coords
        Of the host's decomposition; ranks per dim and this rank's place are taken from a Cartesian communicator.
        Without ``coords`` ranks lie row-major in the grid.
    handle
        What an integer is, as in `CartMesh.from_comm`.
    device
        Override of the device rule.
    error
        What the caller has found wrong with other arguments of this rank, or None.

    Raises
    ------
    MpishardError
        On every rank: what is given does not fit the communicator, or two ranks have the same coordinates.
    """
    require_mpi("adopt")
    host = _communicator(comm, handle)
    is_cart = host.Get_topology() == MPI.CART and MPI.Cartcomm(host).Get_dim() > 0
    extents: tuple[int, ...] = ()
    periods: tuple[bool, ...] = ()
    place, on = 0, None
    with duplicated("adopt", host) as own:
        try:
            if error is not None:
                raise error
            on = as_device(device)
            if is_cart:
                dims, cyclic, own_coords = MPI.Cartcomm(own).Get_topo()
                extents, periods = tuple(dims), _periods(periodic, len(names), [bool(p) for p in cyclic])
                _refuse_other("grid", grid, dims)
                _refuse_other("coords", coords, own_coords)
                place = own.Get_rank()
            else:
                extents, periods = _grid(grid, own.Get_size(), len(names)), _periods(periodic, len(names), None)
                place = own.Get_rank() if coords is None else _place(coords, extents)
            if len(names) != len(extents):
                raise MeshError(
                    "adopt: shape= and names= do not fit the ranks' mesh",
                    expected=f"{len(extents)} extents and names, one per dim of {extents}",
                    got=f"{len(names)}: {tuple(names)}",
                    fix="count the dims that the ranks cut; sim.field(dims=) says which dims of an array they are",
                )
            checked_names(names, len(extents), "adopt")
        except MpishardError as e:
            error = e
        except Exception as e:  # noqa: BLE001 (the others wait for this rank)
            error = MeshError(
                "adopt: arguments of other types", expected="those of its docstring", got=e, fix="pass such"
            )
        first_agreement(own, error, "" if error else f"adopt{(extents, periods, tuple(names))}")
        placed = made("adopt", own, lambda: MPI.Intracomm(own.Split(0, place)))
    try:
        error = None
        if placed.Get_rank() != place:
            error = MeshError(
                "adopt: overlapping boxes, as several ranks have the same coordinates",
                expected=f"a place of its own in {extents} for every rank",
                got=f"coords={tuple(coords or ())} more than once",
                fix="pass this rank's own coordinates, in the order of grid=",
            )
        guard.agree(placed, error)
        # another one each time: a mesh that is half made takes its own with it
        return made(
            "adopt", placed, lambda: CartMesh(placed.Create_cart(extents, periods=periods, reorder=False), names, on)
        )
    finally:
        placed.Free()


def _communicator(comm: Any, handle: str) -> MPI.Intracomm:
    if comm is None:
        return MPI.COMM_SELF
    if not isinstance(comm, MPI.Comm):
        comm = of_handle("adopt", comm, handle)
    if comm == MPI.COMM_NULL or comm.Is_inter():
        raise MeshError(
            "adopt: not an intra-communicator",
            expected="an mpi4py communicator that this rank belongs to, the integer handle of one, or None",
            got="MPI.COMM_NULL" if comm == MPI.COMM_NULL else "an inter-communicator",
            fix="call adopt on the ranks of the communicator",
        )
    return comm  # type: ignore[no-any-return]


def _refuse_other(what: str, given: Sequence[int] | None, own: Sequence[int]) -> None:
    if given is not None and tuple(given) != tuple(own):
        raise MeshError(
            f"adopt: {what} contradicts the communicator's topology",
            expected=tuple(own),
            got=tuple(given),
            fix=f"leave {what}= out, or pass a communicator without a topology",
        )


def _periods(given: Periodic, ndim: int, own: Sequence[bool] | None) -> tuple[bool, ...]:
    if given is None:
        return tuple(own) if own is not None else (False,) * ndim
    periods = checked_periods(given, ndim if own is None else len(own), "adopt")
    if own is not None:
        _refuse_other("periodic", periods, own)
    return periods


def _grid(given: Sequence[int] | None, size: int, ndim: int) -> tuple[int, ...]:
    if given is None and size == 1:
        return (1,) * ndim
    grid = () if given is None else tuple(int(n) for n in given)
    if not grid or min(grid) < 1 or math.prod(grid) != size:
        raise MeshError(
            "adopt: a communicator without Cartesian topology needs the grid of the ranks",
            expected=f"grid= of ranks per dim with product {size}",
            got=given,
            fix="pass grid= and coords= of the host's decomposition, or its MPI_Cart communicator",
        )
    return grid


def _place(coords: Sequence[int], grid: tuple[int, ...]) -> int:
    place = tuple(int(c) for c in coords)
    if len(place) != len(grid) or any(not 0 <= c < n for c, n in zip(place, grid)):
        raise MeshError(
            "adopt: coordinates outside the grid",
            expected=f"one below each of {grid}",
            got=place,
            fix="pass 0-based ones",
        )
    return rank_of(place, grid)


_left: list[MPI.Comm] = []


def leave(mesh: CartMesh, but: MPI.Comm | None = None) -> None:
    """Have a mesh's communicators never freed, as `renew` has it. Not collective."""
    comms = mesh._holding.comms
    _left.extend(c for c in comms if c is not but)
    comms.clear()


def renew(mesh: CartMesh, comm: MPI.Intracomm) -> None:
    """Leave a mesh's communicators, where messages of abandoned calls may be, and plan anew.

    Collective over ``comm``, a new one of the mesh's own, with its ranks in its order. The old ones, those of halo
    exchanges among them, are never freed: MPI would give their numbers to new ones, whose messages would meet those
    that are still under way; and MPICH ends the program where a message lies in one that is freed.
    """
    comms = mesh._holding.comms
    halos = mesh.all_ranks.links.get("halo")
    leave(mesh, but=comm)
    with guard.waiting("renew", (), comm):
        cart = comm.Create_cart(mesh.shape, mesh.periodic, reorder=False)
        comms.append(cart)
        mesh._groups, mesh.comm = mesh.made_groups(cart, mesh.gpu_aware), cart
    comms.append(comm)
    if halos is not None:
        # those that the user has made, too; before plans go, with which theirs would be freed
        halos.leave(channel_of(mesh))
    mesh.forget()
