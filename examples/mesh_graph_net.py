#!/usr/bin/env python
"""A mesh graph net on a cloud of points: it learns how heat spreads among them, whatever the number of ranks.

    mpiexec -n 4 python examples/mesh_graph_net.py --points 4096 --steps 100

Points, edges and features are sharded; no rank has all of any of them. Losses are those of one process.
"""

import argparse

import torch
from torch import nn

import mpishard as ms

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--points", type=int, default=2048)
parser.add_argument("--neighbours", type=int, default=6)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--width", type=int, default=16)
args = parser.parse_args()

mesh = ms.init_mesh((-1,), ("points",))
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# points at random in a square, the same on any number of ranks, in an order in which those that are near follow
where = ms.rand(args.points, 2, mesh=mesh, placements=(ms.Shard(0),), dtype=torch.float64)
where = where[ms.graph.partition(where)]

# edges from the nearest neighbours to each point
near = ms.points.knn(where, where, args.neighbours + 1).indices[:, 1:]
number = ms.arange(args.points, mesh=mesh, placements=(ms.Shard(0),))
targets = number[:, None].expand(args.points, args.neighbours)
edges = torch.stack([near.reshape(-1), targets.reshape(-1)])
graph = ms.graph.halo(edges, where)


class Block(nn.Module):
    """Messages along edges, and what nodes and edges make of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(3 * width, width), nn.GELU(), nn.Linear(width, width))
        self.node = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x, e):
        source, target = graph.ends(x)
        e = e + self.edge(torch.cat([source, target, e], 1))
        return x + self.node(torch.cat([x, graph.sum(e)], 1)), e


class Net(nn.Module):
    """Encode, process, decode."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.nodes, self.edges = nn.Linear(1, width), nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.out = nn.Linear(width, 1)

    def forward(self, u, e):
        x, e = self.nodes(u), self.edges(e)
        for block in self.blocks:
            x, e = block(x, e)
        return u + self.out(x)


# what edges know: the way from one end to the other
source, target = graph.ends(where)
way = (source - target) * args.points**0.5
attributes = torch.cat([way, way.norm(dim=1, keepdim=True)], 1)

# heat, and where it is after some steps to the neighbours' mean
heat = torch.sin(9 * where[:, :1]) * torch.cos(7 * where[:, 1:])
later = heat
for _ in range(args.layers):
    later = 0.5 * later + 0.5 * graph.sum(graph.ends(later)[0]) / args.neighbours

net = Net(args.width, args.layers)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
losses = []
for _ in range(args.steps):
    loss = nn.functional.mse_loss(net(heat, attributes), later)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

ghosts = ms.all_reduce(torch.tensor([len(graph.ghosts)]), mesh).item()
if mesh.rank == 0:
    print(
        f"{mesh.size} ranks, {ghosts} rows from others: loss {losses[0]:.9f}, after {args.steps} steps {losses[-1]:.9f}"
    )
