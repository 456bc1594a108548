"""Convolutions whose strips travel meanwhile: equal to torch, to second order; and when this form is chosen."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from mpishard.ops.window import conv
from tests.compare import WORLD, compare, mesh_of, mesh_shapes

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
SHAPES = {1: (2, 4, 24), 2: (2, 4, 12, 13), 3: (2, 4, 12, 8, 7)}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(conv, "LARGE_CELLS", 0)


def reasons(mesh):
    """Why each convolution planned on this mesh copies its block; empty where it does not."""
    return [plan.reason for key, plan in mesh.plans.items() if str(key[0]) in ("conv1d", "conv2d", "conv3d")]


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_equal_to_torch(ndim):
    generator = torch.Generator().manual_seed(ndim)
    full = torch.randn(SHAPES[ndim], dtype=torch.float64, generator=generator)
    geometries = list(itertools.product((2, 3, 5), (1, 2, 3), (1, 2), (0, 1, 2)))
    chosen = 0
    for mesh_shape in mesh_shapes(ndim):
        mesh = ms.init_mesh(mesh_shape)
        placements = [ms.Shard(2 + m) for m in range(mesh.ndim)]
        for i, (kernel, stride, dilation, padding) in enumerate(geometries):
            if any((kernel - 1) * dilation + 1 > n + 2 * padding for n in SHAPES[ndim][2:]):
                continue
            weight = torch.randn((6, 2, *[kernel] * ndim), dtype=torch.float64, generator=generator).requires_grad_()
            bias = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
            if ndim == 3 and i % 4:
                continue
            compare(
                lambda x: CONVOLUTIONS[ndim](x, weight, bias, stride, padding, dilation, 2),
                [(full, mesh, placements, None)],
                [weight, bias],
                second=i % 9 == 0,
                what=f"{mesh_shape} kernel {kernel} stride {stride} dilation {dilation} padding {padding}",
            )
        chosen += sum(not reason for reason in reasons(mesh))
        mesh.free()
    # else these comparisons would show nothing
    assert chosen > 0 or WORLD.size == 1


def test_frozen_operands():
    """Whatever needs no gradient costs none, and changes no other."""
    mesh = mesh_of((-1,))
    generator = torch.Generator().manual_seed(8)
    full = torch.randn(1, 2, 4 * mesh.size, 5, dtype=torch.float64, generator=generator)
    for x_grad, w_grad in ((True, False), (False, True)):
        weight = torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=generator).requires_grad_(w_grad)
        x = ms.distribute_tensor(full, mesh, (ms.Shard(2),)).requires_grad_(x_grad)
        whole = full.clone().requires_grad_(x_grad)
        got, expected = F.conv2d(x, weight, padding=1), F.conv2d(whole, weight, padding=1)
        leaves = [(x, whole)] if x_grad else [(weight, weight)]
        for ours, theirs in leaves:
            (g,) = torch.autograd.grad((got * got).sum(), ours)
            (e,) = torch.autograd.grad((expected * expected).sum(), theirs)
            torch.testing.assert_close(g.full_tensor() if x_grad else g, e)


def test_the_reason_against_it_is_recorded(monkeypatch):
    monkeypatch.setattr(conv, "LARGE_CELLS", 1 << 16)
    mesh = ms.init_mesh((-1,))
    x = ms.distribute_tensor(torch.randn(1, 2, 4 * mesh.size, 5), mesh, (ms.Shard(2),))
    F.conv2d(x, torch.randn(3, 2, 3, 3), padding=1)
    (reason,) = reasons(mesh)
    assert reason.startswith("small" if mesh.size > 1 else "no halo")
    mesh.free()


@pytest.mark.ranks(2, 3, 4)
def test_one_strip_per_neighbour_each_way():
    mesh = mesh_of((-1,))
    x = ms.distribute_tensor(torch.randn(1, 2, 4 * mesh.size, 5), mesh, (ms.Shard(2),)).requires_grad_()
    neighbours = (mesh.rank > 0) + (mesh.rank < mesh.size - 1)
    with ms.comm_counter() as count:
        y = F.conv2d(x, torch.randn(3, 2, 3, 3), padding=1)
    assert (count.messages, count.nbytes) == (neighbours, neighbours * 2 * 5 * 4)
    loss = y.sum()
    with ms.comm_counter() as count:
        loss.backward()
    assert (count.messages, count.nbytes) == (neighbours, neighbours * 2 * 5 * 4)


def test_autocast_casts_as_torch_does():
    mesh = mesh_of((-1,))
    generator = torch.Generator().manual_seed(9)
    full = torch.randn(1, 2, 4 * mesh.size, 5, generator=generator)
    weight = torch.randn(3, 2, 3, 3, generator=generator, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.conv2d(ms.distribute_tensor(full, mesh, (ms.Shard(2),)), weight, padding=1)
        expected = F.conv2d(full, weight, padding=1)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y.full_tensor().float(), expected.float(), rtol=0.05, atol=0.1)
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
