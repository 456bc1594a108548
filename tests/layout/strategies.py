"""Random meshes, cuts and layouts, small enough to be compared cell by cell."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from mpishard.layout import Layout, Partial, Replicate, Shard, layout_of

mesh_shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple).filter(lambda s: math.prod(s) <= 12)


def cuts(count: int, largest: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Block sizes, empty blocks among them."""
    return st.lists(st.integers(0, largest), min_size=count, max_size=count).map(tuple)


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    mesh_shape: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    partial: bool = False,
) -> Layout:
    """Layouts of any placements, cut unevenly or by the rule; of a given mesh and tensor shape, if wanted."""
    mesh_shape = draw(mesh_shapes) if mesh_shape is None else mesh_shape
    ndim = draw(st.integers(1, 3)) if shape is None else len(shape)
    kinds = [st.integers(0, ndim - 1).map(Shard), st.just(Replicate())]
    if partial:
        kinds.append(st.just(Partial()))
    placements = tuple(draw(st.one_of(kinds)) for _ in mesh_shape)
    sizes: dict[int, tuple[int, ...]] = {}
    extents = []
    for d in range(ndim):
        count = math.prod(s for s, p in zip(mesh_shape, placements) if p == Shard(d))
        n = draw(st.integers(0, 9)) if shape is None else shape[d]
        if any(p == Shard(d) for p in placements) and draw(st.booleans()):
            if shape is None:
                sizes[d] = draw(cuts(count, 3))
                n = sum(sizes[d])
            else:
                borders = sorted(draw(st.lists(st.integers(0, n), min_size=count - 1, max_size=count - 1)))
                sizes[d] = tuple(hi - lo for lo, hi in zip([0, *borders], [*borders, n]))
        extents.append(n)
    return layout_of(mesh_shape, placements, extents, sizes)
