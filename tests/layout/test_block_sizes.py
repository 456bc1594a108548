"""Block sizes as runs stand for the tuple of them, and what is planned from them is what all positions give."""

from __future__ import annotations

import pickle
import sys

from hypothesis import given
from hypothesis import strategies as st

from mpishard.layout import (
    FEW,
    BlockSizes,
    Each,
    Shard,
    are_equal,
    balanced,
    bounds,
    joined,
    layout_of,
    moved_borders,
    owner,
    plan_stage,
    repeated,
    runs_of,
    scaled,
    sizes_of,
    sole,
    total,
)
from mpishard.layout.block_sizes import count_with_cells, stretches
from mpishard.layout.stage import MODES, interval_runs, near
from mpishard.layout.stencil import Adaptive, Sliding, Transposed, of_every_kind, pairs, windows

# of few blocks, which are a tuple, and of many
runs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=4).filter(
    lambda found: any(k for _, k in found)
)
slides = st.builds(
    Sliding, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(0, 4)
)
spreads = st.builds(
    Transposed, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(0, 2)
)


def plain(found):
    return tuple(size for size, k in found for _ in range(k))


@given(runs)
def test_they_stand_for_a_tuple(found):
    sizes, one_by_one = repeated(found), plain(found)
    assert sizes == one_by_one
    assert one_by_one == sizes
    assert hash(sizes) == hash(one_by_one)
    assert (len(sizes), total(sizes), list(sizes)) == (len(one_by_one), sum(one_by_one), list(one_by_one))
    assert [sizes[i] for i in range(-len(sizes), len(sizes))] == 2 * list(one_by_one)
    assert sizes[2:-1:2] == one_by_one[2:-1:2]
    assert sizes + (1,) == one_by_one + (1,)  # noqa: RUF005 (as of a tuple)
    assert (7 in sizes) == (7 in one_by_one)
    assert are_equal(sizes) == (len(set(one_by_one)) == 1)
    assert scaled(sizes, 3) == tuple(3 * s for s in one_by_one)
    assert runs_of(sizes) == runs_of(one_by_one)
    assert pickle.loads(pickle.dumps(sizes)) == sizes
    if isinstance(sizes, BlockSizes):
        assert eval(repr(sizes)) == one_by_one
        assert sizes != (*one_by_one, 0)
        assert (sizes.smallest, sizes.largest) == (min(one_by_one), max(one_by_one))


@given(runs, st.data())
def test_what_is_asked_of_runs_is_that_of_the_tuple(found, data):
    sizes, one_by_one = repeated(found), plain(found)
    count = data.draw(st.sampled_from([c for c in range(1, len(one_by_one) + 1) if len(one_by_one) % c == 0]))
    groups = [one_by_one[i : i + count] for i in range(0, len(one_by_one), count)]
    assert joined(sizes, count) == joined(one_by_one, count) == tuple(map(sum, groups))
    first = data.draw(st.integers(0, len(one_by_one)))
    stop = data.draw(st.integers(first, len(one_by_one)))
    assert sizes[first:stop] == one_by_one[first:stop]
    borders = bounds(one_by_one)
    blocks = [(i, range(borders[i], borders[i + 1])) for i in range(first, stop) if one_by_one[i]]
    assert [*stretches(sizes, first, stop)] == [*stretches(one_by_one, first, stop)] == blocks
    assert count_with_cells(sizes, first, stop) == count_with_cells(one_by_one, first, stop) == len(blocks)
    full = [i for i, size in enumerate(one_by_one) if size]
    if isinstance(sizes, BlockSizes) or len(one_by_one) <= FEW:
        assert sole(sizes) == (full[0] if len(full) == 1 else None)


@given(runs)
def test_borders_are_those_of_the_tuple(found):
    b, one_by_one = bounds(repeated(found)), bounds(plain(found))
    assert b == one_by_one
    assert list(b) == list(one_by_one)
    assert [b[i] for i in range(-len(b), len(b))] == 2 * list(one_by_one)
    assert b[1:-1] == one_by_one[1:-1]
    assert sizes_of(b) == sizes_of(one_by_one)
    assert [owner(b, cell) for cell in range(b[-1])] == [owner(one_by_one, cell) for cell in range(b[-1])]


