"""Tensors with some cells written: scatter twins of views, take and put, masked and reducing scatters, diagonals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.layout import Layout
from mpishard.ops.index.advanced import picked, require_long
from mpishard.ops.index.getitem import setitem
from mpishard.ops.index.index_put import put
from mpishard.ops.index.masked import write_where
from mpishard.ops.rule.agreement import checked, in_range
from mpishard.ops.rule.dim import (
    gathered,
    normal_dim,
    plain,
    require_complex_derivative,
    require_dtype,
    resized,
    whole_along,
)
from mpishard.ops.rule.reduction import HALVES
from mpishard.ops.rule.write import into_plain, prepare_write, require_writable
from mpishard.tensor.operand import fitted, mesh_of, moved, replicated_layout, resolved
from mpishard.tensor.registry import implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _own(x: Any, *others: Any) -> ShardTensor:
    """Return a copy to write into; of a plain tensor, one that every rank holds whole."""
    if isinstance(x, ShardTensor):
        return resolved(x).clone()  # type: ignore[return-value]
    mesh = mesh_of(others)
    return wrap(x.clone(), replicated_layout(mesh, x.shape), mesh)


def _at(dim: int, item: Any) -> tuple[Any, ...]:
    return (*(slice(None),) * dim, item)


def _require_shape(name: str, src: Any, shape: tuple[int, ...]) -> None:
    if tuple(src.shape) != tuple(shape):
        raise RuntimeError(
            f"{name}: expected src to have a size equal to the slice of self. src size = {list(src.shape)}, "
            f"slice size = {list(shape)}"
        )


def _selected(x: Tensor) -> Tensor:
    return torch.select_scatter(x, x[0], 0, 0)


def _sliced(x: Tensor) -> Tensor:
    return torch.slice_scatter(x, x[:1], 0, 0, 1)


@implements(torch.select_scatter, torch.Tensor.select_scatter, sharded="moves")
def select_scatter(input: Any, src: Any, dim: int, index: int) -> ShardTensor:
    """Write one cell of a dim in a copy. Collective where the source is laid out differently."""
    require_complex_derivative(_selected, input, src)
    d = normal_dim(dim, input.ndim)
    _require_shape("select_scatter", src, (*input.shape[:d], *input.shape[d + 1 :]))
    y = _own(input, src)
    setitem(y, _at(d, int(index)), src)
    return y


@implements(torch.slice_scatter, torch.Tensor.slice_scatter, sharded="moves")
def slice_scatter(input: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> ShardTensor:
    """Write a slice of a dim in a copy. Collective where the source is laid out differently."""
    require_complex_derivative(_sliced, input, src)
    if input.ndim == 0:
        raise IndexError("slice() cannot be applied to a 0-dim tensor.")
    d = normal_dim(dim, input.ndim)
    n = len(range(*slice(start, end, step).indices(input.shape[d])))
    _require_shape("slice_scatter", src, (*input.shape[:d], n, *input.shape[d + 1 :]))
    y = _own(input, src)
    setitem(y, _at(d, slice(start, end, step)), src)
    return y


@implements(torch.diagonal_scatter, torch.Tensor.diagonal_scatter, sharded="moves")
def diagonal_scatter(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ShardTensor:
    """Write a diagonal in a copy. Collective where the source is laid out differently."""
    y = _own(input, src)
    diagonal = torch.diagonal(y, offset, dim1, dim2)
    _require_shape("diagonal_scatter", src, tuple(diagonal.shape))
    diagonal.copy_(src)
    return y


@implements(torch.Tensor.fill_diagonal_, sharded="local")
@into_plain(torch.Tensor.fill_diagonal_)
def fill_diagonal_(self: ShardTensor, fill_value: Any, wrap: bool = False) -> ShardTensor:
    """Fill the diagonal from the first cell, in place. Not collective."""
    require_writable(self, "fill_diagonal_")
    shape = self.sharding.shape
    if len(shape) < 2:
        raise RuntimeError("dimensions must larger than 1")
    if len(shape) > 2 and len(set(shape)) > 1:
        raise RuntimeError("all dimensions of input must be of equal length")
    prepare_write(self)
    cells = []
    for d, (lo, hi) in enumerate(self.sharding.box(self.mesh.coords)):
        cells.append(torch.arange(lo, hi, device=self.device).view(-1, *(1,) * (self.ndim - 1 - d)))
    if wrap and len(shape) == 2:
        mask = (cells[0] * shape[1] + cells[1]) % (shape[1] + 1) == 0
    else:
        mask = torch.ones((), dtype=torch.bool, device=self.device)
        for c in cells[1:]:
            mask = mask & (c == cells[0])
    self.block.masked_fill_(mask, fill_value)
    return self


def _masked(x: Tensor) -> Tensor:
    return x.masked_scatter(torch.ones(2, dtype=torch.bool, device=x.device), x)


# -- flat positions


def _first(x: Tensor) -> Tensor:
    return x.take(torch.zeros(1, dtype=torch.int64, device=x.device))


@implements(torch.take, torch.Tensor.take, sharded="moves")
def take(input: Any, index: Any) -> Any:
    """Pick cells of the flattened tensor. Collective where it is sharded; a sharded index needs it whole."""
    require_dtype(input, _first)
    require_long("take", index)
    flat = gathered(input) if isinstance(index, ShardTensor) else input
    if not index.ndim:
        return picked(flat.reshape(-1), index.reshape(1)).reshape(())
    return picked(flat.reshape(-1), index)


@implements(torch.Tensor.put_, sharded="gathers")
@into_plain(torch.Tensor.put_)
def put_(self: ShardTensor, index: Any, source: Any, accumulate: bool = False) -> ShardTensor:
    """Write cells of the flattened tensor, in place. Collective where index or source is sharded: it is gathered."""
    require_long("put_", index)
    index, source = plain(index), plain(source)
    if index.numel() != source.numel():
        raise RuntimeError(
            f"put_(): Expected source and index to have the same number of elements, but got source.numel() = "
            f"{source.numel()}, index.numel() = {index.numel()}"
        )
    n = self.numel()

    def check(index: Tensor) -> None:
        if not in_range(index, -n, n):
            raise IndexError(f"put_(): index out of range for a tensor of {n} elements")

    index = checked(check, self.mesh, (), index)
    flat = torch.where(index < 0, index + n, index).reshape(-1)
    if self.ndim:
        put(self, torch.unravel_index(flat, tuple(self.shape)), source.reshape(-1), accumulate)
    elif len(flat):
        require_writable(self, "put_")
        prepare_write(self)
        put(self.view(1), (flat,), source.reshape(-1), accumulate)
    return self


@implements(torch.Tensor.masked_scatter_, sharded="moves")
@into_plain(torch.Tensor.masked_scatter_)
def masked_scatter_(self: ShardTensor, mask: Any, source: Any) -> ShardTensor:
    """Write consecutive cells of ``source`` where a mask is true, in place.

    Collective where the tensor is sharded: a number from every rank, and cells whose order has them elsewhere.
    """
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    if source.dtype != self.dtype:
        raise RuntimeError(
            f"masked_scatter: expected self and source to have same dtypes but got {self.dtype} and {source.dtype}"
        )
    require_writable(self, "masked_scatter_")
    require_dtype(self, _masked)
    prepare_write(self)

    def shaped(values: ShardTensor, rows: Layout) -> Any:
        if rows.shape[0] > values.numel():
            raise RuntimeError("Number of elements of source < number of ones in mask")
        return values.reshape(-1)[: rows.shape[0]]

    if self.ndim:
        write_where(self, mask.expand(self.sharding.shape), 0, source, shaped)
    else:
        masked_scatter_(self.view(1), mask.expand(1), source)
    return self


@implements(torch.index_reduce, torch.Tensor.index_reduce, sharded="gathers")
def index_reduce(
    input: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> ShardTensor:
    """Reduce into cells along a dim. Collective where that dim, or the index, is sharded: it is gathered."""
    x = _own(input, index, source)
    d = normal_dim(dim, x.ndim)
    if not x.ndim:
        cells = index_reduce(x.view(1), 0, index.reshape(-1), source.reshape(-1), reduce, include_self=include_self)
        return cells.reshape(())  # type: ignore[return-value]
    n = x.shape[d]

    def check(index: Tensor) -> None:
        # torch does not look where a block has no cells
        if not in_range(index, 0, n):
            raise IndexError("index out of range in self")

    index = checked(check, x.mesh, (), plain(index))
    source = resolved(source)
    shape = list(x.sharding.shape)
    shape[d] = index.numel()
    if list(source.shape) != shape:
        raise RuntimeError(f"index_reduce(): expected source of shape {shape}, but got {list(source.shape)}")
    whole = whole_along(x, (d,))
    cells = fitted(source, x.mesh, resized(whole.sharding, d, index.numel()))
    block = whole.block
    if block.dtype in HALVES and reduce == "prod" and cells.dtype == block.dtype:
        # torch has no kernel of these for rows of one cell, as those of some ranks may be
        block, cells = block.float(), cells.float()
    local = block.index_reduce(d, index, cells, reduce, include_self=include_self).to(whole.dtype)
    return moved(wrap(local, whole.sharding, x.mesh), x.sharding)


implements(torch.Tensor.index_reduce_, sharded="gathers")(
    into_plain(torch.Tensor.index_reduce_)(
        lambda self, *args, **kwargs: self.copy_(index_reduce(self, *args, **kwargs))
    )
)


def _out_of_place(in_place: Callable[..., Any]) -> Callable[..., Any]:
    def rule(input: Any, *args: Any, **kwargs: Any) -> Any:
        others = [a for a in [*args, *kwargs.values()] if isinstance(a, Tensor)]
        own = _own(input, *others)
        if in_place is masked_scatter_:  # the one whose first argument broadcasts too
            own = own.expand(torch.broadcast_shapes(own.shape, others[0].shape)).clone()
        return in_place(own, *args, **kwargs)

    rule.__doc__ = (in_place.__doc__ or "").replace(", in place", " in a copy")
    return rule


implements(*spellings("put"), sharded="gathers")(_out_of_place(put_))
implements(*spellings("masked_scatter"), sharded="moves")(_out_of_place(masked_scatter_))
