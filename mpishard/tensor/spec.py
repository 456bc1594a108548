"""A tensor's layout by the names of DTensor's and PhysicsNeMo's specification of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mpishard.comm.mesh import CartMesh
from mpishard.errors import MeshError
from mpishard.layout import Layout, Placement, Shard
from mpishard.tensor.shard_tensor import ShardTensor


class TensorMeta(NamedTuple):
    """Global shape, the strides that the gathered tensor has, and dtype."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ShardTensorSpec:
    """How a tensor lies on a mesh, to be read; `mpishard.Layout` (``x.sharding``) is what it is made from.

    Attributes
    ----------
    mesh : CartMesh
    placements : tuple of Placement
    tensor_meta : TensorMeta
    layout : Layout
    """

    mesh: CartMesh
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta
    layout: Layout

    device_mesh = property(lambda self: self.mesh, doc="The mesh.")
    shape = property(lambda self: self.tensor_meta.shape, doc="Global shape.")
    stride = property(lambda self: self.tensor_meta.stride, doc="Strides that the gathered tensor has.")
    ndim = property(lambda self: self.layout.ndim, doc="Number of dims.")

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's block."""
        return torch.Size(self.layout.local_shape(self.mesh.coords))

    def sharding_shapes(self, mesh_dim: int | None = None) -> Any:
        """Return the shapes of the blocks along mesh dims that shard, as tuples by mesh dim, or along one of them.

        Not collective.
        """
        if mesh_dim is not None:
            coords = self.mesh.coords
            along = range(self.mesh.shape[mesh_dim])
            at = [(*coords[:mesh_dim], i, *coords[mesh_dim + 1 :]) for i in along]
            return tuple(torch.Size(self.layout.local_shape(c)) for c in at)
        return {m: self.sharding_shapes(m) for m in self.layout.sharded_mesh_dims}

    sharding_sizes = sharding_shapes

    def offsets(self, mesh_dim: int | None = None) -> Any:
        """Return where this rank's block starts, by mesh dim; 0 where the mesh dim shards nothing. Not collective."""
        first = self.layout.offset(self.mesh.coords)
        found = []
        for p in self.placements:
            if type(p) is Shard and len(self.layout.shard_dims[p.dim]) > 1:
                raise MeshError(
                    "offsets: several mesh dims shard one tensor dim",
                    expected="one offset per mesh dim",
                    got=self.layout,
                    fix="take x.sharding.offset(x.mesh.coords), one per tensor dim",
                )
            found.append(first[p.dim] if type(p) is Shard else 0)
        return tuple(found) if mesh_dim is None else found[mesh_dim]


def _spec(self: ShardTensor) -> ShardTensorSpec:
    return ShardTensorSpec(self.mesh, self.placements, TensorMeta(self.shape, self.stride(), self.dtype), self.sharding)


def offsets(self: ShardTensor, mesh_dim: int | None = None) -> Any:
    """Return where this rank's block starts, by mesh dim. Not collective."""
    return _spec(self).offsets(mesh_dim)


ShardTensor._spec = property(_spec)
ShardTensor.offsets = offsets
