"""What a run leaves: JSON for programs, a Markdown table for people, a plot for each case."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import lines
from benchmarks.harness.measure import Row, shown

JSON, MARKDOWN = "benchmarks.json", "benchmarks.md"


def write(folder: Path, machine: dict[str, Any], options: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write figures and table, whole each time. Not collective: for rank 0."""
    data = {"machine": machine, "options": options, "rows": [asdict(row) for row in rows]}
    (folder / JSON).write_text(json.dumps(data, indent=1) + "\n")
    (folder / MARKDOWN).write_text("\n".join(markdown(machine, rows)) + "\n")


def markdown(machine: dict[str, Any], rows: Iterable[Row]) -> Iterable[str]:
    """Give the lines of the table. Not collective."""
    yield "# Benchmarks"
    for line in lines(machine):
        yield f"\n{line}"
    yield "\nMedians over interleaved rounds, quartiles in brackets; ratios are of the same round."
    for case, of_case in groupby(rows, lambda row: row.case):
        yield f"\n## {case}\n"
        yield "| what | by | figure | of the floor | above it |"
        yield "| --- | --- | ---: | ---: | ---: |"
        for row in of_case:
            if row.median is None:
                figure = [_escaped(row.error), "", ""]
            else:
                figure = [shown(row.median, row.unit), "", ""]
                if row.ratio is not None and row.above is not None:
                    figure[1] = f"{row.ratio:.2f} of {row.floor} ({row.ratio_low:.2f}-{row.ratio_high:.2f})"
                    figure[2] = shown(row.above, row.unit)
            yield f"| {' | '.join([_escaped(row.what), _escaped(row.who), *figure])} |"


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def plot(folder: Path, case: str, rows: Sequence[Row], axis: str) -> Path | None:
    """Draw a case: along ``axis`` where it has one, else ratios to the floor; None without matplotlib or figures."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    have = [row for row in rows if row.median is not None]
    along = [row for row in have if axis in row.parameters]
    ratios = [row for row in have if row.ratio is not None]
    if not along and not ratios:
        return None
    figure, ax = plt.subplots(figsize=(8, 5 if along else max(3, 0.35 * len(ratios))))
    if along:
        _lines(ax, along, axis)
    else:
        _bars(ax, ratios)
    ax.set_title(case)
    path = folder / f"{case}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _lines(ax: Any, rows: Sequence[Row], axis: str) -> None:
    curves: dict[str, list[Row]] = {}
    for row in rows:
        rest = ", ".join(f"{key} {value}" for key, value in row.parameters.items() if key != axis)
        curves.setdefault(f"{row.who}{rest and f' ({rest})'}", []).append(row)
    for label, curve in curves.items():
        curve.sort(key=lambda row: row.parameters[axis])
        x = [row.parameters[axis] for row in curve]
        errors = [[abs((row.median or 0) - (end or 0)) for row, end in zip(curve, ends)] for ends in (
            [row.low for row in curve], [row.high for row in curve])]  # fmt: skip
        ax.errorbar(x, [row.median for row in curve], errors, marker="o", label=label, capsize=2)
    ax.set(xscale="log", yscale="log", xlabel=axis, ylabel=rows[0].unit)
    ax.legend(fontsize=6)


def _bars(ax: Any, rows: Sequence[Row]) -> None:
    names = [f"{row.what}: {row.who}" for row in rows]
    middle = [row.ratio or 0.0 for row in rows]
    errors = [[abs(m - (end or 0.0)) for m, end in zip(middle, ends)] for ends in (
        [row.ratio_low for row in rows], [row.ratio_high for row in rows])]  # fmt: skip
    ax.barh(range(len(rows)), middle, xerr=errors)
    ax.axvline(1.0, color="black", linewidth=0.8)
    ax.set_yticks(range(len(rows)), names, fontsize=6)
    ax.invert_yaxis()
    ax.set_xlabel("time, relative to the floor of the same round")
