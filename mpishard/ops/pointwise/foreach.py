"""Lists of tensors: ``torch._foreach_*``, which gradient clipping and optimizers call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpishard.comm.collective import blocking
from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedOperationError
from mpishard.ops.rule.reduction import HALVES, combined, reduced
from mpishard.ops.rule.write import kept, put_into
from mpishard.tensor.operand import resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor


@implements(torch._foreach_norm, sharded="local")
def foreach_norm(tensors: Sequence[Any], ord: float = 2, dtype: Any = None) -> list[Tensor]:
    """Return the norm of each tensor, as plain numbers. Collective: one exchange for all tensors.

    Plain, because they are joined with norms of plain tensors, and scale both kinds.
    """
    out: list[Any] = [None] * len(tensors)
    kinds: dict[tuple[CartMesh, tuple[int, ...]], list[int]] = {}
    for i, t in enumerate(tensors):
        if isinstance(t, ShardTensor):
            t = resolved(t)
            kinds.setdefault((t.mesh, reduced(t.sharding, None).over), []).append(i)
            out[i] = _local_norm(t.block, float(ord), dtype)
        else:
            out[i] = torch.linalg.vector_norm(t, ord, dtype=dtype)
    for (mesh, over), which in kinds.items():
        if over:
            own = torch.stack([out[i].double() for i in which])
            totals = combined(own, mesh, over, partial(_norm_of_norms, ord=float(ord)))
            for i, total in zip(which, totals):
                out[i] = total.to(out[i].dtype)
    for i, t in enumerate(tensors):
        wanted = dtype or (t.dtype.to_real() if t.dtype.is_complex else t.dtype)
        out[i] = out[i].to(wanted)
    return out


def _local_norm(t: Tensor, ord: float, dtype: Any) -> Tensor:
    dtype = dtype or (torch.float32 if t.dtype in HALVES else None)
    if not t.numel():  # torch knows no extreme cell of none: what never wins
        return t.abs().sum(dtype=dtype) + (torch.inf if ord < 0 else 0)
    return torch.linalg.vector_norm(t, ord, dtype=dtype)


def _norm_of_norms(parts: Tensor, ord: float) -> Tensor:
    # that of order 0 counts
    return parts.sum(0) if ord == 0 else torch.linalg.vector_norm(parts, ord, 0)


def _with_value(single: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``addcmul`` or ``addcdiv`` with its factor by position, as the functions of lists have it."""

    def one(t: Any, first: Any, second: Any, value: Any = 1) -> Any:
        return single(t, first, second, value=value.item() if isinstance(value, Tensor) else value)

    return one


def _with_number(single: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``maximum`` or ``minimum`` that also takes numbers, as the functions of lists do."""

    def one(t: Any, other: Any) -> Any:
        if not isinstance(other, Tensor):
            # of the dtype of the result: whole numbers meet 1.5 as torch has them
            other = torch.full((), other, dtype=torch.result_type(t, other), device=t.device)
        return single(t, other)

    return one


# a tuple, or a list in older releases
_RESULTS = type(torch._foreach_neg([torch.empty(0, device="cpu")]))


def _one_by_one(func: Callable[..., Any], single: Callable[..., Any], in_place: bool) -> Callable[..., Any]:
    def rule(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        def at(i: int, a: Any) -> Any:
            # a vector of numbers, one per tensor, stands beside lists of tensors
            return a[i] if isinstance(a, (list, tuple)) or (isinstance(a, Tensor) and a.ndim == 1) else a

        results = _RESULTS(
            single(*[at(i, a) for a in (tensors, *args)], **{k: at(i, a) for k, a in kwargs.items()})
            for i in range(len(args[0] if isinstance(tensors, (int, float, complex)) else tensors))
        )
        return tensors if in_place else results

    rule.__name__ = func.__name__
    return rule


def _method(name: str) -> Callable[..., Any] | None:
    """Return the tensor method of this name; one in place that torch lacks (``maximum_``) writes the other's result."""
    method = getattr(torch.Tensor, name, None)
    other = getattr(torch.Tensor, name[:-1], None) if name[-1] == "_" else None
    if method is None and other is not None:
        return lambda t, *args, **kwargs: put_into(t, other(kept(t), *args, **kwargs))
    return method


for _name in dir(torch):
    _single = _method(_name.removeprefix("_foreach_"))
    if "addc" in _name:
        _single = _with_value(_single)
    if "imum" in _name:
        _single = _with_number(_single)
    if _name == "_foreach_pow":  # of a number too
        _single = torch.pow
    if _name.startswith("_foreach_") and _name != "_foreach_norm" and _single is not None:
        _func = getattr(torch, _name)
        implements(_func, sharded="local")(_one_by_one(_func, _single, _name.endswith("_")))


@implements(torch._amp_foreach_non_finite_check_and_unscale_, sharded="local")
def non_finite_check_and_unscale(tensors: Sequence[Any], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients by ``inv_scale``, and note whether any cell on any rank is not finite, as GradScaler asks.

    Collective: one number over the ranks of each mesh.
    """
    meshes = dict.fromkeys(t.mesh for t in tensors if isinstance(t, ShardTensor))
    if any(t.sharding.partial_dims for t in tensors if isinstance(t, ShardTensor)):
        raise UnsupportedOperationError(
            "GradScaler: a gradient that is a sum under way",
            expected="gradients that are sharded or replicated",
            got="Partial",
            fix="redistribute them first",
        )
    torch._amp_foreach_non_finite_check_and_unscale_([_blocks(t) for t in tensors], found_inf, inv_scale)
    for mesh in meshes:
        found_inf.copy_(blocking.all_reduce(found_inf, mesh.all_ranks, "max"))


# -- whole steps of an optimizer, cell by cell


def _fused(func: Callable[..., Any]) -> Callable[..., None]:
    def rule(*args: Any, **kwargs: Any) -> None:
        """Step on the blocks: a parameter, its gradient and its moments are laid out alike. Not collective."""
        params, *rest = map(_blocks, args)
        func(params, *rest, **{k: _blocks(a) for k, a in kwargs.items()})
        # torch does not count these writes: what was gathered of a parameter, or lies in a halo, would outlive them
        torch.autograd.graph.increment_version(params)

    return rule


def _blocks(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_blocks(t) for t in x]
    return x.block if isinstance(x, ShardTensor) else x


for _name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
    if hasattr(torch, _name):
        implements(getattr(torch, _name), sharded="local")(_fused(getattr(torch, _name)))
