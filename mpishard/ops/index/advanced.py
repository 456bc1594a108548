"""Tensors as indices: points picked from whole and sharded dims.

A plain index is the same on every rank, so each knows who owns which point. Points of sharded dims travel to a
balanced cut of the index's first dim, in one exchange. Of an index that is sharded over the
same mesh dims ranks ask the owners for the points that their part names.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.compiled import linear_by_values
from mpishard.autograd.linear import Step, apply, pair
from mpishard.autograd.redistribute import cells_step
from mpishard.autograd.rows import Rows
from mpishard.autograd.use import use
from mpishard.comm.memory.buffer import outside
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError
from mpishard.layout import Layout, Placement, Replicate, Shard, holders, layout_of, spans_of
from mpishard.layout.remembered import remembered
from mpishard.ops.index.added import put_sums
from mpishard.ops.index.basic import indexed, one_ellipsis
from mpishard.ops.index.masked import picked_where, require_extent
from mpishard.ops.rule.agreement import agreed, blank, checked, in_range
from mpishard.ops.rule.dim import normal_dim, settled
from mpishard.ops.rule.reduction import HALVES
from mpishard.tensor.operand import beside, broadcast_of, fitted, mesh_of, on_mesh, replicated_layout, resolved
from mpishard.tensor.registry import implements, tensors_in
from mpishard.tensor.shard_tensor import ShardTensor, wrap

_ALL = (None, None, None)


class Points(NamedTuple):
    """An index without its basic part.

    Attributes
    ----------
    dims
        The dims that tensors index, ascending.
    indices
        Integer tensors (plain or ShardTensor), one per dim.
    at
        Where the dims of the index lie in the result.
    """

    dims: tuple[int, ...]
    indices: tuple[Any, ...]
    at: int


def split_index(x: ShardTensor, index: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the basic part of ``index`` (tensors replaced by full slices), and per dim of its result the tensor.

    A mask stands once per dim that it covers, as (mask, k).
    """
    items = [_as_tensor(i, x) for i in (index if type(index) is tuple else (index,))]
    consumed = 0
    for item in items:
        if isinstance(item, Tensor) and _is_mask(item):
            consumed += item.ndim
        elif item is not None and item is not Ellipsis:
            consumed += 1
    if (at := next((i for i, item in enumerate(items) if item is Ellipsis), None)) is not None:
        items = [*items[: at + 1], *one_ellipsis(items[at + 1 :], x.ndim > consumed)]
    basic: list[Any] = []
    per_dim: list[Any] = []
    for item in items:
        n, entry = 1, None
        if isinstance(item, Tensor):
            if item.ndim == 0 and _is_mask(item):  # a dim of one cell, or of none, as where torch has it
                basic.append(None)
                per_dim.append(torch.zeros(int(bool(item)), dtype=torch.int64, device=x.block.device))
                continue
            if item.ndim == 0:
                _require_integers(item)
                basic.append(int(item))
                continue
            n, entry = (item.ndim, None) if _is_mask(item) else (1, item)
        elif item is Ellipsis:
            n = x.ndim - consumed
        elif item is None or isinstance(item, slice):
            basic.append(item if item is None else (item.start, item.stop, item.step))
            per_dim.append(None)
            continue
        else:
            basic.append(operator.index(item))
            continue
        basic += [_ALL] * n
        per_dim += [(item, k) for k in range(n)] if isinstance(item, Tensor) and _is_mask(item) else [entry] * n
    return tuple(basic), per_dim


def lone_mask(per_dim: Sequence[Any]) -> int | None:
    """Return the first dim that a mask covers which is the only tensor of an index, or None. Not collective."""
    given = [d for d, item in enumerate(per_dim) if item is not None]
    first = per_dim[given[0]] if given else None
    if not isinstance(first, tuple) or len(given) != first[0].ndim:
        return None
    return given[0] if all(isinstance(per_dim[d], tuple) and per_dim[d][0] is first[0] for d in given) else None


def _is_mask(x: Tensor) -> bool:
    return x.dtype in (torch.bool, torch.uint8)


def _require_integers(index: Tensor) -> None:
    # of a tensor of one number torch takes every whole one
    taken = (torch.int64, torch.int32) if index.ndim else (torch.int64, torch.int32, torch.int16, torch.int8)
    if index.dtype not in taken:
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")


