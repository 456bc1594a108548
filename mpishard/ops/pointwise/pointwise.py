"""Pointwise operations: the torch op on the local blocks, after broadcasting operands to one layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mpishard.autograd.use import used_again
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, Replicate, Shard, layout_of, scaled, without_partial
from mpishard.ops.rule.autocast import autocast_enabled
from mpishard.ops.rule.dim import int_list, ints, origin, other_device, plain, settled
from mpishard.ops.rule.write import beside, prepare_write, require_writable, shares_memory, written_through
from mpishard.tensor.operand import broadcast_of, fitted, mesh_of, replicated_layout, resolved, used_beside
from mpishard.tensor.out import unfit
from mpishard.tensor.registry import BLOCKWISE, RULES, implements, name_of, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.strides import is_dense, is_known, laid, strides_of

_OUT_OF_PLACE = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp
clamp_max clamp_min clip clone conj_physical copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfcx erfinv
exp exp2 expit expm1 fill fix float_power floor floor_divide fmax fmin fmod frac gammaln ge gelu greater greater_equal
gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 i0e i1 i1e igamma igammac isclose isfinite isinf isnan
isneginf isposinf isreal ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_ndtr logaddexp
logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish mul
multiply mvlgamma nan_to_num ndtr ndtri ne neg negative nextafter not_equal polygamma pow psi rad2deg reciprocal relu
relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt
square sub subtract tan tanh tanhshrink threshold true_divide trunc type_as where xlog1py xlogy zeta complex
detach_copy _dirichlet_grad _standard_gamma_grad
""".split()

_DUNDERS = """
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__
__rlshift__ __rshift__ __rrshift__ __neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
""".split()

_IN_PLACE_DUNDERS = """
__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ __ilshift__
__irshift__
""".split()

_LIKE = ["empty_like", "full_like", "ones_like", "zeros_like"]

# what returns its argument, or a view of it, where there is nothing to do
_ALIASING = """
bfloat16 bool byte cdouble cfloat chalf char conj detach double float half imag int long positive real resolve_conj
resolve_neg short __pos__
""".split()

# in-place functions beside the trailing-underscore twin of every name above
_IN_PLACE = ["copy_", "fill_", "zero_", "masked_fill_"]


