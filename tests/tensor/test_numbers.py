"""A tensor of one value where torch or numpy wants a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, flat, gathered, mesh_of, shard
from tests.release import RELEASE

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


DIMS = {
    "sum": lambda x, one, two: x.sum(one),
    "std": lambda x, one, two: torch.std(x, dim=one, correction=two),
    "movedim": lambda x, one, two: x.movedim(one, two),
    "roll": lambda x, one, two: x.roll(two, one),
    "chunk": lambda x, one, two: x.chunk(two, one),
    "tensor_split": lambda x, one, two: x.tensor_split(two, dim=one),
    "hsplit": lambda x, one, two: x.hsplit(two),
    "flip": lambda x, one, two: torch.flip(x, (one,)),
    "squeeze": lambda x, one, two: x[:, :1].squeeze(one),
    "fft": lambda x, one, two: torch.fft.fft(x, two, one),
    "fftshift": lambda x, one, two: torch.fft.fftshift(x, one),
    "norm": lambda x, one, two: torch.linalg.norm(x, two, one),
    "gradient": lambda x, one, two: torch.gradient(x, dim=one),
    "conv2d": lambda x, one, two: F.conv2d(x, torch.ones(4, 4, 3, 3), stride=two, padding=one),
    "pad": lambda x, one, two: F.pad(x, (one, two)),
    "unfold": lambda x, one, two: x.unfold(one, two, two),
    "max_pool2d": lambda x, one, two: F.max_pool2d(x, two, stride=(one, two)),
    "avg_pool2d": lambda x, one, two: F.avg_pool2d(x, two),
}


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8, torch.tensor])
@pytest.mark.parametrize("name", DIMS)
def test_integers_of_numpy_and_torch(name, integer):
    whole = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(1))
    call, given = DIMS[name], (integer(1), integer(2))
    if RELEASE < (2, 13):
        pytest.skip("torch takes some of these, some otherwise")
    expected = flat(call(whole, *given))
    for dim in (2, 3):
        got = call(shard(whole, mesh_of((WORLD.size,)), (ms.Shard(dim),)), *given)
        for g, e in zip(flat(got), expected, strict=True):
            torch.testing.assert_close(gathered(g), e)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_small_integers_do_not_overflow():
    whole = torch.randn(1, 2, 4, 400, generator=torch.Generator().manual_seed(2))
    x, few, many = shard(whole, mesh_of((WORLD.size,)), (ms.Shard(3),)), np.uint8(3), np.uint8(200)
    for call in (
        lambda x: F.max_pool2d(x, (few, few), stride=(few, few), padding=(np.uint8(1), np.uint8(1))),
        lambda x: F.avg_pool2d(x, (few, few), stride=(few, few)),
        lambda x: F.conv2d(x, torch.ones(2, 2, 3, 3), stride=(few, few)),
        lambda x: x.unfold(3, few, few),
        lambda x: x.topk(many, 3)[0],
        lambda x: x.narrow(3, many, many),
        lambda x: x[..., few:many:few],
        lambda x: x.roll(many, 3),
    ):
        torch.testing.assert_close(gathered(call(x)), call(whole))


def test_more_cells_are_no_number():
    x = shard(X, mesh_of((WORLD.size,)), (ms.Shard(0),))
    with pytest.raises((RuntimeError, TypeError)):
        torch.full((3,), x)
    with pytest.raises(RuntimeError):
        torch.linspace(x, 3.0, 4)
