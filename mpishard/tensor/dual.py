"""Forward mode: a dual ShardTensor is a ShardTensor of dual blocks."""

from __future__ import annotations

from typing import Any

import torch

from mpishard.comm.memory.buffer import transforms_active
from mpishard.errors import LayoutError, UnsupportedOperationError
from mpishard.tensor.operand import fitted, mesh_of, on_mesh, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@implements(torch._VF._make_dual, sharded="local")  # type: ignore[attr-defined]
def make_dual(tensor: Any, tangent: Any, level: int) -> ShardTensor:
    """Return a dual of the blocks, the tangent's in the layout of the tensor. Collective where it has another."""
    if transforms_active():
        raise UnsupportedOperationError(
            "torch.func.jvp of a ShardTensor",
            expected="plain tensors as the arguments of the transformed function",
            got=f"a tensor of shape {tuple(tensor.shape)} on a mesh",
            fix="torch.autograd.forward_ad with duals of ShardTensors, or torch.autograd.functional.jvp",
        )
    if tuple(tensor.shape) != tuple(tangent.shape):
        raise LayoutError(
            "make_dual: a tangent of another shape",
            expected=tuple(tensor.shape),
            got=tuple(tangent.shape),
            fix="give every element its tangent",
        )
    mesh = mesh_of((tensor, tangent))
    primal = on_mesh(tensor, mesh)
    local = fitted(resolved(tangent), mesh, primal.sharding)
    dual = torch._VF._make_dual(primal.block, local, level=level)  # type: ignore[attr-defined]
    return wrap(dual, primal.sharding, mesh)


@implements(torch._VF._unpack_dual, sharded="local")  # type: ignore[attr-defined]
def unpack_dual(dual: ShardTensor, level: int) -> tuple[ShardTensor, ShardTensor | None]:
    """Return the tensor and its tangent (None: it has none), in one layout. Not collective."""
    primal, tangent = torch._VF._unpack_dual(dual.block, level=level)  # type: ignore[attr-defined]
    layout, mesh = dual.sharding, dual.mesh
    return wrap(primal, layout, mesh), None if tangent is None else wrap(tangent, layout, mesh)
