"""Finds the cases, runs them, and writes the report."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import machine, report
from benchmarks.harness.measure import WORLD, Bench, Row, Unfit, say
from mpishard.comm import guard
from mpishard.errors import FileError, JobError, MpishardError, described

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


def chosen(names: Sequence[str]) -> list[str]:
    """Return the cases of these names, all if there are none. Not collective."""
    known = cases()
    for name in names:
        if name not in known:
            raise JobError(
                described("--case", expected=f"one of {', '.join(known)}", got=repr(name), fix="ask with --list")
            )
    return list(dict.fromkeys(names)) or list(known)


def run(
    names: Sequence[str],
    *,
    quick: bool = False,
    rounds: int | None = None,
    output: str | os.PathLike[str] | None = None,
    folder: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> list[Row]:
    """Run cases, and write what they found. Collective over all ranks of the program.

    Parameters
    ----------
    names
        Which; none: all.
    quick
        Few repetitions, small sizes: shows that they work.
    rounds
        Interleaved rounds; None: 11, or 2 where quick.
    output
        A folder for JSON, table and plots, on rank 0; None: none.
    folder
        Where cases make files; None: the system's temporary folder.
    settings
        Options of the cases' own.

    Returns
    -------
    list of Row
        All figures; errors of rivals, and of cases that cannot run here, are rows.
    """
    picked = chosen(names)
    torch.set_num_threads(1)
    given = dict(settings or {})
    _check(given, picked)
    out = Path(output) if output is not None else None
    _agree(lambda: out.mkdir(parents=True, exist_ok=True) if out is not None and WORLD.rank == 0 else None)
    facts = machine.described()
    for line in machine.lines(facts) if facts else ():
        say(line)
    options = {"cases": picked, "quick": quick, "settings": given}
    rows: list[Row] = []
    for name in picked:
        before, axis = len(rows), ""
        with _files(folder) as place:
            bench = Bench(name, quick, rounds or (2 if quick else 11), place, given, rows)
            try:
                module = importlib.import_module(f"benchmarks.{name}")
                axis = getattr(module, "AXIS", "")
                module.run(bench)
            except (ImportError, Unfit) as error:
                bench.failed("all", "ours", error)
        gc.collect()  # on all ranks here: meshes and plans of a case are freed together
        if out is not None and facts is not None:
            report.write(out, facts, {**options, "rounds": bench.rounds}, rows)
            report.plot(out, name, rows[before:], axis)
    if out is not None:
        say(f"written: {out / report.JSON}, {out / report.MARKDOWN}")
    return rows


def _check(settings: Mapping[str, str], picked: Sequence[str]) -> None:
    every = cases()
    known = {key for name in picked for key in every[name].options}
    for key in settings:
        if key not in known:
            raise JobError(
                described(
                    "--set",
                    expected=f"one of {', '.join(sorted(known)) or 'none: these cases have no options'}",
                    got=key,
                    fix="ask with --list",
                )
            )


def _agree(action: Any) -> None:
    error: MpishardError | None = None
    try:
        action()
    except OSError as e:
        error = FileError(
            described("--output", expected="a folder that can be written to", got=e, fix="name another folder")
        )
    guard.agree(WORLD, error, "bench")


@contextlib.contextmanager
def _files(parent: str | None) -> Iterator[Path]:
    made: list[str] = []
    _agree(lambda: made.append(tempfile.mkdtemp(prefix="mpishard-bench-", dir=parent)) if WORLD.rank == 0 else None)
    place = Path(WORLD.bcast(made[0] if made else None))
    try:
        yield place
    finally:
        if WORLD.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
