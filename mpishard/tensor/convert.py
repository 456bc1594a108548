"""Plain tensors to ShardTensors and back: from_local, distribute, gather, redistribute, rebalance."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd import redistribute as autograd
from mpishard.autograd import window
from mpishard.autograd.argument import is_plain, require, together, whole_number
from mpishard.autograd.linear import in_transform
from mpishard.autograd.plain import given_layout, taken
from mpishard.comm import guard
from mpishard.comm.device_mesh import names_of_dtensor
from mpishard.comm.halo.exchanger import Width
from mpishard.comm.interruption import whole
from mpishard.comm.mesh import CartMesh
from mpishard.comm.mesh_argument import two_meshes
from mpishard.errors import LayoutError, MpishardError
from mpishard.layout import FEW, Layout, as_placements, by_dim, layout_of, weighted
from mpishard.tensor.dtensor import (
    as_first_rank_has,
    check_dtypes,
    check_same_values,
    mesh_and_placements,
    source_rank,
    unfit,
    with_grad_placements,
)
from mpishard.tensor.factory import asked, check_sizes, given_placements
from mpishard.tensor.foreign import shared
from mpishard.tensor.infer import inferred, told, unknown
from mpishard.tensor.operand import moved, replicated_layout, resolved
from mpishard.tensor.scatter import scattered
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.strides import gapped_trail, lent_trail


@names_of_dtensor
@whole
def from_local(
    local: Tensor,
    mesh: CartMesh,
    placements: Any = None,
    sharding_shapes: str | Mapping[int, Sequence[int]] = "infer",
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Any = None,
) -> ShardTensor:
    """Make a ShardTensor of the blocks that the ranks hold; no copy, differentiable.

    Collective with ``"infer"``, else not collective (what the ranks say is compared the first time that it occurs).

    Parameters
    ----------
    local
        This rank's block: a tensor, or an array of numpy, cupy or another library that speaks DLPack.
    mesh
        Mesh that the tensor is spread over.
    placements
        One placement per mesh dim; `Replicate` where not given.
    sharding_shapes
        ``"infer"``: block sizes are gathered and checked; ``"chunk"``: every rank's block has the size of this
        one; or the sizes, as ``{mesh_dim: sizes along it}`` (where several mesh dims shard one
        tensor dim: one size per rank, under the first of them).
    run_check
        Whether blocks along `Replicate` dims become those of the first rank, in place (collective).
    shape, stride
        The global ones; they need not be given, and must be those that the blocks have.
    grad_placements
        How the cotangent reaches ``local``, one placement per mesh dim: ``Partial()`` over a `Replicate` dim makes it
        parts of a sum. None: as it is of the tensor, whole on every rank of such a dim.

    Returns
    -------
    ShardTensor

    Raises
    ------
    LayoutError
        Placements that do not fit, or local shapes, dtypes or ``requires_grad`` that disagree.
    UnsupportedDtypeError, UnsupportedOperationError
        Torch cannot share the memory of the array: it is read-only, runs backwards, or has no type of torch's.

    Examples
    --------
    >>> x = ms.ShardTensor.from_local(block, mesh, (ms.Shard(2), ms.Replicate()))
    """
    placements = given_placements("from_local", placements, mesh)

    def misfit(layout: Layout) -> MpishardError | None:
        return unfit(layout, shape, stride, grad_placements)

    is_text = isinstance(sharding_shapes, str)
    if not isinstance(sharding_shapes, Mapping) and not (is_text and sharding_shapes == "chunk"):
        error: MpishardError | None = None
        try:
            if not is_text or sharding_shapes != "infer":
                raise unknown(sharding_shapes)
            local = shared("from_local", local, mesh)
        except MpishardError as e:
            error = e
        layout, gapped = inferred(local, mesh, placements, error, misfit)
    else:
        gapped = False
        local, layout = told(local, mesh, placements, sharding_shapes, misfit)
    if 1 in local.shape and local.is_contiguous() and not local.requires_grad:
        # steps that do not count, of a row in a larger array, would tell this rank alone of gaps
        local = local.view(local.shape)
    if local._is_view() and not (local.requires_grad or in_transform()):
        # torch follows writes into views of a view in other ways, and on this rank alone if others have none
        local = local.detach()
    if run_check:
        as_first_rank_has(local, layout, mesh)
    x = ShardTensor(local, layout, mesh)
    if gapped:
        x._trail = gapped_trail(x)
    elif not local.is_contiguous():
        x._trail = lent_trail(x)
    return x if grad_placements is None else with_grad_placements(x, local, grad_placements)


@names_of_dtensor
@whole
def distribute_tensor(
    tensor: Tensor,
    mesh: CartMesh,
    placements: Any = None,
    *,
    sizes: Mapping[int, Sequence[int]] | None = None,
    multiple: int = 1,
    src_data_rank: int | None = None,
) -> ShardTensor:
    """Shard a tensor that every rank holds: each takes its block.

    Not collective (shapes are compared across ranks the first time that one occurs, with ``MPISHARD_DEBUG=1`` values,
    too), unless ``src_data_rank`` is given.

    Parameters
    ----------
    tensor
        The same full tensor (or array, as of `from_local`) on every rank; or a ShardTensor on ``mesh``, which is
        redistributed (collective).
    mesh, placements
        Where and how to shard it.
    sizes
        Tensor dim -> block sizes; balanced where not given.
    multiple
        Of which the borders between balanced blocks are multiples: give a network's total stride, and every
        strided convolution of it works on whole blocks.
    src_data_rank
        DTensor's: whose tensor it is that all get blocks of, by its coordinate along every mesh dim; the others' must
        have its shape and dtype. Then the result is a leaf. None: all hold the same.

    Returns
    -------
    ShardTensor
        A copy of the block, so that the full tensor can be freed; differentiable, with the gradient of the full
        tensor on every rank.

    Raises
    ------
    LayoutError, UnsupportedOperationError
        Placements or sizes do not fit, or it is no tensor; with ``src_data_rank``, on every rank.
    DesyncError
        Shapes, dtypes or arguments differ between ranks.

    Notes
    -----
    Adjoint: all-gather.

    Examples
    --------
    >>> x = ms.distribute_tensor(full, mesh, (ms.Shard(2), ms.Shard(3)))
    """
    placements = given_placements("distribute_tensor", placements, mesh)
    if isinstance(tensor, ShardTensor):
        if tensor.mesh is not mesh:
            with together("distribute_tensor", mesh):
                raise two_meshes(tensor.mesh, mesh)
        if sizes is None and multiple == 1:
            return redistribute(tensor, placements)
    elif src_data_rank is not None:

        def ours() -> tuple[Tensor, int, bool, tuple[Any, ...]]:
            own = shared("distribute_tensor", tensor, mesh)
            src = source_rank(mesh, whole_number("distribute_tensor", "src_data_rank", src_data_rank))
            return own.detach().to(mesh.device), src, own.requires_grad, (tuple(own.shape), own.dtype)

        return scattered("distribute_tensor", ours, mesh, placements, sizes, multiple)
    elif not is_plain(tensor) or (tensor.is_meta and mesh.device.type != "meta"):
        with together("distribute_tensor", mesh):
            tensor = shared("distribute_tensor", tensor, mesh)
    key = ("distribute_tensor", tuple(tensor.shape), tensor.dtype, *asked(placements, sizes), multiple)

    def cut() -> Layout:
        check_sizes(sizes)
        return layout_of(mesh.shape, placements, tensor.shape, sizes, multiple)

    layout = mesh.plan(key, cut)
    if isinstance(tensor, ShardTensor):
        return moved(tensor, layout)
    if guard.DEBUG:
        check_same_values(tensor, mesh)
    whole = replicated_layout(mesh, tensor.shape)
    local = autograd.redistribute(tensor.to(mesh.device), mesh, whole, layout)
    if local is tensor:
        local = tensor.clone()
    return wrap(local, layout, mesh)


@whole
def full_tensor(x: ShardTensor, *, grad_placements: Any = None) -> Tensor:
    """Return the whole tensor on every rank: a plain tensor, differentiable.

    Collective.

    Parameters
    ----------
    x
        Any ShardTensor.
    grad_placements
        What the cotangent of the result is, one placement per mesh dim: ``Replicate()`` where all ranks find the same,
        ``Partial()`` where each finds a part of a sum, because it goes on with data of its own. None: as in the notes.

    Raises
    ------
    LayoutError
        ``grad_placements`` do not fit.
    DesyncError
        They differ between ranks (found when they are new); in the backward pass: cotangents differ between ranks that
        must be the same.

    Notes
    -----
    Adjoint: each rank keeps its block of the cotangent, which is the same on every rank; or (`Partial`) of the sum of
    the ranks' cotangents, a reduce-scatter. Where ``grad_placements`` are not given, it is a sum over the mesh dims
    that shard the ShardTensor which the result becomes part of (``ShardTensor.from_local``), or over which it is
    reduced (`all_reduce` and its kin); over others the cotangents are compared, and ranks that differ raise. Where the
    result is used in both ways, take one for each: one that meets ShardTensors too raises, and one that a plain loss
    uses too has a gradient that counts the second use on every rank.

    Examples
    --------
    >>> nearest = torch.cdist(x.to_local(), y.full_tensor(grad_placements=[ms.Partial()])).amin(1)
    """
    x = resolved(x)
    mesh, layout = x.mesh, x.sharding
    shown = replicated_layout(mesh, layout.shape)
    recorded = x.block.requires_grad and torch.is_grad_enabled()
    given = None

    def cotangent() -> tuple[Layout | None]:
        if grad_placements is None:
            return (None,)
        return (given_layout("full_tensor", shown, as_placements(grad_placements, mesh.ndim, layout.ndim)),)

    # what the backward pass sends depends on it: where ranks meet, they must mean the same
    if grad_placements is not None or (recorded and layout.sharded_mesh_dims):
        key = ("full_tensor", layout, None if grad_placements is None else asked(grad_placements))
        (given,) = mesh.plan(key, cotangent)
    return taken(x.block, mesh, layout, shown, given) if recorded else moved(x, shown).block


@whole
def redistribute(
    x: ShardTensor,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    async_op: bool = False,  # noqa: ARG001
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> ShardTensor:
    """Return ``x`` with other placements.

    Collective.

    Parameters
    ----------
    x
        Any ShardTensor.
    device_mesh
        DTensor's: the mesh of ``x``, or left out; placements alone may take its place.
    placements
        One per mesh dim. A dim that keeps its mesh dims keeps its block sizes; others are balanced.
    async_op, forward_dtype, backward_dtype
        DTensor's. The result is there when the call returns, also where ``async_op`` allows that it comes later;
        what travels keeps its dtype, and another one is refused.

    Raises
    ------
    LayoutError
        No placements, placements that do not fit, another mesh or another dtype.

    Notes
    -----
    Adjoint: the redistribution back (all-reduce <-> identity, all-gather <-> slice, as in design of DTensor).

    Examples
    --------
    >>> y = x.redistribute(placements=(ms.Shard(1), ms.Replicate()))
    """
    with together("redistribute", x.mesh):
        placements = mesh_and_placements(x, device_mesh, placements)
        check_dtypes(x, forward_dtype, backward_dtype)
    layout = x.sharding
    key = ("placements", layout, *asked(placements))
    return moved(x, x.mesh.plan(key, lambda: layout.with_placements(placements)))


@whole
def rebalance(x: ShardTensor, weights_or_sizes: Any = None) -> ShardTensor:
    """Return ``x`` with other block sizes: even, given, or in proportion to weights.

    Collective.

    Parameters
    ----------
    x
        A sharded tensor.
    weights_or_sizes
        ``{tensor_dim: numbers}``, or the numbers alone where one dim is sharded. Integers whose sum is the
        extent are block sizes, anything else weights. None: balanced.

    Notes
    -----
    Adjoint: the re-balancing back.

    Examples
    --------
    >>> y = x.rebalance({2: [1.0, 2.0]})  # the second rank along dim 2 takes two thirds
    """
    layout, given = x.sharding, weights_or_sizes
    if isinstance(given, Mapping):
        given = {d: _numbers(v) for d, v in given.items()}
    elif given is not None:
        given = _numbers(given)
    key = tuple((d, _named(v)) for d, v in given.items()) if isinstance(given, dict) else given and _named(given)
    return moved(x, x.mesh.plan(("rebalance", layout, key), lambda: _rebalanced(layout, given)))


def _named(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what stands for numbers in a key: to write many of them down takes longer than the plan."""
    if len(numbers) <= FEW or not {*map(type, numbers)} <= {int, float}:
        return numbers
    each = np.array(numbers)
    if each.dtype == object:  # beyond 64 bits
        return numbers
    return len(numbers), each.dtype.str, hashlib.blake2b(each.tobytes()).hexdigest()


