"""The exchange along one dim and along all at once, run for every rank of a mesh in one process."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.comm.halo.host import plan_at_once, plan_sweep
from mpishard.layout import bounds

pytestmark = pytest.mark.ranks(1)


@st.composite
def problems(draw):
    ndim = draw(st.integers(1, 3))
    exchanged = draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True))
    mesh_dims = dict(zip(exchanged, draw(st.permutations(range(len(exchanged))))))
    sizes = {d: draw(st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(any)) for d in exchanged}
    periodic = [draw(st.booleans()) for _ in exchanged]
    widths = [(draw(st.integers(0, 5)), draw(st.integers(0, 5))) if d in sizes else (0, 0) for d in range(ndim)]
    return ndim, mesh_dims, sizes, periodic, widths


@given(problems())
def test_every_halo_cell_comes_straight_from_its_owner(problem):
    ndim, mesh_dims, sizes, periodic, widths = problem
    dims = {m: d for d, m in mesh_dims.items()}
    mesh_shape = [len(sizes[dims[m]]) for m in range(len(dims))]
    extents = [sum(sizes[d]) if d in sizes else 2 for d in range(ndim)]
    domain = np.arange(np.prod(extents)).reshape(extents)
    by_position = {d: ([widths[d][0]] * len(s), [widths[d][1]] * len(s)) for d, s in sizes.items()}
    arrays, wanted, sweeps = [], [], []
    for coords in itertools.product(*map(range, mesh_shape)):
        array, interior, index, inside = [], [], [], np.ones((), bool)
        for d, (lo, hi) in enumerate(widths):
            m = mesh_dims.get(d)
            first, n = (bounds(tuple(sizes[d]))[coords[m]], sizes[d][coords[m]]) if m is not None else (0, 2)
            cells = np.arange(first - lo, first + n + hi)
            there = np.ones(len(cells), bool) if m is None or periodic[m] else (cells >= 0) & (cells < extents[d])
            array.append(n + lo + hi)
            interior.append((lo, lo + n))
            index.append(cells % extents[d])
            inside = inside[..., None] & there
        wanted.append(np.where(inside, domain[np.ix_(*index)], -1))
        own = tuple(slice(*r) for r in interior)
        arrays.append(np.full(array, -1))
        arrays[-1][own] = wanted[-1][own]
        mesh = SimpleNamespace(
            shape=mesh_shape,
            coords=coords,
            periodic=periodic,
            rank_at=lambda c: int(np.ravel_multi_index(tuple(c), mesh_shape)),
        )
        sweeps.append(plan_at_once(mesh, mesh_dims, sizes, by_position, interior))

    def cells(rank, box):
        return arrays[rank][tuple(slice(*r) for r in box)]

    before = [a.copy() for a in arrays]
    for rank, sweep in enumerate(sweeps):
        for src, dst in sweep.local:
            cells(rank, dst)[...] = cells(rank, src)
        assert rank not in [m.peer for m in (*sweep.sends, *sweep.recvs)]
        for side in sweep[1:]:
            assert len({m.peer for m in side}) == len(side)
        for message in sweep.recvs:
            (sent,) = (m for m in sweeps[message.peer].sends if m.peer == rank)
            for src, dst in zip(sent.boxes, message.boxes, strict=True):
                values = before[message.peer][tuple(slice(*r) for r in src)]
                assert (values != -1).all()
                cells(rank, dst)[...] = values
        assert sum(m.peer == rank for s in sweeps for m in s.sends) == len(sweep.recvs)
    for array, want in zip(arrays, wanted, strict=True):
        np.testing.assert_array_equal(array, want)


def strips(sizes, lo, hi, periodic, index):
    """Return, from the definition, what one rank copies, sends and receives: (peer, side) -> [(first cell, count)]."""
    borders, local, sends, recvs = bounds(tuple(sizes)), [], {}, {}
    for receiver, n in enumerate(sizes):
        start, stop = borders[receiver], borders[receiver + 1]
        halos = (start - lo[receiver], start, 0), (stop, stop + hi[receiver], lo[receiver] + n)
        for side, (first, last, origin) in enumerate(halos):
            at, last = (first, last) if periodic else (max(first, 0), min(last, borders[-1]))
            while at < last:
                cell = at % borders[-1]
                owner = bisect_right(borders, cell) - 1
                count = min(last - at, borders[owner + 1] - cell)
                src, dst = lo[owner] + cell - borders[owner], origin + at - first
                at += count
                if owner == receiver == index:
                    local.append((src, dst, count))
                elif receiver == index:
                    recvs.setdefault((owner, side), []).append((dst, count))
                elif owner == index:
                    sends.setdefault((receiver, side), []).append((src, count))
    return local, sends, recvs


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6).filter(
        lambda drawn: any(n for n, _, _ in drawn)
    ),
    st.booleans(),
)
def test_one_dim_by_definition(drawn, periodic):
    sizes, lo, hi = zip(*drawn)
    for i in range(len(sizes)):
        mesh = SimpleNamespace(coords=(i,), periodic=(periodic,), rank_at=lambda coords: coords[0])
        sweep = plan_sweep(mesh, 0, 0, sizes, (lo, hi), [(lo[i], lo[i] + sizes[i])])
        local, sends, recvs = strips(sizes, lo, hi, periodic, i)
        copied = [(src[0][0], dst[0][0], dst[0][1] - dst[0][0]) for src, dst in sweep.local]
        assert sorted(copied) == sorted(local)
        for messages, expected in ((sweep.sends, sends), (sweep.recvs, recvs)):
            found = [((m.peer, m.tag), [(a, b - a) for ((a, b),) in m.boxes]) for m in messages]
            assert found == sorted(expected.items())
