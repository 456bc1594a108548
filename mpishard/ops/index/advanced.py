"""Tensors as indices: points picked from, and written to, whole and sharded dims.

A plain index is the same on every rank, so each knows who owns which point. Points of sharded dims travel to a
balanced cut of the index's first dim, in one exchange; writes stay on the owners. Of an index that is sharded over the
same mesh dims ranks ask the owners for the points that their part names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.bucket import use
from mpishard.autograd.linear import apply
from mpishard.autograd.redistribute import cells_step
from mpishard.autograd.rows import Rows
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError, UnsupportedOperationError
from mpishard.layout import Layout, Placement, Replicate, Shard, holders, layout_of, spans_of
from mpishard.ops.index.basic import fitted_shape, indexed, plan_index, write_at
from mpishard.ops.index.masked import picked_where
from mpishard.ops.rule.agreement import agreed
from mpishard.ops.rule.dim import into_plain, normal_dim, prepare_write, require_writable, settled, viewed
from mpishard.tensor.operand import broadcast_of, fitted, mesh_of, on_mesh, replicated_layout, resolved
from mpishard.tensor.registry import implements, spellings, tensors_in
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


def _split(x: ShardTensor, index: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the basic part of ``index`` (tensors replaced by full slices), and per dim of its result the tensor.

    A mask stands once per dim that it covers, as (mask, k).
    """
    items = [_as_tensor(i) for i in (index if type(index) is tuple else (index,))]
    consumed = 0
    for item in items:
        if isinstance(item, Tensor) and _is_mask(item):
            consumed += item.ndim
        elif item is not None and item is not Ellipsis:
            consumed += 1
    basic: list[Any] = []
    per_dim: list[Any] = []
    for item in items:
        n, entry = 1, None
        if isinstance(item, Tensor):
            if item.ndim == 0:
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
            basic.append(int(item))
            continue
        basic += [_ALL] * n
        per_dim += [(item, k) for k in range(n)] if isinstance(item, Tensor) and _is_mask(item) else [entry] * n
    return tuple(basic), per_dim


def _is_mask(x: Tensor) -> bool:
    return x.dtype in (torch.bool, torch.uint8)


def _as_tensor(item: Any) -> Any:
    """Return lists, arrays and booleans as tensors, everything else as it is."""
    if isinstance(item, (list, tuple, range)):
        item = torch.as_tensor(list(item))
    elif isinstance(item, (np.ndarray, bool, np.bool_)):
        item = torch.as_tensor(item)
    if isinstance(item, Tensor) and item.ndim == 0 and _is_mask(item):
        raise UnsupportedOperationError(
            "indexing with a single boolean",
            expected="a mask with the shape of the leading dims",
            got=repr(item),
            fix="use an if statement, or torch.where",
        )
    return item.long() if isinstance(item, Tensor) and not item.numel() and item.is_floating_point() else item


def _points(layout: Layout, per_dim: Sequence[Any]) -> Points:
    """Return the integer form of the tensors of an index; masks become the indices of their true cells."""
    dims, indices = [], []
    found: dict[int, tuple[Tensor, ...]] = {}
    for d, item in enumerate(per_dim):
        if item is None:
            continue
        if isinstance(item, tuple):
            mask, k = item
            if isinstance(mask, ShardTensor):
                mask = mask.full_tensor()  # beside other indices: its cells must be known everywhere
            if mask.shape[k] != layout.shape[d]:
                raise IndexError(
                    f"The shape of the mask {list(mask.shape)} at index {k} does not match the shape of the indexed "
                    f"tensor {list(layout.shape)} at index {d}"
                )
            if id(mask) not in found:
                found[id(mask)] = mask.nonzero(as_tuple=True)
            item = found[id(mask)][k]
        elif item.is_floating_point() or item.is_complex():
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        elif isinstance(item, ShardTensor) and item.sharding.is_replicated:
            item = item.block
        dims.append(d)
        indices.append(item)
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    return Points(tuple(dims), tuple(indices), dims[0] if adjacent else 0)