def _as_tensor(item: Any, x: ShardTensor) -> Any:
    """Return lists, arrays and booleans as tensors, all on the GPU of the cells of ``x``; everything else as it is."""
    if isinstance(item, np.bool_):
        raise IndexError(
            "only integers, slices, ellipsis, None, tensors and sequences are valid indices, not numpy.bool"
        )
    if isinstance(item, (list, tuple, range, np.ndarray, bool)):
        given = list(item) if isinstance(item, (list, tuple, range)) else item
        item = torch.as_tensor(given, device="cpu")
        if item.ndim and (item.is_floating_point() or item.is_complex()):
            # torch refuses such a tensor, and cuts the numbers of a sequence to whole ones
            item = torch.tensor(given, dtype=torch.int64, device="cpu")
    if isinstance(item, Tensor) and item.ndim and not isinstance(item, ShardTensor):
        item = beside(item, x.block)
    return item


def points_of(layout: Layout, per_dim: Sequence[Any]) -> Points:
    """Return the integer form of the tensors of an index; masks become the indices of their true cells.

    Collective where a mask is sharded: it is gathered, once.
    """
    dims, indices = [], []
    found: dict[int, tuple[Tensor, ...]] = {}
    for d, item in enumerate(per_dim):
        if item is None:
            continue
        if isinstance(item, tuple):
            mask, k = item
            require_extent(mask, k, layout, d)
            if id(mask) not in found:
                # beside other indices its cells must be known everywhere
                found[id(mask)] = everywhere(mask).nonzero(as_tuple=True)
            item = found[id(mask)][k]
        else:
            _require_integers(item)
            item = item.block if isinstance(item, ShardTensor) and item.sharding.is_replicated else item
        dims.append(d)
        indices.append(item)
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    return Points(tuple(dims), tuple(indices), dims[0] if adjacent else 0)


def result_of(layout: Layout, points: Points, index: Layout, dims: Sequence[int] = ()) -> Layout:
    """Return the layout of a result: the remaining dims of ``layout``, those of ``index`` in their place."""
    return _result_of(layout, points.dims, points.at, index, tuple(dims))


@remembered
def _result_of(layout: Layout, picked_dims: tuple[int, ...], at: int, index: Layout, dims: tuple[int, ...]) -> Layout:
    rest = [d for d in range(layout.ndim) if d not in picked_dims]
    order = [*(("own", d) for d in rest[:at]), *(("index", d) for d in range(index.ndim)),
             *(("own", d) for d in rest[at:])]  # fmt: skip
    shape = [layout.shape[d] if kind == "own" else index.shape[d] for kind, d in order]
    sizes = [layout.sizes[d] if kind == "own" else index.sizes[d] for kind, d in order]
    placements: list[Placement] = []
    for m, (p, q) in enumerate(zip(layout.placements, index.placements)):
        own = type(p) is Shard and p.dim not in picked_dims
        if own and type(q) is Shard and m not in dims:
            raise LayoutError(
                "indexing: tensor and index are sharded over one mesh dim",
                expected=f"mesh dim {m} to shard one of them",
                got=[list(layout.placements), list(index.placements)],
                fix="redistribute one of them",
            )
        if type(q) is Shard:
            placements.append(Shard(order.index(("index", q.dim))))
        else:
            placements.append(Shard(order.index(("own", p.dim))) if own else Replicate())  # type: ignore[union-attr]
    return layout_of(layout.mesh_shape, placements, shape, sizes)


def sole(index: Any) -> Any:
    """Return what a tuple of one holds, anything else as it is. Not collective."""
    return index[0] if type(index) is tuple and len(index) == 1 else index


def is_boolean(index: Any) -> bool:
    """Tell whether an index is one boolean, which picks all or nothing along a new dim."""
    return isinstance(index, bool) or (isinstance(index, Tensor) and not index.ndim and _is_mask(index))


def picked(x: Any, index: Any) -> ShardTensor:
    """Return ``x[index]`` with tensors in the index. Collective where they index a sharded dim."""
    if is_boolean(alone := sole(index)):
        return x[None][: int(bool(alone))].clone()  # type: ignore[no-any-return]
    if not isinstance(x, ShardTensor):
        x = on_mesh(x, mesh_of(tensors_in([index])))
    x = settled(x)
    basic, per_dim = split_index(x, index)
    y = indexed(x, basic)
    if (lead := lone_mask(per_dim)) is not None:
        return picked_where(y, per_dim[lead][0], lead)
    return _pick(y, points_of(y.sharding, per_dim))


def everywhere(index: Any) -> Tensor:
    """Return an index that every rank has whole. Collective where it is sharded."""
    return index.full_tensor() if isinstance(index, ShardTensor) else index


