"""`mpishard bench`: speed beside a floor, in one run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from mpishard.comm import exit
from mpishard.errors import JobError


@click.command()
@click.option("--list", "listed", is_flag=True, help="Say which cases there are.")
@click.option("--case", "cases", multiple=True, metavar="NAME", help="Run this one; may be repeated. [default: all]")
@click.option("--quick", is_flag=True, help="Few repetitions, small sizes: only shows that they work.")
@click.option("--rounds", type=click.IntRange(2), help="Interleaved rounds. [default: 11; 2 with --quick]")
@click.option("--output", metavar="DIR", help="A folder for JSON, a table in Markdown, and plots.")
@click.option("--folder", metavar="DIR", help="Where cases make files. [default: the system's temporary folder]")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="An option of a case; see --list.")
def bench(
    listed: bool,
    cases: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    output: str | None,
    folder: str | None,
    settings: tuple[str, ...],
) -> int:
    """Measure this package beside programs by hand, plain torch and rivals, in one run. Collective.

    From a checkout, whose folder benchmarks/ has the cases: the installed package does not.

    \b
    mpiexec -n 2 mpishard bench --case conv --case halo --output results
    mpishard bench --list
    """
    pairs = [text.partition("=") for text in settings]
    if wrong := [name for name, sign, _ in pairs if not (name and sign)]:
        raise click.UsageError(f"--set takes NAME=VALUE, not {wrong[0]!r}")
    if listed:
        return _list()
    given = {name: value for name, _, value in pairs}
    # before MPI starts
    picked = _harness("case").chosen(cases, given)
    rows = _harness("run").run(picked, quick=quick, rounds=rounds, output=output, folder=folder, settings=given)
    return 0 if any(row.median is not None for row in rows) else 1


def _list() -> int:
    if not exit.first():
        return 0
    for name, case in _harness("case").cases().items():
        click.echo(f"{name:<13} {case.summary}")
        for option, what in case.options.items():
            click.echo(f"{'':<16}--set {option}=...  {what}")
    return 0


def _harness(module: str) -> Any:
    """Return a module of benchmarks/harness, of the checkout that this package, or the current folder, is."""
    places = [Path(__file__).parents[2], Path.cwd()]
    for place in places:
        if (place / "benchmarks" / "harness" / "run.py").is_file():
            if str(place) not in sys.path:
                sys.path.insert(0, str(place))
            return importlib.import_module(f"benchmarks.harness.{module}")
    raise JobError(
        "bench: there are no cases here",
        expected=f"a checkout of mpishard, with its folder benchmarks, at one of {', '.join(map(str, places))}",
        got="an installed package, which does not have them",
        fix="start it in a checkout of this version",
    )
