"""Cells that change owner when dims are merged or split, in one exchange between the ranks that share them.

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

from mpishard.autograd.linear import LinearOp, Step, apply, pair
from mpishard.autograd.redistribute import cells_step
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, Spans, balanced, holders, runs_of, sizes_of, spans_of

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


def _last_cut(layout: Layout, dims: Dims) -> tuple[int, int, Sequence[int]]:
    """Return the position in ``dims`` of the last that is sharded, the cells behind an index of it, and its blocks."""
    k = max(k for k, d in enumerate(dims) if layout.sizes[d] is not None)
    return k, math.prod(layout.shape[d] for d in dims[k + 1 :]), layout.sizes[dims[k]] or ()


def _unit(layout: Layout, dims: Dims) -> int:
    """Return into how many consecutive cells of the flat dim all borders of blocks fall."""
    _, row, sizes = _last_cut(layout, dims)
    return row * math.gcd(*(size for size, _ in runs_of(sizes)))


def _cells(layout: Layout, dims: Dims, coords: Sequence[int], unit: int) -> np.ndarray:
    """Return the numbers, in the flat dim, of the first cells of the units that a rank holds: ascending."""
    k, row, _ = _last_cut(layout, dims)
    flat = np.zeros(1, np.int64)
    for d in dims[:k]:
        flat = (flat[:, None] * layout.shape[d] + np.arange(*layout.interval(d, coords))).reshape(-1)
    lo, hi = layout.interval(dims[k], coords)
    return (flat[:, None] * (layout.shape[dims[k]] * row) + np.arange(lo * row, hi * row, unit)).reshape(-1)


def _holders(layout: Layout, dims: Dims, cells: np.ndarray, coords: Sequence[int]) -> np.ndarray:
    """Return the rank that holds each cell of the flat dim in ``layout``."""
    return holders(layout, dims, np.unravel_index(cells, [layout.shape[d] for d in dims]), coords)


class _Side(NamedTuple):
    """A rank's cells on one side: which go to which rank, their order by rank, and the way back (None: as they lie)."""

    spans: Spans
    by_rank: Tensor | None
    back: Tensor | None


def _side(ranks: np.ndarray, device: torch.device) -> _Side:
    if np.all(ranks[:-1] <= ranks[1:]):
        return _Side(spans_of(ranks), None, None)
    order = np.argsort(ranks, kind="stable")
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return _Side(spans_of(ranks[order]), torch.from_numpy(order).to(device), torch.from_numpy(back).to(device))


def _step(mesh: CartMesh, before: Layout, out: Layout, group: DimGroup, at: int) -> Step:
    old, new = (before, group.old), (out, group.new)
    unit = math.gcd(_unit(*old), _unit(*new))

    def side(cells: tuple[Layout, Dims], others: tuple[Layout, Dims]) -> _Side:
        return _side(_holders(*others, _cells(*cells, mesh.coords, unit), mesh.coords), mesh.device)

    sent, received = side(old, new), side(new, old)
    travel = cells_step(mesh, "reshape", at, sent.spans, received.spans, (before, out, at))

    def run(x: Tensor, give: _Side, take: _Side, travel: LinearOp) -> Tensor:
        x = x.unflatten(at, (x.shape[at] // unit, unit))
        x = x if give.by_rank is None else x.index_select(at, give.by_rank)
        y = travel(x)
        y = y if take.back is None else y.index_select(at, take.back)
        return y.flatten(at, at + 1)

    return pair(lambda x: run(x, sent, received, travel), lambda g: run(g, received, sent, travel.adjoint))
