"""`mpishard ops`: which torch functions run on shards, and what they do with a sharded dim."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mpishard.ops.op_table import Covered


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print the page docs/operations.md.")
@click.option("--missing", is_flag=True, help="List the functions without a rule instead.")
def ops(name: str | None, as_json: bool, markdown: bool, missing: bool) -> int:
    """List the torch functions that run on sharded tensors.

    NAME is an operation, such as conv2d or torch.nn.functional.conv2d, or a family: a folder such as window, or a
    file such as pool.
    """
    # torch takes a second to import: not for --help
    from mpishard.ops import op_table

    if markdown:
        click.echo("\n".join(op_table.markdown()))
        return 0
    none = op_table.uncovered()
    if missing:
        click.echo(json.dumps(none) if as_json else "\n".join(none))
        return 0
    table = op_table.covered()
    named = [c for c in table if name is not None and _is_named(c, name)]
    family = [c for c in table if name in (None, c.family, *c.family.split("/"))]
    if not named and not family:
        return _without_rule(name or "", table, none)
    if as_json:
        click.echo(json.dumps([c._asdict() for c in named or family], indent=1))
        return 0
    if named:
        _show(named)
    if family:
        _list(family)
        count = len({(place, c.name) for c in table for place in c.places})
        click.echo(f"{count} functions have rules, {len(none)} none")
    return 0


def _is_named(covered: Covered, name: str) -> bool:
    place, _, last = name.rpartition(".")
    place = {"F": "nn.functional"}.get(place, place)
    return last == covered.name and (not place or not {place, f"torch.{place}"}.isdisjoint(covered.places))


def _show(named: Sequence[Covered]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from mpishard.tensor.registry import TREATMENTS

    table = Table("function", Column("of", overflow="fold"), "family", "sharded dim", "which means")
    for c in named:
        table.add_row(c.name, ", ".join(c.places), c.family, c.treatment, TREATMENTS[c.treatment])
    Console().print(table)


def _list(family: Sequence[Covered]) -> None:
    for name, members in groupby(family, lambda c: c.family):
        click.echo(name)
        for treatment, same in groupby(sorted(members, key=lambda c: c.treatment), lambda c: c.treatment):
            click.echo(f"  {treatment:<10}{' '.join(sorted({c.name for c in same}))}")


def _without_rule(name: str, table: Sequence[Covered], none: Sequence[str]) -> int:
    last = name.rpartition(".")[2]
    known = [path for path in none if path.rpartition(".")[2] == last]
    if known:
        click.echo(f"{', '.join(known)}: no rule; on sharded tensors NoShardingRule is raised (docs/extending.md)")
        return 1
    families = sorted({c.family for c in table})
    near = get_close_matches(last, {c.name for c in table} | {part for f in families for part in f.split("/")})
    raise click.UsageError(
        f"no operation or family {name!r}; near it: {', '.join(near)}"
        if near
        else f"no operation or family {name!r}; families: {', '.join(families)}"
    )
