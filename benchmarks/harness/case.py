"""Which cases there are, and what they say of themselves; imports neither them nor MPI."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpishard.errors import JobError, described

_HERE = Path(__file__).parents[1]


class Case(NamedTuple):
    """What a file says of itself: its first line, and its own options with their help."""

    summary: str
    options: dict[str, str]


def cases() -> dict[str, Case]:
    """Return every case by its name. Not collective; imports none, so that what one needs is not missed here."""
    found = {}
    for path in sorted(_HERE.glob("[!_]*.py")):
        tree = ast.parse(path.read_text())
        options = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OPTIONS":
                options = ast.literal_eval(node.value)
        found[path.stem] = Case((ast.get_docstring(tree) or "").split("\n", 1)[0], options)
    return found


def chosen(names: Sequence[str], settings: Mapping[str, str]) -> list[str]:
    """Return the cases of these names, all if there are none; they must have these options. Not collective."""
    known = cases()
    for name in names:
        if name not in known:
            raise JobError(
                described("--case", expected=f"one of {', '.join(known)}", got=repr(name), fix="ask with --list")
            )
    picked = list(dict.fromkeys(names)) or list(known)
    options = {key for name in picked for key in known[name].options}
    for key in settings:
        if key not in options:
            raise JobError(
                described(
                    "--set",
                    expected=f"an option of these cases: {', '.join(sorted(options)) or 'they have none'}",
                    got=key,
                    fix="ask with --list",
                )
            )
    return picked
