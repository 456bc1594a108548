"""Corners of many functions: plain beside sharded operands, tensors without dims, nothing to index, odd masks."""

import re

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, compare, gathered, mesh_of, shard, skew
from tests.ops.windows import field
from tests.release import RELEASE

NUMBER, VECTOR, MATRIX = field(1)[0], field(5), field(5, 4)
ZERO, NONE = torch.tensor([0]), torch.zeros(0, dtype=torch.int64)
TWICE = torch.tensor([1, 3, 1, 1])
MASK = torch.tensor([[True, False, True, True]])

# operands are sharded one at a time, and all; integers and masks too
CASES = {
    "binary_cross_entropy_with_logits": (
        lambda x, p: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), pos_weight=p.detach()),
        MATRIX,
        field(4).abs(),
    ),
    "numpy's names": (lambda x: torch.sum(a=x, axis=0, keepdims=True), MATRIX),
    "numpy's names of a matrix": (lambda x: torch.inverse(x=x) + torch.matrix_exp(a=x / 9).det(), MATRIX[:4]),
    "numpy's names of both": (lambda x, y: torch.add(x1=x, x2=y).cumsum(axis=0), MATRIX, MATRIX + 1),
    "names of numpy's that are torch's": (
        lambda x, y: torch.cdist(x1=x, x2=y) + torch.linalg.vecdot(x=x, y=y).sum(),
        MATRIX,
        MATRIX + 1,
    ),
    "norms by name": (
        lambda x, y: torch.linalg.norm(input=x) + torch.linalg.vector_norm(x=x) + torch.linalg.matrix_norm(input=y),
        MATRIX,
        MATRIX + 1,
    ),
    "normalize without an exponent": (lambda x: F.normalize(x, None), MATRIX),
    "least squares by name": (lambda x, y: torch.linalg.lstsq(input=x, b=y)[0], MATRIX, MATRIX + 1),
    "normalize by Frobenius": (lambda x: F.normalize(x, "fro") + F.normalize(x, "nuc", (0, 1)), MATRIX),
    "cat behind nothing": (
        lambda x, e: torch.cat([e * 2, x]) + torch.cat([x, e]) + e.sum(),
        MATRIX,
        torch.zeros(0, dtype=torch.float64),
    ),
    "gumbel_softmax of a number": (lambda x: F.gumbel_softmax(x, hard=True, dim=0) * x, NUMBER),
    "roll by a tensor": (lambda x, i: x.roll(i, 0), MATRIX, TWICE[0]),
    "prelu of a number": (lambda x, w: F.prelu(x.sum(), w[:1]), MATRIX, VECTOR),
    "flip of a number": (lambda x, y: y.sum().flip(0) + y.sum().roll(2) * x, MATRIX, MATRIX),
    "bucketize": (torch.bucketize, VECTOR, VECTOR.sort()[0]),
    "gather nothing": (lambda x, i: x.gather(0, i), MATRIX, NONE),
    "gather nothing of another shape": (lambda x, i: x.gather(0, i), VECTOR, NONE.reshape(2, 0)),
    "gather of a number": (lambda x, i: x.gather(0, i), NUMBER, ZERO),
    "gather one": (lambda x, i: x.gather(0, i), VECTOR, TWICE[1]),
    "gradient": (lambda x: torch.gradient(x, spacing=None), MATRIX),
    "gradient on a grid": (lambda x, t: torch.gradient(x, spacing=[t], dim=1), MATRIX, MATRIX[0].sort()[0]),
    "index_add twice": (lambda x, i, s: x.index_add(0, i, s), VECTOR, TWICE, MATRIX[0]),
    "index_add to a number": (lambda x, i, s: x.index_add(0, i, s, alpha=3), NUMBER, ZERO, NUMBER),
    "index_copy to a number": (lambda x, i, s: x.index_copy(0, i, s), NUMBER, ZERO, NUMBER),
    "index_fill twice": (lambda x, i, v: x.index_fill(0, i, v), VECTOR, TWICE, NUMBER),
    "index_fill rows twice": (lambda x, i, v: x.index_fill(0, i, v), MATRIX, TWICE, NUMBER),
    "index_fill a number": (lambda x, i, v: x.index_fill(0, i, v), NUMBER, ZERO, NUMBER),
    "index_fill_ columns": (lambda x, i, v: (x * 2).index_fill_(1, i, v), MATRIX, TWICE, NUMBER),
    "index_fill nothing": (lambda x, i: x.index_fill(0, i, 3.0), MATRIX, NONE),
    "index_reduce a number": (lambda x, i, s: x.index_reduce(0, i, s, "prod"), NUMBER, ZERO, NUMBER),
    "index_select nothing": (lambda x, i: x.index_select(0, i), MATRIX, NONE),
    "index_select of a number": (lambda x, i: x.index_select(0, i), NUMBER, ZERO),
    "istft": (
        lambda s, w: torch.istft(s * (1 + 1j), 4, window=w.abs() + 1, return_complex=False),
        field(3, 6),
        field(4),
    ),
    "masked_scatter, mask broadcasts": (lambda x, m, s: x.masked_scatter(m, s), MATRIX, MASK, field(20)),
    "masked_scatter, values broadcast": (lambda x, m, s: x.masked_scatter(m, s), MATRIX[0], MATRIX > 0, field(20)),
    "multi_margin_loss of a number": (F.multi_margin_loss, NUMBER, ZERO[0]),
    "narrow": (lambda x, i: torch.narrow(x, 0, i, 2), VECTOR, TWICE[0]),
    "constant_pad_nd": (lambda x: torch.constant_pad_nd(torch.complex(x, x), (1, 2), 2 - 1j), MATRIX),
    "quantile": (lambda x, q: torch.quantile(x, q, 0), MATRIX, VECTOR.sigmoid()),
    "repeat_interleave": (lambda x, n: x.repeat_interleave(n, 0), MATRIX[:4], TWICE),
    "repeat_interleave of counts": (torch.repeat_interleave, TWICE),
    "scatter nothing": (lambda x, i, s: x.scatter(0, i, s), MATRIX, NONE, field(0)),
    "scatter from a longer source": (lambda x, i, s: x.scatter_add(0, i, s.detach()), MATRIX, TWICE[None], field(7, 6)),
    "scatter to a number": (lambda x, i, s: x.scatter(0, i, s), NUMBER, ZERO, VECTOR[:1]),
    "scatter_reduce of numbers": (lambda x, i, s: x.scatter_reduce(0, i, s, "prod"), NUMBER, ZERO[0], NUMBER),
    "take": (torch.take, MATRIX, TWICE),
    "take nothing": (torch.take, MATRIX, NONE),
    "take_along_dim, around": (lambda x, i: torch.take_along_dim(x, i[:, None] - 7, 0), MATRIX, TWICE),
    "tensor_split": (lambda x, i: x.tensor_split(i.sort()[0]), MATRIX, TWICE),
    "tensor_split evenly": (lambda x, i: x.tensor_split(i), MATRIX, TWICE[1]),
    "interpolate no samples": (lambda x: F.interpolate(x[None][:0], scale_factor=2), MATRIX),
    "unfold of a number": (lambda x: x.unfold(0, 1, 1), NUMBER),
    "unfold nothing of a number": (lambda x: x.unfold(0, 0, 1), NUMBER),
    "vander of a number": (lambda x: torch.linalg.vander(x, N=3), NUMBER),
    "diff of order 0": (lambda x, p: torch.diff(x, 0, 0, prepend=p), MATRIX, MATRIX),
}
if RELEASE < (2, 13):  # torch 2.8 refuses an index that goes around, and a tensor in place of a number
    del CASES["take_along_dim, around"], CASES["roll by a tensor"]


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", CASES)
def test_corner(name):
    f, *operands = CASES[name]
    mesh = mesh_of((WORLD.size,))

    def cut(t, uneven):
        if not t.ndim:
            return (t, mesh, (ms.Replicate(),), None)
        return (t, mesh, (ms.Shard(0),), {0: skew(len(t), WORLD.size)} if uneven else None)

    every = range(len(operands))
    for which in {tuple(every), *((k,) for k in every)}:
        for uneven in (False, True):
            parts = [cut(t, uneven) if k in which else (t, None, None, None) for k, t in enumerate(operands)]
            compare(f, parts, what=f"{which} {uneven}")


