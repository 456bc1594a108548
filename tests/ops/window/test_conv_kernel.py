"""Which kernel convolves a block: each gives what torch's gives, to second order, and the plan says why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from mpishard.ops.window import conv_kernel, conv_tiles
from mpishard.ops.window.conv_kernel import Kernel, convolved, kernel_of
from tests.compare import WORLD, compare, mesh_of

# input, weight, stride, padding, dilation, transposed -> forward, gradient of the input, gradient of the weight
CASES = {
    "unfolds": ((1, 16, 10, 9, 8), (16, 16, 3, 3, 3), 1, 1, 1, False, "onednn", "forward", "onednn"),
    "window": ((1, 16, 6, 6, 7), (8, 16, 3, 3, 3), 1, 0, 1, False, "columns", "columns", "columns"),
    "padded": ((1, 16, 8, 8, 8), (16, 16, 3, 3, 3), 1, 1, 1, False, "columns", "columns", "columns"),
    "padded unevenly": ((1, 8, 8, 6, 9), (8, 8, 3, 3, 3), 1, (0, 3, 1), (2, 1, 3), False, *["columns"] * 3),
    "halves": ((1, 32, 9, 8, 9), (16, 32, 2, 2, 2), 2, 0, 1, False, "columns", "columns", "columns"),
    "every second": ((1, 8, 16, 15, 14), (4, 8, 3, 3, 3), 2, 1, 1, False, "columns", "columns", "columns"),
    "strides": ((1, 16, 17, 8, 12), (4, 16, 3, 2, 3), (3, 1, 2), (1, 0, 2), (2, 1, 1), False, *["columns"] * 3),
    "uneven": ((1, 8, 13, 17, 19), (16, 8, 3, 3, 3), 1, 1, 1, False, "onednn", "forward", "onednn"),
    "thin": ((1, 8, 6, 64, 48), (8, 8, 3, 3, 3), (1, 1, 1), (1, 0, 2), 1, False, "onednn", "forward", "channels_last"),
    "dilated": ((1, 16, 9, 16, 12), (16, 16, 3, 3, 3), 1, (2, 0, 4), (2, 1, 3), False, "onednn", "forward", "onednn"),
    "padded far": ((1, 16, 10, 9, 8), (16, 16, 3, 3, 3), 1, 3, 1, False, "onednn", "torch", "onednn"),
    "strided": ((1, 16, 17, 30, 22), (8, 16, 3, 3, 3), 2, 1, 1, False, "onednn", "onednn", "onednn"),
    "transposed": ((1, 16, 16, 16, 16), (16, 8, 2, 2, 2), 2, 0, 1, True, "torch", "forward", "torch"),
    "large": ((1, 8, 64, 64, 5), (8, 8, 3, 3, 3), 1, 1, 1, False, "torch", "forward", "channels_last"),
    "batch": ((2, 8, 12, 16, 12), (8, 8, 3, 3, 3), 1, 1, 1, False, "torch", "forward", "channels_last"),
    "plane": ((1, 8, 96, 90), (8, 8, 3, 3), 1, 1, 1, False, "torch", "forward", "torch"),
    "few": ((2, 8, 12, 16, 12), (4, 8, 3, 3, 3), 1, 1, 1, False, "torch", "forward", "channels_last"),
    "few channels": ((1, 3, 20, 24, 22), (4, 3, 3, 3, 3), 1, 1, 1, False, "onednn", "forward", "onednn"),
}
# the same on a processor with AVX2, where they are others
AVX2 = {
    "thin": ["onednn", "forward", "onednn"],
    **dict.fromkeys(("large", "batch", "plane"), ["torch"] * 3),
    "few": ["torch", "forward", "torch"],
    "few channels": ["onednn", "forward", "torch"],
}


# of float64: input, weight, stride, padding, dilation -> kernel, whether tile after tile
WIDE = {
    "small window": ((1, 8, 6, 6, 6), (8, 8, 3, 3, 3), 1, 0, 1, "torch", False),
    "window": ((1, 16, 6, 6, 7), (8, 16, 3, 3, 3), 1, 0, 1, "columns", False),
    "small and padded": ((1, 16, 4, 4, 5), (8, 16, 3, 3, 3), 1, 1, 1, "torch", False),
    "cube": ((1, 8, 18, 16, 19), (6, 8, 3, 3, 3), 1, 1, 1, "columns", True),
    "wide rows": ((2, 16, 5, 33, 31), (4, 16, 3, 5, 3), 1, (1, 0, 1), 1, "columns", True),
    "strides": ((1, 16, 34, 33, 17), (4, 16, 3, 3, 2), (2, 1, 2), (2, 1, 0), (1, 2, 3), "columns", True),
    "plane": ((2, 8, 128, 125), (8, 8, 3, 3), 1, 1, 1, "torch", True),
    "line": ((2, 16, 12000), (8, 16, 7), 1, 3, 1, "torch", True),
    "thin plane": ((1, 8, 3, 9000), (4, 8, 3, 3), 1, (0, 1), 1, "torch", False),
    "wide padding": ((1, 8, 20, 5, 9), (8, 8, 3, 3, 3), 1, (9, 8, 2), 1, "columns", True),
    "strided plane": ((1, 16, 128, 129), (8, 16, 5, 4), (3, 1), (2, 3), (2, 1), "torch", True),
}


def each(value, ndim):
    return (value,) * ndim if isinstance(value, int) else value


def operands(name):
    shape, kernel, stride, padding, dilation, transposed, *chosen = CASES[name]
    generator = torch.Generator().manual_seed(3)
    bias = kernel[1] if transposed else kernel[0]
    tensors = [torch.randn(s, generator=generator).requires_grad_() for s in (shape, kernel, (bias,))]
    ndim = len(shape) - 2
    local = (each(stride, ndim), each(padding, ndim), each(dilation, ndim), transposed, (0,) * ndim, 1)
    return tensors, local, chosen


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("vector", [16, 8], ids=["avx512", "avx2"])
@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name, vector, monkeypatch):
    monkeypatch.setattr(conv_kernel, "VECTOR", vector)
    tensors, local, chosen = operands(name)
    kernel = kernel_of(*tensors[:2], local)
    assert [kernel.forward, kernel.data, kernel.weight] == (AVX2.get(name, chosen) if vector == 8 else chosen)
    assert kernel.is_torch == (set(chosen) == {"torch"} or (vector == 8 and name in ("large", "batch", "plane")))
    y = convolved(kernel, local, *tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    z = torch.convolution(*exact, *local)
    close(y, z)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    for found, expected in zip(
        torch.autograd.grad(y, tensors, g, retain_graph=True), torch.autograd.grad(z, exact, g.double()), strict=True
    ):
        close(found, expected)
    # a cotangent with steps of 0, and gradients of some operands only
    close(
        torch.autograd.grad(y, tensors[2], torch.ones(()).expand(y.shape), retain_graph=True)[0],
        torch.full((len(tensors[2]),), z.numel() / len(tensors[2]), dtype=torch.float64),
    )
    weight = torch.autograd.grad(y, tensors[1], g)[0]
    close(weight, torch.autograd.grad(torch.convolution(*exact, *local), exact[1], g.double())[0])


@pytest.mark.parametrize("name", ["unfolds", "window", "every second", "thin", "strided", "transposed"])
def test_gradients_of_gradients(name):
    tensors, local, _ = operands(name)
    exact = [t.detach().double().requires_grad_() for t in tensors]

    def second(f, x, weight, bias):
        (g,) = torch.autograd.grad((f(x, weight, bias) ** 2).mean(), x, create_graph=True)
        return torch.autograd.grad((g**2).sum(), (x, weight))

    found = second(lambda *t: convolved(kernel_of(*t[:2], local), local, *t), *tensors)
    for a, b in zip(found, second(lambda *t: torch.convolution(*t, *local), *exact), strict=True):
        close(a, b)


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("small", [False, True], ids=["tiles", "small tiles"])
def test_float64_equals_torch(name, small, monkeypatch):
    shape, size, stride, padding, dilation, how, tiled = WIDE[name]
    if small:  # all dims are cut, unevenly
        monkeypatch.setattr(conv_tiles, "TILE", 1 << 13)
    generator = torch.Generator().manual_seed(3)
    shapes = (shape, size, size[:1])
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    ndim = len(shape) - 2
    local = (each(stride, ndim), each(padding, ndim), each(dilation, ndim), False, (0,) * ndim, 1)
    kernel = kernel_of(*tensors[:2], local)
    assert (kernel.forward, kernel.data, kernel.weight, kernel.tiled) == (how, how, how, tiled)
    y, z = convolved(kernel, local, *tensors), torch.convolution(*tensors, *local)
    torch.testing.assert_close(y, z)
    g = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    for found, expected in zip(torch.autograd.grad(y, tensors, g), torch.autograd.grad(z, tensors, g), strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["cube", "plane"])
def test_tiles_are_in_the_memory_format_of_torch(name):
    shape, size, stride, padding, dilation, *_ = WIDE[name]
    ndim = len(shape) - 2
    local = (each(stride, ndim), each(padding, ndim), each(dilation, ndim), False, (0,) * ndim, 1)
    memory_format = torch.channels_last if ndim == 2 else torch.channels_last_3d
    x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=memory_format)
    weight = torch.randn(size, dtype=torch.float64)
    y, z = convolved(kernel_of(x, weight, local), local, x, weight, None), torch.convolution(x, weight, None, *local)
    torch.testing.assert_close(y, z)
    assert y.stride() == z.stride()


def test_channels_last_stays():
    tensors, local, _ = operands("unfolds")
    x = tensors[0].detach().contiguous(memory_format=torch.channels_last_3d)
    y = convolved(kernel_of(x, tensors[1], local), local, x, *tensors[1:])
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    close(y, torch.convolution(*(t.double() for t in (x, *tensors[1:])), *local))


def test_torch_where_it_is_better_or_asked_for(monkeypatch):
    tensors, local, _ = operands("unfolds")
    assert kernel_of(tensors[0].cfloat(), tensors[1].cfloat(), local) == Kernel()
    assert kernel_of(tensors[0][:, :, :4, :4, :4], tensors[1], local) == Kernel()
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    assert kernel_of(*tensors[:2], local) == Kernel()


def test_the_plan_says_why():
    full = torch.randn(1, 16, 8 * WORLD.size, 12, 12, generator=torch.Generator().manual_seed(5))
    weight = torch.randn(16, 16, 3, 3, 3, generator=torch.Generator().manual_seed(6)) / 20
    mesh = mesh_of((WORLD.size,))
    compare(
        lambda x, w: F.conv3d(x, w, padding=1),
        [(full, mesh, (ms.Shard(2),), None), (weight, mesh, None, None)],
        rtol=1e-4,
        atol=1e-4,
    )
    mesh = ms.init_mesh((WORLD.size,), ("x",))
    F.conv3d(ms.distribute_tensor(full, mesh, (ms.Shard(2),)), weight, padding=1)
    (plan,) = (plan for key, plan in mesh.plans.items() if str(key[0]) == "conv3d")
    assert plan.kernel.forward == "onednn"
    assert "too few cells" in plan.kernel.reason
