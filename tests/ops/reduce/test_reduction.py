"""Reductions, extrema, scans and order statistics of shards against those of whole tensors."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

import mpishard as ms
from mpishard.ops.rule import reduction
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, mesh_shapes, shard
from tests.ops.windows import refused_alike
from tests.release import RELEASE

INF = float("inf")


def values(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def ties(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).double()


def few(shape, dims, every: int, max_ndim: int = 2):
    """Every n-th layout, and all that have uneven blocks."""
    for i, (mesh, placements, sizes) in enumerate(layouts(shape, dims, max_ndim)):
        if i % every == 0 or (sizes and i % 2 == 0):
            yield mesh, placements, sizes


DIMS = [
    lambda f, x: f(x),
    lambda f, x: f(x, 1),
    lambda f, x: f(x, -1, True),
    lambda f, x: f(x, dim=0, keepdim=True),
    lambda f, x: f(x, (0, 2)),
    lambda f, x: f(x, [-1, -2], keepdim=True),
]

SMOOTH = {
    "sum": torch.sum,
    "mean": torch.mean,
    "nansum": torch.nansum,
    "amax": torch.amax,
    "amin": torch.amin,
    "std": torch.std,
    "var": torch.var,
    "norm": lambda x, dim=None, keepdim=False: torch.linalg.vector_norm(x, 2, dim, keepdim),
    "norm3": lambda x, dim=None, keepdim=False: torch.linalg.vector_norm(x, 3, dim, keepdim),
    "norm1": lambda x, dim=None, keepdim=False: (
        torch.linalg.norm(x, 1, dim, keepdim) if isinstance(dim, int) else torch.norm(x, 1, dim, keepdim)
    ),
    "logsumexp": lambda x, dim=(0, 1, 2), keepdim=False: torch.logsumexp(x, dim, keepdim),
    "var_mean": lambda x, dim=None, keepdim=False: torch.var_mean(x, dim, correction=0, keepdim=keepdim),
    "std_mean": lambda x, dim=None, keepdim=False: torch.std_mean(x, dim, keepdim=keepdim),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_reductions(name):
    f, x = SMOOTH[name], values(3, 7, 5)
    calls = itertools.cycle(DIMS)
    for i, (mesh, placements, sizes) in enumerate(few(x.shape, (0, 1, 2), 5, 3)):
        call = next(calls)
        compare(
            lambda t, call=call: call(f, t),
            [(x, mesh, placements, sizes)],
            second=i % 3 == 0,
            what=f"{name} {placements} {sizes}",
        )


IN_PARTS = {
    "var": lambda x: torch.var_mean(x, (0, 1, 2), correction=0),
    "std": lambda x: x.std((1, 2)),
    "complex var": lambda x: torch.view_as_real(torch.complex(x, 1 - x).var().reshape(1).to(torch.complex128)),
    "prod": lambda x: x.prod(),
    "logsumexp": lambda x: x.logsumexp((0, 1, 2)),
    "logsumexp, masked": lambda x: torch.where(x > 0, x, -INF).logsumexp((0, 1)),
    "norm3": lambda x: torch.linalg.vector_norm(x.detach(), 3) * x.sum(),
    "norm-2": lambda x: torch.linalg.vector_norm(x.detach(), -2, (0, 1)) * x.sum(),
    "foreach": lambda x: torch._foreach_norm([x, 2 * x])[1].reshape(1),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_of_parts(name, monkeypatch):
    """Many ranks: those along one mesh dim after the other."""
    monkeypatch.setattr(reduction, "_TOGETHER", 1)
    f, x = IN_PARTS[name], values(3, 7, 5)
    for i, (mesh, placements, sizes) in enumerate(few(x.shape, (0, 1, 2), 4, 3)):
        compare(f, [(x, mesh, placements, sizes)], second=i % 4 == 0, what=f"{name} {placements} {sizes}")


CELLS = {
    "prod": lambda x: x.prod(),
    "prod dim": lambda x: x.prod(1, keepdim=True),
    "amax ties": lambda x: x.amax((0, 1)),
    "amin ties": lambda x: x.amin(),
    "max ties": lambda x: x.max(),
    "min ties": torch.min,
    "max dim": lambda x: x.max(1),
    "min dim": lambda x: torch.min(x, 0, keepdim=True),
    "max last": lambda x: x.max(dim=-1).values,
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "aminmax all": lambda x: x.aminmax(),
    "argmax": lambda x: x.argmax(),
    "argmin": torch.argmin,
    "argmax dim": lambda x: x.argmax(1),
    "argmin dim": lambda x: x.argmin(dim=-2, keepdim=True),
    "argmax keepdim": lambda x: torch.argmax(x, keepdim=True),
    "any": lambda x: (x > 2).any(),
    "any dim": lambda x: torch.any(x > 2, 1),
    "any dims": lambda x: torch.any(x > 2, (0, 1), True),
    "all": lambda x: (x < 3).all(),
    "all dim": lambda x: (x < 3).all(dim=2, keepdim=True),
    "all uint8": lambda x: (x < 3).to(torch.uint8).all(1),
    "count_nonzero": torch.count_nonzero,
    "count_nonzero dim": lambda x: x.count_nonzero((0, 1)),
    "nanmean": lambda x: torch.where(x == 1, torch.nan, x).nanmean(1),
    "nansum": lambda x: torch.where(x == 1, torch.nan, x).nansum(),
    "norm 0": lambda x: torch.linalg.vector_norm(x.detach(), 0, 1),
    "norm 0 of what has a gradient": lambda x: torch.linalg.vector_norm(x, 0, 1) + x.norm(0),
    "norm but of rows": lambda x: torch.norm_except_dim(x + 5, 2, 0) * torch.norm_except_dim(x + 5, 1, 2),
    "norm but of nothing": lambda x: torch.norm_except_dim(x + 5, 3, -1),
    "weight norm": lambda x: torch._weight_norm(x, x[:, :1, :1] + 5, 0),
    "norm inf": lambda x: torch.linalg.vector_norm(x, INF, (0, 1)),
    "norm -inf": lambda x: torch.linalg.vector_norm(x + 5, -INF),
    "norm -1": lambda x: torch.linalg.vector_norm(x + 5, -1, 1),
    "norm fro": lambda x: x.norm(),
    "norm p": lambda x: x.norm(3.0, 1),
    "matrix fro": torch.linalg.matrix_norm,
    "matrix 1": lambda x: torch.linalg.norm(x[0] * 1.5, 1),
    "matrix inf": lambda x: torch.linalg.matrix_norm(x, INF, keepdim=True),
    "int sum": lambda x: x.long().sum(1),
    "bool sum": lambda x: (x > 0).sum(),
    "int32 prod": lambda x: (x + 4).int().prod(1),
    "sum dtype": lambda x: x.float().sum(1, dtype=torch.float64),
    "mean dtype": lambda x: x.long().mean(dtype=torch.float64),
    "sum axis": lambda x: x.sum(axis=1, keepdims=True),
    "sum of none": lambda x: x.sum(()),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: (x / 2).cumprod(-2),
    "logcumsumexp": lambda x: x.detach().logcumsumexp(1),
    "cummax": lambda x: x.cummax(1),
    "cummin": lambda x: torch.cummin(x, 2),
    "int cumsum": lambda x: x.int().cumsum(1),
    "diff": lambda x: x.diff(dim=1),
    "diff twice": lambda x: torch.diff(x, 2, 1),
    "diff many": lambda x: torch.diff(x, 6, 1),
    "diff all": lambda x: torch.diff(x, 9, 1),
    "trapezoid": lambda x: torch.trapezoid(x, dx=0.5, dim=1),
    "trapezoid x": lambda x: torch.trapezoid(x, torch.arange(7.0).double() ** 2, dim=1),
    "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x, dim=1),
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=1),
    "cosine": lambda x: torch.cosine_similarity(x, x * x + 1, 1),
    "pairwise": lambda x: torch.pairwise_distance(x, x * x),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells(name):
    f, x = CELLS[name], ties(3, 7, 5)
    for mesh, placements, sizes in few(x.shape, (1, 2, 0), 11):
        compare(f, [(x, mesh, placements, sizes)], what=f"{name} {placements} {sizes}")


SECOND = ["prod", "prod dim", "amax ties", "max dim", "norm inf", "cumsum", "cumprod", "diff", "cosine"]


@pytest.mark.parametrize("name", SECOND)
def test_second_order(name):
    f, x = CELLS[name], ties(3, 7, 5)
    for mesh, placements, sizes in few(x.shape, (1,), 3):
        compare(lambda t: f(t * t), [(x, mesh, placements, sizes)], second=True, what=f"{name} {placements} {sizes}")


WHOLE = {
    "sort": lambda x: x.sort(2),
    "argsort": lambda x: torch.argsort(x, stable=True),
    "topk": lambda x: x.topk(2),
    "kthvalue": lambda x: x.kthvalue(2),
    "median": lambda x: x.median(-1),
    "nanmedian": lambda x: torch.nanmedian(x, 2, True),
    "mode": lambda x: x.mode().values,
    "quantile": lambda x: x.quantile(0.3, dim=2),
    "quantiles": lambda x: torch.quantile(x, torch.tensor([0.1, 0.7], dtype=x.dtype), 2, keepdim=True),
}


@pytest.mark.parametrize("name", WHOLE)
def test_order_along_whole_dim(name):
    f, x = WHOLE[name], values(4, 7, 5)
    for mesh, placements, sizes in few(x.shape, (0, 1), 5):
        compare(f, [(x, mesh, placements, sizes)], what=f"{name} {placements} {sizes}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_accumulate_wider(dtype):
    x = torch.full((4096,), 1.0).to(dtype)
    s = shard(x, mesh_of((WORLD.size,)), [ms.Shard(0)])
    for f in (torch.sum, torch.mean, torch.linalg.vector_norm, lambda t: t.logsumexp(0), torch.var, torch.nanmean):
        expected, got = f(x), f(s)
        assert got.dtype == expected.dtype == dtype
        torch.testing.assert_close(gathered(got), expected)
    assert x.float().cumsum(0)[-1] == gathered(s.cumsum(0))[-1]


def test_variance_of_large_offset():
    x = (values(6, 50) * 1e-3 + 1e6).clone()
    s = shard(x, mesh_of((WORLD.size,)), [ms.Shard(1)])
    exact = x.sub(1e6).var(1)
    torch.testing.assert_close(gathered(s.var(1)), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dim", [0, 1, (0, 1)])
def test_gradients_where_a_root_has_none(dim):
    def f(x):
        roots = [
            x.std(dim, correction=0),
            torch.std_mean(x, dim, correction=0)[0],
            x.norm(dim=dim),
            torch.linalg.vector_norm(x, 3, dim),
        ]
        return [*roots, torch.linalg.vector_norm(x, INF, dim), torch.nn.functional.normalize(x, dim=dim)]

    for full in (torch.zeros(5, 4, dtype=torch.float64), torch.full((5, 1), 3.0, dtype=torch.float64)):
        for mesh, placements, sizes in few(full.shape, (0, 1), 3):
            compare(f, [(full, mesh, placements, sizes)], what=f"{placements} {sizes}")


@pytest.mark.parametrize("f", [torch.amax, torch.amin, torch.max, torch.linalg.vector_norm], ids=lambda f: f.__name__)
def test_gradients_of_extrema_that_are_nan(f):
    """Those of amax and amin are NaN at all cells, as torch has it; of max and a norm, at those that are NaN alone."""
    x = values(8, 2)
    x[5, 1] = torch.nan
    f = (lambda t: torch.linalg.vector_norm(t, INF)) if f is torch.linalg.vector_norm else f
    whole = x.clone().requires_grad_()
    f(whole).backward()
    for mesh, placements, sizes in layouts((8, 2), (0, 1)):
        s = shard(x, mesh, placements, sizes, requires_grad=True)
        f(s).backward()
        torch.testing.assert_close(gathered(s.grad), whole.grad, equal_nan=True)


# torch 2.8 has no nansum of them
@pytest.mark.parametrize("f", [torch.sum, torch.prod, *([torch.nansum] if RELEASE >= (2, 13) else [])])
def test_sums_of_truths(f):
    x = ties(6, 3)
    for mesh, placements, sizes in layouts((6, 3), (0, 1)):
        for dim in (0, 1):
            got = f(shard(x, mesh, placements, sizes), dim, dtype=torch.bool)
            assert torch.equal(gathered(got), f(x, dim, dtype=torch.bool))


def test_nan_wins():
    x = values(3, 8)
    x[1, 5] = x[1, 6] = torch.nan
    s = shard(x, mesh_of((WORLD.size,)), [ms.Shard(1)])
    for f in (
        lambda t: t.max(1).indices,
        lambda t: t.min(1).values,
        lambda t: t.argmax(),
        lambda t: t.amax(1),
        lambda t: t.cummax(1).values,
        torch.min,
    ):
        torch.testing.assert_close(gathered(f(s)), f(x), equal_nan=True)


def test_agreements_are_plain_bools():
    x = values(5, 6)
    y = x.clone()
    y[4, 5] += 1e-3
    mesh = mesh_of((WORLD.size,))
    s, t = shard(x, mesh, [ms.Shard(0)]), shard(y, mesh, [ms.Shard(1)])
    assert torch.equal(s, s.clone()) is True
    assert torch.equal(s, x) is True
    assert torch.equal(s, shard(y, mesh, [ms.Shard(0)])) is False
    assert torch.equal(s, shard(x[:4].clone(), mesh, [ms.Shard(0)])) is False
    assert torch.allclose(s, shard(y, mesh, [ms.Shard(0)])) is False
    assert torch.allclose(s, y, atol=1e-2) is True
    assert torch.allclose(s, t) is False
    assert torch.allclose(s, t, atol=1e-2) is True


def test_partial_is_summed_first():
    mesh = mesh_of((WORLD.size,))
    x = ms.ShardTensor.from_local(torch.full((3, 4), 2.0), mesh, [ms.Partial()])
    assert float(x.amax()) == 2.0 * WORLD.size
    assert float(x.sum()) == 24.0 * WORLD.size
    assert float(torch.linalg.vector_norm(x, INF)) == 2.0 * WORLD.size


@pytest.mark.ranks(2, 4)
def test_one_message_per_reduction():
    s = shard(values(8, 6), mesh_of((WORLD.size,)), [ms.Shard(0)])
    for f, calls in ((torch.sum, 1), (torch.var, 1), (lambda t: t.sum(1), 0), (lambda t: t.norm(), 1)):
        with ms.comm_counter() as count:
            f(s)
        assert count.calls == calls


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, INF, 1.0])
def test_clip_gradients(foreach, norm_type):
    mesh = mesh_of((WORLD.size,))
    full = [values(6, 5), values(7, 4), values(3)]

    def clipped(sharded: bool):
        params = [
            shard(p, mesh, [ms.Shard(0)], requires_grad=True) if sharded and i < 2 else p.clone().requires_grad_()
            for i, p in enumerate(full)
        ]
        for p in params:
            (p * p).sum().backward()
        total = torch.nn.utils.clip_grad_norm_(params, 0.7, norm_type, foreach=foreach)
        return [gathered(p.grad) for p in params], gathered(total)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (expected, norm), (got, got_norm) = clipped(False), clipped(True)
    torch.testing.assert_close(got_norm, norm)
    for e, g in zip(expected, got):
        torch.testing.assert_close(g, e)


def test_errors_are_torch_errors():
    s = shard(values(4, 3), mesh_of((WORLD.size,)), [ms.Shard(0)])
    with pytest.raises(IndexError, match="Dimension out of range"):
        s.sum(2)
    with pytest.raises(RuntimeError):
        s.long().mean()
    with pytest.raises(RuntimeError, match="must be 1D or 2D"):
        torch.linalg.norm(s[None], 1)
    with pytest.raises(ms.UnsupportedOperationError, match="out="):
        torch.sum(s, 0, out=torch.empty(4))


FORWARD = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(1, True),
    "max": torch.max,
    "max along": lambda x: x.max(0).values,
    "min along": lambda x: x.min(1, True).values,
    "aminmax": lambda x: torch.aminmax(x, dim=0).max,
    "norm": lambda x: torch.linalg.vector_norm(x, 3, 0),
    "norm, largest": lambda x: torch.linalg.vector_norm(x, INF, 0),
    "matrix norm, columns": lambda x: torch.linalg.matrix_norm(x, 1),
    "matrix norm, rows": lambda x: torch.linalg.matrix_norm(x, INF),
    "logsumexp": lambda x: x.logsumexp(0),
    "std": lambda x: x.std(0),
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(0),
    "cummax": lambda x: x.cummax(0).values,
    "logcumsumexp": lambda x: x.logcumsumexp(0),
}
if RELEASE < (2, 13):  # torch 2.8 has no derivatives of it
    del CELLS["aminmax"], CELLS["aminmax all"], FORWARD["aminmax"]


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode(name):
    f, x, v = FORWARD[name], ties(5, 4), values(5, 4)
    fwd = torch.autograd.forward_ad
    for mesh, placements, sizes in few(x.shape, (0, 1), 2):
        s, t = (shard(full, mesh, placements, sizes) for full in (x, v))
        with fwd.dual_level():
            expected = fwd.unpack_dual(f(fwd.make_dual(x, v))).tangent
            dual = fwd.make_dual(s.to_local(), t.to_local())
            y = f(ms.ShardTensor.from_local(dual, mesh, placements))
            tangent = ms.ShardTensor.from_local(fwd.unpack_dual(y.to_local()).tangent, mesh, y.placements)
        torch.testing.assert_close(gathered(tangent), expected, msg=lambda m: f"{placements} {sizes}: {m}")


@pytest.mark.parametrize("name", FORWARD)
def test_function_transforms(name):
    f, x = FORWARD[name], values(6, 3)
    w = torch.tensor([1.0, -2.0, 0.5], dtype=x.dtype)

    def derivatives(x):
        def energy(w):
            y = f(x * (w * w))
            return (y.full_tensor() if isinstance(y, ms.ShardTensor) else y).square().sum()

        def along(w):
            return torch.func.jvp(energy, (w,), (w + 1,))[1]

        return torch.func.grad(energy)(w), torch.func.grad(along)(w), torch.func.jvp(along, (w,), (w,))[1]

    for mesh, placements, sizes in few(x.shape, (0,), 3):
        torch.testing.assert_close(derivatives(shard(x, mesh, placements, sizes)), derivatives(x))


def test_positions_inside_a_transform():
    x = values(6, 3)

    def f(w, x):
        y = x * w
        return tuple(gathered(t) for t in (y.argmax(), y.argmin(0), y.max(0).indices))

    s = shard(x, mesh_of((WORLD.size,)), [ms.Shard(0)])
    w = torch.ones(3, dtype=x.dtype)
    expected = f(w, x)
    found: list[torch.Tensor] = []

    def energy(w):
        found.extend(f(w, s))
        return w.sum()

    torch.func.grad(energy)(w)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(torch._C._functorch.get_unwrapped(a) if a is not b else a, b)


def test_logsumexp_where_a_block_is_masked():
    full = values(8, 4)
    full[:5] = full[5, 1] = -INF
    for mesh, placements, sizes in few(full.shape, (0, 1), 2):
        for dim in (0, (0, 1)):
            compare(lambda x, dim=dim: x.logsumexp(dim), [(full, mesh, placements, sizes)], what=f"{sizes}")
    # of rows that are masked altogether torch's gradient is NaN
    s, t = shard(full, mesh_of((WORLD.size,)), [ms.Shard(1)], requires_grad=True), full.clone().requires_grad_()
    for x in (s, t):
        x.logsumexp(1).sum().backward()
    torch.testing.assert_close(gathered(s.grad), t.grad, equal_nan=True)


@pytest.mark.parametrize("name", ["logsumexp", "prod"])
@pytest.mark.parametrize("infinite", [INF, -INF])
def test_derivatives_beside_an_infinite_cell(name, infinite):
    """NaN at the cell alone, as in torch, and not at its neighbours of the block."""
    full = values(6, 3)
    full[1, 0] = full[3, 2] = infinite
    for mesh, placements, sizes in few(full.shape, (0,), 2):
        s, t = shard(full, mesh, placements, sizes, requires_grad=True), full.clone().requires_grad_()
        for x in (s, t):
            getattr(x, name)(0).sum().backward()
        torch.testing.assert_close(gathered(s.grad), t.grad, equal_nan=True, msg=lambda m: f"{placements} {sizes}: {m}")


@pytest.mark.parametrize("p", [-1, -2, -0.5])
def test_norms_of_infinite_cells(p):
    """Of a negative order, they are infinite, also where they have a gradient."""
    full = torch.full((6, 3), INF, dtype=torch.float64)
    full[2, 1] = 2.0
    for mesh, placements, sizes in few(full.shape, (0, 1), 2):
        for grad in (False, True):
            s = shard(full, mesh, placements, sizes, requires_grad=grad)
            norm = torch.linalg.vector_norm(s, p, 0)
            torch.testing.assert_close(gathered(norm), torch.linalg.vector_norm(full, p, 0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.bool, torch.bfloat16])
def test_scans_keep_torchs_dtype(dtype):
    """The same on every rank, also on the first."""
    mesh, x = mesh_of((WORLD.size,)), torch.tensor([1, 3, 0, 2, 5, 5, 4]).to(dtype)
    scans = [lambda t: t.cummax(0), lambda t: t.cummin(0), lambda t: t.cumsum(0), lambda t: t.cumprod(0)]
    scans += [lambda t, d=d: t.cumsum(0, dtype=d) for d in (torch.uint8, torch.int32, torch.float32)]
    for sizes in (None, {0: (0,) * (WORLD.size - 1) + (7,)}):
        for f in scans:
            got, expected = f(shard(x, mesh, (ms.Shard(0),), sizes)), f(x)
            pairs = zip(got, expected) if isinstance(expected, tuple) else [(got, expected)]
            for g, e in pairs:
                assert g.to_local().dtype == e.dtype
                torch.testing.assert_close(gathered(g), e)


@pytest.mark.parametrize(
    "f", [torch.cumprod, torch.logcumsumexp, lambda x, dim: x.cummax(dim).values, lambda x, dim: x.cummin(dim).values]
)
def test_second_gradients_of_scans_with_small_blocks(f):
    """Of a linear function of the scan: torch's own for one cell or none would not depend on the cells."""
    for full, dim in ((values(3, 5), 1), (values(3, 1), 0)):
        for mesh, placements, sizes in few(full.shape, (0, 1), 1, 1):
            compare(
                lambda x, dim=dim: f(x, dim),
                [(full, mesh, placements, sizes)],
                second=True,
                what=f"{dim} {placements} {sizes}",
            )


