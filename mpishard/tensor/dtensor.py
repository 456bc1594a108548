"""What DTensor's calls say beyond ours: arguments that are honoured, or refused where they ask for what is not."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.linear import Step, apply, pair, same
from mpishard.autograd.plain import given_layout
from mpishard.autograd.redistribute import run_steps
from mpishard.autograd.replica import apart
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError, MpishardError
from mpishard.layout import Layout, Replicate, as_placements, without_partial
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.strides import row_major


def as_first_rank_has(local: Tensor, layout: Layout, mesh: CartMesh) -> None:
    """Give blocks of `Replicate` dims the values of the first rank, in place, as ``run_check`` asks. Collective."""
    dims = tuple(m for m, p in enumerate(layout.placements) if type(p) is Replicate)
    if dims:
        with torch.no_grad():
            local.copy_(blocking.broadcast(local.detach(), mesh.group(dims), 0))


def unfit(layout: Layout, shape: Any, stride: Any, grad_placements: Any) -> MpishardError | None:
    """Return what is wrong with what a caller of `from_local` says beside its block, or None. Not collective."""
    for name, given, found in (("shape", shape, layout.shape), ("stride", stride, row_major(layout.shape))):
        if given is None:
            continue
        given = tuple(given) if isinstance(given, Iterable) else given
        if given != found:
            return LayoutError(
                f"from_local: the global {name} is another",
                expected=found,
                got=given,
                fix=f"leave {name}= out: it is found from the blocks of all ranks",
            )
    try:
        _held(layout, grad_placements)
    except MpishardError as e:
        return e
    return None


def _held(layout: Layout, grad_placements: Any) -> tuple[Layout, Layout]:
    """Return the layout of a cotangent as it is, and as it is asked for."""
    held = without_partial(layout)
    if grad_placements is None:
        return held, held
    return held, given_layout("from_local", held, as_placements(grad_placements, len(layout.mesh_shape), layout.ndim))


def with_grad_placements(x: ShardTensor, local: Tensor, grad_placements: Any) -> ShardTensor:
    """Return ``x``, made of ``local``, whose cotangent reaches that as ``grad_placements`` say.

    Not collective.

    Notes
    -----
    Adjoint: Replicate -> `Partial` where that is asked for: the sum of what the ranks get is the cotangent.
    """
    held, given = _held(x.sharding, grad_placements)
    if given is held:
        return x
    mesh = x.mesh
    step: Step = pair(same, lambda g: run_steps(mesh, held, given, g))
    out = wrap(apply(step, local), x.sharding, mesh)
    out._trail = x._trail
    return out


def mesh_and_placements(x: ShardTensor, device_mesh: Any, placements: Any) -> Any:
    """Return the placements that ``x`` is redistributed to, given alone or, as for DTensor, after a mesh.

    Not collective.

    Raises
    ------
    LayoutError
        No placements, or those of another mesh.
    """
    if device_mesh is not None and not isinstance(device_mesh, CartMesh) and placements is None:
        device_mesh, placements = None, device_mesh
    if placements is None or device_mesh not in (None, x.mesh):
        raise LayoutError(
            "redistribute: where to?",
            expected=f"placements on the tensor's own mesh, {x.mesh.outline}",
            got="no placements" if placements is None else getattr(device_mesh, "outline", repr(device_mesh)),
            fix="x.redistribute(placements=...); to another mesh: x.full_tensor(), then distribute_tensor",
        )
    return placements


def check_dtypes(x: ShardTensor, *dtypes: torch.dtype | None) -> None:
    """Refuse to convert on the way.

    Not collective.

    Raises
    ------
    LayoutError
        A dtype that is not the tensor's.
    """
    for dtype in dtypes:
        if dtype not in (None, x.dtype):
            raise LayoutError(
                "redistribute: forward_dtype or backward_dtype",
                expected=f"None: what travels keeps its dtype, {x.dtype}",
                got=dtype,
                fix="convert before it, x.to(dtype).redistribute(...)",
            )


def source_rank(mesh: CartMesh, src_data_rank: int) -> int:
    """Return the mesh rank that has coordinate ``src_data_rank`` along every mesh dim.

    Not collective.

    Raises
    ------
    LayoutError
        There is none.
    """
    if not isinstance(src_data_rank, Integral) or not all(0 <= src_data_rank < extent for extent in mesh.shape):
        raise LayoutError(
            "distribute_tensor: no such source rank",
            expected=f"a coordinate along every mesh dim, 0 <= src_data_rank < {min(mesh.shape)}",
            got=src_data_rank,
            fix="name one, or call scatter_tensor(tensor, mesh_rank, ...)",
        )
    return mesh.rank_at((src_data_rank,) * mesh.ndim)


def check_same_values(tensor: Tensor, mesh: CartMesh) -> None:
    """Raise where what all ranks should hold alike differs between them.

    Collective.

    Raises
    ------
    LayoutError
        On every rank.
    """
    values = tensor.detach()
    values = values if values.is_floating_point() or values.is_complex() else values.double()
    if mesh.size > 1 and not values.is_meta and apart(values, mesh.all_ranks):
        raise LayoutError(
            "distribute_tensor: the ranks hold different tensors",
            expected="the same full tensor on every rank, of which each takes its block",
            got=f"tensors of shape {tuple(tensor.shape)} that differ",
            fix="distribute_tensor(..., src_data_rank=0) takes that of rank 0, as DTensor does; "
            "ShardTensor.from_local takes what each rank holds",
        )
