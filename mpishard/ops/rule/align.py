"""Operands whose dims are labelled: brought to layouts in which one local call gives blocks of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.bucket import use
from mpishard.autograd.linear import differentiated
from mpishard.autograd.redistribute import redistribute
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Alignment, Labels, Layout, align, extents_of
from mpishard.ops.rule.agreement import agreed
from mpishard.ops.rule.dim import CACHED, whole_along
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


@lru_cache(maxsize=CACHED)
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
        out[i] = use(redistribute(ready[k], mesh, layouts[k], plan.operands[k]), mesh, plan.used[k])
    return Met(mesh, tuple(out), plan)


def batchwise(func: Callable[..., Any], operands: Sequence[Any], cores: Sequence[int]) -> Any:
    """Return ``func`` of operands whose last ``cores[i]`` dims are whole; the dims before them broadcast.

    Collective where an operand moves: where a core dim is sharded, or the others are sharded differently. Every
    result has the broadcast dims first.
    """
    labels = [(*range(c - x.ndim, 0), *(None,) * c) if isinstance(x, Tensor) else () for x, c in zip(operands, cores)]
    met = meet(operands, labels)
    count = max(len(own) - c for own, c in zip(labels, cores))
    batch = tuple(range(-count, 0))
    block = torch.broadcast_shapes(*[t.shape[: t.ndim - c] for t, c in zip(met.locals, cores) if isinstance(t, Tensor)])
    locals_ = met.locals
    if 0 in block:
        locals_ = tuple(_spare(t, c, count) if isinstance(t, Tensor) else t for t, c in zip(met.locals, cores))

    def grow(t: Tensor) -> ShardTensor:
        if 0 in block:
            t = t[:0].reshape(*block, *t.shape[count:])
        return met.result(t, (*batch, *(None,) * (t.ndim - count)))

    # a matrix that has no inverse, or factor, is one rank's; what it does with it is every rank's
    return mapped_results(agreed(lambda: func(*locals_), met.mesh, met.plan.operands), grow)


def _spare(x: Tensor, core: int, count: int) -> Tensor:
    """Return a harmless matrix (or vector, or number) in place of a block without any, with its graph.

    Torch refuses some empty batches, and of others the results lose their graph: this rank would not take part in
    the communication of backward.
    """
    shape = (*(1,) * count, *x.shape[x.ndim - core :])
    steps = torch.arange(1, max((1, *shape)) + 1, device=x.device).to(x.dtype)
    if core == 2:  # with singular values and eigenvalues that differ: their gradients are finite
        spare = torch.diag(steps)[: shape[-2], : shape[-1]].expand(shape)
    else:
        spare = steps[: shape[-1]].expand(shape) if core else steps[0].expand(shape)
    return spare + 0 * x.sum() if differentiated(x) else spare


def mapped_results(found: Any, grow: Callable[[Tensor], Any]) -> Any:
    """Return a tensor, or the tensors of a tuple, as ``grow`` wraps them. Not collective."""
    return grow(found) if isinstance(found, Tensor) else type(found)([grow(t) for t in found])