@pytest.mark.parametrize("f", [torch.var, torch.std, torch.var_mean])
def test_second_gradients_of_a_variance_with_empty_blocks(f):
    for full, dim in ((values(3, 5), 1), (values(1, 5), 1), (values(5, 4), 0)):
        for mesh, placements, sizes in few(full.shape, (0, 1), 1, 1):
            compare(lambda x, dim=dim: f(x, dim), [(full, mesh, placements, sizes)], second=True, what=f"{dim} {sizes}")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("dim", [0, 1, (0, 1), None])
@pytest.mark.parametrize("f", [torch.var, torch.std, torch.var_mean, torch.std_mean])
def test_gradients_of_a_variance_of_too_few_cells(f, dim):
    """Infinite or NaN, or those of a negative number of degrees of freedom, as torch has it."""
    full = torch.tensor([[1.0, 2.0, 4.0], [3.0, 3.0, 3.0], [5.0, 3.0, 1.0]], dtype=torch.float64)
    for correction in (1, 3, 4, 9, 12.5):
        options = {"correction": correction} if dim is None else {"dim": dim, "correction": correction}
        for mesh, placements, sizes in few(full.shape, (0, 1), 2):
            compare(
                lambda x, options=options: f(x, **options),
                [(full, mesh, placements, sizes)],
                second=f is torch.var and dim in (0, 1) and correction > 3,
                what=f"{options} {placements} {sizes}",
            )


