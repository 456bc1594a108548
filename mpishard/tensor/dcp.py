"""What torch.distributed.checkpoint (DCP) asks a tensor for: which cells this rank holds, and the cells."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpishard.errors import LayoutError, UnsupportedOperationError
from mpishard.tensor.shard_tensor import ShardTensor


def chunks(self: ShardTensor) -> list[Any]:
    """Return where this rank's cells lie, as DCP's chunks: none for an empty block. Not collective."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    coords = self.mesh.coords
    first, extent = self.sharding.offset(coords), self.sharding.local_shape(coords)
    if self.numel() == 0:  # named once, by all ranks alike
        first, extent = (0,) * self.ndim, self.sharding.shape
    elif self.block.numel() == 0:
        # chunks are told apart by where they start: an empty one would pass for the one that follows
        return []
    return [ChunkStorageMetadata(offsets=torch.Size(first), sizes=torch.Size(extent))]


def write_items(self: ShardTensor, fqn: str, _object: object) -> list[Any]:
    """Return what this rank can write. Not collective.

    Raises
    ------
    UnsupportedOperationError
        `torch.distributed` is not started: each rank would write the whole checkpoint's list for itself.
    LayoutError
        The blocks are terms of a sum.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if self.mesh.size > 1 and not dist.is_initialized():
        raise UnsupportedOperationError(
            f"torch.distributed.checkpoint: {fqn!r} lies on {self.mesh.size} ranks, and each would write alone",
            expected="a process group of these ranks",
            got="torch.distributed is not started",
            fix="call mpishard.process_group(mesh) before; or mpishard.io.save_checkpoint, which needs none",
        )
    if self.sharding.partial_dims:
        raise LayoutError(
            f"torch.distributed.checkpoint: {fqn!r} is a sum whose terms the ranks hold",
            expected="Shard and Replicate dims",
            got=self.sharding,
            fix="x.redistribute(placements=...) before it is saved",
        )
    properties = TensorProperties.create_from_tensor(self.block)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
        )
        for chunk in chunks(self)
    ]


def cells(self: ShardTensor, _index: Any) -> Tensor:
    """Return the block, to be written or read into. Not collective."""
    return self.block.detach()


# torch.distributed._checkpointable
ShardTensor.__create_write_items__ = write_items  # type: ignore[attr-defined]
ShardTensor.__create_chunk_list__ = chunks  # type: ignore[attr-defined]
ShardTensor.__get_tensor_shard__ = cells  # type: ignore[attr-defined]
