"""Tensor dims of a layout: numbering, reordering, and making them whole."""

from __future__ import annotations

import operator
from collections.abc import Callable
from numbers import Integral, Number, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.graph import unseen
from mpishard.errors import UnsupportedOperationError
from mpishard.layout import Layout, Replicate, Shard, layout_of
from mpishard.layout.remembered import remembered
from mpishard.tensor.notice import notice_gather
from mpishard.tensor.operand import moved, resolved
from mpishard.tensor.refusal import without_data
from mpishard.tensor.shard_tensor import ShardTensor, rebind, wrap
from mpishard.tensor.strides import Trail, trail_of

View = tuple[Any, ...]


def normal_dim(dim: int, ndim: int) -> int:
    """Return ``dim`` counted from the front. Not collective."""
    if dim.__class__ is not int:
        dim = strict_int(dim)
    if -ndim <= dim < ndim:
        return dim % ndim
    if ndim == 0 and dim in (-1, 0):
        return 0
    raise IndexError(
        f"Dimension out of range (expected to be in range of [{-max(ndim, 1)}, {max(ndim, 1) - 1}], but got {dim})"
    )


@remembered
def mapped(layout: Layout, sources: tuple[int, ...], shape: tuple[int, ...] | None = None) -> Layout:
    """Return the layout of a result whose dim ``i`` is dim ``sources[i]`` of ``layout``. Not collective.

    Parameters
    ----------
    layout
        Of the argument. All its sharded dims are among the sources.
    sources
        Per dim of the result; -1 for a dim that is new, and whole on every rank.
    shape
        Of the result; that of the sources, and 1 for new dims, where not given.
    """
    position = {s: i for i, s in enumerate(sources) if s >= 0}
    placements = [Shard(position[p.dim]) if type(p) is Shard else p for p in layout.placements]
    extents = tuple(layout.shape[s] if s >= 0 else 1 for s in sources) if shape is None else shape
    return layout_of(layout.mesh_shape, placements, extents, [layout.sizes[s] if s >= 0 else None for s in sources])


@remembered
def resized(layout: Layout, dim: int, extent: int, sizes: tuple[int, ...] | None = None) -> Layout:
    """Return ``layout`` with another extent of ``dim``; ``sizes`` where it is sharded. Not collective."""
    shape = (*layout.shape[:dim], extent, *layout.shape[dim + 1 :])
    cut = (*layout.sizes[:dim], sizes, *layout.sizes[dim + 1 :])
    return layout_of(layout.mesh_shape, layout.placements, shape, cut)


