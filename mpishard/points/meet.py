"""Points come to the ranks whose queries may have them among their neighbours."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.argument import require
from mpishard.autograd.linear import differentiated
from mpishard.autograd.redistribute import cells_step
from mpishard.autograd.rows import Rows, spans_among, told_counts
from mpishard.autograd.use import use
from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.comm.mesh_argument import two_meshes
from mpishard.errors import LayoutError, MpishardError, UnsupportedDtypeError
from mpishard.layout import Layout, Replicate, Shard, layout_of, repeated
from mpishard.points.tiles import POINTS, QUERIES, Tiles, enough, gaps, generous, lengths, within_reach
from mpishard.tensor.operand import moved, on_mesh, replicated_layout
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Met(NamedTuple):
    """Queries of this rank, and the points that are near them.

    Attributes
    ----------
    mesh : CartMesh
    call : str
    given : Layout
        Of the queries as they came.
    queries, points : ShardTensor
        The queries are cut over the mesh dims that cut the points too.
    near, numbers : Tensor
        Positions of points, and their global numbers, ascending.
    tag : int
        A number that no other call has.
    """

    mesh: CartMesh
    call: str
    given: Layout
    queries: ShardTensor
    points: ShardTensor
    near: Tensor
    numbers: Tensor
    tag: int


def met(
    call: str,
    points: Tensor,
    queries: Tensor,
    k: int | None,
    radius: float,
    error: MpishardError | None,
    most: int | None = None,
) -> Met:
    """Bring together queries, and points within a radius or among the ``k`` nearest of one of them.

    Collective over the mesh; wrong arguments, and ``error``, rise on every rank. ``most`` is only compared.
    """
    known = [x for x in (points, queries) if isinstance(x, ShardTensor)]
    require(call, "points", known[0] if known else points, ShardTensor, "shard points or queries first")
    mesh = known[0].mesh
    every = mesh.all_ranks.comm
    try:
        _check(call, mesh, points, queries)
        if k is not None and k > points.shape[0]:
            raise LayoutError(
                f"{call}: fewer points than neighbours that are asked for",
                expected=f"at least k={k} points",
                got=points.shape[0],
                fix="ask for fewer neighbours",
            )
    except Exception as e:
        guard.agree(every, error or e)
        raise
    held, given = (
        _by_rows(x.sharding if isinstance(x, ShardTensor) else replicated_layout(mesh, x.shape), ())
        for x in (points, queries)
    )
    cut = _by_rows(given, held.sharded_mesh_dims)
    if any(isinstance(x, ShardTensor) and x.sharding != to for x, to in ((points, held), (queries, cut))):
        # where something travels by a plan that is there already, a rank with a wrong argument would be waited for
        guard.agree(every, error, f"{call} of {held} and {given}")
    p, q = (moved(on_mesh(x, mesh), to) for x, to in ((points, held), (queries, cut)))
    for name, x in (("points", p), ("queries", q)):
        bad = (~x.block.detach().isfinite().all(1)).nonzero()
        if len(bad) and error is None:
            row = int(bad[0, 0])
            error = LayoutError(
                f"{call}: {name} are not finite",
                expected="numbers",
                got=f"{x.block[row].tolist()} in row {x.sharding.interval(0, mesh.coords)[0] + row}",
                fix="leave out what has no position",
            )
    asked = f"k={k}, radius={radius}, max_points={most}, {[differentiated(x.block) for x in (p, q)]}"
    tag, _ = mesh.agree(every, error, f"{call} of {asked}, {p.sharding} of {p.dtype}, {given}")
    near, numbers = _near(Met(mesh, call, given, q, p, p.block, p.block, tag), k, radius)
    return Met(mesh, call, given, q, p, near, numbers, tag)


def _check(call: str, mesh: CartMesh, points: Tensor, queries: Tensor) -> None:
    for name, x in (("points", points), ("queries", queries)):
        require(call, name, x, Tensor, "give positions as a tensor")
        if isinstance(x, ShardTensor) and x.mesh is not mesh:
            raise two_meshes(mesh, x.mesh)
    if points.ndim != 2 or queries.ndim != 2 or points.shape[1] != queries.shape[1] or not points.shape[1]:
        raise LayoutError(
            f"{call}: positions of other shapes",
            expected="(points, dims) and (queries, dims)",
            got=f"{tuple(points.shape)} and {tuple(queries.shape)}",
            fix="give a row of coordinates for each",
        )
    if points.dtype != queries.dtype or points.dtype not in (torch.float32, torch.float64):
        raise UnsupportedDtypeError(
            f"{call}: positions of other dtypes",
            expected="both torch.float32, or both torch.float64",
            got=f"{points.dtype} and {queries.dtype}",
            fix="convert them first: points.float()",
        )


def _by_rows(held: Layout, over: tuple[int, ...]) -> Layout:
    """Return the layout of whole rows, cut as they are, and over some mesh dims too."""
    placements = [Shard(0) if p == Shard(0) or m in over else Replicate() for m, p in enumerate(held.placements)]
    found = layout_of(held.mesh_shape, placements, held.shape)
    if found.shard_dims.get(0) != held.shard_dims.get(0):
        return found
    return layout_of(held.mesh_shape, placements, held.shape, (held.sizes[0], None))


def _near(m: Met, k: int | None, radius: float) -> tuple[Tensor, Tensor]:
    """Return positions and numbers of all points that this rank's queries may need. Collective over their ranks."""
    mesh, layout, block = m.mesh, m.points.sharding, m.points.block.detach()
    lo, hi = layout.interval(0, mesh.coords)
    own, dims = torch.arange(lo, hi, device=block.device), layout.sharded_mesh_dims
    if not dims or mesh.group(dims).size == 1:
        return block, own
    group = mesh.group(dims)
    queries = m.queries.block.detach()
    mine = torch.stack([*_box(block), *_box(queries)])[None]
    boxes = blocking.all_gather(mine, group, 0, repeated(((1, group.size),)))
    held = torch.tensor(list(layout.sizes[0] or ()), device=block.device)
    bound = radius if k is None else _bound(block, queries, boxes, held, group.rank, k)
    bound = generous(bound, block.dtype, block.shape[1])
    told = torch.tensor([bound], dtype=torch.float64, device="cpu")
    bounds = blocking.all_gather(told, group, 0, repeated(((1, group.size),))).to(block.device)
    gap = gaps(boxes[group.rank, 0], boxes[group.rank, 1], boxes[:, 2], boxes[:, 3])
    # what is beyond all doubles may be a neighbour too, but a box of nothing asks for none
    meet = (gap <= bounds) & (boxes[:, 2] <= boxes[:, 3]).all(1)
    meet[group.rank] = False
    counts, rows, wide = torch.zeros(group.size, dtype=torch.int64, device="cpu"), [own[:0]], block.double()
    for peer in meet.nonzero().reshape(-1).tolist():
        wanted = (gaps(boxes[peer, 2], boxes[peer, 3], wide, wide) <= bounds[peer]).nonzero().reshape(-1)
        counts[peer] = len(wanted)
        rows.append(wanted)
    give = torch.cat(rows)
    come = told_counts(counts, group)
    go, arrive = (spans_among(mesh, dims, n) for n in (counts, come))
    step = cells_step(mesh, m.call, 0, go, arrive, (m.call, m.tag))
    before = int(come[: group.rank].sum())

    def joined(x: Tensor) -> Tensor:
        came = step(x[give])
        return torch.cat([came[:before], x, came[before:]])

    return joined(block), joined(own)


