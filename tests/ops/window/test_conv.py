"""Convolutions and transposed convolutions of many geometries on shards against torch on the whole tensor.

All of them twice: as blocks so small are convolved, and in the forms of large ones.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from mpishard.ops.window import conv
from tests.compare import WORLD, compare, drawn_sizes, gathered, mesh_of, shard
from tests.emulated import emulated
from tests.ops.windows import field, sampled

# shape, kernel, stride, padding, dilation, groups
CONV = [
    ((2, 4, 23), 3, 1, 1, 1, 1),
    ((4, 17), 5, 3, 2, 1, 2),  # no batch dim
    ((2, 4, 19), 2, 3, 0, 2, 4),  # cells between the windows are skipped
    ((2, 4, 16), 4, 2, "valid", 1, 1),
    ((2, 4, 15), 4, 1, "same", 3, 2),  # one cell more behind than in front
    ((2, 4, 11, 9), 3, 1, 1, 1, 1),
    ((2, 4, 11, 9), 1, 2, 0, 1, 2),
    ((2, 4, 8, 10), 2, 2, 0, 1, 1),
    ((4, 9, 12), (5, 2), (2, 3), (3, 0), (1, 2), 4),
    ((1, 4, 10, 7), (3, 4), 1, "same", (2, 1), 1),
    ((1, 4, 6, 7), 5, 1, 4, 1, 1),  # padding and kernel wider than a block
    ((1, 4, 9, 7, 5), 3, 1, 1, 1, 1),
    ((1, 4, 9, 7, 5), (3, 1, 2), (2, 1, 3), (0, 0, 1), (2, 1, 1), 2),
]

# shape, kernel, stride, padding, output padding, dilation, groups
TRANSPOSED = [
    ((2, 4, 13), 3, 1, 1, 0, 1, 1),
    ((4, 11), 2, 2, 0, 0, 1, 2),
    ((2, 4, 12), 4, 2, 1, 0, 1, 1),
    ((2, 4, 9), 3, 2, 1, 1, 2, 4),
    ((2, 4, 7), 2, 4, 0, 3, 1, 1),  # gaps between what neighbouring cells give
    ((2, 4, 6, 5), 2, 2, 0, 0, 1, 1),
    ((2, 4, 7, 6), 3, (2, 1), 1, (1, 0), 1, 2),
    ((4, 5, 9), (4, 3), (3, 2), (2, 0), (1, 1), (1, 2), 1),
    ((1, 4, 5, 3, 4), (3, 2, 4), 2, (1, 0, 1), (1, 0, 0), 1, 1),
]


@pytest.fixture(scope="module", params=["small", "large"], autouse=True)
def blocks(request):
    """How large blocks count as; new meshes, as plans are kept with them."""
    mesh_of.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "large":
            patch.setattr(conv, "LARGE_CELLS", 0)
        yield request.param
    mesh_of.cache_clear()


def weights_of(shape, kernel, groups, out=6, transposed=False):
    """Weight and bias leaves; the number of channels is 4."""
    ndim = len(shape) - 2 if isinstance(kernel, int) and shape[0] != 4 else len(shape) - 1
    if not isinstance(kernel, int):
        ndim = len(kernel)
    out = 8 if groups == 4 else out
    kernels = (kernel,) * ndim if isinstance(kernel, int) else kernel
    lead = (4, out // groups) if transposed else (out, 4 // groups)
    return ndim, field(*lead, *kernels).requires_grad_(), field(out).requires_grad_()


def check(f, full, params, ndim, case, second=False, count=4):
    """Compare on a sample of layouts that cut spatial dims or the batch; channels stay whole."""
    dims = [d for d in range(full.ndim) if d != full.ndim - ndim - 1]
    for k, (mesh, placements, sizes) in enumerate(sampled(full.shape, dims, case, count)):
        squared = second and k == 1
        compare(
            (lambda x: f(x) ** 2) if squared else f,
            [(full, mesh, placements, sizes)],
            params,
            second=squared,
            what=f"{tuple(full.shape)} on {mesh.shape} {placements} {sizes}",
        )


# torch tells of its own copy for "same" with an even kernel
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", range(len(CONV)))
def test_convolution(case):
    shape, kernel, stride, padding, dilation, groups = CONV[case]
    ndim, w, b = weights_of(shape, kernel, groups)
    function = getattr(F, f"conv{ndim}d")
    if case % 3 == 2:
        check(lambda x: function(x, w, None, stride, padding, dilation, groups), field(*shape), [w], ndim, case)
    else:
        check(
            lambda x: function(x, w, b, stride, padding, dilation, groups),
            field(*shape),
            [w, b],
            ndim,
            case,
            second=case % 3 == 0,
        )


@pytest.mark.parametrize("case", range(len(TRANSPOSED)))
def test_transposed_convolution(case):
    shape, kernel, stride, padding, extra, dilation, groups = TRANSPOSED[case]
    ndim, w, b = weights_of(shape, kernel, groups, transposed=True)
    function = getattr(F, f"conv_transpose{ndim}d")
    bias, params = (None, [w]) if case % 3 == 2 else (b, [w, b])
    check(
        lambda x: function(x, w, bias, stride, padding, extra, groups, dilation),
        field(*shape),
        params,
        ndim,
        case,
        second=case % 3 == 0,
    )


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d, (2, 4, 13)),
        (nn.Conv2d, (2, 4, 9, 7)),
        (nn.Conv3d, (1, 4, 6, 5, 4)),
    ],
)
def test_padding_modes_of_modules(layer, shape, mode):
    torch.manual_seed(5)
    net = layer(4, 6, 3, stride=2, padding=2, padding_mode=mode, dtype=torch.float64)
    check(net, field(*shape), list(net.parameters()), len(shape) - 2, 1, second=mode == "reflect")


def test_same_padding_in_every_mode():
    torch.manual_seed(5)
    for case, mode in enumerate(["reflect", "circular"]):
        net = nn.Conv2d(4, 6, (4, 3), padding="same", padding_mode=mode, dtype=torch.float64)
        check(net, field(2, 4, 9, 7), list(net.parameters()), 2, case)


def test_transposed_module_with_an_output_size():
    torch.manual_seed(5)
    net = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, dtype=torch.float64)
    check(lambda x: net(x, output_size=(14, 12)), field(2, 4, 7, 6), list(net.parameters()), 2, 2)


def test_every_spelling():
    w = field(6, 4, 3)
    full = field(2, 4, 11)
    x = shard(full, mesh_of((WORLD.size,)), (ms.Shard(2),))
    for f in (torch.conv1d, F.conv1d):
        torch.testing.assert_close(gathered(f(x, w, padding=1)), f(full, w, padding=1))
    w = field(4, 6, 3)
    for f in (torch.conv_transpose1d, F.conv_transpose1d):
        torch.testing.assert_close(gathered(f(x, w, stride=2)), f(full, w, stride=2))


def test_half_types_and_autocast():
    full, w = field(2, 4, 11, 6), field(6, 4, 3, 3)
    x = shard(full.bfloat16(), mesh_of((WORLD.size,)), (ms.Shard(2),))
    got = gathered(F.conv2d(x, w.bfloat16(), padding=1))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, F.conv2d(full.bfloat16(), w.bfloat16(), padding=1))
    x = shard(full.float(), mesh_of((WORLD.size,)), (ms.Shard(2),))
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = gathered(F.conv2d(x, w.float(), padding=1)), F.conv2d(full.float(), w.float(), padding=1)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected)


def test_channels_and_weights_in_shards():
    """They are gathered: weights that the model computes, a plain input beside them, and channels."""
    x, w, b = field(2, 4, 8, 6), field(4, 2, 3, 3), field(4)
    for mesh, placements, _ in sampled(x.shape, (1, 2), 1):
        for weight_at in [(ms.Replicate(),) * mesh.ndim, (ms.Shard(0),) * mesh.ndim]:
            operands = [(x, mesh, placements, None), (w, mesh, weight_at, None), (b, mesh, weight_at, None)]
            compare(lambda *t: F.conv2d(*t, stride=2, padding=1, groups=2), operands)
            compare(lambda *t: F.conv_transpose2d(*t[:2], stride=2, padding=1, groups=2), operands)
        compare(lambda t: F.conv2d(x, t, groups=2), [(w, mesh, (ms.Replicate(),) * mesh.ndim, None)])
        compare(lambda t: F.conv2d(t, w, b, padding="same", groups=2), [(x, mesh, placements, None)])


def test_complex_numbers():
    full, w = field(2, 4, 9, 6).to(torch.complex128) * (1 + 2j), (field(6, 4, 3, 3) * (2 - 1j)).requires_grad_()
    v = w.detach().movedim(0, 1).clone().requires_grad_()
    for mesh, placements, sizes in sampled(full.shape, (2, 3), 2):
        compare(lambda x: F.conv2d(x, w, padding=1), [(full, mesh, placements, sizes)], [w])
        compare(lambda x: F.conv_transpose2d(x, v, stride=2), [(full, mesh, placements, sizes)], [v])


FORMS = [
    lambda x, w: F.conv2d(x, w, padding=1),
    lambda x, w: F.conv2d(x, w[..., :2, :]),  # of an even kernel, not by linearity
    lambda x, w: F.conv_transpose2d(x, w.movedim(0, 1), stride=2, padding=1),
]


@pytest.mark.parametrize("function", FORMS)
def test_operands_without_a_gradient(function):
    full, w = field(2, 4, 16, 6), field(6, 4, 3, 3)
    for mesh, placements, sizes in sampled(full.shape, (0, 2, 3), 1):
        compare(lambda x: function(x, w), [(full, mesh, placements, sizes)])
        p = w.clone().requires_grad_()
        function(shard(full, mesh, placements, sizes), p).square().sum().backward()
        expected = w.clone().requires_grad_()
        function(full, expected).square().sum().backward()
        torch.testing.assert_close(p.grad, expected.grad)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("function", FORMS)
def test_autocast_on_a_device(function, kernel):
    """What travels is of the dtype that is convolved; a step in float32 before must not decide it."""
    full, w = field(1, 4, 16, 5, dtype=torch.float32), field(6, 4, 3, 3, dtype=torch.float32)
    with emulated(kernel=kernel):
        mesh = ms.init_mesh((WORLD.size,))
        for enabled in (False, True):
            x = shard(full, mesh, [ms.Shard(2)], requires_grad=True)
            whole = full.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                got, expected = function(x, w), function(whole, w)
            rounding = {"rtol": 2e-2, "atol": 2e-2 * expected.abs().max().item()} if enabled else {}
            torch.testing.assert_close(gathered(got), expected.detach(), **rounding)
            got.float().sum().backward()
            expected.float().sum().backward()
            rounding = {"rtol": 2e-2, "atol": 2e-2 * whole.grad.abs().max().item()} if enabled else {}
            torch.testing.assert_close(x.grad.full_tensor(), whole.grad, **rounding)
        mesh.free()


@pytest.mark.parametrize("function", FORMS)
def test_a_result_changed_in_place(function):
    """Also one that is cropped, and so a view."""
    full, w = field(2, 4, 16, 6), field(6, 4, 3, 3).requires_grad_()
    for mesh, placements, sizes in sampled(full.shape, (2, 3), 3):
        compare(lambda x: F.relu_(function(x, w)), [(full, mesh, placements, sizes)], [w])


@pytest.mark.parametrize("function", FORMS)
def test_the_block_is_not_kept_twice(function, blocks):
    """What a ReLU keeps in place serves the convolution after it, too; beside it, only rows of the halo are kept."""
    mesh = mesh_of((WORLD.size,))
    x = shard(field(1, 4, 8 * mesh.size, 6), mesh, (ms.Shard(2),), requires_grad=True)
    w = field(6, 4, 3, 3).requires_grad_()
    active = F.relu(x)
    kept = {}

    def note(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        function(active, w).sum().backward()
    row = 4 * 6 * 8
    for t in (active.to_local(), w):
        kept.pop(t.untyped_storage().data_ptr(), None)
    if blocks == "large" or mesh.size == 1:
        assert sum(kept.values()) <= 4 * row, kept
    else:
        assert sum(kept.values()) >= 8 * row, "a small block is kept as its window: else the test above shows nothing"


@pytest.mark.parametrize(("kernel", "n"), [(1, 8), (2, 8), (2, 9)])
def test_strided_windows_of_own_cells_are_not_copied(kernel, n):
    """As a shortcut of a residual network: the cells that no window reads stay in the block."""
    mesh = mesh_of((WORLD.size,))
    full, w = field(1, 4, 8 * (mesh.size - 1) + n, 6), field(6, 4, kernel, kernel).requires_grad_()
    sizes = {2: (*(8,) * (mesh.size - 1), n)}
    compare(lambda x: F.conv2d(x, w, stride=2), [(full, mesh, (ms.Shard(2),), sizes)], [w])
    x = shard(full, mesh, (ms.Shard(2),), sizes, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        F.conv2d(x, w, stride=2)
    assert set(kept) - {0} <= {x.to_local().data_ptr(), w.data_ptr()}


@pytest.mark.ranks(2, 3, 4)
def test_a_block_without_output_cells():
    """Of the last block, one cell, no window is this rank's: it takes part in the exchange all the same."""
    mesh = mesh_of((WORLD.size,))
    full, w = field(1, 2, 2 * mesh.size - 1, 6), field(3, 2, 4, 4).requires_grad_()
    sizes = {2: (*(2,) * (mesh.size - 1), 1)}
    compare(lambda x: F.conv2d(x, w, stride=2, padding=1), [(full, mesh, (ms.Shard(2),), sizes)], [w])


