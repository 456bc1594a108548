"""Transfer plans: the boxes that travel when a tensor goes from any layout to any other on the same mesh.

Nothing here is collective.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from mpishard.layout.block_sizes import FEW, bounds, count_with_cells, stretches
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
    sends : tuple of (int, Box), or Peers
        Per peer (mesh rank, ascending), the box of the source block.
    recvs : tuple of (int, Box), or Peers
        Per peer, the box of the destination block.
    """

    local: tuple[Box, Box] | None
    sends: tuple[tuple[int, Box], ...] | Peers
    recvs: tuple[tuple[int, Box], ...] | Peers

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
    sends, recvs = Peers(target, my_source, fixed, me), Peers(source, my_target, fixed, me)
    return Transfer(_stays(my_source, my_target), _few(sends), _few(recvs))


class Peers:
    """Other ranks whose blocks have cells of a box, ascending, and these cells: a product of ranges, made when asked.

    Parameters
    ----------
    layout
        Whose blocks.
    box
        In global indices; the cells are given relative to it.
    fixed
        Mesh dim -> the coordinate of the ranks that are meant, where not all are.
    me
        The rank that is left out.

    Attributes
    ----------
    most : int
        There are no more of them.
    """

    __slots__ = ("_box", "_fixed", "_layout", "_me", "_ranges", "most")

    def __init__(self, layout: Layout, box: Box, fixed: Mapping[int, int], me: int) -> None:
        self._layout, self._box, self._fixed, self._me = layout, box, fixed, me
        # per tensor dim, the blocks that have cells of the box, between others that have none at all
        self._ranges: list[tuple[int, int]] = []
        self.most = int(all(lo < hi for lo, hi in box))
        for (lo, hi), sizes in zip(box, layout.sizes):
            borders = bounds(sizes) if sizes is not None and self.most else (lo, hi)
            first, stop = bisect_right(borders, lo) - 1, bisect_left(borders, hi)
            self._ranges.append((first, stop))
            if sizes is not None:
                mesh_dims = layout.shard_dims[len(self._ranges) - 1]
                meant = math.prod(layout.mesh_shape[m] for m in mesh_dims if m not in fixed)
                self.most *= min(meant, count_with_cells(sizes, first, stop))
        for m, n in enumerate(layout.mesh_shape):
            if m not in layout.sharded_mesh_dims and m not in fixed:
                self.most *= n

    def __iter__(self) -> Iterator[tuple[int, Box]]:
        if not self.most:
            return
        shape, fixed, ndim = self._layout.mesh_shape, self._fixed, len(self._box)
        strides = [math.prod(shape[m + 1 :]) for m in range(len(shape))]
        choices = [self._along(dim, strides) for dim in range(ndim)]
        for m, n in enumerate(shape):
            if m not in self._layout.sharded_mesh_dims:
                choices.append([(c * strides[m], (0, 0)) for c in ([fixed[m]] if m in fixed else range(n))])
        ranks = ((sum(rank for rank, _ in each), each) for each in product(*choices))
        for rank, each in sorted(ranks):
            if rank != self._me:
                yield rank, tuple(cells for _, cells in each[:ndim])

    def _along(self, dim: int, strides: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
        """Return, of each block along a dim, what it adds to the rank, and its cells."""
        layout, (lo, hi), (first, stop) = self._layout, self._box[dim], self._ranges[dim]
        sizes, mesh_dims, found = layout.sizes[dim], layout.shard_dims.get(dim, ()), []
        if sizes is None:
            return [(0, (0, hi - lo))]
        for i, cells in self._meant(sizes, mesh_dims, first, stop):
            left, rank = i, 0
            for m in reversed(mesh_dims):
                left, c = divmod(left, layout.mesh_shape[m])
                rank += c * strides[m]
            found.append((rank, (max(lo, cells.start) - lo, min(hi, cells.stop) - lo)))
        return found

    def _meant(
        self, sizes: Sequence[int], mesh_dims: Sequence[int], first: int, stop: int
    ) -> Iterator[tuple[int, range]]:
        """Give the blocks that have cells, of the ranks that are meant: their numbers, and their cells."""
        shape, fixed = self._layout.mesh_shape, self._fixed
        if not any(m in fixed for m in mesh_dims):
            yield from stretches(sizes, first, stop)
            return
        borders = bounds(sizes)
        for coords in product(*((fixed[m],) if m in fixed else range(shape[m]) for m in mesh_dims)):
            i = rank_of(coords, [shape[m] for m in mesh_dims])
            if first <= i < stop and borders[i] < borders[i + 1]:
                yield i, range(borders[i], borders[i + 1])


def _few(peers: Peers) -> tuple[tuple[int, Box], ...] | Peers:
    """Return peers as they are kept: few of them one by one."""
    return tuple(peers) if peers.most <= FEW else peers


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
    sends = []
    for rank in range(math.prod(source.mesh_shape)) if near is None else near:
        other = coords_of(rank, source.mesh_shape)
        if rank == me or any(other[m] != c for m, c in fixed.items()):
            continue
        out = _meet(my_source, wanted(other))
        if out is not None:
            sends.append((rank, relative(out, my_source)))
    return Transfer(_stays(my_source, my_target), tuple(sends), _few(Peers(source, my_target, fixed, me)))


def _stays(source: Box, target: Box) -> tuple[Box, Box] | None:
    """Return the cells that two boxes share, relative to each."""
    both = _meet(source, target)
    return None if both is None else (relative(both, source), relative(both, target))


def _meet(a: Box, b: Box) -> Box | None:
    box = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b))
    return box if all(hi > lo for lo, hi in box) else None


def relative(box: Box, origin: Box) -> Box:
    """Return a box in the indices of another one, which begin at its first cell."""
    return tuple((lo - o, hi - o) for (lo, hi), (o, _) in zip(box, origin))
