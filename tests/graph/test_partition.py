"""graph.partition and its kin: the same order on every mesh, even cuts, few edges between ranks, edges with targets."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

import mpishard as ms
from mpishard.errors import DesyncError, LayoutError
from mpishard.layout.curve import along_curve, bits_of
from tests.compare import WORLD, mesh_of, mesh_shapes, shard
from tests.graph.graphs import GRAPHS, cuts, drawn_sizes, graph


def points(n: int, ndim: int, seed: int = 0) -> Tensor:
    return torch.rand(n, ndim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(n: int, seed: int = 0):
    """Meshes, placements and sizes of ``n`` rows: cut along one mesh dim or both, some blocks empty."""
    draw = random.Random(seed)
    for shape in mesh_shapes(2):
        choices = [(ms.Shard(0),) * len(shape), (ms.Shard(0), *(ms.Replicate(),) * (len(shape) - 1))]
        for placements in dict.fromkeys(choices):
            mesh = mesh_of(shape)
            yield mesh, placements, None
            count = int(np.prod([k for k, p in zip(shape, placements) if p == ms.Shard(0)]))
            yield mesh, placements, {0: drawn_sizes(n, count, draw)}


def by_definition(x: Tensor) -> Tensor:
    low, high = x.min(0).values, x.max(0).values
    bits = bits_of(x.shape[1])
    extent = float((high - low).max()) or 1.0
    cells = ((x - low) * ((2**bits - 1) / extent)).floor().clamp(0, 2**bits - 1).long().numpy()
    return torch.from_numpy(np.argsort(along_curve(cells, bits), kind="stable"))


POSITIONS = {
    "a square": points(101, 2),
    "a cube": points(64, 3),
    "a line": points(30, 1),
    "all at one place": torch.full((40, 2), 0.3, dtype=torch.float64),
    "two places": points(50, 2).round()[:, :1].expand(50, 2).contiguous(),
    "whole numbers": torch.randint(0, 4, (33, 3), generator=torch.Generator().manual_seed(3)),
    "single": points(17, 2).float(),
    "one node": points(1, 2),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_order_along_the_curve(name):
    x = POSITIONS[name]
    expected = by_definition(x.double())
    for mesh, placements, sizes in rows(len(x)):
        own = shard(x, mesh, placements, sizes)
        order = ms.graph.partition(own)
        assert torch.equal(order.full_tensor(), expected)
        assert order.sharding == ms.distribute_tensor(expected, mesh, placements).sharding
        moved = own[order]
        assert moved.to_local().shape[0] == order.to_local().shape[0]
        assert torch.equal(moved.full_tensor(), x[expected])


def test_no_nodes():
    mesh = mesh_of((WORLD.size,))
    assert ms.graph.partition(shard(points(0, 2), mesh, (ms.Shard(0),))).shape == (0,)


def lattice(side: int, mix: bool = True) -> tuple[Tensor, Tensor]:
    """Edges, both ways, of a square lattice with nodes in no order, and where these are."""
    place = torch.arange(side * side).view(side, side)
    pairs = [(place[1:].reshape(-1), place[:-1].reshape(-1)), (place[:, 1:].reshape(-1), place[:, :-1].reshape(-1))]
    edges = torch.cat([torch.stack(p) for p in pairs] + [torch.stack(p[::-1]) for p in pairs], 1)
    names = torch.randperm(side * side, generator=torch.Generator().manual_seed(7))
    where = torch.empty(side * side, 2, dtype=torch.float64)
    where[names] = torch.stack([place // side, place % side], -1).reshape(-1, 2).double()
    mixed = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(8))
    return names[edges][:, mixed], where


def parted(edges: Tensor, sizes: tuple[int, ...]) -> int:
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return int((owner[edges[0]] != owner[edges[1]]).sum())


@pytest.mark.parametrize("by", ["positions", "edges"])
def test_few_edges_between_ranks(by):
    side = 24
    edges, where = lattice(side)
    mesh = mesh_of((WORLD.size,))
    own = shard(where, mesh, (ms.Shard(0),))
    on = shard(edges, mesh, (ms.Shard(1),))
    order = ms.graph.partition(own) if by == "positions" else ms.graph.partition(edge_index=on, nodes=own)
    assert sorted(order.full_tensor().tolist()) == list(range(side * side))
    found = ms.graph.renumber(on, order).full_tensor()
    sizes = order.sharding.sizes[0] or (side * side,)
    assert max(sizes) - min(sizes) <= 1
    # a cut of four squares parts 4 * 24 edges, one of four strips 6 * 24
    assert parted(found, sizes) <= (8 if by == "positions" else 11) * side
    assert parted(found, sizes) < parted(edges, sizes) / 3 or WORLD.size == 1


@pytest.mark.parametrize("name", [n for n in GRAPHS if n != "no nodes"])
def test_same_order_of_a_graph_on_every_mesh(name):
    n, edges = graph(name)
    alone = None
    for mesh, nodes, node_sizes, on, edge_sizes in cuts(n, edges.shape[1]):
        own, at = shard(points(n, 1), mesh, nodes, node_sizes), shard(edges, mesh, on, edge_sizes)
        order = ms.graph.partition(edge_index=at, nodes=own).full_tensor()
        alone = order if alone is None else alone
        assert torch.equal(order, alone)
        assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize("name", GRAPHS)
def test_new_numbers_and_edges_with_their_targets(name):
    n, edges = graph(name)
    generator = torch.Generator().manual_seed(2)
    old = torch.randperm(n, generator=generator)
    new = torch.empty(n, dtype=torch.int64)
    new[old] = torch.arange(n)
    for mesh, nodes, node_sizes, on, edge_sizes in cuts(n, edges.shape[1]):
        order, at = shard(old, mesh, nodes, node_sizes), shard(edges, mesh, on, edge_sizes)
        found = ms.graph.renumber(at, order)
        assert torch.equal(found.full_tensor(), new[edges])
        by = ms.graph.edge_order(at, order)
        expected = torch.from_numpy(np.argsort(edges[1].numpy(), kind="stable"))
        assert torch.equal(by.full_tensor(), expected)
        lo, hi = order.sharding.interval(0, mesh.coords)
        assert ((edges[1][by.to_local()] >= lo) & (edges[1][by.to_local()] < hi)).all()
        if on == tuple(ms.Shard(1) if p == ms.Shard(0) else p for p in nodes):
            moved = at[:, by]
            assert torch.equal(moved.full_tensor(), edges[:, expected])
            assert moved.to_local().shape[1] == by.to_local().shape[0]


def test_from_positions_to_sums():
    """The whole way, as its docstring says: with it no message is summed on another rank, and little travels."""
    side = 12
    edges, where = lattice(side)
    mesh = mesh_of((WORLD.size,))
    x = torch.randn(side * side, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]].sin())
    own, positions = shard(x, mesh, (ms.Shard(0),)), shard(where, mesh, (ms.Shard(0),))
    order = ms.graph.partition(positions)
    at = ms.graph.renumber(shard(edges, mesh, (ms.Shard(1),)), order)
    own = own[order].requires_grad_()
    at = at[:, ms.graph.edge_order(at, own)]
    plan = ms.graph.halo(at, own)
    source, _ = plan.ends(own)
    with ms.comm_counter() as count:
        got = plan.sum(source.sin())
    assert count.messages == 0
    torch.testing.assert_close(got.full_tensor(), expected[order.full_tensor()])
    ghosts = ms.all_reduce(torch.tensor([len(plan.ghosts)]), mesh).item()
    assert ghosts <= 4 * side


@pytest.mark.ranks(2, 3, 4)
def test_no_rank_has_all():
    """A rank sends its own rows' keys, samples of them, and its part of the order: numbers of rows it has not."""
    n = 4000
    mesh = mesh_of((WORLD.size,))
    own = shard(points(n, 3), mesh, (ms.Shard(0),))
    with ms.comm_counter() as count:
        order = ms.graph.partition(own)
        _ = own[order]
    rows = n // WORLD.size + 1
    sent = {op: c.nbytes for op, c in count.by_op.items()}
    # a key and a number each; some 16 samples of both, and how many rows there are
    assert sent["all_to_all"] <= 16 * rows + 16 * WORLD.size
    assert sent["all_gather"] <= 16 * 17 + 8
    # rows that are asked for, and rows that are given: three coordinates
    assert sent["index, who needs what"] <= 8 * 2 * rows
    assert sent["index"] <= 24 * 2 * rows


