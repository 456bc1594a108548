"""Differentiable messages between ranks on plain tensors: along a mesh dim, and from rank to rank.

Each is linear and has its true adjoint, the message back, in the sum-over-ranks inner product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpishard.autograd.argument import (
    MeshDims,
    is_plain,
    mesh_dims,
    needs_grad,
    require_dense,
    require_dense_on_all,
    require_mesh,
    require_rank,
    together,
    whole_number,
)
from mpishard.autograd.linear import Step, apply
from mpishard.autograd.step import message_step
from mpishard.comm.interruption import whole
from mpishard.comm.memory.buffer import followed
from mpishard.comm.mesh import CartMesh, Group
from mpishard.errors import MeshError


@whole
def shift(x: Tensor, mesh: CartMesh, mesh_dim: int | str, displacement: int) -> Tensor:
    """Move tensors of one shape ``displacement`` ranks along a mesh dim.

    Collective over ``mesh_dim``.

    Parameters
    ----------
    x
        Plain tensor of the same shape and dtype on every rank.
    mesh, mesh_dim
        Mesh dim to move along; its periodicity is the mesh's.
    displacement
        How far, in ranks; negative moves towards coordinate 0.

    Returns
    -------
    torch.Tensor
        The tensor of the rank ``displacement`` before this one; zeros where there is none.

    Raises
    ------
    DesyncError
        The ranks' calls differ.

    Notes
    -----
    Adjoint: the shift by ``-displacement``; what left a non-periodic mesh has no gradient.

    MPI 4.1, sections 8.5.6 (Cartesian Shift Coordinates) and 3.10 (Send-Receive).

    Examples
    --------
    >>> from_left = ms.shift(edge, mesh, "x", 1)
    """
    if not is_plain(x) or followed():
        require_dense_on_all("shift", x, mesh, mesh_dim)
    require_mesh("shift", mesh)
    dims = mesh_dims(mesh, mesh_dim)
    if type(displacement) is not int:
        with together("shift", mesh, dims):
            displacement = whole_number("shift", "displacement", displacement)
    key = ("shift", dims, displacement, x.shape, x.dtype, needs_grad(x))

    def build() -> Step:
        if len(dims) != 1:
            raise MeshError(
                "shift: one mesh dim at a time", expected="a mesh dim", got=mesh_dim, fix="shift dim by dim"
            )
        group, periodic = mesh.group(dims), mesh.periodic[dims[0]]
        dest, source = (_along(group, d, periodic) for d in (displacement, -displacement))
        return message_step(group, dest, source, x.shape, x.shape, f"shift by {displacement} of {tuple(x.shape)}")

    return apply(mesh.plan(key, build, dims), x)


@whole
def send_recv(
    x: Tensor,
    mesh: CartMesh,
    mesh_dim: MeshDims = None,
    *,
    dest: int | None,
    source: int | None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Send a tensor to one rank and receive one from another.

    Neighborwise collective: rank a names b as ``dest`` exactly where b names a as ``source``, on all of them
    in the same order, also in backward.

    Parameters
    ----------
    x
        Plain tensor to send.
    mesh, mesh_dim
        Ranks that are counted: those along a mesh dim (name or index) or several, or the whole mesh.
    dest, source
        Ranks among them, or None for nobody.
    shape
        Of the tensor that comes, if not that of ``x``; the dtype is that of ``x``.

    Returns
    -------
    torch.Tensor
        What came; zeros where ``source`` is None.

    Raises
    ------
    MeshError
        There is no such rank.
    LayoutError
        What came is smaller than ``shape``; only this rank knows.
    DesyncError
        What came is larger, of another dtype, or the message of another call; only this rank knows.

    Notes
    -----
    Adjoint: the same with ``dest`` and ``source`` exchanged; what nobody receives has no gradient.

    MPI 4.1, section 3.10 (Send-Receive).

    Examples
    --------
    >>> y = ms.send_recv(x, mesh, dest=1 if mesh.rank == 0 else None, source=0 if mesh.rank == 1 else None)
    """
    if not is_plain(x) or followed():
        require_dense("send_recv", x)
    require_mesh("send_recv", mesh)
    dims = mesh_dims(mesh, mesh_dim)
    if type(dest) is not int and dest is not None:
        dest = whole_number("send_recv", "dest", dest)
    if type(source) is not int and source is not None:
        source = whole_number("send_recv", "source", source)
    shape = x.shape if shape is None else torch.Size(shape)

    def build() -> Step:
        group = mesh.group(dims)
        for name, rank in (("dest", dest), ("source", source)):
            if rank is not None:
                require_rank(f"send_recv: no such {name}", rank, group)
        return message_step(group, dest, source, x.shape, shape, "send_recv")

    return apply(mesh.keep(("send_recv", dims, dest, source, x.shape, shape), build), x)


def _along(group: Group, displacement: int, periodic: bool) -> int | None:
    at = group.rank + displacement
    if periodic:
        return at % group.size
    return at if 0 <= at < group.size else None
