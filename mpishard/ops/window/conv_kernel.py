"""Which of torch's convolution kernels a block gets on a CPU, forward and for each gradient.

torch hands a convolution to oneDNN by the size of its input: batch x channels x the first two spatial extents above
20,480. Blocks are smaller than fields, and below that a 3-D convolution goes to a kernel that unfolds the input, 5 to
20 times slower; of small blocks it is slower still where nothing is padded, as in a window: a call of MKL copies each
row. The kernels of dilated and of transposed convolutions unfold in one loop, whatever the padding. oneDNN's own
gradients have slow cases of their own, which other calls of it do not have. The rules below were measured with one
thread on processors with AVX-512 and with AVX2, those of small blocks in steps of a model too, where oneDNN's calls
take twice as long as one after the other; they read shapes only, so that every call of a plan does the same. On other
processors oneDNN is left to torch. All results are those of torch's kernels but for the order of their sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.linear import again, differentiated_again, in_transform, node_of
from mpishard.autograd.use import put_off
from mpishard.comm import traced
from mpishard.ops.rule.reduction import HALVES
from mpishard.ops.window import conv_tiles
from mpishard.ops.window.conv_tiles import Local
from mpishard.ops.window.conv_traced import recorded_conv, recorded_gradients, with_bias

Gradients = tuple["Tensor | None", "Tensor | None", "Tensor | None"]

TORCH_LIMIT = 20480  # torch's own
# cells of the unfolded input from which oneDNN wins whatever the geometry, and where it fits dense kernels best
UNFOLDED, UNFOLDED_DENSE = 1 << 19, 1 << 17
# and of blocks that torch would unfold: from which its other kernels do so faster, with padding and without, and from
# which oneDNN wins over these
COLUMNS, COLUMNS_PADDED, COLUMNS_LARGE = 1 << 14, 1 << 16, 1 << 18
# and of float64, which oneDNN has no kernels for, from which it does so tile after tile
UNFOLDED_TILED = 1 << 20
# float32 numbers in a vector of oneDNN's kernels; 0: not measured. With results for no more than half of one, its
# gradient of the input loses to its forward kernel; with fewer channels, of 16, that of the weight is faster with
# channels together
AVX512, AVX2 = 16, 8
VECTOR = {"AVX512": AVX512, "AVX2": AVX2}.get(torch.backends.cpu.get_cpu_capability(), 0)
FEWEST = 4  # channels, below which oneDNN's vectors are too empty
# cells of padding along the last dim, beyond which oneDNN's forward kernel for AVX2 gives way to a slow one
PADDING_AVX2 = 3
# of a block of more bytes, the gradient of the weight is not put off: what it reads would have left the cache by then,
# which costs more than the sums that it hides
DEFERRED_NBYTES = 1 << 20

# by name where torch has one: a call by the operator takes twice as long
_torch_forward = torch.convolution
_torch_backward = torch.ops.aten.convolution_backward.default
_onednn_forward = torch.mkldnn_convolution
_dilated_forward = torch.ops.aten.slow_conv_dilated3d.default
_transposed_forward = torch.ops.aten.slow_conv_transpose3d.default


class Kernel(NamedTuple):
    """What computes a convolution of one shape.

    Attributes
    ----------
    forward
        ``"torch"``: what torch chooses. ``"onednn"``: oneDNN, though torch would not. ``"columns"``: torch's kernel
        for dilated convolutions. ``"dense"``: torch's choice of the same with a stride of 1 along the last dim, where
        one cell alone comes out, or goes in; the gradients too.
    data
        Gradient of the input: ``"torch"``; ``"onednn"``; ``"forward"``, a convolution of the cotangent; or
        ``"columns"``, a transposed one of it.
    weight
        Gradient of the weight: ``"torch"``; ``"onednn"``; ``"channels_last"``, oneDNN with the channels together; or
        ``"columns"``, that of the transposed convolution of the cotangent.
    tiled
        Whether all of it is done tile after tile.
    order
        Of the spatial dims for ``"channels_last"``: torch's limit is met by the first two.
    reason
        Why not torch's choice; empty where it is.
    """

    forward: str = "torch"
    data: str = "torch"
    weight: str = "torch"
    tiled: bool = False
    order: tuple[int, ...] = ()
    reason: str = ""

    @property
    def is_torch(self) -> bool:
        """Whether all is left to torch."""
        return not self.reason


_TORCH = Kernel()
_COLUMNS = Kernel("columns", "columns", "columns", reason="torch unfolds small blocks slowly")
_DENSE = Kernel("dense", reason="oneDNN reads past one column that has a stride")


def kernel_of(x: Tensor, weight: Tensor, local: Local) -> Kernel:
    """Return what computes the convolution of ``x``. Not collective."""
    if x.dtype is not weight.dtype:
        return _TORCH
    return kernel_for(x, x.shape, weight.shape, local)


def kernel_for(like: Tensor, shape: tuple[int, ...], weight: tuple[int, ...], local: Local) -> Kernel:
    """Return what computes the convolution of a block of ``shape``, of the dtype and on the device of ``like``.

    Not collective.
    """
    if not like.is_cpu or len(shape) != len(weight):
        return _TORCH
    if like.dtype is torch.float64:
        return choose_wide(shape, weight, local)
    if like.dtype in HALVES:
        return _DENSE if one_column(shape, weight, local) else _TORCH
    if like.dtype is not torch.float32:
        return _TORCH
    if not torch._C._has_mkldnn or not torch._C._get_mkldnn_enabled():
        return _TORCH
    return choose(shape, weight, *local, VECTOR)


@lru_cache(maxsize=4096)
def choose(
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
    vector: int,
) -> Kernel:
    """Return the kernels for float32 blocks of ``shape`` on a CPU with oneDNN, and such vectors. Not collective."""
    kernel, space = weight[2:], shape[2:]
    if groups > 1 or len(space) not in (2, 3) or 0 in shape or 0 in weight or max(kernel) == 1 or any(output_padding):
        return _TORCH
    channels, results = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    dense = max(stride) == 1 and not transposed
    cells = math.prod(space) if transposed else math.prod(n // s for n, s in zip(space, stride))
    unfolded = shape[0] * channels * cells * math.prod(kernel)
    large = shape[0] > 1 or min(kernel[-2:]) > 3
    unfolds = len(space) == 3 and not large and math.prod(shape[:4]) <= TORCH_LIMIT
    if unfolds and not transposed and (COLUMNS_PADDED if any(padding) else COLUMNS) <= unfolded < COLUMNS_LARGE:
        return _COLUMNS
    if not vector or unfolded < (UNFOLDED_DENSE if dense and channels >= 8 and math.prod(kernel) >= 9 else UNFOLDED):
        return _TORCH
    small = "too few cells for torch to ask oneDNN" if unfolds else ""
    if transposed:
        return Kernel(data="forward", reason=small) if unfolds and min(channels, results) >= FEWEST else _TORCH
    if not dense:
        if not unfolds or channels < FEWEST or any(k <= s for k, s in zip(kernel, stride)):
            return _TORCH
        return Kernel("onednn", "onednn", "onednn", reason=small)
    reasons = [small] if small else []
    forward = data = weights = "torch"
    order: tuple[int, ...] = ()
    if unfolds:
        forward = "onednn"
        weights = "onednn" if vector > AVX2 or (channels >= FEWEST and min(kernel) > 2) else "torch"
    turned = [d * (k - 1) - p for k, d, p in zip(kernel, dilation, padding)]
    fits = min(turned) >= 0 and (vector > AVX2 or turned[-1] <= PADDING_AVX2)
    few = results <= vector // 2
    if fits and (few or unfolds) and (channels >= FEWEST or (unfolds and few)):
        data = "forward"
        if not unfolds:
            reasons.append(f"{results} channels of the result are few for oneDNN's gradient")
    if len(space) == 3 and FEWEST <= channels < vector and vector > AVX2:
        # the longest dims first, where the order matters at all
        order = tuple(sorted(range(3), key=lambda d: -space[d])) if unfolds else (0, 1, 2)
        if not unfolds or math.prod(shape[:2]) * space[order[0]] * space[order[1]] > TORCH_LIMIT:
            weights = "channels_last"
            reasons.append(f"{channels} channels fill no vector")
    return Kernel(forward, data, weights, order=order, reason="; ".join(reasons))


@lru_cache(maxsize=4096)
def choose_wide(shape: tuple[int, ...], weight: tuple[int, ...], local: Local) -> Kernel:
    """Return the kernels for float64 blocks of ``shape`` on a CPU. Not collective."""
    _, padding, _, transposed, _, groups = local
    if transposed or groups > 1 or len(shape) not in (3, 4, 5) or 0 in shape or 0 in weight or max(weight[2:]) == 1:
        return _TORCH
    out = [g.n_out(n) for g, n in zip(conv_tiles.slides(weight[2:], local), shape[2:])]
    unfolded = math.prod(weight[1:]) * math.prod(out)
    tiled = unfolded > UNFOLDED_TILED
    if len(shape) == 5 and unfolded >= (COLUMNS_PADDED if any(padding) else COLUMNS):
        return _COLUMNS._replace(tiled=tiled)
    return Kernel(tiled=True, reason="torch unfolds the whole block at once") if tiled else _TORCH


@lru_cache(maxsize=4096)
def one_column(shape: tuple[int, ...], weight: tuple[int, ...], local: Local) -> bool:
    """Tell whether a convolution with a stride along the last dim gives one cell there, or a transposed one reads one.

    Of those, oneDNN (docs/upstream.md) computes others in 16 bits. Whole fields are seldom so narrow; blocks may be,
    and the strips at their edges are. Not collective.
    """
    stride, _, _, transposed, extra, _ = local
    if stride[-1] == 1 or extra[-1] or len(shape) not in (4, 5) or 0 in shape or 0 in weight:
        return False
    return shape[-1] == 1 if transposed else conv_tiles.slides(weight[2:], local)[-1].n_out(shape[-1]) == 1


def _dense(n: int, weight: Tensor, local: Local) -> tuple[tuple[int, int], Local]:
    """Return what to pad the ``n`` cells of `one_column` by, and the geometry of the same then. Not collective."""
    stride, padding, dilation, transposed, *rest = local
    before = after = 0
    if not transposed:
        before = padding[-1]
        after = dilation[-1] * (weight.shape[-1] - 1) + 1 - before - n  # negative: no window reaches these
        padding = (*padding[:-1], 0)
    return (before, after), ((*stride[:-1], 1), padding, dilation, transposed, *rest)  # type: ignore[return-value]


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *local: Any) -> Tensor:
    """Convolve, as ``torch.ops.aten.convolution``. Not collective."""
    return _forward(kernel_of(x, weight, local), x, weight, bias, local)  # type: ignore[arg-type]


def _forward(kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None, local: Local) -> Tensor:
    if kernel.tiled:
        kernel = kernel._replace(tiled=False)
        return conv_tiles.forward(lambda x, local: _forward(kernel, x, weight, bias, local), x, weight, local)
    if kernel.forward == "torch":
        return _torch_forward(x, weight, bias, *local)  # type: ignore[no-any-return]
    if kernel.forward == "dense":
        pads, local = _dense(x.shape[-1], weight, local)
        return _torch_forward(F.pad(x, pads) if any(pads) else x, weight, bias, *local)  # type: ignore[no-any-return]
    stride, padding, dilation, _, _, groups = local
    if kernel.forward == "columns":
        return _dilated_forward(x, weight, weight.shape[2:], bias, stride, padding, dilation)  # type: ignore[no-any-return]
    return _onednn_forward(x, weight, bias, padding, stride, dilation, groups)  # type: ignore[no-any-return]


def convolution_backward(g: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Gradients:
    """Return the cotangents, as ``torch.ops.aten.convolution_backward``. Not collective."""
    *local, needs = rest
    return _backward(kernel_of(x, weight, tuple(local)), g, x, weight, tuple(local), needs)  # type: ignore[arg-type]


def deferring(
    backward: Callable[[Sequence[bool]], Gradients], g: Tensor, weight: Tensor, needs: Sequence[bool]
) -> Gradients:
    """Return what ``backward`` of ``needs`` gives; the gradient of the weight later in the pass, where that may be.

    It is computed while the sums of the norm before travel. Collective as ``backward`` is; of the weight it is not.
    """
    own = None
    if needs[0] and needs[1] and g.nbytes <= DEFERRED_NBYTES:
        own = put_off(weight, lambda: backward((False, True, False))[1])
    if own is None:
        return backward(needs)
    gx, _, gb = backward((True, False, needs[2]))
    return gx, own, gb


def _backward(kernel: Kernel, g: Tensor, x: Tensor, weight: Tensor, local: Local, needs: Sequence[bool]) -> Gradients:
    g = g if g.is_contiguous(memory_format=_formats.get(x.ndim, torch.contiguous_format)) else g.contiguous()
    gx = gw = None
    if kernel.forward == "dense":
        pads, local = _dense(x.shape[-1], weight, local)
        padded = F.pad(x, pads) if any(pads) else x
        gx, gw, _ = _torch_backward(g, padded, weight, None, *local, (needs[0], needs[1], False))
        if gx is not None and any(pads):
            gx = F.pad(gx, (-pads[0], -pads[1]))
    elif kernel.is_torch:
        if needs[0] or needs[1]:
            gx, gw, _ = _torch_backward(g, x, weight, None, *local, (needs[0], needs[1], False))
    else:
        of_data = partial(_of_data, kernel.data, weight)
        of_weight = partial(_of_weight, kernel, weight)
        if kernel.tiled:
            gx = conv_tiles.of_data(of_data, g, x, weight, local) if needs[0] else None
            gw = conv_tiles.of_weight(of_weight, g, x, weight, local) if needs[1] else None
        else:
            gx = of_data(g, x, local) if needs[0] else None
            gw = of_weight(g, x, local) if needs[1] else None
    # oneDNN would sum for the bias beside the gradient of the weight, which then takes a fifth longer
    return gx, gw, g.sum([d for d in range(g.ndim) if d != 1]) if needs[2] else None


_NONE = (0, 0, 0)
_formats = {4: torch.channels_last, 5: torch.channels_last_3d}


def _of_data(how: str, weight: Tensor, g: Tensor, x: Tensor, local: Local) -> Tensor:
    stride, padding, dilation, transposed, _, groups = local
    if how == "columns":
        extra = _rest(x, g, weight, local)
        return _transposed_forward(g, weight, weight.shape[2:], None, stride, padding, extra, dilation)  # type: ignore[no-any-return]
    if how == "forward" and transposed:
        return _onednn_forward(g, weight, None, padding, stride, dilation, groups)  # type: ignore[no-any-return]
    if how == "forward":
        turned = weight.flip(tuple(range(2, weight.ndim))).transpose(0, 1)
        pads = [d * (k - 1) - p for k, d, p in zip(weight.shape[2:], dilation, padding)]
        return _onednn_forward(g, turned, None, pads, stride, dilation, groups)  # type: ignore[no-any-return]
    mask = [True, False, False]
    if how == "onednn":
        gx = _torch_backward(g.to_mkldnn(), x.contiguous().to_mkldnn(), weight, None, *local, mask)[0]
        return gx.to_dense()  # type: ignore[no-any-return]
    return _torch_backward(g, x, weight, None, *local, mask)[0]  # type: ignore[no-any-return]


def _of_weight(kernel: Kernel, weight: Tensor, g: Tensor, x: Tensor, local: Local) -> Tensor:
    mask = [False, True, False]
    if kernel.weight == "columns":
        stride, padding, dilation, *_ = local
        extra = _rest(x, g, weight, local)
        return _torch_backward(x, g, weight, None, stride, padding, dilation, True, extra, 1, mask)[1]  # type: ignore[no-any-return]
    if kernel.weight == "onednn":
        # a tensor of oneDNN's own goes to oneDNN, whatever its size
        g, x = g.contiguous().to_mkldnn(), x.contiguous().to_mkldnn()
    elif kernel.weight == "channels_last":
        order = kernel.order
        there, back = (0, 1, *(2 + d for d in order)), (0, 1, *(2 + order.index(d) for d in range(len(order))))
        g, x, weight = (t.permute(there).contiguous(memory_format=_formats[x.ndim]) for t in (g, x, weight))
        stride, padding, dilation, *rest = local
        geometry = [[a[d] for d in order] for a in (stride, padding, dilation)]
        gw = _torch_backward(g, x, weight, None, *geometry, *rest, mask)[1]
        return gw.permute(back).contiguous()  # type: ignore[no-any-return]
    return _torch_backward(g, x, weight, None, *local, mask)[1]  # type: ignore[no-any-return]


def _rest(x: Tensor, g: Tensor, weight: Tensor, local: Local) -> Sequence[int]:
    """Return how many cells of ``x`` at the far ends no window of a strided convolution reaches. Not collective."""
    if max(local[0]) == 1:
        return _NONE
    sizes = zip(conv_tiles.slides(weight.shape[2:], local), x.shape[2:], g.shape[2:])
    return [n + a.hi - a.window(0, m)[1] for a, n, m in sizes]


def _by_torch(kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None, local: Local) -> Tensor:
    """Convolve by what torch differentiates as often as is asked. Not collective."""
    return _forward(kernel if kernel.forward == "dense" else _TORCH, x, weight, bias, local)


class _Convolved(Function):
    """A convolution by the kernels of this module; derivatives of the gradient are torch's."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, local: Local, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.kernel, ctx.local = kernel, local
        ctx.save_for_backward(x, weight, bias)
        if traced.recording is None:
            return _forward(kernel, x, weight, bias, local)

        def run(*operands: Tensor) -> Tensor:
            return _forward(kernel, *with_bias(operands), local)

        return recorded_conv(traced.recording.compute, run, (x, weight, bias), x.shape, local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,), local = grads, ctx.local
        x, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if differentiated_again():
            return None, None, *again(lambda *three: _by_torch(ctx.kernel, *three, local), (x, weight, bias), needs, g)

        def backward(g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> Gradients:
            return _backward(ctx.kernel, g, x, weight, local, needs)

        if traced.recording is not None:
            return None, None, *recorded_gradients(traced.recording.compute, backward, g, (x, weight), needs)
        return None, None, *deferring(partial(backward, g, x, weight), g, weight, needs)


_node = node_of(_Convolved)


def convolved(kernel: Kernel, local: Local, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the differentiable convolution of a block by ``kernel``, which is not torch's. Not collective."""
    if in_transform():
        return _by_torch(kernel, x, weight, bias, local)
    return _node(kernel, local, x, weight, bias)  # type: ignore[no-any-return]
