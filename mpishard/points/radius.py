"""All points within a radius of queries."""

from __future__ import annotations

import contextlib
import math
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.linear import differentiated
from mpishard.comm.collective import blocking
from mpishard.comm.interruption import whole
from mpishard.errors import LayoutError
from mpishard.layout import Layout, layout_of
from mpishard.points.meet import Met, as_queries, distances_to, met
from mpishard.points.tiles import POINTS, Tiles, nearby
from mpishard.tensor.operand import moved
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Within(NamedTuple):
    """What `radius` found: a row for each pair of a query and a point, by query, then distance, then point.

    Attributes
    ----------
    counts : ShardTensor
        How many points each query has, int64, shape (queries,), sharded as the queries. Their ``cumsum(0)`` says where
        the rows of each end.
    queries, indices : ShardTensor
        Global numbers of query and point, int64, shape (pairs,), on the rank of the query.
    distances : ShardTensor
        Differentiable, shape (pairs,), likewise.
    """

    counts: ShardTensor
    queries: ShardTensor
    indices: ShardTensor
    distances: ShardTensor


@whole
def radius(points: Tensor, queries: Tensor, radius: float, max_points: int | None = None) -> Within:
    """Return all points that are no farther from a query than a radius.

    Collective. Ragged, as each query has another number of points: a list of pairs with the number of each query,
    ``torch.stack([found.indices, found.queries])`` are the edges from points to queries for `mpishard.graph.halo`.

    Parameters
    ----------
    points, queries
        As for `knn`.
    radius
        Not negative.
    max_points
        Of each query no more than the nearest so many; of those equally far, the lowest numbers. None: all.

    Returns
    -------
    Within

    Raises
    ------
    LayoutError
        Other shapes, a negative radius, positions that are not finite.
    UnsupportedDtypeError
        Another dtype.
    MeshError
        Two meshes.
    DesyncError
        Calls that differ between ranks.

    Notes
    -----
    What travels, and the adjoint, are as of `knn`.

    Examples
    --------
    >>> found = ms.points.radius(x, x, 0.1)
    >>> graph = ms.graph.halo(torch.stack([found.indices, found.queries]), x)
    """
    error, within = None, math.nan
    with contextlib.suppress(OverflowError):  # of an integer beyond all doubles
        within = float(radius) if isinstance(radius, Real) else math.nan
    if not within >= 0:
        error = LayoutError("points.radius: no radius", expected="a number >= 0", got=radius, fix="give one")
    elif max_points is not None and (not isinstance(max_points, Integral) or max_points < 1):
        error = LayoutError(
            "points.radius: no number of points",
            expected="an integer max_points >= 1, or None",
            got=max_points,
            fix="give one",
        )
    # more than there are is all of them; torch compares in 64 bits
    most = None if error or max_points is None else min(int(max_points), 1 << 62)
    m = met("points.radius", points, queries, None, within, error, most)
    own, near = m.queries.block.detach(), m.near
    pairs = [(torch.zeros(0, dtype=torch.int64, device=own.device),) * 2 + (own.new_zeros(0),)]
    for of, part, far in nearby(own, near, Tiles(near, POINTS), None, within):
        row, column = (far <= within).nonzero().unbind(1)
        pairs.append((of[row], m.numbers[part[column]], far[row, column]))
    of, indices, distances = map(torch.cat, zip(*pairs))
    # by query, distance, number: the last key first
    order = indices.argsort()
    order = order[distances[order].argsort(stable=True)]
    order = order[of[order].argsort(stable=True)]
    of, indices, distances = of[order], indices[order], distances[order]
    counts = torch.bincount(of, minlength=len(own))
    if most is not None:
        place = torch.arange(len(of), device=of.device) - (counts.cumsum(0) - counts)[of]
        kept = place < most
        of, indices, distances = of[kept], indices[kept], distances[kept]
        counts = counts.clamp(max=most)
    if differentiated(m.points.block) or differentiated(m.queries.block):
        distances = distances_to(m, indices, of)
    numbers = of + m.queries.sharding.interval(0, m.mesh.coords)[0]
    by_query = as_queries(m, counts)
    cut, given = _pairs(m, m.queries.sharding, counts), _pairs(m, m.given, by_query.block)
    rest = (moved(wrap(x, cut, m.mesh), given) for x in (numbers, indices, distances))
    return Within(by_query, *rest)


def _pairs(m: Met, rows: Layout, counts: Tensor) -> Layout:
    """Return the layout of pairs on the ranks of their queries. Collective over the mesh dims that cut these."""
    dims, total = rows.sharded_mesh_dims, int(counts.sum())
    if not dims:
        return layout_of(m.mesh.shape, rows.placements, (total,))
    group = m.mesh.group(dims)
    sizes = blocking.gather_counts("pairs", total, group, rows.shape).tolist()
    return layout_of(m.mesh.shape, rows.placements, (sum(sizes),), (tuple(sizes),))
