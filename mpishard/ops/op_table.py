"""Which torch functions have a sharding rule, by family, and what each does with a sharded dim."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mpishard.tensor.registry import RULES, Rule
from mpishard.tensor.shard_tensor import ShardTensor

TREATMENTS = {
    "local": "on the blocks: nothing travels (operands that are laid out differently are brought to one layout)",
    "halo": "cells near the borders come from the ranks beside",
    "reduction": "small sums or other totals over ranks",
    "moves": "cells change ranks, and no rank holds more than its share",
    "gathers": "the sharded dims that the function needs whole are gathered; with a warning above "
    "`MPISHARD_GATHER_WARN` bytes (default 1 GiB; 0: always, -1: never)",
}

# where a rule's own docstring does not say more
_OF_FAMILY = {
    "halo": "adaptive conv gradient interpolate neighbourhood pad pool roll spectrogram unfold unpool",
    "reduction": "alias extremum histogram linear loss norm reduction scan softmax statistic vector",
    "moves": "attention fourier join multihead pick pixel reshape write",
    "gathers": "fractional gather matrix order sample",
    "local": "diagonal embedding foreach hook index mask metadata pointwise random recurrent repeat special twin view",
}
# where neither is precise
_OF_FUNCTION = {
    "glu": "moves",
    "gradient": "halo",
    "index_reduce_": "gathers",
    "repeat": "moves",
    "scaled_dot_product_attention": "moves",
    "select": "moves",
    "tile": "moves",
    "trace": "reduction",
}
_DEFAULT = {family: treatment for treatment, families in _OF_FAMILY.items() for family in families.split()}


class Covered(NamedTuple):
    """A function with a rule: its name, where torch has it, the rule's family, and the treatment of sharded dims."""

    name: str
    places: tuple[str, ...]
    family: str
    treatment: str


def family_of(rule: Rule) -> str:
    """Return the name of the module that has the rule. Not collective."""
    return rule.__module__.rpartition(".")[2]


def treatment_of(rule: Rule) -> str:
    """Return what a rule does with a sharded dim: as its docstring says, else as its family does. Not collective.

    Raises
    ------
    KeyError
        Neither says it: declare the family in this module.
    """
    family = "metadata" if rule.__module__.startswith("mpishard.tensor.") else family_of(rule)
    default = _DEFAULT[family] if rule.__module__.startswith("mpishard.") else "local"
    text = re.sub(r"\s+", " ", rule.__doc__ or "")
    said = re.search(r"(Not collective|Neighborwise collective|Collective).*", text)
    if said is None:
        return default
    if re.search(r"gather(s|ed)?\b", said.group(0)):
        return "gathers"
    if said.group(0).startswith("Neighborwise"):
        return "halo"
    if said.group(0).startswith("Not collective."):
        return "local"
    return default


def covered() -> list[Covered]:
    """Return all public torch functions with rules, sorted by family and name. Not collective."""
    found: dict[tuple[str, str, str], set[str]] = {}
    for function, rule in RULES.items():
        path = _path(function)
        if path is not None:
            place, name = path
            treatment = _OF_FUNCTION.get(name) or treatment_of(rule)
            found.setdefault((family_of(rule), name, treatment), set()).add(place)
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
