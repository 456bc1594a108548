"""The argument ``out=``: what a function gives is copied into it, unless its rule can write it there itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mpishard.errors import UnsupportedOperationError, described
from mpishard.tensor.registry import name_of, outline, tensors_in


def call_into(function: Any, rule: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a rule with ``out=`` among its arguments. Collective as the rule is, and as copying its result is.

    A rule with an attribute ``into``, a function that takes ``out``, leaves it to that. Of others the result is
    copied: it may be laid out differently.

    Raises
    ------
    UnsupportedOperationError
        ``out`` is a plain tensor, or has another shape than the result.
    RuntimeError
        A gradient is asked for, or the dtype of ``out`` does not hold the result.
    """
    given = dict(kwargs)
    out = given.pop("out")
    if out is None:
        return rule(*args, **given)
    operands = list(tensors_in([*args, *given.values()]))
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    for t in outs:
        if not hasattr(t, "placements"):
            raise unfit(function, "a ShardTensor", t)
    if torch.is_grad_enabled() and any(t.requires_grad for t in [*operands, *outs]):
        raise RuntimeError(
            f"{name_of(function)}(): functions with out=... arguments don't support automatic differentiation, "
            "but one of the arguments requires grad."
        )
    into = getattr(rule, "into", None)
    if into is not None:
        return into(*args, out=out, **given)
    # where all operands are plain, so is the result, and every rank has it
    result = (rule if any(hasattr(t, "placements") for t in operands) else function)(*args, **given)
    parts = [result] if isinstance(result, Tensor) else list(result)
    if len(parts) != len(outs):
        raise TypeError(f"{name_of(function)}(): out= takes {len(parts)} tensors, got {len(outs)}")
    for t, part in zip(outs, parts):
        if tuple(t.shape) != tuple(part.shape):
            raise unfit(function, f"a ShardTensor of shape {tuple(part.shape)}", t)
        if not torch.can_cast(part.dtype, t.dtype):
            raise RuntimeError(f"result type {part.dtype} can't be cast to the desired output type {t.dtype}")
    found, wanted = ([t.dtype for t in side] for side in (parts, outs))
    if found != wanted:
        _require_cast(function, args, given, found, wanted, single=isinstance(out, Tensor))
    for t, part in zip(outs, parts):
        t.copy_(part)
    return out if isinstance(result, Tensor) else type(result)(outs)


def unfit(function: Any, expected: str, got: Any) -> UnsupportedOperationError:
    """Return the error for an ``out`` that the result cannot be written into. Not collective."""
    return UnsupportedOperationError(
        described(
            f"{name_of(function)}: out= with ShardTensors",
            expected=expected,
            got=outline(got) if isinstance(got, Tensor) else type(got).__name__,
            fix="make it with mpishard.empty(shape, mesh=..., placements=...), or assign the result",
        )
    )


def _require_cast(
    function: Any,
    args: Sequence[Any],
    given: Mapping[str, Any],
    found: Sequence[torch.dtype],
    wanted: Sequence[torch.dtype],
    *,
    single: bool,
) -> None:
    """Raise what torch raises where a function does not write into another dtype than its result's. Not collective.

    It is asked with operands of one cell, if it takes those at all.
    """
    with torch.no_grad():
        operands, options = tree_map(_one_cell, (tuple(args), dict(given)))

        def refusal(dtypes: Sequence[torch.dtype]) -> RuntimeError | None:
            outs = [torch.empty(0, dtype=dtype) for dtype in dtypes]
            try:
                function(*operands, **options, out=outs[0] if single else tuple(outs))
            except RuntimeError as e:
                return e
            return None

        try:
            refused = refusal(wanted) if refusal(found) is None else None
        except Exception:  # noqa: BLE001 (of operands that cannot be so small)
            return
    if refused is not None:
        raise refused


def _one_cell(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    is_index = not (x.dtype.is_floating_point or x.dtype.is_complex)
    return (torch.zeros if is_index else torch.ones)([1] * x.ndim, dtype=x.dtype)
