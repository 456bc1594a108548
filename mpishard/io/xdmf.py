"""The XDMF companion of a file: a small XML text by which ParaView and VTK read its datasets as images."""

from __future__ import annotations

import math
import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.io.file import import_h5py
from mpishard.io.form import Form, Variable

# of one dataset: each cell of its leading dims is one field
_MAX_FIELDS = 64
_TYPES = {
    "int8": ("Char", 1),
    "uint8": ("UChar", 1),
    "int16": ("Int", 2),
    "int32": ("Int", 4),
    "int64": ("Int", 8),
    "float32": ("Float", 4),
    "float64": ("Float", 8),
}


def write_xdmf(path: Path, form: Form) -> None:
    """Write ``path`` with the suffix ``.xdmf``.

    Not collective; one rank calls it, on a complete file. The last two dims of a dataset of two dims, the last
    three of one of more, are space: y and x, or z, y and x, at the values of their scales, or 0, 1, 2... Leading
    dims become fields ``name[i,j]``, steps become times. Complex, half and bool datasets are left out.
    """
    root = ET.Element("Xdmf", Version="2.0")
    domain = ET.SubElement(root, "Domain")
    times: list[float] | None = None
    if form.append is not None:
        with import_h5py().File(path, "r", locking=False) as file:
            times = np.asarray(file[form.append][:], float).tolist()
    by_space: dict[Any, list[Variable]] = {}
    for v in form.variables:
        rank = min(3, len(v.shape))
        space, leading = v.shape[-rank:], v.shape[:-rank]
        if rank >= 2 and v.dtype.name in _TYPES and 0 not in v.shape and math.prod(leading) <= _MAX_FIELDS:
            by_space.setdefault((space, v.dims[-rank:] if v.dims else None), []).append(v)
    for (space, dims), variables in by_space.items():
        if dims is not None and not all(dim in form.scales for dim in dims):
            dims = None
        name = "x".join(map(str, space))
        if times is None:
            _add_grid(domain, name, path, space, dims, variables, None, None, form)
            continue
        steps = ET.SubElement(domain, "Grid", Name=name, GridType="Collection", CollectionType="Temporal")
        for step, time in enumerate(times):
            grid = _add_grid(steps, f"{name} {step}", path, space, dims, variables, step, len(times), form)
            grid.insert(0, ET.Element("Time", Value=repr(time)))
    ET.indent(root)
    target = path.with_suffix(".xdmf")
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text('<?xml version="1.0" ?>\n' + ET.tostring(root, encoding="unicode") + "\n")
    os.replace(partial, target)


def _add_grid(
    parent: Any,
    name: str,
    path: Path,
    space: tuple[int, ...],
    dims: tuple[str, ...] | None,
    variables: Sequence[Variable],
    step: int | None,
    steps: int | None,
    form: Form,
) -> Any:
    grid = ET.SubElement(parent, "Grid", Name=name, GridType="Uniform")
    whole = (1,) * (3 - len(space)) + space
    kind = "3DCoRectMesh" if dims is None else "3DRectMesh"
    ET.SubElement(grid, "Topology", TopologyType=kind, Dimensions=_text(whole))
    if dims is None:
        geometry = ET.SubElement(grid, "Geometry", GeometryType="ORIGIN_DXDYDZ")
        for text in ("0 0 0", "1 1 1"):
            _add_item(geometry, (3,), "float64", "XML").text = text
    else:
        geometry = ET.SubElement(grid, "Geometry", GeometryType="VXVYVZ")
        for dim in reversed(dims):
            values = np.asarray(form.scales[dim], float).ravel()
            _add_item(geometry, values.shape, "float64", "XML").text = " ".join(map(repr, values.tolist()))
        if len(dims) == 2:
            _add_item(geometry, (1,), "float64", "XML").text = "0"
    for v in variables:
        leading = v.shape[: len(v.shape) - len(space)]
        for index in product(*map(range, leading)):
            label = f"{v.name}[{','.join(map(str, index))}]" if math.prod(leading) > 1 else v.name
            attribute = ET.SubElement(grid, "Attribute", Name=label, AttributeType="Scalar", Center="Node")
            at = (*(() if step is None else (step,)), *index)
            full = (*(() if steps is None else (steps,)), *v.shape)
            _add_cells(attribute, path, v, whole, at, full)
    return grid


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
