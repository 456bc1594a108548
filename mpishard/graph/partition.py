"""Orders of nodes and edges in which what belongs together lies on one rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.argument import require, together
from mpishard.autograd.rows import Rows
from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh, Group
from mpishard.errors import LayoutError
from mpishard.graph.halo import SHARD_IT, ends_of, halo, rows_layout
from mpishard.graph.order import in_order
from mpishard.layout import Layout, bounds, layout_of
from mpishard.layout.curve import places_of
from mpishard.tensor.operand import moved, resolved
from mpishard.tensor.shard_tensor import ShardTensor, wrap

_LANDMARKS = 3
_MOST_DIMS = 31


def partition(
    positions: ShardTensor | None = None, *, edge_index: Tensor | None = None, nodes: ShardTensor | None = None
) -> ShardTensor:
    """Return an order of nodes whose even cuts part few neighbours: ``x[order]`` are the nodes' rows in it.

    Collective. No rank has all of anything, and the order is the same however the nodes are cut.

    Parameters
    ----------
    positions
        Where the nodes are, numbers of shape (nodes, dims), sharded along dim 0.
    edge_index, nodes
        For a graph without positions its edges, and a tensor with a row per node, as for `mpishard.graph.halo`.

    Returns
    -------
    ShardTensor
        The old number of every node in the new order, int64, cut evenly over the mesh dims that shard the nodes.

    Raises
    ------
    LayoutError
        Neither or both of positions and edges, positions of another shape or that are not finite; wrong edges.
    DesyncError
        Calls that differ between ranks.

    Notes
    -----
    Nodes with positions are ordered along Hilbert's curve. Of others the positions are their distances, counted in
    edges without direction, to three landmarks, turned to their principal axes. Landmarks are nodes far from each
    other, found one after the other by breadth first search: messages to neighbours and a reduction for each step,
    four times the diameter of the graph. It parts meshes well (twice as many edges as the best cut of a square
    lattice), and graphs in which everything is near everything no better than any order. A partitioner of graphs
    (METIS and its kin) finds smaller cuts; an order made of its parts serves as well.

    Examples
    --------
    >>> order = ms.graph.partition(positions)
    >>> x, positions = x[order], positions[order]
    >>> edge_index = ms.graph.renumber(edge_index, order)
    >>> with_targets = ms.graph.edge_order(edge_index, x)
    >>> edge_index, edge_attr = edge_index[:, with_targets], edge_attr[with_targets]
    >>> graph = ms.graph.halo(edge_index, x)
    """
    given = {"positions": positions, "edge_index": edge_index, "nodes": nodes}
    if (positions is None) == (edge_index is None) or (nodes is None) != (edge_index is None):
        meshes = [a.mesh for a in given.values() if isinstance(a, ShardTensor)]
        with together("graph.partition", meshes[0]) if meshes else nullcontext():
            raise LayoutError(
                "graph.partition: it takes positions, or edges and nodes",
                expected="positions, or edge_index= and nodes=",
                got=[name for name, a in given.items() if a is not None],
                fix="give the positions alone, where there are some",
            )
    if positions is None:
        assert edge_index is not None
        require("graph.partition", "nodes", nodes, ShardTensor, SHARD_IT)
        assert nodes is not None
        return _along_curve(nodes.mesh, rows_layout(nodes.sharding), _distances(edge_index, nodes))
    require("graph.partition", "positions", positions, ShardTensor, SHARD_IT)
    mesh, shape = positions.mesh, positions.shape
    every = mesh.all_ranks.comm
    if len(shape) != 2 or not 1 <= shape[1] <= _MOST_DIMS or positions.is_complex():
        wrong = LayoutError(
            "graph.partition: positions of another kind",
            expected=f"real numbers of shape (nodes, dims), 1 to {_MOST_DIMS} dims",
            got=f"{positions.dtype} of shape {tuple(shape)}",
            fix="give a row of coordinates for each node",
        )
        guard.agree(every, wrong)
    rows = rows_layout(positions.sharding)
    held = layout_of(mesh.shape, rows.placements, shape, (rows.sizes[0], None))
    if positions.sharding != held:
        # where something travels by a plan that is there already, a rank with a wrong argument would be waited for
        guard.agree(every, None, f"graph.partition of {positions.sharding}")
    block = moved(resolved(positions.detach()), held).block.to("cpu", torch.float64).numpy()
    bad = np.flatnonzero(~np.isfinite(block).all(1))
    error = None if not len(bad) else LayoutError(
        "graph.partition: positions are not finite",
        expected="numbers",
        got=f"{block[bad[0]].tolist()} as that of node {rows.interval(0, mesh.coords)[0] + int(bad[0])}",
        fix="leave out nodes without a position",
    )  # fmt: skip
    mesh.agree(every, error, f"graph.partition of {held}")
    return _along_curve(mesh, rows, block)


def _along_curve(mesh: CartMesh, rows: Layout, block: np.ndarray[Any, Any]) -> ShardTensor:
    """Return the order of rows along a curve through their positions, of which ``block`` has this rank's."""
    ndim = block.shape[1]
    ends = (
        np.concatenate([block, np.full((1, ndim), -np.inf)]).max(0),
        np.concatenate([-block, np.full((1, ndim), -np.inf)]).max(0),
    )
    dims = rows.shard_dims.get(0, ())
    told = torch.from_numpy(np.concatenate(ends))
    if dims:
        told = blocking.all_reduce(told, mesh.group(dims), "max")
    high, low = told.numpy()[:ndim], -told.numpy()[ndim:]
    return _sorted(mesh, rows, places_of(block, low, high))


