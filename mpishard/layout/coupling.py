"""Coupling plans: which boxes travel between a rank of one program and the ranks of another. Pure arithmetic, no MPI.

Ranks of the other side are found by bisection on the borders of its blocks, dim by dim: what a rank plans grows with
its neighbours there, and with the extents of the mesh dims, never with the number of ranks. Nothing here is collective.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from mpishard.layout.block_sizes import bounds
from mpishard.layout.layout import Layout
from mpishard.layout.partition import coords_of, rank_of
from mpishard.layout.transfer import Box, relative


class Share(NamedTuple):
    """What travels between this rank and one of the other side.

    Attributes
    ----------
    peer : int
        Rank in the mesh of the other side.
    box : Box
        The cells, in indices of this rank's block.
    """

    peer: int
    box: Box


def plan_sources(writer: Layout, reader: Layout, rank: int) -> tuple[Share, ...]:
    """Plan what a rank of the reading side gets, by ascending writer.

    Parameters
    ----------
    writer, reader
        Layouts of the same global shape, without Partial placements, each on the mesh of its program.
    rank
        In the reader's mesh.

    Notes
    -----
    Of the replicas of a block, the reader's rank modulo their number serves it.

    Examples
    --------
    >>> halves, thirds = layout_of((2,), (Shard(0),), (6,)), layout_of((3,), (Shard(0),), (6,))
    >>> plan_sources(halves, thirds, 1)
    (Share(peer=0, box=((0, 1),)), Share(peer=1, box=((1, 2),)))
    """
    mine = reader.box(coords_of(rank, reader.mesh_shape))
    free = _free(writer)
    replica = coords_of(rank % _replicas(writer), [writer.mesh_shape[m] for m in free])
    shares = [
        Share(_rank(writer, {**at, **dict(zip(free, replica))}), relative(box, mine))
        for at, box in _meeting(writer, mine)
    ]
    return tuple(sorted(shares))


def plan_targets(writer: Layout, reader: Layout, rank: int) -> tuple[Share, ...]:
    """Plan what a rank of the writing side gives, by ascending reader: the other end of `plan_sources`.

    Parameters
    ----------
    writer, reader
        As of `plan_sources`.
    rank
        In the writer's mesh.
    """
    coords = coords_of(rank, writer.mesh_shape)
    mine = writer.box(coords)
    replicas, copies = _replicas(writer), _free(writer)
    own = rank_of([coords[m] for m in copies], [writer.mesh_shape[m] for m in copies])
    free = _free(reader)
    shares = []
    for at, box in _meeting(reader, mine):
        for others in product(*(range(reader.mesh_shape[m]) for m in free)):
            peer = _rank(reader, {**at, **dict(zip(free, others))})
            if peer % replicas == own:
                shares.append(Share(peer, relative(box, mine)))
    return tuple(sorted(shares))


def is_idle(layout: Layout, rank: int) -> bool:
    """Whether a rank holds no cell."""
    return 0 in layout.local_shape(coords_of(rank, layout.mesh_shape))


def _meeting(layout: Layout, box: Box) -> Iterator[tuple[dict[int, int], Box]]:
    """Yield the coordinates (in the mesh dims that shard) of blocks that meet a box, and what they have in common."""
    if any(lo >= hi for lo, hi in box):
        return
    blocks = []
    for d, (lo, hi) in enumerate(box):
        sizes = layout.sizes[d]
        if sizes is None:
            blocks.append([(-1, (lo, hi))])
            continue
        borders = bounds(sizes)
        met, i = [], bisect_right(borders, lo) - 1
        while i < len(sizes) and borders[i] < hi:
            if sizes[i]:
                met.append((i, (max(lo, borders[i]), min(hi, borders[i + 1]))))
            i += 1
        blocks.append(met)
    for chosen in product(*blocks):
        at: dict[int, int] = {}
        for d, (i, _) in enumerate(chosen):
            mesh_dims = layout.shard_dims.get(d, ())
            at.update(zip(mesh_dims, coords_of(i, [layout.mesh_shape[m] for m in mesh_dims])))
        yield at, tuple(span for _, span in chosen)


def _free(layout: Layout) -> list[int]:
    return [m for m in range(len(layout.mesh_shape)) if m not in layout.sharded_mesh_dims]


def _replicas(layout: Layout) -> int:
    return math.prod(layout.mesh_shape[m] for m in _free(layout))


def _rank(layout: Layout, at: dict[int, int]) -> int:
    return rank_of([at[m] for m in range(len(layout.mesh_shape))], layout.mesh_shape)
