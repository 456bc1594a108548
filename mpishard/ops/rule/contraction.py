"""Products that sum over shared dims: which blocks meet, and how the result is laid out.

Every dim of every operand has a label. A mesh dim that shards a label shards it in all operands that have it;
those without it are used by all ranks. A label of the result is sharded there, a summed one leaves a Partial: the
product of matching blocks, to be summed over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.use import use_part
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError
from mpishard.layout import Alignment, Labels, Layout, Partial, align, extents_of
from mpishard.layout.remembered import remembered
from mpishard.ops.rule.sparse import require_sparse_gradient, sparse_block
from mpishard.tensor.operand import blocks_of
from mpishard.tensor.shard_tensor import ShardTensor, wrap

# a str must have one extent in all operands; an int may have extent 1, which broadcasts
Label = int | str


@remembered
def plan_contraction(
    name: str, layouts: tuple[Layout, ...], labels: tuple[Labels, ...], out: Labels
) -> tuple[Alignment, Layout]:
    """Plan the product of operands without Partial dims: where they meet, and the layout of the result.

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
    shapes = ", ".join(str(tuple(o.shape)) for o in layouts)
    for layout, own in zip(layouts, labels):
        if len(own) != layout.ndim:
            raise RuntimeError(f"{name}: an operand needs {len(own)} dims (shapes {shapes})")
    mesh_shape = layouts[0].mesh_shape

    def mismatch(*_: int) -> Exception:
        return RuntimeError(f"{name}: shapes cannot be multiplied ({shapes})")

    extents = extents_of(layouts, labels, mismatch, exact=str)
    cells = [math.prod(layout.shape) for layout in layouts]

    def cheapest(found: Sequence[Sequence[Any]]) -> list[Labels]:
        cut: list[Labels] = []
        for m, at in enumerate(found):
            sharded = dict.fromkeys(label for label in at if label is not None)
            label = min(
                sharded, key=lambda label: _cost(label, at, cells, labels, out, extents, mesh_shape[m]), default=None
            )
            # a diagonal is read where both dims are whole
            diagonal = label is not None and any(own.count(label) > 1 for own in labels)
            if diagonal and mesh_shape[m] > 1:
                raise LayoutError(
                    f"{name}: a diagonal of a sharded dim",
                    expected="the dims of the diagonal whole on every rank",
                    got=[f"{tuple(o.shape)} {list(o.placements)}" for o in layouts],
                    fix=f"redistribute the operand to Replicate() on mesh dim {m}",
                )
            cut.append(() if label is None or diagonal else (label,))
        return cut

    plan = align(layouts, labels, extents, cheapest)
    # what is summed leaves a Partial
    return plan, plan.result(out, [extents[label] for label in out], Partial())


def _cost(
    label: Label,
    found: Sequence[Label | None],
    cells: Sequence[int],
    labels: Sequence[Labels],
    out: Labels,
    extents: dict[Label, int],
    ranks: int,
) -> float:
    """Return how many cells a rank receives where a mesh dim of so many ranks shards ``label``."""
    cost = 0.0 if label in out else float(math.prod(extents[s] for s in out))  # a Partial, to be summed
    for own, theirs, n in zip(found, labels, cells):
        if own not in (None, label):
            cost += n / ranks if label in theirs else n
    return cost


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
    mesh, locals_, layouts = blocks_of(operands)
    for x in locals_:
        if x.layout is not torch.strided:
            require_sparse_gradient(name, x)
    plan, result = plan_contraction(name, layouts, labels, out)
    return wrap(func(*meeting_blocks(locals_, mesh, layouts, plan)), result, mesh)


def multiply(
    name: str, func: Callable[..., Tensor], operands: Sequence[Any], labels: tuple[Labels, ...], out: Labels
) -> ShardTensor:
    """Return the product of operands as `contract` does, for a ``func`` that does not communicate."""
    if len({x.dtype for x in operands}) > 1 and not torch._C._is_any_autocast_enabled():
        # mostly torch refuses that, but not of blocks with a cell or none to sum: so it is asked on all ranks
        func(*(torch.zeros([min(n, 2) for n in x.shape], dtype=x.dtype, device=x.device) for x in operands))
    return contract(name, func, operands, labels, out)


def meeting_blocks(
    locals_: Sequence[Tensor], mesh: CartMesh, layouts: Sequence[Layout], plan: Alignment
) -> list[Tensor]:
    """Return the blocks of operands that a product needs. Collective where they are laid out differently."""
    return [
        _block(x, mesh, layout, target, used)
        for x, layout, target, used in zip(locals_, layouts, plan.operands, plan.used)
    ]


def _block(x: Tensor, mesh: CartMesh, layout: Layout, target: Layout, used: tuple[int, ...]) -> Tensor:
    """Return the block of an operand that a product needs. Collective where ``target`` is another layout."""
    if x.layout is not torch.strided:
        return sparse_block(x, mesh, target, used)
    return use_part(x, mesh, layout, target, used) if used or layout is not target else x