def _sorted(mesh: CartMesh, rows: Layout, keys: np.ndarray[Any, Any]) -> ShardTensor:
    dims = rows.shard_dims.get(0, ())
    if not dims:
        return wrap(torch.from_numpy(np.argsort(keys, kind="stable")).to(mesh.device), rows, mesh)
    part, lengths = in_order(keys, rows.sizes[0] or (), mesh.group(dims))
    found = layout_of(mesh.shape, rows.placements, rows.shape, (tuple(lengths.tolist()),))
    order = wrap(torch.from_numpy(part).to(mesh.device), found, mesh)
    return moved(order, layout_of(mesh.shape, rows.placements, rows.shape))


def _distances(edge_index: Tensor, nodes: ShardTensor) -> np.ndarray[Any, Any]:
    """Return how many edges away each of this rank's nodes is from some landmarks: shape (nodes, landmarks)."""
    mesh, rows = nodes.mesh, rows_layout(nodes.sharding)
    ways = [halo(edge_index, nodes), halo(edge_index.flip(0), nodes)]
    n, (lo, hi) = rows.shape[0], rows.interval(0, mesh.coords)
    numbers, every = torch.arange(lo, hi, device="cpu"), mesh.all_ranks

    def search(start: int) -> Tensor:
        distance = torch.full((hi - lo,), -1, device="cpu")
        front, level = numbers == start, 0
        while blocking.all_reduce(front.any().long().reshape(1), every, "max").item():
            distance[front] = level
            x = wrap(front.long().to(mesh.device), rows, mesh)
            reached = sum(way.sum(way.ends(x)[0]).block.cpu() for way in ways)
            front, level = (reached > 0) & (distance < 0), level + 1
        # beyond all that can be reached
        return torch.where(distance < 0, level, distance)

    def farthest(distance: Tensor) -> int:
        """Return the first of the nodes with the largest distance."""
        own = distance.max().reshape(1) if len(distance) else torch.tensor([-1], device="cpu")
        most = blocking.all_reduce(own, every, "max").item()
        at = numbers[distance == most][:1] if bool((distance == most).any()) else torch.tensor([n], device="cpu")
        return int(blocking.all_reduce(at, every, "min").item())

    nearest = search(0)
    found: list[Tensor] = []
    for _ in range(_LANDMARKS):
        distance = search(farthest(nearest))
        nearest = torch.minimum(nearest, distance) if found else distance
        found.append(distance)
    return _along_axes(torch.stack(found, 1), every)


def _along_axes(x: Tensor, every: Group) -> np.ndarray[Any, Any]:
    """Return whole numbers along their principal axes: a sheet that lies aslant would meet the curve in many pieces.

    Collective over ``every``. Sums of integers are the same however rows are cut.
    """
    sums = torch.cat([torch.tensor([len(x)], device="cpu"), x.sum(0), (x.T @ x).reshape(-1)])
    count, *of_one = blocking.all_reduce(sums, every).tolist()
    ndim = x.shape[1]
    mean, products = (
        np.array(of_one[:ndim]) / max(count, 1),
        np.array(of_one[ndim:]).reshape(ndim, ndim) / max(count, 1),
    )
    axes = np.linalg.eigh(products - np.outer(mean, mean))[1]
    columns = x.double().numpy().T
    # not a product of matrices, whose rounding depends on how many rows there are
    return np.stack([sum(c * a for c, a in zip(columns, axis)) for axis in axes.T], 1)