@pytest.mark.parametrize("name", ["cumsum_", "cumprod_", "renorm_"])
def test_gradients_of_what_is_written_over_its_argument(name):
    arguments = (2, 0, 1.0) if name == "renorm_" else (0,)
    for mesh, placements, sizes in few((5, 4), (0, 1), 3):
        compare(
            lambda x: getattr(x * 1.5, name)(*arguments) * x,
            [(values(5, 4), mesh, placements, sizes)],
            what=f"{placements} {sizes}",
        )


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_positions_of_bool_are_refused_beside_an_empty_block(dim, largest):
    func = torch.argmax if largest else torch.argmin
    x = torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(RuntimeError) as expected:
        func(x, dim)
    first = ms.ShardTensor.from_local(
        x if WORLD.rank == 0 else x[:0], mesh_of((WORLD.size,)), (ms.Shard(0),), {0: [3] + [0] * (WORLD.size - 1)}
    )
    with pytest.raises(RuntimeError) as caught:
        func(first, dim)
    assert set(WORLD.allgather(str(caught.value))) == {str(expected.value)}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("empty", [False, True])
def test_values_that_torch_refuses_on_one_rank_are_refused_on_all(at, empty):
    mesh, n = mesh_of((WORLD.size,)), 8
    sizes = {0: (*(0,) * (WORLD.size - 1), n)} if empty else None
    matrices = torch.eye(3).repeat(n, 1, 1)
    matrices[at, 0, 0] = float("nan")
    for call in (
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
        lambda x: torch.linalg.matrix_norm(x, -2),
        lambda x: torch.linalg.norm(x, 2, (1, 2)),
    ):
        with pytest.raises(RuntimeError) as expected:
            call(matrices)
        with pytest.raises(type(expected.value)) as got:
            call(ms.distribute_tensor(matrices, mesh, (ms.Shard(0),), sizes=sizes))
        assert len(set(WORLD.allgather(str(got.value)))) == 1


