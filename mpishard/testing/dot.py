"""The adjoint test: <f x, y> against <x, f* y>, summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.argument import require, require_functions
from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh, Group
from mpishard.errors import UnsupportedOperationError
from mpishard.layout import Partial, Replicate
from mpishard.testing.derivative import raised_together, ranks_of


class DotTest(float):
    """Outcome of `dot_test`: the relative error, true where it is small enough.

    Attributes
    ----------
    lhs, rhs : float
        <f x, y> and <x, f* y>.
    rtol : float
        What the error is held against.
    """

    lhs: float
    rhs: float
    rtol: float

    def __new__(cls, error: float, lhs: float, rhs: float, rtol: float) -> DotTest:
        """Keep the two sides."""
        self = super().__new__(cls, error)
        self.lhs, self.rhs, self.rtol = lhs, rhs, rtol
        return self

    def __bool__(self) -> bool:
        return float(self) <= self.rtol

    def __repr__(self) -> str:
        verdict = "passed" if self else "FAILED"
        return f"DotTest({verdict}: error {float(self):.2e}, rtol {self.rtol:.1e}, {self.lhs!r} and {self.rhs!r})"


def dot_test(
    f: Callable[[Any], Any],
    x: Tensor,
    *,
    mesh: CartMesh | None = None,
    comm: Any = None,
    rtol: float | None = None,
    seed: int = 0,
) -> DotTest:
    """Test whether the backward of a linear function is its adjoint: ``<f x, y> == <x, f* y>``.

    Collective over ``comm``. The inner product is the sum over ranks of the local dot products, in float64
    (of complex tensors, its real part); of a ShardTensor, it counts replicated cells once. ``y`` is random.

    Parameters
    ----------
    f
        Linear function of one tensor, plain or ShardTensor, that every rank calls.
    x
        Where to test it; random values, not zeros.
    mesh, comm
        Ranks that take part: a mesh or an mpi4py communicator. If neither is given, the mesh of ``x`` if it
        is a ShardTensor, else all ranks.
    rtol
        Largest error that passes; the square root of the dtype's epsilon if not given.
    seed
        Of the random ``y``.

    Returns
    -------
    DotTest
        A float, the same on every rank: the difference of the two sides over the root of the sum of squares
        of the terms of the left one, so that neither cancellation nor size hides or feigns an error. It is
        true where the test passed.

    Raises
    ------
    LayoutError
        ``f`` is no function, or ``x`` or ``f(x)`` no tensor, on some rank.
    UnsupportedOperationError
        On some rank, ``f(x)`` does not depend on ``x`` as autograd sees it.

    Examples
    --------
    >>> assert ms.dot_test(lambda x: ms.all_reduce(x, mesh), torch.randn(5, dtype=torch.float64), mesh=mesh)
    """
    group = ranks_of(getattr(x, "mesh", None) if mesh is None and comm is None else mesh, comm)
    with raised_together(group, "dot_test"):
        require_functions("dot_test", f=f)
        require("dot_test", "x", x, Tensor, "give a tensor, plain or a ShardTensor")
    x = x.detach().requires_grad_()
    y = f(x)
    with raised_together(group, "dot_test"):
        require("dot_test", "f(x)", y, Tensor, "let f return one tensor")
    ours, theirs = _local(x), _local(y)
    _require_graph(theirs, group)
    generator = torch.Generator().manual_seed(seed + 7919 * group.rank)
    w = torch.randn(theirs.shape, generator=generator, dtype=theirs.dtype, device="cpu").to(theirs.device)
    w = _equal_on_replicas(w, y)
    (g,) = torch.autograd.grad(theirs, ours, w, allow_unused=True)
    left = _terms(theirs.detach(), w) * _weight(y)
    right = 0.0 if g is None else _terms(g, ours.detach()).sum().item() * _weight(x)
    sums = torch.tensor([left.sum().item(), right, left.square().sum().item()], dtype=torch.float64, device="cpu")
    lhs, rhs, squares = blocking.all_reduce(sums, group).tolist()
    error = abs(lhs - rhs) / math.sqrt(squares) if squares else (0.0 if lhs == rhs else math.inf)
    if math.isnan(error):
        error = math.inf
    return DotTest(error, lhs, rhs, torch.finfo(theirs.dtype).eps ** 0.5 if rtol is None else rtol)


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[no-any-return]


def _require_graph(y: Tensor, group: Group) -> None:
    without = blocking.all_reduce(torch.tensor([not y.requires_grad], dtype=torch.int64, device="cpu"), group).item()
    if without:
        raise UnsupportedOperationError(
            "dot_test: the result has no gradient",
            expected="f(x) that depends on x on every rank",
            got=f"no gradient on {without} of {group.size} ranks",
            fix="make every rank's result depend on its x, if only by adding 0 * x.sum()",
        )


def _terms(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.complex128 if a.is_complex() else torch.float64
    products = a.to(wide).conj() * b.to(wide)
    return products.real if products.is_complex() else products


def _weight(x: Any) -> float:
    """Return the share of each cell of a tensor that this rank counts."""
    if not hasattr(x, "placements"):
        return 1.0
    if any(type(p) is Partial for p in x.placements):
        raise UnsupportedOperationError(
            "dot_test: Partial has no cells of its own",
            expected="Shard and Replicate placements",
            got=x.placements,
            fix="redistribute it first",
        )
    return 1 / math.prod(n for n, p in zip(x.mesh.shape, x.placements, strict=True) if type(p) is Replicate)


def _equal_on_replicas(w: Tensor, y: Any) -> Tensor:
    for m, placement in enumerate(getattr(y, "placements", ())):
        if type(placement) is Replicate:
            w = blocking.broadcast(w, y.mesh.group((m,)), 0)
    return w
