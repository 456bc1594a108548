"""Runs cases, and writes the report."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import machine, report
from benchmarks.harness.measure import WORLD, Bench, Row, Unfit, say
from mpishard.comm import guard
from mpishard.comm.memory import heap
from mpishard.errors import FileError, MpishardError, described


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
        Which, as `chosen` returns them.
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
    given = dict(settings or {})
    torch.set_num_threads(1)
    heap.keep_freed()
    out = Path(output) if output is not None else None
    _agree("--output", lambda: out.mkdir(parents=True, exist_ok=True) if out is not None and WORLD.rank == 0 else None)
    facts = machine.described()
    for line in machine.lines(facts) if facts else ():
        say(line)
    options = {"cases": list(names), "quick": quick, "settings": given}
    rows: list[Row] = []
    for name in names:
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


def _agree(option: str, action: Any) -> None:
    error: MpishardError | None = None
    try:
        action()
    except OSError as e:
        error = FileError(
            described(option, expected="a folder that can be written to", got=e, fix="name another folder")
        )
    guard.agree(WORLD, error, "bench")


@contextlib.contextmanager
def _files(parent: str | None) -> Iterator[Path]:
    made: list[str] = []

    def make() -> None:
        if WORLD.rank == 0:
            made.append(tempfile.mkdtemp(prefix="mpishard-bench-", dir=parent))

    _agree("--folder", make)
    place = Path(WORLD.bcast(made[0] if made else None))
    try:
        yield place
    finally:
        if WORLD.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
