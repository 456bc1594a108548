"""Boxes between any two decompositions on different meshes, all ranks of both sides played in one process."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpishard.layout import Shard, is_idle, layout_of, plan_sources, plan_targets
from tests.layout.strategies import layouts


@st.composite
def pairs(draw):
    writer = draw(layouts())
    return writer, draw(layouts(shape=writer.shape))


def ranks(layout):
    return list(np.ndindex(*layout.mesh_shape))


def slices(box):
    return tuple(slice(lo, hi) for lo, hi in box)


@given(pairs())
def test_every_reader_gets_its_block_once(pair):
    writer, reader = pair
    whole = np.arange(math.prod(writer.shape)).reshape(writer.shape)
    wire = {}
    for me, coords in enumerate(ranks(writer)):
        block = whole[slices(writer.box(coords))]
        targets = plan_targets(writer, reader, me)
        assert [s.peer for s in targets] == sorted({s.peer for s in targets})
        wire.update({(me, s.peer): block[slices(s.box)] for s in targets})
    for me, coords in enumerate(ranks(reader)):
        block = np.full(reader.local_shape(coords), -1)
        sources = plan_sources(writer, reader, me)
        assert [s.peer for s in sources] == sorted({s.peer for s in sources})
        assert is_idle(reader, me) == (not sources)
        for source in sources:
            cells = wire.pop((source.peer, me))
            assert cells.size
            assert (block[slices(source.box)] == -1).all()
            block[slices(source.box)] = cells
        assert np.array_equal(block, whole[slices(reader.box(coords))])
    assert not wire


def test_what_is_planned_does_not_grow_with_the_ranks():
    many, few = (layout_of((n,), (Shard(0),), (10**6,)) for n in (10**5, 3))
    assert len(plan_sources(few, many, 77_777)) == 1
    assert [s.peer for s in plan_targets(many, few, 33_333)] == [0, 1]
