"""Views by strides, and tensors that change their extent: of the memory that the gathered tensor would have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.comm.agreement import on_all
from mpishard.errors import UnsupportedOperationError
from mpishard.ops.rule.dim import int_list, integer, ints, settled
from mpishard.ops.rule.write import require_writable
from mpishard.ops.shape.view_copy import become
from mpishard.tensor.operand import mesh_of, on_mesh
from mpishard.tensor.registry import implements, outline, spellings
from mpishard.tensor.shard_tensor import ShardTensor
from mpishard.tensor.strides import is_dense


class Walk(NamedTuple):
    """How a view by strides goes through a tensor, as ordinary views do.

    Attributes
    ----------
    starts
        Per dim of the tensor: the first index.
    steps
        Per dim of the view: (dim of the tensor, step), or None for a dim that is repeated or has one cell.
    """

    starts: tuple[int, ...]
    steps: tuple[tuple[int, int] | None, ...]


def plan_walk(shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int) -> Walk | None:
    """Return how a view by strides goes through a row-major tensor, or None where it wraps at a border.

    Not collective.
    """
    own = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    starts, rest = [], offset
    for s in own:
        starts.append(rest // s)
        rest %= s
    last = list(starts)
    steps: list[tuple[int, int] | None] = []
    for n, s in zip(size, stride):
        if n == 1 or s == 0:
            steps.append(None)
            continue
        d = next((d for d in range(len(own)) if s % own[d] == 0 and last[d] + s // own[d] * (n - 1) < shape[d]), None)
        if d is None or sum(p is not None and p[0] == d for p in steps) == 2:
            return None
        last[d] += s // own[d] * (n - 1)
        steps.append((d, s // own[d]))
    return Walk(tuple(starts), tuple(steps))


def _walked(x: ShardTensor, walk: Walk, size: Sequence[int]) -> Any:
    """Return the view of a walk: cuts, windows, an order of dims, and dims that are repeated."""
    of = [[i for i, p in enumerate(walk.steps) if p is not None and p[0] == d] for d in range(x.ndim)]
    key: list[Any] = []
    for start, own in zip(walk.starts, of):
        reach = sum(walk.steps[i][1] * (size[i] - 1) for i in own)  # type: ignore[index]
        step = walk.steps[own[0]][1] if len(own) == 1 else 1  # type: ignore[index]
        key.append(slice(start, start + reach + 1, step) if own else start)
    y: Any = x[tuple(key)]
    order: list[int] = []  # dims of the view that the dims of y are
    for own in of:
        if len(own) == 2:
            d = len(order)
            (i, (_, coarse)), (j, (_, fine)) = sorted(
                ((i, walk.steps[i]) for i in own),
                key=lambda item: -item[1][1],  # type: ignore[index]
            )
            y = y.unfold(d, fine * (size[j] - 1) + 1, coarse)
            y = y[(Ellipsis, slice(None, None, fine))].movedim(-1, d + 1)
            order += [i, j]
        else:
            order += own
    y = y.permute([order.index(i) for i in sorted(order)])
    for i, p in enumerate(walk.steps):
        if p is None:
            y = y.unsqueeze(i)
    return y.expand(tuple(size))


def _positions(size: Sequence[int], stride: Sequence[int], offset: int, device: Any) -> Tensor:
    """Return the flat position of every cell of a view."""
    found = torch.full((), offset, dtype=torch.int64, device=device)
    for n, s in zip(size, stride):
        found = found.unsqueeze(-1) + torch.arange(n, device=device) * s
    return found


def _checked(x: Any, size: Any, stride: Any, offset: int | None) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    size, stride, offset = int_list(size), int_list(stride), 0 if offset is None else integer(offset)
    if len(size) != len(stride):
        raise RuntimeError("mismatch in length of strides and shape")
    if min((*stride, offset), default=0) < 0:
        raise RuntimeError(f"as_strided: Negative strides are not supported at the moment, got strides: {list(stride)}")
    end = offset + sum((n - 1) * s for n, s in zip(size, stride)) + 1 if 0 not in size else 0
    if end > math.prod(x.shape):
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset} require {end} cells, "
            f"which are out of bounds for a tensor of {math.prod(x.shape)}"
        )
    return size, stride, offset


@implements(*spellings("as_strided"), sharded="gathers")
def as_strided(input: ShardTensor, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """View the row-major cells by strides. Collective as the cuts, windows and reshapes are that make the view.

    A view that wraps at a border of the tensor is a copy, for which the tensor is gathered. The offset counts from
    the first cell of the tensor itself, as `storage_offset` does here.

    Raises
    ------
    UnsupportedOperationError
        The cells are not row-major in memory: torch would read those between and behind them.
    """
    size, stride, offset = _checked(input, size, stride, storage_offset)
    x = settled(input)
    _require_row_major(x)
    if 0 not in size:
        if (walk := plan_walk(x.sharding.shape, size, stride, offset)) is not None:
            return _walked(x, walk, size)
        if (walk := plan_walk((x.numel(),), size, stride, offset)) is not None:
            return _walked(x.reshape(-1), walk, size)
        inner = _joined(size, stride)
        if inner:
            n = math.prod(size)
            return x.reshape(-1)[offset : offset + inner * (n - 1) + 1 : inner].reshape(size)
    out: Any = x.reshape(-1)[_positions(size, stride, offset, x.device)]
    out._gathered_view = True
    return out


def _require_row_major(x: ShardTensor, op: str = "as_strided") -> None:
    """Refuse a view whose cells do not follow each other in memory. Collective: a block of one row does not show it."""
    dense = x.block.is_contiguous() and is_dense(x)
    if not on_all(x.mesh, dense, op):
        raise UnsupportedOperationError(
            f"{op}: cells that do not follow each other in memory",
            expected="a tensor that is no transposed, cut or expanded view, nor a field of a simulation",
            got=outline(x),
            fix="index it, or make it x.contiguous() before",
        )


def _joined(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the step of a view whose dims are those of one row, cut up, or 0."""
    row = [(n, s) for n, s in zip(size, stride) if n > 1]
    one = all(a[1] == b[0] * b[1] for a, b in zip(row[:-1], row[1:]))
    return row[-1][1] if row and one else 0


