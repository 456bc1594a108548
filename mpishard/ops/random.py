"""Random operations: the same global result on every mesh, because each number is a hash of its global index."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import differentiated
from mpishard.comm import traced
from mpishard.layout import Layout, Replicate, Shard, layout_of
from mpishard.ops.rule.dim import normal_dim, other_device, resized, whole_along
from mpishard.tensor.operand import fitted, resolved
from mpishard.tensor.registry import Rule, implements, tensors_in
from mpishard.tensor.shard_tensor import ShardTensor, cotangent_layout, wrap
from mpishard.tensor.stream import (
    Fill,
    chosen,
    draw_seed,
    drawn_into,
    exponential,
    integers,
    normal,
    uniform,
)


def _drawn(
    x: ShardTensor, dtype: torch.dtype, fill: Fill, generator: Any = None, layout: Layout | None = None
) -> Tensor:
    """Return this rank's block of a random tensor laid out as ``x`` (or ``layout``). Collective."""
    where, mesh, device = layout or x.sharding, x.mesh, x.block.device
    shape = where.local_shape(mesh.coords)

    def draw() -> Tensor:
        seed = draw_seed(mesh, generator)
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return drawn_into(torch.empty(shape, dtype=dtype), where, mesh.coords, seed, fill).to(device)

    if traced.recording is not None:
        return traced.recording.call("random", draw, [], shape, dtype=dtype, device=device)
    return draw()


# -- what torch refuses

_KEPT = 4096
_taken: set[Any] = set()


