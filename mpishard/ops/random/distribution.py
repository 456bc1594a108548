"""What ``torch.distributions`` draws by functions of its own: gamma, Dirichlet and binomial numbers.

By rejection, in float64: a cell tries again by the next lanes of its own stream, so its number depends on its global
index and its parameters alone, and no rank waits for the tries of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.linear import differentiated
from mpishard.ops.random.random import drawn_block, draws
from mpishard.tensor.operand import fitted, resolved
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.stream import normal, open_uniform

Bits = Callable[[int], Tensor]


class _Gamma(torch.autograd.Function):
    """Numbers that were drawn, as a function of the shape parameter: their quantiles stay."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        alpha, x = ctx.saved_tensors
        return gradient * torch._standard_gamma_grad(alpha, x), None


class _Underived(torch.autograd.Function):
    """Numbers that were drawn; as in torch, who asks for their gradient is told that there is none."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, *_parameters: Tensor) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        raise RuntimeError(f"derivative for {ctx.name} is not implemented")


@draws(torch._standard_gamma)
def standard_gamma(self: Any, generator: Any = None) -> ShardTensor:
    """Draw gamma numbers with the shape parameters ``self`` and scale 1. Collective.

    Differentiable once, as in torch: by the derivative of the quantile.
    """
    alpha = resolved(self)
    x = _gamma(alpha, alpha.block.dtype, generator)
    return wrap(_Gamma.apply(alpha.block, x) if differentiated(alpha) else x, alpha.sharding, alpha.mesh)


@draws(torch._sample_dirichlet)
def sample_dirichlet(self: Any, generator: Any = None) -> ShardTensor:
    """Draw Dirichlet numbers with the concentrations in the last dim. Collective."""
    alpha = resolved(self)
    with torch.no_grad():
        gamma = wrap(_gamma(alpha, torch.float64, generator), alpha.sharding, alpha.mesh)
        x = resolved(gamma / gamma.sum(-1, keepdim=True)).block.to(alpha.block.dtype)
        x = x.clamp_(min=torch.finfo(x.dtype).tiny)
    if differentiated(alpha):
        x = _Underived.apply("aten::_sample_dirichlet", x, alpha.block)
    return wrap(x, alpha.sharding, alpha.mesh)


@draws(torch.binomial)
def binomial(count: Any, prob: Any, generator: Any = None) -> ShardTensor:
    """Draw numbers of successes in ``count`` trials. Collective.

    Of counts with a fraction, the whole part counts; of a count or a probability that is NaN, NaN is drawn.
    """
    with torch.no_grad():
        like = resolved(count + prob)  # the layout in which both meet
    shape = like.block.shape
    n, p = (fitted(resolved(x), like.mesh, like.sharding) for x in (count, prob))
    given = [x.detach().expand(shape) for x in (n, p)]
    x = drawn_block(like, torch.float64, _successes, generator, parameters=given).to(like.block.dtype)
    if any(differentiated(v) for v in (count, prob)):
        x = _Underived.apply("aten::binomial", x, n, p)
    return wrap(x, like.sharding, like.mesh)


def _gamma(alpha: ShardTensor, dtype: torch.dtype, generator: Any) -> Tensor:
    """Return this rank's gamma numbers, which are above zero. Collective."""
    x = drawn_block(alpha, torch.float64, _gammas, generator, parameters=[alpha.block.detach()])
    return x.to(dtype).clamp_(min=torch.finfo(dtype).tiny)


