"""The window planner, all ranks played in one process, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.errors import LayoutError
from mpishard.layout import Run, Runs, Stage, balanced, bounds, interval_runs, plan_stage
from tests.layout.strategies import cuts

NUMPY_MODES = {
    "zeros": "constant",
    "constant": "constant",
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}
EMPTY, FILL = -1, 0
block_sizes = st.integers(1, 8).flatmap(lambda p: cuts(p, 5))
modes = st.sampled_from(sorted(NUMPY_MODES))


def cells_of(n: int) -> np.ndarray:
    return np.arange(1, n + 1)  # none of them FILL


def at(piece, count=None):
    return piece.src + np.arange(piece.count if count is None else count) * piece.step


def play(sizes: tuple[int, ...], windows: list[Runs], n_outs: list[int]) -> tuple[list[np.ndarray], list[Stage]]:
    """Run the stages of all ranks on cell numbers; every cell of every window must be written exactly once."""
    p = len(sizes)
    stages = [plan_stage(0, (0,), sizes, windows, n_outs, i) for i in range(p)]
    blocks = np.split(cells_of(sum(sizes)), bounds(sizes)[1:-1])
    wire = {}
    for me, stage in enumerate(stages):
        assert [q for q, _ in stage.sends] == sorted({q for q, _ in stage.sends} - {me})
        for peer, pieces in stage.sends:
            assert all(0 <= piece.wire_count <= piece.count for piece in pieces)
            wire[me, peer] = [blocks[me][at(piece, piece.wire_count)] for piece in pieces]
    results = []
    for me, stage in enumerate(stages):
        assert [q for q, _ in stage.recvs] == sorted({q for q, _ in stage.recvs} - {me})
        assert (stage.n_in, stage.n_out) == (sizes[me], n_outs[me])
        out = np.full(n_outs[me], EMPTY)

        def write(where, cells, out=out):
            assert (out[where] == EMPTY).all()
            out[where] = cells

        if stage.resident is not None:
            assert sizes[me]
            write(np.arange(stage.resident, stage.resident + sizes[me]), blocks[me])
        for piece in stage.local:
            write(piece.dst + np.arange(piece.count), blocks[me][at(piece)])
        for peer, pieces in stage.recvs:
            message = wire.pop((peer, me))
            assert [len(part) for part in message] == [piece.wire_count for piece in pieces]
            for piece, part in zip(pieces, message):
                write(piece.dst + np.arange(piece.count), part)
        for lo, hi in stage.fill:
            assert hi > lo
            write(np.arange(lo, hi), FILL)
        assert (out != EMPTY).all()
        results.append(out)
    assert not wire  # nothing is sent that nobody receives
    return results, stages


def padded(n: int, lo: int, hi: int, mode: str) -> np.ndarray:
    """Return what the window ``[lo, hi)`` holds, by numpy's own padding."""
    before, after = max(0, -lo), max(0, hi - n)
    if n == 0:
        return np.full(hi - lo, FILL)
    whole = np.pad(cells_of(n), (before, after), mode=NUMPY_MODES[mode])
    return whole[lo + before : hi + before]


def intervals(reach: int):
    return st.tuples(st.integers(-reach, reach), st.integers(0, 2 * reach)).map(lambda t: (t[0], t[0] + t[1]))


@given(st.integers(0, 12), intervals(40), modes)
def test_interval_as_numpy_pads(n, window, mode):
    lo, hi = window
    out = np.full(hi - lo, FILL)
    at_end = 0
    for run in interval_runs(n, lo, hi, mode):
        assert run.count > 0
        assert run.dst >= at_end  # ascending, apart
        at_end = run.dst + run.count
        src = run.src + np.arange(run.count) * run.step
        out[run.dst : at_end] = cells_of(n)[src]
    assert np.array_equal(out, padded(n, lo, hi, mode))


@given(block_sizes, st.data(), modes)
def test_halo_of_any_width(sizes, data, mode):
    # wider than a neighbour, than all neighbours together, than the tensor
    n, borders = sum(sizes), bounds(sizes)
    width = st.integers(0, 2 * n + 3)
    lo, hi = data.draw(width), data.draw(width)
    ends = [(a - lo, b + hi) for a, b in zip(borders, borders[1:])]
    windows = [interval_runs(n, a, b, mode) for a, b in ends]
    results, stages = play(sizes, windows, [b - a for a, b in ends])
    for (a, b), result in zip(ends, results):
        assert np.array_equal(result, padded(n, a, b, mode))
    for size, stage in zip(sizes, stages):
        # the own block stays in one piece, so that it need not be copied where the window is its storage
        assert (stage.resident is not None) == (size > 0)


@given(block_sizes, st.data(), modes)
def test_windows_of_any_place_and_length(sizes, data, mode):
    # negative halos, windows far from the own block, empty windows
    n = sum(sizes)
    ends = [data.draw(intervals(3 * n + 4)) for _ in sizes]
    windows = [interval_runs(n, a, b, mode) for a, b in ends]
    results, _ = play(sizes, windows, [b - a for a, b in ends])
    for (a, b), result in zip(ends, results):
        assert np.array_equal(result, padded(n, a, b, mode))


