"""Cells one by one: the rank that holds each of many, and the runs of them that ranks send each other.

Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpishard.layout.block_sizes import BlockSizes, bounds
from mpishard.layout.layout import Layout
from mpishard.layout.partition import rank_of

# per rank of the mesh, ascending, the consecutive cells that go there or come from there
Spans = tuple[tuple[int, tuple[int, int]], ...]


def blocks_of(sizes: Sequence[int], cells: np.ndarray) -> np.ndarray:
    """Return the index of the block that holds each cell.

    Examples
    --------
    >>> blocks_of((3, 0, 2), np.array([0, 2, 3]))
    array([0, 0, 2])
    """
    if not isinstance(sizes, BlockSizes):
        return np.asarray(np.searchsorted(bounds(sizes)[1:-1], cells, "right"))
    size, count = np.array(sizes.runs).T
    run = np.searchsorted(np.cumsum(size * count)[:-1], cells, "right")
    first, start = np.cumsum(count) - count, np.cumsum(size * count) - size * count
    return np.asarray(first[run] + (cells - start[run]) // size[run])


def holders(layout: Layout, dims: Sequence[int], indices: Sequence[np.ndarray], coords: Sequence[int]) -> np.ndarray:
    """Return the rank of the mesh that holds each cell; along mesh dims that shard none of ``dims``, at ``coords``.

    Parameters
    ----------
    layout
        Of the tensor.
    dims, indices
        Dims of the tensor, and the cells' indices along each.
    coords
        Of this rank.
    """
    mesh_shape, at = layout.mesh_shape, list(coords)
    ranks = np.zeros(np.broadcast_shapes(*(i.shape for i in indices)), np.int64)
    strides = np.cumprod((1, *mesh_shape[:0:-1]))[::-1]
    for d, index in zip(dims, indices):
        sizes = layout.sizes[d]
        if sizes is None:
            continue
        block = blocks_of(sizes, index)
        for m in reversed(layout.shard_dims[d]):
            block, coordinate = np.divmod(block, mesh_shape[m])
            ranks += coordinate * strides[m]
            at[m] = 0
    return ranks + rank_of(at, mesh_shape)


def spans_of(ranks: np.ndarray) -> Spans:
    """Return the spans of cells that belong to ascending ranks.

    Examples
    --------
    >>> spans_of(np.array([4, 4, 7]))
    ((4, (0, 2)), (7, (2, 3)))
    """
    firsts = np.flatnonzero(np.diff(ranks, prepend=-1))
    return tuple(zip(ranks[firsts].tolist(), zip(firsts.tolist(), [*firsts[1:].tolist(), len(ranks)])))
