"""Products that sum over shared dims: which blocks meet, and how the result is laid out.

Every dim of every operand has a label. A mesh dim that shards a label shards it in all operands that have it;
those without it are used by all ranks. A label of the result is sharded there, a summed one leaves a Partial: the
product of matching blocks, to be summed over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.bucket import use
from mpishard.autograd.redistribute import redistribute
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError, described
from mpishard.layout import Layout, Partial, Placement, Replicate, Shard, layout_of
from mpishard.ops.rule.dim import CACHED
from mpishard.ops.rule.sparse import require_sparse_gradient, sparse_block
from mpishard.tensor.operand import mesh_of, replicated_layout, resolved
from mpishard.tensor.shard_tensor import ShardTensor, wrap

# a str must have one extent in all operands; an int may have extent 1, which broadcasts
Label = int | str
Labels = tuple[Label, ...]


class Contraction(NamedTuple):
    """The layouts in which operands meet, the mesh dims over which each is used, and the result's layout."""

    operands: tuple[Layout, ...]
    used: tuple[tuple[int, ...], ...]
    out: Layout


@lru_cache(maxsize=CACHED)
def plan_contraction(name: str, layouts: tuple[Layout, ...], labels: tuple[Labels, ...], out: Labels) -> Contraction:
    """Plan the product of operands without Partial dims.

    Not collective.

    Parameters
    ----------
    name
        Of the operation, for errors.
    layouts, labels
        Of the operands.
    out
        Labels of the result.

    Raises
    ------
    LayoutError
        A diagonal of a sharded dim.

    Notes
    -----
    Where a mesh dim shards different labels of two operands, it goes on with the one for which fewer cells travel;
    an operand that lacks it is gathered along that mesh dim.
    """
    extents = _extents(name, layouts, labels)
    cells = [math.prod(layout.shape) for layout in layouts]
    sharded: list[Label | None] = []
    for m, ranks in enumerate(layouts[0].mesh_shape):
        # per operand the label that mesh dim m shards; one cell that broadcasts is gathered
        cut = [
            own[p.dim]
            if type(p := layout.placements[m]) is Shard and layout.shape[p.dim] == extents[own[p.dim]]
            else None
            for layout, own in zip(layouts, labels)
        ]
        sharded.append(
            min(
                (label for i, label in enumerate(cut) if label is not None and label not in cut[:i]),
                key=lambda label: _cost(label, cut, cells, labels, out, extents, ranks),
                default=None,
            )
        )
        # a diagonal is read where both dims are whole
        if any(own.count(sharded[m]) > 1 for own in labels if sharded[m] is not None):
            if ranks > 1:
                raise LayoutError(
                    described(
                        f"{name}: a diagonal of a sharded dim",
                        expected="the dims of the diagonal whole on every rank",
                        got=[f"{tuple(o.shape)} {list(o.placements)}" for o in layouts],
                        fix=f"redistribute the operand to Replicate() on mesh dim {m}",
                    )
                )
            sharded[m] = None
    mesh_dims = {label: tuple(m for m, s in enumerate(sharded) if s == label) for label in set(sharded) - {None}}
    sizes: dict[Label | None, tuple[int, ...] | None] = {}
    for layout, own in zip(layouts, labels):
        for dim, dims in layout.shard_dims.items():
            if mesh_dims.get(own[dim]) == dims and layout.shape[dim] == extents[own[dim]]:
                sizes.setdefault(own[dim], layout.sizes[dim])
    targets, used = [], []
    for layout, own in zip(layouts, labels):
        full = [label if layout.shape[d] == extents[label] else None for d, label in enumerate(own)]
        placements: list[Placement] = [
            Shard(full.index(label)) if label is not None and label in full else Replicate() for label in sharded
        ]
        targets.append(
            layout_of(
                layout.mesh_shape, placements, layout.shape, [sizes.get(s) if s is not None else None for s in full]
            )
        )
        used.append(tuple(m for m, label in enumerate(sharded) if label is not None and label not in full))
    result: list[Placement] = [
        Replicate() if label is None else Shard(out.index(label)) if label in out else Partial() for label in sharded
    ]
    return Contraction(
        tuple(targets),
        tuple(used),
        layout_of(layouts[0].mesh_shape, result, [extents[s] for s in out], [sizes.get(s) for s in out]),
    )


def _cost(
    label: Label,
    cut: Sequence[Label | None],
    cells: Sequence[int],
    labels: Sequence[Labels],
    out: Labels,
    extents: dict[Label, int],
    ranks: int,
) -> float:
    """Return how many cells a rank receives where a mesh dim of so many ranks shards ``label``."""
    cost = 0.0 if label in out else float(math.prod(extents[s] for s in out))  # a Partial, to be summed
    for own, theirs, n in zip(cut, labels, cells):
        if own not in (None, label):
            cost += n / ranks if label in theirs else n
    return cost


def _extents(name: str, layouts: Sequence[Layout], labels: Sequence[Labels]) -> dict[Label, int]:
    extents: dict[Label, int] = {}
    for layout, own in zip(layouts, labels):
        shapes = ", ".join(str(tuple(o.shape)) for o in layouts)
        if len(own) != layout.ndim:
            raise RuntimeError(f"{name}: an operand needs {len(own)} dims (shapes {shapes})")
        for n, label in zip(layout.shape, own):
            seen = extents.setdefault(label, n)
            if seen != n and (isinstance(label, str) or 1 not in (seen, n)):
                raise RuntimeError(f"{name}: shapes cannot be multiplied ({shapes})")
            if seen == 1:
                extents[label] = n
    return extents


def contract(
    name: str, func: Callable[..., Tensor], operands: Sequence[Any], labels: tuple[Labels, ...], out: Labels
) -> ShardTensor:
    """Return the product ``func`` of operands, at least one of them a ShardTensor.

    Collective where operands are laid out differently. The result may be Partial.

    Parameters
    ----------
    name
        Of the operation, for errors.
    func
        Called with the local blocks of all operands.
    operands
        ShardTensors and plain tensors (Replicate).
    labels, out
        As in `plan_contraction`.
    """
    mesh = mesh_of(operands)
    locals_, layouts = [], []
    for x in operands:
        if isinstance(x, ShardTensor):
            x = resolved(x)
            locals_.append(x.block)
            layouts.append(x.sharding)
        else:
            if x.layout is not torch.strided:
                require_sparse_gradient(name, x)
            locals_.append(x)
            layouts.append(replicated_layout(mesh, x.shape))
    plan = plan_contraction(name, tuple(layouts), labels, out)
    blocks = [
        block(x, mesh, layout, target, used)
        for x, layout, target, used in zip(locals_, layouts, plan.operands, plan.used)
    ]
    return wrap(func(*blocks), plan.out, mesh)


def block(x: Tensor, mesh: CartMesh, layout: Layout, target: Layout, used: tuple[int, ...]) -> Tensor:
    """Return the block of an operand that a product needs. Collective where ``target`` is another layout."""
    if x.layout is not torch.strided:
        return sparse_block(x, mesh, target, used)
    if layout is not target:
        x = redistribute(x, mesh, layout, target)
    return use(x, mesh, used) if used else x
