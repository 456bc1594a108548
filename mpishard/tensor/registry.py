"""The table of sharding rules: torch function -> what to do with ShardTensors, and the loud miss."""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket

from mpishard.comm import caller, guard
from mpishard.comm.thread import Depth
from mpishard.errors import NoShardingRule, described

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)


class _Rules(dict[Any, Rule]):
    # what is put in front of a rule: see `mpishard.tensor.kernel`
    front: Callable[[Any, Rule], Rule] | None = None

    def __setitem__(self, function: Any, rule: Rule) -> None:
        BLOCKWISE.discard(function)
        super().__setitem__(function, self.front(function, rule) if self.front is not None else rule)

    def put_in_front(self, front: Callable[[Any, Rule], Rule]) -> None:
        """Call ``front(function, rule)`` in place of each rule, now and later."""
        self.front = front
        for function, rule in list(self.items()):
            self[function] = rule


RULES = _Rules()
# what run the nodes of calls before them
BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)

# whose functions torch makes of the schemas of aten, argument by argument
_OF_ATEN = (
    torch._C._VariableFunctions,  # type: ignore[attr-defined]
    torch.Tensor,
    torch._C._nn,
    torch._C._linalg,  # type: ignore[attr-defined]
    torch._C._fft,  # type: ignore[attr-defined]
    torch._C._special,  # type: ignore[attr-defined]
)
_depth = Depth()


def in_rule() -> bool:
    """Tell whether a rule of the user's runs. Not collective."""
    return _depth.value > 0


def _of_user(rule: R) -> R:
    @functools.wraps(rule)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _depth:
            return rule(*args, **kwargs)

    return run  # type: ignore[return-value]


def _compared(function: Any, rule: Rule) -> Rule:
    """Have the whole call compared where the rule communicates, not only what travels."""

    @functools.wraps(rule)
    def run(*args: Any, **kwargs: Any) -> Any:
        with caller.within(lambda: _call_text(function, args, kwargs)):
            return rule(*args, **kwargs)

    return run


def _told(function: Any, rule: Rule) -> Rule:
    """Have the small messages in which a rule reduces compared by what they are of, not only by their length."""
    inside, name = caller.inside, name_of(function).rpartition(".")[2]

    @functools.wraps(rule)
    def run(*args: Any, **kwargs: Any) -> Any:
        if inside.operands is not None:
            return rule(*args, **kwargs)
        inside.operands = name, args
        try:
            return rule(*args, **kwargs)
        finally:
            inside.operands = None

    return run


