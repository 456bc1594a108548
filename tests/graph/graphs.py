"""Graphs that tests share, whole and on every kind of mesh."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import mpishard as ms
from mpishard.layout import layout_of
from tests.compare import WORLD, mesh_of, mesh_shapes, skew

GRAPHS: dict[str, tuple[int, Callable[[torch.Generator], Tensor]]] = {
    "at random, with loops and edges that come twice": (9, lambda g: torch.randint(0, 9, (2, 31), generator=g)),
    "a ring": (8, lambda g: torch.stack([torch.arange(8), (torch.arange(8) + 1) % 8])),
    "nodes without edges": (11, lambda g: torch.tensor([[2, 7, 7, 2], [3, 3, 7, 2]])),
    "no edges": (6, lambda g: torch.zeros(2, 0, dtype=torch.int64)),
    "fewer nodes than ranks": (1, lambda g: torch.zeros(2, 3, dtype=torch.int64)),
    "no nodes": (0, lambda g: torch.zeros(2, 0, dtype=torch.int64)),
}


def graph(name: str, seed: int = 0) -> tuple[int, Tensor]:
    """The number of nodes, and the edges."""
    n, edges = GRAPHS[name]
    return n, edges(torch.Generator().manual_seed(seed))


def drawn_sizes(n: int, count: int, draw: random.Random) -> tuple[int, ...]:
    """Block sizes at random, some of them zero."""
    cuts = sorted(draw.randint(0, n) for _ in range(count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, n]))


def cuts(n: int, m: int, seed: int = 0) -> Iterator[tuple[ms.CartMesh, Any, Any, Any, Any]]:
    """Meshes, and how ``n`` nodes and ``m`` edges (of a tensor (2, m)) lie on them: placements and sizes of both."""
    draw = random.Random(seed)
    replicated = ms.Replicate()
    for shape in mesh_shapes(2):
        mesh = mesh_of(shape)
        rest = (replicated,) * (len(shape) - 1)
        pairs = [((ms.Shard(0), *rest), (ms.Shard(1), *rest)), ((ms.Shard(0), *rest), (replicated, *rest))]
        if rest:
            pairs += [
                ((ms.Shard(0), ms.Shard(0)), (ms.Shard(1), ms.Shard(1))),
                ((replicated, ms.Shard(0)), (replicated, ms.Shard(1))),
                ((replicated, ms.Shard(0)), (ms.Shard(1), ms.Shard(1))),
                ((ms.Shard(0), replicated), (replicated, ms.Shard(1))),
                ((replicated, replicated), (ms.Shard(1), replicated)),
            ]
        for nodes, edges in pairs[: 2 if not rest else 1] + (draw.sample(pairs[1:], 3) if rest else []):
            yield mesh, nodes, None, edges, None
            sizes = []
            for k, (placements, extent, dim) in enumerate(((nodes, n, 0), (edges, m, 1))):
                found = layout_of(shape, placements, (m, m) if dim else (n,)).sizes[dim]
                count = 1 if found is None else len(found)
                one = skew(extent, count) if k else drawn_sizes(extent, count, draw)
                sizes.append(None if count == 1 else {dim: one})
            if WORLD.size > 1:
                yield mesh, nodes, sizes[0], edges, sizes[1]
