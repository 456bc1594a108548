"""Many values for few cells: each rank adds up its own, as messages at the nodes of a graph."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import mpishard as ms
from tests.compare import WORLD, compare, drawn_sizes, gathered, layouts, mesh_of, mesh_shapes, shard
from tests.ops.windows import field

NODES, EDGES = 5, 23


def cells(n=NODES, seed=3):
    return torch.randint(n, (EDGES,), generator=torch.Generator().manual_seed(seed))


ADDED = {
    "index_add": lambda x, i, s: x.index_add(0, i, s),
    "index_add, in place": lambda x, i, s: (x * 2).index_add_(0, i, s) + 1,
    "alpha": lambda x, i, s: x.index_add(0, i, s, alpha=2.5),
    "index_put": lambda x, i, s: x.index_put((i,), s, accumulate=True),
    "from the end": lambda x, i, s: x.index_put((i - NODES,), s, accumulate=True),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i[:, None].expand(s.shape), s),
    "src": lambda x, i, s: torch.scatter_add(x, 0, i[:, None].expand(s.shape), src=s.cos()),
    "last dim": lambda x, i, s: x.T.contiguous().index_add(-1, i, s.T),
    "new": lambda x, i, s: s.new_zeros(NODES, 4).index_add(0, i, s),
    "counts": lambda x, i, s: s.new_zeros(NODES).scatter_add(0, i, s[:, 0] * 0 + 1) * x[:, 0],
}


def drawn_operand(rng, full, mesh, dims):
    placements = [rng.choice([ms.Replicate(), *map(ms.Shard, dims)]) for _ in mesh.shape]
    sizes = {}
    for d in {p.dim for p in placements if isinstance(p, ms.Shard)}:
        parts = [n for n, p in zip(mesh.shape, placements) if p == ms.Shard(d)]
        if len(parts) == 1 and rng.random() < 0.5:
            sizes[d] = drawn_sizes(rng, full.shape[d], parts[0])
    return full, mesh, tuple(placements), sizes or None


@pytest.mark.parametrize("name", ADDED)
def test_as_on_the_whole(name, request):
    rng = random.Random(f"{request.config.option.seed} {name}")
    for mesh_shape, _ in itertools.product(mesh_shapes(3), range(4)):
        mesh = mesh_of(mesh_shape)
        x, s = drawn_operand(rng, field(NODES, 4), mesh, (0, 1)), drawn_operand(rng, field(EDGES, 4), mesh, (0, 1))
        index = (cells(), mesh, [ms.Shard(0) if p == ms.Shard(0) else ms.Replicate() for p in s[2]], None)
        if rng.random() < 0.5:
            index = (cells(), None, None, None)
        compare(ADDED[name], [x, index, s], second=rng.random() < 0.3, what=f"{mesh_shape} {x[2:]} {s[2:]} {index[2]}")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex128, torch.bool])
def test_dtypes(dtype):
    mesh = mesh_of((WORLD.size,))
    values = (field(EDGES, 4) * 3).to(dtype)
    for placement in (ms.Shard(0), ms.Replicate()):
        x = (torch.ones(NODES, 4).to(dtype), mesh, (placement,), None)
        compare(lambda x, s: x.index_add(0, cells(), s), [x, (values, mesh, (ms.Shard(0),), None)])


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("sharded", [True, False])
def test_sums_travel_and_not_what_is_added(sharded):
    mesh = mesh_of((WORLD.size,))
    x = shard(field(NODES, 4), mesh, (ms.Shard(0) if sharded else ms.Replicate(),))
    s = shard(field(EDGES, 4), mesh, (ms.Shard(0),))
    index = shard(cells(), mesh, (ms.Shard(0),))
    with ms.comm_counter() as count:
        x.index_add(0, index, s)
    assert count.by_op.keys() == {"reduce_scatter" if sharded else "all_reduce"}
    assert count.nbytes == field(NODES, 4).nbytes


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("call", ["index_add", "index_put", "scatter_add"])
def test_a_cell_that_is_not_there_is_an_error_on_every_rank(call, sharded):
    mesh, index = mesh_of((WORLD.size,)), cells()
    index[-1] = NODES
    s = shard(field(EDGES, 4), mesh, (ms.Shard(0),))
    i = shard(index, mesh, (ms.Shard(0),)) if sharded else index
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        ADDED[call](torch.zeros(NODES, 4, dtype=s.dtype), i, s)
    with pytest.raises((IndexError, RuntimeError), match="dtype"):
        ADDED[call](torch.zeros(NODES, 4), cells(), s)


@pytest.mark.parametrize("sizes", [None, "uneven"])
def test_an_index_of_the_shape_of_values_that_broadcast(sizes):
    index = torch.tensor([[0, 1, 0], [0, 1, 0], [0, 0, 0]])
    cut = {0: (2, 1, *[0] * (WORLD.size - 2))[: WORLD.size]} if sizes and WORLD.size > 1 else None
    mesh = mesh_of((WORLD.size,))
    operands = [(field(2, 3), mesh, (ms.Shard(0),), None), (field(3, 3), mesh, (ms.Shard(0),), cut)]
    compare(lambda x, s: x.index_put((index,), s, accumulate=True), operands)


def _gradient(f):
    def of(x):
        return torch.autograd.grad(f(x).sum(), x)[0]

    return of


TURNS = torch.arange(900) % 2
MANY = {
    "index_add": lambda x: torch.zeros_like(x).index_add(0, TURNS, x),
    "index_add, last dim": lambda x: torch.zeros_like(x.T).index_add(1, TURNS, x.T),
    "few cells": lambda x: x.new_zeros(2, 3).index_add(0, TURNS, x),
    "index_select": _gradient(lambda x: x.index_select(0, TURNS)),
    "index_select, last dim": _gradient(lambda x: x.T.index_select(1, TURNS)),
    "repeat": _gradient(lambda x: x[:2].repeat(450, 1)),
    "repeat, last dim": _gradient(lambda x: x.T[:, :2].repeat(1, 450)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MANY)
def test_many_of_16_bits_are_added_up_in_float32(name, dtype):
    """In bfloat16 256 and one are 256."""
    full = torch.ones(900, 3, dtype=dtype)
    expected = MANY[name](full.clone().requires_grad_())
    for mesh, placements, sizes in layouts((900, 3), (0, 1), 1):
        got = MANY[name](shard(full, mesh, placements, sizes, requires_grad=True))
        torch.testing.assert_close(gathered(got), expected.detach(), rtol=2**-7, atol=0)