def _result(layout: Layout, points: Points, index: Layout, dims: Sequence[int] = ()) -> Layout:
    """Return the layout of a result: the remaining dims of ``layout``, those of ``index`` in their place."""
    rest = [d for d in range(layout.ndim) if d not in points.dims]
    before = rest[: points.at]
    order = [*(("own", d) for d in before), *(("index", d) for d in range(index.ndim)),
             *(("own", d) for d in rest[points.at :])]  # fmt: skip
    shape = [layout.shape[d] if kind == "own" else index.shape[d] for kind, d in order]
    sizes = [layout.sizes[d] if kind == "own" else index.sizes[d] for kind, d in order]
    placements: list[Placement] = []
    for m, (p, q) in enumerate(zip(layout.placements, index.placements)):
        own = type(p) is Shard and p.dim not in points.dims
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


def _sole(index: Any) -> Any:
    return index[0] if type(index) is tuple and len(index) == 1 else index


def _is_boolean(index: Any) -> bool:
    """Tell whether an index is one boolean, which picks all or nothing along a new dim."""
    return isinstance(index, (bool, np.bool_)) or (isinstance(index, Tensor) and not index.ndim and _is_mask(index))


def picked(x: Any, index: Any) -> ShardTensor:
    """Return ``x[index]`` with tensors in the index. Collective where they index a sharded dim."""
    if _is_boolean(alone := _sole(index)):
        return x[None][: int(bool(alone))]  # type: ignore[no-any-return]
    if not isinstance(x, ShardTensor):
        x = on_mesh(x, mesh_of(tensors_in([index])))
    x = settled(x)
    if isinstance(alone, ShardTensor) and _is_mask(alone) and alone.ndim:
        return picked_where(x, alone)
    basic, per_dim = _split(x, index)

    y = indexed(x, basic)
    return _pick(y, _points(y.sharding, per_dim))


def _everywhere(index: Any) -> Tensor:
    return index.full_tensor() if isinstance(index, ShardTensor) else index


def _pick(x: ShardTensor, points: Points) -> ShardTensor:
    layout, mesh = x.sharding, x.mesh
    sharded = [d for d in points.dims if len(layout.sizes[d] or ()) > 1]
    if any(isinstance(i, ShardTensor) for i in points.indices):
        _, own = broadcast_of(list(points.indices))
        if not sharded and not set(own.sharded_mesh_dims) & set(layout.sharded_mesh_dims):
            indices = [fitted(i, mesh, own) for i in points.indices]
            local, out = use(x.block, mesh, own.sharded_mesh_dims), _result(layout, points, own)
            return wrap(agreed(lambda: local[_at(x.ndim, points.dims, indices)], mesh, (out,)), out, mesh)
    asked = _asked(x, points, sharded)
    if asked is not None:
        return asked
    # who owns which point, every rank must know
    indices = list(torch.broadcast_tensors(*map(_everywhere, points.indices)))
    if not sharded:
        out = _result(layout, points, replicated_layout(mesh, indices[0].shape))
        return wrap(_whole_dims(layout, mesh, lambda: x.block[_at(x.ndim, points.dims, indices)]), out, mesh)
    return _fetch(x, points, indices)


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
    n, numbers = layout.shape[d], index.block.cpu().numpy().astype(np.int64)

    def counted() -> np.ndarray[Any, Any]:
        if numbers.size and not -n <= numbers.min() <= numbers.max() < n:
            raise IndexError(f"index out of range for dimension {d} with size {n}")
        return np.where(numbers < 0, numbers + n, numbers)

    wanted, at = np.unique(agreed(counted, mesh, (layout,)), return_inverse=True)
    rows = Rows(mesh, layout, d, wanted, "index", (layout, d, index.sharding)).fetch(x.block)
    local = rows.index_select(d, torch.from_numpy(at).to(x.device))
    return wrap(local, _result(layout, points, index.sharding, layout.shard_dims[d]), mesh)


