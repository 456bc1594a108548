"""The operators of torchvision, or, where it is not loaded, stand-ins that read what those read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, compare, layouts, mesh_of, shard, skew
from tests.ops.windows import field


def nms(dets, scores, iou_threshold):
    kept = []
    areas = (dets[:, 2] - dets[:, 0]) * (dets[:, 3] - dets[:, 1])
    for i in scores.argsort(descending=True, stable=True).tolist():
        both = (dets[kept, 2:].minimum(dets[i, 2:]) - dets[kept, :2].maximum(dets[i, :2])).clamp(min=0).prod(1)
        if not (both / (areas[kept] + areas[i] - both) > iou_threshold).any():
            kept.append(i)
    return torch.tensor(kept, dtype=torch.long)


def boxes_of(input, rois, scale):
    for b, *corners in rois.tolist():
        x0, y0, x1, y1 = (int(c * scale) for c in corners)
        yield input[int(b), :, y0 : y1 + 1, x0 : x1 + 1]


def in_boxes(pool, input, rois, scale, height, width):
    found = [pool(part, (height, width)) for part in boxes_of(input, rois, scale)]
    return torch.stack(found) if found else input.new_zeros(0, input.shape[1], height, width) + input.sum()


def roi_align(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned):
    return in_boxes(F.adaptive_avg_pool2d, input, rois, spatial_scale, pooled_height, pooled_width)


def roi_pool(input, rois, *how):
    parts = (in_boxes(lambda x, n, i=i: F.adaptive_max_pool2d(x, n, True)[i], input, rois, *how) for i in range(2))
    largest, places = parts
    return largest, places.int()


def ps_roi_pool(input, rois, spatial_scale, pooled_height, pooled_width):
    every = roi_align(input, rois, spatial_scale, pooled_height, pooled_width, 0, False)
    bins = pooled_height * pooled_width
    own = every.flatten(2).unflatten(1, (-1, bins)).diagonal(dim1=2, dim2=3).unflatten(2, (pooled_height, pooled_width))
    return own, torch.arange(input.shape[1]).view(-1, pooled_height, pooled_width).expand(own.shape).int()


def ps_roi_align(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio):
    return ps_roi_pool(input, rois, spatial_scale, pooled_height, pooled_width)


def deform_conv2d(input, weight, offset, mask, bias, sh, sw, ph, pw, dh, dw, groups, offset_groups, use_mask):
    (height, width), (kh, kw) = input.shape[2:], weight.shape[2:]
    n, rows, columns = len(offset), (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1, offset.shape[3]
    if rows != offset.shape[2]:
        raise RuntimeError(f"offset output dims: {tuple(offset.shape[2:])}")
    both = offset.view(n, offset_groups, kh, kw, 2, rows, columns)
    y = both[:, :, :, :, 0] + (torch.arange(kh) * dh - ph).view(kh, 1, 1, 1) + (torch.arange(rows) * sh).view(-1, 1)
    x = both[:, :, :, :, 1] + (torch.arange(kw) * dw - pw).view(kw, 1, 1) + torch.arange(columns) * sw
    cells = input.unflatten(1, (offset_groups, -1)).flatten(3)
    taps = 0
    for i in (0, 1):
        for j in (0, 1):
            at_y, at_x = y.detach().floor() + i, x.detach().floor() + j
            near = (1 - (y - at_y).abs()) * (1 - (x - at_x).abs())
            near = near * ((at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width))
            place = (at_y.clamp(0, height - 1) * width + at_x.clamp(0, width - 1)).long()
            place, near = place.flatten(2)[:, :, None], near.flatten(2)[:, :, None]
            taps = taps + cells.gather(3, place.expand(-1, -1, cells.shape[2], -1)) * near
    taps = taps.unflatten(3, (kh * kw, rows, columns))
    if use_mask:
        taps = taps * mask.view(n, offset_groups, 1, kh * kw, rows, columns)
    taps = taps.flatten(1, 2).unflatten(1, (groups, -1))
    kernels = weight.flatten(2).unflatten(0, (groups, -1))
    return torch.einsum("ngckyx,gock->ngoyx", taps, kernels).flatten(1, 2) + bias.view(-1, 1, 1)


BOXES = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
STRIDES = "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w"
SCHEMAS = {
    nms: "Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    roi_align: f"{BOXES}, int sampling_ratio, bool aligned) -> Tensor",
    roi_pool: f"{BOXES}) -> (Tensor, Tensor)",
    ps_roi_align: f"{BOXES}, int sampling_ratio) -> (Tensor, Tensor)",
    ps_roi_pool: f"{BOXES}) -> (Tensor, Tensor)",
    deform_conv2d: f"Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {STRIDES}, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
}
OPS = torch.ops.torchvision
if not hasattr(OPS, "nms"):
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for _function, _schema in SCHEMAS.items():
        LIBRARY.define(f"{_function.__name__}({_schema}")
        LIBRARY.impl(_function.__name__, _function, "CompositeImplicitAutograd")

FIELD = field(2, 8, 9, 7)
ROIS = torch.tensor([[0, 0, 0, 5, 5], [1, 2, 1, 6, 8], [1, 0, 3, 4, 7], [0, 1, 1, 3, 2], [0, 3, 0, 6, 6]]).double()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, b: OPS.roi_align(x, b, 1.0, 2, 2, 2, False),
        lambda x, b: OPS.roi_pool(x, b, 1.0, 2, 2),
        lambda x, b: OPS.ps_roi_align(x, b, 1.0, 2, 2, 2),
        lambda x, b: OPS.ps_roi_pool(x, b, 1.0, 2, 2),
    ],
    ids=["roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"],
)
def test_boxes_of_a_field(call):
    for mesh, placements, sizes in layouts(FIELD.shape, (0, 1, 2, 3), 2):
        apart = [ms.Replicate() if p == ms.Replicate() else ms.Shard(0) for p in placements]
        for boxes in ((None, None, None), (mesh, apart, None)):
            operands = [(FIELD, mesh, placements, sizes), (ROIS, *boxes)]
            compare(call, operands, differentiable=(True, False), what=f"{placements} {sizes} {boxes}")


def test_the_best_of_boxes():
    corners = torch.rand(23, 2, generator=torch.Generator().manual_seed(5)).double()
    boxes = torch.cat([corners, corners + 0.4], 1)
    scores = corners.sum(1).sin()
    mesh = mesh_of((WORLD.size,))
    for placement, sizes in ((ms.Shard(0), None), (ms.Shard(0), {0: skew(23, WORLD.size)}), (ms.Replicate(), None)):
        d, s = (shard(t, mesh, (placement,), sizes) for t in (boxes, scores))
        kept = OPS.nms(boxes, scores, 0.3)
        assert 1 < len(kept) < 23
        assert OPS.nms(d, s, 0.3).full_tensor().equal(kept)
        assert OPS.nms.default(d, scores, 0.3).full_tensor().equal(kept)


CONVOLUTIONS = [
    # kernel, stride, padding, dilation, groups, offset groups
    ((3, 3), (1, 1), (1, 1), (1, 1), 1, 1),
    ((3, 2), (2, 1), (0, 2), (2, 1), 2, 2),
    ((1, 1), (3, 2), (0, 0), (1, 1), 1, 2),
    ((7, 5), (1, 2), (0, 1), (1, 1), 1, 1),
]


def extents(kernel, stride, padding, dilation):
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(FIELD.shape[2:], kernel, stride, padding, dilation)
    ]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("how", CONVOLUTIONS)
def test_deformable_convolution(how, masked):
    *along, groups, offset_groups = how
    rows, columns = extents(*along)
    kernel, taps = along[0], along[0][0] * along[0][1]
    weight, bias = field(4, 8 // groups, *kernel).requires_grad_(), field(4).requires_grad_()
    offset = 3 * field(2, 2 * offset_groups * taps, rows, columns)
    offset[:, :, ::2] = 0  # on a cell
    mask = field(2, offset_groups * taps, rows, columns) if masked else torch.zeros(2, 1).double()
    numbers = (n for pair in along[1:] for n in pair)
    rest = (*numbers, groups, offset_groups, masked)

    def call(x, moves, m):
        return OPS.deform_conv2d(x, weight, moves, m, bias, *rest)

    for mesh, placements, sizes in layouts(FIELD.shape, (0, 2, 3), 2):
        plain = (None, None, None)
        beside = (mesh, placements, None)
        for where in ((beside, beside if masked else plain), (plain, plain)):
            operands = [(FIELD, mesh, placements, sizes), *((t, *w) for t, w in zip((offset, mask), where))]
            compare(call, operands, (weight, bias), what=f"{placements} {sizes} {where}")


def test_offsets_that_do_not_fit_are_refused_on_every_rank():
    mesh = mesh_of((WORLD.size,))
    x, moves = (shard(t, mesh, (ms.Shard(2),)) for t in (FIELD, field(2, 18, 8, 7)))
    nothing = torch.zeros(2, 1).double()
    with pytest.raises(RuntimeError, match="offset output dims"):
        OPS.deform_conv2d(x, field(4, 8, 3, 3), moves, nothing, field(4), 1, 1, 1, 1, 1, 1, 1, 1, False)


def test_the_field_travels_once():
    mesh = mesh_of((WORLD.size,))
    x, moves = (shard(t, mesh, (ms.Shard(2),)) for t in (field(2, 8, 12, 7), field(2, 18, 12, 7)))
    weight, bias, nothing = field(4, 8, 3, 3), field(4), torch.zeros(2, 1).double()
    for call in (
        lambda: OPS.deform_conv2d(x, weight, moves, nothing, bias, 1, 1, 1, 1, 1, 1, 1, 1, False),
        lambda: OPS.roi_align(x, ROIS, 1.0, 2, 2, 2, False),
    ):
        call()
        with ms.comm_counter() as count:
            call()
        sent = {op: (c.messages, c.nbytes) for op, c in count.by_op.items() if c.messages}
        assert sent == ({"all_gather": (1, x.to_local().nbytes)} if WORLD.size > 1 else {})