@pytest.mark.parametrize("dim", [0, -1])
def test_norms_of_the_cells_of_a_vector(dim):
    """All dims but the one that there is."""
    for mesh_shape in mesh_shapes(1):
        mesh = mesh_of(mesh_shape)
        for placement in (ms.Shard(0), ms.Replicate()):
            x = ms.distribute_tensor(torch.arange(-3.0, 4.0), mesh, (placement,))
            torch.testing.assert_close(
                torch.norm_except_dim(x, 2, dim).full_tensor(), torch.norm_except_dim(torch.arange(-3.0, 4.0), 2, dim)
            )


def test_two_corrections_at_once_are_refused_as_in_torch():
    x = shard(torch.arange(12.0).view(4, 3), mesh_of((WORLD.size,)), (ms.Shard(0),))
    for f in (torch.var, torch.std, torch.var_mean, torch.std_mean):
        with pytest.raises(TypeError, match="unbiased"):
            f(x, 0, unbiased=False, correction=1)


@pytest.mark.parametrize("function", [torch.any, torch.all])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.uint8])
def test_truth_along_no_dim(function, dtype):
    full = ties(5, 6).abs().to(dtype)
    for mesh, placements, sizes in layouts(full.shape, (0, 1)):
        for dim in ((), []):
            got = function(shard(full, mesh, placements, sizes), dim=dim)
            assert torch.equal(gathered(got), function(full, dim=dim))
            assert got.dtype == function(full, dim=dim).dtype


