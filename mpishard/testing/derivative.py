"""Derivatives of communicating functions against finite differences, all ranks in step.

`torch.autograd.gradcheck` perturbs on its own on every rank, which a function that communicates does not
survive. Here the ranks take turns, and all of them call the function every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpishard.autograd.argument import require_plain
from mpishard.comm import disagreement, guard
from mpishard.comm.collective import blocking
from mpishard.comm.collective.gather_sizes import gather_extents
from mpishard.comm.mesh import CartMesh, Group
from mpishard.errors import MpishardError, UnsupportedDtypeError

STEP = 1e-6
Function = Callable[[Tensor], Tensor]


def check_gradient(
    f: Function,
    x: Tensor,
    *,
    mesh: CartMesh | None = None,
    comm: Any = None,
    atol: float = 1e-6,
    rtol: float = 1e-5,
    seed: int = 0,
) -> None:
    """Compare the gradient of ``sum over ranks of <w, f(x)>`` with central differences, for a random ``w``.

    Collective over ``comm``; every rank calls ``f`` twice per element of every rank's ``x`` (complex: four
    times).

    Parameters
    ----------
    f
        Function of one plain tensor that every rank calls.
    x
        Where to test it: float64 or complex128, small.
    mesh, comm
        Ranks that take part: a mesh or an mpi4py communicator; all ranks if not given.
    atol, rtol
        Tolerances per element.
    seed
        Of the random weights.

    Raises
    ------
    AssertionError
        On every rank, with the elements of all ranks that differ.
    UnsupportedOperationError, UnsupportedDtypeError
        On every rank: ``x`` or ``f(x)`` is no plain tensor of these dtypes on some rank.

    Examples
    --------
    >>> check_gradient(lambda x: ms.all_reduce(x, mesh).sin(), x, mesh=mesh)
    """
    group = ranks_of(mesh, comm)
    _require_numbers("check_gradient", "x", x, group)
    x = x.detach().requires_grad_()
    y = f(x)
    _require_numbers("check_gradient", "f(x)", y, group)
    w = _random(y, seed, group)
    (g,) = torch.autograd.grad(y, x, w, allow_unused=True)
    numeric = _differences(f, x.detach(), w, group)
    _compare("gradient", torch.zeros_like(x) if g is None else g.detach(), numeric, group, atol, rtol)


def check_second_gradient(
    f: Function,
    x: Tensor,
    *,
    mesh: CartMesh | None = None,
    comm: Any = None,
    atol: float = 1e-6,
    rtol: float = 1e-5,
    seed: int = 0,
) -> None:
    """Compare the gradients of the vector-Jacobian product of ``f``, in ``x`` and in the vector, with differences.

    Collective over ``comm``. Parameters and errors as in `check_gradient`.

    Examples
    --------
    >>> check_second_gradient(lambda x: ms.all_reduce(x, mesh).sin(), x, mesh=mesh)
    """
    group = ranks_of(mesh, comm)
    _require_numbers("check_second_gradient", "x", x, group)
    x = x.detach()
    y = f(x)
    _require_numbers("check_second_gradient", "f(x)", y, group)
    v = _random(y, seed + 1, group)

    def vjp(at: Tensor, vector: Tensor) -> Tensor:
        # a graph is wanted also where only the vector is differentiated
        at = at if at.requires_grad else at.detach().requires_grad_()
        (g,) = torch.autograd.grad(f(at), at, vector, create_graph=True)
        return g

    def in_x(at: Tensor) -> Tensor:
        # a linear f has no second derivative in x: the zero keeps the graph the same on all ranks
        return vjp(at, v) + 0 * at

    for function, at in ((in_x, x), (lambda vector: vjp(x, vector), v)):
        check_gradient(function, at, comm=group.comm, atol=atol, rtol=rtol, seed=seed)


def check_jvp(
    f: Function,
    x: Tensor,
    *,
    mesh: CartMesh | None = None,
    comm: Any = None,
    atol: float = 1e-6,
    rtol: float = 1e-5,
    seed: int = 0,
) -> None:
    """Compare the forward-mode derivative of ``f`` with central differences, along a random direction.

    Collective over ``comm``. Parameters and errors as in `check_gradient`.

    Examples
    --------
    >>> check_jvp(lambda x: ms.all_reduce(x, mesh).sin(), x, mesh=mesh)
    """
    group = ranks_of(mesh, comm)
    _require_numbers("check_jvp", "x", x, group)
    x = x.detach()
    t = _random(x, seed + 2, group)
    with forward_ad.dual_level():
        y = f(forward_ad.make_dual(x, t))
        _require_numbers("check_jvp", "f(x)", y, group)
        y, tangent = forward_ad.unpack_dual(y)
        tangent = torch.zeros_like(y) if tangent is None else tangent.detach().clone()
    numeric = (f(x + STEP * t) - f(x - STEP * t)).detach() / (2 * STEP)
    _compare("forward-mode derivative", tangent, numeric, group, atol, rtol)


def ranks_of(mesh: CartMesh | None, comm: Any) -> Group:
    """Return the ranks of a mesh or an mpi4py communicator; all ranks if neither is given. Not collective."""
    if mesh is not None:
        return mesh.all_ranks
    return blocking.world() if comm is None else blocking.group_of(comm)


@contextmanager
def raised_together(group: Group, signature: str) -> Iterator[None]:
    """Raise on every rank what one of them finds wrong inside. Collective."""
    error: MpishardError | None = None
    try:
        yield
    except MpishardError as e:
        error = e
    guard.agree(group.comm, error, signature)


def _require_numbers(call: str, what: str, x: Any, group: Group) -> None:
    """Raise on every rank unless each has a plain tensor in which small differences can be seen. Collective."""
    with raised_together(group, f"{call}: {what}"):
        require_plain(f"{call}: {what}", x)
        if x.dtype not in (torch.float64, torch.complex128):
            raise UnsupportedDtypeError(
                f"{call}: {what} is too coarse for differences",
                expected="torch.float64 or torch.complex128",
                got=x.dtype,
                fix="test the function in double precision",
            )


def _random(like: Tensor, seed: int, group: Group) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + group.rank)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device="cpu").to(like.device)


def _differences(f: Function, x: Tensor, w: Tensor, group: Group) -> Tensor:
    counts = gather_extents("check_gradient", torch.Size((x.numel(),)), 0, x.dtype, group)
    numeric = torch.zeros_like(x, memory_format=torch.contiguous_format)
    flat = numeric.view(-1)
    for rank, count in enumerate(counts):
        for i in range(count):
            for direction in (1.0, 1j) if x.is_complex() else (1.0,):
                sides = []
                for sign in (1, -1):
                    at = x.clone(memory_format=torch.contiguous_format)
                    if rank == group.rank:
                        at.view(-1)[i] += sign * STEP * direction
                    y = f(at.requires_grad_()).detach()
                    sides.append(torch.sum((w.conj() * y).real if y.is_complex() else w * y).view(1))
                slope = blocking.all_reduce((sides[0] - sides[1]) / (2 * STEP), group).item()
                if rank == group.rank:
                    flat[i] += slope * direction
    return numeric


def _compare(what: str, ours: Tensor, numeric: Tensor, group: Group, atol: float, rtol: float) -> None:
    close = torch.isclose(ours, numeric, atol=atol, rtol=rtol)
    text = ""
    if not close.all():
        index = tuple((~close).nonzero()[0].tolist())
        text = (
            f"rank {group.rank}: {int((~close).sum())} of {close.numel()} elements, first at {index}: "
            f"{ours[index].item()} by autograd, {numeric[index].item()} by differences"
        )
    with guard.waiting("check_gradient", (), group.comm):
        found = disagreement.any_told(group.comm, text or None)
    if found:
        raise AssertionError(f"{what} differs from central differences:\n{found.text}")
