"""The XDMF companion of a file: a small XML text by which ParaView and VTK read its datasets as images."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import unescape

from mpishard.errors import FileError
from mpishard.io.file.schema import Schema, Variable
from mpishard.io.file.trust import open_regular
from mpishard.io.viewer.grid import Grid, check_companion, grids, replaced, stored

_TYPES = {
    "int8": ("Char", 1),
    "uint8": ("UChar", 1),
    "int16": ("Int", 2),
    "int32": ("Int", 4),
    "int64": ("Int", 8),
    "float32": ("Float", 4),
    "float64": ("Float", 8),
}


# XML has no word for these
_UNTOLD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


# VTK's reader takes FILE:/DATASET apart at the first ":", and leaves out bytes beyond "!" to "~" at both ends; one that
# it does not find so may end the viewer
_FILE_UNREAD, _DATASET_UNREAD = re.compile(r"\A[^!-~]|[:\\]"), re.compile(r":|[^!-~]\Z|\.\Z")


def _check_names(file: str, datasets: Iterable[str]) -> None:
    """Raise FileError where a name cannot be told in XDMF: no viewer would read the companion."""
    for name, unread, rule in (
        (file, _FILE_UNREAD, "':' and '\\', and begins with a visible sign of ASCII"),
        *((name, _DATASET_UNREAD, "':', and ends with a visible sign of ASCII other than '.'") for name in datasets),
    ):
        if _UNTOLD.search(name) or unread.search(name):
            raise FileError(
                f"write: {name!r} is no name in XDMF",
                expected=f"text that has no control characters, nor {rule}",
                got=ascii(name),
                fix="give it another name, or leave xdmf out",
            )


def check_xdmf(path: Path, form: Schema) -> None:
    """Raise before a file is written, where its companion could not be. Not collective; one rank calls it.

    Raises
    ------
    FileError
        A name is none in XDMF, scales are no numbers, or its name is that of another file's companion.
    OSError
        Something else has its name.
    """
    each = grids(form, _TYPES.__contains__)
    _check_names(path.name, [v.name for grid in each for v in grid.variables])
    check_companion(path.with_suffix(".xdmf"), path, _shown_by)


def _shown_by(companion: Path) -> str | None:
    """Return the name of the file that a companion shows, "" where it shows none; None of what is no companion."""
    with open_regular(companion) as file:
        if not (file.readline(64).startswith(b"<?xml") and file.readline(64).startswith(b"<Xdmf")):
            return None
        for line in iter(partial(file.readline, 1 << 16), b""):  # a stranger's may have no end
            if found := re.search(rb'Format="HDF">([^<:]*):/', line):
                return unescape(found[1].decode(errors="replace"))
    return ""


def write_xdmf(path: Path, form: Schema) -> None:
    """Write ``path`` with the suffix ``.xdmf``.

    Not collective; one rank calls it, on a complete file. Fields lie at the values of the scales of their dims, or
    at 0, 1, 2... Leading dims become fields ``name[i,j]``, steps become times. Complex, half and bool datasets, and
    unsigned ones of several bytes, are left out.
    """
    root = ET.Element("Xdmf", Version="2.0")
    domain = ET.SubElement(root, "Domain")
    for grid in grids(stored(path, form), _TYPES.__contains__):
        name = "x".join(map(str, grid.space))
        if grid.steps is None:
            _add_grid(domain, name, path, grid, None)
            continue
        steps = ET.SubElement(domain, "Grid", Name=name, GridType="Collection", CollectionType="Temporal")
        for step, time in zip(grid.steps.places, grid.steps.times):
            each = _add_grid(steps, f"{name} {step}", path, grid, step)
            each.insert(0, ET.Element("Time", Value=repr(time)))
    ET.indent(root)
    text = '<?xml version="1.0" ?>\n' + ET.tostring(root, encoding="unicode") + "\n"
    replaced(path.with_suffix(".xdmf"), lambda at: at.write_text(text, encoding="utf-8"))


def _add_grid(parent: Any, name: str, path: Path, grid: Grid, step: int | None) -> Any:
    element = ET.SubElement(parent, "Grid", Name=name, GridType="Uniform")
    whole = (1,) * (3 - len(grid.space)) + grid.space
    kind = "3DCoRectMesh" if grid.values is None else "3DRectMesh"
    ET.SubElement(element, "Topology", TopologyType=kind, Dimensions=_text(whole))
    if grid.values is None:
        geometry = ET.SubElement(element, "Geometry", GeometryType="ORIGIN_DXDYDZ")
        for text in ("0 0 0", "1 1 1"):
            _add_item(geometry, (3,), "float64", "XML").text = text
    else:
        geometry = ET.SubElement(element, "Geometry", GeometryType="VXVYVZ")
        for values in reversed(grid.values):
            _add_item(geometry, values.shape, "float64", "XML").text = " ".join(map(repr, values.tolist()))
        if len(grid.values) == 2:
            _add_item(geometry, (1,), "float64", "XML").text = "0"
    for v in grid.variables:
        for label, index in grid.fields(v):
            attribute = ET.SubElement(element, "Attribute", Name=label, AttributeType="Scalar", Center="Node")
            at = (*(() if step is None else (step,)), *index)
            full = (*(() if grid.steps is None else (grid.steps.total,)), *v.shape)
            _add_cells(attribute, path, v, whole, at, full)
    return element


def _add_cells(
    parent: Any, path: Path, v: Variable, whole: tuple[int, ...], at: tuple[int, ...], full: tuple[int, ...]
) -> None:
    if at:
        count = (*(1 for _ in at), *full[len(at) :])
        start = (*at, *(0 for _ in full[len(at) :]))
        parent = ET.SubElement(parent, "DataItem", ItemType="HyperSlab", Type="HyperSlab", Dimensions=_text(whole))
        slab = ET.SubElement(
            parent, "DataItem", Dimensions=f"3 {len(full)}", NumberType="Int", Precision="8", Format="XML"
        )
        slab.text = "  ".join(map(_text, (start, (1,) * len(full), count)))
    item = _add_item(parent, full if at else whole, v.dtype.name, "HDF")
    item.text = f"{path.name}:/{v.name.lstrip('/')}"


def _add_item(parent: Any, shape: Sequence[int], dtype: str, form: str) -> Any:
    kind, nbytes = _TYPES[dtype]
    return ET.SubElement(
        parent, "DataItem", Dimensions=_text(shape), NumberType=kind, Precision=str(nbytes), Format=form
    )


def _text(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
