"""Look-ups in sorted boundaries and in sets: searchsorted, bucketize, isin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpishard.ops.rule.agreement import agreed
from mpishard.ops.rule.align import meet
from mpishard.ops.rule.dim import gathered
from mpishard.tensor.operand import mesh_of, replicated_layout, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


@implements(torch.isin, sharded="gathers")
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    """Tell which elements are among others. Collective where ``test_elements`` is sharded: it is gathered."""
    mesh = mesh_of((elements, test_elements))
    others = gathered(test_elements)
    others = others.block if isinstance(others, ShardTensor) else others
    if not isinstance(elements, ShardTensor):
        local = torch.isin(elements, others, assume_unique=assume_unique, invert=invert)
        return wrap(local, replicated_layout(mesh, local.shape), mesh)
    x = resolved(elements)
    return wrap(torch.isin(x.block, others, assume_unique=assume_unique, invert=invert), x.sharding, mesh)


@implements(torch.bucketize, sharded="gathers")
def bucketize(input: Any, boundaries: Any, **options: Any) -> Any:
    """Return the bucket of every cell. Collective where the boundaries are sharded: they are gathered."""
    return searchsorted(boundaries, input, **options)


@implements(torch.searchsorted, sharded="gathers")
def searchsorted(sorted_sequence: Any, input: Any = None, *, sorter: Any = None, **options: Any) -> Any:
    """Return where values would be inserted. Collective where the last dim of the sequence is sharded: it is gathered.

    The leading dims of sequence and values lie together; the values stay where they are.
    """
    values = options.pop("self", input)
    lead: tuple[Any, ...] = tuple(range(sorted_sequence.ndim - 1))
    if not isinstance(values, Tensor):
        own: tuple[Any, ...] = ()
    elif lead:
        own = (*lead, "value")
    else:
        own = tuple(range(values.ndim))
    met = meet((sorted_sequence, values, sorter), ((*lead, None), own, (*lead, None)))
    sequence, cells, order = (t.contiguous() if isinstance(t, Tensor) else t for t in met.locals)

    def search() -> Tensor:
        return torch.searchsorted(sequence, cells, sorter=order, **options)

    # torch looks whether the sorter's numbers are in range
    return met.result(search() if order is None else agreed(search, met.mesh, met.plan.operands), own)
