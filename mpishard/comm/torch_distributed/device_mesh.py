"""A mesh by DTensor's call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpishard.comm.exit import require_mpi
from mpishard.comm.mesh import CartMesh, init_mesh
from mpishard.comm.setting import first_agreement
from mpishard.errors import MeshError


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Any = None,
) -> CartMesh:
    """Make a mesh over all ranks, called as ``torch.distributed.device_mesh.init_device_mesh`` is.

    Collective.

    Parameters
    ----------
    device_type
        ``"cpu"``, or ``"cuda"``: the GPU at this rank's position on its node.
    mesh_shape, mesh_dim_names
        As of `init_mesh`.
    backend_override
        Must be None: MPI is the only backend.

    Returns
    -------
    CartMesh

    Raises
    ------
    MeshError
        Another device or backend, or a shape that does not fit the number of ranks.

    Examples
    --------
    >>> mesh = ms.init_device_mesh("cpu", mesh_shape=(2, 2), mesh_dim_names=("data", "y"))
    """
    error = None
    if device_type not in ("cpu", "cuda") or (device_type == "cuda" and not torch.cuda.is_available()):
        error = MeshError(
            "init_device_mesh: no such device",
            expected="'cpu', or 'cuda' where torch finds GPUs",
            got=repr(device_type),
            fix="name one; init_mesh takes the GPU where there is one, else the CPU",
        )
    elif backend_override is not None:
        error = MeshError(
            "init_device_mesh: a backend is asked for",
            expected="backend_override=None: all messages go by MPI",
            got=backend_override,
            fix="leave it out",
        )
    if error is not None:
        require_mpi("init_device_mesh")
        first_agreement(MPI.COMM_WORLD, error)  # of a node without its GPU, the others are in init_mesh's
    return init_mesh(mesh_shape, mesh_dim_names, device="cpu" if device_type == "cpu" else None)
