"""The one autograd Function of the package: every communication op is linear and knows its adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.autograd import Function, forward_ad
from torch.autograd.function import _SingleLevelFunction

from mpishard.autograd.batch import vmap_refused
from mpishard.autograd.graph import packs
from mpishard.comm.memory.buffer import transforms_active


class LinearOp(Protocol):
    """A linear communication operation on plain tensors.

    Calling it communicates and returns a tensor; autograd does not see what happens inside. The tensor that
    it returns shares no memory with its argument, unless it is the argument itself (an identity).
    ``op.adjoint`` is the operation that carries the cotangent back, and ``op.adjoint.adjoint`` is the linear part
    of ``op`` (``op`` itself, unless it also fills in a constant).
    """

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Communicate."""
        ...

    @property
    def adjoint(self) -> LinearOp:
        """Operation of the cotangent."""
        ...


LocalMap = Callable[[torch.Tensor], torch.Tensor]


class Step:
    """One half of an adjoint pair.

    ``cotangent`` says, of mesh dims, whether ranks along them find parts of a sum (True) or the same (False) for the
    argument; None: its caller noted it (see `mpishard.autograd.plain`).
    """

    __slots__ = ("adjoint", "cotangent", "run")
    adjoint: Step

    def __init__(self, run: LocalMap) -> None:
        self.run = run
        self.cotangent: tuple[tuple[int, bool], ...] | None = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Communicate."""
        return self.run(x)


def apart(*operands: torch.Tensor | None) -> list[Any]:
    """Return aliases of operands: a gradient with respect to one has no path through another. Not collective."""
    return [None if t is None else t.view_as(t) for t in operands]


def differentiated_again() -> bool:
    """Tell whether a backward must be `again`: it is itself differentiated, or carries a tangent. Not collective."""
    return torch.is_grad_enabled() or in_transform()


def again(
    f: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor | None], needs: Sequence[bool], g: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the cotangents of ``operands`` for that of ``f(*operands)``, as operations that autograd knows.

    Collective as ``f`` and its backward are. For the backward of a Function that has a faster way of its own.

    Parameters
    ----------
    f
        The Function, written as a composition.
    operands
        Its operands; None where one is left out.
    needs
        Whose cotangents are wanted; None is returned for the others.
    g
        Cotangent of the result.
    """
    with torch.enable_grad():
        aliases = apart(*operands)
        y = f(*aliases)
    wanted = [t for t, n in zip(aliases, needs) if n]
    create_graph = torch.is_grad_enabled()
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=create_graph, materialize_grads=True))
    return [next(found) if n else None for n in needs]


def same(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``: the half of a pair that moves nothing. Not collective."""
    return x


def pair(forward: LocalMap, backward: LocalMap) -> Step:
    """Return the step ``forward`` whose adjoint is ``backward``, and the reverse. Not collective."""
    a, b = Step(forward), Step(backward)
    a.adjoint, b.adjoint = b, a
    return a


_unsafe_view = torch.ops.aten._unsafe_view.default


class Chosen:
    """Values chosen among cells, as a linear op: ``collect`` is the derivative, given which, ``spread`` its adjoint."""

    __slots__ = ("_collect", "_run", "_spread")

    def __init__(self, run: LocalMap, spread: LocalMap, collect: LocalMap) -> None:
        self._run, self._spread, self._collect = run, spread, collect

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Communicate."""
        return self._run(x)

    @property
    def adjoint(self) -> Chosen:
        """Operation of the cotangent, made when asked for: a pair, each knowing the other, would outlive its use."""
        return Chosen(self._spread, self._collect, self._spread)


class Linear(Function):
    """Backward is the adjoint op, forward mode is the op itself, and both are differentiable again.

    Gradients that autograd leaves undefined arrive as zeros, so every rank communicates.
    """

    # forward with ctx, not setup_context: binding arguments by signature would cost three times the node
    @staticmethod
    def forward(ctx: Any, op: LinearOp, x: torch.Tensor) -> torch.Tensor:
        """Run the op."""
        ctx.op = op
        ctx.packed = packs()
        if ctx.packed:
            # a checkpoint makes its calls again when what it keeps is first asked for: here at the latest, where all
            # ranks are, as the nodes of torch before may differ between them
            ctx.save_for_backward(x.new_empty(0))
        y = op(x)
        # of what is a view when it comes from a node, torch lets nobody write into it
        return _unsafe_view(y, y.shape) if y._is_view() and y is not x else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Carry the cotangent back. Collective as the op is."""
        if ctx.packed:
            ctx.saved_tensors  # noqa: B018
        back, g = ctx.op.adjoint, grads[0]
        if g._is_zerotensor():  # type: ignore[attr-defined]
            g = g.clone()  # torch's zeros that own no memory, as of `sgn`
        return None, apply(back, g) if g.requires_grad or in_transform() else back(g)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        """Send the tangent the same way. Collective as the op is."""
        # not the op itself: a window that fills the outside with a value is linear only without that value
        return apply(ctx.op.adjoint.adjoint, tangents[1])


class TransformedLinear(Linear):
    """The same under ``torch.func`` transforms, which insist on ``setup_context``."""

    @staticmethod
    def forward(op: LinearOp, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Run the op."""
        return op(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: torch.Tensor) -> None:
        """Keep the op."""
        ctx.op, ctx.packed = inputs[0], False

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        """Refuse."""
        raise vmap_refused()


def in_transform() -> bool:
    """Tell whether a forward level or a ``torch.func`` transform is active. Not collective."""
    return forward_ad._current_level >= 0 or transforms_active()


def differentiated(x: torch.Tensor) -> bool:
    """Tell whether a derivative through ``x`` may be asked for, in reverse or in forward mode. Not collective.

    Inside a forward level or a ``torch.func`` transform every tensor of real or complex numbers counts: a dual's
    primal, and a value made of what an outer transform differentiates, have ``requires_grad=False``.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return in_transform() and (x.is_floating_point() or x.is_complex())


def node_of(function: type[Function]) -> Callable[..., Any]:
    """Return how a Function of blocks is applied where no transform is active. Not collective.

    ``Function.apply`` looks for transforms first, and then for ShardTensors.
    """
    return super(_SingleLevelFunction, function).apply  # type: ignore[misc,no-any-return]


_node = node_of(Linear)


def apply(op: LinearOp, x: torch.Tensor) -> torch.Tensor:
    """Apply a linear communication op to a plain tensor, differentiably.

    Collective as the op is. All ranks must agree on whether ``x`` requires a gradient, and on whether the
    result takes part in what is differentiated: the adjoint communicates too.

    Parameters
    ----------
    op
        The operation.
    x
        Plain tensor.

    Returns
    -------
    torch.Tensor
        ``op(x)``, with ``op.adjoint`` as its backward and ``op`` itself as its forward-mode derivative.

    Raises
    ------
    UnsupportedOperationError
        Inside ``torch.vmap``.

    Notes
    -----
    Adjoint: ``op.adjoint``.
    """
    if transforms_active():
        return TransformedLinear.apply(op, x)
    if forward_ad._current_level < 0 and not x.requires_grad:
        return op(x)
    return _node(op, x)
