"""Which device a rank of a mesh computes on."""

from __future__ import annotations

import torch
from mpi4py import MPI

from mpishard.errors import MeshError


def as_device(device: torch.device | str | None) -> torch.device | None:
    """Return a device that a user names. Not collective."""
    try:
        found = None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise MeshError(
            "device of a mesh", expected="a device that torch knows", got=repr(device), fix="such as cpu or cuda:0"
        ) from None
    if found is not None and found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise MeshError(
                "device of a mesh",
                expected=f"one of the {count} GPUs that torch finds" if count else "cpu: torch finds no GPU",
                got=repr(str(device)),
                fix="leave device out for this rank's GPU, if there is one",
            )
    return found


def told_device(device: torch.device | None) -> str:
    """Return what ranks compare of a device that users name. Not collective.

    CPUs and GPUs are compared once the rule has found those that nobody names.
    """
    return "" if device is None or device.type in ("cpu", "cuda") else f", device={device.type}"


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