def _as_taken_by(function: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Decorate a rule: what torch refuses of dtypes and numbers is refused. Not collective.

    Torch is asked by tensors of one cell each, once for all calls alike: a rank without cells must refuse, too.
    """

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def call(*args: Any, **kwargs: Any) -> Any:
            key = function, *map(_kind, args), *((name, _kind(a)) for name, a in kwargs.items())
            if key not in _taken:
                given = tensors_in([*args, *kwargs.values()])
                where = next(x for x in given if isinstance(x, ShardTensor)).block.device
                named = {name: a for name, a in kwargs.items() if name not in ("generator", "device")}
                with torch.random.fork_rng([where] if where.type == "cuda" else []), torch.no_grad():
                    function(*map(_one_cell, args), **{name: _one_cell(a) for name, a in named.items()})
                if len(_taken) > _KEPT:
                    _taken.clear()
                _taken.add(key)
            return rule(*args, **kwargs)

        return call

    return decorate


def _kind(a: Any) -> Any:
    if isinstance(a, Tensor):
        return a.dtype, a.ndim
    return type(a) if isinstance(a, torch.Generator) else (type(a), a)


def _one_cell(a: Any) -> Any:
    if isinstance(a, Tensor):
        device = a.block.device if isinstance(a, ShardTensor) else a.device
        return torch.ones((1,) * a.ndim, dtype=a.dtype, device=device)
    return None if isinstance(a, torch.Generator) else a


# -- dropout


def _features(layout: Layout, leading: int) -> Layout:
    """Return the layout of one number per feature: the first ``leading`` dims, ones after."""
    placements = [Replicate() if type(p) is Shard and p.dim >= leading else p for p in layout.placements]
    ones = (1,) * (layout.ndim - leading)
    return layout_of(
        layout.mesh_shape, placements, layout.shape[:leading] + ones, layout.sizes[:leading] + (None,) * len(ones)
    )


def _dropped(
    input: ShardTensor, p: float, training: bool, inplace: bool, leading: int | None = None, alpha: bool = False
) -> ShardTensor:
    """Drop cells, or features of the first ``leading`` dims. Collective in training."""
    if not training or p == 0 or not math.prod(input.shape):
        return input
    x = resolved(input)
    layout = x.sharding if leading is None else _features(x.sharding, leading)
    kept = _drawn(x, torch.bool, chosen(1 - p), layout=layout)
    local = x.block
    if alpha:
        limit = 1.7580993408473766  # minus the value that SELU tends to
        a = 0.0 if p == 1 else 1 / math.sqrt((limit * limit * p + 1) * (1 - p))
        noise = kept.to(local.dtype)
        shift = (noise - 1).mul_(limit * a).add_(limit * a * p)
        noise.mul_(a)
        if inplace:
            return input.mul_(wrap(noise, layout, x.mesh)).add_(wrap(shift, layout, x.mesh))
        return wrap(local * noise + shift, x.sharding, x.mesh)
    scale = 0 if p == 1 else 1 / (1 - p)
    # the boolean mask alone is kept for backward
    if inplace:
        return input.mul_(wrap(kept, layout, x.mesh)).mul_(scale)
    return wrap((local * kept).mul_(scale), x.sharding, x.mesh)


@implements(F.dropout, sharded="local")
@_as_taken_by(F.dropout)
def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> ShardTensor:
    """Set cells to zero with probability ``p`` and scale the others. Collective in training."""
    return _dropped(input, p, training, inplace)


@implements(F.alpha_dropout, sharded="local")
@_as_taken_by(F.alpha_dropout)
def alpha_dropout(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> ShardTensor:
    """Drop cells such that mean and variance stay (for SELU). Collective in training."""
    return _dropped(input, p, training, inplace, alpha=True)


@implements(F.feature_alpha_dropout, sharded="local")
@_as_taken_by(F.feature_alpha_dropout)
def feature_alpha_dropout(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> ShardTensor:
    """Drop whole channels such that mean and variance stay. Collective in training."""
    return _dropped(input, p, training, inplace, _channels(input), alpha=True)


@implements(F.dropout1d, sharded="local")
@_as_taken_by(F.dropout1d)
def dropout1d(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> ShardTensor:
    """Drop whole channels. Collective in training."""
    return _dropped(input, p, training, inplace, input.ndim - 1)


@implements(F.dropout2d, sharded="local")
@_as_taken_by(F.dropout2d)
def dropout2d(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> ShardTensor:
    """Drop whole channels. Collective in training."""
    if input.ndim not in (3, 4):
        warnings.warn(f"dropout2d: Received a {input.ndim}-D input, which is deprecated", stacklevel=2)
    return _dropped(input, p, training, inplace, 2)


@implements(F.dropout3d, sharded="local")
@_as_taken_by(F.dropout3d)
def dropout3d(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> ShardTensor:
    """Drop whole channels. Collective in training."""
    if input.ndim not in (4, 5):
        warnings.warn(f"dropout3d: Received a {input.ndim}-D input, which is deprecated", stacklevel=2)
    return _dropped(input, p, training, inplace, 2 if input.ndim == 5 else 1)


def _channels(x: ShardTensor) -> int:
    return min(2, x.ndim)


@implements(torch.dropout, sharded="local")
@_as_taken_by(torch.dropout)
def torch_dropout(input: Any, p: float, train: bool) -> ShardTensor:
    """Set cells to zero with probability ``p`` and scale the others. Collective in training."""
    return _dropped(input, p, train, False)


@implements(torch.dropout_, sharded="local")
@_as_taken_by(torch.dropout_)
def torch_dropout_(input: Any, p: float, train: bool) -> ShardTensor:
    """Do the same in place. Collective in training."""
    return _dropped(input, p, train, True)


@implements(torch.feature_dropout, sharded="local")
@_as_taken_by(torch.feature_dropout)
def torch_feature_dropout(input: Any, p: float, train: bool) -> ShardTensor:
    """Drop whole channels. Collective in training."""
    return _dropped(input, p, train, False, _channels(input))


@implements(torch.feature_dropout_, sharded="local")
@_as_taken_by(torch.feature_dropout_)
def torch_feature_dropout_(input: Any, p: float, train: bool) -> ShardTensor:
    """Drop whole channels in place. Collective in training."""
    return _dropped(input, p, train, True, _channels(input))


implements(torch.alpha_dropout, sharded="local")(alpha_dropout)
implements(torch.feature_alpha_dropout, sharded="local")(feature_alpha_dropout)


@implements(torch.alpha_dropout_, sharded="local")
@_as_taken_by(torch.alpha_dropout_)
def torch_alpha_dropout_(input: Any, p: float, train: bool) -> ShardTensor:
    """Drop cells in place such that mean and variance stay. Collective in training."""
    return alpha_dropout(input, p, train, True)


@implements(torch.feature_alpha_dropout_, sharded="local")
@_as_taken_by(torch.feature_alpha_dropout_)
def torch_feature_alpha_dropout_(input: Any, p: float, train: bool) -> ShardTensor:
    """Drop whole channels in place such that mean and variance stay. Collective in training."""
    return feature_alpha_dropout(input, p, train, True)


@implements(F.rrelu, torch.rrelu, sharded="local")
@_as_taken_by(F.rrelu)
def rrelu(
    input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> ShardTensor:
    """Leaky ReLU with random slopes in training. Collective in training."""
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)  # type: ignore[return-value]
    x = resolved(input)
    slopes = _drawn(x, x.block.dtype, uniform(x.block.dtype)).mul_(upper - lower).add_(lower)
    if inplace:
        return input.mul_(wrap(slopes.masked_fill_(x.block.detach() >= 0, 1), x.sharding, x.mesh))
    return wrap(torch.where(x.block >= 0, x.block, x.block * slopes), x.sharding, x.mesh)


# -- tensors like another


def _like(x: Any, fill: Any, dtype: Any, requires_grad: bool, generator: Any, options: dict[str, Any]) -> ShardTensor:
    x = resolved(x)
    # torch's word on what else is asked for
    device = torch.empty_like(x.block.new_empty((0,) * x.ndim), **options).device
    if device != x.block.device:
        raise other_device(x, device)
    dtype = dtype or x.block.dtype
    if dtype.is_complex:
        parts = [_drawn(x, dtype.to_real(), fill(dtype.to_real()), generator) for _ in range(2)]
        # the parts of a standard normal number have half its variance
        local = torch.complex(*parts) * (0.5**0.5 if fill is normal else 1)
    else:
        local = _drawn(x, dtype, fill(dtype), generator)
    return wrap(local.requires_grad_(requires_grad), x.sharding, x.mesh)


@implements(torch.rand_like, sharded="local")
@_as_taken_by(torch.rand_like)
def rand_like(
    input: Any, *, dtype: Any = None, requires_grad: bool = False, generator: Any = None, **options: Any
) -> ShardTensor:
    """Uniform numbers in [0, 1), laid out as ``input``. Collective."""
    return _like(input, uniform, dtype, requires_grad, generator, options)


@implements(torch.randn_like, sharded="local")
@_as_taken_by(torch.randn_like)
def randn_like(
    input: Any, *, dtype: Any = None, requires_grad: bool = False, generator: Any = None, **options: Any
) -> ShardTensor:
    """Draw standard normal numbers, laid out as ``input``. Collective."""
    return _like(input, normal, dtype, requires_grad, generator, options)


@implements(torch.randint_like, sharded="local")
@_as_taken_by(torch.randint_like)
def randint_like(
    input: Any,
    low: int = 0,
    high: int | None = None,
    *,
    dtype: Any = None,
    requires_grad: bool = False,
    generator: Any = None,
    **options: Any,
) -> ShardTensor:
    """Integers in [low, high), laid out as ``input``. Collective."""
    low, high = (0, low) if high is None else (low, high)
    return _like(input, lambda _: integers(low, high), dtype, requires_grad, generator, options)


def _probabilities(x: ShardTensor, p: Any, dtype: torch.dtype, generator: Any) -> Tensor:
    """Return zeros and ones, one with probability ``p``, a number or a tensor. Collective."""
    if not isinstance(p, Tensor):
        return _drawn(x, torch.bool, chosen(p), generator).to(dtype)
    local = fitted(resolved(p), x.mesh, x.sharding).detach()
    return (_drawn(x, torch.float64, uniform(torch.float64), generator) < local).to(dtype)


@implements(torch.bernoulli, torch.Tensor.bernoulli, sharded="local")
@_as_taken_by(torch.bernoulli)
def bernoulli(input: Any, p: Any = None, *, generator: Any = None) -> ShardTensor:
    """Zeros and ones with the probabilities ``input``, or ``p``. Collective."""
    x = resolved(input)
    p = x if p is None else p
    if p is x and not bool(((x >= 0) & (x <= 1)).all()):
        raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true")
    drawn = _probabilities(x, p, x.block.dtype, generator)
    # of probabilities, a zero gradient, as in torch
    return wrap(drawn + 0 * x.block if p is x else drawn, x.sharding, x.mesh)


@implements(torch.normal, sharded="local")
@_as_taken_by(torch.normal)
def normal_of(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    """Draw normal numbers with given means and deviations. Collective."""
    given = [t for t in (mean, std) if isinstance(t, Tensor)]
    with torch.no_grad():
        if isinstance(std, Tensor) and bool((std < 0).any()):
            raise RuntimeError("normal expects all elements of std >= 0.0")
        like = mean + std  # the broadcast shape and layout
        drawn = randn_like(like, generator=generator) * std + mean
    for t in given:
        if differentiated(t):  # a zero gradient, as in torch
            drawn = drawn + torch.masked_fill(t, torch.ones((), dtype=torch.bool, device=t.device), 0)
    return drawn


def _uniform_of(x: ShardTensor, generator: Any) -> Tensor:
    """Return one uniform number in (0, 1) of 53 bits per cell of ``x``. Collective."""
    return _drawn(x, torch.float64, uniform(torch.float64), generator).add_(2.0**-54)


@implements(torch.poisson, sharded="local")
@_as_taken_by(torch.poisson)
def poisson(input: Any, generator: Any = None) -> ShardTensor:
    """Draw Poisson numbers with the rates ``input``. Collective."""
    x = resolved(input)
    if not bool((x >= 0).all()):
        raise RuntimeError("invalid Poisson rate, expected rate to be non-negative")
    rate, below = x.block.detach().double(), _uniform_of(x, generator)
    # the smallest count whose distribution function is above the number, by bisection
    low, high = torch.zeros_like(rate), (rate + 40 * rate.sqrt() + 60).floor()
    for _ in range(int(high.max()).bit_length() if high.numel() else 0):
        middle = ((low + high) / 2).floor()
        above = (torch.special.gammaincc(middle + 1, rate) > below) | (rate == 0)
        low, high = torch.where(above, low, middle + 1), torch.where(above, middle, high)
    drawn = low.to(x.block.dtype)
    return wrap(drawn + 0 * x.block if x.requires_grad else drawn, x.sharding, x.mesh)


@implements(torch.multinomial, torch.Tensor.multinomial, sharded="gathers")
def multinomial(input: Any, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Draw categories with the weights in the last dim. Collective.

    With replacement, where that dim is sharded, it is gathered.
    """
    x = resolved(input).detach()
    _check_weights(x, num_samples, replacement)
    last = x.ndim - 1
    if not replacement:  # the first arrivals of processes with these rates
        arrival = wrap(_drawn(x, torch.float64, exponential(1.0), generator), x.sharding, x.mesh)
        return (x.double() / arrival).topk(num_samples, last).indices
    x = whole_along(x, (last,))
    layout = resized(x.sharding, last, num_samples, x.sharding.sizes[last] and (num_samples,))
    local = torch.empty(layout.local_shape(x.mesh.coords), dtype=torch.float64)
    seed = draw_seed(x.mesh, generator)
    below = drawn_into(local, layout, x.mesh.coords, seed, uniform(torch.float64)).to(x.block.device)
    up_to = x.block.double().cumsum(last)
    # never a category without weight: the last one that has any ends the search
    found = torch.searchsorted(up_to, below * up_to[..., -1:], right=True)
    return wrap(torch.minimum(found, (up_to < up_to[..., -1:]).sum(last, keepdim=True)), layout, x.mesh)


def _check_weights(x: ShardTensor, num_samples: int, replacement: bool) -> None:
    if x.ndim not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if not x.is_floating_point():
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {x.dtype}")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > x.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    if not bool(((x >= 0) & (x < math.inf)).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if not bool((x.sum(-1) > 0).all()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


# -- in place


def _write(self: ShardTensor, values: Tensor) -> ShardTensor:
    return self.copy_(wrap(values, cotangent_layout(self.sharding), self.mesh))


@implements(torch.Tensor.uniform_, sharded="local")
@_as_taken_by(torch.Tensor.uniform_)
def uniform_(self: Any, a: float = 0.0, b: float = 1.0, *, generator: Any = None) -> ShardTensor:
    """Fill with uniform numbers in [a, b). Collective."""
    dtype = self.block.dtype
    return _write(self, _drawn(self, dtype, uniform(dtype), generator).mul_(b - a).add_(a))


@implements(torch.Tensor.normal_, sharded="local")
@_as_taken_by(torch.Tensor.normal_)
def normal_(self: Any, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> ShardTensor:
    """Fill with normal numbers. Collective."""
    return _write(self, _drawn(self, self.block.dtype, normal(self.block.dtype), generator).mul_(std).add_(mean))


@implements(torch.Tensor.bernoulli_, sharded="local")
@_as_taken_by(torch.Tensor.bernoulli_)
def bernoulli_(self: Any, p: Any = 0.5, *, generator: Any = None) -> ShardTensor:
    """Fill with zeros and ones. Collective."""
    return _write(self, _probabilities(resolved(self), p, self.block.dtype, generator))


@implements(torch.Tensor.exponential_, sharded="local")
@_as_taken_by(torch.Tensor.exponential_)
def exponential_(self: Any, lambd: float = 1.0, *, generator: Any = None) -> ShardTensor:
    """Fill with exponentially distributed numbers. Collective."""
    return _write(self, _drawn(self, self.block.dtype, exponential(lambd), generator))


@implements(torch.Tensor.cauchy_, sharded="local")
@_as_taken_by(torch.Tensor.cauchy_)
def cauchy_(self: Any, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> ShardTensor:
    """Fill with Cauchy numbers. Collective."""
    angle = _uniform_of(resolved(self), generator).sub_(0.5).mul_(math.pi)
    return _write(self, angle.tan_().mul_(sigma).add_(median))


@implements(torch.Tensor.log_normal_, sharded="local")
@_as_taken_by(torch.Tensor.log_normal_)
def log_normal_(self: Any, mean: float = 1.0, std: float = 2.0, *, generator: Any = None) -> ShardTensor:
    """Fill with numbers whose logarithm is normal. Collective."""
    return _write(self, _drawn(self, torch.float64, normal(torch.float64), generator).mul_(std).add_(mean).exp_())


@implements(torch.Tensor.geometric_, sharded="local")
@_as_taken_by(torch.Tensor.geometric_)
def geometric_(self: Any, p: float, *, generator: Any = None) -> ShardTensor:
    """Fill with the number of trials up to a first success of probability ``p``. Collective."""
    return _write(self, _uniform_of(resolved(self), generator).log_().div_(math.log1p(-p)).ceil_().clamp_(min=1))


@implements(torch.Tensor.random_, sharded="local")
@_as_taken_by(torch.Tensor.random_)
def random_(self: Any, *bounds: int, generator: Any = None, **named: int) -> ShardTensor:
    """Fill with integers in [from, to), or all that the dtype represents exactly. Collective."""
    low, high = named.get("from", 0), named.get("to")
    if len(bounds) == 1:
        high = bounds[0]
    elif bounds:
        low, high = bounds
    dtype = self.block.dtype
    if high is None:
        digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
        high = 2 ** digits[dtype] + 1 if dtype in digits else 2 if dtype == torch.bool else torch.iinfo(dtype).max
    return _write(self, _drawn(self, dtype, integers(low, high), generator))


@implements(F.gumbel_softmax, sharded="local")
@_as_taken_by(F.gumbel_softmax)
def gumbel_softmax(logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Any:
    """Sample from the Gumbel-Softmax distribution. Collective."""
    if eps != 1e-10:
        warnings.warn("`eps` parameter is deprecated and has no effect.", stacklevel=2)
    x = resolved(logits)
    noise = wrap(-_drawn(x, x.block.dtype, exponential(1.0)).log(), x.sharding, x.mesh)
    soft = ((x + noise) / tau).softmax(dim)
    if not hard:
        return soft
    own = normal_dim(dim, x.ndim)
    position = torch.arange(x.shape[own], device=x.block.device).view(-1, *[1] * (x.ndim - 1 - own))
    one_hot = (soft.detach().argmax(own, keepdim=True) == position).to(soft.dtype)
    return one_hot - soft.detach() + soft  # straight through
