"""Random numbers: the same global values on every mesh, of the right distributions, and what is made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from mpishard.layout import layout_of
from mpishard.tensor import stream
from tests.compare import WORLD, gathered, layouts, mesh_of, shard

SHAPE = (3, 4, 9, 8)


def seeded(f, seed: int = 5):
    """Run with one seed on rank 0 and others elsewhere: rank 0's must be the one that counts."""
    torch.manual_seed(seed + 1000 * WORLD.rank)
    return f()


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout1d": lambda x: F.dropout1d(x[0], 0.5),
    "dropout2d": lambda x: F.dropout2d(x, 0.5),
    "dropout3d": lambda x: F.dropout3d(x.unsqueeze(0), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "bernoulli": torch.bernoulli,
    "bernoulli p": lambda x: x.bernoulli(0.3),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.25),
    "bernoulli_ tensor": lambda x: torch.zeros_like(x).bernoulli_(x),
    "rand_like": torch.rand_like,
    "rand_like float16": lambda x: torch.rand_like(x, dtype=torch.float16),
    "randn_like": torch.randn_like,
    "randn_like complex": lambda x: torch.view_as_real(torch.randn_like(x, dtype=torch.complex128)),
    "randint_like": lambda x: torch.randint_like(x, -3, 12, dtype=torch.int64),
    "normal": lambda x: torch.normal(x, 2.0),
    "torch.dropout by name": lambda x: torch.dropout(input=x, p=0.3, train=True),
    "bernoulli by name": lambda x: torch.bernoulli(input=x),
    "normal by name": lambda x: torch.normal(mean=x, std=2.0),
    "poisson by name": lambda x: torch.poisson(input=x * 20),
    "rand_like by name": lambda x: torch.rand_like(input=x),
    "randint_like by name": lambda x: torch.randint_like(input=x, high=12, dtype=torch.int64),
    "normal_": lambda x: x.clone().normal_(1.0, 3.0),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "random_": lambda x: x.clone().random_(7),
    "new_empty": lambda x: x.new_empty(x.shape).normal_(),
    "new_empty per sample": lambda x: x * x.new_empty((3, 1, 1, 1)).bernoulli_(0.5),
    "poisson": lambda x: torch.poisson(x * 20),
    "gamma": lambda x: torch._standard_gamma(3 * x),
    "dirichlet": lambda x: torch._sample_dirichlet(5 * x + 0.1),
    "dirichlet of the sharded dim": lambda x: torch._sample_dirichlet(x.transpose(2, 3) + 0.1),
    "binomial": lambda x: torch.binomial((40 * x).floor(), x),
    "binomial of other shapes": lambda x: torch.binomial(torch.full((9, 1), 50.0, dtype=x.dtype), x),
    "multinomial": lambda x: torch.multinomial(x[0, 0] + 0.1, 6),
    "multinomial with replacement": lambda x: (x[0, 0, 1] + 0.1).multinomial(30, replacement=True),
    "multinomial of rows with replacement": lambda x: torch.multinomial(x[0, 0] + 0.1, 30, True),
    "cauchy_": lambda x: x.clone().cauchy_(1.0, 2.0),
    "log_normal_": lambda x: x.clone().log_normal_(0.5, 0.25),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True, dim=2),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x.clone(), std=0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_mesh_does_not_matter(name):
    full = torch.linspace(0, 1, math.prod(SHAPE), dtype=torch.float64).view(SHAPE)
    reference = None
    for i, (mesh, placements, sizes) in enumerate(layouts(SHAPE, (2, 3), 2)):
        if i % 2 and not sizes:
            continue
        x = shard(full, mesh, placements, sizes)
        values = gathered(seeded(lambda x=x: DRAWS[name](x)))
        if reference is None:
            reference = values
        torch.testing.assert_close(values, reference, rtol=1e-14, atol=1e-14, msg=f"{name} {placements} {sizes}")
    every = WORLD.allgather(reference.double().sum().item())
    assert every == every[:1] * WORLD.size