def test_no_channels():
    """Of none torch makes none, whatever the weight says."""
    w = field(3, 0, 3, 3).requires_grad_()
    for dim in (2, 3):
        compare(
            lambda x: F.conv2d(x, w, padding=(0, 1)) * 2,
            [(field(2, 0, 8, 8), mesh_of((WORLD.size,)), (ms.Shard(dim),), None)],
            [w],
        )
    # nor of a block without samples
    sizes = {0: (2,) + (0,) * (WORLD.size - 1)}
    compare(lambda x: F.conv2d(x, w) * 2, [(field(2, 0, 8, 8), mesh_of((WORLD.size,)), (ms.Shard(0),), sizes)], [w])


@pytest.mark.parametrize(
    ("function", "n", "extents", "padding"),
    [(F.conv3d, max(12, 4 * WORLD.size), (3, 1, 7), 3), (F.conv_transpose3d, max(8, 2 * WORLD.size), (2, 3, 4), 1)],
)
def test_blocks_shorter_than_the_kernel(function, n, extents, padding):
    """Where windows touch the padding at both ends, oneDNN's weight gradient is wrong, in float32 alone."""
    torch.manual_seed(0)
    mesh = mesh_of((WORLD.size,))
    full = torch.randn(1, extents[function is F.conv3d], n, 5, 5)
    weight = torch.randn(*extents[:2], *3 * extents[2:])

    def gradients(x, weight):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(function(x, weight, stride=2, padding=padding).square().sum(), (x, weight))

    expected = gradients(full.double(), weight.double())
    for _ in range(5):
        junk = [torch.full((7, 7, 7), 1e30) for _ in range(40)]
        del junk
        for got, right in zip(gradients(shard(full, mesh, (ms.Shard(2),)), weight), expected):
            torch.testing.assert_close(gathered(got).double(), right, rtol=1e-4, atol=1e-4 * right.abs().max().item())