REFUSED = {
    "masked_fill": lambda x: x.masked_fill((x > 0).byte(), 1.0),
    "masked_scatter": lambda x: x.masked_scatter((x > 0).long(), x),
    "masked_scatter, dtype": lambda x: x.masked_scatter(x > 0, x.float()),
    "masked_scatter, too few": lambda x: x.masked_scatter(x < 99, x[:1]),
    "masked_select": lambda x: x.masked_select((x > 0).byte()),
    "index_add, shape": lambda x: x.index_add(0, TWICE, x[:2]),
    "index_fill, dtype": lambda x: x.index_fill(0, TWICE.int(), 1.0),
    "index_fill, value": lambda x: x.index_fill(0, TWICE, x[0]),
    "index_select, negative": lambda x: x.index_select(0, -TWICE),
    "narrow, dtype": lambda x: torch.narrow(x, 0, torch.tensor(True), 2),
    "prelu": lambda x: F.prelu(x, torch.ones(3).double()),
    "prelu, dtype": lambda x: F.prelu(x, torch.ones(1).float()),
    "vecdot, dtype": lambda x: torch.linalg.vecdot(x, x.float()),
    "index, float": lambda x: x[torch.zeros(0)],
    "index, float beside": lambda x: x[:, torch.zeros(0)],
    "index, write, float": lambda x: x.clone().__setitem__(torch.zeros(0), 1.0),
    "index_copy, dtype": lambda x: x.index_copy(0, TWICE[:2].int(), x[:2]),
    "take, dtype": lambda x: x.take(TWICE.int()),
    "put, dtype": lambda x: x.put(TWICE.int(), x[0, :4]),
    "put_, dtype": lambda x: x.clone().put_(TWICE[:1].bool(), x[0, :1]),
    "take_along_dim, dtype": lambda x: x.take_along_dim(TWICE.int()[None], 0),
    "istft of single numbers": lambda x: torch.istft(x[:1] * 1j, 1, 1, window=torch.ones(1).double()),
    "logsumexp, no dims": lambda x: x.logsumexp(()),
    "norm, nuclear of three dims": lambda x: torch.norm(x[None], "nuc"),
    "norm, complex": lambda x: torch.norm(x, 1j),
    "matrix_norm, dims": lambda x: torch.linalg.matrix_norm(x, dim=(0,)),
    "attention, dropout": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=-0.1),
    "attention, dropout of all": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=1.1),
    "repeat_interleave, dtype": lambda x: x.repeat_interleave(torch.ones(5), 0),
    "repeat_interleave, dims": lambda x: x.repeat_interleave(torch.ones(5, 1).long(), 0),
    "scatter, short source": lambda x: x.scatter(0, TWICE[None], x[:1, :2]),
    "tensor_split, dtype": lambda x: x.tensor_split(torch.tensor([1.0, 2.0])),
    "tensor_split, dims": lambda x: x.tensor_split(TWICE[None]),
    "conv, same with a stride": lambda x: F.conv1d(x[:, None], x[:1, None], stride=2, padding="same"),
    "batch_norm, weight": lambda x: F.batch_norm(x, None, None, torch.ones(5).double(), training=True),
    "batch_norm, training": lambda x: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double(), training=None),
    "glu, dim": lambda x: F.glu(x, True),
    "softmin, dim": lambda x: F.softmin(x, True),
    "sum, dim": lambda x: x.sum(True),
    "sum, dims": lambda x: x.sum((True, 0)),
    "mean, dim": lambda x: x.mean(dim=False),
    "roll, dim": lambda x: x.roll(1, True),
    "flip, dim": lambda x: x.flip(False),
    "permute, dim": lambda x: x.permute(True, 0),
    "squeeze, dim": lambda x: x.squeeze(True),
    "expand, size": lambda x: x[:1, :1].expand(True, 2),
    "batch_norm, statistics": lambda x: F.batch_norm(x, torch.ones(3), torch.ones(4)),
    "group_norm, weight": lambda x: F.group_norm(x, 2, torch.ones(5).double()),
    "instance_norm, weight": lambda x: F.instance_norm(x[None], weight=torch.ones(4).double()),
    "amax of complex": lambda x: torch.amax(x * 1j, 0),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x[None] * 1j, 2),
    "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x > 0),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x.long(), x.long(), x.abs().long()),
    "nanmean": lambda x: x.long().nanmean(0),
    "max_unpool1d": lambda x: F.max_unpool1d(x[None] * 1j, torch.arange(0, 8, 2).expand(1, 5, 4), 2),
    "pad": lambda x: F.pad(x[None] > 0, (1, 1), "reflect"),
    "trace": lambda x: (x > 0).trace(),
    "trapezoid": lambda x: torch.trapezoid(x > 0),
    "local_response_norm": lambda x: F.local_response_norm(x[None].int(), 2),
    "batch_norm, statistics with a gradient": lambda x: F.batch_norm(
        x, torch.zeros(4).double().requires_grad_(), torch.ones(4).double(), training=True
    ),
    "bucketize, boundaries": lambda x: torch.bucketize(x, torch.ones(5, 5)),
    "_chunk_cat": lambda x: torch._chunk_cat([x, x[:0]], 0, 2),
    "diff of a number": lambda x: x.sum().diff(),
    "diff of a number, not taken": lambda x: x.sum().diff(n=0),
    "roll of a number": lambda x: x.sum().roll(1, 0),
    "trapezoid of a number": lambda x: torch.trapezoid(x.sum()),
    "cov, no weight": lambda x: torch.cov(x, fweights=torch.zeros(4).long()),
    "group_norm, no groups": lambda x: F.group_norm(x, -1),
    "histogram, weight": lambda x: torch.histogram(x, 3, weight=x[:3].detach()),
    "histogramdd, weight": lambda x: torch.histogramdd(x, 3, weight=torch.ones(3).double()),
    "index_put, mask of bytes": lambda x: x.index_put(((x > 0).byte(),), x.new_ones(1)),
    "max_pool1d": lambda x: F.max_pool1d(x.long()[None], 2),
    "max_unpool2d": lambda x: torch._C._nn.max_unpool2d(x[None], (x.long() * 0 + 99)[None], (5, 9)),
    "renorm, limit": lambda x: x.renorm(2, 0, -1.0),
    "renorm, norm": lambda x: x.renorm(-1, 0, 1.0),
    "_softmax_backward_data": lambda x: torch.ops.aten._softmax_backward_data(x * 1j, x * 1j, 0, torch.complex128),
    "_log_softmax_backward_data": lambda x: torch.ops.aten._log_softmax_backward_data(
        x.long(), x.long(), 0, torch.int64
    ),
    "bernoulli_ of no probabilities": lambda x: x.clone().bernoulli_(x.abs() + 2),
    "tensordot, number of dims": lambda x: torch.tensordot(x, x, -1),
    "tensordot, dims": lambda x: torch.tensordot(x, x, ([7], [0])),
    "_chunk_cat, dim": lambda x: torch._chunk_cat([x], 5, 2),
    "einsum of no square": lambda x: torch.einsum("ii->i", x.reshape(x.shape[0], -1)[:, :2]),
    "bernoulli of integers": lambda x: torch.bernoulli((x > 0).long()),
    "cauchy_ of integers": lambda x: x.long().cauchy_(),
    "dropout of integers": lambda x: F.dropout(x.long()),
    "exponential_, rate": lambda x: x.clone().exponential_(0.0),
    "exponential_ of integers": lambda x: x.long().exponential_(),
    "geometric_ of booleans": lambda x: (x > 0).geometric_(0.5),
    "gumbel_softmax of integers": lambda x: F.gumbel_softmax(x.long()),
    "log_normal_ of integers": lambda x: x.long().log_normal_(),
    "normal of integers": lambda x: torch.normal(x.long(), 1.0),
    "poisson of integers": lambda x: torch.poisson(x.long().abs()),
    "randint_like, bounds of the dtype": lambda x: torch.randint_like(x.to(torch.int8), 3000),
    "random_, bounds": lambda x: x.clone().random_(5, 3),
    "random_ of complex": lambda x: (x * 1j).random_(),
    "_chunk_cat, backward": lambda x: torch._chunk_cat([x.requires_grad_()], 0, 2).sum().backward(),
    "argmin of uint16": lambda x: x.to(torch.uint16).argmin(1),
    "count_nonzero of uint16": lambda x: x.to(torch.uint16).count_nonzero(),
    "glu of integers": lambda x: F.glu(x.long()),
    "hinge_embedding_loss of integers": lambda x: F.hinge_embedding_loss(x.long(), x.long()),
    "histogram of half precision": lambda x: torch.histogram(x.half(), 3),
    "histogramdd of half precision": lambda x: torch.histogramdd(x.bfloat16(), [2] * 4),
    "l1_loss of bytes": lambda x: F.l1_loss(x.byte(), x.byte()),
    "linalg.vander of booleans": lambda x: torch.linalg.vander(x > 0),
    "masked_select of uint16": lambda x: x.to(torch.uint16).masked_select(x > 0),
    "pixel_shuffle of uint16": lambda x: F.pixel_shuffle(x[:4, :, None].to(torch.uint16), 2),
    "pixel_unshuffle of uint16": lambda x: F.pixel_unshuffle(x[None, :4].to(torch.uint16), 2),
    "take of uint16": lambda x: x.to(torch.uint16).take(torch.tensor([1])),
    "vander, columns": lambda x: torch.vander(x[0], -1),
    "vander, dims": torch.vander,
    "rrelu, bounds": lambda x: F.rrelu(x, 0.9, 0.1, training=True),
}
if RELEASE >= (2, 13):  # torch 2.8 takes it
    REFUSED["batch_norm, eps"] = lambda x: F.batch_norm(x, None, None, training=True, eps=-1.0)