def test_discrete_distributions():
    mesh, n = mesh_of((WORLD.size,)), 20_000
    where = {"mesh": mesh, "placements": [ms.Shard(0)], "dtype": torch.float64}
    torch.manual_seed(12)
    for rate in (0.0, 0.3, 4.0, 2000.0):
        k = torch.poisson(ms.full((n,), rate, **where)).full_tensor()
        assert abs(k.mean() - rate) <= 5 * math.sqrt(rate / n)
        assert abs(k.var() - rate) <= 10 * rate / math.sqrt(n) + 5 * math.sqrt(rate / n)
    trials = ms.empty(n, **where).geometric_(0.25).full_tensor()
    assert trials.min() == 1
    assert abs((trials == 1).double().mean() - 0.25) < 5 * 0.44 / math.sqrt(n)
    assert abs(trials.mean() - 4) < 5 * math.sqrt(12 / n)
    cauchy = ms.empty(n, **where).cauchy_(3.0, 2.0).full_tensor()
    assert abs(((cauchy > 1) & (cauchy < 5)).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(n)
    logs = ms.empty(n, **where).log_normal_(0.5, 0.25).full_tensor().log()
    assert abs(logs.mean() - 0.5) < 5 * 0.25 / math.sqrt(n)
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])
    rows = shard(weights.expand(9, 6).contiguous(), mesh, [ms.Shard(1)])
    drawn = torch.multinomial(rows, 2000, replacement=True).full_tensor()
    share = torch.bincount(drawn.reshape(-1), minlength=6) / drawn.numel()
    torch.testing.assert_close(share, weights / 8, rtol=0, atol=5 * 0.5 / math.sqrt(drawn.numel()))
    assert all(sorted(row.tolist()) == [1, 2, 4] for row in torch.multinomial(rows, 3).full_tensor())


@pytest.mark.parametrize("alpha", [1e-3, 0.4, 1.0, 2.5, 1e6])
def test_gamma_numbers(alpha):
    """Kolmogorov's distance from the distribution function."""
    n = 20_000
    torch.manual_seed(3)
    given = ms.full((n,), alpha, mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(0)], dtype=torch.float64)
    x = torch._standard_gamma(given).full_tensor().sort().values
    below = torch.special.gammainc(torch.tensor(alpha, dtype=x.dtype), x)
    found = torch.arange(n, dtype=x.dtype) / n
    known = x > 1e-300  # of a small shape many are the smallest number that there is
    assert x.min() > 0
    assert (below - found).abs()[known].max() < 2 / math.sqrt(n)


@pytest.mark.parametrize(("n", "p"), [(1, 0.3), (12, 0.7), (25, 0.4), (100, 0.97), (10**4, 0.002), (10**6, 0.25)])
def test_binomial_numbers(n, p):
    """A chi-squared test of the counts, and the mean of counts too many for one."""
    cells = 20_000
    torch.manual_seed(4)
    where = {"mesh": mesh_of((WORLD.size,)), "placements": [ms.Shard(0)], "dtype": torch.float64}
    k = torch.binomial(ms.full((cells,), float(n), **where), ms.full((cells,), p, **where)).full_tensor()
    low, high = int(k.min()), int(k.max())
    assert 0 <= low <= high <= n
    of = torch.arange(low, high + 1, dtype=k.dtype)
    log = math.lgamma(n + 1) - torch.lgamma(of + 1) - torch.lgamma(n - of + 1) + of * math.log(p)
    expected = cells * (log + (n - of) * math.log1p(-p)).exp()
    often = expected > 10
    distance = ((torch.bincount((k - low).long()) - expected) ** 2 / expected)[often].sum()
    freedom = int(often.sum())
    assert distance < freedom + 5 * math.sqrt(2 * freedom)
    deviation = math.sqrt(n * p * (1 - p))
    assert abs(k.mean() - n * p) < 5 * deviation / math.sqrt(cells)
    assert abs(k.std() / deviation - 1) < 5 / math.sqrt(cells)


