"""Transfers between any two layouts of a tensor, all ranks played in one process."""

from __future__ import annotations

from itertools import product
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpishard.layout import Layout, Shard, layout_of, plan_fetch, plan_transfer, transfer
from tests.layout.strategies import layouts, mesh_shapes


@st.composite
def pairs(draw):
    mesh_shape = draw(mesh_shapes)
    source = draw(layouts(mesh_shape=mesh_shape))
    return source, draw(layouts(mesh_shape=mesh_shape, shape=source.shape))


def slices(box):
    return tuple(slice(lo, hi) for lo, hi in box)


def play(source: Layout, target: Layout) -> tuple[list, dict]:
    """Return the ranks' new blocks of an array of cell numbers, and the cells sent by (from, to)."""
    whole = np.arange(np.prod(source.shape, dtype=int)).reshape(source.shape)
    ranks = list(product(*map(range, source.mesh_shape)))
    blocks = [whole[slices(source.box(c))] for c in ranks]
    plans = [plan_transfer(source, target, c) for c in ranks]
    wire = {(me, peer): blocks[me][slices(box)] for me, plan in enumerate(plans) for peer, box in plan.sends}
    sent = {key: cells.size for key, cells in wire.items()}
    results = []
    for me, (coords, plan) in enumerate(zip(ranks, plans)):
        assert [p for p, _ in plan.sends] == sorted({p for p, _ in plan.sends} - {me})
        assert [p for p, _ in plan.recvs] == sorted({p for p, _ in plan.recvs} - {me})
        result = np.full(target.local_shape(coords), -1)
        parts = [(box, wire.pop((peer, me))) for peer, box in plan.recvs]
        if plan.local is not None:
            parts.append((plan.local[1], blocks[me][slices(plan.local[0])]))
        for box, cells in parts:
            view = result[slices(box)]
            assert view.shape == cells.shape
            assert cells.size
            assert (view == -1).all()  # no cell comes twice
            view[...] = cells
        results.append(result)
    assert not wire  # nothing is sent that nobody receives
    return results, sent


@given(pairs())
def test_transfer_gives_every_rank_its_block(pair):
    source, target = pair
    whole = np.arange(np.prod(source.shape, dtype=int)).reshape(source.shape)
    results, _ = play(source, target)
    for coords, result in zip(product(*map(range, source.mesh_shape)), results):
        assert np.array_equal(result, whole[slices(target.box(coords))])


@given(pairs())
def test_cells_that_a_rank_has_do_not_travel(pair):
    source, target = pair
    _, sent = play(source, target)
    ranks = list(product(*map(range, source.mesh_shape)))
    for me, coords in enumerate(ranks):
        mine, wanted = source.box(coords), target.box(coords)
        kept = np.prod([max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(mine, wanted)])
        need = np.prod([hi - lo for lo, hi in wanted])
        assert sum(n for (_, to), n in sent.items() if to == me) == need - kept


@given(pairs())
def test_copies_share_the_work(pair):
    source, target = pair
    free = [m for m, p in enumerate(source.placements) if type(p) is not Shard]
    ranks = list(product(*map(range, source.mesh_shape)))
    for who, to in play(source, target)[1]:
        assert all(ranks[who][m] == ranks[to][m] for m in free)


@given(layouts())
def test_nothing_travels_to_the_same_layout(layout):
    assert play(layout, layout)[1] == {}


@given(pairs())
def test_bisection_finds_the_peers_that_a_look_at_all_ranks_finds(pair):
    source, target = pair
    for coords in product(*map(range, source.mesh_shape)):
        plans = [plan_transfer(source, target, coords), plan_fetch(source, target.box, coords)]
        with mock.patch.object(transfer, "FEW", -1):  # as where there are many peers
            plans.append(plan_transfer(source, target, coords))
        many = plans[-1]
        assert not isinstance(many.sends, tuple)
        assert many.sends.most >= len([*many.sends])
        assert plans[0] == plans[1] == (many.local, tuple(many.sends), tuple(many.recvs))


def test_other_ranks_are_not_looked_at(monkeypatch):
    mesh, shape = (64, 32, 32), (2048, 2048, 2048)
    source = layout_of(mesh, (Shard(0), Shard(1), Shard(2)), shape)
    target = layout_of(mesh, (Shard(0), Shard(2), Shard(1)), shape)
    calls = []
    meet, box = transfer._meet, Layout.box
    monkeypatch.setattr(transfer, "_meet", lambda a, b: calls.append(1) or meet(a, b))
    monkeypatch.setattr(Layout, "box", lambda *args: calls.append(1) or box(*args))
    plan = transfer.plan_transfer(source, target, (3, 5, 7))
    assert len(plan.sends) == len(plan.recvs) == 1
    assert len(calls) < 10
