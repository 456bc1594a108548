"""Plain tensors to ShardTensors and back: from_local, distribute, scatter, gather, redistribute, rebalance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.autograd import redistribute as autograd
from mpishard.autograd import window
from mpishard.autograd.argument import require_plain
from mpishard.comm import guard
from mpishard.comm.collective.transfer import scatter_blocks
from mpishard.comm.halo.exchanger import Width
from mpishard.comm.mesh import CartMesh, two_meshes
from mpishard.errors import LayoutError, MpishardError, UnsupportedDtypeError, described
from mpishard.layout import Layout, as_placements, by_dim, layout_of, weighted
from mpishard.tensor.factory import asked, new_layout
from mpishard.tensor.operand import moved, replicated_layout, resolved
from mpishard.tensor.shard_tensor import ShardTensor, wrap

_MAX_NDIM = 16
_DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]


def from_local(
    local: Tensor,
    mesh: CartMesh,
    placements: Any,
    sharding_shapes: str | Mapping[int, Sequence[int]] = "infer",
) -> ShardTensor:
    """Make a ShardTensor of the blocks that the ranks hold; no copy, differentiable.

    Collective with ``"infer"``, else not collective.

    Parameters
    ----------
    local
        This rank's block: a tensor, or an array of numpy, cupy or another library that speaks DLPack.
    mesh
        Mesh that the tensor is spread over.
    placements
        One placement per mesh dim.
    sharding_shapes
        ``"infer"``: block sizes are gathered and checked; ``"chunk"``: every rank's block has the size of this
        one (unchecked); or the sizes, as ``{mesh_dim: sizes along it}`` (where several mesh dims shard one
        tensor dim: one size per rank, under the first of them).

    Returns
    -------
    ShardTensor

    Raises
    ------
    LayoutError
        Placements that do not fit, or local shapes, dtypes or ``requires_grad`` that disagree.

    Examples
    --------
    >>> x = ms.ShardTensor.from_local(block, mesh, (ms.Shard(2), ms.Replicate()))
    """
    if not isinstance(local, Tensor):
        local = torch.from_dlpack(local)  # shares the memory
    require_plain("from_local", local)
    if isinstance(sharding_shapes, str) and sharding_shapes == "infer":
        return wrap(local, _inferred(local, mesh, placements), mesh)
    if sharding_shapes != "chunk" and not isinstance(sharding_shapes, Mapping):
        raise LayoutError(
            described(
                "from_local: unknown sharding_shapes",
                expected="'infer', 'chunk' or {mesh_dim: sizes}",
                got=repr(sharding_shapes),
                fix="use one of them",
            )
        )
    own = as_placements(placements, mesh.ndim, local.ndim)
    probe = layout_of(mesh.shape, own, (0,) * local.ndim)
    shape, sizes = list(local.shape), {}
    for dim, mesh_dims in probe.shard_dims.items():
        count = len(probe.sizes[dim] or ())
        if isinstance(sharding_shapes, str):
            sizes[dim] = (local.shape[dim],) * count
        else:
            given = {mesh.mesh_dim(m): s for m, s in sharding_shapes.items()}
            if mesh_dims[0] not in given:
                raise LayoutError(
                    described(
                        "from_local: sizes of a sharded dim are missing",
                        expected=f"an entry for mesh dim {mesh_dims[0]}",
                        got=sorted(given),
                        fix="give {mesh_dim: sizes} for every mesh dim that shards, or 'infer'",
                    )
                )
            sizes[dim] = tuple(int(s) for s in given[mesh_dims[0]])
        shape[dim] = sum(sizes[dim])
    layout = layout_of(mesh.shape, own, shape, sizes)
    expected = layout.local_shape(mesh.coords)
    if expected != tuple(local.shape):
        raise LayoutError(
            described(
                f"from_local: the block of the rank at {mesh.coords} does not fit the given sizes",
                expected=expected,
                got=tuple(local.shape),
                fix="give the sizes of the blocks that the ranks hold, or 'infer'",
            )
        )
    return wrap(local, layout, mesh)


def _inferred(local: Tensor, mesh: CartMesh, placements: Any) -> Layout:
    mine = np.full(_MAX_NDIM + 3, -1, np.int64)
    mine[:3] = local.ndim, _DTYPES.index(local.dtype), local.requires_grad
    mine[3 : 3 + local.ndim] = local.shape
    # placements are checked after this: a rank that fails earlier would leave the others waiting
    everyone = np.empty((mesh.size, len(mine)), np.int64)
    comm = mesh.group(tuple(range(mesh.ndim))).comm
    if guard.DEBUG:
        guard.check(comm, "from_local", None, None)
    with guard.waiting("from_local", (), comm):
        comm.Allgather(mine, everyone)
    given = tuple(placements) if isinstance(placements, Iterable) else (placements,)
    found = _layout_of_blocks(everyone[:, : 3 + local.ndim].tobytes(), mesh.shape, given)
    if isinstance(found, str):
        raise guard.common(LayoutError(found), comm)
    return found


# in a loop over time steps the same blocks come again, and to go through those of thousands of ranks takes a while;
# few are kept: each is known by the shapes of all ranks
@lru_cache(maxsize=32)
def _layout_of_blocks(gathered: bytes, mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> Layout | str:
    """Return the layout of blocks, given ndim, dtype, requires_grad and shape of all, or what does not fit."""
    count = math.prod(mesh_shape)
    everyone = np.frombuffer(gathered, np.int64).reshape(count, -1)

    def unfit(rank: int, expected: object, got: object) -> str:
        return described(
            f"from_local: the block of rank {rank} does not fit the others",
            expected=expected,
            got=got,
            fix="pass blocks of one dtype that agree in every dim that the placements do not shard between them",
        )

    ndim = int(everyone[0, 0])

    def kind(rank: int) -> str:
        n, dtype, requires_grad = everyone[rank, :3]
        return f"{n} dims of {_DTYPES[dtype]}{', with requires_grad' if requires_grad else ''}"

    odd = np.flatnonzero((everyone[:, :3] != everyone[0, :3]).any(1))
    if len(odd):
        return unfit(int(odd[0]), f"{kind(0)}, as rank 0 has", kind(odd[0]))
    shapes = everyone[:, 3:]
    own = as_placements(placements, len(mesh_shape), ndim)
    probe = layout_of(mesh_shape, own, (0,) * ndim)
    shape, sizes = [int(n) for n in shapes[0]], {}
    coords = [np.unravel_index(r, mesh_shape) for r in range(count)]
    for dim in range(ndim):
        seen: dict[int, int] = {}
        for rank in range(count):
            position = probe.index(dim, [int(c) for c in coords[rank]])
            n = int(shapes[rank, dim])
            if seen.setdefault(position, n) != n:
                return unfit(
                    rank, f"{seen[position]} cells along dim {dim}", f"shape {tuple(int(s) for s in shapes[rank])}"
                )
        if dim in probe.shard_dims:
            sizes[dim] = [seen[i] for i in range(len(seen))]
            shape[dim] = sum(sizes[dim])
    return layout_of(mesh_shape, own, shape, sizes)


def distribute_tensor(
    tensor: Tensor,
    mesh: CartMesh,
    placements: Any,
    *,
    sizes: Mapping[int, Sequence[int]] | None = None,
    multiple: int = 1,
) -> ShardTensor:
    """Shard a tensor that every rank holds: each takes its block.

    Not collective (shapes are compared across ranks the first time that they occur).

    Parameters
    ----------
    tensor
        The same full tensor on every rank; or a ShardTensor on ``mesh``, which is redistributed (collective).
    mesh, placements
        Where and how to shard it.
    sizes
        Tensor dim -> block sizes; balanced where not given.
    multiple
        Of which the borders between balanced blocks are multiples: give a network's total stride, and every
        strided convolution of it works on whole blocks.

    Returns
    -------
    ShardTensor
        A copy of the block, so that the full tensor can be freed; differentiable, with the gradient of the full
        tensor on every rank.

    Notes
    -----
    Adjoint: all-gather.

    Examples
    --------
    >>> x = ms.distribute_tensor(full, mesh, (ms.Shard(2), ms.Shard(3)))
    """
    if isinstance(tensor, ShardTensor):
        if tensor._mesh is not mesh:
            raise two_meshes(tensor._mesh, mesh)
        if sizes is None and multiple == 1:
            return redistribute(tensor, placements)
    key = ("distribute_tensor", tuple(tensor.shape), tensor.dtype, *asked(placements, sizes), multiple)
    layout = mesh.plan(key, lambda: layout_of(mesh.shape, placements, tensor.shape, sizes, multiple))
    if isinstance(tensor, ShardTensor):
        return moved(tensor, layout)
    whole = replicated_layout(mesh, tensor.shape)
    local = autograd.redistribute(tensor.to(mesh.device), mesh, whole, layout)
    if local is tensor:
        local = tensor.clone()
    return wrap(local, layout, mesh)


def scatter_tensor(
    tensor: Tensor | None,
    src: int,
    mesh: CartMesh,
    placements: Any,
    *,
    requires_grad: bool = False,
    sizes: Mapping[int, Sequence[int]] | None = None,
    multiple: int = 1,
) -> ShardTensor:
    """Shard a tensor that one rank holds; no other rank ever holds more than its own block.

    Collective.

    Parameters
    ----------
    tensor
        The full tensor on mesh rank ``src``; ignored elsewhere.
    src
        Mesh rank of the source.
    mesh, placements
        Where and how to shard it.
    requires_grad
        Of the result, a leaf: gradients stop here.
    sizes
        Tensor dim -> block sizes; balanced where not given.
    multiple
        Of which the borders between balanced blocks are multiples: give a network's total stride, and every
        strided convolution of it works on whole blocks.

    Returns
    -------
    ShardTensor

    Raises
    ------
    LayoutError
        There is nothing to scatter, or placements or sizes do not fit it; `Partial` is refused.
    UnsupportedDtypeError
        It shall require a gradient, and has a dtype that has none.
    DesyncError
        The ranks' arguments differ.

    Examples
    --------
    >>> full = load() if mesh.rank == 0 else None
    >>> x = ms.scatter_tensor(full, 0, mesh, (ms.Shard(2), ms.Shard(3)), requires_grad=True)
    """
    error: MpishardError | None = None
    layout, meta = None, None
    if not 0 <= src < mesh.size:
        error = LayoutError(
            described(
                "scatter_tensor: no such source rank",
                expected=f"0 <= src < {mesh.size}",
                got=src,
                fix="name a rank of the mesh",
            )
        )
    elif mesh.rank == src:
        try:
            if not isinstance(tensor, Tensor) or isinstance(tensor, ShardTensor):
                raise LayoutError(
                    described(
                        "scatter_tensor: nothing to scatter",
                        expected=f"a plain tensor on rank {src}",
                        got=type(tensor).__name__,
                        fix="pass the full tensor on the source rank",
                    )
                )
            if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
                raise UnsupportedDtypeError(
                    described(
                        "scatter_tensor: a dtype without gradients",
                        expected="a floating or complex dtype, or requires_grad=False",
                        got=tensor.dtype,
                        fix="convert the tensor first",
                    )
                )
            layout = new_layout("scatter_tensor", mesh, placements, tensor.shape, sizes, multiple)
            meta = (tuple(tensor.shape), tensor.dtype)
        except MpishardError as e:
            error = e
    comm = mesh.group(tuple(range(mesh.ndim))).comm
    told = (src, *asked(placements, sizes), multiple, requires_grad)
    # what fits on the source fits everywhere: the others give the same
    guard.agree(comm, error, f"scatter_tensor{told}")
    with guard.waiting("scatter_tensor", (src,), comm):
        shape, dtype = comm.bcast(meta, root=src)
    if layout is None:
        layout = layout_of(mesh.shape, placements, shape, sizes, multiple)
    boxes = [layout.box(c) for c in product(*map(range, mesh.shape))]
    source = tensor.detach() if tensor is not None and mesh.rank == src else None
    local = scatter_blocks(mesh, src, source, boxes, dtype)
    return wrap(local.requires_grad_(requires_grad), layout, mesh)


def full_tensor(x: ShardTensor) -> Tensor:
    """Return the whole tensor on every rank: a plain tensor, differentiable.

    Collective.

    Notes
    -----
    Adjoint: each rank keeps its block of the cotangent, which must be the same on every rank.
    """
    return moved(resolved(x), replicated_layout(x._mesh, x._layout.shape))._local


def redistribute(x: ShardTensor, placements: Any = None) -> ShardTensor:
    """Return ``x`` with other placements.

    Collective.

    Parameters
    ----------
    x
        Any ShardTensor.
    placements
        One per mesh dim. A dim that keeps its mesh dims keeps its block sizes; others are balanced.

    Notes
    -----
    Adjoint: the redistribution back (all-reduce <-> identity, all-gather <-> slice, as in design of DTensor).

    Examples
    --------
    >>> y = x.redistribute(placements=(ms.Shard(1), ms.Replicate()))
    """
    layout = x._layout
    key = ("placements", layout, *asked(placements))
    return moved(x, x._mesh.plan(key, lambda: layout.with_placements(placements)))


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
    layout, given = x._layout, weights_or_sizes
    if isinstance(given, Mapping):
        given = {d: _numbers(v) for d, v in given.items()}
    elif given is not None:
        given = _numbers(given)
    key = tuple(given.items()) if isinstance(given, dict) else given
    return moved(x, x._mesh.plan(("rebalance", layout, key), lambda: _rebalanced(layout, given)))


def _numbers(values: Any) -> tuple[Any, ...]:
    return tuple(v.item() if hasattr(v, "item") else v for v in values)


def _rebalanced(layout: Layout, given: Any) -> Layout:
    if given is None:
        return layout_of(layout.mesh_shape, layout.placements, layout.shape)
    if not isinstance(given, Mapping):
        if len(layout.shard_dims) != 1:
            raise LayoutError(
                described(
                    "rebalance: which dim is meant?",
                    expected=f"a mapping of some of the sharded dims {sorted(layout.shard_dims)}",
                    got=repr(given),
                    fix="give {tensor_dim: weights or sizes}",
                )
            )
        given = {next(iter(layout.shard_dims)): given}
    sizes = list(layout.sizes)
    for dim, numbers in by_dim("rebalance", given, layout.ndim).items():
        count = len(sizes[dim] or ())
        if not count or len(numbers) != count or min(numbers) < 0 or not 0 < sum(numbers) < math.inf:
            raise LayoutError(
                described(
                    f"rebalance: numbers do not fit dim {dim}",
                    expected=f"{count} numbers >= 0, not all 0, for a sharded dim, one per block",
                    got=numbers,
                    fix="give one weight or size per rank along the mesh dims that shard the dim",
                )
            )
        exact = all(isinstance(v, int) for v in numbers) and sum(numbers) == layout.shape[dim]
        sizes[dim] = numbers if exact else weighted(layout.shape[dim], tuple(float(v) for v in numbers))
    return layout_of(layout.mesh_shape, layout.placements, layout.shape, sizes)


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
    x = resolved(x)
    return window.halo_exchange(x._local, x._mesh, x._layout, widths, mode)


ShardTensor.from_local = staticmethod(from_local)
ShardTensor.full_tensor = full_tensor
ShardTensor.redistribute = redistribute
ShardTensor.rebalance = rebalance
