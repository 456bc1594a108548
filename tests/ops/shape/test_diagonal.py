"""Diagonals of sharded planes: each cell lies where its row and its column meet, so nothing travels."""

from __future__ import annotations

import math
import random

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, drawn_sizes, layouts, mesh_of, mesh_shapes, shard
from tests.ops.windows import refused_alike

P = WORLD.size


def drawn(seed, ndim):
    """A field, how it is sharded, and two of its dims and an offset."""
    rng = random.Random(seed)
    shape, pair = [rng.randint(1, 7) for _ in range(ndim)], rng.sample(range(ndim), 2)
    mesh = mesh_of(rng.choice(mesh_shapes(3)))
    placements = [ms.Shard(rng.choice([*pair, rng.randrange(ndim)])) for _ in mesh.shape]
    counts = {d: math.prod(n for n, p in zip(mesh.shape, placements) if p == ms.Shard(d)) for d in range(ndim)}
    sizes = {d: drawn_sizes(rng, shape[d], n) for d, n in counts.items() if ms.Shard(d) in placements}
    full = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (full, mesh, placements, sizes), (rng.randint(-4, 4), *pair)


def written(x, plane):
    y = x * 1
    y.diagonal(*plane).add_(1.5)
    y.diagonal(*plane)[..., :1] *= 2
    view = y.diagonal(*plane)
    view.mul_(3)
    return y, view


FUNCTIONS = {
    "taken": lambda x, plane: x.diagonal(*plane),
    "put into a plane": lambda x, plane: x.diag_embed(*plane),
    "of a row": lambda x, plane: x[0].diag_embed(plane[0]),
    "there and back": lambda x, plane: x.diagonal(*plane).diag_embed(plane[0], 0, -1),
    "written": written,
    "in a copy": lambda x, plane: torch.diagonal_scatter(x, x.diagonal(*plane) ** 2, *plane),
    "flat": lambda x, plane: torch.diagflat(x[..., :2, :2], plane[0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_diagonals(name, request):
    for k in range(6):
        operand, plane = drawn(request.config.option.seed * 100 + k, 2 + k % 3)
        what = f"{tuple(operand[0].shape)} {operand[1].shape} {operand[2:]} {plane}"
        compare(lambda x, plane=plane: FUNCTIONS[name](x, plane), [operand], second=k == 0, what=what)


def test_matrices_and_vectors():
    full = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for f in (
        lambda x: x.diag(1),
        lambda x: torch.diag(x, -2).diag(1),
        torch.trace,
        lambda x: torch.linalg.diagonal(x, offset=1),
        lambda x: torch.einsum("ii->i", x[:, :5]),
    ):
        for mesh, placements, sizes in layouts(full.shape, (0, 1)):
            compare(f, [(full, mesh, placements, sizes)], what=f"{placements} {sizes}")


def test_nothing_travels():
    x = shard(torch.ones(2 * P, 2 * P), mesh_of((P,)), (ms.Shard(1),), requires_grad=True)
    with ms.comm_counter() as count:
        y = x * 1
        y.diagonal().add_(1e-6)
        plane = y.diagonal(1).exp().diag_embed(-1)
        torch.diagonal_scatter(y, y.diagonal() * 2).mul(plane).backward(torch.ones_like(y))
    assert not count.by_op.keys() - {"redistribute"}  # rows of the plane meet columns
    assert plane.to_local().numel() <= 3 * 2 * P


def test_what_torch_refuses():
    full = torch.ones(4, 6, 6)
    for f in (
        lambda x: x.diagonal(0, 1, 1),
        lambda x: x.diagonal(0, 0, 3),
        lambda x: x.diag_embed(0, 1, 1),
        lambda x: x.diag_embed(0, 0, 4),
    ):
        refused_alike(f, full)


def test_a_diagonal_is_written_through():
    """As Gaussian processes add their noise."""
    full = torch.arange(1.0, 49.0, dtype=torch.float64).reshape(3, 4, 4)

    def write(x):
        y = x * 1
        y.diagonal(dim1=-2, dim2=-1).add_(0.5)
        y.diagonal(1, 1, 2).mul_(torch.arange(3.0))
        y.diagonal(-1)[1] = 7.0
        y[:, 3].diagonal().zero_()
        return y

    for mesh, placements, sizes in layouts(full.shape, (0, 1, 2)):
        compare(write, [(full, mesh, placements, sizes)])
    leaf = shard(full[0], mesh_of((P,)), (ms.Shard(0),), requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        leaf.diagonal().add_(1)
