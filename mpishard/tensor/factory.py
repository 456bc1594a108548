"""New ShardTensors: no rank ever holds more than its own block, and random ones do not depend on the mesh."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mpishard.autograd.argument import require, require_mesh, together
from mpishard.autograd.graph import recorded
from mpishard.comm.device_mesh import names_of_dtensor
from mpishard.comm.halo.exchanger import Width
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError
from mpishard.layout import Layout, Replicate, layout_of
from mpishard.tensor.resident import Widths, resident, room
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.stream import Fill, draw_seed, drawn_into, normal, uniform

F = TypeVar("F", bound=Callable[..., Any])
Sizes = Mapping[int, Sequence[int]]
Ghost = Width | Mapping[int, Width]


def asked(placements: Any, sizes: Sizes | None = None) -> tuple[Any, ...]:
    """Return arguments that say how to shard as a key, the same where ranks mean the same. Not collective."""
    try:
        told = tuple(map(repr, placements))
    except TypeError:
        told = (repr(placements),)
    if sizes is None:
        return told, None
    try:
        # dims as text, as 0.0 must not find what 0 made
        return told, tuple(sorted((str(d), _integers(tuple(s))) for d, s in sizes.items()))
    except (AttributeError, TypeError):
        # `check_sizes` says what is wrong, where all ranks hear of it
        return told, repr(sizes)


def check_sizes(sizes: Any) -> None:
    """Raise where block sizes are of a wrong kind. Not collective."""
    if sizes is not None:
        require("sizes of blocks", "sizes", sizes, Mapping, "give {tensor_dim: one size per block}")
        for each in sizes.values():
            require("sizes of blocks", "sizes", each, Iterable, "give {tensor_dim: one size per block}")


def new_layout(
    name: str, mesh: CartMesh, placements: Any, shape: Sequence[int], sizes: Sizes | None, multiple: int = 1
) -> Layout:
    """Return the layout of a tensor whose cells are known, so that none is a contribution. Not collective."""
    check_sizes(sizes)
    layout = layout_of(mesh.shape, placements, shape, sizes, multiple)
    if layout.partial_dims:
        raise LayoutError(
            f"{name}: Partial placements",
            expected="Shard and Replicate",
            got=list(layout.placements),
            fix="use ShardTensor.from_local, which says what each rank contributes",
        )
    return layout


def given_placements(name: str, placements: Any, mesh: CartMesh) -> Any:
    """Return the placements, `Replicate` where none are given. Not collective."""
    require_mesh(name, mesh)
    return (Replicate(),) * mesh.ndim if placements is None else placements


def _called_as_dtensor(function: F) -> F:
    """Let a factory be called as DTensor's is, with ``device_mesh`` and a memory layout. Not collective."""
    named = names_of_dtensor(function)

    @wraps(function)
    def call(*args: Any, layout: torch.layout = torch.strided, **kwargs: Any) -> Any:
        if layout is not torch.strided:
            mesh: Any = kwargs.get("mesh", kwargs.get("device_mesh"))
            require_mesh(function.__name__, mesh)
            with together(function.__name__, mesh):
                raise LayoutError(
                    f"{function.__name__}: layout= is of another kind",
                    expected="torch.strided",
                    got=layout,
                    fix="leave it out: shards are dense",
                )
        return named(*args, **kwargs)

    return cast(F, call)


def _integers(shape: tuple[Any, ...]) -> tuple[int, ...] | str:
    """Return the integers that are given one by one or as one sequence; of other things their text. Not collective."""
    try:
        if len(shape) == 1 and not isinstance(shape[0], (int, Integral)):
            shape = tuple(shape[0])
        return tuple(map(operator.index, shape))
    except TypeError:
        return ", ".join(map(repr, shape))


def _extents(name: str, given: tuple[int, ...] | str) -> tuple[int, ...]:
    """Return what `_integers` found, if they are extents. Not collective."""
    if isinstance(given, str) or min(given, default=0) < 0:
        raise LayoutError(
            f"{name}: no global shape",
            expected="integers >= 0, or one sequence of them",
            got=given,
            fix="give the extents of the whole tensor",
        )
    return given