def _numbers(values: Any) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        return (repr(values),)  # no numbers, not even for a lone rank's block: the ranks agree on what is wrong with it
    if isinstance(values, (np.ndarray, Tensor)) and values.ndim == 1:
        values = values.tolist()
    if {*map(type, values)} <= {int, float}:
        return tuple(values)
    return tuple(v.item() if hasattr(v, "item") else v for v in values)


def _rebalanced(layout: Layout, given: Any) -> Layout:
    if given is None:
        return layout_of(layout.mesh_shape, layout.placements, layout.shape)
    if not isinstance(given, Mapping):
        if len(layout.shard_dims) != 1:
            raise LayoutError(
                "rebalance: which dim is meant?",
                expected=f"a mapping of some of the sharded dims {sorted(layout.shard_dims)}",
                got=repr(given),
                fix="give {tensor_dim: weights or sizes}",
            )
        given = {next(iter(layout.shard_dims)): given}
    sizes = list(layout.sizes)
    for dim, numbers in by_dim("rebalance", given, layout.ndim).items():
        count = len(sizes[dim] or ())
        are_real = all(issubclass(kind, Real) for kind in {*map(type, numbers)})
        total = sum(numbers) if are_real else math.nan
        exact = total == layout.shape[dim] and all(isinstance(v, int) for v in numbers)
        if not count or len(numbers) != count or not (exact or 0 < total < math.inf) or min(numbers) < 0:
            raise LayoutError(
                f"rebalance: numbers do not fit dim {dim}",
                expected=f"{count} numbers >= 0, not all 0, for a sharded dim, one per block",
                got=numbers,
                fix="give one weight or size per rank along the mesh dims that shard the dim",
            )
        sizes[dim] = numbers if exact else weighted(layout.shape[dim], tuple(map(float, numbers)))
    return layout_of(layout.mesh_shape, layout.placements, layout.shape, sizes)


