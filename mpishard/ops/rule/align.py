"""Operands whose dims are labelled: brought to layouts in which one local call gives blocks of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mpishard.autograd.use import use_part
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Alignment, Labels, Layout, align, extents_of
from mpishard.layout.remembered import remembered
from mpishard.ops.rule.dim import whole_along
from mpishard.tensor.notice import notice_gather
from mpishard.tensor.operand import mesh_of, replicated_layout, resolved
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Met(NamedTuple):
    """Local tensors of operands, and what lays out the result."""

    mesh: CartMesh
    locals: tuple[Any, ...]
    plan: Alignment

    def result(self, local: Tensor, labels: Labels) -> ShardTensor:
        """Return the result whose dims have these labels; None: a whole dim. Not collective."""
        sizes = [self.plan.sizes.get(label) if label is not None else None for label in labels]
        shape = [n if s is None else sum(s) for n, s in zip(local.shape, sizes)]
        return wrap(local, self.plan.result(labels, shape), self.mesh)


@remembered
def plan_meeting(layouts: tuple[Layout, ...], labels: tuple[Labels, ...]) -> Alignment:
    """Plan the meeting of operands without Partial dims.

    A mesh dim shards the label that it shards in the first operand that has it sharded; dims without a label
    become whole, and so do dims with another label there. Not collective.

    Raises
    ------
    RuntimeError
        Extents of a label that do not broadcast.
    """

    def mismatch(n: int, extent: int) -> Exception:
        return RuntimeError(f"sizes {[o.shape for o in layouts]} do not broadcast: {n} cells meet {extent}")

    return align(layouts, labels, extents_of(layouts, labels, mismatch))


def meet(operands: Sequence[Any], labels: Sequence[Labels]) -> Met:
    """Bring operands (ShardTensors, tensors; anything else stays) to where they meet. Collective where they move.

    Parameters
    ----------
    labels
        Per operand and dim: dims of the same label lie together; None: a dim that every rank needs whole.
    """
    mesh = mesh_of(operands)
    tensors = [i for i, x in enumerate(operands) if isinstance(x, Tensor)]
    ready, layouts = [], []
    for i in tensors:
        x = operands[i]
        if isinstance(x, ShardTensor):
            x = resolved(x)
            x = whole_along(x, tuple(d for d, label in enumerate(labels[i]) if label is None))
            ready.append(x.block)
            layouts.append(x.sharding)
        else:
            ready.append(x)
            layouts.append(replicated_layout(mesh, x.shape))
    plan = plan_meeting(tuple(layouts), tuple(tuple(labels[i]) for i in tensors))
    out = list(operands)
    for k, i in enumerate(tensors):
        if any(d not in plan.operands[k].shard_dims for d in layouts[k].shard_dims):
            notice_gather(mesh, layouts[k], plan.operands[k], ready[k].itemsize)
        out[i] = use_part(ready[k], mesh, layouts[k], plan.operands[k], plan.used[k])
    return Met(mesh, tuple(out), plan)
