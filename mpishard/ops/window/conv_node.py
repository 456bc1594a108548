"""Convolution of a block as one node of autograd, which keeps the block and its halo.

The array that a convolution reads is mostly kept by its neighbours in the graph too, in place: by a ReLU, or for
a skip connection. A window of it would be a second copy of every activation until backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mpishard.autograd.linear import again, differentiated_again, node_of
from mpishard.comm.exchange.window import WindowOp
from mpishard.ops.window.conv_kernel import Gradients, convolution, convolution_backward, deferring


class Form(Protocol):
    """A way to convolve a block and its halo.

    Attributes
    ----------
    window
        Fetch of the input cells.
    local
        ``(stride, padding, dilation, transposed, output_padding, groups)`` of the local convolution.
    read
        Shape of what that reads: of the window, or of the block alone.
    """

    window: WindowOp
    local: tuple[Any, ...]
    read: tuple[int, ...]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Convolve; return the result and what backward needs of the halo. Neighborwise collective."""
        ...

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, halos: Sequence[Tensor], needs: Sequence[bool]
    ) -> Gradients:
        """Return the cotangents of block, weight and bias where needed. Neighborwise collective."""
        ...


class Fetched:
    """A convolution of the fetched window, which is made again in backward, of the block and its halo.

    Parameters
    ----------
    window
        Fetch of the input cells.
    local
        ``(stride, padding, dilation, transposed, output_padding, groups)`` of the local convolution.
    """

    def __init__(self, window: WindowOp, local: tuple[Any, ...]) -> None:
        self.window, self.local, self.read = window, local, window.out_shape

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Convolve; return the result and the cells beside the block. Neighborwise collective."""
        window = self.window(x)
        return convolution(window, weight, bias, *self.local), self.window.halo_of(window)

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, halos: Sequence[Tensor], needs: Sequence[bool]
    ) -> Gradients:
        """Return the cotangents of block, weight and bias where needed. Neighborwise collective."""
        window = self.window.joined(x, halos)
        g_window, gw, gb = convolution_backward(g, window, weight, *self.local, needs)
        return self.window.adjoint(g_window) if needs[0] else None, gw, gb


class BlockConv(torch.autograd.Function):
    """Autograd of a `Form`; derivatives of the gradient go through the fetched window.

    Notes
    -----
    Adjoint: that of the local convolution, and the halo's cotangents are sent home and added.
    """

    @staticmethod
    def forward(
        ctx: Any,
        form: Form,
        windowed: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Convolve; ``windowed`` is the same, differentiable, of the fetched window."""
        y, halos = form.forward(x, weight, bias)
        ctx.form, ctx.windowed = form, windowed
        ctx.save_for_backward(x, weight, bias, *halos)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Carry the cotangent back."""
        g = grads[0]
        x, weight, bias, *halos = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if differentiated_again():
            return None, None, *again(ctx.windowed, (x, weight, bias), needs, g)
        return None, None, *deferring(partial(ctx.form.backward, g, x, weight, halos), g, weight, needs)


# of an input in no transform
block_conv = node_of(BlockConv)