def test_parameters_at_the_edges():
    mesh, nan, inf = mesh_of((WORLD.size,)), math.nan, math.inf
    n = shard(torch.tensor([0.0, 5.0, 5.0, 5.0, -2.0, inf, nan, 7.9]), mesh, [ms.Shard(0)])
    p = shard(torch.tensor([0.5, 0.0, 1.0, nan, 0.5, 0.5, 0.5, 1.0]), mesh, [ms.Shard(0)])
    expected = torch.tensor([0.0, 0.0, 5.0, nan, 0.0, nan, nan, 7.0])
    torch.testing.assert_close(torch.binomial(n, p).full_tensor(), expected, rtol=0, atol=0, equal_nan=True)
    alpha = shard(torch.tensor([0.0, inf, nan, 1e-30]), mesh, [ms.Shard(0)])
    tiny = torch.finfo(torch.float32).tiny
    got = torch._standard_gamma(alpha).full_tensor()
    torch.testing.assert_close(got, torch.tensor([tiny, inf, nan, tiny]), rtol=0, atol=0, equal_nan=True)


def test_gradients_of_drawn_numbers():
    """Those that torch defines, at the numbers that were drawn; else the error that torch gives."""
    full = torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6)) + 0.2
    weight = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    for dim in (0, 1):
        x = shard(full, mesh_of((WORLD.size,)), [ms.Shard(dim)], requires_grad=True)
        drawn = torch._standard_gamma(x)
        own = torch.autograd.grad((drawn * weight).sum(), x, create_graph=True)[0]
        expected = weight * torch._standard_gamma_grad(full, drawn.detach().full_tensor())
        torch.testing.assert_close(own.full_tensor(), expected)
        with pytest.raises(NotImplementedError, match="_standard_gamma_grad"):
            own.sum().backward()
        drawn = torch.distributions.Dirichlet(x).rsample()
        own = torch.autograd.grad((drawn * weight).sum(), x)[0]
        values = drawn.detach().full_tensor()
        per_cell = torch._dirichlet_grad(values, full, full.sum(-1, keepdim=True).expand_as(full))
        torch.testing.assert_close(own.full_tensor(), per_cell * (weight - (values * weight).sum(-1, keepdim=True)))
        for drawn in (torch._sample_dirichlet(x), torch.binomial(torch.full_like(x, 5), x.clamp(max=1))):
            with pytest.raises(RuntimeError, match="is not implemented"):
                drawn.sum().backward()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: torch._standard_gamma(x.long()),
        lambda x: torch.binomial(x.double(), x.float()),
        lambda x: torch.multinomial(x, 9),
        lambda x: torch.multinomial(x - 1, 2),
        lambda x: torch.multinomial(x * 0, 2, replacement=True),
        lambda x: x.multinomial(0),
        lambda x: torch.poisson(-x),
        lambda x: x.clone().geometric_(1.5),
        lambda x: x.clone().log_normal_(0, -1),
    ],
)
def test_wrong_distributions_are_refused(wrong):
    with pytest.raises(RuntimeError):
        wrong(torch.rand(3, 4) + 0.5)
    with pytest.raises(RuntimeError):
        wrong(shard(torch.rand(3, 4) + 0.5, mesh_of((WORLD.size,)), [ms.Shard(1)]))


@pytest.mark.parametrize(("odd", "said"), [(math.inf, "finite"), (-1.0, "non-negative"), (math.nan, "non-negative")])
def test_a_rate_that_one_rank_has_is_refused_on_every_rank(odd, said):
    rates = torch.ones(8)
    rates[0] = odd
    x = shard(rates, mesh_of((WORLD.size,)), [ms.Shard(0)])
    try:
        torch.poisson(x)
    except RuntimeError as e:
        raised = str(e)
    else:
        raised = ""
    assert all(said in text for text in WORLD.allgather(raised))


def test_large_rates():
    rates = torch.tensor([1e18, 1e30, 1e300, torch.finfo(torch.float64).max], dtype=torch.float64)
    drawn = torch.poisson(shard(rates, mesh_of((WORLD.size,)), [ms.Shard(0)])).full_tensor()
    torch.testing.assert_close(drawn, rates)


