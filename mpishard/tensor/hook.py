"""Backward hooks on ShardTensors: those of tensors and of modules are given, and may return, global gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules._functions import BackwardHookFunction

from mpishard.autograd.use import use
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, without_partial
from mpishard.tensor.operand import fitted, mesh_of, replicated_layout, shard_on
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, global_cotangent, root_of, wrap

Gradients = tuple[Tensor | None, ...]


def local_cotangent(g: Any, layout: Layout, mesh: CartMesh) -> Any:
    """Return what autograd takes as the cotangent of a block of ``layout``, or None.

    Collective where it is laid out differently.
    """
    if g is None:
        return None
    whole = without_partial(layout)
    local = shard_on(g, mesh, whole) if isinstance(g, ShardTensor) else fitted(g, mesh, whole)
    # every rank uses it with its own part of a Partial: what is differentiated with respect to it is a sum
    return use(local, mesh, layout.partial_dims)


@implements(torch.Tensor.register_hook, sharded="local")
def register_hook(self: ShardTensor, hook: Any) -> Any:
    """Give the hook ShardTensors, or None where torch has no cotangent. Not collective."""
    (block, layout), mesh = root_of(self), self.mesh

    def on_block(g: Tensor | None) -> Any:
        return local_cotangent(hook(None if g is None else global_cotangent(g, layout, mesh)), layout, mesh)

    return block.register_hook(on_block)


@implements(torch.Tensor.register_post_accumulate_grad_hook, sharded="local")
def register_post_accumulate_grad_hook(self: ShardTensor, hook: Any) -> Any:
    """Give the hook the ShardTensor. Not collective."""
    return root_of(self)[0].register_post_accumulate_grad_hook(lambda _: hook(self))


class HookNode:
    """The node on which torch.nn registers the full backward hooks of a module; they are given ShardTensors.

    It stands for `node`, a ``BackwardHookFunction`` of the blocks, whose outputs are its inputs.
    """

    __slots__ = ("_layouts", "_mesh", "node")

    def __init__(self, node: Any, layouts: Sequence[Layout | None], mesh: CartMesh) -> None:
        self.node = node
        self._layouts = layouts
        self._mesh = mesh

    def name(self) -> str:
        """Return the name of the node. Not collective."""
        return self.node.name()  # type: ignore[no-any-return]

    def register_hook(self, hook: Callable[[Gradients, Gradients], Gradients | None]) -> Any:
        """Register a hook of all gradients at once. Not collective."""

        def on_local(inputs: Gradients, outputs: Gradients) -> Gradients | None:
            found = hook(self._global(inputs), self._global(outputs))
            return None if found is None else tuple(map(self._local, found, self._layouts))

        return self.node.register_hook(on_local)

    def _global(self, gradients: Gradients) -> Gradients:
        return tuple(
            g if g is None or layout is None else global_cotangent(g, layout, self._mesh)
            for g, layout in zip(gradients, self._layouts)
        )

    def _local(self, g: Any, layout: Layout | None) -> Any:
        return g if layout is None else local_cotangent(g, layout, self._mesh)


def apply_backward_hook(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the arguments or results of a module that has full backward hooks, linked to one `HookNode`.

    Not collective. A plain tensor with a gradient becomes a Replicate ShardTensor, which it counts as anyway.
    """
    mesh = mesh_of(tensors)
    parts: list[Tensor] = [
        wrap(t, replicated_layout(mesh, t.shape), mesh) if not isinstance(t, ShardTensor) and t.requires_grad else t
        for t in tensors
    ]
    locals_ = BackwardHookFunction.apply(*[p.block if isinstance(p, ShardTensor) else p for p in parts])
    layouts = [p.sharding if isinstance(p, ShardTensor) else None for p in parts]
    out: list[Tensor] = []
    for part, local in zip(parts, locals_):
        if isinstance(part, ShardTensor):
            y = wrap(local, part.sharding, mesh)
            if local.grad_fn is not None:
                y._hook_node = HookNode(local.grad_fn, layouts, mesh)
            out.append(y)
        else:
            out.append(local)
    return tuple(out)
