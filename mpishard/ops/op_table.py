"""Which torch functions have a sharding rule, by family, and what each does with a sharded dim."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mpishard.tensor.registry import RULES, SHARDED, TREATMENTS, Rule
from mpishard.tensor.shard_tensor import ShardTensor


class Covered(NamedTuple):
    """A function with a rule: its name, where torch has it, the rule's family, and the treatment of sharded dims."""

    name: str
    places: tuple[str, ...]
    family: str
    treatment: str


def family_of(rule: Rule) -> str:
    """Return where a rule is: folder and file of this package, "tensor", or a user's module. Not collective."""
    module = rule.__module__ or "__main__"  # of code that was executed as a text
    if module.startswith("mpishard.tensor."):
        return "tensor"
    if not module.startswith("mpishard."):
        return module
    # pointwise/pointwise says no more than pointwise
    return "/".join(dict.fromkeys(module.removeprefix("mpishard.ops.").split(".")))


def covered() -> list[Covered]:
    """Return all public torch functions with rules, sorted by family and name. Not collective."""
    found: dict[tuple[str, str, str], set[str]] = {}
    for function, rule in RULES.items():
        path = _path(function)
        if path is not None:
            place, name = path
            found.setdefault((family_of(rule), name, SHARDED[function]), set()).add(place)
    return [Covered(n, tuple(sorted(places)), f, t) for (f, n, t), places in sorted(found.items())]


def uncovered() -> list[str]:
    """Return the public torch functions that raise `NoShardingRule`, sorted. Not collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch deprecates
        every = torch.overrides.get_overridable_functions()
    paths = (_path(f) for functions in every.values() for f in functions if f not in RULES)
    # what ShardTensor has of its own needs no rule
    return sorted({".".join(p) for p in paths if p and not (p[0] == "torch.Tensor" and p[1] in vars(ShardTensor))})


def _path(function: Any) -> tuple[str, str] | None:
    """Return (place, name) of a public function, such as ("torch.Tensor", "add")."""
    if isinstance(function, str):  # a custom operator
        library, _, name = function.partition("::")
        return f"torch.ops.{library}", name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = torch.overrides.resolve_name(function)
    if path is None:
        return None
    place, _, name = path.removesuffix(".__get__").rpartition(".")
    private = name.startswith("_") or "._" in place or not place.startswith("torch")
    return None if private else (place.replace("torch.functional", "torch"), name)


def markdown() -> Iterator[str]:
    """Yield the lines of docs/operations.md. Not collective."""
    yield "# Operations"
    yield ""
    yield f"Made by `mpishard ops --markdown` with torch {'.'.join(torch.__version__.split('.')[:2])}."
    yield ""
    yield "What a function does with a sharded dim; any other dim costs nothing:"
    yield ""
    for treatment, meaning in TREATMENTS.items():
        yield f"- **{treatment}**: {meaning}."
    family = ""
    for c in covered():
        if c.family != family:
            family = c.family
            yield from ("", f"## {family}", "", "| function | of | sharded dim |", "| --- | --- | --- |")
        yield f"| `{c.name}` | {', '.join(c.places)} | {c.treatment} |"
    yield from ("", "## Without a rule", "", "These raise `NoShardingRule`:", "")
    yield ", ".join(f"`{name}`" for name in uncovered())