def test_the_hash_is_splitmix64():
    def exact(base: int, index: int) -> int:
        z = (base + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    # the first numbers of the published generator, seed 0
    assert [hex(exact(0, i)) for i in range(2)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]
    layout = layout_of((1,), [ms.Replicate()], (5, 70, 1000))
    seed = 123456789
    base = exact(seed, 0)
    out = stream.drawn_into(torch.empty(5, 70, 1000, dtype=torch.int64), layout, (0,), seed, lambda bits: bits(0)).view(
        -1
    )
    for i in (0, 1, 999, 32768, 70_001, 349_999):
        assert out[i].item() % 2**64 == exact(base, i)


@pytest.mark.parametrize("shape", [(7,), (40_000,), (3, 50_000), (5, 7, 3001), (200, 300, 2), (1, 1), (0, 4), ()])
def test_blocks_cover_every_cell_once(shape):
    mesh = mesh_of((WORLD.size,))
    dim = max(range(len(shape)), key=shape.__getitem__) if shape else 0
    placements = [ms.Shard(dim)] if shape else [ms.Replicate()]
    whole = seeded(lambda: ms.rand(shape, mesh=mesh, placements=[ms.Replicate()], dtype=torch.float64))
    cut = seeded(lambda: ms.rand(shape, mesh=mesh, placements=placements, dtype=torch.float64))
    values = whole.to_local()
    assert torch.equal(cut.full_tensor(), values)
    assert values.unique().numel() == values.numel()


def test_distributions():
    mesh = mesh_of((WORLD.size,))
    n = 200_000
    where = {"mesh": mesh, "placements": [ms.Shard(0)]}
    torch.manual_seed(11)
    u = ms.rand(n, **where).full_tensor().double()
    z = ms.randn(n, **where).full_tensor().double()
    e = ms.empty(n, **where).exponential_(2.0).full_tensor().double()
    k = ms.empty(n, dtype=torch.int64, **where).random_(10).full_tensor()
    assert u.min() >= 0
    assert u.max() < 1
    five = 5 / math.sqrt(n)  # five standard errors
    assert abs(u.mean() - 0.5) < five * 0.29
    assert abs(u.var() - 1 / 12) < five * 0.08
    assert abs(z.mean()) < five
    assert abs(z.var() - 1) < five * 1.42
    assert abs((z**3).mean()) < five * 3.9
    assert abs((z**4).mean() - 3) < five * 9.8
    assert abs(e.mean() - 0.5) < five * 0.5
    for values, cells in ((torch.bincount((u * 64).long(), minlength=64), 64), (torch.bincount(k, minlength=10), 10)):
        chi2 = ((values - n / cells) ** 2 / (n / cells)).sum()
        assert abs(chi2 - (cells - 1)) < 5 * math.sqrt(2 * cells)
    for lag in (1, 2, 64):  # neighbouring counters give unrelated numbers
        assert abs((z[lag:] * z[:-lag]).mean()) < five
    assert abs((u[: n // 2] - 0.5).dot(u[n // 2 :] - 0.5) / (n / 24)) < five * math.sqrt(2)


def test_complex_numbers_in_place():
    z = ms.zeros(20000, mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(0)], dtype=torch.complex128)
    for drawn, mean, var in ((z.clone().normal_(2, 3), 2, 4.5), (z.clone().uniform_(1, to=4), 2.5 + 2.5j, 0.75)):
        k = drawn.full_tensor()
        assert abs(k.mean() - mean) < 0.1
        for part in (k.real, k.imag):
            assert abs(part.var() - var) < 0.05 * var
        assert abs(torch.corrcoef(torch.stack([k.real, k.imag]))[0, 1]) < 0.03


@pytest.mark.parametrize(("low", "high"), [(-(1 << 63), (1 << 63) - 1), (-(1 << 62) - 5, (1 << 62) + 7), (-5, 1 << 62)])
def test_integers_of_all_bits(low, high):
    mesh = mesh_of((WORLD.size,))
    where = {"mesh": mesh, "placements": [ms.Shard(0)], "dtype": torch.int64}
    for drawn in (ms.empty(4000, **where).random_(low, high), torch.randint_like(ms.empty(4000, **where), low, high)):
        k = drawn.full_tensor()
        assert low <= int(k.min()) <= int(k.max()) < high
        assert len(k.unique()) == len(k)
        u = (k.double() - low) / (high - low)
        assert abs(u.mean() - 0.5) < 0.03
        assert abs(u.var() - 1 / 12) < 0.01


def test_dropout_keeps_the_mean_and_its_gradient_is_the_mask():
    mesh = mesh_of((WORLD.size,))
    x = ms.ones(400, 500, mesh=mesh, placements=[ms.Shard(0)], requires_grad=True)
    y = F.dropout(x, 0.25)
    values = y.detach().full_tensor()
    assert values.unique().tolist() == pytest.approx([0, 4 / 3])
    assert abs(values.mean() - 1) < 0.01
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), values)
    again = F.dropout(x, 0.25).detach().full_tensor()
    assert not torch.equal(again, values)


def test_dropout_edges():
    mesh = mesh_of((WORLD.size,))
    x = ms.ones(6, 5, mesh=mesh, placements=[ms.Shard(0)])
    assert F.dropout(x, 0.5, training=False) is x
    assert F.dropout(x, 0.0) is x
    assert float(F.dropout(x, 1.0).sum()) == 0
    y = x.clone()
    assert F.dropout(y, 0.5, inplace=True) is y
    assert set(y.full_tensor().unique().tolist()) <= {0.0, 2.0}
    with pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(x, 1.5)


def test_features_are_dropped_whole():
    mesh = mesh_of((WORLD.size,))
    x = ms.ones(8, 16, 6, 4, mesh=mesh, placements=[ms.Shard(2)])
    values = F.dropout2d(x, 0.5).full_tensor()
    assert torch.equal(values, values[:, :, :1, :1].expand_as(values))
    assert 20 < (values[:, :, 0, 0] == 0).sum() < 108


def test_dropout_saves_one_byte_per_cell():
    x = ms.ones(64, 64, mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(0)], requires_grad=True)
    saved = []

    def pack(t):
        saved.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        F.dropout(x, 0.5)
    assert sum(saved) == x.to_local().numel()