def _make(
    name: str,
    shape: tuple[Any, ...],
    mesh: CartMesh,
    placements: Any,
    sizes: Sizes | None,
    dtype: torch.dtype | None,
    requires_grad: bool,
    make: Callable[[Layout, torch.dtype], Tensor],
    ghost: Ghost | None = None,
) -> ShardTensor:
    placements = given_placements(name, placements, mesh)
    dtype, given = dtype or torch.get_default_dtype(), _integers(shape)
    key = (name, given, *asked(placements, sizes), dtype)

    def planned() -> Layout:
        return new_layout(name, mesh, placements, _extents(name, given), sizes)

    if ghost is None:
        layout = mesh.plan(key, planned)
        return wrap(recorded(make(layout, dtype), requires_grad), layout, mesh)

    def with_room() -> tuple[Layout, dict[int, Widths]]:
        layout = planned()
        return layout, room(name, mesh, layout, ghost)

    layout, widths = mesh.plan((*key, str(ghost)), with_room)
    block = make(layout, dtype)
    local_shape = list(block.shape)
    for d, along in widths.items():
        local_shape[d] += sum(along[layout.index(d, mesh.coords)])
    x = resident(mesh, layout, widths, block.new_zeros(local_shape))
    recorded(x.block.copy_(block), requires_grad)
    return x


def _constant(name: str, value: Any, ghost: Ghost | None, shape: Any, mesh: CartMesh, *rest: Any) -> ShardTensor:
    def make(layout: Layout, dtype: torch.dtype) -> Tensor:
        return torch.full(layout.local_shape(mesh.coords), value, dtype=dtype, device=mesh.device)

    return _make(name, shape, mesh, *rest, make, ghost)  # type: ignore[call-arg]


@_called_as_dtensor
def zeros(
    *shape: Any,
    mesh: CartMesh,
    placements: Any = None,
    sizes: Sizes | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    ghost: Ghost | None = None,
) -> ShardTensor:
    """Return a tensor of zeros.

    Not collective (arguments are compared across ranks the first time that they occur).

    Parameters
    ----------
    *shape
        Global shape, as numbers or as one sequence.
    mesh, placements
        Where and how it is sharded; replicated where placements are not given.
    sizes
        Tensor dim -> block sizes; balanced where not given.
    dtype, requires_grad
        As of the torch function.
    ghost
        Width of a halo in the tensor's own storage, an int or (lo, hi) for all sharded dims, or tensor dim -> width.
        Convolutions then refresh its strips in place and read it there: a loop over time steps copies no block.

    Returns
    -------
    ShardTensor

    Examples
    --------
    >>> x = ms.zeros(1, 8, 512, 512, mesh=mesh, placements=(ms.Shard(2), ms.Shard(3)))
    """
    return _constant("zeros", 0, ghost, shape, mesh, placements, sizes, dtype, requires_grad)


@_called_as_dtensor
def ones(
    *shape: Any,
    mesh: CartMesh,
    placements: Any = None,
    sizes: Sizes | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    ghost: Ghost | None = None,
) -> ShardTensor:
    """Return a tensor of ones; parameters as of `zeros`. Not collective."""
    return _constant("ones", 1, ghost, shape, mesh, placements, sizes, dtype, requires_grad)


@_called_as_dtensor
def full(
    shape: Sequence[int],
    fill_value: Any,
    *,
    mesh: CartMesh,
    placements: Any = None,
    sizes: Sizes | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    ghost: Ghost | None = None,
) -> ShardTensor:
    """Return a tensor of one value; other parameters as of `zeros`. Not collective."""
    require_mesh("full", mesh)
    with together("full", mesh):
        dtype = dtype or torch.full((), fill_value, device="cpu").dtype
    return _constant("full", fill_value, ghost, (shape,), mesh, placements, sizes, dtype, requires_grad)


