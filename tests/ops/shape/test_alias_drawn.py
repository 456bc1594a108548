"""Views of views, drawn, and a write into the last: it is in the tensor where torch has it there, or refused by all.

Blocks of a result whose own dims lie in another order have two cells a dim here: one of a single cell does not tell.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
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


def step(rng: random.Random, shape: tuple[int, ...]) -> tuple[str, Callable[[Tensor], Tensor]]:
    """A view of a tensor of this shape, or a copy where torch makes one."""
    d, e = (rng.randrange(len(shape)) for _ in range(2))
    n = shape[d]
    lo, by, length = rng.randint(0, max(n - 1, 0)), rng.randint(1, 2), rng.randint(1, max(n, 1))
    order, to = rng.sample(range(len(shape)), len(shape)), shapes(rng, shape)
    steps = {
        "transpose": lambda x: x.transpose(d, e),
        "transpose_": lambda x: x.transpose_(d, e),
        "permute": lambda x: x.permute(order),
        "expand": lambda x: x.expand(2, *x.shape).select(0, 1),
        "contiguous": lambda x: x.contiguous(),
        "reshape": lambda x: x.reshape(to),
        "view": lambda x: x.view(to),
        "the same": lambda x: x.view(x.shape),
        "flatten": lambda x: x.flatten(),
        "unsqueeze": lambda x: x.unsqueeze(d),
        "unsqueeze_": lambda x: x.unsqueeze_(d),
        "squeeze": lambda x: x.squeeze(),
        "unfold": lambda x: x.unfold(d, length, by),
        "windows": lambda x: x.unfold(d, length, length),
        "narrow": lambda x: x.narrow(d, lo, min(length, n - lo)),
        "slice": lambda x: x[(slice(None),) * d + (slice(lo, None, by),)],
        "select": lambda x: x.select(d, lo),
        "chunk": lambda x: x.chunk(2, d)[-1],
        "unbind": lambda x: x.unbind(d)[lo],
        "diagonal": lambda x: x.diagonal(lo - 1, d, e),
        "detach": lambda x: x.detach(),
    }
    return rng.choice(list(steps.items()))


def write(rng: random.Random, shape: tuple[int, ...]) -> Callable[[Tensor], Any]:
    """A function that writes into a tensor of this shape."""
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    values, mask = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) < 0.5
    cells = torch.randperm(values.numel(), generator=generator)[::2]
    writes: list[Callable[[Any], Any]] = [
        lambda x: x.add_(100),
        lambda x: x.mul_(values),
        lambda x: F.relu_(x.sub_(3)),
        lambda x: x.copy_(values),
        lambda x: x.zero_(),
        lambda x: x.masked_fill_(mask, 5.0),
        lambda x: x.masked_scatter_(mask, values),
        lambda x: x.__setitem__(Ellipsis, 4.0),
        lambda x: x.__setitem__(mask, 4.0),
        lambda x: x.put_(cells, values.take(cells)),
    ]
    if shape:
        d = rng.randrange(len(shape))
        at = torch.randperm(shape[d], generator=generator)[: max(1, shape[d] // 2)]
        source = values.index_select(d, at)
        points = at.view(-1, *(1,) * (len(shape) - 1 - d)).expand(source.shape)
        writes += [
            lambda x: x.index_add_(d, at, source),
            lambda x: x.index_copy_(d, at, source),
            lambda x: x.index_fill_(d, at, 2.0),
            lambda x: x.movedim(d, 0).index_put_((at,), source.movedim(d, 0)),
            lambda x: x.scatter_(d, points, source),
            lambda x: x.scatter_add_(d, points, source),
            lambda x: x.scatter_reduce_(d, points, source, "amax"),
            lambda x: x.__setitem__((slice(None),) * d + (int(at[0]),), 7.0),
        ]
    if len(shape) == 2:
        writes += [lambda x: x.fill_diagonal_(9.0), lambda x: x.tril_()]
    return rng.choice(writes)


def tells(layout: Any) -> bool:
    """Whether no block has less than two cells along a dim that has more."""
    return all(min(s) >= min(n, 2) for n, s in zip(layout.shape, layout.sizes) if s is not None)


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
        full = torch.linspace(-2, 3, torch.Size(shape).numel()).view(shape)
        turned = rng.random() < 0.5
        first = root(rng, len(shape)) if turned else lambda x: x * 1
        leaf = full.clone().requires_grad_(rng.random() < 0.5)
        base = y = first(leaf)
        names, steps = [], []
        try:
            for _ in range(rng.randint(1, 4)):
                name, each = step(rng, tuple(y.shape))
                names.append(name)
                steps.append(each)
                y = each(y)
            change = write(rng, tuple(y.shape))
            if overlaps(y.detach()):
                continue
            change(y)
        except (RuntimeError, IndexError, ValueError):
            continue  # no such view, or torch does not write into it
        mesh, free, placements, sizes = mesh_of(rng.choice(mesh_shapes(2))), list(range(len(shape))), [], {}
        for count in mesh.shape:
            dim = rng.choice([None, *(d for d in free if not turned or shape[d] >= 2 * count)])
            placements.append(ms.Replicate() if dim is None else ms.Shard(dim))
            if dim is not None:
                free.remove(dim)
                sizes[dim] = drawn_sizes(rng, shape[dim], count, 2 * turned)
        start = shard(full, mesh, placements, sizes, leaf.requires_grad)
        x = z = first(start)
        what, refused = f"draw {i}, {shape} {placements} {sizes} {names}", ""
        try:
            for each in steps:
                z = each(z)
            change(z)
        except UnsupportedOperationError as e:
            refused = str(e)
        assert len(set(WORLD.allgather(bool(refused)))) == 1, (what, refused)
        if refused:
            # cells that are there twice, or a reshape of which nobody knows whether torch copies
            assert not tells(x.sharding) or {"expand", "unfold"} & {*names}, (what, refused)
            continue
        torch.testing.assert_close(gathered(x), base.detach(), msg=lambda m, what=what: f"{what}: {m}")
        torch.testing.assert_close(gathered(z), y.detach(), msg=lambda m, what=what: f"{what}, the view: {m}")
        if leaf.requires_grad:
            for part in (base, y), (x, z):
                sum((t * weights(t)).sum() for t in part).backward()
            torch.testing.assert_close(gathered(start.grad), leaf.grad, msg=lambda m, what=what: f"{what}, grad: {m}")


def weights(x: Tensor) -> Tensor:
    return torch.linspace(1, 2, x.numel()).view(x.shape)
