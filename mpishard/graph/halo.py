"""A graph whose nodes and edges are sharded: features of edges' ends, and sums of messages at nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.argument import require
from mpishard.autograd.linear import Chosen, apply, differentiated
from mpishard.autograd.redistribute import sum_partial
from mpishard.autograd.rows import Rows
from mpishard.autograd.use import use
from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.interruption import whole
from mpishard.comm.mesh import CartMesh
from mpishard.comm.mesh_argument import two_meshes
from mpishard.errors import LayoutError, MpishardError, UnsupportedDtypeError
from mpishard.layout import Layout, Placement, Replicate, Shard, layout_of
from mpishard.tensor.operand import moved, on_mesh, replicated_layout
from mpishard.tensor.shard_tensor import ShardTensor, wrap

SHARD_IT = "shard it first, e.g. with mpishard.distribute_tensor"


@whole
def halo(edge_index: Tensor, nodes: ShardTensor) -> GraphHalo:
    """Plan which rows of nodes this rank's edges need of other ranks, once for a graph.

    Collective.

    Parameters
    ----------
    edge_index
        Global numbers of nodes, integers of shape (2, edges): of the sources, and of the targets. Sharded along
        dim 1, in any order and on whatever ranks; along mesh dims that shard the nodes and not the edges, as all
        of a plain tensor, edges are cut evenly. Loops and edges that come more than once are edges like others.
    nodes
        A tensor with a row per node along dim 0: features, positions. Only how its rows are cut counts.

    Returns
    -------
    GraphHalo

    Raises
    ------
    LayoutError
        Another shape of the edges, or numbers of nodes that are not there.
    UnsupportedDtypeError
        Numbers that are not int64 or int32.
    MeshError
        Edges and nodes on different meshes.
    DesyncError
        Calls that differ between ranks.

    Notes
    -----
    Few rows travel where an edge lies on the rank of one of its ends, and most edges have both there: see
    `mpishard.graph.partition`.

    Examples
    --------
    >>> graph = ms.graph.halo(edge_index, x)
    >>> source, target = graph.ends(x)  # features of every edge's ends
    >>> x = update(torch.cat([x, graph.sum(message(torch.cat([source, target], 1)))], 1))
    """
    require("graph.halo", "nodes", nodes, ShardTensor, SHARD_IT)
    # it lives on: numbers of rows must not be inference tensors, which later gradients may not keep
    with torch.inference_mode(False):
        return GraphHalo(edge_index, nodes)


def ends_of(
    call: str,
    edge_index: Tensor,
    nodes: Layout,
    mesh: CartMesh,
    error: MpishardError | None = None,
    alike: bool = False,
) -> tuple[np.ndarray[Any, Any], Layout, int]:
    """Return the ends of this rank's edges, how all lie on the mesh, and a number that no other call has.

    Collective: wrong edges, and ``error``, rise on every rank. Edges are cut over the mesh dims that cut the
    nodes, and unless ``alike`` over those that cut them before.
    """
    every = mesh.all_ranks.comm
    try:
        _check(call, edge_index, nodes, mesh)
    except Exception as e:
        guard.agree(every, error or e)
        raise
    given = edge_index.sharding if isinstance(edge_index, ShardTensor) else replicated_layout(mesh, edge_index.shape)
    held = _edges_layout(given, nodes.shard_dims.get(0, ()), alike)
    if isinstance(edge_index, ShardTensor) and given != held:
        # where edges travel by a plan that is there already, a rank with wrong ones would be waited for
        guard.agree(every, error, f"{call} of {given}")
    ends = moved(on_mesh(edge_index, mesh), held).block.cpu().numpy().astype(np.int64)
    error = error or _out_of_range(call, ends, nodes.shape[0], held.interval(1, mesh.coords)[0])
    number, _ = mesh.agree(every, error, f"{call} of {held} and nodes in {nodes}")
    return ends, held, number


def _check(call: str, edge_index: Tensor, nodes: Layout, mesh: CartMesh) -> None:
    """Raise unless a tensor can be edges on the mesh. Not collective."""
    require(call, "edge_index", edge_index, Tensor, "give the numbers of the edges' nodes as a tensor")
    if isinstance(edge_index, ShardTensor) and edge_index.mesh is not mesh:
        raise two_meshes(mesh, edge_index.mesh)
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise UnsupportedDtypeError(
            f"{call}: numbers of nodes are integers",
            expected="torch.int64 or torch.int32",
            got=edge_index.dtype,
            fix="edge_index.long()",
        )
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or not nodes.shape:
        raise LayoutError(
            f"{call}: edges of another shape",
            expected="edges of shape (2, edges), sources and targets, and a row for each node",
            got=f"edges of shape {tuple(edge_index.shape)}, {nodes.shape or 'no'} rows",
            fix="transpose edges of shape (edges, 2): edge_index.T",
        )


def rows_layout(held: Layout) -> Layout:
    """Return the layout of one number for each row of a tensor. Not collective."""
    over = held.shard_dims.get(0, ())
    placements = [Shard(0) if m in over else Replicate() for m in range(len(held.mesh_shape))]
    return layout_of(held.mesh_shape, placements, held.shape[:1], held.sizes[:1])


def _edges_layout(edges: Layout, over: tuple[int, ...], alike: bool) -> Layout:
    placements = [
        Shard(1) if m in over or (p == Shard(1) and not alike) else Replicate() for m, p in enumerate(edges.placements)
    ]
    found = layout_of(edges.mesh_shape, placements, edges.shape)
    same = found.shard_dims.get(1) == edges.shard_dims.get(1)
    return edges if same and found.placements == edges.placements else found


class GraphHalo:
    """Where the ends of this rank's edges are; made by `halo`.

    Parameters
    ----------
    edge_index, nodes
        As of `halo`.

    Attributes
    ----------
    edge_index : Tensor
        The ends of this rank's edges, shape (2, edges of this rank): numbers of rows of what the plan's call returns.
    own : int
        How many of these rows are this rank's own; they come first.
    ghosts : Tensor
        Global numbers of the others, ascending.
    edges : Layout
        Of a tensor with one number per edge: how edges lie on the mesh.
    """

    def __init__(self, edge_index: Tensor, nodes: ShardTensor) -> None:
        self._mesh = mesh = nodes.mesh
        self._nodes = rows_layout(nodes.sharding)
        self._over = self._nodes.sharded_mesh_dims
        ends, held, number = ends_of("graph.halo", edge_index, self._nodes, mesh)
        edge_dims = held.shard_dims.get(1, ())
        self.edges = layout_of(
            mesh.shape,
            [Shard(0) if m in edge_dims else Replicate() for m in range(mesh.ndim)],
            (held.shape[1],),
            (held.sizes[1],),
        )
        # nodes that every rank has are used by edges that only some have
        self._used = tuple(m for m in edge_dims if m not in self._over)
        lo, hi = self._nodes.interval(0, mesh.coords)
        self.own = hi - lo
        ghosts = _outside(ends, lo, hi)
        targets = _outside(ends[1], lo, hi)
        self._rows = Rows(mesh, self._nodes, 0, ghosts, "graph.halo", ("graph.halo", number))
        # what is summed goes home without the rows of nodes that are sources alone
        self._home = Rows(mesh, self._nodes, 0, targets, "graph.halo sum", ("graph.halo sum", number))
        self.ghosts = torch.from_numpy(ghosts).to(mesh.device)
        self.edge_index = torch.from_numpy(_local(ends, lo, hi, ghosts)).to(mesh.device)
        self._without: Tensor | None = None
        self._at = torch.from_numpy(_local(ends[1], lo, hi, targets)).to(mesh.device)

    def __repr__(self) -> str:
        return f"GraphHalo({self.edges.shape[0]} edges, {self._nodes.shape[0]} nodes, mesh={self._mesh})"

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's rows of ``x``, and after them those of `ghosts`: a plain tensor, differentiable.

        Collective over the ranks that share rows.

        Parameters
        ----------
        x
            A tensor with a row per node along dim 0; other dims may be sharded, over other mesh dims.

        Raises
        ------
        LayoutError
            Another number of nodes.
        MeshError
            Another mesh.

        Notes
        -----
        Adjoint: cotangents of rows that came are added to those of their owners. What a rank computes of its rows is
        its own: weights that it uses there have only its part of their gradients. Weights that are used with
        ShardTensors, as `ends` gives them, have the whole.
        """
        return self._all_rows(self._placed("the nodes' rows", x, self._nodes))

    def ends(self, x: Tensor) -> tuple[ShardTensor, ShardTensor]:
        """Return the rows of ``x`` at the source, and at the target, of every edge: two tensors, sharded as the edges.

        Collective over the ranks that share rows. Parameters and errors as of the call.
        """
        x = self._placed("the nodes' rows", x, self._nodes)
        rows = self._all_rows(x)
        layout = _with_rows(x.sharding, self.edges)
        source, target = (wrap(rows.index_select(0, at), layout, self._mesh) for at in self.edge_index)
        return source, target

    def sum(self, messages: Tensor) -> ShardTensor:
        """Return for every node the sum of the messages of edges whose target it is: sharded as the nodes.

        Collective over the mesh. Sums of half types are accumulated in float32.

        Parameters
        ----------
        messages
            A row per edge along dim 0: a ShardTensor of all edges, or a plain tensor of this rank's.

        Raises
        ------
        LayoutError
            Another number of edges.
        MeshError
            Another mesh.
        DesyncError
            Plain tensors of other rows, or another dtype, than other ranks'.

        Notes
        -----
        Adjoint: the cotangent of a node comes to the edges whose target it is.
        """
        if not isinstance(messages, ShardTensor):
            messages = self._local_messages(messages)
        x = self._placed("messages", messages, self.edges)
        rows, mesh = x.block, self._mesh
        dtype = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
        sums = rows.new_zeros((self.own + self._home.count, *rows.shape[1:]), dtype=dtype)
        sums = sums.index_add(0, self._at, rows.to(dtype))
        found = self._home.add(sums[self.own :], sums[: self.own]).to(rows.dtype)
        layout = _with_rows(x.sharding, self._nodes)
        return wrap(sum_partial(found, mesh, self._used), layout, mesh)

    def max(self, messages: Tensor) -> ShardTensor:
        """Return for every node the largest of the messages of edges whose target it is, zero where there is none.

        Collective over the mesh. Parameters and errors as of `sum`; `UnsupportedDtypeError` of complex numbers.

        Notes
        -----
        Adjoint: the cotangent of a node comes to the messages that are the largest, in equal shares. With it and `sum`
        a softmax over the edges of each target is ``e = (m - graph.ends(graph.max(m))[1]).exp()`` and then
        ``e / graph.ends(graph.sum(e))[1]``.
        """
        if not isinstance(messages, ShardTensor):
            messages = self._local_messages(messages)
        x = self._placed("messages", messages, self.edges)
        if x.dtype == torch.bool or x.is_complex():
            raise UnsupportedDtypeError(
                "graph.halo: messages without an order",
                expected="real numbers",
                got=x.dtype,
                fix="take the largest of what can be compared: messages.abs(), messages.long()",
            )
        mesh, wanted = self._mesh, differentiated(x.block)
        share: Tensor  # of each message in the cotangent of its target

        def find(rows: Tensor) -> Tensor:
            nonlocal share
            most = self._largest(rows)
            if wanted:
                is_largest = (rows == self._at_targets(most)).to(rows.dtype)
                equals = self.sum(wrap(is_largest, x.sharding, mesh)).block
                share = is_largest / self._at_targets(equals).clamp(min=1)
            return most

        def spread(g: Tensor) -> Tensor:
            return self._at_targets(g) * share

        def collect(rows: Tensor) -> Tensor:
            return self.sum(wrap(rows * share, x.sharding, mesh)).block

        most = apply(Chosen(find, spread, collect), x.block)
        return wrap(most, _with_rows(x.sharding, self._nodes), mesh)

    def _largest(self, rows: Tensor) -> Tensor:
        """Return for this rank's nodes the largest of the rows of edges whose target they are. Collective."""
        least = -float("inf") if rows.is_floating_point() else torch.iinfo(rows.dtype).min
        most = rows.new_full((self.own + self._home.count, *rows.shape[1:]), least)
        most = _raised(most, self._at, rows)
        most = _raised(most[: self.own], self._home.give, self._home.back(most[self.own :]))
        if self._used:
            most = blocking.all_reduce(most, self._mesh.group(self._used), "max")
        if self._without is None:
            ones = torch.ones(self.edge_index.shape[1], dtype=torch.int64, device=rows.device)
            self._without = self.sum(wrap(ones, self.edges, self._mesh)).block == 0
        most[self._without] = 0
        return most

    def _at_targets(self, own: Tensor) -> Tensor:
        """Return this rank's rows at the targets of its edges. Collective over the ranks that share rows."""
        return torch.cat([own, self._home.fetch(own)]).index_select(0, self._at)

    def _all_rows(self, x: ShardTensor) -> Tensor:
        block = use(x.block, self._mesh, self._used)
        return torch.cat([block, self._rows.fetch(block)])

    def _placed(self, what: str, x: Tensor, rows: Layout) -> ShardTensor:
        """Return ``x`` with its rows where the plan has them. Collective where they lie elsewhere."""
        mesh, n = self._mesh, rows.shape[0]
        require("graph.halo", what, x, Tensor, "give a tensor")
        if isinstance(x, ShardTensor) and x.mesh is not mesh:
            raise two_meshes(mesh, x.mesh)
        if not x.ndim or x.shape[0] != n:
            raise LayoutError(
                f"graph.halo: {what} do not fit the plan",
                expected=f"{n} rows along dim 0",
                got=f"a tensor of shape {tuple(x.shape)}",
                fix="plan another graph with mpishard.graph.halo, or give a row for each",
            )
        x = on_mesh(x, mesh)
        held = x.sharding
        placements: list[Placement] = list(self._columns(held))
        for m in rows.sharded_mesh_dims:
            placements[m] = Shard(0)
        return moved(x, layout_of(mesh.shape, placements, held.shape, [rows.sizes[0], *held.sizes[1:]]))

    def _columns(self, held: Layout) -> list[Placement]:
        """Return placements of what is no row, over mesh dims that neither nodes nor edges lie on."""
        taken = {*self._over, *self.edges.sharded_mesh_dims}
        return [
            p
            if m not in taken and type(p) is Shard and p.dim and not taken & set(held.shard_dims[p.dim])
            else Replicate()
            for m, p in enumerate(held.placements)
        ]

    def _local_messages(self, messages: Tensor) -> ShardTensor:
        mesh = self._mesh
        n = self.edge_index.shape[1]
        fits = isinstance(messages, Tensor) and messages.ndim > 0 and messages.shape[0] == n
        error = None if fits else LayoutError(
            "graph.halo: messages do not fit this rank's edges",
            expected=f"{n} rows along dim 0, one for each column of edge_index of the plan",
            got=tuple(getattr(messages, "shape", ())) or type(messages).__name__,
            fix="give a row for each of this rank's edges, or a ShardTensor of all",
        )  # fmt: skip
        rest = tuple(messages.shape[1:]) if fits else ()
        told = f"graph.halo: messages {rest}, {getattr(messages, 'dtype', None)}, {fits and differentiated(messages)}"
        guard.agree(mesh.all_ranks.comm, error, told)
        layout = layout_of(
            mesh.shape, self.edges.placements, (*self.edges.shape, *rest), [self.edges.sizes[0], *[None] * len(rest)]
        )
        return wrap(messages, layout, mesh)


