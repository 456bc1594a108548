"""Tensors with some cells written, against torch on the whole tensor."""

from __future__ import annotations

import re

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard
from tests.ops.windows import check, field, sampled


def both(f, full, src, dims, case=0):
    """Compare a function of a tensor and what is written into it, plain and sharded."""
    for k, (mesh, placements, sizes) in enumerate(sampled(full.shape, dims, case, 5)):
        other = [(ms.Shard(0),) * mesh.ndim, None, (ms.Shard(src.ndim - 1),) * mesh.ndim][k % 3]
        compare(f, [(full, mesh, placements, sizes), (src, mesh, other, None)], what=f"{placements} {sizes} {other}")


def test_scatter_twins_of_views():
    both(lambda x, s: torch.select_scatter(x, s, 1, 2), field(6, 5, 4), field(6, 4), (0, 1, 2))
    both(lambda x, s: x.select_scatter(s, 0, -1), field(6, 5), field(5), (0, 1), 1)
    both(lambda x, s: torch.slice_scatter(x, s, 0, 1, 6, 2), field(6, 5), field(3, 5), (0, 1), 2)
    both(lambda x, s: x.slice_scatter(s, 1, 3), field(6, 5), field(6, 2), (0, 1), 3)
    both(lambda x, s: torch.diagonal_scatter(x, s, 1), field(6, 5), field(4), (0, 1), 4)
    both(lambda x, s: torch.diagonal_scatter(x, s, 0, 1, 2), field(3, 4, 4), field(3, 4), (0, 1, 2), 4)


WITHOUT_COMPLEX_DERIVATIVE = {
    "select_scatter": lambda x, s: torch.select_scatter(x, s[0], 0, 1),
    "slice_scatter": lambda x, s: torch.slice_scatter(x, s, 0, 0, 2),
    **{
        f"scatter_reduce {reduce}": lambda x, s, r=reduce: x.scatter_reduce(0, torch.tensor([[0, 1, 2]]), s, r)
        for reduce in ("sum", "prod", "mean", "amax")
    },
}


@pytest.mark.parametrize("name", WITHOUT_COMPLEX_DERIVATIVE)
@pytest.mark.parametrize("graded", [0, 1])
def test_complex_derivatives_that_torch_lacks(name, graded):
    f, mesh = WITHOUT_COMPLEX_DERIVATIVE[name], mesh_of((WORLD.size,))
    x, s = (torch.ones(n, 3, dtype=torch.complex64, requires_grad=i == graded) for i, n in enumerate((4, 2)))
    with pytest.raises(RuntimeError) as expected:
        f(x, s)
    with pytest.raises(type(expected.value)) as got:
        f(*(shard(t.detach(), mesh, (ms.Shard(0),), requires_grad=t.requires_grad) for t in (x, s)))
    assert str(got.value) == str(expected.value)
    if "amax" not in name:
        torch.testing.assert_close(
            gathered(f(*(shard(t.detach(), mesh, (ms.Shard(1),)) for t in (x, s)))), f(x.detach(), s.detach())
        )


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (7, 2), (3, 3, 3)])
def test_fill_diagonal(shape):
    for wrap in (False, True):
        expected = field(*shape).fill_diagonal_(7, wrap=wrap)
        for mesh, placements, sizes in sampled(shape, range(len(shape)), len(shape), 5):
            x = shard(field(*shape), mesh, placements, sizes)
            assert x.fill_diagonal_(7, wrap=wrap) is x
            torch.testing.assert_close(gathered(x), expected)


def test_flat_positions():
    index = torch.tensor([[3, -1], [17, 3]])
    check(lambda x: torch.take(x, index), field(6, 5), (0, 1), 0, count=6)
    check(lambda x: x.take(torch.tensor(7)), field(6, 5), (0, 1), 1)
    both(lambda x, s: x.put(torch.tensor([3, -1, 17, 4]), s), field(6, 5), field(4), (0, 1), 1)
    both(lambda x, s: x.put(index, s, accumulate=True), field(6, 5), field(2, 2), (0, 1), 2)
    both(lambda x, s: (x * 1).put_(torch.tensor([3, 4]), s), field(6, 5), field(2), (0, 1), 3)


def test_flat_positions_of_a_number():
    for accumulate in (False, True):
        expected = torch.tensor(3.0).put_(torch.tensor([[0], [-1]]), torch.tensor([[5.0], [5.0]]), accumulate)
        x = shard(torch.tensor([1.0, 2.0]), mesh_of((WORLD.size,)), (ms.Shard(0),))
        for y in (x.sum(), x @ torch.ones(2), torch.linalg.vector_norm(x, 1)):
            assert y.put_(torch.tensor([[0], [-1]]), torch.tensor([[5.0], [5.0]]), accumulate) is y
            torch.testing.assert_close(gathered(y), expected)
    mesh = mesh_of((WORLD.size,))
    compare(
        lambda x, s: (x.sum() * 1).put(torch.tensor([0]), s, accumulate=True) * x,
        [(field(6), mesh, (ms.Shard(0),), None), (field(1), None, None, None)],
    )


@pytest.mark.parametrize("accumulate", [False, True])
def test_tensors_without_dims_name_the_cell_that_index_put_writes(accumulate):
    row, column = torch.tensor(2), torch.tensor(-1)
    both(lambda x, s: torch.index_put(x, [row], s, accumulate), field(6, 5), field(5), (0, 1))
    both(lambda x, s: (x * 1).index_put_((row, column), s[0], accumulate), field(6, 5), field(2), (0, 1), 1)
    x = shard(field(6, 5), mesh_of((WORLD.size,)), (ms.Shard(0),))
    with pytest.raises(RuntimeError, match="source and destination dtypes match"):
        x.index_put((row,), torch.ones(5, dtype=torch.int32), accumulate)
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        x.index_put((row * 3,), torch.ones(5, dtype=x.dtype), accumulate)


