"""Views of views, drawn, and a write into the last: it is in the tensor where torch has it there, or refused by all.

Blocks of a result whose own dims lie in another order have two cells a dim here: one of a single cell does not tell.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

import mpishard as ms
from mpishard.errors import UnsupportedOperationError
from tests.compare import WORLD, drawn_sizes, gathered, mesh_of, mesh_shapes, shard

DRAWS = 80


def shapes(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of as many cells."""
    n = torch.Size(shape).numel()
    found = [(n,), (1, n), (n, 1), (*shape, 1), (1, *shape), *((q, n // q) for q in (2, 3) if n % q == 0)]
    return rng.choice([*found, (shape[0] * shape[1], *shape[2:])] if len(shape) > 1 else found)


def root(rng: random.Random, ndim: int) -> Callable[[Tensor], Tensor]:
    """A tensor of its own whose dims follow each other in memory in some order."""
    order = rng.sample(range(ndim), ndim)
    back = sorted(range(ndim), key=order.index)
    return rng.choice(
        [
            lambda x: x.permute(order) * 1,
            lambda x: x.permute(order).contiguous().permute(back) * 1,
            lambda x: torch.empty_like(x.permute(order)).copy_(x.permute(order)),
        ]
    )


def step(rng: random.Random, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """A view of a tensor of this shape, or a copy where torch makes one."""
    d, e = (rng.randrange(len(shape)) for _ in range(2))
    n = shape[d]
    lo, by, length = rng.randint(0, max(n - 1, 0)), rng.randint(1, 2), rng.randint(1, max(n, 1))
    order, to = rng.sample(range(len(shape)), len(shape)), shapes(rng, shape)
    return rng.choice(
        [
            lambda x: x.transpose(d, e),
            lambda x: x.transpose_(d, e),
            lambda x: x.permute(order),
            lambda x: x.expand(2, *x.shape).select(0, 1),
            lambda x: x.contiguous(),
            lambda x: x.reshape(to),
            lambda x: x.view(to),
            lambda x: x.view(x.shape),
            lambda x: x.flatten(),
            lambda x: x.unsqueeze(d),
            lambda x: x.unsqueeze_(d),
            lambda x: x.squeeze(),
            lambda x: x.unfold(d, length, by),
            lambda x: x.narrow(d, lo, min(length, n - lo)),
            lambda x: x[(slice(None),) * d + (slice(lo, None, by),)],
            lambda x: x.select(d, lo),
        ]
    )


def overlaps(x: Tensor) -> bool:
    cells = torch.arange(x.untyped_storage().nbytes() // x.itemsize)
    return len(cells.as_strided(x.shape, x.stride(), x.storage_offset()).unique()) < x.numel()


def test_a_part_without_gaps_of_a_view_that_has_some():
    for shape, dim, view in (
        ((6,), 0, lambda x: x.unfold(0, 2, 1)[:, 0]),
        ((6,), 0, lambda x: x.reshape(3, 2)[:, :1].unfold(0, 2, 1)[:1]),
        ((4, 4), 1, lambda x: x[:, :3][:1]),
        ((4, 6), 0, lambda x: x.unfold(1, 3, 1)[1:2, :, 1]),
        ((4, 6), 0, lambda x: x.unfold(1, 2, 2)[1:2, :1, 0]),
        ((4, 6), 1, lambda x: x.unfold(0, 2, 1)[:2, 1:2, 0]),
    ):
        full = torch.arange(float(torch.Size(shape).numel())).view(shape)
        x = shard(full, mesh_of((WORLD.size,)), (ms.Shard(dim),), None)
        with suppress(UnsupportedOperationError):
            view(x).contiguous().add_(100)
            view(full).contiguous().add_(100)
            torch.testing.assert_close(gathered(x), full)


def test_writes_into_views_of_views(request):
    for i in range(DRAWS):
        rng = random.Random(request.config.option.seed * 1000 + i)
        shape = rng.choices(range(1, 7), k=rng.randint(1, 3))
        full = torch.arange(1.0, 1 + torch.Size(shape).numel())
        turned = rng.random() < 0.5
        first = root(rng, len(shape)) if turned else lambda x: x * 1
        base = y = first(full.view(shape).clone())
        steps = []
        try:
            for _ in range(rng.randint(1, 4)):
                steps.append(step(rng, tuple(y.shape)))
                y = steps[-1](y)
        except (RuntimeError, IndexError, ValueError):
            continue  # no such view
        if overlaps(y):
            continue
        y.add_(100)
        mesh, free, placements, sizes = mesh_of(rng.choice(mesh_shapes(2))), list(range(len(shape))), [], {}
        for count in mesh.shape:
            dim = rng.choice([None, *(d for d in free if not turned or shape[d] >= 2 * count)])
            placements.append(ms.Replicate() if dim is None else ms.Shard(dim))
            if dim is not None:
                free.remove(dim)
                sizes[dim] = drawn_sizes(rng, shape[dim], count, 2 * turned)
        x = z = first(shard(full.view(shape), mesh, placements, sizes))
        refused = ""
        try:
            for each in steps:
                z = each(z)
            z.add_(100)
        except UnsupportedOperationError as e:
            refused = str(e)
        assert len(set(WORLD.allgather(bool(refused)))) == 1, (i, refused)
        if not refused:
            torch.testing.assert_close(gathered(x), base, msg=lambda m, i=i: f"draw {i}: {m}")
            torch.testing.assert_close(gathered(z), y, msg=lambda m, i=i: f"draw {i}, the view: {m}")
