"""Rows of a profile: what every rank took, as least, mean and most over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from io import BytesIO, TextIOWrapper
from typing import Any

from mpishard.profiling.recorder import COMMUNICATION, Recorder

OUTSIDE = "outside"
_METRICS = ("calls", "time_s", "wait_s", "busy_s", "messages", "nbytes")


@dataclass(frozen=True)
class Spread:
    """One number over the ranks."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True)
class Row:
    """What the ranks took for one operation.

    Attributes
    ----------
    name, kind
        What was called, and ``"operation"``, ``"backward"`` (of an operation), ``"communication"`` (the same seen by
        what travelled: these are inside the others) or ``"outside"`` (what no operation took).
    calls : Spread
        How often.
    time_s, wait_s : Spread
        Seconds, and how many of them were waits for other ranks. Operations inside, with rows of their own, are not
        in it. Of communication, both are the waits.
    busy_s : Spread
        ``time_s - wait_s``.
    messages, nbytes : Spread
        What the ranks sent: messages (a collective is one), bytes.
    imbalance : float
        The most busy rank's ``busy_s`` over the mean: 1 is even.
    """

    name: str
    kind: str
    calls: Spread
    time_s: Spread
    wait_s: Spread
    busy_s: Spread
    messages: Spread
    nbytes: Spread
    imbalance: float


# of a metric over ranks: least, sum, most, and how many ranks have it
_Cell = tuple[float, float, float, int]
_Table = dict[tuple[str, str], dict[str, _Cell]]


def of_rank(recorder: Recorder) -> _Table:
    """Return the table of one rank alone. Not collective."""
    table: _Table = {}
    inside = 0
    for (kind, name), total in recorder.totals.items():
        time, wait = total.time / 1e9, total.wait / 1e9
        if kind != COMMUNICATION:
            inside += total.time
        table[kind, name] = _cells(total.calls, time, wait, total.messages, total.nbytes)
    elapsed = recorder.elapsed / 1e9
    table[OUTSIDE, "elapsed"] = _cells(1, elapsed, 0, 0, 0)
    table[OUTSIDE, OUTSIDE] = _cells(1, max(0.0, elapsed - inside / 1e9), 0, 0, 0)
    return table


def _cells(calls: int, time: float, wait: float, messages: int, nbytes: int) -> dict[str, _Cell]:
    values = (calls, time, wait, max(0.0, time - wait), messages, nbytes)
    return {metric: (value, value, value, 1) for metric, value in zip(_METRICS, values)}


def merged(a: _Table, b: _Table) -> _Table:
    """Return the table of the ranks of both. Not collective; its size does not grow with the ranks."""
    out = dict(a)
    for key, cells in b.items():
        mine = out.get(key)
        out[key] = cells if mine is None else {metric: _joined(mine[metric], cells[metric]) for metric in _METRICS}
    return out


def _joined(a: _Cell, b: _Cell) -> _Cell:
    return min(a[0], b[0]), a[1] + b[1], max(a[2], b[2]), a[3] + b[3]


def rows_of(table: _Table, ranks: int) -> tuple[list[Row], Spread]:
    """Return the rows, the longest first, and the elapsed seconds. Not collective."""
    rows, elapsed = [], Spread(0.0, 0.0, 0.0)
    for (kind, name), cells in table.items():
        spread = {metric: _spread(cell, ranks) for metric, cell in cells.items()}
        if (kind, name) == (OUTSIDE, "elapsed"):
            elapsed = spread["time_s"]
            continue
        busy = spread["busy_s"]
        rows.append(Row(name, kind, **spread, imbalance=busy.max / busy.mean if busy.mean else 1.0))
    rows.sort(key=lambda row: (row.kind == COMMUNICATION, -row.time_s.max, row.name))
    return rows, elapsed


def _spread(cell: _Cell, ranks: int) -> Spread:
    least, total, most, seen = cell
    return Spread(least if seen == ranks else 0, total / ranks, most)


def as_data(rows: Iterable[Row], elapsed: Spread, ranks: int) -> dict[str, Any]:
    """Return plain data, for JSON. Not collective."""
    return {"ranks": ranks, "elapsed_s": asdict(elapsed), "rows": [asdict(row) for row in rows]}


def as_text(rows: Iterable[Row], elapsed: Spread, ranks: int, encoding: str = "utf-8") -> str:
    """Return the table as text, of what can be encoded. Not collective."""
    # rich takes 50 ms to import: not before it is needed
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = f"{ranks} rank{'s' if ranks > 1 else ''}, {1e3 * elapsed.max:.1f} ms; over ranks: min/mean/max"
    table = Table(title=title, title_justify="left")
    table.add_column("operation")
    for head in ("calls", "time ms", "wait ms", "busiest/mean", "messages", "bytes"):
        table.add_column(head, justify="right", no_wrap=True)
    before = None
    for row in rows:
        if row.kind == COMMUNICATION and before != COMMUNICATION:
            table.add_section()
            table.add_row(Text("of these, by what travelled"))
        before = row.kind
        table.add_row(*map(Text, _cells_of(row)))
    # its lines are those that the encoding has
    out = TextIOWrapper(BytesIO(), encoding, "replace", newline="")
    Console(file=out, width=130).print(table)
    out.seek(0)
    return out.read()


_SUFFIX = {"backward": " backward", OUTSIDE: " of all operations"}


def _cells_of(row: Row) -> list[str]:
    travelled = row.kind == COMMUNICATION
    return [
        ("  " if travelled else "") + row.name + _SUFFIX.get(row.kind, ""),
        _counts(row.calls),
        "" if travelled else _ms(row.time_s),
        _ms(row.wait_s),
        "" if travelled else f"{row.imbalance:.2f}",
        _counts(row.messages),
        _counts(row.nbytes),
    ]


def _ms(s: Spread) -> str:
    return "" if not s.max else "/".join(f"{1e3 * value:.2f}" for value in (s.min, s.mean, s.max))


def _counts(s: Spread) -> str:
    if not s.max:
        return ""
    return f"{s.max:,.0f}" if s.min == s.max else "/".join(f"{value:,.0f}" for value in (s.min, s.mean, s.max))
