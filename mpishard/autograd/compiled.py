"""Operations of which values say what travels, in a compiled program: the compiler keeps each pass of one whole.

Its graph has no shapes that depend on values. So what such an operation does, its plan among it, is done anew in every
call, as one operation of the graph whose result has a shape that layouts tell; and so is its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Return ``f(*operands)``, of the dtype of the first; a compiled program does it again for backward.

    Collective as ``f`` and its backward are. All that is differentiated is among the operands, and of one dtype.
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
        ctx.name, ctx.op, ctx.shape = name, op, x.shape
        ctx.save_for_backward(*values)
        return traced.recording.call(name, lambda x, *values: op(*values)(x), [x, *values], shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert traced.recording is not None
        op, values = ctx.op, ctx.saved_tensors
        name, operands = f"adjoint of {ctx.name}", [grads[0], *values]
        g = traced.recording.call(name, lambda g, *values: op(*values).adjoint(g), operands, ctx.shape)
        return None, None, None, g, *[None] * len(values)


class _ByValues(Function):
    @staticmethod
    def forward(ctx: Any, name: str, f: Callable[..., Tensor], shape: tuple[int, ...], *operands: Tensor) -> Tensor:
        assert traced.recording is not None
        ctx.name, ctx.f = name, f
        ctx.save_for_backward(*operands)
        return traced.recording.call(name, torch.no_grad()(f), operands, shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert traced.recording is not None
        f, operands, needs = ctx.f, ctx.saved_tensors, ctx.needs_input_grad[3:]
        wanted = [i for i, needed in enumerate(needs) if needed]

        def run(g: Tensor, *operands: Tensor) -> Tensor:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_(needed) for x, needed in zip(operands, needs)]
                y = f(*leaves)
            found = torch.autograd.grad(y, [leaves[i] for i in wanted], g, materialize_grads=True)
            return torch.cat([part.reshape(-1) for part in found])

        # the operation has one result
        lengths = [operands[i].numel() for i in wanted]
        flat = traced.recording.call(f"adjoint of {ctx.name}", run, [grads[0], *operands], (sum(lengths),))
        out: list[Tensor | None] = [None] * len(needs)
        for i, part in zip(wanted, flat.split(lengths)):
            out[i] = part.view(operands[i].shape)
        return None, None, None, *out
