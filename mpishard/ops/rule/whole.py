"""Functions that need some dims whole: torch is called on the blocks once they are, and the results are cut again.

They are gathered, or, where a function treats the other dims apart from each other, one of these is cut instead.

A rule declares per operand which dims lie together (labels) and which are gathered (None), and the same of each
result: along its labels it is cut as the operands are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.graph import apart, unpacked
from mpishard.autograd.linear import differentiated
from mpishard.layout import Labels, Layout, cut_elsewhere, most_cells
from mpishard.layout.remembered import remembered
from mpishard.ops.rule.agreement import agree_in_backward, agreed
from mpishard.ops.rule.align import meet
from mpishard.ops.rule.dim import trivially_sharded, whole_along
from mpishard.tensor.notice import notice_gather
from mpishard.tensor.operand import moved, resolved
from mpishard.tensor.shard_tensor import ShardTensor

# of the labels of a result, None says that it stays plain: it is the same on every rank
Results = Labels | list[Labels | None] | Callable[[Tensor], Labels]
Spare = Callable[[Tensor, list[int], Labels], Tensor]
# how often its share of the cells a rank may get: beyond that many ranks get the same ones, which a gather is for
_ROOM = 4


@remembered
def _elsewhere(layout: Layout, dims: tuple[int, ...]) -> Layout | None:
    """Return the layout with other dims cut in place of some, or None where they have no room. Not collective."""
    target = cut_elsewhere(layout, dims)
    share = math.prod(layout.shape) / math.prod(layout.mesh_shape[m] for m in layout.sharded_mesh_dims)
    return target if most_cells(target) <= _ROOM * share else None


def whole_elsewhere(x: ShardTensor, dims: tuple[int, ...]) -> ShardTensor:
    """Return ``x`` with ``dims`` whole on every rank, and others cut in their place. Collective where it moves.

    So no rank has much more than its share; gathered where others have no room for as many ranks.
    """
    x = resolved(x)
    layout = x.sharding
    if all(d not in layout.shard_dims or trivially_sharded(layout, d) for d in dims):
        return whole_along(x, dims)
    target = _elsewhere(layout, dims)
    if target is None:
        return whole_along(x, dims)
    notice_gather(x.mesh, layout, target, x.block.itemsize)
    return moved(x, target)


def one_cell(x: Tensor, shape: list[int], labels: Labels) -> Tensor:
    """Return what stands in for a block without cells: zeros, with its graph. Not collective."""
    return x.new_zeros(shape) + x.sum().to(x.dtype)


def whole(
    func: Callable[..., Any],
    operands: Sequence[Any],
    labels: Sequence[Labels] | None = None,
    results: Results | None = None,
    *,
    elsewhere: bool = False,
    checked: bool = False,
    spare: Spare | None = one_cell,
) -> Any:
    """Return ``func`` of operands some of whose dims are whole, its results cut along the others.

    Collective where an operand moves: a dim that is gathered is sharded, or labels are sharded differently.

    Parameters
    ----------
    func
        Called with local tensors; gives a tensor or a tuple of tensors.
    operands
        ShardTensors, tensors (Replicate); anything else is passed on.
    labels
        Per operand and dim; None: a dim that is gathered. By default all are.
    results
        Labels of every result, or of each, in a list, or a function of it that gives them. By default all dims
        are whole.
    elsewhere
        Whether other dims may be cut in place of those that become whole: all labels are in all results.
    checked
        Whether ``func`` may raise on a rank for what it finds in its cells: then it raises on all, by one reduction.
    spare
        What torch gets of an operand in place of no cells along a label, with one; the results are cut to none. None:
        torch gets the block as it is.
    """
    labels = [(None,) * x.ndim if isinstance(x, Tensor) else () for x in operands] if labels is None else labels
    if elsewhere:
        gone = [tuple(d for d, label in enumerate(own) if label is None) for own in labels]
        operands = [whole_elsewhere(x, d) if isinstance(x, ShardTensor) else x for x, d in zip(operands, gone)]
    met = meet(operands, labels)
    held = [(x, own) for x, own in zip(met.locals, labels) if isinstance(x, Tensor)]
    empty = {label for x, own in held for n, label in zip(x.shape, own) if n == 0} - {None} if spare else set()
    local = met.locals
    if empty and spare is not None:
        local = tuple(
            spare(x, [1 if s in empty else n for n, s in zip(x.shape, own)], own)
            if isinstance(x, Tensor) and not empty.isdisjoint(own)
            else x
            for x, own in zip(local, labels)
        )
    if not checked:
        found = func(*local)
    else:
        at = [i for i, x in enumerate(local) if isinstance(x, Tensor)]

        def call(*tensors: Tensor) -> Any:
            given = dict(zip(at, tensors))
            return func(*(given.get(i, x) for i, x in enumerate(local)))

        with unpacked():
            found = agreed(call, met.mesh, met.plan.operands, *(local[i] for i in at))
        parts = [found] if isinstance(found, Tensor) else list(found)
        agree_in_backward(parts, [x for x in local if isinstance(x, Tensor)], met.mesh, met.plan.operands)

    def cut(t: Tensor, own: Labels | None) -> Any:
        if own is None:
            return t
        for d, label in enumerate(own):
            t = apart(t.narrow(d, 0, 0)) if label in empty else t
        return met.result(t, own)

    def labels_of(i: int, t: Tensor) -> Labels | None:
        if results is None:
            return (None,) * t.ndim
        return results(t) if callable(results) else results[i] if isinstance(results, list) else results

    if isinstance(found, Tensor):
        return cut(found, labels_of(0, found))
    return type(found)([cut(t, labels_of(i, t)) for i, t in enumerate(found)])


def batchwise(func: Callable[..., Any], operands: Sequence[Any], cores: Sequence[int]) -> Any:
    """Return ``func`` of operands whose last ``cores[i]`` dims are whole; the dims before them broadcast.

    As `whole`. Every result has the broadcast dims first. A matrix that has no inverse, or factor, is one rank's;
    what it does with it is every rank's.
    """
    labels = [(*range(c - x.ndim, 0), *(None,) * c) if isinstance(x, Tensor) else () for x, c in zip(operands, cores)]
    batch = tuple(range(-max(len(own) - c for own, c in zip(labels, cores)), 0))

    def results(t: Tensor) -> Labels:
        return (*batch, *(None,) * (t.ndim - len(batch)))

    return whole(func, operands, labels, results, elsewhere=True, checked=True, spare=_harmless)


def _harmless(x: Tensor, shape: list[int], labels: Labels) -> Tensor:
    """Return a harmless matrix (or vector, or number) in place of a block without any, with its graph.

    Torch refuses some empty batches, and of others the results lose their graph: this rank would not take part in
    the communication of backward.
    """
    core = labels.count(None)
    steps = torch.arange(1, max((1, *shape)) + 1, device=x.device).to(x.dtype)
    if core == 2:  # with singular values and eigenvalues that differ: their gradients are finite
        spare = torch.diag(steps)[: shape[-2], : shape[-1]].expand(shape)
    else:
        spare = steps[: shape[-1]].expand(shape) if core else steps[0].expand(shape)
    return spare + 0 * x.sum() if differentiated(x) else spare
