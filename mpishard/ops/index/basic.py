"""Basic indexing: slices, integers, None and Ellipsis; and the cuts that are slices.

Cells stay where they are: a slice of a sharded dim gives blocks of the cells that each rank owns. One cell of a
sharded dim is broadcast by its owner. Tensors as indices are in `mpishard.ops.index.advanced`.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.graph import replayed_views
from mpishard.autograd.redistribute import redistribute
from mpishard.layout import Layout, Placement, Shard, bounds, layout_of, moved_borders, sizes_of
from mpishard.layout.remembered import remembered
from mpishard.ops.rule.dim import (
    int_list,
    integer,
    normal_dim,
    origin,
    settled,
    strict_int,
    unsharded,
    viewed,
    whole_along,
    without,
)
from mpishard.ops.rule.write import beside, prepare_write, require_writable, written_through
from mpishard.tensor.operand import fitted, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.strides import trodden

Key = tuple[Any, ...]
_ALL = (None, None, None)


class Basic(NamedTuple):
    """What a basic index does on this rank.

    Attributes
    ----------
    local
        Index of the block. One cell of a sharded dim is a slice of one cell on its owner, of none elsewhere.
    kept
        Layout of the indexed block.
    drop
        Dims of ``kept`` that an integer selects from a sharded dim.
    whole
        ``kept`` with those dims whole.
    out
        Layout of the result, without those dims.
    """

    local: tuple[Any, ...]
    kept: Layout
    drop: tuple[int, ...]
    whole: Layout
    out: Layout


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _LISTS_ARE_TUPLES = torch.zeros(2, device="cpu")[[[0, 1]]].ndim == 1  # to be changed, torch says


def as_torch_takes(index: Any) -> Any:
    """Return an index, a list of lists or tensors as the tuple that torch takes it for. Not collective."""
    if _LISTS_ARE_TUPLES and type(index) is list and len(index) < 32:
        sequences = (Tensor, list, tuple, range, np.ndarray, str, slice)
        if any(i is None or i is Ellipsis or isinstance(i, sequences) for i in index):
            warnings.warn("a list of indices is taken as a tuple: use x[tuple(seq)] instead of x[seq]", stacklevel=4)
            return tuple(index)
    return index


def key_of(index: Any) -> Key | None:
    """Return ``index`` in hashable form, slices as triples; None where it is not basic. Not collective."""
    key: list[Any] = []
    for i in index if type(index) is tuple else (index,):
        if i is None or i is Ellipsis or type(i) is int:
            key.append(i)
        elif type(i) is slice:
            ends = (i.start, i.stop, i.step)
            for end in ends:
                if end is not None and type(end) is not int:
                    ends = tuple(map(_number, ends))
                    break
            key.append(ends)
        elif _is_whole(i) or (isinstance(i, (Tensor, np.ndarray)) and i.ndim == 0 and _is_integer(i)):
            key.append(int(i))
        else:
            return None
    return tuple(key)


def _is_whole(i: Any) -> bool:
    # names of components, such as those of an IntEnum, are of classes of their own
    return isinstance(i, (int, np.integer)) and not isinstance(i, bool)


def _is_integer(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not (x.is_floating_point() or x.is_complex()) and x.dtype not in (torch.bool, torch.uint8)
    return x.dtype.kind == "i"  # type: ignore[no-any-return]


def _number(i: Any) -> int | None:
    return None if i is None else operator.index(i)


def one_ellipsis(after: Sequence[Any], skips: bool) -> Sequence[Any]:
    """Return what follows an ellipsis in an index, without further ones. Not collective.

    Each of them skips as many dims as the first, so where these are any, nothing may follow.
    """
    further = [i for i, item in enumerate(after) if item is Ellipsis]
    if not further:
        return after
    if skips and any(item is not Ellipsis for item in after[further[0] :]):
        raise IndexError("an index has dims left for a single ellipsis ('...') alone, where others follow")
    return [item for item in after if item is not Ellipsis]


@remembered
def plan_index(layout: Layout, key: Key, coords: tuple[int, ...]) -> Basic:
    """Plan a basic index of a tensor without Partial dims. Not collective."""
    used = sum(i is not None and i is not Ellipsis for i in key)
    if used > layout.ndim:
        raise IndexError(f"too many indices for tensor of dimension {layout.ndim}")
    rest = (_ALL,) * (layout.ndim - used)
    at = key.index(Ellipsis) if Ellipsis in key else len(key)
    items = (*key[:at], *rest, *one_ellipsis(key[at + 1 :], bool(rest)))
    local: list[Any] = []
    sources: list[int] = []
    shape: list[int] = []
    sizes: list[tuple[int, ...] | None] = []
    drop: list[int] = []
    selected: list[int] = []
    dim = 0
    for item in items:
        if item is None:
            local.append(None)
            sources.append(-1)
            shape.append(1)
            sizes.append(None)
            continue
        n, cut = layout.shape[dim], layout.sizes[dim]
        if type(item) is int:
            if not -n <= item < n:
                raise IndexError(f"index {item} is out of bounds for dimension {dim} with size {n}")
            item %= n
            if cut is None or len(cut) == 1:
                local.append(item)
                selected.append(dim)
                dim += 1
                continue
            start, step, count = item, 1, 1
            drop.append(len(sources))
        else:
            start, stop, step = slice(*item).indices(n)
            if step <= 0:
                raise ValueError("step must be greater than zero")
            count = len(range(start, stop, step))
        sources.append(dim)
        shape.append(count)
        if cut is None:
            sizes.append(None)
            local.append(slice(start, start + count * step, step))
        else:
            # of every block the first selected cell at or after its start
            first = moved_borders(cut, 1, step - 1 - start, step, count)
            sizes.append(sizes_of(first))
            i = layout.index(dim, coords)
            lo = start + first[i] * step - bounds(cut)[i]
            local.append(slice(lo, lo + (first[i + 1] - first[i]) * step, step) if sizes[-1][i] else slice(0, 0))
        dim += 1
    base = unsharded(layout, tuple(selected))
    position = {s: i for i, s in enumerate(sources) if s >= 0}
    placements: list[Placement] = [Shard(position[p.dim]) if type(p) is Shard else p for p in base.placements]
    kept = layout_of(layout.mesh_shape, placements, shape, sizes)
    whole = unsharded(kept, tuple(drop))
    return Basic(tuple(local), kept, tuple(drop), whole, without(whole, tuple(drop)))


def indexed(x: ShardTensor, key: Key) -> ShardTensor:
    """Return ``x`` at a basic index. Not collective, unless it selects one cell of a sharded dim."""
    x = settled(x) if x.sharding.partial_dims else x
    plan = plan_index(x.sharding, key, x.mesh.coords)
    local = x.block[plan.local]
    if plan.drop:
        out = wrap(redistribute(local, x.mesh, plan.kept, plan.whole).squeeze(plan.drop), plan.out, x.mesh)
        out._gathered_view, out._trail, out._origin = True, trodden(x, "[]", key), origin(x, ("[]", key))
        return out
    if not local.numel():
        with replayed_views():
            local = x.block[plan.local]
    return viewed(x, local, plan.out, trodden(x, "[]", key), steps=True)


def write_at(self: ShardTensor, key: Key, value: Any) -> None:
    """Write at a basic index. Collective where the value is laid out differently."""
    if self._gathered_view and written_through(self, lambda y: write_at(y, key, value)):
        return
    require_writable(self, "x[index] = value")
    prepare_write(self)
    plan = plan_index(self.sharding, key, self.mesh.coords)
    view = self.block[plan.local]
    if isinstance(value, Tensor):
        value = beside(view, fitted(_value(value, plan), self.mesh, plan.kept))
    if plan.kept.shape == self.sharding.shape:
        self.block[plan.local] = value
        return
    # Into a view, which it is also where a rank's whole block is selected, or none of an empty one. Torch writes that
    # into the tensor itself, whose cotangent is then a constant: other ranks' second derivatives would have a graph
    # that goes on, and wait for this rank.
    if isinstance(value, Tensor):
        view.copy_(value)
    else:
        view.fill_(value)


def _value(value: Any, plan: Basic) -> Any:
    """Return a value that broadcasts against ``plan.kept``."""
    if isinstance(value, ShardTensor):
        value = resolved(value)
    value = fitted_shape(value, plan.out.shape)
    for d in reversed(plan.drop):
        after = plan.kept.ndim - 1 - d
        if value.ndim > after:
            value = value.unsqueeze(value.ndim - after)
    return value


def fitted_shape(value: Any, shape: Sequence[int]) -> Any:
    """Return ``value`` without the leading dims of one cell that ``shape`` lacks. Not collective."""
    own = tuple(value.shape)
    while len(own) > len(shape) and own[0] == 1:
        value, own = value.squeeze(0), own[1:]
    fits = own == tuple(shape) or all(n in (1, m) for n, m in zip(reversed(own), reversed(shape)))
    if len(own) > len(shape) or not fits:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to indexing result of "
            f"shape {list(shape)}"
        )
    return value


# -- cuts along one dim


def _cut(x: ShardTensor, dim: int, start: int, stop: int) -> ShardTensor:
    return indexed(x, (*(_ALL,) * dim, (start, stop, None)))


def _dim_and_extent(x: ShardTensor, dim: int, name: str) -> tuple[int, int]:
    if not x.ndim:
        raise RuntimeError(f"{name} expects at least a 1-dimensional tensor")
    d = normal_dim(dim, x.ndim)
    return d, x.sharding.shape[d]


@implements(torch.narrow, torch.Tensor.narrow, sharded="local")
def narrow(input: Any, dim: int, start: Any, length: int) -> Any:
    """Return cells ``[start, start + length)`` of a dim, where they are. Not collective."""
    if isinstance(start, Tensor):
        if start.ndim or start.is_floating_point() or start.is_complex() or start.dtype == torch.bool:
            raise RuntimeError("start must be an 0-dim integral Tensor.")
        start = int(start)
    if not isinstance(input, ShardTensor):
        return torch.narrow(input, dim, start, length)
    start, length = integer(start), integer(length)
    d, n = _dim_and_extent(input, dim, "narrow")
    start = start + n if start < 0 else start
    if length < 0 or not 0 <= start <= n or start + length > n:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({n}).")
    return _cut(input, d, start, start + length)


@implements(torch.select, torch.Tensor.select, sharded="moves")
def select(input: ShardTensor, dim: int, index: int) -> ShardTensor:
    """Return one cell of a dim. Not collective, unless the dim is sharded: then its owner broadcasts."""
    return indexed(input, (*(_ALL,) * normal_dim(dim, input.ndim), integer(index)))


@implements(torch.unbind, torch.Tensor.unbind, sharded="gathers")
def unbind(input: ShardTensor, dim: int = 0) -> tuple[ShardTensor, ...]:
    """Return all cells of a dim one by one. Not collective, unless the dim is sharded: then it is gathered."""
    d = normal_dim(dim, input.ndim)
    x = whole_along(settled(input), (d,))
    out = without(x.sharding, (d,))
    before = (_ALL,) * d
    return tuple(viewed(x, y, out, trodden(x, "[]", (*before, i)), steps=True) for i, y in enumerate(x.block.unbind(d)))


def _parts(x: ShardTensor, dim: int, sizes: Sequence[int]) -> tuple[ShardTensor, ...]:
    borders = bounds(tuple(sizes))
    return tuple(_cut(x, dim, a, b) for a, b in zip(borders[:-1], borders[1:]))


def _equal_parts(n: int, length: int) -> list[int]:
    if length == 0 and n == 0:
        return [0]
    if length <= 0:
        raise RuntimeError(f"split expects split_size be positive, got {length} for an extent of {n}")
    return [min(length, n - i) for i in range(0, n, length)] or [0]


@implements(torch.split, torch.Tensor.split, torch.unsafe_split, torch.Tensor.unsafe_split, sharded="local")
def split(tensor: ShardTensor, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    """Cut a dim into parts, whose cells stay where they are. Not collective."""
    given = split_size_or_sections if split_size is None else split_size
    d, n = _dim_and_extent(tensor, dim, "split")
    sizes = int_list(given) if isinstance(given, (tuple, list)) else _equal_parts(n, integer(given))
    if sum(sizes) != n or min(sizes, default=0) < 0:
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {n} (input tensor's size at dimension {d}), "
            f"but got split_sizes={list(sizes)}"
        )
    return _parts(settled(tensor), d, sizes)


@implements(torch.chunk, torch.Tensor.chunk, torch.unsafe_chunk, torch.Tensor.unsafe_chunk, sharded="local")
def chunk(input: ShardTensor, chunks: int, dim: int = 0) -> Any:
    """Cut a dim into so many parts. Not collective."""
    chunks = strict_int(chunks)  # a tensor of one byte would go around
    if chunks <= 0:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    d, n = _dim_and_extent(input, dim, "chunk")
    sizes = _equal_parts(n, -(-n // chunks)) if n else [0] * chunks
    return _parts(settled(input), d, sizes)


def _one_of(call: str, *given: Any) -> Any:
    """Return the argument that is given, by any of its names. Not collective."""
    found = [g for g in given if g is not None]
    if len(found) != 1:
        raise TypeError(f"{call} takes one of indices and sections, got {len(found)}")
    return found[0]


@implements(torch.tensor_split, torch.Tensor.tensor_split, sharded="local")
def tensor_split(
    input: Any, indices_or_sections: Any = None, dim: int = 0, *, indices: Any = None, sections: Any = None
) -> Any:
    """Cut a dim into nearly equal parts, or at given cells. Not collective."""
    given = _one_of("tensor_split", indices_or_sections, indices, sections)
    if isinstance(given, Tensor):
        if given.ndim > 1 or given.dtype != torch.int64:
            raise RuntimeError(
                "tensor_split expected tensor_indices_or_sections to be a zero-dimensional or one-dimensional tensor "
                f"of long, but got one of {given.ndim} dims and {given.dtype}"
            )
        given = given.tolist()
    elif isinstance(given, (tuple, list)):
        given = int_list(given)
    else:
        given = strict_int(given.item() if isinstance(given, np.ndarray) and not given.ndim else given)
    if not isinstance(input, ShardTensor):
        return torch.tensor_split(input, given, dim)
    d, n = _dim_and_extent(input, dim, "tensor_split")
    x = settled(input)
    if isinstance(given, int):
        if given <= 0:
            raise RuntimeError(f"number of sections must be larger than 0, got {given}")
        return _parts(x, d, [n // given + (i < n % given) for i in range(given)])
    borders = [0, *given, n]
    # as slices: negative, unordered and too large numbers mean what they mean there
    return tuple(_cut(x, d, a, b) for a, b in zip(borders[:-1], borders[1:]))


def _axis_split(dim_of: Any, least: int = 1) -> Any:
    def rule(input: ShardTensor, indices_or_sections: Any = None, *, indices: Any = None, sections: Any = None) -> Any:
        given = _one_of("a split", indices_or_sections, indices, sections)
        if isinstance(given, Tensor) and (_is_integer(given) or given.dtype == torch.uint8):
            given = given.tolist()  # of any width, as torch takes them for ints
        elif isinstance(given, np.ndarray) and not given.ndim:
            given = [given.item()]  # a place, where tensor_split takes it for a number of parts
        if isinstance(given, (tuple, list)):
            given = int_list(given)
        elif not isinstance(given, Tensor):
            given = strict_int(given)
        d = dim_of(input.ndim)
        if input.ndim < max(d + 1, least):
            raise RuntimeError(f"a split along dim {d} requires a tensor of more dimensions than {input.ndim}")
        if isinstance(given, int) and (given <= 0 or input.sharding.shape[d] % given):
            raise RuntimeError(f"the size of dim {d}, {input.sharding.shape[d]}, is not divisible by {given}")
        return tensor_split(input, given, d)

    return rule


implements(torch.hsplit, torch.Tensor.hsplit, sharded="local")(_axis_split(lambda ndim: 0 if ndim <= 1 else 1))
implements(torch.vsplit, torch.Tensor.vsplit, sharded="local")(_axis_split(lambda _: 0, 2))
implements(torch.dsplit, torch.Tensor.dsplit, sharded="local")(_axis_split(lambda _: 2))


implements(
    torch.split_with_sizes,
    torch.Tensor.split_with_sizes,
    torch.unsafe_split_with_sizes,
    torch.Tensor.unsafe_split_with_sizes,
    sharded="local",
)(lambda input, split_sizes, dim=0: split(input, list(split_sizes), dim))
