"""The argument ``out=``: what a function gives is copied into it, unless its rule can write it there itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mpishard.autograd.graph import unseen
from mpishard.errors import UnsupportedOperationError
from mpishard.tensor.refusal import refuse_dtensor, without_data
from mpishard.tensor.registry import name_of, outline, spellings, tensors_in

# cells that torch is asked with, along each dim (a cross product needs three), and in all
_FEW, _MANY = 4, 1 << 16
# what computes in the dtype of its `out=`, as if it were given `dtype=`
_COMPUTED_AS_OUT = set(spellings("sum", "nansum", "mean", "nanmean", "prod", "cumsum", "cumprod"))


def call_into(function: Any, rule: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a rule with ``out=`` among its arguments. Collective as the rule is, and as copying its result is.

    A rule with an attribute ``into``, a function that takes ``out``, leaves it to that. Of others the result is
    copied: it may be laid out differently. Into a plain tensor goes all of it, on every rank: it is gathered, as by
    ``copy_``.

    Raises
    ------
    UnsupportedOperationError
        ``out`` is no tensor, or a DTensor, or has another shape than the result.
    RuntimeError
        A gradient is asked for.
    Exception
        What torch raises, where the function does not write its result into the dtype of ``out``.
    """
    given = dict(kwargs)
    out = given.pop("out")
    if out is None:
        return rule(*args, **given)
    operands = list(tensors_in([*args, *given.values()]))
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    for t in outs:
        refuse_dtensor(t)
        if not isinstance(t, Tensor):
            raise unfit(function, "a tensor", t)
    if torch.is_grad_enabled() and any(t.requires_grad for t in [*operands, *outs]):
        raise RuntimeError(
            f"{name_of(function)}(): functions with out=... arguments don't support automatic differentiation, "
            "but one of the arguments requires grad."
        )
    into = getattr(rule, "into", None)
    if into is not None and all(hasattr(t, "placements") for t in outs):
        return into(*args, out=out, **given)
    single = isinstance(out, Tensor)
    if function in _COMPUTED_AS_OUT and single and given.get("dtype") is None:
        if not args or args[0].dtype is not out.dtype:
            _require_cast(function, args, given, outs, single=single)
        given["dtype"] = out.dtype
    # where all operands are plain, so is the result, and every rank has it
    result = (rule if any(hasattr(t, "placements") for t in operands) else function)(*args, **given)
    parts = [result] if isinstance(result, Tensor) else list(result)
    if len(parts) != len(outs):
        raise TypeError(f"{name_of(function)}(): out= takes {len(parts)} tensors, got {len(outs)}")
    for t, part in zip(outs, parts):
        if tuple(t.shape) != tuple(part.shape):
            raise unfit(function, f"a tensor of shape {tuple(part.shape)}", t)
    if [t.dtype for t in parts] != [t.dtype for t in outs] and not _require_cast(
        function, args, given, outs, single=single
    ):
        for t, part in zip(outs, parts):
            if not torch.can_cast(part.dtype, t.dtype):
                raise RuntimeError(f"result type {part.dtype} can't be cast to the desired output type {t.dtype}")
    for t, part in zip(outs, parts):
        t.copy_(part)
    return out if isinstance(result, Tensor) else type(result)(outs)


def unfit(function: Any, expected: str, got: Any) -> UnsupportedOperationError:
    """Return the error for an ``out`` that the result cannot be written into. Not collective."""
    return UnsupportedOperationError(
        f"{name_of(function)}: out= with ShardTensors",
        expected=expected,
        got=outline(got) if isinstance(got, Tensor) else type(got).__name__,
        fix="make it with mpishard.empty(shape, mesh=..., placements=...), or assign the result",
    )


def _require_cast(
    function: Any, args: Sequence[Any], given: Mapping[str, Any], outs: Sequence[Tensor], *, single: bool
) -> bool:
    """Raise what torch raises where a function does not write into the dtypes of ``outs``. Not collective.

    It is asked with operands of few cells, of one, of all if these are not many, or of none that have the global
    shapes: the first that it takes. Tell whether it takes any of these.
    """

    def refusal(few: Callable[[Any], Any], *, into: bool) -> Exception | None:
        operands, options = tree_map(few, (tuple(args), dict(given)))
        if into:
            empty = [few(torch.empty(0, device="cpu")).new_empty(0, dtype=t.dtype) for t in outs]
            options["out"] = empty[0] if single else tuple(empty)
        try:
            function(*operands, **options)
        except Exception as e:  # noqa: BLE001 (whatever torch says)
            return e
        return None

    ways: list[Callable[[Any], Any]] = [partial(_small, most=_FEW), partial(_small, most=1), without_data]
    if sum(x.numel() for x in tensors_in([*args, *given.values()])) < _MANY:
        ways.insert(2, partial(_small, most=_MANY))  # without cells, torch casts more
    with torch.no_grad(), unseen(), torch.random.fork_rng(devices=()):
        for few in ways:
            if refusal(few, into=False) is None:
                refused = refusal(few, into=True)
                if refused is not None:
                    raise refused
                return True
    return False


def _small(x: Any, most: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    # indices count from 0, pivots from 1
    make = torch.zeros if x.dtype in (torch.int64, torch.bool) else torch.ones
    return make([min(n, most) for n in x.shape], dtype=x.dtype)