def test_what_a_convolution_refuses():
    mesh = mesh_of((WORLD.size,))
    x = shard(field(2, 4, 8, 6), mesh, (ms.Shard(2),))
    with pytest.raises(ms.LayoutError, match="larger than the padded input"):
        F.conv2d(x, field(6, 4, 9, 3))
    with pytest.raises(ms.LayoutError, match="input of 4 dims"):
        F.conv1d(x, field(6, 4, 3))


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_numbers_for_dims_that_are_not_there(name):
    x = shard(field(1, 2, 12, 12), mesh_of((WORLD.size,)), [ms.Shard(2)])
    weight = torch.ones(2, 2, 3, 3, dtype=torch.float64)
    for function in (F.conv2d, F.conv_transpose2d):
        with pytest.raises(RuntimeError, match=r"\[1, 1, 1\]"):
            function(x, weight, **{name: (1, 1, 1)})


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (F.conv1d, {"padding": -1}, "negative padding"),
        (F.conv1d, {"stride": 0}, "non-positive stride"),
        (F.conv1d, {"dilation": 0}, "dilation should be greater than zero"),
        (F.conv_transpose1d, {"padding": -1}, "negative padding"),
        (F.conv_transpose1d, {"stride": 0}, "non-positive stride"),
        (F.conv_transpose1d, {"dilation": -1}, "dilation should be greater than zero"),
        (F.conv_transpose1d, {"stride": 2, "output_padding": -1}, "negative output_padding"),
        (F.conv_transpose1d, {"stride": 2, "output_padding": 2}, "output padding must be smaller"),
        (F.conv_transpose1d, {"output_padding": 1}, "output padding must be smaller"),
    ],
)
def test_geometry_that_torch_refuses_is_refused_where_the_dim_is_cut(function, arguments, text):
    # of a window with no padding, torch would find nothing wrong
    full, weight = field(2, 4, 9), field(4, 4, 3)
    for x in (full, shard(full, mesh_of((WORLD.size,)), [ms.Shard(2)])):
        with pytest.raises(RuntimeError, match=text):
            function(x, weight, **arguments)


