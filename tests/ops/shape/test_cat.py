"""Joining and splitting along sharded and whole dims, against torch on the whole tensors."""

from __future__ import annotations

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, compare_penalties, gathered, mesh_of, shard
from tests.ops.windows import check, field, sampled

SHAPE = (4, 7, 6)
OTHER = field(4, 3, 6)

JOINS = [
    lambda x: torch.cat([x, x * 2], 0),
    lambda x: torch.cat([x, x * 2, x], 1),
    lambda x: torch.cat([x, OTHER], 1),
    lambda x: torch.cat([OTHER, x, OTHER], -2),
    lambda x: torch.cat([x, torch.empty(0, dtype=x.dtype)], 2),
    lambda x: torch.stack([x, x * 3], 0),
    lambda x: torch.stack([x, x * 3, -x], 2),
    lambda x: torch.stack([x, x], -1),
    lambda x: torch.hstack([x, x * 2]),
    lambda x: torch.vstack([x, x * 2]),
    lambda x: torch.dstack([x, x * 2]),
    lambda x: torch.concatenate((x[:, :3], x[:, 3:]), dim=1),
]


@pytest.mark.parametrize("case", range(len(JOINS)))
def test_joins(case):
    check(JOINS[case], field(*SHAPE), range(3), case, count=6, second=case % 3 == 0)


SPLITS = [
    lambda x: x.split(2, 1),
    lambda x: torch.split(x, [1, 0, 6], 1),
    lambda x: x.chunk(3, 1),
    lambda x: torch.chunk(x, 4, 2),
    lambda x: x.unbind(1),
    lambda x: torch.unbind(x, 0),
    lambda x: torch.tensor_split(x, 3, 1),
    lambda x: torch.tensor_split(x, (2, 5), 1),
    lambda x: x.hsplit([3]),
    lambda x: torch.split_with_sizes(x, [3, 4], 1),
]


@pytest.mark.parametrize("case", range(len(SPLITS)))
def test_splits(case):
    check(SPLITS[case], field(*SHAPE), range(3), case, count=6)


def test_what_is_split_joins_again():
    check(lambda x: torch.cat(x.split([2, 4, 1], 1), 1) - x, field(*SHAPE), range(3), 1, count=6)


@pytest.mark.parametrize("dim", [0, 1])
def test_operands_that_are_laid_out_differently(dim):
    mesh = mesh_of((WORLD.size,))
    x = (field(4, 6), mesh, (ms.Shard(0),), None)
    for placement in (ms.Shard(1), ms.Replicate()):
        compare(lambda x, y: torch.cat([x, y], dim), [x, (field(4, 6) * 2, mesh, (placement,), None)])


@pytest.mark.parametrize(
    "wrong", [lambda x: torch.cat([x, OTHER], 0), lambda x: torch.stack([x, OTHER]), lambda x: x.split([3, 3], 1)]
)
def test_shapes_that_do_not_fit(wrong):
    for mesh, placements, sizes in sampled(SHAPE, [1], 0, 2):
        with pytest.raises((RuntimeError, ms.LayoutError)):
            wrong(shard(field(*SHAPE), mesh, placements, sizes))


def test_empty_vectors_count_for_the_dtype():
    numbers, mesh = torch.arange(7), mesh_of((WORLD.size,))
    lists = [lambda x: [torch.empty(0), x], lambda x: [x, torch.empty(0).double(), x], lambda x: [x[:0], numbers.int()]]
    for f in (*lists, lambda x: [torch.empty(0, dtype=torch.bool), x.view(7, 1)]):
        expected = torch.cat(f(numbers))
        got = torch.cat(f(shard(numbers, mesh, (ms.Shard(0),))))
        assert got.dtype == expected.dtype
        torch.testing.assert_close(gathered(got), expected)


VECTORS = {
    "cat": lambda x: torch.cat([x, x]),
    "hstack": lambda x: torch.hstack([x, 2 * x]),
    "a number more": lambda x: torch.cat([x, x.sum()[None]]),
    "repeat": lambda x: x.repeat(2),
    "part": lambda x: torch.cat([x[:2], x]),
}


@pytest.mark.parametrize("name", VECTORS)
def test_second_derivatives_of_vectors_joined(name):
    """Of an operand that has no cells on a rank, torch's own would end there."""
    compare_penalties(VECTORS[name], field(7), (0,))


@pytest.mark.parametrize("name", ["tensor_split", "hsplit", "vsplit", "dsplit"])
@pytest.mark.parametrize("given", [{}, {"padding": 1}, {"sections": 2, "padding": 1}, {"sections": 2, "indices": [1]}])
def test_a_split_by_nothing_or_by_two_is_refused(name, given):
    """StopIteration from a rule would end a generator that calls it, in silence."""
    full = torch.zeros(2, 4, 6)
    for x in (full, shard(full, mesh_of((WORLD.size,)), [ms.Shard(1)])):
        with pytest.raises(TypeError):
            [*(part for _ in range(1) for part in getattr(x, name)(**given))]