def _call_text(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if function in (torch.autograd.backward, torch.autograd.grad):
        return name_of(function)  # plain tensors that they are given may be a rank's own
    named = [f"{name}={_argument(a)}" for name, a in sorted(kwargs.items())]
    return f"{name_of(function)}({', '.join([*map(_argument, args), *named])})"


def _argument(a: Any) -> str:
    """Return what all ranks have in common of an argument."""
    if isinstance(a, torch.Tensor):
        text = f"{outline(a)} {a.dtype}"
        # where to find cells is what ranks must agree on
        if not hasattr(a, "placements") and not (a.is_floating_point() or a.is_complex() or a.is_meta):
            with contextlib.suppress(RuntimeError, TypeError):  # in a transform or a compiler it has no memory
                text += f" {zlib.crc32(a.detach().cpu().contiguous().numpy().tobytes()):x}"
        return text
    if isinstance(a, (list, tuple)):
        return f"[{', '.join(map(_argument, a))}]"
    # addresses and rounding differ between ranks that mean the same
    if isinstance(a, (float, complex)):
        return repr((float if isinstance(a, float) else complex)(f"{a:.5g}"))
    return repr(a) if isinstance(a, (int, str, slice, torch.dtype, type(None))) else type(a).__name__


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
        ``torch.nn.functional.relu`` ... List every spelling that users call. A custom operator also by its name,
        ``"library::name"``: that is all its overloads, and the library need not be there.
    sharded
        What the rule does with a sharded dim, for `mpishard ops`: ``"local"``, ``"halo"``, ``"reduction"``,
        ``"moves"`` or ``"gathers"``.

    Returns
    -------
    Callable
        A decorator. The rule is called with the arguments of the torch function, ShardTensors among them,
        and returns what the torch function would, as ShardTensors. A rule registered later replaces an
        earlier one. A whole tensor that the rule takes of a ShardTensor, with ``full_tensor()`` or ``to_local()`` of a
        `Replicate`, may be used with this rank's blocks: its gradient is then summed over the ranks.

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
            known: Rule = rule if str(rule.__module__).startswith("mpishard.") else _of_user(rule)
            if guard.DEBUG:
                known = _compared(function, known)
            elif sharded == "reduction":
                known = _told(function, known)
            RULES[function] = known
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


def aten(*names: str) -> list[Any]:
    """Return the functions of ``torch.ops.aten`` of these names, with all their overloads but those of ``out=``.

    Not collective. What libraries and torch's decompositions call.
    """
    found: list[Any] = []
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found += [
                packet,
                *(getattr(packet, o) for o in packet.overloads() if not o.endswith(("out", "grad_input"))),
            ]
    return found


def _operator(function: Any) -> str | None:
    """Return the name of an operator, that of all its overloads: "aten::add". Not collective."""
    packet = function.overloadpacket if isinstance(function, OpOverload) else function
    return packet._qualified_op_name if isinstance(packet, OpOverloadPacket) else None


def rule_below(function: Any) -> Rule | None:
    """Return the rule of a function of ``torch.ops.aten``: that of the public function with its name and arguments.

    Of another library's operator: the rule of its name. Not collective.
    """
    operator = _operator(function)
    if operator is None or (isinstance(function, OpOverload) and function._overloadname.endswith("out")):
        return None
    namespace, _, name = operator.partition("::")
    if namespace != "aten":
        return RULES.get(operator)
    twins = (getattr(place, name, None) for place in _OF_ATEN)
    return next((RULES[twin] for twin in twins if twin in RULES), None)


# numpy's names of arguments, which torch's parser takes for its own
NUMPY_NAMES = {"x": "input", "a": "input", "x1": "input", "x2": "other", "axis": "dim", "keepdims": "keepdim"}


def by_torch_names(function: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call by the names that rules know. Not collective."""
    if NUMPY_NAMES.keys().isdisjoint(kwargs):
        return kwargs
    own = _own_names(function)
    return {name if name in own else NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}


@functools.cache
def _own_names(function: Any) -> frozenset[str]:
    """Return which of numpy's names a function has for itself, as `torch.cdist` has x1 and x2. Not collective."""
    if isinstance(function, OpOverload):
        names = {argument.name for argument in function._schema.arguments}
    else:
        try:
            names = set(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # a function in C
            schemas = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(function, '__name__', '')}")
            names = {argument.name for schema in schemas for argument in schema.arguments}
    return frozenset(names & NUMPY_NAMES.keys())


def no_rule(
    function: Any, args: Iterable[Any], kwargs: Mapping[str, Any], *, past_rules: bool = False
) -> NoShardingRule:
    """Return the error for a torch function without a rule. Not collective.

    ``past_rules``: it came below torch's functions, from one that looks for no rule.
    """
    layouts = ", ".join(map(outline, tensors_in([*args, *kwargs.values()])))
    decorator, within, operator = "@mpishard.implements", "", _operator(function)
    if operator is not None and not operator.startswith(("aten::", "prim")):
        decorator += f'("{operator}")'
    elif past_rules:
        within = (
            "; of a torch.func transform or torch.autograd.gradcheck: take torch.autograd, mpishard.dot_test; of what "
            "else looks for no rule (torch.sparse_coo_tensor, DistributedDataParallel): hand it plain tensors"
        )
    if isinstance(function, (torch.ScriptMethod, torch.ScriptFunction)):
        within = "; of what torch.jit made: call the model or function that it was made of"
    return NoShardingRule(
        f"no sharding rule for {name_of(function)}({layouts})",
        expected="an operation with a rule (a local result would be wrong, so none is given)",
        got=name_of(function),
        fix=f"(1) register a rule with {decorator}; (2) redistribute the operands and work on "
        "x.to_local() yourself; (3) gather with x.full_tensor() and run it on every rank" + within,
    )


def name_of(function: Any) -> str:
    """Return how users call ``function``. Not collective."""
    name = torch.overrides.resolve_name(function) if not isinstance(function, str) else function
    # torch.cond and its kin have no __qualname__, and a repr that is another on every rank
    return name or getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)


def tensors_in(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Give the tensors among arguments, also those of lists. Not collective."""
    for a in args:
        if isinstance(a, torch.Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from tensors_in(a)


def outline(x: torch.Tensor) -> str:
    """Return what all ranks say alike of an operand, for the texts of errors. Not collective."""
    if hasattr(x, "placements"):
        return f"ShardTensor{tuple(x.shape)} {list(x.placements)}"
    return f"Tensor{tuple(x.shape)}"