@implements(*spellings("as_strided_copy"), sharded="moves")
def as_strided_copy(input: ShardTensor, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Copy the view of `as_strided`."""
    return as_strided(input, size, stride, storage_offset).clone()


@implements(*spellings("as_strided_scatter"), sharded="gathers")
def as_strided_scatter(input: Any, src: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Write into the view of `as_strided` in a copy. Collective: the source is gathered where it is sharded."""
    size, stride, offset = _checked(input, size, stride, storage_offset)
    if tuple(src.shape) != size:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(src.shape)}, "
            f"slice size = {list(size)}"
        )
    x = on_mesh(input, mesh_of((input, src)))
    _require_row_major(x)
    at = _positions(size, stride, offset, x.device)
    # of the gradients that torch gives, the input's is wrong (docs/upstream.md)
    return torch.index_put(x.reshape(-1), (at,), src).reshape(x.shape)


# -- other extents


@implements(torch.Tensor.resize_, sharded="moves")
def resize_(self: ShardTensor, *sizes: Any, memory_format: Any = None) -> ShardTensor:
    """Give a tensor another shape: the first of its row-major cells, with zeros behind. Collective as reshaping is.

    Views that were taken before keep the cells that they had.

    Raises
    ------
    UnsupportedOperationError
        The cells are not row-major in memory: torch would take those between them, or in another order.
    """
    shape = ints(sizes)
    if self.requires_grad:
        raise RuntimeError("cannot resize variables that require grad")
    if shape == tuple(self.sharding.shape):
        return self
    require_writable(self, "resize_")
    n, own = math.prod(shape), self.numel()
    x = settled(self)
    if n and own and x._halo is None:
        _require_row_major(x, "resize_")
    flat: Any = x.reshape(-1)
    cells = flat[:n] if n <= own else torch.cat([flat, flat.new_zeros(n - own)])
    return become(self, cells.reshape(shape).clone())


@implements(*spellings("resize_as_"), sharded="moves")
def resize_as_(input: Any, other: Any, *, memory_format: Any = None) -> Any:
    """Give a tensor the shape of another, as `resize_`."""
    return input.resize_(tuple(other.shape))


@implements(torch.Tensor.new_empty_strided, sharded="local")
def new_empty_strided(self: ShardTensor, size: Any, stride: Any, **options: Any) -> Any:
    """Make a tensor of this shape, as ``new_empty`` does: its blocks lie as they do. Not collective."""
    return self.new_empty(tuple(size), **options)
