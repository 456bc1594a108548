"""graph.halo: a layer of message passing on shards is that on the whole graph, and only rows that are needed travel."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import mpishard as ms
from mpishard.errors import DesyncError, LayoutError, MeshError, UnsupportedDtypeError
from tests.compare import WORLD, mesh_of, shard
from tests.graph.graphs import GRAPHS, cuts, graph


def field(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Layer(nn.Module):
    """Messages of both ends and the edge's own features, summed, and a new state of the nodes."""

    def __init__(self, width: int, edge_width: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.message = nn.Linear(2 * width + edge_width, width, dtype=torch.float64)
            self.update = nn.Linear(2 * width, width, dtype=torch.float64)

    def forward(self, x, edge_attr, ends, summed):
        source, target = ends(x)
        messages = torch.tanh(self.message(torch.cat([source, target, edge_attr], 1)))
        return x + self.update(torch.cat([x, summed(messages)], 1))


def whole_graph(edges: Tensor, n: int):
    def ends(x):
        return x[edges[0]], x[edges[1]]

    def summed(messages):
        return messages.new_zeros(n, *messages.shape[1:]).index_add(0, edges[1], messages)

    return ends, summed


@pytest.mark.parametrize("name", GRAPHS)
def test_message_passing(name):
    n, edges = graph(name)
    x, attr = field(n, 3), field(edges.shape[1], 2, seed=2)
    layer = Layer(3, 2)
    ends, summed = whole_graph(edges, n)
    leaves = [x.clone().requires_grad_(), attr.clone().requires_grad_()]
    expected = layer(layer(leaves[0], leaves[1], ends, summed), leaves[1], ends, summed)
    weight = field(n, 3, seed=4)
    wanted = torch.autograd.grad((expected * weight).sum(), [*leaves, *layer.parameters()])

    for mesh, nodes, node_sizes, on, edge_sizes in cuts(n, edges.shape[1]):
        at = shard(edges, mesh, on, edge_sizes)
        own = shard(x, mesh, nodes, node_sizes, True)
        by_edge = [ms.Shard(0) if p == ms.Shard(1) else p for p in on]
        attributes = shard(attr, mesh, by_edge, edge_sizes and {0: edge_sizes[1]}, True)
        plan = ms.graph.halo(at, own)
        got = layer(layer(own, attributes, plan.ends, plan.sum), attributes, plan.ends, plan.sum)
        assert got.sharding == own.sharding
        torch.testing.assert_close(got.detach().full_tensor(), expected.detach(), rtol=1e-12, atol=1e-12)
        loss = (got * ms.distribute_tensor(weight, mesh, nodes, sizes=node_sizes)).sum()
        found = torch.autograd.grad(loss, [own, attributes, *layer.parameters()])
        for g, w in zip(found, wanted, strict=True):
            g = g.full_tensor() if isinstance(g, ms.ShardTensor) else g
            torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", GRAPHS)
def test_rows_and_local_numbers(name):
    n, edges = graph(name)
    x = field(n, 2)
    for mesh, nodes, node_sizes, on, edge_sizes in cuts(n, edges.shape[1]):
        own, at = shard(x, mesh, nodes, node_sizes), shard(edges, mesh, on, edge_sizes)
        plan = ms.graph.halo(at, own)
        rows = plan(own)
        lo, hi = own.sharding.interval(0, mesh.coords)
        assert type(rows) is Tensor
        assert plan.own == hi - lo
        assert torch.equal(rows, torch.cat([x[lo:hi], x[plan.ghosts]]))
        first, last = plan.edges.interval(0, mesh.coords)
        mine = edges[:, first:last]
        assert torch.equal(rows[plan.edge_index[0]], x[mine[0]])
        assert torch.equal(rows[plan.edge_index[1]], x[mine[1]])
        needed = {int(i) for i in mine.reshape(-1) if not lo <= i < hi}
        assert plan.ghosts.tolist() == sorted(needed)
        # messages as plain tensors of this rank's edges
        summed = plan.sum(torch.ones(plan.edge_index.shape[1], dtype=torch.int64))
        assert torch.equal(summed.full_tensor(), torch.bincount(edges[1], minlength=n))


@pytest.mark.parametrize("name", GRAPHS)
def test_largest_message(name):
    n, edges = graph(name)
    # whole numbers: many are equal, and all may be below zero
    messages = (field(edges.shape[1], 2) * 2).round() - 3
    whole = messages.clone().requires_grad_()
    at_targets = [whole[edges[1] == i] for i in range(n)]
    rows = [at.amax(0) if len(at) else whole.new_zeros(2) for at in at_targets]
    expected = torch.stack(rows) if rows else whole.new_zeros(0, 2)
    weight = field(n, 2, seed=4)
    (wanted,) = torch.autograd.grad((expected * weight).sum() + 0 * whole.sum(), whole)
    for mesh, nodes, node_sizes, on, edge_sizes in cuts(n, edges.shape[1]):
        by_edge = [ms.Shard(0) if p == ms.Shard(1) else p for p in on]
        own = shard(messages, mesh, by_edge, edge_sizes and {0: edge_sizes[1]}, True)
        plan = ms.graph.halo(shard(edges, mesh, on, edge_sizes), shard(weight, mesh, nodes, node_sizes))
        got = plan.max(own)
        assert torch.equal(got.detach().full_tensor(), expected.detach())
        assert torch.equal(plan.max(own.detach().long()).full_tensor(), expected.detach().long())
        (g,) = torch.autograd.grad((got * weight).sum(), own)
        torch.testing.assert_close(g.full_tensor(), wanted)


def test_softmax_over_edges():
    n, edges = graph("at random, with loops and edges that come twice")
    mesh = mesh_of((WORLD.size,))
    scores = field(edges.shape[1], 2) * 5
    whole, own = scores.clone().requires_grad_(), shard(scores, mesh, (ms.Shard(0),), None, True)
    plan = ms.graph.halo(edges, shard(field(n, 2), mesh, (ms.Shard(0),)))
    e = (own - plan.ends(plan.max(own))[1]).exp()
    got = e / plan.ends(plan.sum(e))[1]
    expected = torch.zeros_like(whole)
    for i in range(n):
        at = (edges[1] == i).nonzero().reshape(-1)
        expected = expected.index_copy(0, at, whole[at].softmax(0))
    torch.testing.assert_close(got.detach().full_tensor(), expected.detach())
    weight = field(*scores.shape, seed=5)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), whole)
    (g,) = torch.autograd.grad((got * weight).sum(), own)
    torch.testing.assert_close(g.full_tensor(), wanted)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_messages_without_end(name, value):
    """As of edges that a softmax leaves out: infinite, with the gradient of what is the largest."""
    n, edges = graph(name)
    messages = field(edges.shape[1], 2)
    messages[::3] = value
    whole = messages.clone().requires_grad_()
    at = edges[1][:, None].expand(whole.shape)
    expected = whole.new_zeros(n, 2).scatter_reduce(0, at, whole, "amax", include_self=False)
    weight = field(n, 2, seed=5)
    expected.backward(weight)
    for mesh, nodes, node_sizes, on, edge_sizes in cuts(n, edges.shape[1]):
        plan = ms.graph.halo(shard(edges, mesh, on, edge_sizes), shard(field(n, 3), mesh, nodes, node_sizes))
        own = shard(messages, mesh, [ms.Shard(0) if isinstance(p, ms.Shard) else p for p in on], None, True)
        got = plan.max(own)
        assert torch.equal(got.detach().full_tensor(), expected.detach())
        got.backward(ms.distribute_tensor(weight, mesh, got.placements))
        torch.testing.assert_close(own.grad.full_tensor(), whole.grad)


