"""Transfer plans: the boxes that travel when a tensor goes from any layout to any other on the same mesh.

Nothing here is collective.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise, product
from typing import NamedTuple

from mpishard.layout.block_sizes import bounds
from mpishard.layout.layout import Layout
from mpishard.layout.partition import coords_of, rank_of
from mpishard.layout.placement import Shard

Box = tuple[tuple[int, int], ...]


class Transfer(NamedTuple):
    """What one rank does in a redistribution; boxes are in local indices.

    Attributes
    ----------
    local : tuple of (Box, Box) or None
        Source and destination box of the cells that stay, or None.
    sends : tuple of (int, Box)
        Per peer (mesh rank, ascending), the box of the source block.
    recvs : tuple of (int, Box)
        Per peer, the box of the destination block.
    """

    local: tuple[Box, Box] | None
    sends: tuple[tuple[int, Box], ...]
    recvs: tuple[tuple[int, Box], ...]

    @property
    def reverse(self) -> Transfer:
        """The way back."""
        return Transfer(self.local and self.local[::-1], self.recvs, self.sends)


def plan_transfer(source: Layout, target: Layout, coords: tuple[int, ...]) -> Transfer:
    """Plan the redistribution of a tensor without Partial placements for the rank at ``coords``.

    A cell that several ranks hold comes from the holder that agrees with the receiver in every mesh dim in
    which the source is replicated, so that no rank serves more than its share. Peers are found by bisection: other
    ranks are not looked at.
    """
    fixed = {m: coords[m] for m, p in enumerate(source.placements) if type(p) is not Shard}
    my_source, my_target, me = source.box(coords), target.box(coords), rank_of(coords, source.mesh_shape)
    stays = _meet(my_source, my_target)
    sends = sorted((r, _shift(out, my_source)) for r, out in _meeting(target, my_source, fixed) if r != me)
    recvs = sorted((r, _shift(into, my_target)) for r, into in _meeting(source, my_target, fixed) if r != me)
    local = None if stays is None else (_shift(stays, my_source), _shift(stays, my_target))
    return Transfer(local, tuple(sends), tuple(recvs))


def _meeting(layout: Layout, box: Box, fixed: Mapping[int, int]) -> Iterator[tuple[int, Box]]:
    """Give the ranks, at the ``fixed`` coordinates, whose blocks have cells of a box, and these cells."""
    shape = layout.mesh_shape
    if any(lo >= hi for lo, hi in box):
        return
    along: list[list[tuple[tuple[tuple[int, int], ...], tuple[int, int]]]] = []
    for dim, (lo, hi) in enumerate(box):
        sizes, mesh_dims = layout.sizes[dim], layout.shard_dims.get(dim, ())
        if sizes is None:
            along.append([((), (lo, hi))])
            continue
        b, choices = bounds(sizes), []
        first = bisect_right(b, lo) - 1
        for i, (p, q) in enumerate(pairwise(b[first : bisect_left(b, hi) + 1]), first):
            start, stop, left, at = max(lo, p), min(hi, q), i, []
            for m in reversed(mesh_dims):
                left, c = divmod(left, shape[m])
                at.append((m, c))
            if start < stop and all(fixed.get(m, c) == c for m, c in at):
                choices.append((tuple(at), (start, stop)))
        along.append(choices)
    rest = [m for m in range(len(shape)) if m not in layout.sharded_mesh_dims]
    copies = [[(m, fixed[m])] if m in fixed else [(m, c) for c in range(shape[m])] for m in rest]
    for each in product(*along):
        cells = tuple(interval for _, interval in each)
        for copy in product(*copies):
            place = dict(copy)
            for some, _ in each:
                place.update(some)
            yield rank_of([place[m] for m in range(len(shape))], shape), cells


def plan_fetch(
    source: Layout,
    wanted: Callable[[tuple[int, ...]], Box],
    coords: tuple[int, ...],
    near: Iterable[int] | None = None,
) -> Transfer:
    """Plan how the rank at ``coords`` gets a box of any size, and gives others theirs.

    Parameters
    ----------
    source
        Layout of the tensor, without Partial placements.
    wanted
        Coordinates of a rank -> the box that it wants, in global indices; the same function on every rank.
    coords
        Of this rank.
    near
        The ranks, ascending, whose boxes may have cells of this rank's block; all of them, if not given.
    """
    fixed = {m: coords[m] for m, p in enumerate(source.placements) if type(p) is not Shard}
    my_source, my_target, me = source.box(coords), wanted(coords), rank_of(coords, source.mesh_shape)
    stays, sends = _meet(my_source, my_target), []
    for rank in range(math.prod(source.mesh_shape)) if near is None else near:
        other = coords_of(rank, source.mesh_shape)
        if rank == me or any(other[m] != c for m, c in fixed.items()):
            continue
        out = _meet(my_source, wanted(other))
        if out is not None:
            sends.append((rank, _shift(out, my_source)))
    recvs = sorted((r, _shift(into, my_target)) for r, into in _meeting(source, my_target, fixed) if r != me)
    local = None if stays is None else (_shift(stays, my_source), _shift(stays, my_target))
    return Transfer(local, tuple(sends), tuple(recvs))


def _meet(a: Box, b: Box) -> Box | None:
    box = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b))
    return box if all(hi > lo for lo, hi in box) else None


def _shift(box: Box, origin: Box) -> Box:
    return tuple((lo - o, hi - o) for (lo, hi), (o, _) in zip(box, origin))