MISTAKES = {
    "nothing": (lambda x, e: ms.graph.partition(), "it takes positions, or edges and nodes"),
    "both": (lambda x, e: ms.graph.partition(x, edge_index=e, nodes=x), "it takes positions, or edges and nodes"),
    "edges alone": (lambda x, e: ms.graph.partition(edge_index=e), "it takes positions, or edges and nodes"),
    "vector": (lambda x, e: ms.graph.partition(x[:, 0]), "positions of another kind"),
    "no number": (lambda x, e: ms.graph.partition(x / (x - x[3:4])), "positions are not finite"),
    "edges of another shape": (lambda x, e: ms.graph.partition(edge_index=e.T, nodes=x), "edges of another shape"),
    "order of floats": (lambda x, e: ms.graph.renumber(e, x[:, 0]), "no order of nodes"),
    "order with a number twice": (lambda x, e: ms.graph.renumber(e, (x[:, 0] > 5).long() + 3), "each once"),
    "order with a number too large": (lambda x, e: ms.graph.renumber(e, (x[:, 0] > 5).long() + 9), "from 0 to 8"),
    "edges to nowhere": (lambda x, e: ms.graph.edge_order(e + 5, x), "numbers of nodes out of range"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    n, edges = graph("at random, with loops and edges that come twice")
    mesh = mesh_of((WORLD.size,))
    call, text = MISTAKES[mistake]
    own, at = shard(points(n, 2), mesh, (ms.Shard(0),)), shard(edges, mesh, (ms.Shard(1),))
    with pytest.raises(LayoutError, match=text) as raised:
        call(own, at)
    assert len(set(WORLD.allgather(str(raised.value).partition("raised on")[0]))) == 1


@pytest.mark.ranks(2, 3, 4)
def test_calls_that_differ():
    mesh = mesh_of((WORLD.size,))
    n, edges = graph("a ring")
    own = shard(points(n, 2), mesh, (ms.Shard(0),))
    with pytest.raises(DesyncError):
        ms.graph.edge_order(edges, own) if WORLD.rank else ms.graph.halo(edges, own)
    across = shard(points(n, 2), mesh, (ms.Shard(1),))
    ms.graph.partition(across)
    with pytest.raises(LayoutError, match="positions of another kind"):
        ms.graph.partition(own[:, 0] if WORLD.rank == 1 else across)
    order = shard(torch.arange(n), mesh, (ms.Shard(0),))
    with pytest.raises(LayoutError, match="no order of nodes"):
        ms.graph.renumber(edges, order.double() if WORLD.rank == 1 else order)
