"""Points drawn at random, of every scale, with many that are equally far: bits and ties as on the whole sets.

``MPISHARD_VARIANTS=300`` draws so many, in place of the few of every day; ``MPISHARD_SEED`` others.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

import mpishard as ms
from mpishard.points.tiles import lengths
from tests.compare import WORLD, mesh_of, shard

VARIANTS = int(os.environ.get("MPISHARD_VARIANTS", "16"))
SEED = int(os.environ.get("MPISHARD_SEED", "0"))


def cloud(draw: random.Random, n: int, ndim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    kind = draw.choice(["even", "lattice", "clusters", "line", "copies"])
    x = torch.rand(n, ndim, generator=generator, dtype=dtype)
    if kind == "lattice":
        x = (x * draw.choice([2, 5])).floor()
    elif kind == "clusters":
        x = x * 1e-3 + torch.randint(0, 4, (n, 1), generator=generator)
    elif kind == "line":
        x[:, 1:] = 0.5
        x = x.sort(0).values
    elif kind == "copies":
        x = x[torch.randint(0, max(1, n // 4), (n,), generator=generator)]
    return x


def cuts(draw: random.Random, n: int) -> dict[int, tuple[int, ...]]:
    borders = sorted(draw.randint(0, n) for _ in range(WORLD.size - 1))
    return {0: tuple(b - a for a, b in zip([0, *borders], [*borders, n]))}


@pytest.mark.parametrize("number", range(VARIANTS))
def test_drawn(number):
    draw = random.Random(1000 * SEED + number)
    dtype = draw.choice([torch.float32, torch.float64])
    n, m, ndim = draw.choice([1, 7, 60, 400]), draw.choice([0, 1, 30, 200]), draw.choice([1, 2, 3, 5])
    # at the ends squares underflow, and overflow
    scale = draw.choice([1.0, 1.0, 1e-3, 1e4, 1e-21, 1e18, 3e19])
    shift = draw.choice([0.0, 0.5, 3.0])
    points = cloud(draw, n, ndim, dtype) * scale
    queries = points if draw.random() < 0.3 else (cloud(draw, m, ndim, dtype) + shift) * scale
    far = lengths(queries[:, None] - points)
    ordered, at = far.sort(dim=1, stable=True)
    k = draw.randint(1, min(n, 12))
    mesh = mesh_of((WORLD.size,))
    own = [shard(x, mesh, (ms.Shard(0),), cuts(draw, len(x))) for x in (points, queries)]
    if queries is points:
        own = own[:1] * 2
    found = ms.points.knn(*own, k)
    assert torch.equal(found.indices.full_tensor(), at[:, :k])
    assert torch.equal(found.distances.full_tensor(), ordered[:, :k])

    # a radius that is the very distance of some
    radius = float(far.reshape(-1)[draw.randrange(far.numel())]) if far.numel() else scale
    most = draw.choice([None, 1, 5])
    wanted = (ordered <= radius) & (torch.arange(n) < (most or n))
    pairs = ms.points.radius(*own, radius, most)
    assert torch.equal(pairs.counts.full_tensor(), wanted.sum(1))
    assert torch.equal(pairs.queries.full_tensor(), wanted.nonzero()[:, 0])
    assert torch.equal(pairs.indices.full_tensor(), at[wanted])
    assert torch.equal(pairs.distances.full_tensor(), ordered[wanted])
