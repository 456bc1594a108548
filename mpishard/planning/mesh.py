"""A mesh of any size in one process, on which planners and steps run without values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpishard.comm.mesh import CartMesh
from mpishard.comm.mesh_argument import checked_extents, checked_names, checked_periods
from mpishard.comm.null import NullComm
from mpishard.errors import MeshError


def mesh(
    mesh_shape: Sequence[int] | int,
    mesh_dim_names: Sequence[str] | None = None,
    *,
    coords: Sequence[int] | None = None,
    periodic: bool | Sequence[bool] = False,
) -> CartMesh:
    """Return a mesh of any size as one of its ranks has it, for plans.

    Not collective, nor is anything on it: nobody else is there. Tensors on it have shapes, layouts and gradients but
    no values and no memory (torch's ``meta`` device), so that a field of 4096^3 cells costs nothing, and what asks for
    a value raises. The package's own code runs: plans, messages and bytes (``ms.comm_counter``) are those of that rank.

    Parameters
    ----------
    mesh_shape
        Extent of every mesh dim.
    mesh_dim_names, periodic
        As of ``ms.init_mesh``.
    coords
        Which rank this is; one in the middle if not given.

    Returns
    -------
    CartMesh

    Raises
    ------
    MeshError
        Extents below 1, or coordinates outside them.

    Examples
    --------
    >>> mesh = ms.planning.mesh((64, 32, 32))
    >>> x = ms.zeros(1, 8, 4096, 4096, 4096, mesh=mesh, placements=[ms.Shard(2), ms.Shard(3), ms.Shard(4)])
    >>> with ms.comm_counter() as count:
    ...     conv(x)
    """
    return mesh_on("meta", mesh_shape, mesh_dim_names, coords=coords, periodic=periodic)


def mesh_on(
    device: str,
    mesh_shape: Sequence[int] | int,
    mesh_dim_names: Sequence[str] | None = None,
    *,
    coords: Sequence[int] | None = None,
    periodic: bool | Sequence[bool] = False,
) -> CartMesh:
    """Return `mesh` with blocks on a device: on the CPU their values mean nothing, but take their time."""
    extents = checked_extents(mesh_shape)
    at = tuple(n // 2 for n in extents) if coords is None else checked_extents(coords)
    if not extents or min(extents) < 1 or len(at) != len(extents) or not all(0 <= c < n for c, n in zip(at, extents)):
        raise MeshError(
            "planning.mesh",
            expected="extents of 1 or more, and coordinates within them",
            got=f"extents {extents}, coordinates {at}",
            fix="give every extent, and a coordinate for each",
        )
    names, periods = (
        checked_names(mesh_dim_names, len(extents), "planning.mesh"),
        checked_periods(periodic, len(extents), "planning.mesh"),
    )
    where = torch.device(device)
    return CartMesh(NullComm.cart(extents, at, periods, where), names, where)  # type: ignore[arg-type]
