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
from mpishard.layout import Layout, Placement, Replicate, Shard, layout_of
from mpishard.ops.rule.agreement import agreed
from mpishard.ops.rule.dim import CACHED, whole_along
from mpishard.tensor.notice import notice_gather
from mpishard.tensor.operand import mesh_of, replicated_layout, resolved
from mpishard.tensor.shard_tensor import ShardTensor, wrap

Labels = tuple[Any, ...]


class Fit(NamedTuple):
    """The layouts in which operands meet.

    Attributes
    ----------
    targets
        Layout of every operand.
    used
        Mesh dims over which each operand is used with data of other ranks, per operand.
    cut
        Label that each mesh dim shards, or None.
    sizes
        Block sizes of the sharded labels.
    """

    targets: tuple[Layout, ...]
    used: tuple[tuple[int, ...], ...]
    cut: Labels
    sizes: dict[Any, tuple[int, ...]]


class Met(NamedTuple):
    """Local tensors of operands, and what lays out the result."""

    mesh: CartMesh
    locals: tuple[Any, ...]
    fit: Fit

    def wrapped(self, local: Tensor, labels: Labels) -> ShardTensor:
        """Return the result whose dims have these labels; None: a whole dim. Not collective."""
        placements = [Replicate() if c is None else Shard(labels.index(c)) for c in self.fit.cut]
        sizes = [self.fit.sizes.get(label) if label is not None else None for label in labels]
        shape = [n if s is None else sum(s) for n, s in zip(local.shape, sizes)]
        return wrap(local, layout_of(self.mesh.shape, placements, shape, sizes), self.mesh)


@lru_cache(maxsize=CACHED)
def plan_meeting(layouts: tuple[Layout, ...], labels: tuple[Labels, ...]) -> Fit:
    """Plan the meeting of operands without Partial dims.

    A mesh dim shards the label that it shards in the first operand that has it sharded; dims without a label
    become whole, and so do dims with another label there. Not collective.

    Raises
    ------
    RuntimeError
        Extents of a label that do not broadcast.
    """
    extents: dict[Any, int] = {}
    for layout, own in zip(layouts, labels):
        for n, label in zip(layout.shape, own):
            if label is None:
                continue
            if extents.get(label, 1) != 1 and n not in (1, extents[label]):
                raise RuntimeError(
                    f"sizes {[l.shape for l in layouts]} do not broadcast: {n} cells meet {extents[label]}"
                )
            extents[label] = n if extents.get(label, 1) == 1 else extents[label]
    mesh_shape = layouts[0].mesh_shape
    cut: list[Any] = [None] * len(mesh_shape)
    for m in range(len(mesh_shape)):
        for layout, own in zip(layouts, labels):
            p = layout.placements[m]
            if type(p) is Shard and own[p.dim] is not None and layout.shape[p.dim] == extents[own[p.dim]]:
                cut[m] = own[p.dim]
                break
    sizes: dict[Any, tuple[int, ...]] = {}
    for label in set(cut) - {None}:
        mesh_dims = tuple(m for m, c in enumerate(cut) if c == label)
        given = None
        for layout, own in zip(layouts, labels):
            d = own.index(label) if label in own else -1
            if d >= 0 and layout.shape[d] == extents[label] and layout.shard_dims.get(d) == mesh_dims:
                given = layout.sizes[d]
                break
        if given is None:
            given = layout_of(mesh_shape, [Shard(0) if c == label else Replicate() for c in cut],
                              (extents[label],)).sizes[0]  # fmt: skip
        sizes[label] = given
    targets, used = [], []
    for layout, own in zip(layouts, labels):
        here = [
            None if label not in sizes or layout.shape[d] != extents[label] else label for d, label in enumerate(own)
        ]
        placements: list[Placement] = [
            Shard(here.index(c)) if c is not None and c in here else Replicate() for c in cut
        ]
        targets.append(layout_of(mesh_shape, placements, layout.shape, [sizes.get(h) for h in here]))
        used.append(tuple(m for m, c in enumerate(cut) if c is not None and type(placements[m]) is Replicate))
    return Fit(tuple(targets), tuple(used), tuple(cut), sizes)


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
    fit = plan_meeting(tuple(layouts), tuple(tuple(labels[i]) for i in tensors))
    out = list(operands)
    for k, i in enumerate(tensors):
        if any(d not in fit.targets[k].shard_dims for d in layouts[k].shard_dims):
            notice_gather(mesh, layouts[k], fit.targets[k], ready[k].itemsize)
        out[i] = use(redistribute(ready[k], mesh, layouts[k], fit.targets[k]), mesh, fit.used[k])
    return Met(mesh, tuple(out), fit)


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
        return met.wrapped(t, (*batch, *(None,) * (t.ndim - count)))

    # a matrix that has no inverse, or factor, is one rank's; what it does with it is every rank's
    return mapped_results(agreed(lambda: func(*locals_), met.mesh, met.fit.targets), grow)


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
