"""torch.distributions with sharded parameters and values: densities, divergences, and what their checks refuse."""

from __future__ import annotations

import pytest
import torch
import torch.distributions as D
from torch.distributions import kl_divergence

import mpishard as ms
from tests.compare import WORLD
from tests.models.twin import close


def last(x):
    return x.movedim(1, -1)


DENSITIES = {
    "normal": lambda x: D.Normal(x, x + 1).log_prob(2 * x),
    "numbers": lambda x: D.Normal(0.0, 1.0).log_prob(x),
    "normals": lambda x: kl_divergence(D.Normal(x, x + 1), D.Normal(torch.zeros_like(x), torch.ones_like(x))),
    "distribution function": lambda x: D.Normal(x, x + 1).cdf(x),
    "independent": lambda x: D.Independent(D.Normal(x, x + 1), 2).log_prob(x),
    "entropy": lambda x: D.Laplace(x, x + 1).entropy(),
    "bernoulli": lambda x: D.Bernoulli(logits=x).log_prob((x > 0.5).to(x.dtype)),
    "bernoullis": lambda x: kl_divergence(D.Bernoulli(x), D.Bernoulli(x * x)),
    "categorical": lambda x: D.Categorical(logits=last(x)).log_prob((x[:, 0] > 0.5).long()),
    "categories": lambda x: D.Categorical(probs=last(x)).entropy(),
    "one hot": lambda x: D.OneHotCategorical(logits=last(x)).log_prob(
        torch.nn.functional.one_hot((x[:, 0] > 0.5).long(), 3)
    ),
    "gamma": lambda x: D.Gamma(x + 1, x + 2).log_prob(2 * x),
    "beta": lambda x: D.Beta(x + 1, x + 2).log_prob(x),
    "poisson": lambda x: D.Poisson(x).log_prob((5 * x).floor()),
    "student": lambda x: D.StudentT(x + 2).log_prob(x),
    "von mises": lambda x: D.VonMises(x, x + 1).log_prob(x),
    "squashed": lambda x: D.TransformedDistribution(D.Normal(x, x + 1), [D.TanhTransform()]).log_prob(0.9 * x),
    "mixture": lambda x: D.MixtureSameFamily(
        D.Categorical(logits=last(x)), D.Normal(last(x), last(x) + 1)
    ).log_prob(x[:, 0]),
    "several": lambda x: D.MultivariateNormal(
        torch.zeros(3, dtype=x.dtype), torch.eye(3, dtype=x.dtype)
    ).log_prob(last(x)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def checks(monkeypatch):
    """A compiler, in another test, turns them off for good."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


@pytest.mark.parametrize("name", DENSITIES)
def test_densities(name):
    full = 0.1 + 0.8 * torch.rand(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mesh = ms.init_mesh((-1,), ("x",))
    x = full.clone().requires_grad_()
    expected = DENSITIES[name](x)
    gradient = torch.autograd.grad(expected.sum(), x)[0]
    for dim in (0, 2):
        y = ms.distribute_tensor(full, mesh, (ms.Shard(dim),)).requires_grad_()
        got = DENSITIES[name](y)
        close(got, expected.detach(), name)
        close(torch.autograd.grad(got.sum(), y)[0], gradient, f"gradient of {name}")


DRAWN = {
    "gamma": lambda x: D.Gamma(x + 1, x + 2),
    "beta": lambda x: D.Beta(x + 1, x + 2),
    "student": lambda x: D.StudentT(x + 2),
    "chi": lambda x: D.Chi2(x + 2),
    "inverse gamma": lambda x: D.InverseGamma(x + 3, x + 1),
    "dirichlet": lambda x: D.Dirichlet(last(x)),
    "binomial": lambda x: D.Binomial(20, x),
    "negative binomial": lambda x: D.NegativeBinomial(10 * x, x),
    "poisson": D.Poisson,
    "exponential": D.Exponential,
    "geometric": D.Geometric,
    "categorical": lambda x: D.Categorical(last(x)),
    "normal": lambda x: D.Normal(x, x + 1),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws(name):
    """The numbers of one mesh are those of another, and are distributed as they should."""
    full = 0.1 + 0.8 * torch.rand(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mesh, reference = ms.init_mesh((-1,), ("x",)), None
    for placement in (ms.Shard(2), ms.Shard(1), ms.Replicate()):
        torch.manual_seed(8)
        of = DRAWN[name](ms.distribute_tensor(full, mesh, (placement,)))
        drawn = of.sample((400,))
        values = drawn.full_tensor()
        reference = values if reference is None else reference
        torch.testing.assert_close(values, reference)
    expected = DRAWN[name](full)
    if not expected.mean.isnan().any():
        error = (values.mean(0) - expected.mean).abs() / (expected.variance / 400).sqrt()
        assert error.max() < 6


def test_parameters_that_are_refused_are_refused_everywhere():
    """Also where those of one rank are right."""
    mesh = ms.init_mesh((-1,), ("x",))
    x = ms.distribute_tensor(torch.arange(8.0), mesh, (ms.Shard(0),))
    for scale in (x - 6, x * float("nan")):
        with pytest.raises(ValueError, match="satisfy the constraint"):
            D.Normal(x, scale)
    with pytest.raises(ValueError, match="to be within the support"):
        D.Exponential(x + 1).log_prob(x - 1)
    assert D.Normal(x, x - 6, validate_args=False).mean.shape == (8,)
    assert torch._is_any_true(x > 6).item()
    assert not torch._is_all_true(x > 6).item()
    for judge in (torch._is_any_true, torch._is_all_true):
        with pytest.raises(RuntimeError, match="kBool"):
            judge(x)
    assert len(set(WORLD.allgather(str(D.Normal(x, x + 1))))) == 1