def _box(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the corners of the box around points, in float64."""
    if not len(x):
        away = torch.full(x.shape[1:], float("inf"), dtype=torch.float64, device=x.device)
        return away, -away
    return x.amin(0).double(), x.amax(0).double()


def _bound(block: Tensor, queries: Tensor, boxes: Tensor, held: Tensor, rank: int, k: int) -> float:
    """Return a distance within which all queries of this rank have ``k`` points."""
    if not len(queries):
        return 0.0
    some = held > 0
    far = enough(boxes[rank, 2], boxes[rank, 3], boxes[some, 0], boxes[some, 1], held[some], k)
    if len(block) < k:
        return far
    # what lies here too is mostly nearer
    tiles, by = Tiles(block, POINTS), Tiles(queries, QUERIES)
    each = (
        within_reach(queries[by.members(torch.tensor([i], device=queries.device))], block, tiles, low, high, k)
        for i, (low, high) in enumerate(zip(by.low, by.high))
    )
    return min(far, max(each))


def distances_to(m: Met, numbers: Tensor, of: Tensor) -> Tensor:
    """Return the distances of points from queries of this rank, differentiably.

    Collective over the ranks that share points, where a gradient is wanted.

    Parameters
    ----------
    m
        What `met` returned.
    numbers
        Global numbers of points.
    of
        Local numbers of the queries; it broadcasts against ``numbers``.
    """
    mesh, p = m.mesh, m.points
    wanted, at = numbers.unique(return_inverse=True)
    used = tuple(d for d in m.queries.sharding.sharded_mesh_dims if d not in p.sharding.sharded_mesh_dims)
    rows = Rows(mesh, p.sharding, 0, wanted.cpu().numpy(), m.call, (f"{m.call}, neighbours", m.tag))
    return lengths(m.queries.block[of] - rows.fetch(use(p.block, mesh, used))[at])


def as_queries(m: Met, local: Tensor) -> ShardTensor:
    """Return what this rank has a row of for each of its queries, laid out as the queries came. Collective."""
    rest = tuple(local.shape[1:])
    cut, given = (
        layout_of(m.mesh.shape, t.placements, (t.shape[0], *rest), [t.sizes[0], *[None] * len(rest)])
        for t in (m.queries.sharding, m.given)
    )
    return moved(wrap(local, cut, m.mesh), given)
