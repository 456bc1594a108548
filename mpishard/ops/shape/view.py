"""Dims reordered, added, dropped and broadcast: views of the local block under another layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.graph import unseen
from mpishard.layout import Layout
from mpishard.layout.remembered import remembered
from mpishard.ops.rule.dim import (
    int_list,
    ints,
    local_shape,
    mapped,
    normal_dim,
    on_domain,
    settled,
    strict_int,
    unsharded,
    viewed,
    whole_along,
    without,
)
from mpishard.tensor.registry import aten, implements, spellings
from mpishard.tensor.shard_tensor import ShardTensor
from mpishard.tensor.strides import laid, strides_alike, strides_of, trodden

# -- order


@remembered
def _permuted(layout: Layout, dims: tuple[int, ...]) -> tuple[Layout, tuple[int, ...]]:
    order = tuple(normal_dim(d, layout.ndim) for d in dims)
    if sorted(order) != list(range(layout.ndim)):
        raise RuntimeError(f"permute(sparse_coo): dims {dims} are not a permutation of {layout.ndim} dims")
    return mapped(layout, order), order


@implements(torch.permute, torch.Tensor.permute, sharded="local")
def permute(input: ShardTensor, *given: Any, dims: Any = None) -> ShardTensor:
    """Reorder dims. Not collective."""
    x = settled(input) if input.sharding.partial_dims else input
    out, order = _permuted(x.sharding, ints(given) if dims is None else int_list(dims))
    return viewed(x, x.block.permute(order), out, trodden(x, "permute", order), steps=True)


@remembered
def _swapped(layout: Layout, dim0: int, dim1: int) -> tuple[Layout, tuple[int, ...]]:
    order = list(range(layout.ndim))
    a, b = normal_dim(dim0, layout.ndim), normal_dim(dim1, layout.ndim)
    if order:
        order[a], order[b] = order[b], order[a]
    return mapped(layout, tuple(order)), tuple(order)


@implements(*spellings("transpose", "swapdims"), sharded="local")
def transpose(input: ShardTensor, dim0: int, dim1: int) -> ShardTensor:
    """Swap two dims. Not collective."""
    x = settled(input) if input.sharding.partial_dims else input
    out, order = _swapped(x.sharding, dim0, dim1)
    return viewed(x, x.block.transpose(dim0, dim1), out, trodden(x, "permute", order), steps=True)


@implements(torch.swapaxes, torch.Tensor.swapaxes, sharded="local")
def swapaxes(input: ShardTensor, axis0: int, axis1: int) -> ShardTensor:
    """Swap two dims. Not collective."""
    return transpose(input, axis0, axis1)


@implements(torch.t, torch.Tensor.t, sharded="local")
def t(input: ShardTensor) -> ShardTensor:
    """Transpose a matrix; vectors and scalars stay. Not collective."""
    if input.ndim > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {input.ndim}D")
    return transpose(input, 0, 1) if input.ndim == 2 else permute(input, tuple(range(input.ndim)))


@remembered
def _moved_order(ndim: int, source: tuple[int, ...], destination: tuple[int, ...]) -> tuple[int, ...]:
    src, dst = [normal_dim(d, ndim) for d in source], [normal_dim(d, ndim) for d in destination]
    if len(src) != len(dst) or len(set(src)) != len(src) or len(set(dst)) != len(dst):
        raise RuntimeError(f"movedim: source {source} and destination {destination} do not fit each other")
    rest = iter(d for d in range(ndim) if d not in src)
    return tuple(src[dst.index(i)] if i in dst else next(rest) for i in range(ndim))


@implements(*spellings("movedim", "moveaxis"), sharded="local")
def movedim(input: ShardTensor, source: Any, destination: Any) -> ShardTensor:
    """Move dims to other positions. Not collective."""
    a = int_list(source) if isinstance(source, (tuple, list)) else (strict_int(source),)
    b = int_list(destination) if isinstance(destination, (tuple, list)) else (strict_int(destination),)
    return permute(input, _moved_order(input.ndim, a, b))


def _matrix_transposed(self: ShardTensor) -> ShardTensor:
    if self.ndim < 2:
        raise RuntimeError(f"tensor.mT is only supported on matrices or batches of matrices. Got {self.ndim}-D tensor.")
    return transpose(self, -2, -1)


def _adjoint(self: ShardTensor) -> ShardTensor:
    if self.ndim == 0:  # deprecated, by torch's own word
        on_domain(torch.adjoint, self)
        return viewed(self, self.block.conj(), self.sharding, self._trail, view=("conj",))
    swapped = _matrix_transposed(self)
    return viewed(swapped, swapped.block.conj(), swapped.sharding, swapped._trail, view=("conj",))


def _matrix_adjoint(self: ShardTensor) -> ShardTensor:
    if self.ndim not in (0, 2):
        raise RuntimeError(f"tensor.H is only supported on matrices (2-D tensors). Got {self.ndim}-D tensor.")
    return _adjoint(self)


# torch.compile of torch 2.15 calls the functions behind the attributes
implements(torch.Tensor.T.__get__, *aten("numpy_T"), sharded="local")(  # type: ignore[attr-defined]
    lambda self: permute(self, tuple(reversed(range(self.ndim))))
)
implements(torch.Tensor.mT.__get__, *aten("mT"), sharded="local")(_matrix_transposed)  # type: ignore[attr-defined]
implements(torch.Tensor.H.__get__, *aten("matrix_H"), sharded="local")(_matrix_adjoint)  # type: ignore[attr-defined]
implements(torch.Tensor.mH.__get__, *aten("mH"), sharded="local")(_adjoint)  # type: ignore[attr-defined]
implements(torch.adjoint, torch.Tensor.adjoint, sharded="local")(_adjoint)


# -- dims of one cell


@remembered
def _unsqueezed(layout: Layout, dim: int) -> Layout:
    d = normal_dim(dim, layout.ndim + 1)
    return mapped(layout, (*range(d), -1, *range(d, layout.ndim)))


@implements(torch.unsqueeze, torch.Tensor.unsqueeze, sharded="local")
def unsqueeze(input: ShardTensor, dim: int) -> ShardTensor:
    """Insert a dim of one cell. Not collective."""
    x = settled(input) if input.sharding.partial_dims else input
    return viewed(x, x.block.unsqueeze(dim), _unsqueezed(x.sharding, dim), trodden(x, "unsqueeze", dim), steps=True)


@remembered
def squeezed_dims(layout: Layout, dim: Any) -> tuple[int, ...]:
    """Return the dims of one cell among those that are asked for: None, one, or several. Not collective."""
    dims = range(layout.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    own = [normal_dim(d, layout.ndim) for d in dims]
    for d in own:
        if own.count(d) > 1:
            raise RuntimeError(f"dim {d} appears multiple times in the list of dims")
    return () if layout.ndim == 0 else tuple(sorted(d for d in own if layout.shape[d] == 1))


@implements(torch.squeeze, torch.Tensor.squeeze, sharded="local")
def squeeze(input: ShardTensor, dim: Any = None) -> ShardTensor:
    """Drop dims of one cell. Not collective, unless such a dim is sharded: then its owner broadcasts."""
    x = settled(input) if input.sharding.partial_dims else input
    dims = squeezed_dims(x.sharding, None if dim is None else ints((dim,)))
    x = whole_along(x, dims)
    # the dims by name: a local extent of 1 does not make a global one
    return viewed(x, x.block.squeeze(dims), without(x.sharding, dims), trodden(x, "squeeze", dims), steps=True)


# -- broadcasting


@remembered
def _expanded(layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Layout]:
    """Return the dims to make whole first, and the layout of the result."""
    new = len(shape) - layout.ndim
    full = list(shape)
    for i, n in enumerate(shape):
        own = layout.shape[i - new] if i >= new else None
        if own is None and n == -1:
            raise RuntimeError(
                f"expand: the expanded size of the tensor (-1) isn't allowed in a leading, non-existing dimension {i}"
            )
        if n == -1:
            full[i] = own  # type: ignore[assignment]
        elif own not in (None, 1, n):
            raise RuntimeError(
                f"The expanded size of the tensor ({n}) must match the existing size ({own}) at non-singleton "
                f"dimension {i}.  Target sizes: {list(shape)}.  Tensor sizes: {list(layout.shape)}"
            )
    if new < 0:
        raise RuntimeError(f"expand: {len(shape)} sizes given for a tensor of {layout.ndim} dims")
    whole = tuple(d for d in layout.shard_dims if layout.shape[d] != full[d + new])
    return whole, mapped(unsharded(layout, whole), (*(-1,) * new, *range(layout.ndim)), tuple(full))


@implements(torch.Tensor.expand, sharded="local")
def expand(self: ShardTensor, *sizes: Any, size: Any = None, implicit: bool = False) -> ShardTensor:
    """Broadcast dims of one cell. Not collective, unless such a dim is sharded: then its owner broadcasts."""
    x = settled(self) if self.sharding.partial_dims else self
    whole, out = _expanded(x.sharding, ints(sizes) if size is None else int_list(size))
    x = whole_along(x, whole)
    local, trail = x.block.expand(local_shape(out, x.mesh.coords)), trodden(x, "expand", out.shape)
    same = math.prod(out.shape) == math.prod(x.sharding.shape)
    return viewed(x, local, out, trail, view=("view", out.shape) if same else None)


@implements(torch.broadcast_to, torch.Tensor.broadcast_to, sharded="local")
def broadcast_to(input: ShardTensor, *size: Any, **named: Any) -> ShardTensor:
    """Broadcast to a shape. As `expand`."""
    return expand(input, *size, **named)


implements(torch.Tensor.expand_as, sharded="local")(lambda self, other: self.expand(tuple(other.shape)))


@implements(*spellings("broadcast_tensors"), sharded="local")
def broadcast_tensors(*tensors: Any) -> tuple[Any, ...]:
    """Expand all tensors to their common shape. Not collective, unless a sharded dim of one cell is broadcast."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        tensors = tuple(tensors[0])
    shape = torch.broadcast_shapes(*[tuple(x.shape) for x in tensors])
    # of that shape they are returned themselves: a later unsqueeze_() changes both
    return tuple(x if x.shape == shape else x.expand(shape) for x in tensors)