@_called_as_dtensor
def empty(
    *shape: Any,
    mesh: CartMesh,
    placements: Any = None,
    sizes: Sizes | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    ghost: Ghost | None = None,
) -> ShardTensor:
    """Return a tensor whose cells are not set; parameters as of `zeros`. Not collective."""

    def make(layout: Layout, dtype: torch.dtype) -> Tensor:
        return torch.empty(layout.local_shape(mesh.coords), dtype=dtype, device=mesh.device)

    return _make("empty", shape, mesh, placements, sizes, dtype, requires_grad, make, ghost)


def _random(
    name: str, fill: Callable[[torch.dtype], Fill], shape: Any, mesh: CartMesh, generator: Any, *rest: Any
) -> ShardTensor:
    require_mesh(name, mesh)
    if generator is not None and not isinstance(generator, torch.Generator):
        with together(name, mesh):
            require(name, "generator", generator, torch.Generator, "give a torch.Generator, or leave it out")

    def make(layout: Layout, dtype: torch.dtype) -> Tensor:
        drawn = fill(dtype)  # refuses a dtype, before ranks communicate
        local = torch.empty(layout.local_shape(mesh.coords), dtype=dtype, device="cpu")
        return drawn_into(local, layout, mesh.coords, draw_seed(mesh, generator), drawn).to(mesh.device)

    return _make(name, shape, mesh, *rest, make)  # type: ignore[call-arg]


@_called_as_dtensor
def rand(
    *shape: Any,
    mesh: CartMesh,
    placements: Any = None,
    sizes: Sizes | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> ShardTensor:
    """Return uniform random numbers in [0, 1): the same global tensor on every mesh.

    Collective: the seed is one draw of rank 0 from ``generator`` (torch's default CPU generator if not given).
    Other parameters as of `zeros`.

    Examples
    --------
    >>> torch.manual_seed(0)
    >>> x = ms.rand(8, 512, mesh=mesh, placements=(ms.Shard(1),))
    """
    return _random("rand", uniform, shape, mesh, generator, placements, sizes, dtype, requires_grad)


@_called_as_dtensor
def randn(
    *shape: Any,
    mesh: CartMesh,
    placements: Any = None,
    sizes: Sizes | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> ShardTensor:
    """Return standard normal numbers: the same global tensor on every mesh; as `rand`. Collective."""
    return _random("randn", normal, shape, mesh, generator, placements, sizes, dtype, requires_grad)


@_called_as_dtensor
def arange(
    start: Any,
    end: Any = None,
    step: Any = 1,
    *,
    mesh: CartMesh,
    placements: Any = None,
    sizes: Sizes | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """Return evenly spaced numbers from ``start`` to below ``end``; other parameters as of `zeros`. Not collective."""
    require_mesh("arange", mesh)
    if end is None:
        start, end = 0, start
    start, end, step = (v.item() if hasattr(v, "item") else v for v in (start, end, step))
    whole = all(isinstance(v, (int, Integral)) for v in (start, end, step))
    dtype = dtype or (torch.int64 if whole else torch.get_default_dtype())
    with together("arange", mesh):
        n = _length(start, end, step, dtype)
    if not dtype.is_floating_point:
        start, step = int(start), int(step)

    def make(layout: Layout, dtype: torch.dtype) -> Tensor:
        lo, hi = layout.interval(0, mesh.coords)
        exact = torch.int64 if all(isinstance(v, int) for v in (start, step)) else torch.float64
        return (torch.arange(lo, hi, device=mesh.device, dtype=exact) * step + start).to(dtype)

    return _make("arange", (n,), mesh, placements, sizes, dtype, requires_grad, make)


def _length(start: Any, end: Any, step: Any, dtype: torch.dtype) -> int:
    """Return how many numbers a range has; torch's own error where it refuses it. Not collective."""
    if all(isinstance(v, Real) and math.isfinite(v) for v in (start, end, step)):
        span, by = (int(end) - int(start), int(step)) if dtype == torch.int64 else (end - start, step)
        if by and (end - start) * step >= 0:
            return -(-span // by) if isinstance(span, int) and isinstance(by, int) else math.ceil(span / by)
    # nothing is allocated: it raises
    return len(torch.arange(start, end, step, dtype=dtype, device="cpu"))
