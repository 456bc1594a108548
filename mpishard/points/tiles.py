"""Points in tiles, a few beside each other with a box around them: what is far from a box is not looked at.

Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mpishard.layout.curve import places_of

POINTS, QUERIES = 32, 64  # of a tile
_PAIRS = 1 << 21  # distances at once
_CURVED = 8  # dims by which points are ordered: more would be cut too coarsely


class Tiles:
    """Points along a curve, in tiles.

    Parameters
    ----------
    positions
        Shape (points, dims).
    size
        Points of a tile.

    Attributes
    ----------
    order : Tensor
        Numbers of the points along the curve.
    low, high : Tensor
        Corners of the tiles' boxes, float64, shape (tiles, dims).
    counts : Tensor
        Points of each tile.
    """

    def __init__(self, positions: Tensor, size: int) -> None:
        n, ndim = positions.shape
        self.size, device = size, positions.device
        if not n:
            self.order = torch.zeros(0, dtype=torch.int64, device=device)
            self.counts = self.order
            self.low = self.high = torch.zeros(0, ndim, dtype=torch.float64, device=device)
            return
        wide = positions[:, :_CURVED].double().cpu().numpy()
        keys = torch.from_numpy(places_of(wide, wide.min(0), wide.max(0)))
        self.order = keys.argsort(stable=True).to(device)
        count = -(-n // size)
        # the last tile is filled up with its last point
        filled = self.order[torch.arange(count * size, device=device).clamp_(max=n - 1)]
        tiles = positions[filled].double().view(count, size, ndim)
        self.low, self.high = tiles.amin(1), tiles.amax(1)
        self.counts = torch.full((count,), size, device=device)
        self.counts[-1] = n - (count - 1) * size

    def members(self, tiles: Tensor) -> Tensor:
        """Return the numbers of the points of some tiles."""
        places = (tiles[:, None] * self.size + torch.arange(self.size, device=tiles.device)).reshape(-1)
        return self.order[places[places < len(self.order)]]


def gaps(low: Tensor, high: Tensor, lows: Tensor, highs: Tensor) -> Tensor:
    """Return the least distance between points of a box and points of each of others."""
    return torch.maximum(lows - high, low - highs).clamp_(min=0).square_().sum(-1).sqrt_()


def reaches(low: Tensor, high: Tensor, lows: Tensor, highs: Tensor) -> Tensor:
    """Return the largest distance between points of a box and points of each of others."""
    return torch.maximum(highs - low, high - lows).square_().sum(-1).sqrt_()


def enough(low: Tensor, high: Tensor, lows: Tensor, highs: Tensor, counts: Tensor, k: int) -> float:
    """Return a distance within which every point of a box has ``k`` points of others, which hold ``counts`` each."""
    far, order = reaches(low, high, lows, highs)[counts > 0].sort()
    held = counts[counts > 0][order].cumsum(0)
    found = (held >= k).nonzero()
    return float(far[found[0, 0]]) if len(found) else float("inf")


def generous(bound: float, dtype: torch.dtype, ndim: int) -> float:
    """Return a bound of exact distances for one of rounded ones."""
    info = torch.finfo(dtype)
    if bound * bound * ndim > info.max / 8:
        return float("inf")
    return bound * (1 + 8 * (ndim + 4) * info.eps) + 8 * (ndim * info.tiny) ** 0.5


def lengths(differences: Tensor) -> Tensor:
    """Return lengths of vectors along the last dim; the same bits of a vector among whatever others.

    The gradient of a vector of zeros is zero.
    """
    first, *rest = differences.unbind(-1)
    squares = first * first
    for x in rest:
        squares = squares + x * x
    none = squares == 0
    return torch.where(none, 0, torch.where(none, 1, squares).sqrt())


def distances(queries: Tensor, points: Tensor) -> Tensor:
    """Return the distance of each query from each point, with the bits of `lengths`, for no gradient.

    Dim after dim: of points of many dims the differences would take so many times the room.
    """
    squares = queries.new_zeros(len(queries), len(points))
    x = torch.empty_like(squares)
    for q, p in zip(queries.unbind(1), points.unbind(1)):
        torch.sub(q[:, None], p, out=x)
        # not by addcmul_, which may round once where these round twice
        squares.add_(x.mul_(x))
    return squares.sqrt_()


def best(distances: Tensor, numbers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` smallest distances of every row (all, if fewer), by (distance, number), and their numbers."""
    if k < distances.shape[1]:
        values, at = distances.topk(k, 1, largest=False)
        found = numbers.gather(1, at)
        # of equal distances at the end, those of the lowest numbers
        tied = ((distances <= values.amax(1, keepdim=True)).sum(1) > k).nonzero().reshape(-1)
        if len(tied):
            some, named = _in_order(distances[tied], numbers[tied])
            values[tied], found[tied] = some[:, :k], named[:, :k]
    else:
        values, found = distances, numbers
    return _in_order(values, found)


def _in_order(distances: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    numbers, at = numbers.sort(1)
    distances, by = distances.gather(1, at).sort(dim=1, stable=True)
    return distances, numbers.gather(1, by)


def within_reach(queries: Tensor, points: Tensor, tiles: Tiles, low: Tensor, high: Tensor, k: int) -> float:
    """Return a distance within which all queries in a box have ``k`` points: of what lies beside, the k-th."""
    gap, order = gaps(low, high, tiles.low, tiles.high).sort()
    first = tiles.members(order[(gap == 0) | (tiles.counts[order].cumsum(0) - tiles.counts[order] < k)])
    if not k <= len(first) <= _PAIRS:
        return enough(low, high, tiles.low, tiles.high, tiles.counts, k)
    parts = queries.split(max(1, _PAIRS // len(first)))
    return max(float(distances(q, points[first]).kthvalue(k, 1).values.max()) for q in parts)


def nearby(
    queries: Tensor, points: Tensor, tiles: Tiles, k: int | None, radius: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Give queries, by numbers, and points that are near enough to be looked at, with their distances, in parts.

    Parameters
    ----------
    queries, points
        Positions.
    tiles
        Of the points.
    k
        How many of the nearest points are wanted, where ``radius`` does not say how near.
    radius
        Points farther away are not wanted.

    Yields
    ------
    tuple of Tensor
        Numbers of queries (m), numbers of points (n), distances (m, n). Parts of the same queries follow each other,
        with the same tensor of them, and cover all points that are wanted.
    """
    by = Tiles(queries, QUERIES)
    for i in range(len(by.counts)):
        rows = by.members(torch.tensor([i], device=queries.device))
        low, high = by.low[i], by.high[i]
        bound = radius if k is None else within_reach(queries[rows], points, tiles, low, high, k)
        bound = generous(bound, queries.dtype, queries.shape[1])
        near = tiles.members((gaps(low, high, tiles.low, tiles.high) <= bound).nonzero().reshape(-1))
        step = max(1, _PAIRS // max(len(near), 1))
        for some in rows.split(step):
            for part in near.split(_PAIRS) if len(near) else [near]:
                yield some, part, distances(queries[some], points[part])