@whole
def halo_exchange(x: ShardTensor, widths: Mapping[int, Width], mode: str | None = None) -> Tensor:
    """Return this rank's block with its halo on both sides, corners filled.

    Neighborwise collective.

    Parameters
    ----------
    x
        A sharded tensor.
    widths
        Tensor dim -> width of the halo, an int or (lo, hi). It may be wider than a neighbour's whole block.
    mode
        What fills the halo beyond the domain's edge: ``"zeros"``, ``"reflect"``, ``"replicate"`` or
        ``"circular"``. A dim that lies on a periodic mesh dim wraps whatever the mode. None: zeros, and a
        halo wider than the global extent is an error.

    Returns
    -------
    torch.Tensor
        A plain local tensor; differentiable.

    Raises
    ------
    LayoutError
        Unknown dim or mode, no width or a negative one, or a halo wider than the extent with no mode to fill it.

    Notes
    -----
    Adjoint: halo accumulation. Each halo cell's cotangent is added to the cell that it is a copy of.

    Examples
    --------
    >>> padded = ms.halo_exchange(x, {2: (1, 1), 3: (2, 0)}, mode="zeros")
    """
    require("halo_exchange", "x", x, ShardTensor, "shard it first, e.g. with mpishard.distribute_tensor")
    with together("halo_exchange", x.mesh):
        require("halo_exchange", "widths", widths, Mapping, "give {tensor_dim: width}")
        if mode is not None:
            require("halo_exchange", "mode", mode, str, "name one of zeros, reflect, replicate, circular")
    x = resolved(x)
    return window.halo_exchange(x.block, x.mesh, x.sharding, widths, mode)


ShardTensor.from_local = staticmethod(from_local)
ShardTensor.full_tensor = full_tensor
ShardTensor.redistribute = redistribute
ShardTensor.rebalance = rebalance
