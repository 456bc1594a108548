"""Kinds of arguments: one number, several, none, truths, floats: torch's value, or its kind of error, on every rank."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, drawn_sizes, gathered, mesh_of

T = torch.tensor
# what torch takes for several numbers, for one, or for neither
SEVERAL = [(0, 1), [1, 0], torch.Size([1, 0]), (), T([0, 1]), torch.empty(0), np.array([0, 1]), range(2), None]
ONE = [0, np.int64(1), T(0), T([0]), T([[0]]), np.array([0]), True, T(True), np.bool_(True), 0.0, T(0.0), "N", None]
NUMBERS = [2, True, 1.5, 1j, T(True), float("nan")]

OF_SEVERAL = {
    "permute": lambda x, s: x.permute(s),
    "permute by name": lambda x, s: x.permute(dims=s),
    "flip": lambda x, s: x.flip(s),
    "flip by name": lambda x, s: torch.flip(x, dims=s),
    "view": lambda x, s: x[:1, :1].view(s),
    "reshape": lambda x, s: x[:1, :1].reshape(s),
    "expand": lambda x, s: x[:1, :1].expand(s),
    "broadcast_to": lambda x, s: torch.broadcast_to(x[:1, :1], s),
    "repeat": lambda x, s: x.repeat(s),
    "tile": torch.tile,
    "new_zeros": lambda x, s: x.new_zeros(s),
    "new_ones by name": lambda x, s: x.new_ones(size=s),
    "sum_to_size": lambda x, s: x[:1, :1].sum_to_size(s),
    "as_strided": lambda x, s: x.as_strided(s, s),
    "pad": F.pad,
    "split": lambda x, s: x[:1].split(s),
    "unflatten": lambda x, s: x[:, :1].unflatten(1, s),
    "movedim": lambda x, s: x.movedim(s, s),
    "roll": lambda x, s: x.roll(s, s),
    "layer_norm": F.layer_norm,
    "sum": lambda x, s: x.sum(s),
    "mean": lambda x, s: x.mean(s),
    "amax": lambda x, s: x.amax(s),
    "std": lambda x, s: x.std(s),
    "prod": lambda x, s: x.prod(s),
    "max": lambda x, s: x.max(s)[0],
    "logsumexp": lambda x, s: x.logsumexp(s, True),
    "vector_norm": lambda x, s: torch.linalg.vector_norm(x, 2, s),
    "norm": lambda x, s: x.norm(2, s),
    "all": lambda x, s: x.all(s),
}
OF_ONE = {
    "softmax": lambda x, n: x.softmax(n),
    "log_softmax": torch.log_softmax,
    "softmax by name": lambda x, n: x.softmax(dim=n),
    "functional": F.softmax,
    "cumsum": lambda x, n: x.cumsum(n),
    "prod": lambda x, n: x.prod(n),
    "prod by name": lambda x, n: x.prod(dim=n),
    "max": lambda x, n: x.max(n),
    "min by name": lambda x, n: x.min(dim=n),
    "logsumexp": torch.logsumexp,
    "flatten": lambda x, n: x.flatten(n),
    "unsqueeze": lambda x, n: x.unsqueeze(n),
    "select": lambda x, n: x.select(0, n),
    "select of": lambda x, n: x.select(n, 0),
    "narrow": lambda x, n: x.narrow(0, 0, n),
    "chunk": lambda x, n: x.chunk(n),
    "tril": lambda x, n: x.tril(n),
    "rot90": lambda x, n: x.rot90(n),
    "topk": lambda x, n: x.topk(n)[0],
    "dist": lambda x, n: x.dist(n),
}
OF_NONE = {
    name: lambda x, _, name=name: getattr(x, name)()
    for name in """softmax log_softmax logsumexp new_ones new_zeros tile flip expand view repeat permute reshape
    sum_to_size cumsum prod max""".split()
} | {
    "max of keepdim": lambda x, _: x.max(keepdim=True),
    "prod of keepdim": lambda x, _: x.prod(keepdim=True),
    "logsumexp of keepdim": lambda x, _: x.logsumexp(keepdim=True),
    "input by name": lambda x, _: torch.sin_(input=x),
    "x by name": lambda x, _: torch.sin_(x=x),
    "relu_ by name": lambda x, _: F.relu_(input=x),
}
KERNELS = {
    "avg_pool1d": F.avg_pool1d,
    "max_pool1d": F.max_pool1d,
    "avg_pool2d": lambda x, n: F.avg_pool2d(x[None], n),
    "adaptive_avg_pool1d": F.adaptive_avg_pool1d,
}


def outcome(function, x, argument):
    try:
        return gathered(function(x, argument)), None
    except Exception as e:  # noqa: BLE001 (the outcome)
        return None, e


def require_alike(calls, arguments, seed, dtypes=(torch.float64,)):
    """Each call with each argument, on drawn blocks: as torch on the whole tensor."""
    rng = random.Random(seed)
    mesh, wrong, raised = mesh_of((WORLD.size,)), [], []
    for name, function in calls.items():
        for argument in arguments:
            for dtype in dtypes:
                whole = (torch.arange(12).reshape(4, 3) % 5 + 1).to(dtype)
                dim = rng.randrange(2)
                sizes = {dim: drawn_sizes(rng, whole.shape[dim], WORLD.size)}
                x = ms.distribute_tensor(whole, mesh, (ms.Shard(dim),), sizes=sizes)
                expected, refusal = outcome(function, whole.clone(), argument)
                got, said = outcome(function, x, argument)
                raised.append(type(said).__name__)
                what = f"{name}({argument!r}) of {dtype}"
                if (refusal is None) != (said is None):
                    wrong.append(f"{what}: {said!r}, where torch has {refusal!r}")
                elif refusal is not None and not isinstance(said, type(refusal)):
                    wrong.append(f"{what}: {said!r} is no {type(refusal).__name__}: {refusal}")
                elif refusal is None:
                    torch.testing.assert_close(got, expected, msg=lambda text, what=what: f"{what}: {text}")
    assert WORLD.allgather(raised) == [raised] * WORLD.size
    assert not wrong, "\n- ".join(["", *wrong])


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_several_numbers(name):
    require_alike({name: OF_SEVERAL[name]}, SEVERAL, name)


def test_one_number():
    require_alike(OF_ONE, ONE, "one")


def test_no_number():
    require_alike(OF_NONE, [None], "none")


def test_vector_of_one_cell_as_a_size():
    require_alike(KERNELS, [2, T(2), T([2]), [2]], "kernel")


INTO = {
    "addr_": lambda x, n: x[:, 0].clone().outer(x[0] * 0).addr_(x[:, 0].double(), x[0].double(), alpha=n),
    "addr_ of ints": lambda x, n: x.clone().addr_(torch.arange(4), torch.arange(3), alpha=n),
    "addr": lambda x, n: torch.addr(x, torch.arange(4), torch.arange(3), alpha=n, beta=n),
    "cumsum_": lambda x, n: x.clone().cumsum_(0, dtype=torch.float64 if n == 2 else torch.int32),
    "index_fill_": lambda x, n: x.clone().index_fill_(0, T([1]), n),
    "index_fill_ of a tensor": lambda x, n: x.clone().index_fill_(0, T([1]), T(n)),
    "bilinear": lambda x, n: F.bilinear(x, x, x.new_ones(2, 3, 3), T([n, n])),
    "trapezoid": lambda x, n: torch.trapezoid(x, x > n.real),
}


@pytest.mark.parametrize("name", INTO)
def test_dtypes_that_torch_does_not_cast(name):
    """What has no room for a result is not written into, and a factor is not cut to a whole number."""
    numbers = [2, 0.5, True, 1j] if "int" not in name and name != "addr" else [2, 0.5, True]
    require_alike({name: INTO[name]}, numbers, name, [torch.bool, torch.int64, torch.float32, torch.float64])
