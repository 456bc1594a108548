"""Linear algebra of matrices: each in one piece, the batch dims sharded.

A matrix whose rows or columns are sharded moves: the batch is cut in their place, or, where it has no room, they are
gathered. Tall matrices have a QR decomposition and singular values where their rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpishard.ops.linear.tall import is_tall, tall_qr, tall_svd
from mpishard.ops.rule.dim import on_domain
from mpishard.ops.rule.whole import batchwise, whole
from mpishard.tensor.registry import implements, spellings

_OF_ONE = """
inv inverse inv_ex det slogdet logdet cholesky cholesky_ex cholesky_inverse eig eigvals eigh eigvalsh
pinv pinverse matrix_power matrix_exp matrix_sqrth lu_factor lu_factor_ex lu cond matrix_rank ldl_factor ldl_factor_ex
geqrf
""".split()

# names of the tensor arguments, with the dims of one of them
_OF_SEVERAL: dict[Any, dict[str, int]] = {
    torch.cholesky_solve: {"input": 2, "input2": 2},
    torch.Tensor.cholesky_solve: {"input": 2, "input2": 2},
    torch.linalg.solve_triangular: {"A": 2, "B": 2},
    torch.linalg.lu_solve: {"LU": 2, "pivots": 1, "B": 2},
    torch.linalg.ldl_solve: {"LD": 2, "pivots": 1, "B": 2},
    torch.lu_solve: {"input": 2, "LU_data": 2, "LU_pivots": 1},
    torch.Tensor.lu_solve: {"input": 2, "LU_data": 2, "LU_pivots": 1},
    torch.lu_unpack: {"LU_data": 2, "LU_pivots": 1},
    torch.triangular_solve: {"input": 2, "A": 2},
    torch.Tensor.triangular_solve: {"input": 2, "A": 2},
    torch.linalg.householder_product: {"A": 2, "tau": 1},
    torch.orgqr: {"input": 2, "input2": 1},
    torch.Tensor.orgqr: {"input": 2, "input2": 1},
    torch.ormqr: {"input": 2, "tau": 1, "other": 2},
    torch.Tensor.ormqr: {"input": 2, "tau": 1, "other": 2},
}


def _rule(func: Callable[..., Any], cores: dict[str, int]) -> Callable[..., Any]:
    names = list(cores)

    def rule(*args: Any, **kwargs: Any) -> Any:
        """Run on whole matrices of a sharded batch. Collective where matrices are sharded: they are gathered."""
        if names == ["A"] and "input" in kwargs:  # some of torch.linalg call it so
            kwargs["A"] = kwargs.pop("input")
        given = {**dict(zip(names, args)), **{n: kwargs.pop(n) for n in names if n in kwargs}}
        if names[0] not in given:
            raise TypeError(f"{func.__name__}() missing 1 required argument: {names[0]!r}")
        rest = args[len(names) :]
        # tolerances that are tensors, one per matrix
        others = {k: v for k, v in enumerate(rest) if isinstance(v, Tensor)}
        named = {k: v for k, v in kwargs.items() if isinstance(v, Tensor)}
        operands = [*(given[n] for n in names if n in given), *others.values(), *named.values()]
        own = [cores[n] for n in names if n in given]
        for x, core in zip(operands, own):
            if x.ndim < core:
                raise RuntimeError(
                    f"{func.__name__}: The input tensor must have at least {core} dimensions, got {x.ndim}"
                )

        def local(*tensors: Tensor) -> Any:
            mains, tail = tensors[: len(own)], tensors[len(own) :]
            plain = dict(zip([*others, *named], tail))
            options = {k: plain.get(k, v) for k, v in kwargs.items()}
            return func(*mains, *(plain.get(k, v) for k, v in enumerate(rest)), **options)

        return batchwise(local, operands, [*own, *(0,) * (len(others) + len(named))])

    return rule


for _name in _OF_ONE:
    for _func in spellings(_name):
        implements(_func, sharded="gathers")(
            _rule(_func, {"A" if _func.__name__.startswith("linalg_") else "input": 2})
        )


# -- tall matrices


def linalg_qr(A: Tensor) -> Tensor:
    """Return R alone. Not collective."""
    return torch.linalg.qr(A, "r").R


_qr, _triangle, _svd, _svdvals = (
    _rule(f, {"A": 2}) for f in (torch.linalg.qr, linalg_qr, torch.linalg.svd, torch.linalg.svdvals)
)
_older_qr, _older_svd = (_rule(f, {"input": 2}) for f in (torch.qr, torch.svd))


@implements(torch.linalg.qr, sharded="reduction")
def qr(A: Any, mode: str = "reduced") -> Any:
    """Decompose into Q and R. Collective where rows or columns are sharded: of tall matrices the rows stay."""
    if mode not in ("reduced", "r"):
        return _qr(A, mode)
    if mode == "r":  # Q has no cells, and no batch
        r = tall_qr(A)[1] if is_tall(A) else _triangle(A)
        return torch.return_types.linalg_qr([r.new_empty(0), r])  # type: ignore[attr-defined]
    return torch.return_types.linalg_qr(tall_qr(A)) if is_tall(A) else _qr(A)  # type: ignore[attr-defined]


@implements(torch.qr, torch.Tensor.qr, sharded="reduction")
def older_qr(input: Any, some: bool = True) -> Any:
    """Decompose into Q and R. Collective as `qr` is."""
    if not some or not is_tall(input):
        return _older_qr(input, some)
    on_domain(torch.qr, input)  # torch's own warning, or error where it has gone
    return torch.return_types.qr(tall_qr(input))  # type: ignore[attr-defined]


@implements(torch.linalg.svd, sharded="reduction")
def svd(A: Any, full_matrices: bool = True, *, driver: str | None = None) -> Any:
    """Decompose into U, S and V^H. Collective where rows or columns are sharded: of tall matrices the rows stay."""
    if full_matrices or driver is not None or not is_tall(A):
        return _svd(A, full_matrices, driver=driver)
    return torch.return_types.linalg_svd(tall_svd(A))  # type: ignore[attr-defined]


@implements(torch.svd, torch.Tensor.svd, sharded="reduction")
def older_svd(input: Any, some: bool = True, compute_uv: bool = True) -> Any:
    """Decompose into U, S and V. Collective as `svd` is."""
    if not some or not compute_uv or not is_tall(input):
        return _older_svd(input, some, compute_uv)
    u, s, vh = tall_svd(input)
    return torch.return_types.svd([u, s, vh.mH])  # type: ignore[attr-defined]


@implements(torch.linalg.svdvals, sharded="reduction")
def svdvals(A: Any, *, driver: str | None = None) -> Any:
    """Return singular values. Collective where rows or columns are sharded: of tall matrices the rows stay."""
    return _svdvals(A, driver=driver) if driver is not None or not is_tall(A) else tall_svd(A)[1]


if hasattr(torch.linalg, "polar"):  # since torch 2.15; torch.polar is another function
    _OF_SEVERAL[torch.linalg.polar] = {"A": 2}
for _func, _cores in _OF_SEVERAL.items():
    implements(_func, sharded="gathers")(_rule(_func, _cores))


def _right_side(A: Any, B: Any) -> int:
    """Return the dims of one right-hand side: 1 for vectors, by torch's reading. Not collective."""
    return 1 if B.ndim == 1 or (B.ndim == A.ndim - 1 and tuple(B.shape) == tuple(A.shape[:-1])) else 2


