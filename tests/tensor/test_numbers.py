"""A tensor of one value where torch or numpy wants a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, gathered, mesh_of, shard

X = torch.arange(1.0, 14.0)
CALLS = {
    "linspace": lambda x: torch.linspace(x.min(), x.max(), 5),
    "linspace from a number": lambda x: torch.linspace(0, x.max(), steps=5, dtype=torch.float64),
    "logspace": lambda x: torch.logspace(0, x.mean() / 7, 3),
    "arange": lambda x: torch.arange(x.min(), x.sum() / 7),
    "full": lambda x: torch.full((3,), x.mean()),
    "full_like": lambda x: torch.full_like(x, x.mean()),
    "new_full": lambda x: x.new_full((2,), x.mean()),
    "histc": lambda x: torch.histc(x, 5, x.min(), x.max()),
    "numpy's function": lambda x: np.sqrt(x.mean()),
    "numpy's number": lambda x: np.float64(2) * x,
    "numpy's function of two": lambda x: np.maximum(x.mean(), 2),
    "range": lambda x: torch.tensor(range(int(x.min()), int(x.max()))),
    "eye": lambda x: torch.eye(int(x.max())),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
def test_numbers(name):
    mesh = mesh_of((WORLD.size,))
    got = CALLS[name](shard(X, mesh, (ms.Shard(0),)))
    expected = CALLS[name](X)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(gathered(got) if isinstance(got, ms.ShardTensor) else got, expected)


def test_more_cells_are_no_number():
    x = shard(X, mesh_of((WORLD.size,)), (ms.Shard(0),))
    with pytest.raises((RuntimeError, TypeError)):
        torch.full((3,), x)
    with pytest.raises(RuntimeError):
        torch.linspace(x, 3.0, 4)
