"""Random operations: the same global result on every mesh, because each number is a hash of its global index."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.graph import recorded
from mpishard.autograd.linear import differentiated
from mpishard.comm import traced
from mpishard.layout import Layout, Replicate, Shard, layout_of, without_partial
from mpishard.ops.rule.agreement import checked
from mpishard.ops.rule.dim import normal_dim, other_device, resized, whole_along
from mpishard.tensor.operand import fitted, resolved
from mpishard.tensor.registry import Rule, implements, tensors_in
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.stream import (
    Fill,
    chosen,
    draw_seed,
    drawn_into,
    exponential,
    integers,
    normal,
    open_uniform,
    uniform,
)


def drawn_block(
    x: ShardTensor,
    dtype: torch.dtype,
    fill: Fill,
    generator: Any = None,
    layout: Layout | None = None,
    parameters: Sequence[Tensor] = (),
) -> Tensor:
    """Return this rank's block of a random tensor laid out as ``x`` (or ``layout``). Collective.

    What the ``fill`` takes as ``parameters`` are blocks of the same layout.
    """
    where, mesh, device = layout or x.sharding, x.mesh, x.block.device
    shape = where.local_shape(mesh.coords)

    def draw(*parameters: Tensor) -> Tensor:
        seed = draw_seed(mesh, generator)
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        out, given = torch.empty(shape, dtype=dtype, device="cpu"), [p.to("cpu", torch.float64) for p in parameters]
        return drawn_into(out, where, mesh.coords, seed, fill, given).to(device)

    if traced.recording is not None:
        return traced.recording.call("random", draw, parameters, shape, dtype=dtype, device=device)
    return draw(*parameters)


# -- what torch refuses

_KEPT = 4096
_taken: set[Any] = set()


def draws(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule; what torch refuses of dtypes and numbers is refused. Not collective.

    Torch is asked by tensors of one cell each, once for all calls alike: a rank without cells must refuse, too.
    """
    function = functions[0]

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def call(*args: Any, **kwargs: Any) -> Any:
            key = function, *map(_kind, args), *((name, _kind(a)) for name, a in kwargs.items())
            if key not in _taken:
                given = tensors_in([*args, *kwargs.values()])
                where = next(x for x in given if isinstance(x, ShardTensor)).block.device
                named = {name: a for name, a in kwargs.items() if name not in ("generator", "device")}
                cuda = [where] if where.type == "cuda" else []
                with torch.random.fork_rng(cuda), torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of one cell each, torch's binomial resizes its result
                    function(*map(_one_cell, args), **{name: _one_cell(a) for name, a in named.items()})
                if len(_taken) > _KEPT:
                    _taken.clear()
                _taken.add(key)
            return rule(*args, **kwargs)

        return implements(*functions, sharded="local")(call)

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
    """Return the layout of one number per feature: the first ``leading`` dims (all but some, if < 0), ones after."""
    leading += layout.ndim if leading < 0 else 0
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
    kept = drawn_block(x, torch.bool, chosen(1 - p), layout=layout)
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


def _dropout_rule(name: str, leading: int | None, alpha: bool, in_place: bool) -> Rule:
    usual = {"dropout2d": (3, 4), "dropout3d": (4, 5)}.get(name)

    def rule(
        input: Any, p: float = 0.5, training: bool = not alpha, inplace: bool = in_place, *, train: bool | None = None
    ) -> ShardTensor:
        """Set cells, or whole features, to zero with probability ``p``, and scale the others. Collective in training.

        Those called alpha are moved such that mean and variance stay (for SELU).
        """
        features = leading
        if usual and input.ndim not in usual:
            warnings.warn(f"{name}: Received a {input.ndim}-D input, which is deprecated", stacklevel=3)
            features = max(leading or 0, 1)  # as torch takes them
        return _dropped(input, p, training if train is None else train, inplace, features, alpha)

    return rule


# how many dims number the features, whose cells are dropped together; and whether it is an alpha dropout
for _name, _leading, _alpha in (
    ("dropout", None, False),
    ("dropout1d", -1, False),
    ("dropout2d", 2, False),
    ("dropout3d", -3, False),
    ("feature_dropout", 2, False),
    ("alpha_dropout", None, True),
    ("feature_alpha_dropout", 2, True),
):
    for _func in (getattr(F, _name, None), getattr(torch, _name, None), getattr(torch, f"{_name}_", None)):
        if _func is not None:
            draws(_func)(_dropout_rule(_name, _leading, _alpha, _func.__name__.endswith("_")))


@draws(F.rrelu, torch.rrelu)
def rrelu(
    input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> ShardTensor:
    """Leaky ReLU with random slopes in training. Collective in training."""
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)  # type: ignore[return-value]
    x = resolved(input)
    slopes = drawn_block(x, x.block.dtype, uniform(x.block.dtype)).mul_(upper - lower).add_(lower)
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
        parts = [drawn_block(x, dtype.to_real(), fill(dtype.to_real()), generator) for _ in range(2)]
        # the parts of a standard normal number have half its variance
        local = torch.complex(*parts) * (0.5**0.5 if fill is normal else 1)
    else:
        local = drawn_block(x, dtype, fill(dtype), generator)
    return wrap(recorded(local, requires_grad), x.sharding, x.mesh)


