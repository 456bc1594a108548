"""How every case takes its times: interleaved rounds in one run, the slowest rank, medians of ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
Times = dict[str, list[float]]
_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6))


class Unfit(Exception):
    """A case cannot run here, as all ranks know: a package, a GPU or ranks are missing."""


@dataclass
class Row:
    """One figure, over rounds: of times, of all ranks the slowest.

    Attributes
    ----------
    case, what, who
        Which file, what is done, and by whom.
    unit
        Of the values; ``"s"`` for times.
    median, low, high
        Over rounds; ``low`` and ``high`` are quartiles.
    floor
        By whom the floor is, of the same rounds; "" for none.
    ratio, ratio_low, ratio_high
        Median and quartiles of the ratio to the floor in the same round.
    above
        Median of what is above the floor in the same round.
    rounds
        How many.
    parameters
        What else tells rows apart: extents, bytes, tokens.
    error
        Why there is no figure.
    """

    case: str
    what: str
    who: str
    unit: str = "s"
    median: float | None = None
    low: float | None = None
    high: float | None = None
    floor: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    above: float | None = None
    rounds: int = 0
    parameters: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass
class Bench:
    """What a case is given: how long it may measure, and where its figures go.

    Attributes
    ----------
    case
        Name of the case.
    quick
        Whether sizes and repetitions are only to show that it works.
    rounds
        Interleaved rounds.
    folder
        Where files may be made, the same on all ranks.
    settings
        Values of the case's own ``OPTIONS``.
    rows
        All figures, of all cases; the same on every rank.
    """

    case: str
    quick: bool
    rounds: int
    folder: Path
    settings: Mapping[str, str]
    rows: list[Row] = field(default_factory=list)

    def setting(self, name: str, default: Any) -> Any:
        """Return the value of an option of the case, of the type of its default."""
        text = self.settings.get(name)
        if text is None:
            return default
        try:
            value = text.split(",") if isinstance(default, list) else type(default)(text)
        except ValueError:
            value = 0
        if isinstance(value, int | float) and value <= 0:
            raise Unfit(f"--set {name} takes a value like {default}, above 0, not {text!r}")
        return value

    def compare(
        self,
        what: str,
        calls: Mapping[str, Callable[[], object]],
        *,
        floor: str,
        count: int,
        tidy: Callable[[], object] = lambda: None,
        rounds: int | None = None,
        **parameters: Any,
    ) -> Times:
        """Time calls in turns, and note a row for each. Collective.

        Parameters
        ----------
        what
            What they all do.
        calls
            Whose call it is -> the call.
        floor
            Whose call the others are compared with.
        count
            Calls between two looks at the clock.
        tidy
            Goes before each, and is not timed.
        **parameters
            See `Row`.
        """
        times = interleaved(calls, count, rounds or self.rounds, tidy)
        self.add(what, times, floor=floor, **parameters)
        return times

    def add(self, what: str, times: Mapping[str, Sequence[float]], *, floor: str = "", **parameters: Any) -> None:
        """Note a row for each of several times of the same rounds. Not collective."""
        for who, mine in times.items():
            row = Row(self.case, what, who, parameters=parameters, rounds=len(mine))
            row.low, row.median, row.high = _quartiles(mine)
            if floor and who != floor:
                theirs = times[floor]
                row.floor = floor
                row.ratio_low, row.ratio, row.ratio_high = _quartiles([a / b for a, b in zip(mine, theirs)])
                row.above = statistics.median(a - b for a, b in zip(mine, theirs))
            self._note(row)

    def figure(
        self, what: str, values: float | Sequence[float], unit: str, who: str = "ours", **parameters: Any
    ) -> None:
        """Note what is no time: one value, or one a round. Not collective."""
        every = [values] if isinstance(values, (int, float)) else list(values)
        low, median, high = _quartiles(every)
        self._note(Row(self.case, what, who, unit, median, low, high, rounds=len(every), parameters=parameters))

    def failed(self, what: str, who: str, error: object, **parameters: Any) -> None:
        """Note that there is no figure, and why. Not collective."""
        self._note(Row(self.case, what, who, parameters=parameters, error=str(error) or type(error).__name__))

    def _note(self, row: Row) -> None:
        before = self.rows[-1] if self.rows else None
        self.rows.append(row)
        if before is None or (before.case, before.what) != (row.case, row.what):
            say(f"{row.case}: {row.what}")
        say(f"  {row.who:<24}{told(row)}")


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def told(row: Row) -> str:
    """Return the figures of a row in a line. Not collective."""
    if row.error or row.median is None:
        return f"  none: {row.error}"
    text = f"{shown(row.median, row.unit):>14}"
    if row.ratio is not None and row.above is not None:
        text += f"{row.ratio:>8.2f}x {row.floor} ({row.ratio_low:.2f}-{row.ratio_high:.2f})"
        text += f", {'+' * (row.above >= 0)}{shown(row.above, row.unit)}"
    return text


def shown(value: float, unit: str) -> str:
    """Return a number with its unit; times in that which suits them. Not collective."""
    if unit != "s":
        return f"{value:.4g} {unit}"
    name, factor = next((u for u in _UNITS if abs(value) * u[1] >= 1), _UNITS[-1])
    return f"{value * factor:.4g} {name}"


def seconds(call: Callable[[], object], count: int) -> float:
    """Return the mean time of ``count`` calls on the slowest rank. Collective."""
    WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return WORLD.allreduce((time.perf_counter() - start) / count, op=MPI.MAX)


def interleaved(
    calls: Mapping[str, Callable[[], object]], count: int, rounds: int, tidy: Callable[[], object] = lambda: None
) -> Times:
    """Time every call once per round, so that a busy moment of the machine meets all of them. Collective."""
    for call in calls.values():
        for _ in range(max(2, count // 10)):
            tidy()
            call()
    times: Times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            tidy()
            times[name].append(seconds(call, count))
    return times


def say(*parts: object) -> None:
    """Print on rank 0."""
    if WORLD.rank == 0:
        print(*parts, flush=True)