if RELEASE < (2, 15):  # later ones have it
    REFUSED["dropout of complex"] = lambda x: F.dropout(x * 1j)


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name):
    with pytest.raises((RuntimeError, IndexError, NotImplementedError, TypeError, ValueError)):
        REFUSED[name](MATRIX.clone())
    for dim, n in enumerate(MATRIX.shape):
        for sizes in (None, {dim: skew(n, WORLD.size)}):
            with pytest.raises((RuntimeError, IndexError, NotImplementedError, TypeError, ValueError)):
                REFUSED[name](shard(MATRIX, mesh_of((WORLD.size,)), (ms.Shard(dim),), sizes))


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 3), (2, 3, 0), (2, 0, 4)])
def test_batch_norm_of_no_cells(shape):
    w, b = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mesh = mesh_of((WORLD.size,))
    for training in (True, False):
        mean, var = (torch.full((shape[1],), v, dtype=torch.float64) for v in (1.0, 2.0))
        for dim in range(len(shape)):
            compare(
                lambda x: F.batch_norm(x, mean, var, *((w, b) if x.shape[1] else ()), training=training),
                [(torch.zeros(shape).double(), mesh, (ms.Shard(dim),), None)],
                [w, b],
            )
        assert (mean == 1).all()
        assert (var == 2).all()