def _at_least(ndim: int, grow: Callable[[ShardTensor], ShardTensor]) -> Callable[..., Any]:
    def one(x: Any) -> Any:
        if not isinstance(x, ShardTensor):
            return {1: torch.atleast_1d, 2: torch.atleast_2d, 3: torch.atleast_3d}[ndim](x)
        return x if x.ndim >= ndim else grow(x)

    def rule(*tensors: Any) -> Any:
        if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
            tensors = tuple(tensors[0])
        out = tuple(one(x) for x in tensors)
        return out[0] if len(out) == 1 else out

    return rule


def _grow_3d(x: ShardTensor) -> ShardTensor:
    if x.ndim == 2:
        return unsqueeze(x, -1)
    return unsqueeze(unsqueeze(x, 0), -1) if x.ndim else unsqueeze(unsqueeze(unsqueeze(x, 0), 0), 0)


implements(*spellings("atleast_1d"), sharded="local")(_at_least(1, lambda x: unsqueeze(x, 0)))
implements(*spellings("atleast_2d"), sharded="local")(
    _at_least(2, lambda x: unsqueeze(x if x.ndim else unsqueeze(x, 0), 0))
)
implements(*spellings("atleast_3d"), sharded="local")(_at_least(3, _grow_3d))


# -- complex numbers as pairs