def test_checkpoint_recomputes_the_same_mask():
    mesh = mesh_of((WORLD.size,))
    full = torch.randn(12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = []
    for reentrant in (None, False, True):
        x = shard(full, mesh, [ms.Shard(0)], requires_grad=True)

        def block(t):
            return F.dropout(t * t, 0.5).sin()

        def run(x=x, block=block, reentrant=reentrant):
            y = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            torch.rand(3)  # what happens in between must not matter
            y.sum().backward()

        seeded(run)
        grads.append(gathered(x.grad))
    assert torch.equal(grads[1], grads[0])
    assert torch.equal(grads[2], grads[0])


def test_a_given_generator_is_used():
    mesh = mesh_of((WORLD.size,))
    where = {"mesh": mesh, "placements": [ms.Shard(0)], "dtype": torch.float64}
    a, b = (ms.randn(20, generator=torch.Generator().manual_seed(s), **where).full_tensor() for s in (3, 3))
    assert torch.equal(a, b)
    before = torch.get_rng_state()
    ms.randn(20, generator=torch.Generator().manual_seed(3), **where)
    assert torch.equal(before, torch.get_rng_state())


FACTORIES = {
    "zeros": (lambda **k: ms.zeros(6, 9, **k), lambda: torch.zeros(6, 9)),
    "zeros of a shape": (lambda **k: ms.zeros((6, 9), **k), lambda: torch.zeros(6, 9)),
    "ones": (lambda **k: ms.ones(6, 9, dtype=torch.int32, **k), lambda: torch.ones(6, 9, dtype=torch.int32)),
    "full": (lambda **k: ms.full((6, 9), 2.5, **k), lambda: torch.full((6, 9), 2.5)),
    "full of integers": (lambda **k: ms.full((6, 9), 7, **k), lambda: torch.full((6, 9), 7)),
    "arange": (lambda **k: ms.arange(11, **k), lambda: torch.arange(11)),
    "arange float": (lambda **k: ms.arange(0.5, 4, 0.3, **k), lambda: torch.arange(0.5, 4, 0.3)),
    "arange down": (lambda **k: ms.arange(9, -3, -2, **k), lambda: torch.arange(9, -3, -2)),
    "arange to a float": (lambda **k: ms.arange(5.0, **k), lambda: torch.arange(5.0)),
    "arange to a float, of integers": (
        lambda **k: ms.arange(0, 5.7, 2.5, dtype=torch.int64, **k),
        lambda: torch.arange(0, 5.7, 2.5, dtype=torch.int64),
    ),
    "arange of nothing": (lambda **k: ms.arange(3, 3, **k), lambda: torch.arange(3, 3)),
    "arange of a tensor": (lambda **k: ms.arange(torch.tensor(3.5), **k), lambda: torch.arange(3.5)),
    "extents of other integers": (lambda **k: ms.zeros(np.int64(6), torch.tensor(9), **k), lambda: torch.zeros(6, 9)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name):
    make, expected = FACTORIES[name]
    for placements in ([ms.Shard(0)], [ms.Replicate()]):
        x = make(mesh=mesh_of((WORLD.size,)), placements=placements)
        torch.testing.assert_close(x.full_tensor(), expected(), rtol=1e-7, atol=1e-7)
        assert tuple(x.to_local().shape) == x.sharding.local_shape(x.mesh.coords)


def test_factory_arguments():
    mesh = mesh_of((WORLD.size,))
    sizes = {0: [WORLD.size + 5] + [0] * (WORLD.size - 1)}
    x = ms.empty(WORLD.size + 5, 2, mesh=mesh, placements=[ms.Shard(0)], sizes=sizes, requires_grad=True)
    assert x.requires_grad
    assert x.is_leaf
    assert x.sharding.sizes[0] == tuple(sizes[0])
    with pytest.raises(ms.LayoutError, match="Partial"):
        ms.ones(3, mesh=mesh, placements=[ms.Partial()])
    with pytest.raises(ms.UnsupportedDtypeError):
        ms.rand(3, mesh=mesh, placements=[ms.Shard(0)], dtype=torch.complex64)


NO_SHAPES = (-1, 2.5, "a", None, (3, -1), (3, 2.0), [[3]])


@pytest.mark.parametrize("shape", NO_SHAPES, ids=repr)
def test_what_is_no_shape_draws_nothing(shape):
    mesh = mesh_of((WORLD.size,))
    makers = (ms.zeros, ms.ones, ms.empty, ms.rand, ms.randn, lambda shape, **k: ms.full(shape, 1.0, **k))
    states = WORLD.allgather(torch.get_rng_state().tolist())
    for make in makers:
        with pytest.raises(ms.LayoutError, match="no global shape") as raised:
            make(shape, mesh=mesh, placements=[ms.Shard(0)])
        assert len(set(WORLD.allgather(str(raised.value)))) == 1
    assert states == WORLD.allgather(torch.get_rng_state().tolist())
    with pytest.raises(ms.LayoutError, match="no global shape"):
        ms.rand(3 if WORLD.rank else shape, mesh=mesh, placements=[ms.Shard(0)])


@pytest.mark.parametrize("ends", [(5, 2), (0, 5, -1), (0, 5, 0), (0, math.inf), (0, math.nan), ("a",)], ids=repr)
def test_arange_refuses_what_torch_refuses(ends):
    mesh = mesh_of((WORLD.size,))
    with pytest.raises((RuntimeError, TypeError)) as refused:
        torch.arange(*ends if len(ends) > 1 else (0, *ends))
    with pytest.raises(refused.type):
        ms.arange(*ends, mesh=mesh, placements=[ms.Shard(0)])


def test_numbers_that_are_no_extents_of_a_method():
    x = shard(torch.ones(6, 4), mesh_of((WORLD.size,)), [ms.Shard(0)])
    for call in (
        lambda: x.new_zeros(2.5),
        lambda: x.new_zeros((2.5, 3)),
        lambda: x.new_ones(size=(2.5, 3)),
        lambda: x.new_full("a", 1.0),
        lambda: x.permute(1.0, 0.0),
        lambda: x.flip(1.5),
        lambda: x.expand(6.5, 4),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(RuntimeError, match="negative dimension"):
        x.new_empty((3, -1))