@draws(torch.rand_like)
def rand_like(
    input: Any, *, dtype: Any = None, requires_grad: bool = False, generator: Any = None, **options: Any
) -> ShardTensor:
    """Uniform numbers in [0, 1), laid out as ``input``. Collective."""
    return _like(input, uniform, dtype, requires_grad, generator, options)


@draws(torch.randn_like)
def randn_like(
    input: Any, *, dtype: Any = None, requires_grad: bool = False, generator: Any = None, **options: Any
) -> ShardTensor:
    """Draw standard normal numbers, laid out as ``input``. Collective."""
    return _like(input, normal, dtype, requires_grad, generator, options)


@draws(torch.randint_like)
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


def _check_probabilities(p: Tensor) -> None:
    if not bool(((p >= 0) & (p <= 1)).all()):
        raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true")


def _probabilities(x: ShardTensor, p: Any, dtype: torch.dtype, generator: Any) -> Tensor:
    """Return zeros and ones, one with probability ``p``, a number or a tensor. Collective."""
    if not isinstance(p, Tensor):
        return drawn_block(x, torch.bool, chosen(p), generator).to(dtype)
    own = resolved(p)
    if isinstance(own, ShardTensor):
        own = _checked(_check_probabilities, own)
    else:
        _check_probabilities(own)
    local = fitted(own, x.mesh, x.sharding).detach()
    return (drawn_block(x, torch.float64, uniform(torch.float64), generator) < local).to(dtype)


@draws(torch.bernoulli, torch.Tensor.bernoulli)
def bernoulli(input: Any, p: Any = None, *, generator: Any = None) -> ShardTensor:
    """Zeros and ones with the probabilities ``input``, or ``p``. Collective."""
    x = resolved(input)
    if p is None:
        p = x = _checked(_check_probabilities, x)
    drawn = _probabilities(x, p, x.block.dtype, generator)
    if differentiated(x):  # a zero gradient, as in torch
        every = torch.ones((), dtype=torch.bool, device=x.block.device)
        drawn = drawn + torch.masked_fill(x.block, every, 0)
    return wrap(drawn, x.sharding, x.mesh)


@draws(torch.normal)
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


def _checked(check: Callable[[Tensor], None], x: ShardTensor) -> ShardTensor:
    """Return ``x`` whose blocks are good. Collective over the mesh dims that shard it."""
    return wrap(checked(check, x.mesh, (x.sharding,), x.block), x.sharding, x.mesh)


def _uniform_of(x: ShardTensor, generator: Any) -> Tensor:
    """Return one uniform number in (0, 1) of 53 bits per cell of ``x``. Collective."""
    return drawn_block(x, torch.float64, open_uniform, generator)


@draws(torch.poisson)
def poisson(input: Any, generator: Any = None) -> ShardTensor:
    """Draw Poisson numbers with the rates ``input``, which are finite. Collective.

    Of an infinite rate torch's count is the smallest integer that there is.
    """

    def check(x: Tensor) -> None:
        if not bool((x >= 0).all()):
            raise RuntimeError("invalid Poisson rate, expected rate to be non-negative")
        if not bool((x < math.inf).all()):
            raise RuntimeError("invalid Poisson rate, expected rate to be finite")

    x = _checked(check, resolved(input))
    rate, below = x.block.detach().double(), _uniform_of(x, generator)
    # the smallest count whose distribution function is above the number, by bisection
    low, high = torch.zeros_like(rate), (rate + 40 * rate.sqrt() + 60).floor()
    for _ in range(int(high.max()).bit_length() if high.numel() else 0):
        middle = (low + (high - low) / 2).floor()  # their sum may be too large
        above = (torch.special.gammaincc(middle + 1, rate) > below) | (rate == 0)
        low, high = torch.where(above, low, middle + 1), torch.where(above, middle, high)
    drawn = low.to(x.block.dtype)
    return wrap(drawn + 0 * x.block if x.requires_grad else drawn, x.sharding, x.mesh)