@given(runs, st.integers(1, 6), st.integers(-40, 40), st.integers(1, 6), st.integers(0, 30))
def test_borders_move_in_runs_as_one_by_one(found, times, plus, over, n):
    one_by_one = plain(found)
    n += sum(one_by_one) * times // over
    inner = [min(max((b * times + plus) // over, 0), n) for b in bounds(one_by_one)[1:-1]]
    borders = moved_borders(repeated(found), times, plus, over, n)
    assert tuple(borders) == (0, *inner, n)
    # however they were made, the same sizes are kept in one way
    assert type(sizes_of(borders)) is type(sizes_of((0, *inner, n)))


@given(runs, slides, spreads, st.integers(1, 200))
def test_results_lie_where_the_middle_of_their_windows_does(found, slide, spread, n_out):
    sizes, b = repeated(found), bounds(plain(found))
    n = b[-1]
    half = (slide.reach - 1) // 2
    if n and slide.n_out(n) > 0:
        m = slide.n_out(n)
        inner = [min(max(-((half - slide.lo - c) // slide.stride), 0), m) for c in b[1:-1]]
        assert slide.follow(sizes, m) == (0, *inner, m)
    half, m = (spread.reach - 1) // 2, spread.n_out(n)
    if n and m > 0:
        inner = [min(max(c * spread.stride - spread.lo + half, 0), m) for c in b[1:-1]]
        assert spread.follow(sizes, m) == (0, *inner, m)
    if n:
        inner = [min(max(-((n - 2 * c * n_out) // (2 * n)), 0), n_out) for c in b[1:-1]]
        assert Adaptive(n, n_out).follow(sizes) == (0, *inner, n_out)


def alike(sizes, intervals, mode, at, reached=None):
    """Compare a plan from the windows near the block with that from the windows of all positions."""
    n = bounds(sizes)[-1]
    every = [interval_runs(n, lo, hi, mode) for lo, hi in intervals]
    n_outs = [max(0, hi - lo) for lo, hi in intervals]
    some = near(reached or intervals, n, mode, *bounds(sizes)[at : at + 2])
    assert some == sorted(set(some))
    looked = Each(len(sizes), lambda i: interval_runs(n, *intervals[i], mode))
    short = plan_stage(0, (0,), sizes, looked, n_outs, at, near=some)
    assert short == plan_stage(0, (0,), tuple(sizes), every, n_outs, at)


@given(st.data(), runs, st.sampled_from(sorted(MODES)))
def test_windows_near_the_block_give_the_plan_of_all(data, found, mode):
    sizes = repeated(found)
    n, at = total(sizes), data.draw(st.integers(0, len(sizes) - 1))
    g = data.draw(st.one_of(slides, spreads, st.builds(Adaptive, st.just(n), st.integers(1, 200))))
    m = g.n_out if isinstance(g, Adaptive) else g.n_out(n)
    if not n or m <= 0:
        return
    borders = g.follow(sizes) if isinstance(g, Adaptive) else g.follow(sizes, m)
    if not isinstance(g, Adaptive):
        alike(sizes, list(windows(g, borders)), mode, at)
    alike(sizes, list(windows(g, borders)), "zeros", at)


@given(st.data(), runs, slides)
def test_longer_and_clipped_windows_too(data, found, g):
    from mpishard.ops.window.conv import _stays, _with_blocks
    from mpishard.ops.window.pool import _clipped, _ends, _reached

    sizes = repeated(found)
    n, at = total(sizes), data.draw(st.integers(0, len(sizes) - 1))
    if not n or g.n_out(n) <= 0:
        return
    borders = g.follow(sizes, g.n_out(n))
    cells = pairs(borders)
    intervals, reached = _with_blocks(g, windows(g, borders), bounds(sizes))
    alike(sizes, list(intervals), "zeros", at, reached)
    b = bounds(tuple(sizes))
    stays = all(
        lo == a and lo < hi <= c and (c - a - g.reach) // g.stride == (hi - lo - g.reach) // g.stride
        for (a, c), (lo, hi) in zip(zip(b, b[1:]), intervals)
    )
    assert _stays(g, sizes, borders, intervals) == stays
    g = g._replace(lo=min(g.lo, g.reach // 2), hi=min(g.lo, g.reach // 2))
    if n + 2 * g.lo >= g.reach:
        cells = pairs(g.follow(sizes, g.n_out(n)))
        alike(sizes, list(_ends(_clipped(g, n, cells))), "zeros", at, _reached(g, n, cells))


@given(runs, slides)
def test_some_positions_stand_for_all(found, g):
    sizes = repeated(found)
    if not total(sizes) or g.n_out(total(sizes)) <= 0:
        return
    borders, b = g.follow(sizes, g.n_out(total(sizes))), bounds(sizes)

    def kind(i):
        a, c = borders[i : i + 2]
        lo, hi = g.window(a, c)
        return sizes[i], c - a, lo - b[i], hi - b[i + 1]

    some = list(of_every_kind(sizes, sizes_of(borders), 1, g.stride))
    assert {kind(i) for i in some} == {kind(i) for i in range(len(sizes))}


def test_a_layout_of_many_ranks_is_as_small_as_one_of_few():
    many = layout_of((65536,), (Shard(0),), (10**6,))
    assert len(repr(many)) < 200
    assert sys.getsizeof(many.sizes[0]) + sum(map(sys.getsizeof, many.sizes[0].runs)) < 1000
    assert many == layout_of((65536,), (Shard(0),), (10**6,), {0: tuple(balanced(10**6, 65536))})
    assert many is layout_of((65536,), (Shard(0),), (10**6,), {0: list(many.sizes[0])})
    assert many.interval(0, (65535,)) == (10**6 - 15, 10**6)


def test_few_windows_are_looked_at_in_a_row_of_65536():
    sizes = balanced(65536 * 4 + 99, 65536)
    g, looked = Sliding(3, 2, 1, 1, 1), []
    borders = g.follow(sizes, g.n_out(total(sizes)))

    def window(i):
        looked.append(i)
        return g.window(*borders[i : i + 2])

    some = near(Each(len(sizes), window), total(sizes), "reflect", *bounds(sizes)[40000:40002])
    assert {39999, 40000, 40001} >= {*some} - {0, 65535}
    assert len(looked) < 200