@pytest.mark.parametrize("shape", [(2, 4, 16, 12), (1, 4, 512, 512)])
def test_a_bias_of_another_dtype_is_refused_whatever_the_block(shape):
    full, weight, bias = field(*shape), field(4, 4, 3, 3), field(4, dtype=torch.float32)
    for x in (full, shard(full, mesh_of((WORLD.size,)), [ms.Shard(2)])):
        with pytest.raises(RuntimeError, match="bias type"):
            F.conv2d(x, weight, bias, padding=1)


# shape, channels of the result, kernel, stride, padding, dilation: blocks, or strips at their edges, of one column
ONE_COLUMN = [
    ((2, 3, 24, 4), 8, 4, 4, 0, 1),
    ((1, 5, 12, 9), 8, 3, 2, 1, 1),
    ((2, 3, 20, 8), 6, 2, (1, 2), 0, (1, 2)),
    ((1, 3, 6, 12, 8), 4, 3, 2, 1, 1),
]


@pytest.mark.parametrize("how", ["plain", "ghost", "transposed"])
@pytest.mark.parametrize("case", ONE_COLUMN, ids=str)
def test_16_bits_of_one_column(case, how):
    """Where oneDNN (docs/upstream.md) computes other cells: results and gradients are near those of float64."""
    shape, results, kernel, stride, padding, dilation = case
    transposed = how == "transposed"
    if transposed:
        shape = (*shape[:-1], 4)
    op = getattr(F, f"conv{'_transpose' if transposed else ''}{len(shape) - 2}d")
    channels = (shape[1], results) if transposed else (results, shape[1])
    x, weight = field(*shape).bfloat16(), field(*channels, *[kernel] * (len(shape) - 2)).bfloat16()
    geometry = {"stride": stride, "padding": padding, "dilation": dilation}
    exact = [t.double().requires_grad_() for t in (x, weight)]
    z = op(*exact, **geometry)
    cotangent = torch.randn(z.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    expected = [z, *torch.autograd.grad(z, exact, cotangent.double())]
    for sizes in (None, {len(shape) - 1: drawn_sizes(random.Random(3), shape[-1], WORLD.size)}):
        mesh = mesh_of((WORLD.size,))
        if how == "ghost" and sizes is None:
            resident = ms.zeros(*shape, mesh=mesh, placements=[ms.Shard(-1)], ghost=1, dtype=x.dtype)
            resident.copy_(ms.distribute_tensor(x, mesh, [ms.Shard(-1)]))
            given = [resident.requires_grad_(), weight.clone().requires_grad_()]
        else:
            given = [shard(x, mesh, [ms.Shard(-1)], sizes, True), weight.clone().requires_grad_()]
        y = op(*given, **geometry)
        found = [y, *torch.autograd.grad(y, given, shard(cotangent, y.mesh, y.placements))]
        for got, want in zip(found, expected, strict=True):
            scale = float(want.detach().abs().max())
            torch.testing.assert_close(gathered(got.detach()).double(), want.detach(), rtol=0.02, atol=0.02 * scale)


@pytest.mark.parametrize("last", [1, 0])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (3, 3, 1), (5, 4, 2), (7, 4, 3), (4, 4, 3)])
def test_16_bits_of_fewer_cells_than_the_stride(kernel, stride, padding, transposed, ndim, last):
    """Of such blocks that are padded, oneDNN (docs/upstream.md) computes another gradient of the weight."""
    sizes = (*[2 * stride] * (WORLD.size - 1), last if WORLD.size > 1 else 2 * stride + last)
    x = field(2, 3, *[4] * (ndim - 1), sum(sizes)).bfloat16()
    weight = field(*((3, 8) if transposed else (8, 3)), *[2] * (ndim - 1), kernel).bfloat16()
    op = getattr(F, f"conv{'_transpose' if transposed else ''}{ndim}d")
    beside = (1,) * (ndim - 1)
    geometry = {"stride": (*beside, stride), "padding": (*beside, padding)}
    exact = [t.double().requires_grad_() for t in (x, weight)]
    z = op(*exact, **geometry)
    cotangent = torch.randn(z.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    expected = [z, *torch.autograd.grad(z, exact, cotangent.double())]
    given = [shard(x, mesh_of((WORLD.size,)), [ms.Shard(-1)], {ndim + 1: sizes}, True), weight.requires_grad_()]
    y = op(*given, **geometry)
    found = [y, *torch.autograd.grad(y, given, shard(cotangent, y.mesh, y.placements))]
    for got, want in zip(found, expected, strict=True):
        scale = float(want.detach().abs().max())
        torch.testing.assert_close(gathered(got.detach()).double(), want.detach(), rtol=0.02, atol=0.02 * scale)
