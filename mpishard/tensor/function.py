"""A user's own ``autograd.Function`` on ShardTensors: a node of the blocks' graph, whose methods see ShardTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, _SingleLevelFunction, once_differentiable

from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedOperationError
from mpishard.layout import Layout
from mpishard.tensor.hook import local_cotangent
from mpishard.tensor.operand import shard_on
from mpishard.tensor.shard_tensor import ShardTensor, global_cotangent, wrap

Kind = tuple[Layout, CartMesh] | None  # of a ShardTensor; None of anything else


def apply_function(function: Any, args: Sequence[Any]) -> Any:
    """Return what ``function.apply(*args)`` gives of the whole tensors. Collective as its methods are.

    Its ``forward`` computes without a graph, its ``backward`` gets the cotangents of the whole results and returns
    those of the whole arguments: with rules for what it calls, both are what they are in one process.

    Raises
    ------
    UnsupportedOperationError
        It writes into its arguments.

    Notes
    -----
    Adjoint: its ``backward``. What it returns for a plain argument is summed over the ranks where it is a ShardTensor.
    """
    call = _Call(function, [kind_of(x) for x in args])
    found = _Node.apply(call, *map(block_of, args))
    out = tuple(map(as_it_was, found, call.out))
    return out if call.several else out[0]


def kind_of(x: Any) -> Kind:
    """Return what makes a ShardTensor of its block again. Not collective."""
    return (x.sharding, x.mesh) if isinstance(x, ShardTensor) else None


def block_of(x: Any) -> Any:
    """Return the block of a ShardTensor, and anything else as it is. Not collective."""
    return x.block if isinstance(x, ShardTensor) else x


def as_it_was(block: Any, kind: Kind) -> Any:
    """Return the ShardTensor of a block, and anything else as it is. Not collective."""
    return block if kind is None or block is None else wrap(block, *kind)


class _Call:
    """One call of a function: what its arguments and results are, and the context that its methods share."""

    def __init__(self, function: Any, given: list[Kind]) -> None:
        self.function, self.given, self.context = function, given, _Context()
        self.out: list[Kind] = []
        self.saved: list[Kind] = []
        self.several = False

    def forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        function, context = self.function, self.context
        if function.setup_context is _SingleLevelFunction.setup_context:
            results = function.forward(context, *args)
        else:
            results = function.forward(*args)
            function.setup_context(context, tuple(args), results)
        if getattr(context, "dirty_tensors", ()):
            raise UnsupportedOperationError(
                f"autograd.Function {function.__module__}.{function.__qualname__} with ShardTensors: mark_dirty",
                expected="a function that returns new tensors",
                got="one that writes into its arguments",
                fix="let forward compute a new tensor",
            )
        self.several = isinstance(results, tuple)
        return results if self.several else (results,)


class _Context(FunctionCtx):
    """What the function's methods get as ``ctx``."""

    needs_input_grad: tuple[bool, ...] = ()
    _unpack: Callable[[], tuple[Any, ...]] | None = None

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        if self._unpack is not None:
            return self._unpack()
        # in `jvp` torch means by this name what was saved for it
        return getattr(self, "saved_for_forward", ()) or getattr(self, "to_save", ())


class _Node(Function):
    """The function on blocks. Undefined cotangents arrive as zeros, so that its backward runs on every rank."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *blocks: Any) -> tuple[Any, ...]:
        context = call.context
        context.needs_input_grad = ctx.needs_input_grad[1:]
        results = call.forward(list(map(as_it_was, blocks, call.given)))
        call.out = list(map(kind_of, results))
        kept = getattr(context, "to_save", None) or ()
        call.saved = list(map(kind_of, kept))
        ctx.save_for_backward(*map(block_of, kept))
        context.to_save = ()
        ctx.mark_non_differentiable(*map(block_of, getattr(context, "non_differentiable", ())))
        ctx.call = call
        return tuple(map(block_of, results))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = (_backward_once if _is_once(_vjp_of(ctx.call.function)) else _backward)(ctx, *grads)
        return found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        call = ctx.call
        found = call.function.jvp(call.context, *map(as_it_was, tangents[1:], call.given))
        return tuple(map(_tangent, found if isinstance(found, tuple) else (found,), call.out))


def _vjp_of(function: Any) -> Any:
    """Return its backward, by either of the names that torch has for it. Not collective."""
    return function.backward if function.vjp is Function.vjp else function.vjp


def _backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    call, context = ctx.call, ctx.call.context
    context._unpack = lambda: tuple(map(as_it_was, ctx.saved_tensors, call.saved))
    try:
        found = _vjp_of(call.function)(
            context, *(g if k is None or g is None else global_cotangent(g, *k) for g, k in zip(grads, call.out))
        )
    finally:
        context._unpack = None  # it knows ctx, which knows the context
    found = found if isinstance(found, tuple) else (found,)
    # as many as it returned: torch says where they are not as many as the arguments
    kinds = [*call.given, *[None] * len(found)]
    return None, *map(_cotangent, found, kinds)


# torch's decorator makes of results tensors that refuse a derivative, which must be blocks
_backward_once = once_differentiable(_backward)


def _is_once(backward: Any) -> bool:
    """Tell whether a function's backward is, under other decorators, ``once_differentiable``. Not collective."""
    while backward is not None:
        if getattr(backward, "__code__", None) is _backward_once.__code__:
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False


def _cotangent(g: Any, kind: Kind) -> Any:
    """Return what autograd takes as the cotangent of an argument. Collective where it lies elsewhere."""
    if kind is not None:
        return local_cotangent(g, *kind)
    return g.full_tensor() if isinstance(g, ShardTensor) else g


def _tangent(t: Any, kind: Kind) -> Any:
    if kind is None or not isinstance(t, Tensor):
        return t
    return shard_on(t, kind[1], kind[0]) if isinstance(t, ShardTensor) else t
