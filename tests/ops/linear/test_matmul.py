"""Products over sharded and whole dims, embeddings, against torch on the whole tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard, skew
from tests.ops.windows import check, field, sampled

W, B = field(5, 6), field(5)
ROWS = field(7, 6, dtype=torch.float64)

# of x (4, 7, 6) with plain operands
PRODUCTS = [
    lambda x: F.linear(x, W, B),
    lambda x: x @ W.T,
    lambda x: torch.matmul(W, x.transpose(1, 2)),
    lambda x: x @ field(6),
    lambda x: torch.bmm(x, field(4, 6, 3)),
    lambda x: torch.einsum("bnc,dc->bnd", x, W),
    lambda x: torch.einsum("bnc,nc->b", x, ROWS),
    lambda x: torch.einsum("bnc,bmc->bnm", x, x * 2),
    lambda x: torch.einsum("...c,c", x, field(6)),
    lambda x: torch.tensordot(x, W, ([2], [1])),
    lambda x: torch.tensordot(x, ROWS, ([1, 2], [0, 1])),
    lambda x: torch.baddbmm(field(4, 7, 3), x, field(4, 6, 3), beta=0.5, alpha=2.0),
    lambda x: x.transpose(1, 2) @ x,
    lambda x: torch.inner(x, W),
    lambda x: F.bilinear(x, x * 2, field(3, 6, 6), field(3)),
]


@pytest.mark.parametrize("case", range(len(PRODUCTS)))
def test_products(case):
    check(PRODUCTS[case], field(4, 7, 6), range(3), case, count=7, second=case % 3 == 0)


# of x (7, 6)
FLAT = [
    lambda x: torch.mm(x, W.T),
    lambda x: torch.mm(x.T, x),
    lambda x: torch.mv(x, field(6)),
    lambda x: torch.addmm(field(7, 5), x, W.T, beta=2.0, alpha=0.5),
    lambda x: torch.addmv(field(7), x, field(6)),
    lambda x: torch.outer(x[:, 0], x[0]),
    lambda x: torch.linalg.multi_dot([x, W.T, field(5, 3)]),
    lambda x: torch.dot(x[:, 0], x[:, 1]),
    lambda x: torch.vdot(x[0], x[1]),
    lambda x: torch.addr(field(7, 6), x[:, 1], x[2]),
    lambda x: torch.trace(x @ x.T),
    lambda x: torch.chain_matmul(x, W.T),
    lambda x: torch.addmm(x, field(7, 3), field(3, 6), beta=0.5),
    lambda x: (x * 1).addmm_(field(7, 3), field(3, 6)),
    lambda x: torch.einsum("ij,ij,kk->ij", x, x, x @ x.T),
    lambda x: torch.einsum("ii->i", x[:6]),
    lambda x: torch.einsum("...ii,ij->...j", torch.stack([x[:6], x[1:]]), x[1:]),
    lambda x: torch.einsum("ii", x[1:]),
]


@pytest.mark.parametrize("case", range(len(FLAT)))
@pytest.mark.filterwarnings("ignore:torch.chain_matmul")
def test_products_of_matrices(case):
    check(FLAT[case], field(7, 6), range(2), case, count=7, second=case % 3 == 0)


@pytest.mark.parametrize("placement", [ms.Shard(0), ms.Shard(1), ms.Replicate()])
def test_weights_that_are_sharded_too(placement):
    mesh = mesh_of((WORLD.size,))
    for own in (ms.Shard(0), ms.Shard(1)):
        x, w = (field(7, 6), mesh, (own,), None), (W, mesh, (placement,), None)
        compare(lambda x, w: x @ w.T, [x, w], what=f"{own} @ {placement}")


@pytest.mark.parametrize("case", range(3))
def test_one_operand_alone_is_sharded(case):
    full = [field(4, 6), field(5, 6), field(5)]
    for mesh, placements, sizes in layouts(full[case].shape, range(full[case].ndim), 1):
        operands = [(t, mesh, *((placements, sizes) if i == case else (None, None))) for i, t in enumerate(full)]
        compare(F.linear, operands, what=f"linear {placements} {sizes}")
        if case == 2:
            x, w = field(4, 6), field(5, 6, 6)
            compare(lambda b: F.bilinear(x, x, w, b), operands[2:], what=f"bilinear {placements} {sizes}")


def test_parameters_get_the_whole_gradient():
    mesh = mesh_of((WORLD.size,))
    w, b = W.clone().requires_grad_(), B.clone().requires_grad_()
    for dim in range(3):
        compare(lambda x: F.linear(x, w, b).tanh(), [(field(4, 7, 6), mesh, (ms.Shard(dim),), None)], params=[w, b])


@pytest.mark.parametrize(("dim", "additions"), [(0, 0), (1, 0), (2, 1)])
def test_a_bias_is_added_by_the_kernel_where_no_sum_comes_between(dim, additions):
    x = shard(field(4, 7, 6), mesh_of((WORLD.size,)), (ms.Shard(dim),))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = F.linear(x, W, B)
    assert sum(event.name == "aten::add" for event in profile.events()) == additions
    torch.testing.assert_close(gathered(y), F.linear(field(4, 7, 6), W, B))


def test_embeddings():
    table = field(11, 3).requires_grad_()
    index = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(1))
    for case, options in enumerate(({}, {"padding_idx": 2})):
        for dim in (0, 1):
            compare(
                lambda i, options=options: F.embedding(i, table, **options),
                [(index, mesh_of((WORLD.size,)), (ms.Shard(dim),), None)],
                params=[table],
                what=f"case {case}, dim {dim}",
            )
    compare(lambda i: F.one_hot(i, 11), [(index, mesh_of((WORLD.size,)), (ms.Shard(1),), None)])


def test_second_gradients_of_embeddings_with_empty_blocks():
    table, x, mesh = field(11, 3).requires_grad_(), field(7, 3), mesh_of((WORLD.size,))
    index = torch.arange(7) % 5
    for sizes in (None, {0: skew(7, WORLD.size)}):
        operands = [(index, mesh, (ms.Shard(0),), sizes), (x, mesh, (ms.Shard(0),), sizes)]
        compare(lambda i, x: F.embedding(i, table) * x, operands, [table], second=True)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x @ W,
        lambda x: F.linear(x, field(5, 4)),
        lambda x: torch.einsum("abc,ab,cd->d", x, x, W),
        lambda x: torch.einsum("abc,c2->ab2", x, W),
        torch.diag,
    ],
)
def test_shapes_that_do_not_fit(wrong):
    for mesh, placements, sizes in sampled((4, 7, 6), [1], 0, 2):
        with pytest.raises((RuntimeError, ms.LayoutError)):
            wrong(shard(field(4, 7, 6), mesh, placements, sizes))


@pytest.mark.parametrize("factors", [{"alpha": 2.5}, {"beta": 1.5}, {"alpha": 0.2, "beta": 0.6}, {"beta": 3}])
def test_products_of_integers_take_the_whole_part_of_factors(factors):
    a, b = torch.arange(12).reshape(3, 4), torch.arange(20).reshape(4, 5) - 7
    cases = [
        (torch.addmm, torch.ones(3, 5).long(), a, b),
        (torch.addmv, torch.ones(3).long(), a, b[:, 0]),
        (torch.addbmm, torch.ones(3, 5).long(), a.expand(2, 3, 4), b.expand(2, 4, 5)),
        (torch.baddbmm, torch.ones(2, 3, 5).long(), a.expand(2, 3, 4), b.expand(2, 4, 5)),
    ]
    mesh = mesh_of((WORLD.size,))
    for f, *operands in cases:
        expected = f(*operands, **factors)
        for k in range(3):
            got = f(*[shard(t, mesh, (ms.Shard(0),)) if k in (i, 0) else t for i, t in enumerate(operands)], **factors)
            assert got.dtype == expected.dtype
            torch.testing.assert_close(gathered(got), expected)
    with pytest.raises(RuntimeError, match="must not be a floating point number"):
        torch.addr(shard(a, mesh, (ms.Shard(0),)), a[:, 0], a[0], alpha=2.5)


@pytest.mark.parametrize(
    "product",
    [
        torch.bmm,
        lambda x, w: torch.baddbmm(x, x, w),
        lambda x, w: x @ w,
        lambda x, w: torch.einsum("bij,bjk->bik", x, w),
        lambda x, w: torch.einsum("bij,bij->", x, w),
        lambda x, w: F.linear(x, w[0]),
        lambda x, w: torch.tensordot(x, w, 3),
    ],
)
def test_dtypes_that_torch_does_not_multiply(product):
    """It looks at them where there are cells: a rank without any says so too."""
    x, w = field(3, 4, 4), field(3, 4, 4).long()
    with pytest.raises(RuntimeError):
        product(x, w)
    for dim in range(3):
        for sizes in (skew(x.shape[dim], WORLD.size), skew(x.shape[dim], WORLD.size)[::-1]):
            own = shard(x, mesh_of((WORLD.size,)), (ms.Shard(dim),), {dim: sizes})
            for other in (w, shard(w, mesh_of((WORLD.size,)), (ms.Shard(dim),), {dim: sizes})):
                try:
                    product(own, other)
                    refused = False
                except RuntimeError:
                    refused = True
                assert all(told := WORLD.allgather(refused)), (dim, sizes, told)
