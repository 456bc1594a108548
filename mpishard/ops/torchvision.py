"""Operators of torchvision: where they are loaded is no matter, their names are enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.layout import Labels
from mpishard.ops.rule.align import meet
from mpishard.ops.rule.empty_block import filled, unfilled
from mpishard.ops.rule.whole import whole
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor


@implements("torchvision::nms", sharded="gathers")
def nms(dets: Any, scores: Any, iou_threshold: float) -> Any:
    """Keep the best of boxes that overlap. Collective where boxes or scores are sharded: they are gathered."""
    return whole(lambda d, s: torch.ops.torchvision.nms(d, s, iou_threshold), (dets, scores))


# -- cells of boxes: fields become whole, batch and spatial dims; each rank has its boxes, and its channels


_BOXES: tuple[Labels, Labels] = (None, "channel", None, None), ("box", "channel", None, None)
# every part of a box has channels of its own: they become whole too
_PARTS: tuple[Labels, Labels] = (None,) * 4, ("box", None, None, None)


def _in_boxes(call: Callable[[Tensor, Tensor], Any], input: Any, rois: Any, labels: tuple[Labels, Labels]) -> Any:
    """Return what torchvision makes of a field within boxes, which get no gradient. Collective as `whole`."""
    boxes = rois.detach() if isinstance(rois, Tensor) else rois
    return whole(call, (input, boxes), (labels[0], ("box", None)), labels[1])


@implements("torchvision::roi_align", sharded="gathers")
def roi_align(
    input: Any,
    rois: Any,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Any:
    """Average a field within boxes. Collective where batch or spatial dims are sharded: they are gathered."""
    how = (spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned)
    return _in_boxes(lambda x, b: torch.ops.torchvision.roi_align(x, b, *how), input, rois, _BOXES)


@implements("torchvision::roi_pool", sharded="gathers")
def roi_pool(input: Any, rois: Any, spatial_scale: float, pooled_height: int, pooled_width: int) -> Any:
    """Return the largest within boxes, and where. Collective where batch or spatial dims are sharded: gathered."""
    how = (spatial_scale, pooled_height, pooled_width)
    return _in_boxes(lambda x, b: torch.ops.torchvision.roi_pool(x, b, *how), input, rois, _BOXES)


@implements("torchvision::ps_roi_align", sharded="gathers")
def ps_roi_align(
    input: Any, rois: Any, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int
) -> Any:
    """Average a field within parts of boxes, and say of which channels. Collective where the field is sharded."""
    how = (spatial_scale, pooled_height, pooled_width, sampling_ratio)
    return _in_boxes(lambda x, b: torch.ops.torchvision.ps_roi_align(x, b, *how), input, rois, _PARTS)


@implements("torchvision::ps_roi_pool", sharded="gathers")
def ps_roi_pool(input: Any, rois: Any, spatial_scale: float, pooled_height: int, pooled_width: int) -> Any:
    """Average cells within parts of boxes, and say of which channels. Collective where the field is sharded."""
    how = (spatial_scale, pooled_height, pooled_width)
    return _in_boxes(lambda x, b: torch.ops.torchvision.ps_roi_pool(x, b, *how), input, rois, _PARTS)


# -- deformable convolution


class _Dim(NamedTuple):
    """A convolution along one dim of ``cells`` cells."""

    cells: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def extent(self) -> int:
        """Return how many cells the result has. Not collective."""
        return (self.cells + 2 * self.padding - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def reduced(self, n: int) -> _Dim:
        """Return a convolution of the same cells and kernel whose result has ``n``. Not collective."""
        stride = max(2, -(-max(self.cells - self.kernel, 0) // max(n - 1, 1)) + (n == 1))
        padding = max(0, -(-((n - 1) * stride + self.kernel - self.cells) // 2))
        return _Dim(self.cells, self.kernel, stride, padding, 1)

    def places(self, first: int, n: int, x: Tensor) -> Tensor:
        """Return where ``n`` cells of the result read without offsets: (taps, n). Not collective."""
        taps, cells = (torch.arange(m, device=x.device) for m in (self.kernel, n))
        return (first + cells) * self.stride - self.padding + self.dilation * taps[:, None]


@implements("torchvision::deform_conv2d", sharded="gathers")
def deform_conv2d(
    input: Any,
    weight: Any,
    offset: Any,
    mask: Any,
    bias: Any,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> ShardTensor:
    """Convolve cells that offsets name, which may lie anywhere: the field is gathered, the result sharded as they are.

    Collective where spatial dims of the field are sharded.
    """
    how = (groups, offset_groups, use_mask)
    given = ((stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w))
    operands = (input, weight, offset, mask, bias)
    if not input.ndim == weight.ndim == offset.ndim == 4:  # torchvision refuses, and says why
        return _plainly(operands, given, how)
    dims = [_Dim(*one) for one in zip(input.shape[2:], weight.shape[2:], *given)]
    if [d.extent() for d in dims] != [*offset.shape[2:]] or (use_mask and mask.shape[2:] != offset.shape[2:]):
        return _plainly(operands, given, how)
    cells = ("batch", None, "row", "column")
    met = meet(operands, (("batch", None, None, None), (None,) * 4, cells, cells[: mask.ndim], (None,)))
    x, w, moves, m, b = met.locals
    shape, layout = moves.shape, met.plan.operands[2]
    x, moves, m = map(filled, (x, moves, m))
    if layout.local_shape(met.mesh.coords)[2:] != layout.shape[2:]:
        first, here = [lo for lo, _ in layout.box(met.mesh.coords)[2:]], moves.shape[2:]
        own = [d.reduced(n) for d, n in zip(dims, here)]
        # what a cell of the whole result reads, counted from what one of this block would
        along = [d.places(lo, n, moves) - r.places(0, n, moves) for d, r, lo, n in zip(dims, own, first, here)]
        moves, dims = moves + _shifts(along, moves), own
    given = tuple(zip(*((d.stride, d.padding, d.dilation) for d in dims)))
    local = torch.ops.torchvision.deform_conv2d(x, w, moves, m, b, *(n for pair in given for n in pair), *how)
    return met.result(unfilled(local, (shape[0], local.shape[1], *shape[2:])), cells)


def _shifts(along: list[Tensor], moves: Tensor) -> Tensor:
    """Return what is added to offsets, which alternate between rows and columns: one number per tap and cell."""
    rows, columns = along
    shape = (len(rows), len(columns), rows.shape[1], columns.shape[1])
    both = torch.stack([rows[:, None, :, None].expand(shape), columns[None, :, None, :].expand(shape)], 2)
    one = both.reshape(-1, *shape[2:]).to(moves.dtype)
    return one.repeat(moves.shape[1] // len(one), 1, 1)


def _plainly(operands: Any, given: Any, how: Any) -> ShardTensor:
    """Call torchvision with whole operands. Collective where they are sharded."""
    numbers = (*(n for pair in given for n in pair), *how)
    return whole(lambda *x: torch.ops.torchvision.deform_conv2d(*x, *numbers), operands)  # type: ignore[no-any-return]
