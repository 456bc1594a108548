"""Views by strides, and tensors that change their extent, against torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from mpishard.ops.shape.as_strided import plan_walk
from tests.compare import WORLD, compare, gathered, layouts, mesh_of, shard
from tests.ops.windows import check, field, refused_alike

# shape, size, stride, offset
VIEWS = {
    "the same": ((4, 6), (4, 6), (6, 1), 0),
    "transposed": ((4, 6), (6, 4), (1, 6), 0),
    "a part": ((4, 6), (2, 3), (6, 1), 7),
    "steps": ((5, 6), (2, 3), (12, 2), 6),
    "a diagonal": ((5, 5), (5,), (6,), 0),
    "one row": ((4, 6), (6,), (1,), 12),
    "one column": ((4, 6), (4, 1), (6, 3), 2),
    "flat": ((4, 6), (24,), (1,), 0),
    "merged": ((4, 6), (8, 3), (3, 1), 0),
    "repeated": ((4, 6), (3, 4, 2), (0, 6, 0), 5),
    "frames": ((17,), (7, 4), (2, 1), 1),
    "frames of rows": ((3, 17), (3, 5, 3), (17, 3, 2), 0),
    "windows": ((6, 7), (4, 5, 3, 3), (7, 1, 7, 1), 0),
    "across rows": ((3, 4), (2, 3), (1, 3), 1),
    "no cells": ((3, 4), (0, 3), (4, 1), 0),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name):
    shape, *how = VIEWS[name]
    check(lambda x: torch.as_strided(x, *how), field(*shape), range(len(shape)), len(name))
    check(lambda x: torch.as_strided_copy(x * 2, *how), field(*shape), range(len(shape)), len(name) + 1, count=2)


@pytest.mark.parametrize("name", ["the same", "transposed", "steps", "one row", "flat", "across rows"])
def test_scatter(name):
    shape, *how = VIEWS[name]
    x, src = field(*shape), field(*how[0])
    for mesh, placements, sizes in list(layouts(shape, range(len(shape))))[::2]:
        # torch gives the input the gradient of the cells that are written
        for fixed, other in ((x, (mesh, [ms.Shard(0)] * mesh.ndim, None)), (x, (mesh, None, None))):
            operands = [(fixed, mesh, placements, sizes), (src, *other)]
            f = lambda a, b: torch.as_strided_scatter(a, b, *how)  # noqa: E731
            compare(f, operands, differentiable=[False, True], what=f"{placements} {sizes} {other}")


def test_cells_that_are_not_written_have_a_gradient():
    x = shard(field(4, 6), mesh_of((WORLD.size,)), [ms.Shard(1)], requires_grad=True)
    torch.as_strided_scatter(x, torch.zeros(2, 3, dtype=torch.float64), (2, 3), (6, 1), 7).sum().backward()
    expected = torch.ones(4, 6, dtype=torch.float64)
    expected[1:3, 1:4] = 0
    assert torch.equal(gathered(x.grad), expected)


def test_a_view_of_whole_dims_is_written_through():
    def f(x):
        y = x * 1
        y.as_strided((4, 3), (6, 2), 1).mul_(5)
        return y

    for mesh, placements, sizes in layouts((4, 6), (0, 1)):
        compare(f, [(field(4, 6), mesh, placements, sizes)])


def test_plans_walk_along_the_dims():
    assert plan_walk((4, 6), (6, 4), (1, 6), 0).steps == ((1, 1), (0, 6 // 6))
    assert plan_walk((4, 6), (2,), (3,), 5) is None
    assert plan_walk((9,), (3, 2, 2), (2, 1, 1), 0) is None


def test_torchs_own_errors():
    refused_alike(lambda x: torch.as_strided(x, (2, 2), (1,)), field(4, 6))
    x = shard(field(4, 6), mesh_of((WORLD.size,)), [ms.Shard(0)])
    for how in (((4, 7), (6, 1)), ((2,), (-1,)), ((2, 3), (6, 1), 20)):
        with pytest.raises(RuntimeError):
            torch.as_strided(field(4, 6), *how)
        with pytest.raises(RuntimeError, match=r"out of bounds|Negative strides"):
            torch.as_strided(x, *how)
    with pytest.raises(RuntimeError, match="cannot resize variables that require grad"):
        x.requires_grad_().resize_(3)


@pytest.mark.parametrize("shape", [(4, 6), (2, 5), (24,), (3, 2, 4), (0,), (5, 6)])
def test_resize(shape):
    full = field(4, 6)
    for mesh, placements, sizes in layouts(full.shape, (0, 1)):
        x = shard(full, mesh, placements, sizes)
        assert x.resize_(*shape) is x
        assert tuple(x.shape) == shape
        n = min(x.numel(), full.numel())
        assert torch.equal(gathered(x).reshape(-1)[:n], full.reshape(-1)[:n])
        assert torch.equal(gathered(x.mul_(2)).reshape(-1)[:n], 2 * full.reshape(-1)[:n])
        y = shard(full, mesh, placements, sizes)
        assert tuple(torch.resize_as_(y, torch.empty(shape)).shape) == shape
        assert tuple(y.new_empty_strided(shape, torch.empty(shape).stride()).shape) == shape


@pytest.mark.parametrize("shape", [(16, 16), (16, 9), (4, 8), (24, 2)])
def test_resize_leaves_the_halo(shape):
    x = ms.zeros(16, 8, mesh=mesh_of((WORLD.size,)), placements=[ms.Shard(0)], ghost=1).add_(1).resize_(*shape)
    weight, full = torch.ones(1, 1, 3, 3), gathered(x)
    y = F.conv2d(x[None, None], weight, padding=1)
    assert torch.equal(gathered(y), F.conv2d(full[None, None], weight, padding=1))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, 1:],
        lambda x: x[::2],
        lambda x: x[:1].expand(4, 6),
        lambda x: x.view(2, 2, 6).transpose(0, 1),
    ],
)
def test_a_view_with_gaps_is_refused(view):
    full, how = field(4, 6), ((3, 2), (4, 1))
    for mesh, placements, sizes in layouts(full.shape, (0, 1)):
        y = view(shard(full, mesh, placements, sizes))
        with pytest.raises(ms.UnsupportedOperationError, match="as_strided: cells that do not follow each other"):
            y.as_strided(*how)
        with pytest.raises(ms.UnsupportedOperationError, match=r"resize_: (cells that do not|writing into a view)"):
            y.resize_(2, 2)
        with pytest.raises(ms.UnsupportedOperationError, match="do not follow each other"):
            torch.as_strided_scatter(y, torch.zeros(3, 2, dtype=full.dtype), *how)
        assert torch.equal(gathered(y.contiguous().as_strided(*how)), view(full).contiguous().as_strided(*how))
        assert y.clone(memory_format=torch.preserve_format).resize_(0, 3).shape == (0, 3)
