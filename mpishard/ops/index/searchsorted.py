"""Look-ups in sorted boundaries and in sets: searchsorted, bucketize, isin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpishard.ops.rule.whole import whole
from mpishard.tensor.registry import implements


@implements(torch.isin, sharded="gathers")
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    """Tell which elements are among others. Collective where ``test_elements`` is sharded: it is gathered."""
    own = tuple(range(elements.ndim)) if isinstance(elements, Tensor) else ()
    others = (None,) * test_elements.ndim if isinstance(test_elements, Tensor) else ()
    return whole(
        lambda a, b: torch.isin(a, b, assume_unique=assume_unique, invert=invert),
        (elements, test_elements),
        (own, others),
        own,
    )


@implements(torch.bucketize, sharded="gathers")
def bucketize(input: Any, boundaries: Any, **options: Any) -> Any:
    """Return the bucket of every cell. Collective where the boundaries are sharded: they are gathered."""
    if boundaries.ndim != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.ndim})")
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

    def search(*tensors: Any) -> Tensor:
        sequence, cells, order = (t.contiguous() if isinstance(t, Tensor) else t for t in tensors)
        return torch.searchsorted(sequence, cells, sorter=order, **options)

    # torch looks whether the sorter's numbers are in range
    labels = ((*lead, None), own, (*lead, None))
    return whole(search, (sorted_sequence, values, sorter), labels, own, checked=sorter is not None)
