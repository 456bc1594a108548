"""The table of sharding rules: torch function -> what to do with ShardTensors, and the loud miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

from mpishard.errors import NoShardingRule, UnsupportedOperationError, described

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)


class _Rules(dict[Any, Rule]):
    def __setitem__(self, function: Any, rule: Rule) -> None:
        BLOCKWISE.discard(function)
        super().__setitem__(function, rule)


RULES: dict[Any, Rule] = _Rules()

# what a rule may do with a sharded dim, as `mpishard ops` and docs/operations.md say it
TREATMENTS = {
    "local": "on the blocks: nothing travels (operands that are laid out differently are brought to one layout)",
    "halo": "cells near the borders come from the ranks beside",
    "reduction": "small sums or other totals over ranks",
    "moves": "cells change ranks, and no rank holds more than its share",
    "gathers": "the sharded dims that the function needs whole are gathered; with a warning above "
    "`MPISHARD_GATHER_WARN` bytes (default 1 GiB; 0: always, -1: never)",
}
# of every function with a rule, one of them
SHARDED: dict[Any, str] = {}

# functions that, given one tensor without Partial dims alone, are the same function of its block: their rule need
# not be asked
BLOCKWISE: set[Any] = set()


def implements(*functions: Any, sharded: str = "local") -> Callable[[R], R]:
    """Register the decorated function as the sharding rule of torch functions.

    Not collective.

    Parameters
    ----------
    *functions
        What ``__torch_function__`` is given: ``torch.add``, ``torch.Tensor.add``,
        ``torch.nn.functional.relu`` ... List every spelling that users call.
    sharded
        What the rule does with a sharded dim, for `mpishard ops`: ``"local"``, ``"halo"``, ``"reduction"``,
        ``"moves"`` or ``"gathers"``.

    Returns
    -------
    Callable
        A decorator. The rule is called with the arguments of the torch function, ShardTensors among them,
        and returns what the torch function would, as ShardTensors. A rule registered later replaces an
        earlier one.

    Raises
    ------
    ValueError
        ``sharded`` is none of these.

    Examples
    --------
    >>> @ms.implements(torch.special.expit)
    ... def expit(x):
    ...     return ms.ShardTensor.from_local(torch.special.expit(x.to_local()), x.mesh, x.placements)
    """
    if sharded not in TREATMENTS:
        raise ValueError(
            described("implements: sharded", expected=", ".join(TREATMENTS), got=repr(sharded), fix="say one of these")
        )

    def register(rule: R) -> R:
        for function in functions:
            RULES[function] = rule
            SHARDED[function] = sharded
        return rule

    return register


def spellings(*names: str) -> list[Any]:
    """Return every torch function of these names: ``torch.*``, ``Tensor.*``, ``functional.*`` and kin.

    Not collective. Names that this torch version lacks are left out.
    """
    places = (
        torch,
        torch.Tensor,
        torch.nn.functional,
        torch.special,
        torch.linalg,
        torch.fft,
        torch._C._nn,
        torch._C._special,  # type: ignore[attr-defined]
        torch._C._linalg,  # type: ignore[attr-defined]
        torch._C._fft,  # type: ignore[attr-defined]
        torch._C._VariableFunctions,  # type: ignore[attr-defined]  # what torch's Python functions call with a list
    )
    found: list[Any] = []
    for name in names:
        # every module has an __eq__ of its own
        for place in (torch.Tensor,) if name.startswith("__") else places:
            function = getattr(place, name, None)
            if callable(function) and function not in found:
                found.append(function)
    return found


def no_rule(function: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> NoShardingRule:
    """Return the error for a torch function without a rule. Not collective."""
    layouts = ", ".join(map(outline, _tensors([*args, *kwargs.values()])))
    # below torch's functions: mostly a transform, which has unpacked the call
    within = "; of a torch.func transform: take torch.autograd" if isinstance(function, OpOverload) else ""
    return NoShardingRule(
        described(
            f"no sharding rule for {name_of(function)}({layouts})",
            expected="an operation with a rule (a local result would be wrong, so none is given)",
            got=name_of(function),
            fix="(1) register a rule with @mpishard.implements; (2) redistribute the operands and work on "
            "x.to_local() yourself; (3) gather with x.full_tensor() and run it on every rank" + within,
        )
    )


def name_of(function: Any) -> str:
    """Return how users call ``function``. Not collective."""
    name = torch.overrides.resolve_name(function) if not isinstance(function, str) else function
    return name or getattr(function, "__qualname__", None) or repr(function)


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for a in args:
        if isinstance(a, torch.Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from _tensors(a)


def outline(x: torch.Tensor) -> str:
    """Return what all ranks say alike of an operand, for the texts of errors. Not collective."""
    if hasattr(x, "placements"):
        return f"ShardTensor{tuple(x.shape)} {list(x.placements)}"
    return f"Tensor{tuple(x.shape)}"


def no_out(func: Any) -> UnsupportedOperationError:
    """Return the error for ``out=``. Not collective."""
    return UnsupportedOperationError(
        described(
            f"{name_of(func)}: out= with ShardTensors",
            expected="a call without out=",
            got="out=",
            fix="assign the result, or copy it with out.copy_(result)",
        )
    )