def _solve_rule(func: Callable[..., Any]) -> Callable[..., Any]:
    def solve(A: Any, B: Any, *, left: bool = True, **kwargs: Any) -> Any:
        """Solve linear systems of a sharded batch. Collective where matrices are sharded: they are gathered."""
        core = _right_side(A, B)
        if core == 2:
            return batchwise(lambda a, b: func(a, b, left=left, **kwargs), (A, B), (2, 2))

        def columns(a: Tensor, b: Tensor) -> Any:
            # as columns: on a block, torch could take vectors for matrices
            found = func(a, b.unsqueeze(-1), **kwargs)
            if isinstance(found, Tensor):
                return found.squeeze(-1)
            return type(found)([found[0].squeeze(-1), *found[1:]])

        return batchwise(columns, (A, B), (2, 1))

    return solve


for _func in (torch.linalg.solve, torch.linalg.solve_ex):
    implements(_func, sharded="gathers")(_solve_rule(_func))


def _gathered_whole(func: Callable[..., Any]) -> Callable[..., Any]:
    def rule(input: Any, *args: Any, **kwargs: Any) -> Any:
        """Solve on every rank. Collective: the operands are gathered, batch and all."""
        tensors = [input, *(a for a in args if isinstance(a, Tensor))]
        n, named = len(tensors), {k: v for k, v in kwargs.items() if isinstance(v, Tensor)}

        def run(*t: Tensor) -> Any:
            return func(*t[:n], *args[n - 1 :], **{**kwargs, **dict(zip(named, t[n:]))})

        return whole(run, [*tensors, *named.values()], checked=True)

    return rule


# of least squares: torch gives residuals only where every matrix of the batch has full rank
for _func in (torch.linalg.lstsq, torch.linalg.tensorsolve, torch.linalg.tensorinv):
    implements(_func, sharded="gathers")(_gathered_whole(_func))