def test_masked_scatter():
    mask = field(6, 5) > 0.2
    both(lambda x, s: x.masked_scatter(mask, s), field(6, 5), field(40), (0, 1))
    both(lambda x, s: (x * 1).masked_scatter_(x > 0, s), field(6, 5), field(6, 5) * 3, (0, 1), 1)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_index_reduce(reduce):
    index = torch.tensor([0, 4, 4, 1])
    both(lambda x, s: x.index_reduce(0, index, s, reduce), field(6, 5), field(4, 5), (0, 1), len(reduce))
    both(lambda x, s: x.index_reduce(1, index, s, reduce, include_self=False), field(6, 5), field(6, 4), (0, 1), 1)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits_where_a_block_has_one_column(dtype):
    """Torch has no kernel for these, and raised on that rank alone."""
    n = 2 * WORLD.size
    full, index = field(5, n).to(dtype), torch.arange(7) % 5
    source = field(7, n).to(dtype)
    sizes = {1: (n - WORLD.size + 1, *(1,) * (WORLD.size - 1))}
    x, s = (shard(t, mesh_of((WORLD.size,)), [ms.Shard(1)], sizes) for t in (full, source))
    for include in (True, False):
        got = x.index_reduce(0, index, s, "prod", include_self=include)
        expected = full.index_reduce(0, index, source, "prod", include_self=include)
        assert got.dtype == dtype
        torch.testing.assert_close(gathered(got), expected, rtol=2**-6, atol=1e-4)


def test_a_plain_tensor_is_written_into():
    """It stays whole on every rank: what is sharded is gathered."""
    rows, cells = torch.tensor([3, 0, 3, 7, 1, 0]), torch.arange(24).reshape(6, 4) * 5 % 9
    writes = [
        lambda x, y: x.index_add_(0, rows, y, alpha=2),
        lambda x, y: x.index_copy_(0, torch.arange(6), y),
        lambda x, y: x.index_put_((rows,), y, accumulate=True),
        lambda x, y: x.scatter_add_(0, cells, y),
        lambda x, y: x.scatter_reduce_(0, cells, y, "amax", include_self=False),
        lambda x, y: x.masked_scatter_(x == 0, torch.cat([y, y])),
        lambda x, y: x.put_(cells, y),
        lambda x, y: x.addmm_(torch.ones(9, 6, dtype=y.dtype), y),
        lambda x, y: x.add_(y[0]).mul_(y[1]).sub_(y.sum()),
        lambda x, y: x[:6].copy_(y),
        lambda x, y: x.__setitem__(slice(6), y),
    ]
    for case, write in enumerate(writes):

        def f(y, write=write):
            x = torch.zeros(9, 4, dtype=y.dtype)
            write(x, y)
            assert type(x) is torch.Tensor
            return x * y[:1] + y[2]

        check(f, field(6, 4), (0, 1), case)


COPIES = {
    "permute": lambda x: torch.permute_copy(x, (1, 0)),
    "transpose": lambda x: torch.transpose_copy(x, 0, 1),
    "slice": lambda x: torch.slice_copy(x, 0, 1, 5, 2),
    "select": lambda x: torch.select_copy(x, 0, 2),
    "unsqueeze": lambda x: torch.unsqueeze_copy(x, 1),
    "squeeze": lambda x: torch.squeeze_copy(x.unsqueeze(1)),
    "expand": lambda x: torch.expand_copy(x, (3, 6, 5)),
    "view": lambda x: torch.view_copy(x, (3, 2, 5)),
    "t": torch.t_copy,
    "unbind": lambda x: torch.unbind_copy(x, 1),
    "split": lambda x: torch.split_copy(x, 4, 0),
    "unfold": lambda x: torch.unfold_copy(x, 0, 3, 1),
    "alias": torch.alias_copy,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_views(name):
    check(COPIES[name], field(6, 5), (0, 1), len(name))


def test_views_in_place():
    for mesh, placements, sizes in layouts((6, 5), (0, 1)):
        x = shard(field(6, 5), mesh, placements, sizes)
        assert x.unsqueeze_(0) is x
        assert x.shape == (1, 6, 5)
        x.transpose_(1, 2)
        torch.testing.assert_close(gathered(x * 2), field(6, 5).T[None] * 2)
        x.squeeze_(0)
        x.t_()
        x.mul_(3)
        torch.testing.assert_close(gathered(x), field(6, 5) * 3)
        torch.testing.assert_close(gathered(x.swapaxes_(0, 1).sum(0)), field(6, 5).sum(1) * 3)


@pytest.mark.parametrize("alpha", [0, 2, 2.5, True, 300])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
def test_index_add_takes_alpha_in_the_dtype(dtype, alpha):
    mesh = mesh_of((WORLD.size,))
    full, source, rows = torch.zeros(5, 3, dtype=dtype), torch.ones(3, 3, dtype=dtype), torch.tensor([0, 2, 2])
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0),))
    try:
        want = full.index_add(0, rows, source, alpha=alpha)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            x.index_add(0, rows, source, alpha=alpha)
    else:
        assert torch.equal(x.index_add(0, rows, source, alpha=alpha).full_tensor(), want)
