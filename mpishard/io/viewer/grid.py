"""What viewers are told of a file: which datasets are fields on one grid, and at what times."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpishard.errors import FileError
from mpishard.io.file.open import looked_at
from mpishard.io.file.schema import NO_VARIABLE, Schema, Variable, in_place
from mpishard.io.file.trust import check_length, check_memory, check_replaceable, fresh, hidden, shown

# of one dataset: each cell of its leading dims is one field
_MAX_FIELDS = 64


class Steps(NamedTuple):
    """Which of a file's steps are shown: their places in it and their times, which rise."""

    total: int
    places: tuple[int, ...]
    times: tuple[float, ...]

    @classmethod
    def of(cls, values: np.ndarray[Any, Any]) -> Steps:
        """Sort steps by their times; of those at one time, as after a restart, the last is shown. Not collective.

        Viewers look for a time in a list that rises, and find another step in one that does not.

        Examples
        --------
        >>> Steps.of(np.array([0.0, 1.0, 2.0, 1.0]))
        Steps(total=4, places=(0, 3, 2), times=(0.0, 1.0, 2.0))
        """
        times, behind = np.unique(values[::-1], return_index=True)
        return cls(len(values), tuple((len(values) - 1 - behind).tolist()), tuple(times.tolist()))


class Grid(NamedTuple):
    """Datasets on the same space: its extents (z, y, x or y, x), and per dim the values of its scale, if all have one.

    ``steps`` is None where the file has none.
    """

    space: tuple[int, ...]
    values: tuple[np.ndarray[Any, Any], ...] | None
    steps: Steps | None
    variables: tuple[Variable, ...]

    def fields(self, v: Variable) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Give the name of each field of a dataset, and its index in the leading dims. Not collective."""
        leading = v.shape[: len(v.shape) - len(self.space)]
        for index in product(*map(range, leading)):
            yield f"{v.name}[{','.join(map(str, index))}]" if math.prod(leading) > 1 else v.name, index


def stored(path: Path, form: Schema) -> Schema:
    """Return a form with the dims and the scales that a file with steps has, its times among them.

    Not collective; one rank calls it. They are those of the first step, whatever the calls for later ones give.

    Raises
    ------
    FileError
        Cells of a scale lie outside of the file, or do not fit into memory.
    """
    if form.append is None:
        return form
    variables, scales = [], {}
    with looked_at(path) as file:
        for v in form.variables:
            dims = [dim.label for dim in file[v.name].dims][1:] if v.name in file else [""]
            variables.append(v._replace(dims=tuple(dims) if all(dims) else None))
        for name in {form.append, *(dim for v in variables for dim in v.dims or ())}:
            if file.get(name, getlink=True) is not None:
                scale, got = in_place(file, path, name)
                if scale is None or scale.ndim != 1:
                    raise _no_place(name, "one dim of cells in the file itself", got)
                if NO_VARIABLE not in str(scale.attrs.get("NAME", "")):
                    check_memory(scale.nbytes, f"the scale {shown(name)}")
                    scales[name] = scale[:]
    return form._replace(variables=tuple(variables), scales=scales)


def grids(form: Schema, takes: Callable[[str], bool]) -> list[Grid]:
    """Return the grids of a file, of one with steps by what is `stored`.

    Not collective. The last two dims of a dataset of two dims, the last three of one of more, are space. Datasets of
    too many fields, or of a dtype that ``takes(name)`` does not want, are left out.

    Raises
    ------
    FileError
        A scale is no place of cells.
    """
    steps = None if form.append is None else Steps.of(_numbers(form, form.append))
    by_space: dict[Any, list[Variable]] = {}
    for v in form.variables:
        rank = min(3, len(v.shape))
        space, leading = v.shape[-rank:], v.shape[:-rank]
        if rank >= 2 and takes(v.dtype.name) and 0 not in v.shape and math.prod(leading) <= _MAX_FIELDS:
            by_space.setdefault((space, v.dims[-rank:] if v.dims else None), []).append(v)
    out = []
    for (space, dims), variables in by_space.items():
        values = None
        if dims is not None and all(dim in form.scales for dim in dims):
            values = tuple(_numbers(form, dim) for dim in dims)
        out.append(Grid(space, values, steps, tuple(variables)))
    return out


def _numbers(form: Schema, dim: str) -> np.ndarray[Any, Any]:
    given = form.scales.get(dim, 0)
    try:
        return np.asarray(given, float).ravel()
    except (TypeError, ValueError) as e:
        raise _no_place(dim, "real numbers", f"{np.asarray(given).dtype} ({type(e).__name__}: {e})") from e


def _no_place(dim: str, expected: str, got: str) -> FileError:
    return FileError(
        f"write: the scale of {shown(dim)} is no place that a viewer knows",
        expected=expected,
        got=got,
        fix="give numbers, with their unit in variable_attrs=; or leave xdmf and vtkhdf out",
    )


def check_companion(target: Path, path: Path, shown_by: Callable[[Path], str | None]) -> None:
    """Raise where a companion would take the place of anything but the one of the same file. Not collective.

    Parameters
    ----------
    target, path
        The companion, and the file.
    shown_by
        Returns the name of the file that a companion shows, "" for none; None for what is no companion.

    Raises
    ------
    FileError
        It is that of another file, or what is no companion, or its name is too long.
    OSError
        It is no regular file.
    """
    check_replaceable(target)
    check_length(target)
    if target.is_symlink() or not target.exists():
        return
    own = shown_by(target)
    if own not in ("", path.name):
        raise FileError(
            f"write: {target.name!r} is not the companion of {path.name!r}",
            expected="no file of that name, or one that shows this file",
            got="a file that is no companion" if own is None else f"one that shows {shown(own)}",
            fix="give the file a name that differs before its suffix too, or move away what is there",
        )


def replaced(target: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a hidden name, and give it its own. Not collective; one rank calls it."""
    partial = hidden(target, secrets.token_hex(6))
    try:
        fresh(partial).close()
        write(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