@implements(torch.view_as_real, sharded="local")
def view_as_real(input: ShardTensor) -> ShardTensor:
    """Add a last dim of (real, imaginary). Not collective."""
    x = settled(input)
    local = torch.view_as_real(x.block)
    if not local.numel() and local.requires_grad:
        # torch takes a cotangent without cells as it is, whose strides may be 0, and refuses it on this rank alone
        local.register_hook(lambda g: None if g is None else g.reshape(0).view(g.shape))
    shape, strides = (*x.sharding.shape, 2), (*(2 * s for s in strides_of(x)), 1)
    return viewed(
        x, local, mapped(x.sharding, (*range(x.ndim), -1), shape), laid(x, shape, strides), view=("view_as_real",)
    )


@implements(torch.view_as_complex, sharded="local")
def view_as_complex(input: ShardTensor) -> ShardTensor:
    """Join a last dim of (real, imaginary). Not collective."""
    x = settled(input)
    last = x.ndim - 1
    if last in x.sharding.shard_dims:
        x = whole_along(x, (last,))
    with unseen():  # torch's own error of strides, on all ranks
        torch.view_as_complex(torch.empty_strided(x.shape, strides_alike(x), dtype=torch.float32, device="meta"))
    out = without(x.sharding, (last,))
    trail, view = laid(x, out.shape, tuple(s // 2 for s in strides_of(x)[:last])), ("view_as_complex",)
    try:
        return viewed(x, torch.view_as_complex(x.block), out, trail, view=view)
    except RuntimeError:  # of a block that begins at an odd number
        y = viewed(
            x, torch.view_as_complex(x.block.clone(memory_format=torch.contiguous_format)), out, trail, view=view
        )
        y._gathered_view = True
        return y
