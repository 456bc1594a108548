"""Where operands whose dims have labels meet: the layouts in which one local call gives a block of the result.

Dims of one label lie together. Of what the operands shard, a choice says which label each mesh dim goes on with: it
shards that in every operand that has it. An operand without it, or with one cell of it that broadcasts, is whole
along that mesh dim, and used by all its ranks. Nothing here is collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from mpishard.layout.block_sizes import repeated, runs_of, scaled
from mpishard.layout.layout import Layout, layout_of
from mpishard.layout.partition import balanced
from mpishard.layout.placement import Placement, Replicate, Shard

Labels = tuple[Any, ...]  # one per dim; None: a dim that every rank needs whole
Choice = Callable[[Sequence[Sequence[Any]]], Sequence[Labels]]


class Alignment(NamedTuple):
    """The layouts in which operands meet.

    Attributes
    ----------
    mesh_shape
        Of the mesh.
    cut
        Labels that each mesh dim shards: none, one, or several that go together.
    sizes
        Block sizes of the sharded labels.
    operands
        Layout of every operand.
    used
        Mesh dims over which each operand is used with data of other ranks, per operand.
    """

    mesh_shape: tuple[int, ...]
    cut: tuple[Labels, ...]
    sizes: dict[Any, tuple[int, ...]]
    operands: tuple[Layout, ...] = ()
    used: tuple[tuple[int, ...], ...] = ()

    def operand(self, layout: Layout, labels: Labels, here: Labels, shares: Mapping[Any, int]) -> Layout:
        """Return where an operand meets the others; ``here`` as `in_full` gives it."""
        placements = [_placement(_one_of(at, labels), here) for at in self.cut]
        sizes = [_scaled(self.sizes.get(label), shares.get(label, 1)) for label in here]
        return layout_of(self.mesh_shape, placements, layout.shape, sizes)

    def used_by(self, target: Layout) -> tuple[int, ...]:
        """Return the mesh dims that shard others and not the operand that has the layout ``target``."""
        return tuple(m for m, at in enumerate(self.cut) if at and type(target.placements[m]) is Replicate)

    def result(self, labels: Labels, shape: Sequence[int], missing: Placement | None = None) -> Layout:
        """Return the layout of a result; ``missing``: on a mesh dim that shards no label of it.

        Raises
        ------
        ValueError
            There is such a mesh dim, and ``missing`` is not given.
        """
        placements: list[Placement] = []
        for at in self.cut:
            label = _one_of(at, labels)
            if at and label is None and missing is None:
                raise ValueError(f"a mesh dim shards {at}, and the result has {labels}")
            placements.append(missing if at and label is None and missing is not None else _placement(label, labels))
        return layout_of(self.mesh_shape, placements, shape, [self.sizes.get(label) for label in labels])


def _one_of(at: Labels, labels: Labels) -> Any:
    return next((label for label in at if label in labels), None)


def _placement(label: Any, labels: Labels) -> Placement:
    return Shard(labels.index(label)) if label is not None and label in labels else Replicate()


def _scaled(cut: tuple[int, ...] | None, share: int) -> tuple[int, ...] | None:
    return cut if cut is None or share == 1 else repeated((n // share, k) for n, k in runs_of(cut))


def extents_of(
    layouts: Sequence[Layout],
    labels: Sequence[Labels],
    mismatch: Callable[[int, int], Exception],
    exact: type | tuple[()] = (),
) -> dict[Any, int]:
    """Return the extent of every label; one cell broadcasts, but of labels of the type ``exact``.

    Raises
    ------
    Exception
        ``mismatch(n, extent)``, of extents that do not fit.
    """
    extents: dict[Any, int] = {}
    for layout, own in zip(layouts, labels):
        for n, label in zip(layout.shape, own):
            if label is None:
                continue
            seen = extents.setdefault(label, n)
            if seen != n and (isinstance(label, exact) or 1 not in (seen, n)):
                raise mismatch(n, seen)
            if seen == 1:
                extents[label] = n
    return extents


def in_full(layout: Layout, labels: Labels, extents: Mapping[Any, int], shares: Mapping[Any, int]) -> Labels:
    """Return the labels of an operand without those of which it has one cell that broadcasts.

    Parameters
    ----------
    extents
        Of labels. A label that has none here is full everywhere, and cut by `balanced`.
    shares
        Cells of a label per cell of this operand, where these are not one.
    """
    return tuple(
        label if (full := n * shares.get(label, 1)) == extents.get(label, full) else None
        for n, label in zip(layout.shape, labels)
    )


def first_sharded(found: Sequence[Sequence[Any]]) -> Sequence[Labels]:
    """Choose what the first operand shards that shards anything along a mesh dim."""
    return [next(((label,) for label in at if label is not None), ()) for at in found]


def align(
    layouts: Sequence[Layout],
    labels: Sequence[Labels],
    extents: Mapping[Any, int],
    choose: Choice = first_sharded,
    shares: Sequence[Mapping[Any, int]] = (),
) -> Alignment:
    """Plan where operands without Partial dims meet.

    Parameters
    ----------
    layouts, labels
        Of the operands.
    extents, shares
        As in `in_full`, ``shares`` per operand.
    choose
        Of the labels that the operands shard, per mesh dim and operand (None: nothing, or one cell that broadcasts),
        the labels that each mesh dim shards from now on.
    """
    shares = shares or ({},) * len(layouts)
    mesh_shape = layouts[0].mesh_shape
    here = list(map(in_full, layouts, labels, repeat(extents), shares))
    found = [
        [own[p.dim] if type(p := layout.placements[m]) is Shard else None for layout, own in zip(layouts, here)]
        for m in range(len(mesh_shape))
    ]
    cut = tuple(choose(found))
    mesh_dims: dict[Any, tuple[int, ...]] = {}
    for m, at in enumerate(cut):
        for label in at:
            mesh_dims[label] = (*mesh_dims.get(label, ()), m)
    sizes: dict[Any, tuple[int, ...]] = {}
    for layout, own, share in zip(layouts, here, shares):
        for dim, dims in layout.shard_dims.items():
            if own[dim] in extents and mesh_dims.get(own[dim]) == dims:
                sizes.setdefault(own[dim], scaled(layout.sizes[dim] or (), share.get(own[dim], 1)))
    for label, dims in mesh_dims.items():
        unit = math.lcm(*(share.get(label, 1) for share in shares))
        if label in extents and (label not in sizes or any(n % unit for n, _ in runs_of(sizes[label]))):
            sizes[label] = balanced(extents[label], math.prod(mesh_shape[m] for m in dims), unit)
    alignment = Alignment(mesh_shape, cut, sizes)
    operands = tuple(map(alignment.operand, layouts, labels, here, shares))
    return alignment._replace(operands=operands, used=tuple(map(alignment.used_by, operands)))


def aligned_to(out: Layout, layout: Layout) -> tuple[Layout, tuple[int, ...]]:
    """Return where an operand that broadcasts against a tensor in layout ``out`` meets it, and where it is used."""
    cut = tuple((p.dim - out.ndim,) if type(p) is Shard else () for p in out.placements)
    of = range(-out.ndim, 0)
    alignment = Alignment(out.mesh_shape, cut, {d: s for d, s in zip(of, out.sizes) if s is not None})
    labels = tuple(range(-layout.ndim, 0))
    target = alignment.operand(layout, labels, in_full(layout, labels, dict(zip(of, out.shape)), {}), {})
    return target, alignment.used_by(target)
