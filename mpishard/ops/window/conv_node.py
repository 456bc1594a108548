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
from mpishard.comm.exchange.homeward import start_home
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.memory.piece import empty_as
from mpishard.ops.window.conv_kernel import Gradients, Kernel, Local, backward_by, deferring, forward_by


class Form(Protocol):
    """A way to convolve a block and its halo."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Convolve; return the result and what backward needs of the halo. Neighborwise collective."""
        ...

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, halos: Sequence[Tensor], needs: Sequence[bool]
    ) -> Gradients:
        """Return the cotangents of block, weight and bias where needed. Neighborwise collective."""
        ...


class Fetched:
    """A convolution of the fetched window.

    Parameters
    ----------
    window
        Fetch of the input cells.
    kernel, local
        What computes the local convolution, and its geometry.
    keeps_window
        Whether backward has the window as it was, and not made again of the block and its halo.
    is_one_round
        Whether no rank fetches along more than one dim: then the weight's gradient is computed while halo cotangents
        travel.
    """

    def __init__(
        self, window: WindowOp, kernel: Kernel, local: Local, *, keeps_window: bool, is_one_round: bool
    ) -> None:
        self.window, self.kernel, self.local = window, kernel, local
        self._keeps_window, self._is_one_round = keeps_window, is_one_round

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Convolve; return the result and the window, or the cells beside the block. Neighborwise collective."""
        window = self.window(x)
        y = forward_by(self.kernel, window, weight, bias, self.local)
        if not weight.requires_grad:
            return y, []
        return y, [window] if self._keeps_window else self.window.halo_of(window)

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, halos: Sequence[Tensor], needs: Sequence[bool]
    ) -> Gradients:
        """Return the cotangents of block, weight and bias where needed. Neighborwise collective."""
        gx = gw = gb = None
        come: Callable[[], Tensor] | None = None
        if needs[0]:
            # of the input, torch reads no more than the shape
            like = halos[0] if halos and self._keeps_window else empty_as(x, self.window.out_shape)
            gx, _, _ = backward_by(self.kernel, g, like, weight, self.local, (True, False, False))
            assert gx is not None
            if self._is_one_round:
                come = start_home(self.window, gx)
            else:
                gx = self.window.adjoint(gx)
        if needs[1]:
            window = halos[0] if self._keeps_window else self.window.joined(x, halos)
            _, gw, gb = backward_by(self.kernel, g, window, weight, self.local, (False, *needs[1:]))
        elif needs[2]:
            _, _, gb = backward_by(self.kernel, g, x, weight, self.local, (False, False, True))
        return come() if come else gx, gw, gb


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


block_conv = node_of(BlockConv)