def test_a_mean_of_whole_numbers_is_refused():
    x, text = shard(values(5, 6), mesh_of((WORLD.size,)), [ms.Shard(0)]), "floating point or complex"
    with pytest.raises(RuntimeError, match=text):
        torch.nanmean(x.long(), 1)
    # torch 2.8 asks its kernel
    with pytest.raises(RuntimeError, match=text if RELEASE >= (2, 13) else "not implemented for 'Int'"):
        torch.nanmean(x, dtype=torch.int32)


@pytest.mark.parametrize("eps", [1e-8, 2.5, 100.0])
def test_cosines_of_short_vectors(eps):
    a, b = values(5, 6), values(6, 5).T.contiguous()
    a[:2] *= 1e-9
    for mesh, placements, sizes in layouts(a.shape, (0, 1)):
        for dim in range(2):
            f = lambda x, y: torch.cosine_similarity(x, y, dim, eps)  # noqa: E731
            compare(f, [(t, mesh, placements, sizes) for t in (a, b)], what=f"{dim} {placements} {sizes}")


def test_without_cells():
    nothing = [torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(0, 0)]
    for full in nothing:
        for mesh, placements, sizes in few(full.shape, (0, 1), 2):
            for order in (1, INF, -1, 2):
                x = shard(full, mesh, placements, sizes)
                try:
                    expected = torch.linalg.matrix_norm(full, order)
                except (RuntimeError, IndexError) as e:
                    with pytest.raises(type(e), match="non-zero size"):
                        torch.linalg.matrix_norm(x, order)
                else:
                    assert torch.equal(gathered(torch.linalg.matrix_norm(x, order)), expected)
    for f in (torch.argmax, torch.argmin, torch.amax, torch.amin, torch.max, torch.min):
        refused_alike(f, nothing[1])
        refused_alike(lambda x, f=f: f(x, dim=1), nothing[1])
    for dim in (None, 1, (0, 1)):
        refused_alike(lambda x, dim=dim: torch.linalg.vector_norm(x, -1, dim), nothing[1])


def test_matrix_norms_of_whole_numbers_are_refused():
    for order in (1, -1, INF, "fro", 2):
        refused_alike(lambda x, order=order: torch.linalg.matrix_norm(x, order), ties(4, 5).long())


def test_integrals_of_float16_overflow_where_those_of_torch_do():
    """Twice the area is beyond the range, and the area is not."""
    full = torch.full((3, 21), 2500.0, dtype=torch.float16)
    for mesh, placements, sizes in layouts(full.shape, (0, 1), 1):
        got = torch.trapezoid(shard(full, mesh, placements, sizes), dim=1)
        torch.testing.assert_close(gathered(got), torch.trapezoid(full, dim=1))