def _raised(x: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    """Return ``x`` with its rows ``at`` raised to ``rows``."""
    return x.scatter_reduce(0, at.view(-1, *(1,) * (rows.ndim - 1)).expand(rows.shape), rows, "amax")


def _with_rows(held: Layout, rows: Layout) -> Layout:
    """Return the layout of other rows with the columns of a tensor."""
    placements: list[Placement] = [
        Shard(0) if type(q) is Shard else Replicate() if p == Shard(0) else p
        for p, q in zip(held.placements, rows.placements)
    ]
    return layout_of(held.mesh_shape, placements, (*rows.shape, *held.shape[1:]), [rows.sizes[0], *held.sizes[1:]])


def _out_of_range(call: str, ends: np.ndarray[Any, Any], n: int, first: int) -> MpishardError | None:
    bad = np.argwhere((ends < 0) | (ends >= n))
    if not len(bad):
        return None
    row, edge = bad[0]
    return LayoutError(
        f"{call}: numbers of nodes out of range",
        expected=f"numbers from 0 to {n - 1}" if n else "no edges, as there are no nodes",
        got=f"{ends[row, edge]} as the {('source', 'target')[row]} of edge {first + edge}",
        fix="number the nodes by their rows, from 0",
    )


def _outside(numbers: np.ndarray[Any, Any], lo: int, hi: int) -> np.ndarray[Any, Any]:
    return np.unique(numbers[(numbers < lo) | (numbers >= hi)])


def _local(numbers: np.ndarray[Any, Any], lo: int, hi: int, ghosts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return numbers of rows as places among own rows, from ``lo`` to ``hi``, and ghosts after them."""
    own = (numbers >= lo) & (numbers < hi)
    return np.where(own, numbers - lo, hi - lo + np.searchsorted(ghosts, numbers))
