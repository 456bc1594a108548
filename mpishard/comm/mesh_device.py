"""Which device a rank of a mesh computes on."""

from __future__ import annotations

import torch
from mpi4py import MPI

from mpishard.errors import MeshError


def as_device(device: torch.device | str | None) -> torch.device | None:
    """Return a device that a user names. Not collective."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise MeshError(
            "device of a mesh", expected="a device that torch knows", got=repr(device), fix="such as cpu or cuda:0"
        ) from None


def local_rank(comm: MPI.Intracomm) -> int:
    """Return this rank's position among the ranks on its node. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    rank = node.Get_rank()
    node.Free()
    return rank


def local_device(position: int) -> torch.device:
    """Return the GPU at a position on this node, or the CPU. Not collective."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", position % torch.cuda.device_count())
