"""Operands that meet: every rank has the same cells of a label in all operands, and no others."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpishard.layout import Layout, Replicate, Shard, align, aligned_to, extents_of, layout_of
from mpishard.layout.align import Labels

LABELS = "abcd"


@st.composite
def operands(draw: st.DrawFn) -> tuple[list[Layout], list[Labels], dict[str, int]]:
    mesh_shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    extents = {label: draw(st.integers(0, 6)) for label in LABELS}
    layouts, labels = [], []
    for _ in range(draw(st.integers(1, 3))):
        own = tuple(draw(st.permutations(LABELS))[: draw(st.integers(0, 3))])
        shape = [1 if draw(st.integers(0, 4)) == 0 else extents[label] for label in own]
        placements = [draw(st.sampled_from([Replicate(), *map(Shard, range(len(own)))])) for _ in mesh_shape]
        layout = layout_of(mesh_shape, placements, shape)
        sizes = {d: tuple(draw(st.permutations(layout.sizes[d]))) for d in layout.shard_dims}
        layouts.append(layout_of(mesh_shape, placements, shape, sizes))
        labels.append(own)
    return layouts, labels, extents_of(layouts, labels, lambda n, extent: AssertionError(f"{n} != {extent}"))


@given(operands())
def test_ranks_have_the_same_cells_of_a_label(drawn: tuple[list[Layout], list[Labels], dict[str, int]]) -> None:
    layouts, labels, extents = drawn
    plan = align(layouts, labels, extents)
    result = tuple(extents)
    out = plan.result(result, list(extents.values()))
    for coords in np.ndindex(*plan.mesh_shape):
        box = dict(zip(result, out.box(coords)))
        for layout, own, target in zip(layouts, labels, plan.operands):
            assert target.shape == layout.shape
            for d, label in enumerate(own):
                full = layout.shape[d] == extents[label]
                assert target.interval(d, coords) == (box[label] if full else (0, 1))
    for m, at in enumerate(plan.cut):
        found = [
            own[p.dim]
            for layout, own in zip(layouts, labels)
            if isinstance(p := layout.placements[m], Shard) and layout.shape[p.dim] == extents[own[p.dim]]
        ]
        assert at == tuple(found[:1])
        for target, used in zip(plan.operands, plan.used):
            assert (m in used) == (bool(at) and target.placements[m] == Replicate())


def test_labels_with_shares_are_cut_between_groups() -> None:
    queries = layout_of((3,), [Shard(0)], (8,), {0: (3, 3, 2)})
    keys = layout_of((3,), [Replicate()], (2,))
    plan = align([queries, keys], [("heads",), ("heads",)], {"heads": 8}, shares=[{}, {"heads": 4}])
    assert [o.sizes for o in plan.operands] == [((4, 4, 0),), ((1, 1, 0),)]


def test_an_operand_follows_the_result() -> None:
    out = layout_of((2, 2), [Shard(1), Shard(0)], (4, 6), {1: (1, 5)})
    row, used = aligned_to(out, layout_of((2, 2), [Replicate()] * 2, (6,)))
    assert (row.placements, row.sizes, used) == ((Shard(0), Replicate()), ((1, 5),), (1,))
    column, used = aligned_to(out, layout_of((2, 2), [Replicate()] * 2, (4, 1)))
    assert (column.placements, used) == ((Replicate(), Shard(0)), (0,))
