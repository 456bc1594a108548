"""Counts and distinct values, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, flat, gathered, mesh_of, shard
from tests.ops.windows import field, same, sampled

NUMBERS = (torch.arange(35) * 7 % 11).reshape(7, 5)


def test_histc():
    same(lambda x: torch.histc(x, 6), field(7, 5).float(), (0, 1), 0)
    same(lambda x: torch.histc(x, 6, -1, 2), field(7, 5), (0, 1), 1)
    same(lambda x: torch.histc(x * 0, 5), field(7, 5), (0, 1), 1)


@pytest.mark.parametrize("part", [0, 1])
def test_histogram(part):
    same(lambda x: torch.histogram(x, 6)[part], field(7, 5).float(), (0, 1), 0)
    same(lambda x: torch.histogram(x, 6, range=(-1.0, 2.0), density=True)[part], field(7, 5), (0, 1), 1, exact=False)
    same(lambda x: torch.histogram(x, torch.tensor([-1.0, 0.5, 3.0]))[part], field(7, 5).float(), (0, 1), 2)
    same(lambda x: torch.histogram(x, 4, weight=x * x)[part], field(7, 5), (0, 1), 3, exact=False)


def test_of_nothing():
    for shape in ((0, 4), (3, 0)):
        nothing = field(*shape).float()
        for part in (0, 1):
            same(lambda x, part=part: torch.histogram(x, 4)[part], nothing, (0, 1), 0)
        same(lambda x: torch.histogramdd(x, 2)[1][0], field(0, 2).float(), (0, 1), 0)


def test_bincount():
    same(torch.bincount, NUMBERS.reshape(-1), (0,), 0)
    same(lambda x: torch.bincount(x, minlength=20), NUMBERS.reshape(-1), (0,), 1)
    same(lambda x: torch.bincount(x, torch.arange(35) / 4), NUMBERS.reshape(-1), (0,), 2)
    same(lambda x: torch.bincount(x, x * 2.0), NUMBERS.reshape(-1), (0,), 2)
    same(lambda w: torch.bincount(NUMBERS.reshape(-1), w), field(35), (0,), 1, exact=False)
    weights = shard(field(35), mesh_of((WORLD.size,)), (ms.Shard(0),))
    with ms.comm_counter() as count:
        torch.bincount(NUMBERS.reshape(-1), weights)
        torch.histogram(field(35), 4, weight=weights)
    assert "all_gather" not in count.by_op  # the weights stay
    for mesh, placements, sizes in sampled((35,), (0,), 0, 2):
        with pytest.raises(RuntimeError, match="non-negative"):
            torch.bincount(shard(NUMBERS.reshape(-1) - 1, mesh, placements, sizes))


@pytest.mark.parametrize("options", [{}, {"dim": 0}, {"dim": 1}])
@pytest.mark.parametrize("func", [torch.unique, torch.unique_consecutive])
def test_distinct_values(func, options):
    full = torch.stack([NUMBERS[i // 2] for i in range(7)]) % 4
    for inverse in (False, True):
        for counts in (False, True):
            call = {"return_inverse": inverse, "return_counts": counts, **options}
            expected = func(full, **call)
            for mesh, placements, sizes in sampled((7, 5), (0, 1), inverse + 2 * counts, 3):
                got = func(shard(full, mesh, placements, sizes), **call)
                assert isinstance(got, tuple) == isinstance(expected, tuple)
                for e, g in zip(flat(expected), flat(got), strict=True):
                    torch.testing.assert_close(gathered(g), e)


@pytest.mark.parametrize("func", [torch.unique, torch.unique_consecutive])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_nan_is_a_value_of_its_own(func, dtype):
    full = (NUMBERS % 4).to(dtype)
    full[NUMBERS % 3 == 0] = torch.nan
    for kept in (full, full * torch.nan):
        values, _, numbers = func(kept, return_inverse=True, return_counts=True)
        for mesh, placements, sizes in sampled((7, 5), (0, 1), 1, 4):
            x = shard(kept, mesh, placements, sizes)
            found, places, counts = (gathered(t) for t in func(x, return_inverse=True, return_counts=True))
            torch.testing.assert_close((found, counts), (values, numbers), equal_nan=True)
            torch.testing.assert_close(found[places], kept, equal_nan=True)
            assert torch.equal(torch.bincount(places.flatten(), minlength=len(counts)), counts)


def test_methods():
    for mesh, placements, sizes in sampled((7, 5), (0, 1), 1):
        x = shard(NUMBERS, mesh, placements, sizes)
        torch.testing.assert_close(gathered(x.unique()), NUMBERS.unique())
        torch.testing.assert_close(gathered(x.unique_consecutive()), NUMBERS.unique_consecutive())
        torch.testing.assert_close(gathered((x > 3).unique(return_inverse=True)[1]), (NUMBERS > 3).long())


@pytest.mark.parametrize("part", [0, 1])
def test_histograms_of_points(part):
    def pick(found):
        return found[0] if part == 0 else found[1][1]

    edges = [torch.tensor([-1.0, 0.5, 3.0]), torch.tensor([-2.0, 0.0, 1.0, 2.0])]
    points = field(9, 2).float()
    same(lambda x: pick(torch.histogramdd(x, [3, 4])), points, (0, 1), 0)
    same(
        lambda x: pick(torch.histogramdd(x, 3, range=[-1.0, 2.0, 0.0, 1.0], density=True)),
        points,
        (0, 1),
        1,
        exact=False,
    )
    same(lambda x: pick(torch.histogramdd(x, edges)), points, (0, 1), 2)
    same(lambda x: pick(torch.histogramdd(x, 3, weight=x[..., 0] ** 2)), field(3, 4, 2), (0, 1, 2), 3, exact=False)
    same(lambda x: pick(torch.histogramdd(x * 0, 3)), points, (0, 1), 4)
    same(lambda w: pick(torch.histogramdd(points, 3, weight=w)), field(9).float(), (0,), 1, exact=False)
