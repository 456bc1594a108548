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


# numbers that are equal as keys of a plan, and no tensors
ALIKE = [1, True, 1.0, np.int64(1), np.float64(1), np.bool_(True), 1 + 0j, T(1)]
KEYED = {
    "transpose": lambda x, n: x.transpose(n, 0),
    "swapaxes": lambda x, n: torch.swapaxes(x, 0, n),
    "permute": lambda x, n: x.permute(n, 0),
    "movedim": lambda x, n: x.movedim(n, 0),
    "unsqueeze": lambda x, n: x.unsqueeze(n),
    "squeeze": lambda x, n: x[:, :1].squeeze(n),
    "expand": lambda x, n: x[:, :1].expand(4, n),
    "reshape": lambda x, n: x.reshape(12, n),
    "view": lambda x, n: x.view((12, n)),
    "unflatten": lambda x, n: x.unflatten(0, (4, n)),
    "cat": lambda x, n: torch.cat([x, x], n),
    "stack": lambda x, n: torch.stack([x, x], n),
    "gather": lambda x, n: x.gather(n, T([[0, 1, 1]])),
    "index_add": lambda x, n: x.index_add(n, T([0]), x[:, :1]),
    "index": lambda x, n: x[:, n],
    "index of a list": lambda x, n: x[[n, 0]],
    "alone": lambda x, n: x[n],
    "written": lambda x, n: x.clone().__setitem__(n, 7.0),
    "slice": lambda x, n: x[n:],
    "sum": lambda x, n: x.sum(n),
    "sum, kept": lambda x, n: x.sum(1, keepdim=n),
    "argmax": lambda x, n: x.argmax(n),
    "softmax": lambda x, n: x.softmax(n),
    "sort": lambda x, n: x.sort(n)[0],
    "roll": lambda x, n: x.roll(n, 0),
    "flip": lambda x, n: x.flip((n,)),
    "diff": lambda x, n: x.diff(n),
    "tensor_split": lambda x, n: x.tensor_split(n)[0],
    "tensor_split of places": lambda x, n: x.tensor_split((n, 2))[0],
    "vsplit": lambda x, n: x.vsplit(n)[0],
    "hsplit of places": lambda x, n: x.hsplit([n])[0],
    "unfold": lambda x, n: x.unfold(0, 2, n),
    "tensordot": lambda x, n: torch.tensordot(x, x, ([n], [n])),
    "bincount": lambda x, n: x.long().flatten().bincount(minlength=n),
    "size": lambda x, n: T(x.size(n)),
    "stride": lambda x, n: T(x.contiguous().stride(n)),
    "layer_norm": lambda x, n: F.layer_norm(x[:, :1] + x.new_zeros(3), (n + n + n,)),
    "rms_norm": lambda x, n: F.rms_norm(x[:, :1] + x.new_zeros(3), (n + n + n,)),
    "group_norm": F.group_norm,
    "interpolate": lambda x, n: F.interpolate(x[None], n),
    "interpolate to several": lambda x, n: F.interpolate(x[None], (n,)),
    "max_pool1d": F.max_pool1d,
    "conv1d": lambda x, n: F.conv1d(x[None], x.new_ones(2, 4, 2), stride=n),
    "groups": lambda x, n: F.conv1d(x[None], x.new_ones(2, 4, 2), groups=n),
    "pad": lambda x, n: F.pad(x, (n, 0)),
    "pixel_unshuffle": F.pixel_unshuffle,
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", KEYED)
def test_numbers_that_are_one_key(name, seed):
    """What one number made is not what another one finds, in any order."""
    numbers = [*ALIKE, 1]
    random.Random(f"{name} {seed}").shuffle(numbers)
    require_alike({name: KEYED[name]}, numbers, f"{name} {seed}")


def scores(x):
    return x[:, :1].abs() + torch.ones(3, dtype=x.dtype)


UNALIKE = {
    "where of nothing": lambda x, _: x.where(),
    "an array of places": lambda x, _: x.tensor_split(np.array([1])),
    "an array of one": lambda x, _: x.tensor_split(np.array(3))[0],
    "vsplit at an array of one": lambda x, _: x.vsplit(np.array(3))[0],
    "a range of places": lambda x, _: x.tensor_split(range(2)),
    "two ellipses": lambda x, _: x[..., ...],
    "a number, two ellipses": lambda x, _: x[..., 0, ...],
    "a list, two ellipses": lambda x, _: x[[0, 1], ..., ...],
    "two ellipses, a number": lambda x, _: x[..., ..., 1],
    "no dims left": lambda x, _: x[..., 0, 1, ..., None],
    "floats as index": lambda x, _: x[[1.9, -1.5]],
    "floats beside others": lambda x, _: x[:, [0.5, True]],
    "an array of floats": lambda x, _: x[np.array([1.0])],
    "NaN as index": lambda x, _: x[[float("nan")]],
    "a mean without a variance": lambda x, _: F.instance_norm(x[None], x.new_ones(4), None),
    "a variance without a mean": lambda x, _: F.batch_norm(scores(x), None, x.new_ones(3), training=True),
    "uint8 and floats": lambda x, _: F.hinge_embedding_loss(x.to(torch.uint8), x),
    "uint8 and floats, summed": lambda x, _: F.hinge_embedding_loss(x.to(torch.uint8), x, reduction="sum"),
    "one matrix": lambda x, _: torch.chain_matmul(x),
    "two matrices": lambda x, _: torch.chain_matmul(x, x.T),
    "a vector and a matrix": lambda x, _: torch.chain_matmul(x[0], x.T),
    "ranks of one number": lambda x, _: F.margin_ranking_loss(x, x, T(1.0)),
    "ranks of a row": lambda x, _: F.margin_ranking_loss(x[0], x, x),
    "the weight first": lambda x, _: F.embedding_bag(x.clone(), T([0, 1, 2]), T([0, 2])),
    "a complex correction": lambda x, _: x.var(0, correction=np.complex128(1j)),
    "cosine of a half": lambda x, _: F.cosine_similarity(x.float(), x.bfloat16() / 3),
    "cosine of a double": lambda x, _: F.cosine_similarity(x.float() / 3, x),
    "cosine of ints": lambda x, _: F.cosine_similarity(x, x.long()),
    "cosine of complex numbers": lambda x, _: F.cosine_similarity(x.float(), x.to(torch.complex64)),
}


@pytest.mark.parametrize("name", UNALIKE)
@pytest.mark.filterwarnings("ignore")
def test_odd_calls(name):
    require_alike({name: UNALIKE[name]}, [None], name)


NORMS = {
    "layer_norm": lambda x, eps: F.layer_norm(x, (3,), eps=eps),
    "layer_norm of weights": lambda x, eps: F.layer_norm(x, (3,), x.new_ones(3), x.new_zeros(3), eps),
    "native_layer_norm": lambda x, eps: torch.native_layer_norm(x, (3,), None, None, eps)[0],
    "rms_norm": lambda x, eps: F.rms_norm(x, (3,), eps=eps),
    "group_norm": lambda x, eps: F.group_norm(x[None], 2, eps=eps),
    "batch_norm": lambda x, eps: F.batch_norm(x, None, None, training=True, eps=eps),
    "momentum": lambda x, eps: F.batch_norm(x, x.new_ones(3), x.new_ones(3), training=True, momentum=eps),
    "instance_norm": lambda x, eps: F.instance_norm(x[None], eps=eps),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("graph", [False, True])
def test_eps_that_is_no_float(name, graph):
    """Only ranks with cells had a kernel that refused it, and the others waited."""
    rule = NORMS[name]
    wanted = [1, T(0.5), np.float32(0.5), 2**70, T(1j), 1j, "a", [0.5], T([0.5, 0.5])]
    require_alike({name: (lambda x, eps: rule(x.requires_grad_().clone(), eps)) if graph else rule}, wanted, name)


@pytest.mark.parametrize("call", [lambda x: x.bernoulli(0.5), lambda x: torch.bernoulli(x, 1.0)])
def test_bernoulli_of_a_number_has_a_gradient_of_zero(call):
    x = ms.distribute_tensor(torch.full((5, 2), float("nan")), mesh_of((WORLD.size,)), (ms.Shard(0),)).requires_grad_()
    y = call(x)
    assert y.requires_grad
    assert set(y.full_tensor().unique().tolist()) <= {0.0, 1.0}
    y.sum().backward()
    assert torch.equal(gathered(x.grad), torch.zeros(5, 2))
