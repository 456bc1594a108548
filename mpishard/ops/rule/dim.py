"""Tensor dims of a layout: numbering, reordering, and making them whole."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache, wraps
from numbers import Integral, Number, Real
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd.graph import unseen
from mpishard.autograd.linear import Step, apply, pair, same
from mpishard.comm.memory.buffer import bare
from mpishard.errors import UnsupportedOperationError
from mpishard.layout import Layout, Replicate, Shard, layout_of
from mpishard.tensor.notice import notice_gather
from mpishard.tensor.operand import moved, resolved
from mpishard.tensor.refusal import without_data
from mpishard.tensor.shard_tensor import ShardTensor, rebind, wrap
from mpishard.tensor.strides import Trail, trail_of

CACHED = 65536
R = TypeVar("R", bound=Callable[..., Any])


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


@lru_cache(maxsize=CACHED)
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


@lru_cache(maxsize=CACHED)
def resized(layout: Layout, dim: int, extent: int, sizes: tuple[int, ...] | None = None) -> Layout:
    """Return ``layout`` with another extent of ``dim``; ``sizes`` where it is sharded. Not collective."""
    shape = (*layout.shape[:dim], extent, *layout.shape[dim + 1 :])
    cut = (*layout.sizes[:dim], sizes, *layout.sizes[dim + 1 :])
    return layout_of(layout.mesh_shape, layout.placements, shape, cut)


@lru_cache(maxsize=CACHED)
def unsharded(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """Return ``layout`` with ``dims`` whole on every rank. Not collective."""
    placements = [Replicate() if type(p) is Shard and p.dim in dims else p for p in layout.placements]
    return layout_of(
        layout.mesh_shape, placements, layout.shape, [None if d in dims else s for d, s in enumerate(layout.sizes)]
    )


@lru_cache(maxsize=CACHED)
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
        return viewed(x, x.block, layout, x._trail, steps=True)
    if lost:
        notice_gather(x.mesh, x.sharding, layout, x.block.itemsize)
    out = moved(x, layout)
    if out.block is not x.block:
        out._gathered_view, out._trail = True, trail_of(x)
    return out


def viewed(x: ShardTensor, local: Tensor, layout: Layout, trail: Trail | None, *, steps: bool = False) -> ShardTensor:
    """Return a view of ``x``: a view of its block in another layout. Not collective.

    Parameters
    ----------
    x, local, layout
        The tensor, the view of its block, and the layout of the result.
    trail
        That of the view (`mpishard.tensor.strides`); ``x._trail`` where it has the shape and the strides of ``x``.
    steps
        Whether cells which are neighbours along a whole dim stay as far apart in memory, on all ranks.
    """
    out = wrap(local, layout, x.mesh)
    if steps and x._halo is not None:
        out._halo = x._halo
    if x._gathered_view:
        out._gathered_view = True
    if trail is not None:
        out._trail = trail
    return out


def plain(x: Any) -> Any:
    """Return an argument with whole plain tensors in place of ShardTensors. Collective where they are sharded."""
    if isinstance(x, ShardTensor):
        return whole_along(resolved(x), tuple(range(x.ndim))).block
    return type(x)(map(plain, x)) if isinstance(x, (tuple, list)) else x


def into_plain(func: Any) -> Callable[[R], R]:
    """Decorate the rule of an in-place function.

    A plain tensor is the same on every rank, so what is written into it, and what says where, are gathered.
    Collective where they are sharded.
    """

    def decorate(rule: R) -> R:
        @wraps(rule)
        def either(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, ShardTensor):
                return rule(self, *args, **kwargs)
            return func(self, *map(plain, args), **{k: plain(a) for k, a in kwargs.items()})

        return either  # type: ignore[return-value]

    return decorate


def require_writable(x: ShardTensor, name: str) -> None:
    """Refuse to write into what is a view in torch and a copy here. Not collective.

    Raises
    ------
    UnsupportedOperationError
        It is one.
    """
    if x._gathered_view:
        raise UnsupportedOperationError(
            f"{name}: writing into a view whose cells came from other ranks would not reach them",
            expected="a view of cells that stayed on their rank",
            got="a view that selects from, drops or gathers a sharded dim",
            fix="write through the tensor itself, x[index] = value, or into a copy, y = view.clone()",
        )


class AsIndex(NamedTuple):
    """A gathered view that was taken at a basic index."""

    index: Any

    def taken(self, base: ShardTensor) -> Any:
        """Return the view as it would be taken now. Collective as indexing is."""
        return base[self.index]

    def put(self, base: ShardTensor, value: ShardTensor) -> None:
        """Write where the view was taken. Collective as the writing is."""
        base[self.index] = value


class AsShape(NamedTuple):
    """A gathered view that has another shape."""

    shape: tuple[int, ...]

    def taken(self, base: ShardTensor) -> Any:
        """Return the view as it would be taken now. Collective as `view` is."""
        return base.view(self.shape)

    def put(self, base: ShardTensor, value: ShardTensor) -> None:
        """Write where the view was taken. Collective as `view` is."""
        base.copy_(value.view(base.shape))


class AsDiagonal(NamedTuple):
    """A gathered view of a diagonal."""

    offset: int
    dim1: int
    dim2: int

    def taken(self, base: ShardTensor) -> Any:
        """Return the view as it would be taken now. Collective: its plane is gathered."""
        return base.diagonal(*self)

    def put(self, base: ShardTensor, value: ShardTensor) -> None:
        """Write where the view was taken. Collective: its plane is gathered."""
        base.copy_(torch.diagonal_scatter(base, value, *self))


def written_through(x: ShardTensor, write: Callable[[ShardTensor], Any]) -> bool:
    """Write into a gathered view and, as torch does, into the tensor that it was taken from.

    Collective where the writing is.

    Returns
    -------
    bool
        Whether that was possible. It is not for views of other kinds.
    """
    if x._origin is None:
        return False
    base, way = x._origin
    y: Any = _fresh(x).clone()
    write(y)
    way.put(base, y)
    block = y.block
    if x.block.requires_grad and not torch.is_grad_enabled() and y.sharding == x.sharding:
        # the graph goes on, as that of torch's own view does, as if nothing had been written
        with torch.enable_grad():
            block = apply(_replacing(block), x.block)
    x.block, x.sharding, x._root, x._halo = block, y.sharding, None, None
    return True


def _replacing(values: Tensor) -> Step:
    """Return the step whose result is ``values``, whatever it is given, and whose adjoint moves nothing."""
    step = Step(lambda _: values)
    step.adjoint = pair(same, same)
    return step


def _fresh(x: ShardTensor) -> ShardTensor:
    """Return a gathered view as it would be taken now. Collective as indexing is."""
    if x._origin is None:
        return x
    base, way = x._origin
    return way.taken(_fresh(base))  # type: ignore[no-any-return]


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


def put_into(x: ShardTensor, result: Tensor) -> ShardTensor:
    """Write a result into ``x``, as an in-place function does. Collective where they are laid out differently.

    Raises
    ------
    RuntimeError
        Torch would not write numbers of the result's dtype there.
    """
    if not torch.can_cast(result.dtype, x.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {x.dtype}")
    return x.copy_(result)  # type: ignore[return-value]


def prepare_write(x: ShardTensor) -> None:
    """Sum the Partial dims of ``x``, which is about to be written into. Collective over them.

    Raises
    ------
    RuntimeError
        It is a leaf, and autograd is on.
    UnsupportedOperationError
        It is memory of a host program that may not be written.
    """
    settled(x)
    if x._halo is not None and not x._halo.writable:
        raise UnsupportedOperationError(
            f"field {x._halo.name!r} is read-only",
            expected="a tensor that may be written",
            got="a field made with writable=False",
            fix="write into a copy, u.tensor.clone()",
        )
    if x._root is not None and x.is_leaf and torch.is_grad_enabled():
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


def beside(written: Tensor, x: Any) -> Any:
    """Return an operand's block, or a copy where it lies in part of what is written into. Not collective.

    Torch refuses that, on those ranks alone whose blocks lie so.
    """
    if x is written or not isinstance(x, Tensor) or not shares_memory(x, written):
        return x
    own, into = bare(x), bare(written)
    # by offsets: a compiler's tensors have no address
    starts = [t.storage_offset() * t.itemsize for t in (own, into)]
    same = starts[0] == starts[1] and own.shape == into.shape and own.stride() == into.stride()
    return x if same else x.clone()


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Tell whether two blocks lie in one storage, which is so without cells, too. Not collective."""
    return bare(x).untyped_storage()._cdata == bare(y).untyped_storage()._cdata


def kept(x: ShardTensor) -> ShardTensor:
    """Return what a function reads whose result is written into ``x``: a copy where its derivative reads it again.

    Not collective.
    """
    return x.clone() if torch.is_grad_enabled() and x.requires_grad else x  # type: ignore[return-value]


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


@lru_cache(maxsize=CACHED)
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


@lru_cache(maxsize=CACHED)
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