def test_columns_on_another_mesh_dim():
    if WORLD.size < 2:
        mesh = mesh_of((1, 1))
    else:
        mesh = mesh_of((WORLD.size // 2, 2) if WORLD.size % 2 == 0 else (1, WORLD.size))
    n, edges = graph("a ring")
    x = field(n, 5)
    own = shard(x, mesh, (ms.Shard(0), ms.Shard(1)), None, True)
    plan = ms.graph.halo(edges, own)
    ends, summed = whole_graph(edges, n)
    leaf = x.clone().requires_grad_()
    expected = summed(torch.sin(ends(leaf)[0]) * ends(leaf)[1])
    source, target = plan.ends(own)
    got = plan.sum(torch.sin(source) * target)
    assert got.sharding == own.sharding
    torch.testing.assert_close(got.detach().full_tensor(), expected.detach())
    (wanted,) = torch.autograd.grad(expected.square().sum(), leaf)
    (found,) = torch.autograd.grad(got.square().sum(), own)
    torch.testing.assert_close(found.full_tensor(), wanted)


@pytest.mark.parametrize("name", ["at random, with loops and edges that come twice", "nodes without edges"])
def test_adjoints(name):
    n, edges = graph(name)
    mesh = mesh_of((WORLD.size,))
    own = shard(field(n, 2), mesh, (ms.Shard(0),))
    plan = ms.graph.halo(shard(edges, mesh, (ms.Shard(1),)), own)
    assert ms.dot_test(plan, own)
    assert ms.dot_test(lambda x: plan.ends(x)[0], own)
    messages = shard(field(edges.shape[1], 2), mesh, (ms.Shard(0),))
    assert ms.dot_test(plan.sum, messages)
    assert ms.dot_test(plan.sum, messages.to_local())


def test_derivatives():
    n, edges = graph("at random, with loops and edges that come twice")
    mesh = mesh_of((WORLD.size,))
    own = shard(field(n, 1), mesh, (ms.Shard(0),))
    plan = ms.graph.halo(edges, own)

    def layer(block):
        x = ms.ShardTensor.from_local(block, mesh, (ms.Shard(0),), {0: own.sharding.sizes[0] or (n,)})
        source, target = plan.ends(x)
        return (plan.sum(torch.sin(source * target)) * x).to_local()

    ms.testing.check_gradient(layer, own.to_local(), mesh=mesh)
    ms.testing.check_second_gradient(layer, own.to_local(), mesh=mesh)
    ms.testing.check_jvp(layer, own.to_local(), mesh=mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex128])
def test_dtypes(dtype):
    n, edges = graph("at random, with loops and edges that come twice")
    mesh = mesh_of((WORLD.size,))
    x = (field(n, 2) * 5).to(dtype)
    plan = ms.graph.halo(edges.int(), own := shard(x, mesh, (ms.Shard(0),)))
    got = plan.sum(plan.ends(own)[0])
    assert got.dtype == dtype
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = x.new_zeros(n, 2, dtype=wide).index_add(0, edges[1], x[edges[0]].to(wide)).to(dtype)
    torch.testing.assert_close(got.full_tensor(), expected)


def test_empty_bodies_of_vectors():
    n, edges = graph("a ring")
    mesh = mesh_of((WORLD.size,))
    x = field(n)
    plan = ms.graph.halo(edges, own := shard(x, mesh, (ms.Shard(0),)))
    torch.testing.assert_close(plan.sum(plan.ends(own)[0]).full_tensor(), x.roll(1))


@pytest.mark.parametrize("name", GRAPHS)
def test_what_travels(name):
    """A row once to each rank that needs it, and back; sums only of targets that lie elsewhere."""
    n, edges = graph(name)
    width = 3
    for mesh, nodes, node_sizes, on, edge_sizes in cuts(n, edges.shape[1]):
        own, at = shard(field(n, width), mesh, nodes, node_sizes, True), shard(edges, mesh, on, edge_sizes)
        plan = ms.graph.halo(at, own)
        lo, hi = own.sharding.interval(0, mesh.coords)
        owners = {}
        for dims in itertools.product(*[range(k) if p == ms.Shard(0) else [c] for k, p, c in
                                        zip(mesh.shape, nodes, mesh.coords)]):  # fmt: skip
            first, last = own.sharding.interval(0, dims)
            owners.update(dict.fromkeys(range(first, last), mesh.rank_at(dims)))

        def received(numbers, owners=owners, lo=lo, hi=hi):
            far = {int(i) for i in numbers.reshape(-1) if not lo <= i < hi}
            return len({owners[i] for i in far}), 8 * width * len(far)

        def every(count, op):
            own = count.by_op.get(op)
            return ms.all_reduce(torch.tensor([own.messages, own.nbytes] if own else [0, 0]), mesh).tolist()

        first, last = plan.edges.interval(0, mesh.coords)
        mine = edges[:, first:last]
        fetched = ms.all_reduce(torch.tensor(received(mine)), mesh).tolist()
        summed = ms.all_reduce(torch.tensor(received(mine[1])), mesh).tolist()
        with ms.comm_counter() as count:
            source, _ = plan.ends(own)
        assert every(count, "graph.halo") == fetched
        with ms.comm_counter() as count:
            got = plan.sum(source)
        assert every(count, "graph.halo sum") == summed
        with ms.comm_counter() as count:
            got.sum().backward()
        assert every(count, "graph.halo") == fetched
        assert every(count, "graph.halo sum") == summed


def test_a_plan_of_another_graph_meanwhile():
    mesh = mesh_of((WORLD.size,))
    x = field(12, 2)
    own = shard(x, mesh, (ms.Shard(0),))
    generator = torch.Generator().manual_seed(5)
    graphs = [torch.randint(0, 12, (2, 20), generator=generator) for _ in range(3)]
    plans = [ms.graph.halo(edges, own) for edges in graphs]
    for _ in range(2):
        for edges, plan in zip(graphs, plans):
            ends, summed = whole_graph(edges, 12)
            torch.testing.assert_close(plan.sum(plan.ends(own)[0]).full_tensor(), summed(ends(x)[0]))


def test_a_plan_made_in_inference_mode():
    mesh = mesh_of((WORLD.size,))
    n, edges = graph("at random, with loops and edges that come twice")
    own = shard(field(n, 2), mesh, (ms.Shard(0),), None, True)
    with torch.inference_mode():
        plan = ms.graph.halo(shard(edges, mesh, (ms.Shard(1),)), own)
        plan.max(plan.ends(own)[0])
    (plan.sum(plan.ends(own)[0]) + plan.max(plan.ends(own)[0])).sum().backward()
    again = ms.graph.halo(edges, own)
    (wanted,) = torch.autograd.grad((again.sum(again.ends(own)[0]) + again.max(again.ends(own)[0])).sum(), own)
    torch.testing.assert_close(own.grad.full_tensor(), wanted.full_tensor())


# -- mistakes

MISTAKES = {
    "number too large": (lambda e, x: (torch.where(e == 3, 12, e), x), LayoutError, r"0 to 8\n.*\n?.*12 as the"),
    "number below zero": (lambda e, x: (torch.where(e == 3, -1, e), x), LayoutError, "out of range"),
    "shape of the edges": (lambda e, x: (e.T.contiguous(), x), LayoutError, "edges of another shape"),
    "dtype of the edges": (lambda e, x: (e.float(), x), UnsupportedDtypeError, "numbers of nodes are integers"),
    "plain nodes": (lambda e, x: (e, x.full_tensor()), LayoutError, "nodes"),
    "edges that are no tensor": (lambda e, x: (e.tolist(), x), LayoutError, "edge_index"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    n, edges = graph("at random, with loops and edges that come twice")
    mesh = mesh_of((WORLD.size,))
    change, error, text = MISTAKES[mistake]
    edges, x = change(edges, shard(field(n, 2), mesh, (ms.Shard(0),)))
    if isinstance(edges, Tensor) and edges.shape[0] == 2:
        edges = shard(edges, mesh, (ms.Shard(1),))
    with pytest.raises(error, match=text) as raised:
        ms.graph.halo(edges, x)
    texts = WORLD.allgather(str(raised.value).partition("raised on")[0])
    assert len(set(texts)) == 1


def test_two_meshes():
    mesh, other = mesh_of((WORLD.size,)), ms.init_mesh((-1,))
    n, edges = graph("a ring")
    own = shard(field(n, 2), mesh, (ms.Shard(0),))
    with pytest.raises(MeshError):
        ms.graph.halo(shard(edges, other, (ms.Shard(1),)), own)
    plan = ms.graph.halo(edges, own)
    with pytest.raises(MeshError):
        plan(shard(field(n, 2), other, (ms.Shard(0),)))
    with pytest.raises(LayoutError, match="the nodes' rows do not fit"):
        plan(shard(field(n + 1, 2), mesh, (ms.Shard(0),)))
    with pytest.raises(LayoutError, match="rows= is of another kind"):
        plan(3)
    with pytest.raises(LayoutError, match="messages do not fit the plan"):
        plan.sum(shard(field(n + 1, 2), mesh, (ms.Shard(0),)))
    with pytest.raises(UnsupportedDtypeError, match="messages without an order"):
        plan.max(shard(field(n, 2) * 1j, mesh, (ms.Shard(0),)))
    other.free()


@pytest.mark.ranks(2, 3, 4)
def test_calls_that_differ():
    mesh = mesh_of((WORLD.size,))
    n, edges = graph("a ring")
    own = shard(field(n, 2), mesh, (ms.Shard(0),))
    with pytest.raises(DesyncError):
        ms.graph.halo(edges[:, : 7 if WORLD.rank == 1 else 8], own)
    with pytest.raises(LayoutError, match="edges of another shape"):
        ms.graph.halo(edges.T if WORLD.rank == 1 else edges, own)
    # edges that travel by a plan that is there already
    lying = ms.ShardTensor.from_local(edges * (WORLD.rank == 0), mesh, (ms.Partial(),))
    for call in (ms.graph.halo, ms.graph.edge_order):
        call(lying, own)
        with pytest.raises(UnsupportedDtypeError, match="numbers of nodes are integers"):
            call(edges.float() if WORLD.rank == 1 else lying, own)
    plan = ms.graph.halo(edges, own)
    messages = field(plan.edge_index.shape[1], 2)
    with pytest.raises(LayoutError, match="do not fit this rank's edges"):
        plan.sum(messages[: -1 if WORLD.rank == 1 else None])
    with pytest.raises(DesyncError):
        plan.sum(messages[:, : 1 if WORLD.rank == 1 else 2])
    for reduce in (plan.sum, plan.max):
        with pytest.raises(DesyncError):
            reduce(messages.detach().requires_grad_(WORLD.rank == 1))