def _pick(x: ShardTensor, points: Points) -> ShardTensor:
    layout, mesh = x.sharding, x.mesh
    sharded = [d for d in points.dims if len(layout.sizes[d] or ()) > 1]
    if any(isinstance(i, ShardTensor) for i in points.indices):
        mesh_of((x, *points.indices))  # one, or it raises: blocks of two would be blocks of other rows
        _, own = broadcast_of(list(points.indices))
        if not sharded and not set(own.sharded_mesh_dims) & set(layout.sharded_mesh_dims):
            indices = [fitted(i, mesh, own) for i in points.indices]
            local, out = use(x.block, mesh, own.sharded_mesh_dims), result_of(layout, points, own)
            return wrap(_of_whole_dims(local, points.dims, indices, mesh, (out,)), out, mesh)
    asked = _asked(x, points, sharded)
    if asked is not None:
        return asked
    # who owns which point, every rank must know
    indices = list(map(everywhere, points.indices))
    if len(indices) > 1:
        indices = list(torch.broadcast_tensors(*indices))
    if not sharded:
        out = result_of(layout, points, replicated_layout(mesh, indices[0].shape))
        return wrap(_of_whole_dims(x.block, points.dims, indices, mesh, with_empty_blocks(layout)), out, mesh)
    return _fetch(x, points, indices)


def _of_whole_dims(
    block: Tensor, dims: Sequence[int], indices: Sequence[Tensor], mesh: CartMesh, layouts: Sequence[Layout]
) -> Tensor:
    """Index whole dims of a block. Collective over the mesh dims that shard one of the layouts."""
    shape, ndim = block.shape, block.ndim

    def check(*indices: Tensor) -> None:
        if not all(in_range(i, -shape[d], shape[d]) for d, i in zip(dims, indices)):
            torch.ops.aten.index(blank(shape, indices[0]), at_dims(ndim, dims, indices))

    def pick(*indices: Tensor) -> Tensor:
        items = at_dims(ndim, dims, indices)
        if block.dtype not in HALVES:
            return torch.ops.aten.index(block, items)  # type: ignore[no-any-return]
        # of one cell many gradients may be added up
        return apply(
            pair(lambda x: torch.ops.aten.index(x, items), lambda g: put_sums(g.new_zeros(shape), items, g)), block
        )

    return agreed(pick, mesh, layouts, *indices, check=check)


def with_empty_blocks(layout: Layout) -> tuple[Layout, ...]:
    """Return a layout that has blocks without cells, where torch checks no index; else nothing. Not collective."""
    return (layout,) if any(cut is not None and 0 in cut for cut in layout.sizes) else ()


def _asked(x: ShardTensor, points: Points, sharded: list[int]) -> ShardTensor | None:
    """Pick rows along a sharded dim by an index that is cut over the same mesh dims, and stays so; else None.

    Collective over them: ranks ask the rows' owners, and no rank has the whole index.
    """
    layout, mesh, (d, *more) = x.sharding, x.mesh, points.dims
    index = points.indices[0]
    if more or sharded != [d] or not isinstance(index, ShardTensor) or index.ndim != 1:
        return None
    index = resolved(index)
    if index.sharding.shard_dims.get(0) != layout.shard_dims[d]:
        return None
    n, kind, out = layout.shape[d], index.sharding, result_of(layout, points, index.sharding, layout.shard_dims[d])

    def rows_of(index: Tensor) -> Step:
        numbers = outside(Tensor.numpy, index.cpu()).astype(np.int64)

        def counted() -> np.ndarray[Any, Any]:
            if numbers.size and not -n <= numbers.min() <= numbers.max() < n:
                raise IndexError(f"index out of range for dimension {d} with size {n}")
            return np.where(numbers < 0, numbers + n, numbers)

        wanted, place = np.unique(agreed(counted, mesh, (layout,)), return_inverse=True)
        rows, at = Rows(mesh, layout, d, wanted, "index", (layout, d, kind)), torch.from_numpy(place).to(index.device)

        def back(g: Tensor) -> Tensor:
            came = g.new_zeros(*g.shape[:d], rows.count, *g.shape[d + 1 :]).index_add_(d, at, g)
            return rows.add(came, g.new_zeros(layout.local_shape(mesh.coords)))

        return pair(lambda block: rows.fetch(block).index_select(d, at), back)

    shape = out.local_shape(mesh.coords)
    return wrap(linear_by_values("index", rows_of, x.block, [index.block], shape), out, mesh)