def _general(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor:
    args = tuple(resolved(a) for a in args)
    kwargs = {k: resolved(a) for k, a in kwargs.items()}
    mesh, out = broadcast_of([*args, *kwargs.values()])
    local = func(*[fitted(a, mesh, out) for a in args], **{k: fitted(a, mesh, out) for k, a in kwargs.items()})
    return wrap(local, out, mesh)


@lru_cache(maxsize=4096)
def _broadcast(*shapes: torch.Size) -> torch.Size:
    """Return the shape of a result: torch's own function takes ten times as long as what it is asked for."""
    return torch.broadcast_shapes(*shapes)


def _into(func: Any, *args: Any, out: Any, **kwargs: Any) -> ShardTensor:
    """Compute in the layout of ``out``, into its blocks. Collective where operands are laid out differently."""
    operands = [a for a in [*args, *kwargs.values()] if isinstance(a, Tensor)]
    shape = _broadcast(*[a.shape for a in operands])
    if shape != out.shape:  # torch would give `out` another shape, in place
        raise unfit(func, f"a ShardTensor of shape {tuple(shape)}", out)
    mesh = mesh_of([out, *operands])
    require_writable(out, name_of(func))
    prepare_write(out)
    layout = out.sharding

    def block(a: Any) -> Any:
        return beside(out.block, fitted(resolved(a), mesh, layout))

    func(*map(block, args), **{k: block(a) for k, a in kwargs.items()}, out=out.block)
    return out


def _rule(func: Any) -> Callable[..., ShardTensor]:
    def rule(x: Any = None, /, *rest: Any, **kwargs: Any) -> ShardTensor:
        # the usual cases first: this is what every operation pays
        if type(x) is ShardTensor:
            layout = x.sharding
            if not layout.partial_dims:
                if not kwargs:
                    if not rest:
                        return wrap(func(x.block), layout, x.mesh)
                    if len(rest) == 1:
                        y = rest[0]
                        kind = type(y)
                        if kind is ShardTensor:
                            if y.sharding is layout and y.mesh is x.mesh:
                                return wrap(func(x.block, y.block), layout, x.mesh)
                        elif kind is float or kind is int:
                            return wrap(func(x.block, y), layout, x.mesh)
                        elif kind is Tensor or kind is Parameter:
                            used = used_again(y, x.mesh, layout)
                            if used is None:
                                used = used_beside(y, x)
                            if used is not None:
                                return wrap(func(x.block, used), layout, x.mesh)
                if _are_beside(layout, x.mesh, (*rest, *kwargs.values()) if kwargs else rest):
                    others = [a.block if type(a) is ShardTensor else a for a in rest]
                    if kwargs:
                        kwargs = {k: a.block if type(a) is ShardTensor else a for k, a in kwargs.items()}
                    return wrap(func(x.block, *others, **kwargs), layout, x.mesh)
        return _general(func, rest if x is None else (x, *rest), kwargs)

    rule.into = partial(_into, func)  # type: ignore[attr-defined]
    return rule


def _in_place_rule(func: Any) -> Callable[..., Any]:
    def rule(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.pop("input", None)
        # the usual case first: all of an optimizer's step
        if (
            type(x) is ShardTensor
            and not x._gathered_view
            and not x.sharding.partial_dims
            and _are_beside(x.sharding, x.mesh, (*args[1:], *kwargs.values()))
        ):
            if x._halo is not None or x._root is not None:
                prepare_write(x)
            written = x.block
            others = [beside(written, a.block) if type(a) is ShardTensor else a for a in args[1:]]
            if kwargs:
                kwargs = {k: beside(written, a.block) if type(a) is ShardTensor else a for k, a in kwargs.items()}
            func(written, *others, **kwargs)
            return x
        if not isinstance(x, ShardTensor):
            return func(*map(plain, args), **{k: plain(a) for k, a in kwargs.items()})
        if x._gathered_view:
            if written_through(x, lambda y: rule(y, *args[1:], **kwargs)):
                return x
            require_writable(x, name_of(func))
        prepare_write(x)
        others = [resolved(a) for a in args[1:]]
        named = {k: resolved(a) for k, a in kwargs.items()}
        operands = [a for a in [x, *others, *named.values()] if isinstance(a, Tensor)]
        mesh_of(operands)
        shape = _broadcast(*[a.shape for a in operands])
        if shape != x.sharding.shape:
            raise RuntimeError(
                f"output with shape {list(x.sharding.shape)} doesn't match the broadcast shape {list(shape)}"
            )
        written = x.block

        def block(a: Any) -> Any:
            return beside(written, fitted(a, x.mesh, x.sharding))

        func(written, *map(block, others), **{k: block(a) for k, a in named.items()})
        return x

    return rule


def _are_beside(layout: Layout, mesh: CartMesh, operands: Sequence[Any]) -> bool:
    """Tell whether operands are numbers, or ShardTensors laid out so. Not collective."""
    for a in operands:
        if type(a) is ShardTensor:
            if a.sharding is not layout or a.mesh is not mesh:
                return False
        elif isinstance(a, Tensor):
            return False
    return True


def _inplace_flag_rule(func: Any, plain: Callable[..., ShardTensor], in_place: Callable[..., Any]) -> Any:
    """Rule of ``functional`` activations, which have an ``inplace`` argument."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        return in_place(*args, **kwargs) if kwargs.get("inplace") else plain(*args, **kwargs)

    return rule


def pointwise(*functions: Any) -> None:
    """Register functions whose result is the same function of the local blocks. Not collective."""
    for func in functions:
        implements(func, sharded="local")(_rule(func))
        BLOCKWISE.add(func)


def in_place(*functions: Any) -> None:
    """Register functions that write their result into the first argument. Not collective."""
    for func in functions:
        implements(func, sharded="local")(_in_place_rule(func))


def _like_rule(func: Any) -> Callable[..., ShardTensor]:
    def rule(input: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
        """Make a tensor laid out as ``input``; a Partial is not summed, as its values do not count. Not collective."""
        return _made(input, func(input.block, *args, **kwargs), without_partial(input.sharding))

    return rule


def _alias_rule(func: Any, name: str) -> Callable[..., Any]:
    plain, detaches, splits = _rule(func), name == "detach", name in ("real", "imag")

    def rule(x: Any = None, /, *rest: Any, **kwargs: Any) -> Any:
        if type(x) is not ShardTensor:
            return plain(x, *rest, **kwargs)
        x = settled(x)
        out = plain(x, *rest, **kwargs)
        if out.block is x.block:
            return x
        if splits and x.is_complex():
            out._trail = laid(x, x.sharding.shape, tuple(2 * s for s in strides_of(x)))
        elif x._trail is not None and shares_memory(out.block, x.block):
            out._trail = x._trail
        if x._gathered_view and (splits or shares_memory(out.block, x.block)):
            out._gathered_view, out._origin = True, origin(x, (name,))
        if x._halo is not None and detaches:
            out._halo = x._halo
        return out

    return rule


@implements(torch.Tensor.contiguous, sharded="local")
def contiguous(input: ShardTensor, memory_format: Any = torch.contiguous_format) -> ShardTensor:
    """Return the tensor itself where torch does, else a copy. Collective where it is Partial."""
    x = settled(input)
    unseen = x._gathered_view and not is_known(x)  # a rank that goes through to the source would go alone
    if x._halo is None and not unseen and is_dense(x, memory_format):
        return x  # its block may be cut out of a larger one all the same, by a rule: it shares that with earlier views
    local = x.block.contiguous(memory_format=memory_format)
    out = wrap(local.clone(memory_format=memory_format) if local is x.block else local, x.sharding, x.mesh)
    if unseen:
        out._gathered_view = True
    return out


_DIVIDING = """
div divide floor_divide fmod remainder div_ divide_ floor_divide_ fmod_ remainder_ __mod__ __rmod__ __floordiv__
__rfloordiv__ __imod__ __ifloordiv__
""".split()


def _dividing_rule(func: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of a division of integers, which torch refuses on the rank that meets a zero."""
    name = func.__name__
    always, reverse = not name.startswith("div"), name.startswith("__r")

    def checked(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            if always or kwargs.get("rounding_mode") is not None:
                first, *rest = (*args, *(v for k, v in kwargs.items() if k in ("input", "other")))
                _require_divisor(*((rest[0], first) if reverse else (first, rest[0])))
            return run(*args, **kwargs)

        return call

    both = checked(rule)
    if hasattr(rule, "into"):
        both.into = checked(rule.into)  # type: ignore[attr-defined]
    return both


def _require_divisor(x: Any, y: Any) -> None:
    """Raise on every rank where integers are divided by a zero on any. Collective where the divisor is sharded."""
    for t in (x, y):
        whole = not (t.is_floating_point() or t.is_complex()) if isinstance(t, Tensor) else isinstance(t, int)
        if not whole or (isinstance(t, Tensor) and (not t.numel() or t.device.type != "cpu")):
            return
    if bool((y == 0).any()) if isinstance(y, Tensor) else y == 0:
        raise RuntimeError("ZeroDivisionError")


def _where_rule(func: Any) -> Callable[..., Any]:
    plain = _rule(func)

    def rule(*args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) == 1 and func is not torch.Tensor.where:
            return torch.nonzero(*args, *kwargs.values(), as_tuple=True)
        return plain(*args, **kwargs)

    return rule


pointwise(*spellings(*_OUT_OF_PLACE, *_DUNDERS))
for _func in spellings(*_LIKE):
    implements(_func, sharded="local")(_like_rule(_func))
for _name in _ALIASING:
    for _func in spellings(_name):
        implements(_func, sharded="local")(_alias_rule(_func, _name))
for _func in spellings("where"):
    implements(_func, sharded="local")(_where_rule(_func))
pointwise(torch.polar)  # alone: torch.linalg.polar is another function
in_place(*spellings(*[f"{n}_" for n in _OUT_OF_PLACE], *_IN_PLACE_DUNDERS, *_IN_PLACE))
for _func in spellings(*_DIVIDING):
    implements(_func, sharded="local")(_dividing_rule(_func, RULES[_func]))
for _name in "relu relu6 elu selu celu leaky_relu hardtanh hardswish hardsigmoid silu mish threshold".split():
    _func = getattr(torch.nn.functional, _name)
    implements(_func, sharded="local")(_inplace_flag_rule(_func, _rule(_func), _in_place_rule(_func)))
for _attribute in ("real", "imag"):
    _get = getattr(torch.Tensor, _attribute).__get__
    implements(_get, sharded="local")(_alias_rule(lambda x, _attribute=_attribute: getattr(x, _attribute), _attribute))


@implements(torch.Tensor.to, sharded="local")
def to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert the blocks; a ShardTensor argument stands for its dtype and device. Not collective."""
    args = tuple(a.block if isinstance(a, ShardTensor) else a for a in args)
    kwargs = {k: a.block if isinstance(a, ShardTensor) else a for k, a in kwargs.items()}
    if not isinstance(self, ShardTensor):
        return self.to(*args, **kwargs)
    self = settled(self)
    local = self.block.to(*args, **kwargs)
    if local.device != self.block.device:
        raise other_device(self, local.device)
    return self if local is self.block else wrap(local, self.sharding, self.mesh)


@implements(torch.Tensor.type, sharded="local")
def type_of(self: ShardTensor, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:
    """Convert the blocks, or return the name of their type. Not collective."""
    if dtype is None:
        return self.block.type()
    like = self.block.new_empty(0).type(dtype)  # names of types, as "torch.FloatTensor", have no other reader
    return to(self, like)


@implements(torch.Tensor.type_as, sharded="local")
def type_as(self: Any, other: Any) -> Any:
    """Convert to the dtype of ``other``. Not collective."""
    return self.to(other.dtype)


@implements(torch.Tensor.cpu, sharded="local")
def cpu(self: ShardTensor, *_args: Any, **_kwargs: Any) -> ShardTensor:
    """Return the tensor where it lies on the CPU, else refuse: the mesh says where tensors live. Not collective."""
    if self.block.is_cpu:
        return self
    raise other_device(self, "cpu")


@implements(torch.Tensor.cuda, sharded="local")
def cuda(self: ShardTensor, *_args: Any, **_kwargs: Any) -> ShardTensor:
    """Return the tensor where it lies on a GPU, else refuse: the mesh says where tensors live. Not collective."""
    if self.block.is_cuda:
        return self
    raise other_device(self, "cuda")


@implements(torch.nn.functional.prelu, torch.prelu, torch.Tensor.prelu, sharded="local")
def prelu(input: ShardTensor, weight: Any) -> ShardTensor:
    """One slope, or one per channel: broadcast along dim 1. Collective where the weight is laid out differently."""
    if weight.dtype != input.dtype and not autocast_enabled(input.device.type):
        raise RuntimeError(f"prelu: Type promoting not supported. Got {input.dtype} and {weight.dtype}")
    if weight.ndim > 1:
        raise RuntimeError(f"prelu: Expected `weight` to be a scalar or 1D tensor, but got: ndim = {weight.ndim}")
    if weight.numel() not in (1, input.shape[1] if input.ndim > 1 else 1):
        raise RuntimeError(f"Mismatch of parameter numbers and input channel size: {weight.numel()}, {input.shape}")
    if weight.numel() != 1:
        weight = weight.reshape(-1, *[1] * (input.ndim - 2))
    elif not input.ndim:
        weight = weight.reshape(())
    # what is positive is no part of the product, and infinity none of the gradient of the weight
    return torch.where(input > 0, input, weight * input.clamp_max(0))


def _new_rule(name: str) -> Callable[..., Any]:
    def rule(self: ShardTensor, *given: Any, size: Any = None, **kwargs: Any) -> Any:
        """Make a tensor of this dtype, sharded as ``self`` where it has its extents, or multiples. Not collective.

        Not a plain tensor: random numbers that are written into it must be the same on every rank.
        """
        value: tuple[Any, ...] = (kwargs.pop("fill_value"),) if "fill_value" in kwargs else ()
        if name == "new_full" and not value and len(given) + (size is not None) > 1:
            given, value = given[:-1], given[-1:]
        shape = ints(given) if size is None else int_list(size)
        layout = _layout_like(self.sharding, shape)
        return _made(self, getattr(self.block, name)(layout.local_shape(self.mesh.coords), *value, **kwargs), layout)

    return rule


for _name in ("new_zeros", "new_ones", "new_full", "new_empty"):
    implements(getattr(torch.Tensor, _name), sharded="local")(_new_rule(_name))


def _layout_like(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout of a tensor of any extents, whose cells lie where those do that will be computed with them."""
    if shape == tuple(layout.shape):
        return without_partial(layout)
    # a matrix may be of pairs of cells, as torch makes it for Jacobians
    alike = layout.shard_dims if len(shape) == len(layout.shape) > 2 else ()
    times = {d: shape[d] // n for d in alike if (n := layout.shape[d]) and shape[d] > 0 and shape[d] % n == 0}
    kept = [p if type(p) is Shard and p.dim in times else Replicate() for p in layout.placements]
    sizes = {d: scaled(layout.sizes[d] or (), k) for d, k in times.items()}
    return layout_of(layout.mesh_shape, kept, shape, sizes)


@implements(torch.Tensor.new_tensor, sharded="local")
def new_tensor(self: ShardTensor, data: Any, **kwargs: Any) -> ShardTensor:
    """Make a Replicate tensor of data that is the same on every rank. Not collective."""
    local = self.block.new_tensor(data, **kwargs)
    return _made(self, local, replicated_layout(self.mesh, local.shape))


@implements(torch.Tensor.new, sharded="local")
def new(self: ShardTensor, *given: Any, size: Any = None) -> ShardTensor:
    """Make a tensor as torch's old constructor does: of extents, or of the values in a list. Not collective."""
    if any(isinstance(n, Tensor) and n.ndim for n in given):
        raise TypeError("new() takes extents or a list of values here, no tensors")
    if not given:
        return self.new_empty((0,) if size is None else size)  # type: ignore[no-any-return]
    if isinstance(given[0], (list, tuple)) and not isinstance(given[0], torch.Size):
        return new_tensor(self, *given)
    return self.new_empty(*given)  # type: ignore[no-any-return]


def _made(like: ShardTensor, local: Tensor, layout: Layout) -> ShardTensor:
    if local.device != like.block.device:
        raise other_device(like, local.device)
    return wrap(local, layout, like.mesh)
