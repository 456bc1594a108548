"""Layout: which rank of a mesh holds which cells of a global tensor. Pure arithmetic, no MPI.

Nothing here is collective.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar

from mpishard.errors import LayoutError
from mpishard.layout.block_sizes import FEW, BlockSizes, as_block_sizes, bounds, key_of, largest, total
from mpishard.layout.partition import balanced
from mpishard.layout.placement import Frozen, Partial, Placement, Replicate, Shard, as_placements, set_once
from mpishard.layout.remembered import hold, remembered

Sizes = tuple["tuple[int, ...] | None", ...]
V = TypeVar("V")


# the first layout in which a block is empty and the tensor is not, and who wants to know of it
_seen: list[Layout] = []
_watching: list[Callable[[], None]] = []


def watch_empty_blocks(call: Callable[[], None]) -> None:
    """Have ``call`` called once, as soon as a layout is made in which a block is empty and the tensor is not."""
    if _seen:
        call()
    else:
        _watching.append(call)


def _least(sizes: Sequence[int]) -> int:
    return sizes.smallest if isinstance(sizes, BlockSizes) else min(sizes, default=0)


class Layout(Frozen):
    """How a mesh holds a tensor: frozen, hashable, the same object on every rank of the mesh.

    Build one with `layout_of`, which normalises and interns.

    Attributes
    ----------
    mesh_shape : tuple of int
    placements : tuple of Placement
        One per mesh dim.
    shape : tuple of int
        Global shape.
    sizes : tuple
        Per tensor dim, None where the dim is whole on every rank, else the block sizes, indexed by the
        row-major position in the mesh dims that shard it: a tuple, or `BlockSizes`, which stands for one.
    shard_dims : dict
        Tensor dim -> the mesh dims that shard it, ascending.
    partial_dims, sharded_mesh_dims : tuple of int
        Mesh dims whose placement is Partial, and those whose placement is a Shard.
    """

    __slots__ = (
        "_hash",
        "_told",
        "mesh_shape",
        "partial_dims",
        "placements",
        "shape",
        "shard_dims",
        "sharded_mesh_dims",
        "sizes",
    )
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    sizes: Sizes
    shard_dims: dict[int, tuple[int, ...]]
    partial_dims: tuple[int, ...]
    sharded_mesh_dims: tuple[int, ...]
    _hash: int
    _told: str | None

    def __init__(
        self, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], shape: tuple[int, ...], sizes: Sizes
    ) -> None:
        set_once(self, "mesh_shape", mesh_shape)
        set_once(self, "placements", placements)
        set_once(self, "shape", shape)
        set_once(self, "sizes", sizes)
        dims: dict[int, tuple[int, ...]] = {}
        for mesh_dim, p in enumerate(placements):
            if type(p) is Shard:
                dims[p.dim] = (*dims.get(p.dim, ()), mesh_dim)
        set_once(self, "shard_dims", dims)
        set_once(self, "partial_dims", tuple(m for m, p in enumerate(placements) if type(p) is Partial))
        set_once(self, "sharded_mesh_dims", tuple(m for m, p in enumerate(placements) if type(p) is Shard))
        set_once(self, "_told", None)
        set_once(self, "_hash", hash((mesh_shape, placements, shape, tuple(map(key_of, sizes)))))
        if not _seen and 0 not in shape and any(cut is not None and _least(cut) == 0 for cut in sizes):
            _seen.append(self)
            while _watching:
                _watching.pop()()

    def __reduce__(self) -> tuple[Any, ...]:
        return layout_of, (self.mesh_shape, self.placements, self.shape, self.sizes)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.shape == other.shape
            and self.mesh_shape == other.mesh_shape
            and self.placements == other.placements
            and self.sizes == other.sizes
        )

    def __repr__(self) -> str:
        cut = {d: s for d, s in enumerate(self.sizes) if s is not None}
        return f"Layout(shape={self.shape}, mesh={self.mesh_shape}, placements={self.placements}, sizes={cut})"

    @property
    def told(self) -> str:
        """Shape and placements in words, made once: a few, whatever the number of ranks."""
        if self._told is None:
            set_once(self, "_told", f"{self.shape} by {', '.join(map(repr, self.placements))}")
        return self._told  # type: ignore[return-value]

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @property
    def is_replicated(self) -> bool:
        """True where every rank holds the whole tensor."""
        return not self.sharded_mesh_dims and not self.partial_dims

    def index(self, dim: int, coords: Sequence[int]) -> int:
        """Return which block along a tensor dim a rank holds. Not collective.

        Parameters
        ----------
        dim
            Tensor dim, not negative.
        coords
            Coordinates of the rank, one per mesh dim.

        Returns
        -------
        int
            0 where no mesh dim shards it.
        """
        i = 0
        for m in self.shard_dims.get(dim, ()):
            i = i * self.mesh_shape[m] + coords[m]
        return i

    def interval(self, dim: int, coords: Sequence[int]) -> tuple[int, int]:
        """Return the cells that a rank holds along a tensor dim. Not collective.

        Parameters
        ----------
        dim
            Tensor dim.
        coords
            Coordinates of the rank, one per mesh dim.

        Returns
        -------
        tuple of int
            The first, and the one after the last, counted in the global tensor.
        """
        sizes = self.sizes[dim]
        if sizes is None:
            return 0, self.shape[dim]
        b, i = bounds(sizes), self.index(dim, coords)
        return b[i], b[i + 1]

    def box(self, coords: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the box that a rank holds. Not collective.

        Parameters
        ----------
        coords
            Coordinates of the rank, one per mesh dim.

        Returns
        -------
        tuple of tuple of int
            Per tensor dim its `interval`.
        """
        return tuple([self.interval(d, coords) for d in range(self.ndim)])

    def local_shape(self, coords: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the block that a rank holds. Not collective.

        Parameters
        ----------
        coords
            Coordinates of the rank, one per mesh dim.

        Returns
        -------
        tuple of int
        """
        return tuple([hi - lo for lo, hi in self.box(coords)])

    def offset(self, coords: Sequence[int]) -> tuple[int, ...]:
        """Return where the block that a rank holds begins. Not collective.

        Parameters
        ----------
        coords
            Coordinates of the rank, one per mesh dim.

        Returns
        -------
        tuple of int
            The global index of its first cell, one per tensor dim.
        """
        return tuple(lo for lo, _ in self.box(coords))

    def with_placements(self, placements: object) -> Layout:
        """Return the layout of the same global shape with other placements. Not collective.

        A tensor dim that keeps its mesh dims keeps its block sizes; any other is cut by `balanced`.

        Parameters
        ----------
        placements
            One placement per mesh dim.

        Returns
        -------
        Layout

        Raises
        ------
        LayoutError
            They do not fit the mesh or the shape.
        """
        new = as_placements(placements, len(self.mesh_shape), self.ndim)
        probe = layout_of(self.mesh_shape, new, self.shape)
        sizes = tuple(
            self.sizes[d] if probe.sizes[d] is not None and probe.shard_dims[d] == self.shard_dims.get(d) else s
            for d, s in enumerate(probe.sizes)
        )
        return layout_of(self.mesh_shape, new, self.shape, sizes)


@remembered
def _intern(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], shape: tuple[int, ...], keys: tuple[Any, ...]
) -> Layout:
    sizes = tuple(BlockSizes(key) if key and isinstance(key[0], tuple) else key for key in keys)
    hold(sum(len(cut) for cut in sizes if type(cut) is tuple and len(cut) > FEW))
    return Layout(mesh_shape, placements, shape, sizes)


def layout_of(
    mesh_shape: Sequence[int],
    placements: object,
    shape: Sequence[int],
    sizes: Mapping[int, Sequence[int]] | Sequence[Sequence[int] | None] | None = None,
    multiple: int = 1,
) -> Layout:
    """Build (or find) the layout of a global shape on a mesh.

    Parameters
    ----------
    mesh_shape
        Extent of every mesh dim.
    placements
        One placement per mesh dim.
    shape
        Global shape.
    sizes
        Block sizes per sharded tensor dim, as a mapping or one entry per dim; where absent, `balanced`. What one
        entry per dim says of a dim that is not sharded does not count; in a mapping it must fit.
    multiple
        Of which the borders between balanced blocks are multiples.

    Returns
    -------
    Layout

    Raises
    ------
    LayoutError
        Placements or sizes that do not fit the shape.
    """
    mesh_shape = tuple(int(s) for s in mesh_shape)
    shape = tuple(int(s) for s in shape)
    own = as_placements(placements, len(mesh_shape), len(shape))
    counts: dict[int, int] = {}
    for mesh_dim, p in enumerate(own):
        if type(p) is Shard:
            counts[p.dim] = counts.get(p.dim, 1) * mesh_shape[mesh_dim]
    if sizes is None:
        given: dict[int, Sequence[int] | None] = {}
    elif isinstance(sizes, Mapping):
        given = by_dim("sizes", sizes, len(shape))
        for dim, cut in given.items():
            if dim not in counts and cut is not None and tuple(cut) != (shape[dim],):
                raise LayoutError(
                    f"block sizes of dim {dim}, which is not sharded",
                    expected=f"sizes of sharded dims, here {sorted(counts)}",
                    got={dim: tuple(cut)},
                    fix="leave them out, or shard the dim",
                )
    else:
        given = dict(enumerate(sizes))
    out: list[tuple[int, ...] | None] = [None] * len(shape)
    for dim, count in counts.items():
        cut = given.get(dim)
        if cut is None:
            out[dim] = balanced(shape[dim], count, multiple)
            continue
        try:
            cut = as_block_sizes(cut if isinstance(cut, BlockSizes) else map(operator.index, cut))
        except TypeError:
            raise LayoutError(
                f"block sizes of dim {dim} do not fit",
                expected=f"{count} integers",
                got=repr(cut),
                fix="give one size per rank along the mesh dims that shard this dim",
            ) from None
        cells = total(cut)
        if len(cut) != count or _least(cut) < 0 or cells != shape[dim]:
            raise LayoutError(
                f"block sizes of dim {dim} do not fit",
                expected=f"{count} sizes >= 0 with sum {shape[dim]}",
                got=f"{cut} (sum {cells})",
                fix="give one size per rank along the mesh dims that shard this dim",
            )
        out[dim] = cut
    return _intern(mesh_shape, own, shape, tuple(map(key_of, out)))


def by_dim(what: str, given: Mapping[int, V], ndim: int) -> dict[int, V]:
    """Return what is given per tensor dim with the dims counted from the front.

    Raises
    ------
    LayoutError
        A dim that is not there, or one that is named twice.
    """
    # int and dict first: to ask an abstract class takes as long as all the rest
    known = given if isinstance(given, (dict, Mapping)) else {}
    out = {int(d) % ndim: v for d, v in known.items() if isinstance(d, (int, Integral)) and -ndim <= d < ndim}
    if known is not given or len(out) < len(known):
        raise LayoutError(
            f"{what}: no such dim, or one named twice",
            expected=f"a dict of different dims in [{-ndim}, {ndim})",
            got=list(known) if known is given else repr(given),
            fix="name every dim of the tensor at most once",
        )
    return out


def most_cells(layout: Layout) -> int:
    """Return how many cells a block has at most: as many as one would that is the largest along every dim."""
    return math.prod(n if sizes is None else largest(sizes) for n, sizes in zip(layout.shape, layout.sizes))


def without_partial(layout: Layout) -> Layout:
    """Return the layout with `Replicate` in place of every Partial: that of the sum, and of a cotangent."""
    if not layout.partial_dims:
        return layout
    placements = [Replicate() if type(p) is Partial else p for p in layout.placements]
    return layout_of(layout.mesh_shape, placements, layout.shape, layout.sizes)
