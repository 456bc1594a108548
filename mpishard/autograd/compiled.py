"""Operations of which values say what travels, in a compiled program: the compiler keeps each pass of one whole.

Its graph has no shapes that depend on values. So what such an operation does, its plan among it, is done anew in every
call, as one operation of the graph whose result has a shape that layouts tell; and so is its backward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.linear import LinearOp, apply
from mpishard.comm import traced


def linear_by_values(
    name: str, op: Callable[..., LinearOp], x: Tensor, values: Sequence[Tensor], shape: Sequence[int]
) -> Tensor:
    """Return ``op(*values)(x)``, with the adjoint of that operation as its backward. Collective as it is.

    Parameters
    ----------
    name
        What it is called in a compiled program, the same on all ranks.
    op
        Plans the operation from the values; not differentiated.
    x, values
        Tensors of this rank.
    shape
        Of the result, which has the dtype of ``x``.
    """
    if traced.recording is None:
        return apply(op(*values), x)
    return _LinearByValues.apply(name, op, tuple(shape), x, *values)  # type: ignore[no-any-return,no-untyped-call]


def by_values(name: str, f: Callable[..., Tensor], operands: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return ``f(*operands)``, of the dtype of the first. Collective as ``f`` and its backward are.

    All that is differentiated is among the operands, and of one dtype. A compiled program keeps the graph that eager
    autograd makes of ``f`` for as long as it keeps what it saved for backward itself.
    """
    if traced.recording is None:
        return f(*operands)
    return _ByValues.apply(name, f, tuple(shape), *operands)  # type: ignore[no-any-return,no-untyped-call]


class _LinearByValues(Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, op: Callable[..., LinearOp], shape: tuple[int, ...], x: Tensor, *values: Tensor
    ) -> Tensor:
        assert traced.recording is not None
        made: list[Any] = []
        needed = ctx.needs_input_grad[3]

        def run(x: Tensor, *values: Tensor) -> Tensor:
            planned = op(*values)
            if needed:
                made[:] = [planned]
            return planned(x)

        y = traced.recording.call(name, run, [x, *values], shape)
        if needed:
            ctx.name, ctx.op, ctx.shape = name, op, x.shape
            ctx.save_for_backward(_ticket(name, made), *values)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert traced.recording is not None
        op, (ticket, *values) = ctx.op, ctx.saved_tensors

        def run(g: Tensor, ticket: Tensor, *values: Tensor) -> Tensor:
            return (_kept.get(int(ticket)) or op(*values)).adjoint(g)  # type: ignore[no-any-return]

        g = traced.recording.call(f"adjoint of {ctx.name}", run, [grads[0], ticket, *values], ctx.shape)
        return None, None, None, g, *[None] * len(values)


class _ByValues(Function):
    @staticmethod
    def forward(ctx: Any, name: str, f: Callable[..., Tensor], shape: tuple[int, ...], *operands: Tensor) -> Tensor:
        assert traced.recording is not None
        needs = ctx.needs_input_grad[3:]
        if not any(needs):
            return traced.recording.call(name, torch.no_grad()(f), operands, shape)
        made: list[Any] = []

        def run(*operands: Tensor) -> Tensor:
            made[:] = [_Graph(f, operands, needs)]
            return made[0].result.detach().clone()  # type: ignore[no-any-return]

        y = traced.recording.call(name, run, operands, shape)
        ctx.name, ctx.f, ctx.needs = name, f, needs
        ctx.save_for_backward(_ticket(name, made), *operands)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert traced.recording is not None
        f, needs, (ticket, *operands) = ctx.f, ctx.needs, ctx.saved_tensors
        wanted = [i for i, needed in enumerate(needs) if needed]

        def run(g: Tensor, ticket: Tensor, *operands: Tensor) -> Tensor:
            graph = _kept.get(int(ticket)) or _Graph(f, operands, needs)
            # the operation has one result
            return torch.cat([part.reshape(-1) for part in graph.cotangents(g)])

        lengths = [operands[i].numel() for i in wanted]
        read = [grads[0], ticket, *operands]
        flat = traced.recording.call(f"adjoint of {ctx.name}", run, read, (sum(lengths),))
        out: list[Tensor | None] = [None] * len(needs)
        for i, part in zip(wanted, flat.split(lengths)):
            out[i] = part.view(operands[i].shape)
        return None, None, None, *out


class _Graph:
    """What eager autograd makes of a call in a compiled program."""

    def __init__(self, f: Callable[..., Tensor], operands: Sequence[Tensor], needs: Sequence[bool]) -> None:
        leaves = [x.detach().requires_grad_(needed) for x, needed in zip(operands, needs)]
        self._inputs = [x for x in leaves if x.requires_grad]
        # the program writes other values where operands were, as soon as it has read them
        memory = {x.untyped_storage().data_ptr() for x in operands}

        def pack(x: Tensor) -> Tensor:
            return x.clone() if x.untyped_storage().data_ptr() in memory else x

        with _above_autograd(), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            self.result = f(*leaves)

    def cotangents(self, g: Tensor) -> Sequence[Tensor]:
        """Return those of the operands that need one. Collective as the backward of the call."""
        return torch.autograd.grad(self.result, self._inputs, g, retain_graph=True, materialize_grads=True)


def _above_autograd() -> AbstractContextManager[Any]:
    """Have torch record what runs inside: a compiled program runs below autograd. Not collective."""
    keys, c = torch._C.DispatchKey, torch._C
    include = c._dispatch_tls_local_include_set().add(keys.ADInplaceOrView)
    exclude = c._dispatch_tls_local_exclude_set().remove(keys.AutogradFunctionality).remove(keys.ADInplaceOrView)
    return c._ForceDispatchKeyGuard(include, exclude)  # type: ignore[no-any-return]


# -- what a forward pass leaves for its backward

# by numbers, for as long as the tensors live that hold these. What a program saves may be packed, as by a checkpoint:
# then it is not found, and made anew
_kept: dict[int, Any] = {}
_numbers = itertools.count()


def _ticket(name: str, made: list[Any]) -> Tensor:
    """Return what finds in backward the one thing that the operation before this one has made. Not collective."""
    assert traced.recording is not None

    def keep() -> Tensor:
        number = next(_numbers)
        ticket = torch.tensor([number], device="cpu")
        _kept[number] = made.pop()
        weakref.finalize(ticket, _kept.pop, number, None).atexit = False
        return ticket

    cpu = torch.device("cpu")
    # an operation has one result
    return traced.recording.call(f"{name}, for backward", keep, [], (1,), dtype=torch.int64, device=cpu)
