"""Cells that change owner when dims are merged or split, in one all-to-all between the ranks that share them.

A rank's cells, in row-major order, are ascending numbers of a flat dim, before and after. So what goes to one rank
is a selection of ascending cells, and comes in that order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.linear import Step, apply, pair
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, balanced, bounds, sizes_of

Dims = tuple[int, ...]


class DimGroup(NamedTuple):
    """A run of dims before, the run of dims of the same cells after, and whether cells change owner."""

    old: Dims
    new: Dims
    moves: bool


def spread(mesh_shape: Sequence[int], mesh_dims: Sequence[int], extents: Sequence[int]) -> dict[int, int]:
    """Return the position in ``extents`` that each mesh dim should shard: the first that has a cell for every rank.

    Not collective.
    """
    count = math.prod(mesh_shape[m] for m in mesh_dims)
    roomy = next((i for i, n in enumerate(extents) if n >= count), None)
    if roomy is not None:
        return dict.fromkeys(mesh_dims, roomy)
    largest = max(range(len(extents)), key=lambda i: extents[i])
    left, out = list(extents), {}
    for m in mesh_dims:
        i = next((i for i, n in enumerate(left) if n >= mesh_shape[m]), largest)
        left[i] //= mesh_shape[m]
        out[m] = i
    return out


def cut_near(borders: Sequence[int], n: int) -> tuple[int, ...]:
    """Cut ``n`` cells at the multiples next to ``borders``, or evenly where that would leave a rank without cells.

    Not collective.
    """
    total, count = borders[-1], len(borders) - 1
    sizes = sizes_of(tuple(round(b * n / total) for b in borders))
    return balanced(n, count) if 0 in sizes and n >= count else sizes


def regrouped(x: Tensor, mesh: CartMesh, before: Layout, out: Layout, groups: Sequence[DimGroup]) -> Tensor:
    """Return this rank's block of ``out``, given that of ``before``: the same cells in row-major order.

    Collective.

    Notes
    -----
    Adjoint: the cells go back.
    """
    key = ("regroup", before, out)
    steps = mesh.plans.get(key)
    if steps is None:
        steps = mesh.plan(key, lambda: [_step(mesh, before, out, g, i) for i, g in enumerate(groups) if g.moves])
    shape = before.local_shape(mesh.coords)
    x = x.reshape([math.prod(shape[d] for d in g.old) for g in groups])
    for step in steps:
        x = apply(step, x)
    return x.reshape(out.local_shape(mesh.coords))


def _cells(layout: Layout, dims: Dims, coords: Sequence[int]) -> np.ndarray:
    """Return the numbers, in the flat dim, of the cells that the rank at ``coords`` holds: ascending."""
    flat = np.zeros(1, np.int64)
    for d in dims:
        lo, hi = layout.interval(d, coords)
        flat = (flat[:, None] * layout.shape[d] + np.arange(lo, hi)).reshape(-1)
    return flat


def _owners(layout: Layout, dims: Dims, cells: np.ndarray, mesh_dims: Sequence[int]) -> np.ndarray:
    """Return the rank along ``mesh_dims`` that holds each cell in ``layout``."""
    coords: dict[int, np.ndarray] = {}
    for d in reversed(dims):
        cells, index = np.divmod(cells, layout.shape[d])
        sizes = layout.sizes[d]
        if sizes is None:
            continue
        block = np.searchsorted(bounds(sizes)[1:-1], index, "right")
        for m in reversed(layout.shard_dims[d]):
            block, coords[m] = np.divmod(block, layout.mesh_shape[m])
    owners = np.zeros(len(cells), np.int64)
    for m in mesh_dims:
        owners = owners * layout.mesh_shape[m] + coords[m]
    return owners


class _Side(NamedTuple):
    """A rank's cells on one side: how many per peer, their order by peer, and the way back (None: as they lie)."""

    counts: list[int]
    by_peer: Tensor | None
    back: Tensor | None


def _side(owners: np.ndarray, peers: int, device: torch.device) -> _Side:
    counts = np.bincount(owners, minlength=peers).tolist()
    if np.all(owners[:-1] <= owners[1:]):
        return _Side(counts, None, None)
    order = np.argsort(owners, kind="stable")
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return _Side(counts, torch.from_numpy(order).to(device), torch.from_numpy(back).to(device))


def _step(mesh: CartMesh, before: Layout, out: Layout, group: DimGroup, at: int) -> Step:
    mesh_dims = tuple(sorted(m for d in group.old for m in before.shard_dims.get(d, ())))
    ranks = mesh.group(mesh_dims)
    count = math.prod(before.shape[d] for d in group.old)

    def side(cells: tuple[Layout, Dims], others: tuple[Layout, Dims]) -> _Side:
        return _side(_owners(*others, _cells(*cells, mesh.coords), mesh_dims), ranks.size, mesh.device)

    old, new = (before, group.old), (out, group.new)
    sent, received = side(old, new), side(new, old)

    def run(x: Tensor, give: _Side, take: _Side) -> Tensor:
        x = x if give.by_peer is None else x.index_select(at, give.by_peer)
        shapes = [(*x.shape[:at], n, *x.shape[at + 1 :]) for n in take.counts]
        # no rank moves more than the whole flat dim
        bound = count * x.itemsize * math.prod(n for d, n in enumerate(x.shape) if d != at)
        y = torch.cat(blocking.all_to_all(x.split(give.counts, at), shapes, ranks, bound), at)
        return y if take.back is None else y.index_select(at, take.back)

    return pair(lambda x: run(x, sent, received), lambda g: run(g, received, sent))
