"""Which cells of a dataset are read: numbers and slices per dim, as numpy has them. Pure arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpishard.errors import LayoutError


class Axis(NamedTuple):
    """Cells ``start + k * step`` of one dataset dim, for ``k`` in ``range(count)``; a number drops the dim."""

    start: int
    count: int  # type: ignore[assignment]
    step: int
    kept: bool


def selected(select: Any, shape: Sequence[int], name: str = "") -> tuple[Axis, ...]:
    """Return one `Axis` per dim of the dataset.

    Not collective.

    Parameters
    ----------
    select
        A number, a slice with a positive step, an Ellipsis, or a tuple of them; dims without one are whole.
        A number drops its dim, as in numpy. None: all cells.
    shape
        Of the dataset.
    name
        For the error's text.

    Raises
    ------
    LayoutError
        Too many entries, a number out of range, a step below 1, or anything else.

    Examples
    --------
    >>> selected((-1, slice(2, None, 2)), (3, 5))
    (Axis(start=2, count=1, step=1, kept=False), Axis(start=2, count=2, step=2, kept=True))
    """
    entries = list(select) if isinstance(select, tuple) else [] if select is None else [select]
    holes = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    given = len(entries) - len(holes)
    if len(holes) > 1 or given > len(shape):
        raise _refused(name, f"at most {len(shape)} entries and one Ellipsis", select)
    at = holes[0] if holes else len(entries)
    whole = [slice(None)] * (len(shape) - given)
    entries = [*entries[:at], *whole, *entries[at + 1 :]]
    return tuple(_axis(entry, n, name, select) for entry, n in zip(entries, shape))


def _axis(entry: Any, n: int, name: str, select: Any) -> Axis:
    if isinstance(entry, slice):
        try:
            start, stop, step = entry.indices(n)
        except (TypeError, ValueError):
            raise _refused(name, "slices of whole numbers", select) from None
        if step < 1:
            raise _refused(name, "slices with a step of at least 1", select)
        count = max(0, -(-(stop - start) // step))
        # HDF5 counts in 64 bits, and a step of one cell goes nowhere
        return Axis(start, count, step if count > 1 else 1, True)
    try:
        index = operator.index(entry)
    except TypeError:
        raise _refused(name, "numbers, slices and one Ellipsis", select) from None
    if isinstance(entry, bool) or not -n <= index < n:
        raise _refused(name, f"numbers from {-n} to {n - 1} for a dim of {n} cells", select)
    return Axis(index % n, 1, 1, False)


def _refused(name: str, expected: str, select: Any) -> LayoutError:
    return LayoutError(
        f"read: select does not fit {name!r}",
        expected=expected,
        got=repr(select),
        fix="index it as a numpy array of the dataset's shape",
    )
