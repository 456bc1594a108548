"""The geometry of a convolution as it is given: one number or one per dim, and what torch refuses of it.

Of a dim that is cut, torch is given the geometry of a window, not the convolution's own: so its checks are made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpishard.errors import LayoutError
from mpishard.layout.stencil import Sliding, Transposed, per_dim


def normal(value: Any, ndim: int) -> Any:
    """Return a stride, padding or dilation as it is part of a key: one per dim. Not collective."""
    if isinstance(value, str):
        return (0,) * ndim if value == "valid" else value
    value = per_dim(value, ndim)
    if len(value) != ndim:
        raise RuntimeError(f"expected a single integer or {ndim} of them, one per spatial dim, but got {list(value)}")
    return value


def sliding_dims(kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> list[Sliding]:
    """Return the geometry of every spatial dim of a convolution. Not collective."""
    ndim = len(kernel)
    strides, dilations = per_dim(stride, ndim), per_dim(dilation, ndim)
    if padding == "same":
        if any(s != 1 for s in strides):
            raise RuntimeError("padding='same' is not supported for strided convolutions")
        pads = [divmod((k - 1) * d, 2) for k, d in zip(kernel, dilations)]
        lows, highs = [q for q, _ in pads], [q + r for q, r in pads]
    else:
        lows = highs = list(per_dim(padding, ndim))
        _require(lows, strides, dilations)
    return [Sliding(*g) for g in zip(kernel, strides, dilations, lows, highs)]


def transposed_dims(kernel: Sequence[int], stride: Any, padding: Any, extra: Any, dilation: Any) -> list[Transposed]:
    """Return the geometry of every spatial dim of a transposed convolution. Not collective."""
    ndim = len(kernel)
    strides, dilations, pads, extras = (per_dim(v, ndim) for v in (stride, dilation, padding, extra))
    _require(pads, strides, dilations)
    if min(extras, default=0) < 0:
        raise RuntimeError("negative output_padding is not supported")
    if any(e >= max(s, d) for e, s, d in zip(extras, strides, dilations)):
        raise RuntimeError(
            f"output padding must be smaller than either stride or dilation, but got output_padding {list(extras)}, "
            f"stride {list(strides)}, dilation {list(dilations)}"
        )
    return [Transposed(*g) for g in zip(kernel, strides, dilations, pads, extras)]


def _require(pads: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> None:
    if min(pads, default=0) < 0:
        raise RuntimeError("negative padding is not supported")
    if min(strides, default=1) <= 0:
        raise RuntimeError("non-positive stride is not supported")
    if min(dilations, default=1) <= 0:
        raise RuntimeError("dilation should be greater than zero")


def no_output(name: str, dim: int, n: int, reach: int) -> LayoutError:
    """Return the error of a convolution of which no cell comes out along a dim. Not collective."""
    return LayoutError(
        f"{name}: kernel larger than the padded input along dim {dim}",
        expected=f"at least {reach} cells with padding",
        got=n,
        fix="pad more, or use a smaller kernel",
    )
