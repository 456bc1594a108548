"""Names of ``physicsnemo.distributed`` and ``.domain_parallel``: change these imports, and the program runs on MPI.

Importing this module also lets torch's own ``distribute_tensor`` and ``distribute_module`` take a mesh of ours, as
such programs import them from ``torch.distributed.tensor``: tensors and parameters become ShardTensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed.tensor
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.device_mesh import rank_within
from mpishard.comm.mesh import CartMesh, init_mesh
from mpishard.errors import LayoutError, MeshError
from mpishard.tensor import convert, scatter
from mpishard.tensor.shard_tensor import ShardTensor
from mpishard.tensor.spec import ShardTensorSpec

__all__ = ["DistributedManager", "ShardTensor", "ShardTensorSpec", "scatter_tensor"]


class DistributedManager:
    """What PhysicsNeMo's manager knows of a job: one state for all objects of the class.

    The launcher is MPI's: no environment variable is read, and no random generator is seeded.
    """

    _world: CartMesh | None = None
    _mesh: CartMesh | None = None

    def __init__(self) -> None:
        """Refuse where `initialize` was not called. Not collective."""
        if not self.is_initialized():
            raise MeshError(
                "DistributedManager before it is initialized",
                expected="DistributedManager.initialize() on every rank",
                got="no call of it",
                fix="call it first",
            )

    @classmethod
    def initialize(cls) -> None:
        """Take all ranks of the job. Collective the first time."""
        if not cls.is_initialized():
            cls._world = init_mesh(-1, ("world",))

    @classmethod
    def is_initialized(cls) -> bool:
        """Tell whether `initialize` was called. Not collective."""
        return cls._world is not None and not cls._world.freed

    @classmethod
    def cleanup(cls) -> None:
        """Free the meshes. Collective."""
        for mesh in (cls._mesh, cls._world):
            if mesh is not None:
                mesh.free()
        cls._mesh = cls._world = None

    @property
    def _all(self) -> CartMesh:
        assert self._world is not None
        return self._world

    rank = property(lambda self: self._all.rank, doc="This rank of the job.")
    world_size = property(lambda self: self._all.size, doc="Number of ranks.")
    local_rank = property(lambda self: self._all.local_rank, doc="This rank's position on its node.")
    device = property(lambda self: self._all.device, doc="The GPU at that position, or the CPU.")
    cuda = property(lambda self: self._all.device.type == "cuda", doc="Whether it is a GPU.")
    distributed = property(lambda self: self._all.size > 1, doc="Whether there are several ranks.")

    def initialize_mesh(self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> CartMesh:
        """Make the mesh of the job; -1 is inferred, as in `mpishard.init_mesh`. Collective."""
        type(self)._mesh = init_mesh(mesh_shape, mesh_dim_names)
        return self._mesh  # type: ignore[return-value]

    @property
    def global_mesh(self) -> CartMesh:
        """The mesh that `initialize_mesh` made, or one of one dim, ``"world"``."""
        return self._all if self._mesh is None else self._mesh

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Extents by the names of the mesh dims."""
        return dict(zip(self.global_mesh.mesh_dim_names, self.global_mesh.shape))

    def mesh_names(self) -> Sequence[str]:
        """Return the names of the mesh dims. Not collective."""
        return self.global_mesh.mesh_dim_names

    def mesh_sizes(self) -> Sequence[int]:
        """Return the extents of the mesh dims. Not collective."""
        return self.global_mesh.shape

    def mesh(self, name: str | None = None) -> CartMesh:
        """Return the mesh, or the sub-mesh of a dim. Not collective."""
        return self.global_mesh if name is None else self.global_mesh[name]

    def get_mesh_group(self, mesh: CartMesh) -> Any:
        """Return the process group of torch's over a mesh. Collective over it."""
        from mpishard.comm.torch_distributed.process_group import process_group

        return process_group(mesh)


def scatter_tensor(
    tensor: Tensor | None,
    global_src: int,
    mesh: CartMesh,
    placements: Any,
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """Do what `mpishard.scatter_tensor` does, by another count of ranks. Collective.

    Parameters
    ----------
    tensor, mesh, placements, requires_grad
        As of `mpishard.scatter_tensor`.
    global_src
        The source, by its rank in the whole mesh (`mesh.get_rank`), also where ``mesh`` is a part of it.
    global_shape, dtype
        Where they are given, must be the tensor's.

    Raises
    ------
    LayoutError
        They are not, or the arguments do not fit; on every rank.
    """
    error, src = None, global_src
    if isinstance(mesh, CartMesh):
        if (found := rank_within(mesh, global_src)) is None:
            error = LayoutError(
                "scatter_tensor: no such source rank",
                expected="a rank of the whole mesh that is in this part of it",
                got=global_src,
                fix="name the rank that mesh.get_rank() is on the source",
            )
        else:
            src = found
        guard.agree(mesh.all_ranks.comm, error)
    x = scatter.scatter_tensor(tensor, src, mesh, placements, requires_grad=requires_grad)
    shape = tuple(x.shape)
    # compared as it is: of one rank's own, anything may be wrong
    told = tuple(global_shape) if isinstance(global_shape, Iterable) else global_shape
    if told not in (None, shape) or dtype not in (None, x.dtype):
        error = LayoutError(
            "scatter_tensor: global_shape and dtype",
            expected=f"{x.dtype} of shape {shape}, as the tensor on rank {global_src}",
            got=f"{dtype or x.dtype} of shape {shape if told is None else told}",
            fix="leave them out",
        )
    guard.agree(x.mesh.all_ranks.comm, error)
    return x


def _take_our_meshes(api: Any) -> None:
    theirs = api.distribute_tensor
    if getattr(theirs, "takes_our_meshes", False):
        return

    @wraps(theirs)
    def distribute_tensor(
        tensor: Tensor, device_mesh: Any = None, placements: Any = None, *, src_data_rank: int | None = 0
    ) -> Any:
        if isinstance(device_mesh, CartMesh):
            return convert.distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
        return theirs(tensor, device_mesh, placements, src_data_rank=src_data_rank)

    distribute_tensor.takes_our_meshes = True  # type: ignore[attr-defined]
    # torch's distribute_module finds it in api; others have taken it from there by now
    for module in list(sys.modules.values()):
        for name, bound in list(getattr(module, "__dict__", {}).items()):
            if bound is theirs:
                setattr(module, name, distribute_tensor)


_take_our_meshes(torch.distributed.tensor._api)