def test_norms_without_eps_beside_an_empty_block():
    w = torch.ones(6, dtype=torch.float64, requires_grad=True)
    own = (field(2, 6, 3), mesh_of((WORLD.size,)), (ms.Shard(0),), {0: skew(2, WORLD.size)})
    compare(lambda x: F.group_norm(x, 2, w, eps=0.0), [own], [w])
    compare(lambda x: F.instance_norm(x, weight=w, eps=0.0), [own], [w])


@pytest.mark.parametrize("shape", [(2, 5, 3), (1, 5, 2, 2)])
def test_local_response_of_integers(shape):
    x = torch.arange(30 if len(shape) == 3 else 20).reshape(shape) % 7
    expected = F.local_response_norm(x, 3, alpha=1.0)
    for dim, n in enumerate(shape):
        for sizes in (None, {dim: skew(n, WORLD.size)}):
            got = F.local_response_norm(shard(x, mesh_of((WORLD.size,)), (ms.Shard(dim),), sizes), 3, alpha=1.0)
            torch.testing.assert_close(gathered(got), expected)


SMALL = (MATRIX * 200).byte()
OF_INTEGERS = {
    "trapezoid": torch.trapezoid,
    "trapezoid, dx": lambda x: torch.trapezoid(x, dx=2, dim=0),
    "trapezoid, x": lambda x: torch.trapezoid(x, x),
    "cumulative_trapezoid": torch.cumulative_trapezoid,
    "cumulative_trapezoid, dx": lambda x: torch.cumulative_trapezoid(x, dx=2.5, dim=0),
    "cumulative_trapezoid, x": lambda x: torch.cumulative_trapezoid(x, x, dim=0),
    "_unsafe_masked_index": lambda x: torch._unsafe_masked_index(x, MATRIX[:4] > 0, [TWICE[:, None], TWICE], 7),
    "searchsorted": lambda x: torch.searchsorted(x[0].sort()[0], x, sorter=torch.arange(4)),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers(name):
    expected = OF_INTEGERS[name](SMALL)
    for dim, n in enumerate(SMALL.shape):
        for sizes in (None, {dim: skew(n, WORLD.size)}):
            got = gathered(OF_INTEGERS[name](shard(SMALL, mesh_of((WORLD.size,)), (ms.Shard(dim),), sizes)))
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected)


