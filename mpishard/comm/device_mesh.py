"""What programs written for torch's DeviceMesh ask of a mesh, and how they name it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import signature
from numbers import Integral
from typing import Any, NoReturn, TypeVar, cast

import torch
from mpi4py import MPI

from mpishard.errors import MeshError

F = TypeVar("F", bound=Callable[..., Any])


_TORCHS_OWN = (
    "what is torch's own (fully_shard, DTensor, parallelize_module, DistributedDataParallel) takes torch's mesh: "
    "mpishard.process_group(mesh), then torch.distributed.init_device_mesh(mesh.device_type, mesh.shape, "
    "mesh_dim_names=mesh.mesh_dim_names)"
)


class Ranks(int):
    """A number of ranks, which says so to who calls it: in torch's DeviceMesh ``size`` is a method."""

    __slots__ = ()

    def __call__(self, *_: Any) -> NoReturn:
        """Raise, and say what to write. Not collective.

        Raises
        ------
        MeshError
            Always.
        """
        raise MeshError(
            "mesh.size is a number here",
            expected="mesh.size, or mesh.shape[d] along a dim",
            got="a call, as of torch's DeviceMesh",
            fix=f"leave the parentheses out; {_TORCHS_OWN}",
        )


class DeviceMeshNames:
    """The methods of torch's DeviceMesh; `CartMesh` has them beside its own attributes."""

    coords: tuple[int, ...]
    mesh_dim_names: tuple[str, ...]
    device: torch.device
    ndim: int
    root_comm: MPI.Intracomm
    mesh_dim: Callable[[int | str], int]
    __getitem__: Callable[..., Any]

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self.device.type

    def get_rank(self) -> int:
        """Return this rank in the whole mesh, also of a sub-mesh. Not collective."""
        return self.root_comm.Get_rank()

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's coordinate along a mesh dim; it may be left out where there is one. Not collective."""
        return self.coords[self.one_dim("get_local_rank", mesh_dim)]

    def get_coordinate(self) -> tuple[int, ...]:
        """Return this rank's coordinates. Not collective."""
        return self.coords

    def _is_not_torchs(self, *_: Any) -> NoReturn:
        raise MeshError(
            "a CartMesh where torch takes its own mesh",
            expected="a torch.distributed DeviceMesh",
            got="a mesh of mpishard",
            fix=_TORCHS_OWN,
        )

    # what DDP and DTensor ask of theirs first
    _get_root_mesh = _is_current_rank_part_of_mesh = _is_not_torchs

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the `process_group` of a mesh dim, which may be left out where there is one. Collective over it."""
        return _process_group(self[self.one_dim("get_group", mesh_dim)])

    def get_all_groups(self) -> list[Any]:
        """Return the `process_group` of every mesh dim. Collective."""
        return [_process_group(self[m]) for m in range(self.ndim)]

    def one_dim(self, what: str, mesh_dim: int | str | None) -> int:
        """Return the index of the mesh dim that is meant.

        Not collective.

        Raises
        ------
        MeshError
            There is no such dim, or none is named and there are several.
        """
        if mesh_dim is not None:
            return self.mesh_dim(mesh_dim)
        if self.ndim > 1:
            raise MeshError(
                f"{what}: which mesh dim is meant?",
                expected=f"one of {self.mesh_dim_names}",
                got=None,
                fix="name the dim, or take the sub-mesh of it",
            )
        return 0


def rank_within(mesh: Any, rank: Any) -> int | None:
    """Return the mesh rank of a rank of the whole mesh (`get_rank`); None if it is not in it. Not collective."""
    if not isinstance(rank, Integral) or not 0 <= int(rank) < mesh.root_comm.Get_size():
        return None
    own, whole = mesh.all_ranks.comm.Get_group(), mesh.root_comm.Get_group()
    (found,) = whole.Translate_ranks([int(rank)], own)
    own.Free()
    whole.Free()
    return None if found == MPI.UNDEFINED else found


def _process_group(mesh: Any) -> Any:
    # stands above the mesh, and needs torch.distributed
    return import_module("mpishard.comm.torch_distributed.process_group").process_group(mesh)


_DTENSORS = {"device_mesh": "mesh", "local_tensor": "local"}


def names_of_dtensor(function: F) -> F:
    """Let a function take its arguments ``mesh`` and ``local`` by DTensor's names for them, too. Not collective."""
    known = signature(function).parameters

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for theirs, ours in _DTENSORS.items():
            if theirs in kwargs and ours in known:
                if ours in kwargs:
                    raise MeshError(
                        f"{function.__name__}: one argument by two names",
                        expected=f"{ours}=, or {theirs}=, which is the same",
                        got="both",
                        fix="leave one out",
                    )
                kwargs[ours] = kwargs.pop(theirs)
        return function(*args, **kwargs)

    return cast(F, call)
