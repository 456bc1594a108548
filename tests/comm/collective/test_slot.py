"""Marks of small all-reduces: what equal calls give is known before, what others give is another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.comm.memory.reduction_type import rule_of
from mpishard.comm.transport.choice import transport_of
from mpishard.comm.transport.slot import marks
from tests.compare import WORLD, mesh_of

DTYPES = "uint8 int8 int16 int32 int64 float32 float64 complex64 complex128 float16 bfloat16 bool".split()


def calls():
    """Give operations, each with the dtype of what is reduced and that which travels."""
    for op, dtype in itertools.product(("sum", "max", "min"), map(torch.__dict__.get, DTYPES)):
        if not (op != "sum" and dtype.is_complex) and not (op == "sum" and dtype is torch.bool):
            yield op, dtype, (rule_of(op, dtype).carrier or dtype) if op == "sum" else torch.int64


def marks_of(call, size):
    op, _, travels = call
    return marks(str(call), travels, size, summed=op == "sum")


def combined(call, a, b):
    """As MPI reduces them, in the type of the numbers."""
    op, _, travels = call
    a, b = (np.frombuffer(x, str(travels).removeprefix("torch.")) for x in (a, b))
    return (a + b if op == "sum" else np.maximum(a, b)).tobytes()


@pytest.mark.parametrize("size", [1, 2, 7, 255, 65536, 10**7])
def test_marks_of_any_number_of_ranks(size):
    found = set()
    for call in calls():
        mine, expected = marks_of(call, size)
        assert len(mine) == len(expected) == 16
        total, power, left = None, mine, size
        while left:
            if left & 1:
                total = power if total is None else combined(call, total, power)
            power, left = combined(call, power, power), left >> 1
        assert total == expected
        found.add(mine)
    # fewer bits are left where ranks are very many
    assert size > 10**6 or len(found) == len([*calls()])


@pytest.mark.parametrize("odd_rank", range(4))
def test_no_rank_takes_a_mixture_for_its_own(odd_rank):
    """Four ranks, one of which reduces otherwise, each in its own way: halves that exchange what they have."""
    with np.errstate(all="ignore"):
        for most, odd in itertools.permutations(calls(), 2):
            own = [odd if r == odd_rank else most for r in range(4)]
            told = [marks_of(call, 4) for call in own]
            have = [mine for mine, _ in told]
            for half in (1, 2):
                have = [combined(call, have[r], have[r ^ half]) for r, call in enumerate(own)]
            assert all(came != expected for came, (_, expected) in zip(have, told)), (most, odd)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("most", "odd"),
    [
        (ms.all_reduce, lambda x, mesh: ms.all_reduce(x.double(), mesh)),
        (ms.all_reduce, lambda x, mesh: ms.all_reduce(x.view(torch.int32), mesh)),
        (ms.all_reduce, lambda x, mesh: ms.all_reduce(x[1:], mesh)),
        (ms.all_reduce, lambda x, mesh: ms.all_reduce(x, mesh, op="max")),
        (lambda x, mesh: ms.all_reduce(x, mesh, op="min"), lambda x, mesh: ms.all_reduce(x, mesh, op="max")),
        (ms.all_reduce, lambda x, mesh: ms.all_reduce(x.repeat(2, 3), mesh)),
    ],
    ids="dtype bytes length op extremum new".split(),
)
def test_reductions_that_differ(most, odd, request):
    """Without a comparison of calls, and with plans that are there."""
    mesh, x = mesh_of((WORLD.size,)), torch.arange(5.0)
    calls = [most] if "new" in request.node.name else [most, odd]
    for call in calls:
        call(x, mesh)
    last = WORLD.size - 1
    with pytest.raises(ms.DesyncError, match="different calls") as e:
        (odd if last == WORLD.rank else most)(x, mesh)
    assert len(set(WORLD.allgather(str(e.value)))) == 1
    if WORLD.size > 2:
        assert f"rank {last} differs" in str(e.value)


def with_plans():
    """A mesh that has what is agreed on once."""
    mesh = mesh_of((WORLD.size,))
    for op, dtype in itertools.product(("sum", "max"), (torch.int32, torch.float32)):
        for n in (256, 2):
            ms.all_reduce(torch.ones(n, dtype=dtype), mesh, op=op)
    return mesh


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("odd", [torch.int32, torch.float32])
@pytest.mark.parametrize("reduced", ["sum", "max", "in the background"])
def test_large_ones_that_differed_are_named_at_the_next_small_one(odd, reduced):
    """Equal bytes of another dtype: MPI adds them in silence."""
    mesh = with_plans()
    for _ in range(2):
        x = torch.ones(256, dtype=odd if WORLD.rank == WORLD.size - 1 else torch.float32)
        if reduced == "in the background":
            group = mesh.group((0,))
            requests, end = transport_of(group, x).start_sum(x, rule_of("sum", x.dtype))
            MPI.Request.Waitall(requests)
            end()
        else:
            ms.all_reduce(x, mesh, op=reduced)
        if odd is torch.float32:
            assert ms.all_reduce(torch.ones(2), mesh).tolist() == [WORLD.size] * 2
        else:
            with pytest.raises(ms.errors.DesyncError, match="after all_reduce") as e:
                ms.all_reduce(torch.ones(2), mesh)
            assert len(set(WORLD.allgather(str(e.value)))) == 1
            assert "int32" in str(e.value)
        # what was told is over
        assert ms.all_reduce(torch.ones(3), mesh).tolist() == [WORLD.size] * 3


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("odd", [0, 1, 150])
def test_one_of_many_large_ones_that_differed_is_found(odd):
    mesh = with_plans()
    for i in range(200):
        is_odd = i == odd and WORLD.rank == 0
        ms.all_reduce(torch.ones(256, dtype=torch.int32 if is_odd else torch.float32), mesh)
    with pytest.raises(ms.errors.DesyncError):
        ms.all_reduce(torch.ones(2), mesh)
    assert ms.all_reduce(torch.ones(3), mesh).tolist() == [WORLD.size] * 3
