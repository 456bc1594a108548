"""Marks of small all-reduces: what equal calls give is known before, what others give is another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.comm.memory.reduction_type import rule_of
from mpishard.comm.transport.slot import marks
from tests.compare import WORLD, mesh_of

DTYPES = "uint8 int8 int16 int32 int64 float32 float64 complex64 complex128 float16 bfloat16 bool".split()


def carried(op, dtype):
    rule = rule_of(op, dtype)
    return rule.carrier or dtype


@pytest.mark.parametrize("size", [1, 2, 7, 255, 65536, 10**7])
def test_marks_of_any_number_of_ranks(size):
    """As MPI reduces them: pairwise, in the type of the numbers."""
    calls = [
        (op, carried(op, dtype))
        for op, dtype in itertools.product(("sum", "prod", "max", "min"), map(torch.__dict__.get, DTYPES))
        if not (op in ("max", "min") and dtype.is_complex) and not (op in ("sum", "prod") and dtype is torch.bool)
    ]
    combine = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
    found = set()
    for op, dtype in calls:
        mine, expected = marks(f"{op} {dtype}", op, dtype, size)
        assert len(mine) == len(expected) == 16
        total, power, left = None, np.frombuffer(mine, str(dtype).removeprefix("torch.")), size
        while left:
            if left & 1:
                total = power if total is None else combine[op](total, power)
            power, left = combine[op](power, power), left >> 1
        assert total.tobytes() == expected
        found.add((op != "prod", mine))
    # fewer bits are left where ranks are very many
    assert size > 10**6 or len([mark for summed, mark in found if summed]) == len(
        {call for call in calls if call[0] != "prod"}
    )


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
