"""distribute_module: one model, the same on every rank, whose gradients are global."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mpishard.autograd.bucket import mark
from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError, described
from mpishard.tensor.shard_tensor import ShardTensor

_BROADCAST_NBYTES = 64 << 20


def distribute_module(module: nn.Module, mesh: CartMesh) -> nn.Module:
    """Make a model the same on every rank, and have its gradients summed in buckets while backward goes on.

    Collective.

    Parameters
    ----------
    module
        Any model with plain parameters; moved to ``mesh.device``. Its parameters and buffers become those of
        mesh rank 0.
    mesh
        Mesh that its inputs will live on.

    Returns
    -------
    torch.nn.Module
        ``module`` itself. After ``loss.backward()`` every parameter's ``.grad`` is the full, identical gradient
        on every rank, as it is without this call; here the sums of many parameters share one message.

    Raises
    ------
    LayoutError
        Parameters or buffers are ShardTensors.
    DesyncError
        They differ in name, shape or dtype between ranks.

    Examples
    --------
    >>> model = ms.distribute_module(torch.nn.Conv2d(8, 8, 3, padding=1), mesh)
    >>> model(x).mean().backward()
    """
    group = mesh.group(tuple(range(mesh.ndim)))
    module.to(mesh.device)
    named = [*module.named_parameters(), *module.named_buffers()]
    error = None
    sharded = [name for name, t in named if isinstance(t, ShardTensor)]
    if sharded:
        error = LayoutError(
            described(
                "distribute_module: sharded parameters",
                expected="plain parameters and buffers",
                got=sharded,
                fix="leave those that are ShardTensors out: they need no reduction",
            )
        )
    guard.agree(group.comm, error, f"distribute_module {[(name, tuple(t.shape), t.dtype) for name, t in named]}")
    with torch.no_grad():
        for tensors in _by_dtype([t for _, t in named]):
            flat = blocking.broadcast(torch.cat([t.detach().reshape(-1) for t in tensors]), group, 0)
            for t, values in zip(tensors, flat.split([t.numel() for t in tensors])):
                t.copy_(values.view(t.shape))
    for param in module.parameters():
        mark(param)
    return module


def _by_dtype(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype, up to a buffer's worth."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        batch: list[Tensor] = []
        for t in tensors:
            if t.dtype == dtype and t.numel():
                if batch and sum(b.nbytes for b in batch) + t.nbytes > _BROADCAST_NBYTES:
                    yield batch
                    batch = []
                batch.append(t)
        if batch:
            yield batch