def test_a_sorter_beside_no_values():
    order = VECTOR.argsort()
    for sizes in ((5,) + (0,) * (WORLD.size - 1), (0,) * (WORLD.size - 1) + (5,)):
        own = (mesh_of((WORLD.size,)), (ms.Shard(0),), {0: sizes})
        got = torch.searchsorted(shard(VECTOR, *own), shard(VECTOR, *own), sorter=shard(order, *own))
        assert gathered(got).equal(torch.searchsorted(VECTOR, VECTOR, sorter=order))


def test_what_has_no_derivative_says_so_in_backward():
    mesh = mesh_of((WORLD.size,))
    x, w = (shard(VECTOR.abs(), mesh, (ms.Shard(0),), None, True) for _ in range(2))
    whole = VECTOR.abs().requires_grad_()
    for f in (
        lambda a, b: torch.bincount(a.detach().long(), b),
        lambda a, b: torch.histogram(a, 3)[0],
        lambda a, b: torch.histogram(a.detach(), 3, weight=b)[0],
        lambda a, b: torch.histogramdd(a[:, None], 3, weight=b)[0],
        lambda a, b: torch.unique(a),
        lambda a, b: torch.unique(a, dim=0),
        lambda a, b: torch.unique_consecutive(a),
    ):
        for y in (f(whole, whole), f(x, w)):
            assert y.requires_grad
            with pytest.raises((RuntimeError, NotImplementedError), match="not implemented"):
                y.sum().backward()