def _whole_dims(layout: Layout, mesh: CartMesh, call: Callable[[], Any]) -> Any:
    """Index whole dims by what every rank has. Collective where a block is empty: torch checks nothing there."""
    empty = any(cut is not None and 0 in cut for cut in layout.sizes)
    return agreed(call, mesh, (layout,)) if empty else call()


def _at(ndim: int, dims: Sequence[int], indices: Sequence[Tensor]) -> tuple[Any, ...]:
    items: list[Any] = [slice(None)] * ndim
    for d, i in zip(dims, indices):
        items[d] = i
    return tuple(items)


class Owned(NamedTuple):
    """Who owns the points of a plain index, and which are this rank's.

    Attributes
    ----------
    mesh_dims
        That shard the indexed dims.
    ranks
        Of the mesh, per point; along other mesh dims at this rank's coordinates.
    mine
        Positions of this rank's points.
    local
        Their indices in this rank's block, one tensor per indexed dim.
    """

    mesh_dims: tuple[int, ...]
    ranks: np.ndarray
    mine: np.ndarray
    local: tuple[Tensor, ...]


def _owned(x: ShardTensor, dims: Sequence[int], indices: Sequence[Tensor]) -> Owned:
    layout, mesh = x.sharding, x.mesh
    flat = []
    for d, index in zip(dims, indices):
        n = layout.shape[d]
        cells = index.reshape(-1).cpu().numpy().astype(np.int64)
        if cells.size and not -n <= cells.min() <= cells.max() < n:
            raise IndexError(f"index out of range for dimension {d} with size {n}")
        flat.append(np.where(cells < 0, cells + n, cells))
    ranks = holders(layout, dims, flat, mesh.coords)
    mine = np.flatnonzero(ranks == mesh.rank)
    local = tuple(
        torch.from_numpy(cells[mine] - layout.interval(d, mesh.coords)[0]).to(x.device) for d, cells in zip(dims, flat)
    )
    return Owned(tuple(sorted(m for d in dims for m in layout.shard_dims.get(d, ()))), ranks, mine, local)


