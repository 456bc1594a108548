"""What libraries call below torch's public functions, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import WORLD, compare, layouts, mesh_of, shard
from tests.ops.windows import check, field, same

aten = torch.ops.aten
X, G = field(4, 6, 5), field(4, 6, 5).flip(0)
MASKED = X.where(X > -0.5, -torch.inf).index_fill(0, torch.tensor([1]), -torch.inf)

ONE = {
    "softmax": (X, lambda x: torch._softmax(x, 1, False)),
    "log_softmax": (X, lambda x: aten._log_softmax.default(x, -1, False)),
    "safe_softmax": (MASKED, lambda x: torch._safe_softmax(x, 1)),
    "slice": (X, lambda x: aten.slice.Tensor(x, 1, 1, 5, 2)),
    "fill": (X, lambda x: torch.fill(x, 3) + x),
    "chunk_cat": (X, lambda x: torch._chunk_cat([x.detach(), x.detach() * 2], 1, 4)),
}


@pytest.mark.parametrize("name", ONE)
def test_of_one_tensor(name):
    full, f = ONE[name]
    check(f, full, range(full.ndim), len(name))


BACKWARD = {
    "softmax": lambda g, x: torch._softmax_backward_data(g, x.softmax(1), 1, x.dtype),
    "log_softmax": lambda g, x: aten._log_softmax_backward_data(g, x.log_softmax(2), 2, x.dtype),
    "sigmoid": lambda g, x: aten.sigmoid_backward(g, x.sigmoid()),
    "threshold": lambda g, x: aten.threshold_backward.default(g, x, 0),
    "gelu": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    "dropout": lambda g, x: aten.native_dropout_backward(g, x > 0, 2.0),
    "max_pool": lambda g, x: aten.max_pool2d_with_indices_backward(
        g[:, :3, :2], x.detach(), [2, 2], [], [0, 0], [1, 1], False, F.max_pool2d(x.detach(), 2, return_indices=True)[1]
    ),
}


IMAGES = {
    1: ((2, 4, 9), (6, 2, 3), {"stride": 2, "padding": 1, "groups": 2}),
    2: ((2, 3, 8, 7), (4, 3, 3, 2), {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}),
    3: ((1, 2, 5, 6, 4), (2, 2, 3, 3, 3), {"padding": 1}),
}


@pytest.mark.parametrize("ndim", IMAGES)
def test_gradients_of_convolutions(ndim):
    shape, kernel, options = IMAGES[ndim]
    x, w = field(*shape), field(*kernel)
    g = torch.cos(getattr(F, f"conv{ndim}d")(x, w, **options))
    of_input, of_weight = (getattr(torch.nn.grad, f"conv{ndim}d_{what}") for what in ("input", "weight"))
    window = [options.get(k, d) for k, d in (("stride", 1), ("padding", 0), ("dilation", 1))]
    local = [[n] * ndim if isinstance(n, int) else list(n) for n in window]
    rest = [*local, False, [0] * ndim, options.get("groups", 1), [True, True, True]]
    for i, (mesh, placements, sizes) in enumerate(list(layouts(shape, range(len(shape))))[ndim - 1 :: 5]):
        where, whole = (mesh, placements, None), (mesh, None, None)
        calls = [
            (lambda g, w: of_input(shape, w, g, **options), [(g, *where), (w, *whole)]),
            (lambda x, g: of_weight(x, w.shape, g, **options), [(x, mesh, placements, sizes), (g, *where)]),
            (lambda x, g: of_weight(x, w.shape, g, **options), [(x, *where), (g, *whole)]),
            (lambda g, x: aten.convolution_backward(g, x, w, [len(w)], *rest)[i % 3], [(g, *where), (x, *whole)]),
        ]
        for f, operands in calls:
            compare(f, operands, what=f"{placements} {sizes}")


def test_gradients_of_a_transposed_convolution():
    x, w = field(2, 3, 5, 4), field(3, 2, 3, 3)
    g = torch.cos(F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1))
    rest = [[2], [2, 2], [1, 1], [1, 1], True, [1, 1], 1, [True, True, False]]
    for i, (mesh, placements, sizes) in enumerate(list(layouts(x.shape, range(4)))[::4]):
        operands = [(g, mesh, placements, None), (x, mesh, placements, sizes), (w, mesh, None, None)]
        compare(lambda g, x, w: aten.convolution_backward(g, x, w, *rest)[i % 2], operands)


@pytest.mark.parametrize("of", [torch._softmax_backward_data, torch._log_softmax_backward_data])
def test_cotangents_keep_their_dtype(of):
    for given, asked in ((torch.float64, torch.float32), (torch.bfloat16, torch.float32)):
        same(lambda x, asked=asked: of(x, x, 1, asked), X.to(given), (0, 1), 0, exact=False)


@pytest.mark.parametrize("name", BACKWARD)
def test_cotangents(name):
    every = list(layouts(X.shape, (0, 1, 2)))
    for i, (mesh, placements, sizes) in enumerate(every[len(name) % 2 :: 2]):
        other = (mesh, None, None) if i % 3 == 0 else (mesh, placements, None)
        compare(BACKWARD[name], [(G, *other), (X, mesh, placements, sizes)], what=f"{name} {placements} {sizes}")


MASK = torch.tensor([[True, False], [True, True]])
AT = [torch.tensor([[3, -9], [0, 2]]), torch.tensor([[5], [-6]]), torch.tensor([[1, 9], [0, 4]])]
INDEXED = {
    "pick": lambda x, mask: torch._unsafe_masked_index(x, mask, AT, 7),
    "add": lambda x, mask: torch._unsafe_masked_index_put_accumulate(x, mask, AT, field(2, 2)),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_that_count_where_a_mask_is_true(name):
    for i, (mesh, placements, sizes) in enumerate(list(layouts(X.shape, (0, 1, 2)))[::2]):
        mask = (MASK, mesh, None if i % 2 else [ms.Shard(0)] * mesh.ndim, None)
        compare(INDEXED[name], [(X, mesh, placements, sizes), mask], what=f"{placements} {sizes}")


# functions that have no rule of their own: that of the public function is theirs
BELOW = {
    "add": lambda x, y: aten.add.Tensor(x, y, alpha=2),
    "add_": lambda x, y: aten.add_.Tensor(x * 1, y),
    "bmm": lambda x, y: aten.bmm(x, y.mT),
    "cat": lambda x, y: aten.cat([x, y], 1),
    "clone": lambda x, y: aten.clone(x) * aten._to_copy(y, dtype=torch.float64),
    "gelu": lambda x, y: aten.gelu(x, approximate="tanh"),
    "index": lambda x, y: aten.index.Tensor(x, [None, torch.tensor([5, 0, 0])]),
    "layer_norm": lambda x, y: aten.layer_norm(x, [5], y[0, 0], None),
    "linalg": lambda x, y: aten.linalg_vector_norm(x, 2, [1], True),
    "max": lambda x, y: aten.max.dim(x, 1)[0],
    "select": lambda x, y: aten.select.int(x, 1, 2),
    "softmax": lambda x, y: aten._softmax(aten.unsqueeze(x, 0), 2, False),
    "split": lambda x, y: aten.split.Tensor(x, 2, 1)[1],
    "sum": lambda x, y: aten.sum.dim_IntList(x, [0, 2], True),
    "transpose": lambda x, y: aten.transpose.int(x, 0, 2),
    "var_mean": lambda x, y: aten.var_mean.correction(x, [1], correction=1),
    "view": lambda x, y: aten.permute(aten._unsafe_view(x, [24, 5]), [1, 0]),
    "where": lambda x, y: aten.where.self(x > 0, x, y),
    "convolution": lambda x, y: aten.convolution(x, y[:2, :, :3], None, [1], [1], [1], False, [0], 1),
    "transposed": lambda x, y: aten.convolution(x, y[:, :, :3], None, [2], [1], [1], True, [1], 1)[:1],
}


@pytest.mark.parametrize("name", BELOW)
def test_functions_of_aten(name):
    every = list(layouts(X.shape, (0, 1, 2), 1))
    if name in ("convolution", "transposed"):
        every = [(m, p, s) for m, p, s in every if not any(q.is_shard(1) for q in p)]
        x, y = field(3, 6, 9), field(6, 6, 3)
    else:
        x, y = X, G
    for mesh, placements, sizes in every:
        sizes = sizes if tuple(x.shape) == tuple(X.shape) else None
        operands = [(x, mesh, placements, sizes), (y, mesh, None, None)]
        compare(BELOW[name], operands, what=f"{name} {placements} {sizes}")


def test_what_no_public_function_does_is_refused():
    x = shard(X, mesh_of((WORLD.size,)), [ms.Shard(0)])
    with pytest.raises(ms.NoShardingRule, match="aten"):
        aten._cdist_backward(x, x, x, 2.0, x)