def _gammas(bits: Bits, alpha: Tensor) -> Tensor:
    """Return gamma numbers (Marsaglia and Tsang, 2000, doi:10.1145/358407.358414). Not collective.

    Of shapes below one by those of shapes above: a number times a uniform one to the power of 1 / shape.
    """
    small = alpha < 1
    d = torch.where(small, alpha + 1, alpha) - 1 / 3
    c = (9 * d).rsqrt()

    def tried(lane: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        z = normal(torch.float64)(lambda i: bits(lane + i)[cells])
        v, scale = (1 + c[cells] * z) ** 3, d[cells]
        good = open_uniform(bits, lane + 2)[cells].log() < z * z / 2 + scale * (1 - v + v.log())
        return scale * v, good & (v > 0)

    # no shape parameter below zero has a distribution; of an infinite one all is infinite
    x = _accepted(torch.where(alpha > 0, alpha, alpha * 0), (alpha > 0) & (alpha < math.inf), tried, lanes=3, first=1)
    return torch.where(small & (alpha > 0), x * open_uniform(bits, 0) ** alpha.reciprocal(), x)


def _successes(bits: Bits, n: Tensor, p: Tensor) -> Tensor:
    """Return binomial numbers, by inversion where few successes are expected, else by rejection. Not collective."""
    n, p = n.floor().clamp_(min=0), p.clamp(0, 1)
    q = torch.minimum(p, 1 - p)  # of the rarer outcome
    known = (n < math.inf) & (q == q)
    x = torch.where(known, _few(bits, n, q, known & (n * q < 10)), math.nan)
    x = _many(bits, n, q, x, known & (n * q >= 10))
    return torch.where(p > 0.5, n - x, x)


def _few(bits: Bits, n: Tensor, q: Tensor, cells: Tensor) -> Tensor:
    """Return the smallest count whose distribution function is above a number, from count to count."""
    below = open_uniform(bits, 0)
    term = (n * torch.log1p(-q)).exp()
    x, sum_, odds = torch.zeros_like(n), term.clone(), q / (1 - q)
    for _ in range(200):  # of at most ten expected successes, never so many
        cells = cells & (sum_ < below) & (x < n)
        if not bool(cells.any()):
            break
        term = term * (n - x) / (x + 1) * odds
        x, sum_ = x + cells.double(), sum_ + term
    return x


def _many(bits: Bits, n: Tensor, q: Tensor, x: Tensor, cells: Tensor) -> Tensor:
    """Return counts by transformed rejection (Hörmann, 1993, doi:10.1080/00949659308811496, algorithm BTRS)."""
    deviation = (n * q * (1 - q)).sqrt()
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * q
    alpha, at_once = (2.83 + 5.1 / b) * deviation, 0.92 - 4.2 / b
    odds, mode = q / (1 - q), ((n + 1) * q).floor()

    def tried(lane: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        u, v = open_uniform(bits, lane)[cells] - 0.5, open_uniform(bits, lane + 1)[cells]
        s, m, c, r = 0.5 - u.abs(), n[cells], mode[cells], odds[cells]
        k = ((2 * a[cells] / s + b[cells]) * u + m * q[cells] + 0.5).floor()
        inside = (k >= 0) & (k <= m)
        height = (v * alpha[cells] / (a[cells] / (s * s) + b[cells])).log()
        # the logarithm of the ratio of the probabilities of k and of the mode
        ratio = (
            (c + 0.5) * ((c + 1) / (r * (m - c + 1))).log()
            + (m + 1) * ((m - c + 1) / (m - k + 1)).log()
            + (k + 0.5) * (r * (m - k + 1) / (k + 1)).log()
            + (_stirling_rest(c) + _stirling_rest(m - c) - _stirling_rest(k) - _stirling_rest(m - k))
        )
        return k, inside & (((s >= 0.07) & (v <= at_once[cells])) | (height <= ratio))

    return _accepted(x, cells, tried, lanes=2, first=1)


def _stirling_rest(k: Tensor) -> Tensor:
    """Return log(k!) less Stirling's (k + 1/2) log(k + 1) - (k + 1) + log(2 pi) / 2. Not collective."""
    k1 = k + 1
    series = (1 / 12 - (1 / 360 - 1 / 1260 / (k1 * k1)) / (k1 * k1)) / k1
    exact = torch.lgamma(k1) - ((k + 0.5) * k1.log() - k1 + math.log(2 * math.pi) / 2)
    return torch.where(k < 10, exact, series)


def _accepted(
    x: Tensor, cells: Tensor, tried: Callable[[int, Tensor], tuple[Tensor, Tensor]], *, lanes: int, first: int
) -> Tensor:
    """Return ``x`` with the numbers of these cells, which try until one is accepted. Not collective.

    Parameters
    ----------
    x, cells
        What other cells hold, and which have a number to find.
    tried
        Returns, of a lane and some positions, their numbers and which of them are accepted.
    lanes, first
        How many lanes a try takes, and that of the first.
    """
    x, left, lane = x.clone(), cells.nonzero()[:, 0], first
    while left.numel():
        values, good = tried(lane, left)
        x[left[good]] = values[good]
        left, lane = left[~good], lane + lanes
    return x