def at_dims(ndim: int, dims: Sequence[int], indices: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the indices per dim, as torch.ops.aten has them. Not collective."""
    given = dict(zip(dims, indices))
    return [given.get(d) for d in range(ndim)]


class Owned(NamedTuple):
    """Who owns the points of a plain index, and which are this rank's.

    Attributes
    ----------
    ranks
        Of the mesh, per point; along other mesh dims at this rank's coordinates.
    mine
        Positions of this rank's points.
    local
        Their indices in this rank's block, one tensor per indexed dim.
    """

    ranks: np.ndarray
    mine: np.ndarray
    local: tuple[Tensor, ...]


def mesh_dims_of(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the mesh dims that shard some dims. Not collective."""
    return tuple(sorted(m for d in dims for m in layout.shard_dims.get(d, ())))


def owned_cells(layout: Layout, mesh: CartMesh, dims: Sequence[int], indices: Sequence[Tensor]) -> Owned:
    """Return the owners of the points of a plain index of some dims. Not collective."""
    flat = []
    for d, index in zip(dims, indices):
        n = layout.shape[d]
        cells = outside(Tensor.numpy, index.reshape(-1).cpu()).astype(np.int64)
        if cells.size and not -n <= cells.min() <= cells.max() < n:
            raise IndexError(f"index out of range for dimension {d} with size {n}")
        flat.append(np.where(cells < 0, cells + n, cells))
    ranks = holders(layout, dims, flat, mesh.coords)
    mine = np.flatnonzero(ranks == mesh.rank)
    local = tuple(
        torch.from_numpy(cells[mine] - layout.interval(d, mesh.coords)[0]).to(indices[0].device)
        for d, cells in zip(dims, flat)
    )
    return Owned(ranks, mine, local)


def _fetch(x: ShardTensor, points: Points, indices: Sequence[Tensor]) -> ShardTensor:
    layout, mesh, at = x.sharding, x.mesh, points.at
    mesh_dims, shape = mesh_dims_of(layout, points.dims), tuple(indices[0].shape)
    placements = [Shard(0) if m in mesh_dims else Replicate() for m in range(mesh.ndim)]
    index = layout_of(mesh.shape, placements, shape)
    out = result_of(layout, points, index, mesh_dims)
    row = math.prod(shape[1:])
    lo, hi = (i * row for i in index.interval(0, mesh.coords))

    def travel_of(*indices: Tensor) -> Step:
        owned = owned_cells(layout, mesh, points.dims, indices)
        arriving = owned.ranks[lo:hi]
        order = np.argsort(arriving, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        come, go = (torch.from_numpy(i).to(indices[0].device) for i in (place, order))
        travel = cells_step(
            mesh,
            "index",
            at,
            spans_of(holders(index, (0,), (owned.mine // max(row, 1),), mesh.coords)),
            spans_of(arriving[order]),
            (layout, points.dims, index),
        )
        items = at_dims(layout.ndim, points.dims, owned.local)

        def fetch(block: Tensor) -> Tensor:
            # one dim for all points, where the result has those of the index
            return (
                travel(torch.ops.aten.index(block, items)).index_select(at, come).reshape(out.local_shape(mesh.coords))
            )

        def back(g: Tensor) -> Tensor:
            g = g.reshape(*g.shape[:at], hi - lo, *g.shape[at + len(shape) :]).index_select(at, go)
            block = g.new_zeros(layout.local_shape(mesh.coords))
            return put_sums(block, items, travel.adjoint(g))

        return pair(fetch, back)

    local = linear_by_values("index", travel_of, x.block, indices, out.local_shape(mesh.coords))
    return wrap(local, out, mesh)


def along(name: str, x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """Return an index of ``dim`` whose numbers may not be negative. Collective where it is sharded."""
    if index.ndim > 1:
        raise IndexError(f"{name}(): Index is supposed to be a vector, but got dim: {index.ndim}")
    if index.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"{name}(): Expected dtype int32 or int64 for index, but got {index.dtype}")
    index = _not_negative(index, mesh_of((x, index)))
    return (*(slice(None),) * normal_dim(dim, x.ndim), index if index.ndim else index.reshape(1))


def require_long(name: str, index: Any) -> None:
    """Refuse the integers that torch refuses. Not collective."""
    if index.dtype != torch.int64:
        raise RuntimeError(f"{name}(): Expected a long tensor for index, but got {index.dtype}")


def _not_negative(index: Any, mesh: CartMesh) -> Any:
    def looked_at(index: Tensor) -> Tensor:
        if index.numel() and not index.is_meta and int(index.min()) < 0:
            raise IndexError("index out of range in self")
        return index

    if not isinstance(index, ShardTensor):
        return checked(looked_at, mesh, (), index)
    index = resolved(index)
    return wrap(checked(looked_at, mesh, (index.sharding,), index.block), index.sharding, mesh)


@implements(torch.index_select, torch.Tensor.index_select, sharded="moves")
def index_select(input: Any, dim: int, index: Any) -> ShardTensor:
    """Pick cells along a dim. Collective where it is sharded."""
    if not input.ndim:
        if index.numel() != 1:
            raise IndexError(f"index_select(): Index to scalar can have only 1 value, got {index.numel()} value(s)")
        # no view, though reshape makes one
        return index_select(input.reshape(1), dim, index).reshape(()).clone()  # type: ignore[no-any-return]
    return picked(input, along("index_select", input, dim, index))