@implements(torch.multinomial, torch.Tensor.multinomial, sharded="gathers")
def multinomial(input: Any, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Draw categories with the weights in the last dim. Collective.

    With replacement, where that dim is sharded, it is gathered. There may be more than torch's 2^24 categories.
    """
    x = resolved(input).detach()
    x = _weights(x, num_samples, replacement)
    last = x.ndim - 1
    if not replacement:  # the first arrivals of processes with these rates
        arrival = wrap(drawn_block(x, torch.float64, exponential(1.0), generator), x.sharding, x.mesh)
        return (x.double() / arrival).topk(num_samples, last).indices
    x = whole_along(x, (last,))
    layout = resized(x.sharding, last, num_samples, x.sharding.sizes[last] and (num_samples,))
    local = torch.empty(layout.local_shape(x.mesh.coords), dtype=torch.float64, device="cpu")
    seed = draw_seed(x.mesh, generator)
    below = drawn_into(local, layout, x.mesh.coords, seed, uniform(torch.float64)).to(x.block.device)
    up_to = x.block.double().cumsum(last)
    # never a category without weight: the last one that has any ends the search
    found = torch.searchsorted(up_to, below * up_to[..., -1:], right=True)
    return wrap(torch.minimum(found, (up_to < up_to[..., -1:]).sum(last, keepdim=True)), layout, x.mesh)


def _weights(x: ShardTensor, num_samples: int, replacement: bool) -> ShardTensor:
    """Return weights that categories may have. Collective."""
    if x.ndim not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if not x.is_floating_point():
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {x.dtype}")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > x.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")

    def check(x: Tensor) -> None:
        if not bool(((x >= 0) & (x < math.inf)).all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def check_sums(sums: Tensor) -> None:
        if not bool((sums > 0).all()):
            raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")

    x = _checked(check, x)
    _checked(check_sums, resolved(x.sum(-1)))
    return x


# -- in place


def _random_integers(x: Any, dtype: torch.dtype, generator: Any, *bounds: int, **named: int) -> Tensor:
    """Return integers in [from, to), or all that the dtype represents exactly. Collective."""
    low, high = named.get("from", 0), named.get("to")
    if len(bounds) == 1:
        high = bounds[0]
    elif bounds:
        low, high = bounds
    if high is None:
        digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
        high = 2 ** digits[dtype] + 1 if dtype in digits else 2 if dtype == torch.bool else torch.iinfo(dtype).max
    return drawn_block(x, dtype, integers(low, high), generator)


def _of_parts(dtype: torch.dtype, draw: Callable[[torch.dtype], Tensor]) -> Tensor:
    """Return numbers that are drawn, of complex ones their parts, one after the other. Collective as ``draw`` is."""
    return torch.complex(draw(dtype.to_real()), draw(dtype.to_real())) if dtype.is_complex else draw(dtype)


def _uniform(x: Any, dtype: torch.dtype, generator: Any, *bounds: float, **named: float) -> Tensor:
    a, b = (*bounds, *(named.get(name, given) for name, given in (("from", 0.0), ("to", 1.0))[len(bounds) :]))
    return _of_parts(dtype, lambda real: drawn_block(x, real, uniform(real), generator).mul_(b - a).add_(a))


def _normal(x: Any, dtype: torch.dtype, generator: Any, mean: float = 0.0, std: float = 1.0) -> Tensor:
    drawn = _of_parts(dtype, lambda real: drawn_block(x, real, normal(real), generator))
    # the parts of a complex number have half its variance
    return drawn.mul_(std * 0.5**0.5 if dtype.is_complex else std).add_(mean)


# the values of each, of the tensor, its dtype, a generator, and torch's arguments
_FILLS: dict[str, Callable[..., Tensor]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "bernoulli_": lambda x, dtype, g, p=0.5: _probabilities(resolved(x), p, dtype, g),
    "exponential_": lambda x, dtype, g, lambd=1.0: drawn_block(x, dtype, exponential(lambd), g),
    "cauchy_": lambda x, _, g, median=0.0, sigma=1.0: (
        _uniform_of(resolved(x), g).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)
    ),
    "log_normal_": lambda x, _, g, mean=1.0, std=2.0: (
        drawn_block(x, torch.float64, normal(torch.float64), g).mul_(std).add_(mean).exp_()
    ),
    # trials up to a first success
    "geometric_": lambda x, _, g, p: _uniform_of(resolved(x), g).log_().div_(math.log1p(-p)).ceil_().clamp_(min=1),
    "random_": _random_integers,
}


def _fill_rule(values: Callable[..., Tensor]) -> Rule:
    def rule(self: Any, *args: Any, generator: Any = None, **named: Any) -> ShardTensor:
        """Fill with random numbers. Collective."""
        drawn = values(self, self.block.dtype, generator, *args, **named)
        return self.copy_(wrap(drawn, without_partial(self.sharding), self.mesh))  # type: ignore[no-any-return]

    return rule


for _name, _values in _FILLS.items():
    draws(getattr(torch.Tensor, _name))(_fill_rule(_values))


@draws(F.gumbel_softmax)
def gumbel_softmax(logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Any:
    """Sample from the Gumbel-Softmax distribution. Collective."""
    if eps != 1e-10:
        warnings.warn("`eps` parameter is deprecated and has no effect.", stacklevel=2)
    x = resolved(logits)
    noise = wrap(-drawn_block(x, x.block.dtype, exponential(1.0)).log(), x.sharding, x.mesh)
    soft = ((x + noise) / tau).softmax(dim)
    if not hard:
        return soft
    own = normal_dim(dim, x.ndim)
    position = torch.arange(x.shape[own] if x.ndim else 1, device=x.block.device)
    position = position.view(-1, *[1] * (x.ndim - 1 - own)) if x.ndim else position[0]
    one_hot = (soft.detach().argmax(own, keepdim=True) == position).to(soft.dtype)
    return one_hot - soft.detach() + soft  # straight through