@st.composite
def runs(draw, n: int) -> tuple[Runs, int]:
    """Runs of any step over ``n`` cells, with gaps between them, and the extent of the window."""
    made, dst = [], draw(st.integers(0, 2))
    for _ in range(draw(st.integers(0, 4)) if n else 0):
        step = draw(st.integers(-3, 3))
        src = draw(st.integers(0, n - 1))
        room = {0: 5}.get(step) or ((n - 1 - src) // step + 1 if step > 0 else src // -step + 1)
        count = draw(st.integers(1, room))
        made.append(Run(dst, count, src, step))
        dst += count + draw(st.integers(0, 2))
    return tuple(made), dst


@given(block_sizes, st.data())
def test_runs_of_any_step(sizes, data):
    n = sum(sizes)
    drawn = [data.draw(runs(n)) for _ in sizes]
    results, _ = play(sizes, [w for w, _ in drawn], [extent for _, extent in drawn])
    for (window, extent), result in zip(drawn, results):
        expected = np.full(extent, FILL)
        for run in window:
            expected[run.dst : run.dst + run.count] = cells_of(n)[run.src + np.arange(run.count) * run.step]
        assert np.array_equal(result, expected)


@given(block_sizes, st.integers(-20, 20))
def test_roll_is_a_circular_window(sizes, shift):
    n, borders = sum(sizes), bounds(sizes)
    windows = [interval_runs(n, a - shift, b - shift, "circular") for a, b in zip(borders, borders[1:])]
    results, _ = play(sizes, windows, list(sizes))
    assert np.array_equal(np.concatenate(results), np.roll(cells_of(n), shift))


@given(block_sizes, st.integers(1, 4), st.integers(0, 3))
def test_slice_with_a_step_and_its_flip(sizes, step, start):
    n = sum(sizes)
    for whole, first, stride in (
        (cells_of(n)[start::step], start, step),
        (cells_of(n)[start::step][::-1], start + step * (len(range(start, n, step)) - 1), -step),
    ):
        out = balanced(len(whole), len(sizes))
        windows = [
            (Run(0, count, first + at * stride, stride),) if count else () for at, count in zip(bounds(out), out)
        ]
        results, _ = play(sizes, windows, list(out))
        assert np.array_equal(np.concatenate(results), whole)


@given(st.integers(1, 8).flatmap(lambda p: st.tuples(cuts(p, 5), st.randoms(use_true_random=False))))
def test_another_cut_moves_only_what_changes_hands(drawn):
    sizes, random = drawn
    n = sum(sizes)
    borders = sorted(random.randint(0, n) for _ in sizes[1:])
    target = tuple(b - a for a, b in zip([0, *borders], [*borders, n]))
    ends = list(zip(bounds(target), bounds(target)[1:]))
    results, stages = play(sizes, [interval_runs(n, a, b) for a, b in ends], list(target))
    assert np.array_equal(np.concatenate(results), cells_of(n))
    own = zip(bounds(sizes), bounds(sizes)[1:])
    stay = sum(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(own, ends))
    sent = sum(piece.wire_count for stage in stages for _, pieces in stage.sends for piece in pieces)
    assert sent == n - stay


@given(block_sizes)
def test_whole_window_is_an_all_gather(sizes):
    n = sum(sizes)
    results, stages = play(sizes, [interval_runs(n, 0, n)] * len(sizes), [n] * len(sizes))
    assert all(np.array_equal(result, cells_of(n)) for result in results)
    assert all(not stage.fill for stage in stages)


@given(block_sizes, st.data(), modes)
def test_only_owners_of_needed_cells_are_asked(sizes, data, mode):
    n, borders = sum(sizes), bounds(sizes)
    lo, hi = data.draw(st.integers(0, n + 2)), data.draw(st.integers(0, n + 2))
    ends = [(a - lo, b + hi) for a, b in zip(borders, borders[1:])]
    _, stages = play(sizes, [interval_runs(n, a, b, mode) for a, b in ends], [b - a for a, b in ends])
    who = np.repeat(np.arange(len(sizes)), sizes)
    for me, ((a, b), stage) in enumerate(zip(ends, stages)):
        needed = padded(n, a, b, mode)
        owners = set(who[needed[needed != FILL] - 1]) - {me}
        assert {q for q, _ in stage.recvs} == owners


@given(block_sizes, st.integers(1, 3))
def test_replicated_cells_travel_once(sizes, width):
    n, borders = sum(sizes), bounds(sizes)
    ends = [(a - width, b + width) for a, b in zip(borders, borders[1:])]
    _, stages = play(sizes, [interval_runs(n, a, b, "replicate") for a, b in ends], [b - a for a, b in ends])
    for stage in stages:
        for _, pieces in stage.sends:
            assert all(piece.wire_count == 1 for piece in pieces if piece.step == 0)


@pytest.mark.parametrize("mode", ["symmetric", "", None])
def test_unknown_mode(mode):
    with pytest.raises(LayoutError, match="unknown padding mode"):
        interval_runs(4, -1, 5, mode)
