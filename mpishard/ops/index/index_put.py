"""Tensors as indices of cells that are written: every rank writes those of its block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.compiled import linear_by_values
from mpishard.autograd.linear import Step, pair
from mpishard.autograd.use import use
from mpishard.comm import traced
from mpishard.ops.index import added
from mpishard.ops.index.advanced import (
    along,
    at_dims,
    everywhere,
    is_boolean,
    lone_mask,
    mesh_dims_of,
    owned_cells,
    points_of,
    require_long,
    result_of,
    sole,
    split_index,
    with_empty_blocks,
)
from mpishard.ops.index.basic import fitted_shape, indexed, plan_index, write_at
from mpishard.ops.index.masked import put_where, require_extent
from mpishard.ops.rule.agreement import agreed
from mpishard.ops.rule.dim import normal_dim
from mpishard.ops.rule.write import into_plain, prepare_write, require_writable
from mpishard.tensor.operand import fitted, mesh_of, on_mesh, replicated_layout, resolved
from mpishard.tensor.registry import implements, spellings, tensors_in
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def put(x: ShardTensor, index: Any, value: Any, accumulate: bool = False) -> None:
    """Write ``x[index] = value`` (or add), with tensors in the index. Collective where the value must travel."""
    require_writable(x, "x[index] = value")
    if isinstance(value, (list, tuple, str)):
        raise TypeError(f"can't assign a {type(value).__name__} to a {x.block.type()}")
    if is_boolean(alone := sole(index)):
        if bool(alone):
            write_at(x, (Ellipsis,), value)
        return
    prepare_write(x)
    mesh = x.mesh
    basic, per_dim = split_index(x, index)
    if all(i is None for i in per_dim) and any(isinstance(i, int) for i in basic):
        _check_dtype(x, value, False)  # as of other tensors: these name one cell, as ints do
        write_at(x, basic, indexed(x, basic) + value if accumulate else value)
        return
    plan = plan_index(x.sharding, basic, mesh.coords)
    if plan.drop:  # its owner broadcasts the one cell of a sharded dim
        y: Any = indexed(x, basic).clone()
        _put_at(y, per_dim, value, accumulate)
        write_at(x, basic, y)
    else:
        _put_at(wrap(x.block[plan.local], plan.out, mesh), per_dim, value, accumulate)


def _put_at(y: ShardTensor, per_dim: Sequence[Any], value: Any, accumulate: bool) -> None:
    """Write at the tensors of an index. Collective where the value must travel."""
    mesh = y.mesh
    for d, item in enumerate(per_dim):
        if isinstance(item, tuple):
            require_extent(*item, y.sharding, d)  # where a mask selects, it would be broadcast
    lead = lone_mask(per_dim)
    if lead is not None:
        _put_where(y, per_dim[lead][0], lead, value, accumulate)
        return
    _check_dtype(y, value, False)
    layout, points = y.sharding, points_of(y.sharding, per_dim)
    # along an index of more dims values may broadcast: a row of them belongs to no row of the index
    each = accumulate and len(points.dims) == 1 and points.indices[0].ndim == 1
    if each and added.add(y, points.at, points.indices[0], value, _sums(points.at)):
        return
    indices: Sequence[Tensor] = torch.broadcast_tensors(*map(everywhere, points.indices))
    lead, shape, dims = points.at, indices[0].shape, points.dims
    sharded = any(len(layout.sizes[d] or ()) > 1 for d in dims)
    if isinstance(value, Tensor):
        out = result_of(layout, points, replicated_layout(mesh, shape), layout.sharded_mesh_dims)
        value = fitted_shape(resolved(value), out.shape)
        if sharded:
            value = value.expand(out.shape)
        value = fitted(value, mesh, out).to(y.dtype)
        if sharded:
            value = use(value, mesh, mesh_dims_of(layout, dims))
            value = value.reshape(*value.shape[:lead], math.prod(shape), *value.shape[lead + len(shape) :])
    else:
        value = torch.tensor(value, dtype=y.dtype, device=y.device)

    def cells_of(*indices: Tensor) -> tuple[list[Tensor | None], Tensor | None]:
        """Return the cells of this rank's block, and which points they are; None: all."""
        if not sharded:
            return at_dims(y.ndim, dims, indices), None
        owned = owned_cells(layout, mesh, dims, indices)
        return at_dims(y.ndim, dims, owned.local), torch.from_numpy(owned.mine).to(indices[0].device)

    if traced.recording is not None:
        _put_compiled(y, cells_of, indices, lead, value, accumulate)
        return
    items, mine = cells_of(*indices)
    if mine is not None and value.ndim:
        value = value.index_select(lead, mine)
    _written(y.block, items, value, accumulate, y)


