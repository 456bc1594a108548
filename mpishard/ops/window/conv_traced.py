"""Convolutions in a compiled program: by the same kernels, and in the same form, as eagerly.

A compiler would call torch's own on a window that is a copy of the block. What it cannot read is an operation of its
graph: the convolution, the gradient of the input, and that of the weight, each where it is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.comm import traced
from mpishard.comm.memory.piece import channels_last_of
from mpishard.ops.window.conv_tiles import Local, out_shape

if TYPE_CHECKING:
    from mpishard.ops.window.conv_kernel import Gradients
    from mpishard.ops.window.conv_node import Form

_OP = "convolution"


class TracedConv(Function):
    """`BlockConv`, recorded. What backward needs of the halo is one tensor that the program saves."""

    @staticmethod
    def forward(ctx: Any, form: Form, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve. Neighborwise collective."""
        assert traced.recording is not None
        dtype, device, needed = x.dtype, x.device, any(ctx.needs_input_grad)
        halos: list[Tensor] = []
        shapes: list[torch.Size] = []

        def run(*operands: Tensor) -> Tensor:
            y, found = form.forward(*with_bias(operands))
            if needed:
                halos[:] = found
            return y

        def beside() -> Tensor:
            parts, shapes[:] = [halo.reshape(-1) for halo in halos], [halo.shape for halo in halos]
            halos.clear()
            return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)

        y = recorded_conv(traced.recording.call, run, (x, weight, bias), form.read, form.local)
        if needed:
            cells = math.prod(form.window.out_shape) - math.prod(form.window.in_shape) * form.window.resident
            halo = traced.recording.call(f"halo of {_OP}", beside, [], (cells,), dtype=dtype, device=device)
            ctx.form, ctx.shapes = form, shapes
            ctx.save_for_backward(x, weight, halo)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Carry the cotangent back. Neighborwise collective."""
        assert traced.recording is not None
        form, shapes = ctx.form, ctx.shapes

        def backward(g: Tensor, x: Tensor, weight: Tensor, halo: Tensor, needs: Sequence[bool]) -> Gradients:
            parts = halo.split([math.prod(shape) for shape in shapes])
            return form.backward(g, x, weight, [p.view(shape) for p, shape in zip(parts, shapes)], needs)  # type: ignore[no-any-return]

        needs = ctx.needs_input_grad[1:]
        return None, *recorded_gradients(traced.recording.call, backward, grads[0], ctx.saved_tensors, needs)


def with_bias(operands: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return block, weight and bias of what a recorded convolution is given: the bias may be missing."""
    x, weight, *bias = operands
    return x, weight, bias[0] if bias else None


def recorded_conv(
    record: Callable[..., Tensor],
    run: Callable[..., Tensor],
    operands: tuple[Tensor, Tensor, Tensor | None],
    read: Sequence[int],
    local: Local,
) -> Tensor:
    """Record a convolution that ``run`` does. As collective as ``record`` is.

    Parameters
    ----------
    record
        `traced.Recording.call`, or `traced.Recording.compute`.
    run
        Its operands: see `with_bias`.
    operands
        Block, weight and bias.
    read, local
        Shape of what is convolved, and how: that of the result follows.
    """
    x, weight, _ = operands
    given = [t for t in operands if t is not None]
    shape = out_shape(read, weight.shape, local)
    return record(_OP, run, given, shape, channels_last=channels_last_of(x) is not None)


def recorded_gradients(
    record: Callable[..., Tensor],
    backward: Callable[..., Gradients],
    g: Tensor,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
) -> Gradients:
    """Record the cotangents of block, weight and bias. As collective as ``record`` is.

    Parameters
    ----------
    record
        `traced.Recording.call`, or `traced.Recording.compute`; of the gradient of the weight alone it is the latter.
    backward
        Returns them for the cotangent, what was saved, and which are wanted.
    saved
        Block and weight, and what else ``backward`` needs.
    """
    assert traced.recording is not None
    x, weight, *_ = saved
    gx = gw = None
    if needs[0]:

        def of_data(*operands: Tensor) -> Tensor:
            return backward(*operands, (True, False, False))[0]  # type: ignore[return-value]

        gx = record(f"adjoint of {_OP}", of_data, [g, *saved], x.shape, channels_last=channels_last_of(x) is not None)
    if needs[1]:

        def of_weight(*operands: Tensor) -> Tensor:
            return backward(*operands, (False, True, False))[1]  # type: ignore[return-value]

        gw = traced.recording.compute(f"gradient of {_OP}", of_weight, [g, *saved], weight.shape)
    return gx, gw, g.sum([d for d in range(g.ndim) if d != 1]) if needs[2] else None