def renumber(edge_index: Tensor, order: ShardTensor) -> ShardTensor:
    """Return edges with the numbers that their nodes have in a new order: of ``x[order]``.

    Collective over the mesh dims that shard the order.

    Parameters
    ----------
    edge_index
        Numbers of nodes in the old order, as for `mpishard.graph.halo`.
    order
        The old number of every node, in the new order, each once: as `partition` returns it.

    Returns
    -------
    ShardTensor
        Of shape (2, edges), int64; edges stay where they are.

    Raises
    ------
    LayoutError
        An order of another shape; wrong edges.
    DesyncError
        Calls that differ between ranks.
    """
    require("graph.renumber", "order", order, ShardTensor, "give what mpishard.graph.partition returns")
    mesh = order.mesh
    every = mesh.all_ranks.comm
    if order.ndim != 1 or order.dtype != torch.int64:
        kind = LayoutError(
            "graph.renumber: no order of nodes",
            expected="the old number of every node: one dim of torch.int64",
            got=f"{order.dtype} of shape {tuple(order.shape)}",
            fix="give what mpishard.graph.partition returns",
        )
        guard.agree(every, kind)
    if order.sharding.partial_dims:
        guard.agree(every, None, f"graph.renumber of {order.sharding}")
    order = resolved(order)
    rows = order.sharding
    old = order.block.cpu().numpy()
    lo, hi = rows.interval(0, mesh.coords)
    number = np.argsort(old, kind="stable")
    wrong = np.flatnonzero((old < 0) | (old >= rows.shape[0]))
    error = None if not len(wrong) else LayoutError(
        "graph.renumber: no order of nodes",
        expected=f"numbers from 0 to {rows.shape[0] - 1}, each once",
        got=f"{old[wrong[0]]} at {lo + int(wrong[0])}",
        fix="give what mpishard.graph.partition returns",
    )  # fmt: skip
    ends, held, told = ends_of("graph.renumber", edge_index, rows, mesh, error)
    home = Rows(mesh, rows, 0, old[number], "graph.renumber", ("graph.renumber", told))
    once = np.bincount(home.give.cpu().numpy(), minlength=hi - lo) == 1
    error = None if once.all() else LayoutError(
        "graph.renumber: no order of nodes",
        expected=f"numbers from 0 to {rows.shape[0] - 1}, each once",
        got=f"not once: {lo + int(np.argmin(once))}",
        fix="give what mpishard.graph.partition returns",
    )  # fmt: skip
    guard.agree(every, error, "graph.renumber: the order")
    new = home.add(torch.from_numpy(number + lo).to(mesh.device), order.block.new_zeros(hi - lo))
    asked, at = np.unique(ends, return_inverse=True)
    found = Rows(mesh, rows, 0, asked, "graph.renumber", ("graph.renumber, edges", told)).fetch(new)
    return wrap(found[torch.from_numpy(at.reshape(ends.shape)).to(mesh.device)], held, mesh)


def edge_order(edge_index: Tensor, nodes: ShardTensor) -> ShardTensor:
    """Return an order of edges in which each lies on the rank of its target, sorted by target.

    Collective. Then sums of messages need no communication, and features of sources are all that travels.

    Parameters
    ----------
    edge_index, nodes
        As for `mpishard.graph.halo`.

    Returns
    -------
    ShardTensor
        The old number of every edge, int64: ``edge_index[:, order]`` and ``edge_attr[order]`` lie as it does, in blocks
        of as many edges as end at the nodes of each rank.

    Raises
    ------
    LayoutError
        Wrong edges, as for `mpishard.graph.halo`.
    DesyncError
        Calls that differ between ranks.
    """
    require("graph.edge_order", "nodes", nodes, ShardTensor, SHARD_IT)
    mesh, rows = nodes.mesh, rows_layout(nodes.sharding)
    dims = rows.shard_dims.get(0, ())
    ends, held, _ = ends_of("graph.edge_order", edge_index, rows, mesh, alike=True)
    edges = layout_of(mesh.shape, rows.placements, (held.shape[1],), (held.sizes[1],))
    if not dims:
        return wrap(torch.from_numpy(np.argsort(ends[1], kind="stable")).to(mesh.device), edges, mesh)
    borders = np.array(bounds(rows.sizes[0] or ())[1:-1], np.int64)
    part, lengths = in_order(ends[1], edges.sizes[0] or (), mesh.group(dims), borders)
    found = layout_of(mesh.shape, rows.placements, edges.shape, (tuple(lengths.tolist()),))
    return wrap(torch.from_numpy(part).to(mesh.device), found, mesh)