def _fetch(x: ShardTensor, points: Points, indices: Sequence[Tensor]) -> ShardTensor:
    layout, mesh = x.sharding, x.mesh
    owned, shape = _owned(x, points.dims, indices), tuple(indices[0].shape)
    placements = [Shard(0) if m in owned.mesh_dims else Replicate() for m in range(mesh.ndim)]
    index = layout_of(mesh.shape, placements, shape)
    row = math.prod(shape[1:])
    lo, hi = (i * row for i in index.interval(0, mesh.coords))
    arriving = owned.ranks[lo:hi]
    order = np.argsort(arriving, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    travel = cells_step(
        mesh,
        "index",
        points.at,
        spans_of(holders(index, (0,), (owned.mine // max(row, 1),), mesh.coords)),
        spans_of(arriving[order]),
        (layout, points.dims, index),
    )
    # one dim for all points, where the result has those of the index
    came = apply(travel, x.block[_at(x.ndim, points.dims, owned.local)])
    local = came.index_select(points.at, torch.from_numpy(place).to(x.device))
    local = local.reshape(*local.shape[: points.at], *index.local_shape(mesh.coords), *local.shape[points.at + 1 :])
    return wrap(local, _result(layout, points, index, owned.mesh_dims), mesh)


# -- writes


def put(x: ShardTensor, index: Any, value: Any, accumulate: bool = False) -> None:
    """Write ``x[index] = value`` (or add), with tensors in the index. Collective where the value must travel."""
    require_writable(x, "x[index] = value")
    if _is_boolean(alone := _sole(index)):
        if bool(alone):
            write_at(x, (Ellipsis,), value)
        return
    prepare_write(x)
    mesh = x.mesh
    basic, per_dim = _split(x, index)
    plan = plan_index(x.sharding, basic, mesh.coords)
    if plan.drop:  # its owner broadcasts the one cell of a sharded dim
        y: Any = indexed(x, basic).clone()
        _put_at(y, per_dim, value, accumulate)
        write_at(x, basic, y)
    else:
        _put_at(viewed(x, x.block[plan.local], plan.out), per_dim, value, accumulate)


def _put_at(y: ShardTensor, per_dim: Sequence[Any], value: Any, accumulate: bool) -> None:
    """Write at the tensors of an index. Collective where the value must travel."""
    mesh = y.mesh
    masks = [d for d, item in enumerate(per_dim) if isinstance(item, tuple)]
    if masks and len({id(per_dim[d][0]) for d in masks}) == 1 and len(masks) == sum(i is not None for i in per_dim):
        mask, after = per_dim[masks[0]][0], y.ndim - 1 - masks[-1]
        one = not isinstance(value, Tensor) or value.numel() == 1
        if mask.dtype == torch.uint8 and one and not accumulate:
            raise RuntimeError("masked_fill_ only supports boolean masks, but got mask with dtype unsigned char")
        broadcasts = not isinstance(value, Tensor) or value.ndim <= after
        if broadcasts and not accumulate:
            mask = mask.bool().reshape(*mask.shape, *(1,) * after)
            y.copy_(torch.where(mask, value, y)) if isinstance(value, Tensor) else y.masked_fill_(mask, value)
            return
    points = _points(y.sharding, per_dim)
    indices: Sequence[Tensor] = torch.broadcast_tensors(*map(_everywhere, points.indices))
    shape = indices[0].shape
    sharded = any(len(y.sharding.sizes[d] or ()) > 1 for d in points.dims)
    owned = _owned(y, points.dims, indices) if sharded else None
    if isinstance(value, Tensor):
        out = _result(y.sharding, points, replicated_layout(mesh, shape), y.sharding.sharded_mesh_dims)
        value = fitted_shape(resolved(value), out.shape)
        if owned is not None:
            value = value.expand(out.shape)
        value = fitted(value, mesh, out).to(y.dtype)
        if owned is not None:
            value = use(value, mesh, owned.mesh_dims)
            end = points.at + len(shape)
            value = value.reshape(*value.shape[: points.at], math.prod(shape), *value.shape[end:])
            value = value.index_select(points.at, torch.from_numpy(owned.mine).to(y.device))
    else:
        value = torch.tensor(value, dtype=y.dtype, device=y.device)
    items: list[Tensor | None] = [None] * y.ndim
    for d, i in zip(points.dims, indices if owned is None else owned.local):
        items[d] = i
    _whole_dims(y.sharding, mesh, lambda: torch.ops.aten.index_put_(y.block, items, value, accumulate))


def _along(name: str, x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """Return an index of ``dim`` whose numbers may not be negative. Collective where it is sharded."""
    if index.ndim > 1:
        raise IndexError(f"{name}(): Index is supposed to be a vector, but got dim: {index.ndim}")
    if index.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"{name}(): Expected dtype int32 or int64 for index, but got {index.dtype}")
    if index.numel() and bool((index < 0).any()):
        raise IndexError("index out of range in self")
    return (*(slice(None),) * normal_dim(dim, x.ndim), index if index.ndim else index.reshape(1))


@implements(torch.index_select, torch.Tensor.index_select, sharded="moves")
def index_select(input: Any, dim: int, index: Any) -> ShardTensor:
    """Pick cells along a dim. Collective where it is sharded."""
    if not input.ndim:
        if index.numel() != 1:
            raise IndexError(f"index_select(): Index to scalar can have only 1 value, got {index.numel()} value(s)")
        return index_select(input.reshape(1), dim, index).reshape(())  # type: ignore[no-any-return]
    return picked(input, _along("index_select", input, dim, index))


def _slices(name: str, x: ShardTensor, dim: int, index: Any, source: Any) -> tuple[ShardTensor, Any]:
    """Return tensors with at least one dim, slices of the second for the first; or raise, where they do not fit."""
    shape = [index.numel() if d == normal_dim(dim, x.ndim) else n for d, n in enumerate(x.shape)]
    if list(source.shape) != shape and (x.ndim or source.numel() != index.numel() or index.numel() != 1):
        raise RuntimeError(
            f"{name}: source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {list(x.shape)} source.shape = {list(source.shape)}"
        )
    if source.dtype != x.dtype:
        raise RuntimeError(f"{name}: self and source expected to have the same dtype, got {x.dtype} and {source.dtype}")
    if x.ndim:
        return x, source
    prepare_write(x)
    return x.view(1), source.reshape(1)


@implements(torch.Tensor.index_add_, sharded="moves")
@into_plain(torch.Tensor.index_add_)
def index_add_(self: ShardTensor, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> ShardTensor:
    """Add to cells along a dim, in place. Collective where the source must travel."""
    cells, source = _slices("index_add_", self, dim, index, source)
    alpha = alpha if source.is_floating_point() or source.is_complex() else int(alpha)
    put(cells, _along("index_add_", cells, dim, index), source if alpha == 1 else source * alpha, accumulate=True)
    return self


@implements(torch.Tensor.index_copy_, sharded="moves")
@into_plain(torch.Tensor.index_copy_)
def index_copy_(self: ShardTensor, dim: int, index: Any, source: Any) -> ShardTensor:
    """Write cells along a dim, in place. Collective where the source must travel."""
    source = source if source.ndim or self.ndim != 1 else source.reshape(1)
    cells, source = _slices("index_copy_", self, dim, index, source)
    put(cells, _along("index_copy_", cells, dim, index), source)
    return self


@implements(torch.Tensor.index_fill_, sharded="local")
@into_plain(torch.Tensor.index_fill_)
def index_fill_(self: ShardTensor, dim: int, index: Any, value: Any) -> ShardTensor:
    """Fill cells along a dim, in place. Not collective."""
    if isinstance(value, Tensor) and value.ndim:
        raise RuntimeError(
            f"index_fill_ only supports a 0-dimensional value tensor, but got tensor with {value.ndim} dimension(s)."
        )
    if index.dtype != torch.int64:
        raise IndexError("index_fill_(): Expected dtype int64 for index.")
    d = normal_dim(dim, self.ndim)
    # a mask, because a cell that is named twice is filled once: the value's gradient counts it once
    mask = torch.zeros(self.shape[d] if self.ndim else 1, dtype=torch.bool, device=self.device)
    mask[_everywhere(index).reshape(-1)] = True
    self.masked_fill_(mask.reshape(-1, *(1,) * (self.ndim - 1 - d)) if self.ndim else mask[0], value)
    return self


@implements(torch.Tensor.index_put_, torch.index_put_, sharded="moves")
@into_plain(torch.Tensor.index_put_)
def index_put_(input: ShardTensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> ShardTensor:
    """Write at points, in place. Collective where the values must travel."""
    put(input, tuple(slice(None) if i is None else i for i in indices), values, accumulate)
    return input


def _out_of_place(in_place: Any) -> Any:
    def rule(input: Any, *args: Any, **kwargs: Any) -> ShardTensor:
        if not isinstance(input, ShardTensor):
            input = on_mesh(input, mesh_of(tensors_in([*args, *kwargs.values()])))
        return in_place(input.clone(), *args, **kwargs)  # type: ignore[no-any-return]

    return rule


for _name, _in_place in {
    "index_add": index_add_,
    "index_copy": index_copy_,
    "index_fill": index_fill_,
    "index_put": index_put_,
}.items():
    implements(*spellings(_name), sharded="moves")(_out_of_place(_in_place))
