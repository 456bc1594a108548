"""The nearest points of queries."""

from __future__ import annotations

import math
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.linear import differentiated
from mpishard.comm.interruption import whole
from mpishard.errors import LayoutError
from mpishard.points.meet import as_queries, distances_to, met
from mpishard.points.tiles import POINTS, Tiles, best, nearby
from mpishard.tensor.shard_tensor import ShardTensor


class Nearest(NamedTuple):
    """What `knn` found; both of shape (queries, k), sharded as the queries.

    Attributes
    ----------
    indices : ShardTensor
        Global numbers of the points, int64; of each query the nearest first.
    distances : ShardTensor
        Their distances, differentiable.
    """

    indices: ShardTensor
    distances: ShardTensor


@whole
def knn(points: Tensor, queries: Tensor, k: int) -> Nearest:
    """Return the ``k`` nearest points of every query.

    Collective. What torch finds by ``torch.cdist(queries, points).topk(k, largest=False)`` on whole tensors; of points
    that are equally far, those of the lowest numbers.

    Parameters
    ----------
    points, queries
        Positions, of shape (points, dims) and (queries, dims), float32 or float64, sharded along dim 0; one of them
        may be a plain tensor, which counts as replicated. They may be one tensor: then a point is the first of its
        own neighbours.
    k
        How many.

    Returns
    -------
    Nearest

    Raises
    ------
    LayoutError
        Other shapes, fewer points than ``k``, positions that are not finite.
    UnsupportedDtypeError
        Another dtype.
    MeshError
        Two meshes.
    DesyncError
        Calls that differ between ranks.

    Notes
    -----
    A point travels to ranks whose queries may have it among their neighbours, which boxes around the ranks' points and
    queries tell: few do where what is near lies on one rank, as `mpishard.graph.partition` orders it. Inside a rank
    boxes around some tens of points tell which distances are computed, a bounded number at a time.

    Adjoint: cotangents of distances go to the queries, and home to the owners of their neighbours. Of a distance of
    zero, and of which points are the nearest, there is no gradient.

    Examples
    --------
    >>> near = ms.points.knn(x, x, 8)
    >>> weights = torch.softmax(-near.distances, 1)
    """
    error = None
    if not isinstance(k, Integral) or isinstance(k, bool) or k < 1:
        error = LayoutError("points.knn: no number of neighbours", expected="an integer k >= 1", got=k, fix="give one")
    m = met("points.knn", points, queries, 1 if error else int(k), math.inf, error)
    own, near, count = m.queries.block.detach(), m.near, int(k)
    indices = torch.empty(len(own), count, dtype=torch.int64, device=own.device)
    distances = own.new_empty(len(own), count)
    tiles, found, rows = Tiles(near, POINTS), None, None
    for of, part, far in nearby(own, near, tiles, count, math.inf):
        named = m.numbers[part].expand(far.shape)
        if found is not None and rows is of:
            far, named = torch.cat([found[0], far], 1), torch.cat([found[1], named], 1)
        found, rows = best(far, named, count), of
        if found[0].shape[1] == count:
            distances[of], indices[of] = found
    if differentiated(m.points.block) or differentiated(m.queries.block):
        of = torch.arange(len(own), device=own.device)[:, None].expand(indices.shape)
        distances = distances_to(m, indices, of)
    return Nearest(as_queries(m, indices), as_queries(m, distances))