def test_lists_and_tuples_are_where_torch_has_them():
    x = shard(MATRIX, mesh_of((WORLD.size,)), (ms.Shard(0),))
    assert type(torch._foreach_neg([x])) is type(torch._foreach_neg([MATRIX]))
    assert type(torch.broadcast_tensors(x, VECTOR[:, None])) is type(torch.broadcast_tensors(MATRIX, VECTOR[:, None]))


def test_normal_numbers_take_part_in_autograd():
    mesh = mesh_of((WORLD.size,))
    mean, std = (shard(MATRIX.abs(), mesh, (ms.Shard(0),), None, True) for _ in range(2))
    for given in ((mean, std), (mean, 2.0), (0.0, std), (mean, MATRIX[0].abs().requires_grad_())):
        y = torch.normal(*given)
        leaves = [t for t in given if isinstance(t, torch.Tensor)]
        assert y.requires_grad
        assert all((gathered(g) == 0).all() for g in torch.autograd.grad(y.sum(), leaves))
    assert not torch.normal(mean.detach(), 1.0).requires_grad


def test_named_operands_in_any_order():
    mesh, a = mesh_of((WORLD.size,)), field(4, 4)
    x = shard(a, mesh, (ms.Shard(0),))
    torch.testing.assert_close(gathered(torch.addmm(x, mat2=a, mat1=x.mT)), torch.addmm(a, a.mT, a))


def test_options_of_random_tensors_are_read():
    x = shard(MATRIX, mesh_of((WORLD.size,)), (ms.Shard(0),))
    for draw in (torch.rand_like, torch.randn_like, lambda x, **o: torch.randint_like(x, 9, **o)):
        assert draw(x, requires_grad=True).requires_grad
        assert draw(x, memory_format=torch.preserve_format, dtype=torch.float32).dtype == torch.float32
        with pytest.raises(ms.UnsupportedOperationError, match="another device"):
            draw(x, device="meta")


@pytest.mark.parametrize("repeats", [2.5, True, [2]], ids=str)
def test_repeats_that_are_no_number(repeats):
    x = ms.ones(4, 3, mesh=ms.init_mesh((-1,), ("y",)), placements=(ms.Shard(0),))
    with pytest.raises(TypeError, match="repeat_interleave"):
        x.repeat_interleave(repeats, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        float,
        int,
        complex,
        lambda x: x.__index__(),
        torch.bincount,
        lambda x: (x > 0).cumsum_(0),
        lambda x: (x > 0).cumprod_(0),
    ],
)
def test_errors_are_of_torchs_kind(wrong):
    with pytest.raises(Exception) as torchs:  # noqa: PT011 (whichever it is)
        wrong(VECTOR.clone())
    with pytest.raises(torchs.type, match=re.escape(str(torchs.value).splitlines()[0])):
        wrong(shard(VECTOR, mesh_of((WORLD.size,)), (ms.Shard(0),)))