def _put_where(y: ShardTensor, mask: Any, lead: int, value: Any, accumulate: bool) -> None:
    after = y.ndim - lead - mask.ndim
    one = not isinstance(value, Tensor) or value.numel() == 1
    if mask.dtype == torch.uint8 and one and not accumulate:
        raise RuntimeError("masked_fill_ only supports boolean masks, but got mask with dtype unsigned char")
    _check_dtype(y, value, one)
    if accumulate or (isinstance(value, Tensor) and value.ndim > after):
        put_where(y, mask, lead, value, accumulate)
        return
    mask = mask.bool().reshape(*mask.shape, *(1,) * after)
    y.copy_(torch.where(mask, value, y)) if isinstance(value, Tensor) else y.masked_fill_(mask, value)


def _sums(dim: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda zeros, cells, values: added.put_sums(zeros, [*[None] * dim, cells], values)


def _check_dtype(y: ShardTensor, value: Any, one: bool) -> None:
    """Refuse cells of another dtype, unless it is one for a mask, as torch does."""
    if isinstance(value, Tensor) and value.dtype != y.dtype and not one:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {y.dtype} for the destination and "
            f"{value.dtype} for the source."
        )


def _written(block: Tensor, items: list[Tensor | None], value: Tensor, accumulate: bool, y: ShardTensor) -> Tensor:
    """Write into a block of ``y``. Collective where one is empty: torch checks nothing there."""
    layouts = with_empty_blocks(y.sharding)

    def write() -> Tensor:
        if accumulate:
            return added.put_sums(block, items, value)
        return torch.ops.aten.index_put_(block, items, value, False)  # type: ignore[no-any-return]

    return agreed(write, y.mesh, layouts)


def _put_compiled(
    y: ShardTensor, cells_of: Callable[..., Any], indices: Sequence[Tensor], lead: int, value: Tensor, accumulate: bool
) -> None:
    """Write in a compiled program: how many points are this rank's, values say."""
    block, shape, recording = y.block.shape, value.shape, traced.recording
    assert recording is not None

    def op_of(*indices: Tensor) -> Step:
        items, mine = cells_of(*indices)

        def put(x: Tensor) -> Tensor:
            x = x if mine is None or not shape else x.index_select(lead, mine)
            return _written(x.new_zeros(block), items, x, accumulate, y)

        def back(g: Tensor) -> Tensor:
            g = torch.ops.aten.index(g, items)
            return g.sum_to_size(shape) if mine is None or not shape else g.new_zeros(shape).index_copy_(lead, mine, g)

        return pair(put, back)

    def put_true(*indices: Tensor) -> Tensor:
        cells = torch.zeros(block, dtype=torch.bool, device=indices[0].device)
        return _written(cells, cells_of(*indices)[0], cells.new_ones(()), False, y)

    new = linear_by_values("index_put", op_of, value, indices, block)
    if accumulate:
        y.block.add_(new)
    else:
        where = recording.call("index_put, where", put_true, indices, block, dtype=torch.bool, device=new.device)
        y.block.copy_(torch.where(where, new, y.block))


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
    # in the dtype, as torch takes it: of booleans whether it is 0
    scaled = source if alpha == 1 else source * torch.full((), alpha, dtype=source.dtype, device="cpu")
    put(cells, along("index_add_", cells, dim, index), scaled, accumulate=True)
    return self


@implements(torch.Tensor.index_copy_, sharded="moves")
@into_plain(torch.Tensor.index_copy_)
def index_copy_(self: ShardTensor, dim: int, index: Any, source: Any) -> ShardTensor:
    """Write cells along a dim, in place. Collective where the source must travel."""
    require_long("index_copy_", index)
    source = source if source.ndim or self.ndim != 1 else source.reshape(1)
    cells, source = _slices("index_copy_", self, dim, index, source)
    put(cells, along("index_copy_", cells, dim, index), source)
    return self


@implements(torch.Tensor.index_fill_, sharded="local")
@into_plain(torch.Tensor.index_fill_)
def index_fill_(self: ShardTensor, dim: int, index: Any, value: Any) -> ShardTensor:
    """Fill cells along a dim, in place. Not collective."""
    if isinstance(value, Tensor) and value.ndim:
        raise RuntimeError(
            f"index_fill_ only supports a 0-dimensional value tensor, but got tensor with {value.ndim} dimension(s)."
        )
    if (value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)) and not self.is_complex():
        raise RuntimeError("index_fill_(): Converting complex Scalar to non-complex type is not supported")
    if index.dtype != torch.int64:
        raise IndexError("index_fill_(): Expected dtype int64 for index.")
    d = normal_dim(dim, self.ndim)
    # a mask, because a cell that is named twice is filled once: the value's gradient counts it once
    mask = torch.zeros(self.shape[d] if self.ndim else 1, dtype=torch.bool, device=self.device)
    mask[everywhere(index).reshape(-1)] = True
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
