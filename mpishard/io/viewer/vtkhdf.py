"""The VTKHDF companion of a file: a small HDF5 file by which ParaView and VTK read its datasets as image data.

It holds no cells: its arrays are virtual datasets of the file beside, with which it moves.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.errors import FileError
from mpishard.io.file.close import made
from mpishard.io.file.open import import_h5py, looked_at, virtual_source
from mpishard.io.file.parts import first_source
from mpishard.io.file.schema import Schema, Variable
from mpishard.io.viewer.grid import Grid, Steps, check_companion, grids, replaced, stored

_VERSION = (2, 0)


def check_vtkhdf(path: Path, form: Schema) -> None:
    """Raise before a file is written, where its companion could not be. Not collective; one rank calls it.

    Raises
    ------
    FileError
        Scales are no numbers, two fields would have one name, or its name is that of another file's companion.
    OSError
        Something else has its name.
    """
    for target, grid in _targets(path, form):
        check_companion(target, path, _shown_by)
        names = [name for v in grid.variables for name, _ in _named(grid, v)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise FileError(
                f"write: {twice[0]!r} would be the name of two fields in VTKHDF",
                expected="names that differ there, where 'a/b' is called 'a.b', and parts of 'a' are 'a[0]', 'a[1]'",
                got=[v.name for v in grid.variables],
                fix="give one of them another name, or leave vtkhdf out",
            )


def _shown_by(companion: Path) -> str | None:
    """Return the name of the file that a companion shows; None of what is no companion."""
    with contextlib.suppress(Exception), looked_at(companion) as file:  # of a damaged file h5py raises anything
        fields = file["VTKHDF/PointData"]
        return next(filter(None, map(first_source, fields.values())), None)
    return None


def _targets(path: Path, form: Schema) -> list[tuple[Path, Grid]]:
    each = grids(form, lambda name: not name.startswith(("bool", "complex")))
    return [(path.with_suffix(f".{i + 1}.vtkhdf" if i else ".vtkhdf"), grid) for i, grid in enumerate(each)]


def _named(grid: Grid, v: Variable) -> list[tuple[str, tuple[int, ...]]]:
    return [(label.lstrip("/").replace("/", "."), index) for label, index in grid.fields(v)]


def write_vtkhdf(path: Path, form: Schema) -> None:
    """Write ``path`` with the suffix ``.vtkhdf``; the datasets of a second shape to ``.2.vtkhdf``, and so on.

    Not collective; one rank calls it, on a complete file. A VTKHDF image has one grid of even spacing: that of the
    scales of its dims where they are even, else 0, 1, 2... Leading dims become fields ``name[i,j]``, groups come
    with a dot (``fields.t``), steps become times (VTK 9.7 shows none where there is one step). Complex and bool
    datasets are left out.
    """
    for target, grid in _targets(path, stored(path, form)):
        replaced(target, lambda at, grid=grid: _write(at, path, grid))  # type: ignore[misc]


def _write(at: Path, path: Path, grid: Grid) -> None:
    h5py = import_h5py()
    with made(at) as file:
        image = file.create_group("VTKHDF")
        origin, spacing = _even(grid)
        # of a scale that falls; VTK wants spacings above 0
        direction = np.diag(np.copysign(1.0, spacing))
        image.attrs["Version"] = np.array(_VERSION)
        image.attrs.create("Type", b"ImageData", dtype=h5py.string_dtype("ascii", len("ImageData")))
        image.attrs["WholeExtent"] = np.array([[0, n - 1] for n in (*grid.space[::-1], 1)[:3]]).ravel()
        image.attrs["Origin"], image.attrs["Spacing"] = np.array(origin), np.abs(spacing)
        image.attrs["Direction"] = direction.ravel()
        fields = image.create_group("PointData")
        # where one step is shown, VTK reads arrays that have no such dim
        total = () if grid.steps is None else (grid.steps.total,)
        one = grid.steps is not None and len(grid.steps.places) == 1
        place: Any = () if grid.steps is None else grid.steps.places if one else (slice(None),)
        kept = _kept(grid.space)
        cells = tuple(slice(None) if keep else 0 for keep in kept)
        flat = tuple(n for n, keep in zip(grid.space, kept) if keep)
        for v in grid.variables:
            source = virtual_source(path.name, v.name, (*total, *v.shape), v.dtype)
            for name, index in _named(grid, v):
                field = h5py.VirtualLayout((*(() if one else total), *flat), v.dtype)
                field[...] = source[(*place, *index, *cells)]
                fields.create_virtual_dataset(name, field)
        if grid.steps is not None:
            _add_steps(image, grid.steps, list(fields))


def _kept(space: tuple[int, ...]) -> tuple[bool, ...]:
    """Tell which dims arrays have so that VTK reads them: as one cell may be along a dim, not all."""
    if len(space) == 3 and space[0] > space[1] == 1:
        return tuple(n > 1 for n in space)  # from VTK 9.7.2 on, and before in no way
    first = next((dim for dim, n in enumerate(space) if n > 1), len(space) - 1)
    return tuple(dim >= first for dim in range(len(space)))


def _add_steps(image: Any, shown: Steps, names: list[str]) -> None:
    steps = image.create_group("Steps")
    steps.attrs["NSteps"] = len(shown.times)
    steps["Values"] = np.array(shown.times)
    offsets = steps.create_group("PointDataOffsets")
    for name in names:
        offsets[name] = np.array(shown.places if len(shown.places) > 1 else (0,))


def _even(grid: Grid) -> tuple[list[float], list[float]]:
    """Return origin and spacing in the order x, y, z."""
    origin, spacing = [0.0] * 3, [1.0] * 3
    steps = [np.diff(v) for v in grid.values or ()]
    if grid.values is None or not all(np.allclose(d, d[:1].sum(), rtol=1e-4, atol=0) for d in steps):
        return origin, spacing
    for i, (v, d) in enumerate(zip(reversed(grid.values), reversed(steps))):
        origin[i] = float(v[0])
        if len(d) and d[0]:
            spacing[i] = float(d.mean())
    return origin, spacing