@remembered
def unsharded(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """Return ``layout`` with ``dims`` whole on every rank. Not collective."""
    placements = [Replicate() if type(p) is Shard and p.dim in dims else p for p in layout.placements]
    return layout_of(
        layout.mesh_shape, placements, layout.shape, [None if d in dims else s for d, s in enumerate(layout.sizes)]
    )


@remembered
def local_shape(layout: Layout, coords: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the block at ``coords``, cached. Not collective."""
    return layout.local_shape(coords)


def whole_along(x: ShardTensor, dims: tuple[int, ...]) -> ShardTensor:
    """Return ``x`` with ``dims`` whole on every rank. Collective over the mesh dims that shard them."""
    return base_in(x, unsharded(x.sharding, dims)) if any(d in x.sharding.shard_dims for d in dims) else x


def base_in(x: ShardTensor, layout: Layout) -> ShardTensor:
    """Return ``x`` in ``layout``, to take a view of. Collective where it differs."""
    if layout is x.sharding:
        return x
    lost = [d for d in x.sharding.shard_dims if d not in layout.shard_dims]
    if all(trivially_sharded(x.sharding, d) for d in lost):
        return viewed(x, x.block, layout, x._trail, view=(), steps=True)
    if lost:
        notice_gather(x.mesh, x.sharding, layout, x.block.itemsize)
    out = moved(x, layout)
    if out.block is not x.block:
        out._gathered_view, out._trail, out._origin = True, trail_of(x), origin(x, ())
    return out


def viewed(
    x: ShardTensor,
    local: Tensor,
    layout: Layout,
    trail: Trail | None,
    *,
    view: View | None = None,
    steps: bool = False,
) -> ShardTensor:
    """Return a view of ``x``: a view of its block in another layout. Not collective.

    Parameters
    ----------
    x, local, layout
        The tensor, the view of its block, and the layout of the result.
    trail
        That of the view (`mpishard.tensor.strides`); ``x._trail`` where it has the shape and the strides of ``x``.
    view
        The method of tensors, or ``"[]"`` for indexing, and its arguments, as a tuple; where not given, the last of
        the trail. An empty one is the tensor itself in another layout, or a view that is not written through.
    steps
        Whether cells which are neighbours along a whole dim stay as far apart in memory, on all ranks.
    """
    out = wrap(local, layout, x.mesh)
    if steps and x._halo is not None:
        out._halo = x._halo
    if x._gathered_view:
        if view is None:
            view = () if trail is None or trail is x._trail else trail[-1]
        out._gathered_view, out._origin = True, origin(x, view)
    if trail is not None:
        out._trail = trail
    return out


def origin(x: ShardTensor, view: View) -> tuple[ShardTensor, View]:
    """Return what a view of ``x`` was taken from, and how: not from what was itself only gathered for it.

    Not collective.
    """
    return (x if x._origin is None or x._origin[1] else x._origin[0]), view


def plain(x: Any) -> Any:
    """Return an argument with whole plain tensors in place of ShardTensors. Collective where they are sharded."""
    if isinstance(x, ShardTensor):
        return whole_along(resolved(x), tuple(range(x.ndim))).block
    return type(x)(map(plain, x)) if isinstance(x, (tuple, list)) else x


def settled(x: ShardTensor) -> ShardTensor:
    """Return ``x`` itself with its Partial dims summed, so that views of it share its memory.

    Collective over the Partial dims.
    """
    if x.sharding.partial_dims:
        # under no_grad too: what x holds from now on must keep its graph
        with torch.enable_grad():
            total = resolved(x)
        if x.block.retains_grad and not x.block.is_leaf:  # also of what may be written into it
            total.block.retain_grad()
        rebind(x, total.block, total.sharding)
    return x


def trivially_sharded(layout: Layout, dim: int) -> bool:
    """Tell whether ``dim`` is sharded into one block only. Not collective."""
    sizes = layout.sizes[dim]
    return sizes is not None and len(sizes) == 1


def frozen(value: Any, ndim: int) -> Any:
    """Return an argument as part of a key, in which a number is one per dim. Not collective."""
    if type(value) is int:  # the usual cases first
        return (value,) * ndim
    if type(value) is tuple:
        return value
    if isinstance(value, (tuple, list)):
        return tuple(value)
    return (value,) * ndim if isinstance(value, (int, float, Integral)) else value


def number_key(value: Any) -> Any:
    """Return a number as part of a key, where NaN is itself and zeros have signs. Not collective."""
    if type(value) in (int, float):  # the usual cases first
        return value if value and value == value else repr(float(value))
    if isinstance(value, Real):
        return number_key(int(value) if isinstance(value, Integral) else float(value))
    return repr(complex(value)) if isinstance(value, Number) else value  # type: ignore[call-overload]


def on_domain(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Return what a function of torch gives of whole tensors without data: its shape and dtype, or its error.

    Not collective. It is no part of a rank's work: modes that count operations and memory do not see it.

    Parameters
    ----------
    function, args, named
        What is called. Each tensor, sharded or not, is replaced by one of its global shape on the ``meta`` device.
    """
    with unseen():
        return function(*map(without_data, args), **named)


def require_dtype(x: Tensor, function: Callable[[Tensor], Any]) -> None:
    """Raise what ``function``, of a vector of two cells, raises of the dtype of ``x``: a rule may not need its kernel.

    Not collective.
    """
    refusal = _refusal(function, x.dtype, x.device, False)
    if refusal is not None:
        raise type(refusal)(*refusal.args)


def require_complex_derivative(function: Callable[[Tensor], Any], *operands: Any) -> None:
    """Raise what ``function``, of a vector of two cells, raises of complex numbers that have a gradient.

    Not collective. Some functions of torch have no derivative for these, and the rule's own steps have.
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors) and any(x.is_complex() for x in tensors):
        dtype = next(x.dtype for x in tensors if x.is_complex())
        refusal = _refusal(function, dtype, torch.device("cpu"), True)
        if refusal is not None:
            raise type(refusal)(*refusal.args)


@remembered
def _refusal(
    function: Callable[[Tensor], Any], dtype: torch.dtype, device: torch.device, graded: bool
) -> Exception | None:
    try:
        with torch.set_grad_enabled(graded):
            function(torch.zeros(2, dtype=dtype, device=device, requires_grad=graded))
    except RuntimeError as e:  # NotImplementedError is one
        return e.with_traceback(None)
    return None


def integer(number: Any) -> int:
    """Return an argument that is one int, as torch takes it: of no truths, of tensors of one cell. Not collective."""
    if number.__class__ is int:
        return number  # type: ignore[no-any-return]
    if isinstance(number, bool) or (isinstance(number, Tensor) and number.dtype is torch.bool):
        raise TypeError(f"must be int, not {type(number).__name__}")
    return operator.index(number)


def strict_int(number: Any) -> int:
    """Return an int that may be no size, as that of a dim: of no arrays or tensors with dims either. Not collective."""
    if number.__class__ is int:
        return number  # type: ignore[no-any-return]
    if isinstance(number, np.ndarray) or (isinstance(number, Tensor) and number.ndim):
        raise TypeError(f"must be int, not {type(number).__name__}")
    return integer(number)


def real(number: Any) -> float:
    """Return an argument that is one float, or raise what torch does: kernels see it on ranks with cells alone.

    Not collective.
    """
    if number.__class__ is float:
        return number  # type: ignore[no-any-return]
    torch.layer_norm(torch.zeros(1, device="cpu"), (1,), None, None, number)
    return float(number)


def int_list(given: Any) -> tuple[int, ...]:
    """Return the numbers of an argument that torch takes as a tuple or a list alone. Not collective."""
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"must be tuple of ints, not {type(given).__name__}")
    return ints((given,))


def ints(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the numbers of a ``*sizes`` argument, which may be one tuple or list. Not collective."""
    if not given:
        raise TypeError("must be tuple of ints, and none is given")
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    if given and given[0].__class__ is bool:  # of others torch takes it
        raise TypeError("must be tuple of ints, but found element of type bool at pos 0")
    return tuple(map(operator.index, given))


@remembered
def without(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """Return ``layout`` without some whole dims. Not collective."""
    return mapped(layout, tuple(d for d in range(layout.ndim) if d not in dims))


def gathered(x: Any) -> Any:
    """Return a ShardTensor whole on every rank, anything else as it is. Collective where it is sharded."""
    return whole_along(resolved(x), tuple(range(x.ndim))) if isinstance(x, ShardTensor) else x


def other_device(x: ShardTensor, device: Any) -> UnsupportedOperationError:
    """Return the error for a tensor on another device than its mesh's. Not collective."""
    return UnsupportedOperationError(
        "moving a ShardTensor to another device",
        expected=f"the device of its block, {x.block.device}",
        got=device,
        fix="make the mesh with device=..., or move x.to_local() or x.full_tensor()",
    )
