"""What a file holds besides cells: datasets, their chunks and filters, dims with names and scales, attributes."""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpishard.errors import FileError, LayoutError
from mpishard.io.file.journal import Journal
from mpishard.io.file.open import found, import_h5py, looked_at
from mpishard.io.file.trust import shown
from mpishard.layout import Layout, largest

CHUNK_NBYTES = 4 << 20
# the text by which netCDF knows a dim that has no values of its own
NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable."


class Variable(NamedTuple):
    """One dataset: ``shape`` is that of one time step where the file is appended to."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | bool | None
    compression: Any
    dims: tuple[str, ...] | None
    attrs: dict[str, Any]


class Schema(NamedTuple):
    """All of a file but its cells; rank 0's is what counts, so that ranks cannot disagree."""

    variables: tuple[Variable, ...]
    attrs: dict[str, Any]
    scales: dict[str, Any]
    append: str | None
    scale_attrs: dict[str, dict[str, Any]] = {}


def chunks_of(layout: Layout, itemsize: int) -> tuple[int, ...]:
    """Return a chunk shape that follows the blocks of a layout, of at most 4 MiB.

    Not collective.

    Chunks that fit the blocks: no two ranks write one, where blocks are even.

    Examples
    --------
    >>> chunks_of(layout_of((2,), (Shard(1),), (1, 512, 512)), 4)
    (1, 256, 512)
    """
    shape = [max(1, largest(sizes) if sizes else n) for sizes, n in zip(layout.sizes, layout.shape)]
    while math.prod(shape) * itemsize > CHUNK_NBYTES:
        dim = next(d for d, n in enumerate(shape) if n > 1)
        shape[dim] = -(-shape[dim] // 2)
    return tuple(shape)


def option(value: Any, name: str) -> Any:
    """Return the value of an option for one dataset: given per name, or one for all. Not collective."""
    return value.get(name) if isinstance(value, Mapping) else value


def are_chunks(extents: Any, shape: Sequence[int]) -> bool:
    """Tell whether a chunk may have these extents, each a whole number. Not collective."""
    try:
        return len(extents) == len(shape) and all(operator.index(n) >= 1 for n in extents)
    except TypeError:
        return False


def checked_dims(dims: Any, name: str, shape: Sequence[int]) -> tuple[str, ...] | None:
    """Return the names of a dataset's dims, one per dim, or None. Not collective."""
    if dims is None:
        return None
    own = tuple(dims) if isinstance(dims, Iterable) and not isinstance(dims, str) else None
    if own is not None and len(own) == len(shape) and all(isinstance(d, str) for d in own):
        return own
    raise LayoutError(
        f"write: dims of {name!r}",
        expected=f"{len(shape)} names, for the shape {tuple(shape)}",
        got=repr(dims),
        fix="name every dim, e.g. dims={'t': ('y', 'x')}",
    )


def named(variables: Sequence[Variable]) -> tuple[Variable, ...]:
    """Return the variables with names for all dims: netCDF wants one for every dim, or for none in the file.

    Not collective.
    """
    return tuple(
        v if v.dims is not None else v._replace(dims=tuple(f"dim{i}_{n}" for i, n in enumerate(v.shape)))
        for v in variables
    )


def check_places(form: Schema) -> None:
    """Refuse datasets and dims of one file that cannot lie beside each other. Not collective.

    Raises
    ------
    FileError
        Two datasets at one place, or one in another.
    LayoutError
        A dim with the name of a dataset that does not give its values, or with one that netCDF lacks.
    """
    at = {place_of(v.name): v for v in form.variables}
    for v in form.variables:
        own = place_of(v.name)
        groups = [own[:i] for i, c in enumerate(own) if c == "/"]
        other = at[own] if at[own] is not v else next((at[g] for g in groups if g in at), None)
        if not own or other is not None:
            raise FileError(
                f"write: {v.name!r} is no name of a dataset" + ("" if other is None else f" beside {other.name!r}"),
                expected="a place of its own for each, in no other dataset",
                got=[*(v.name for v in form.variables)],
                fix="give it another name",
            )
    for dim in extents(form) | ({} if form.append is None else {form.append: 0}):
        beside = at.get(dim)
        if dim in ("", ".") or "/" in dim or "\0" in dim or any(place.startswith(f"{dim}/") for place in at):
            raise LayoutError(
                f"write: {dim!r} is no name of a dim",
                expected="text other than '.', without '/' and zero bytes, which no group of a dataset has",
                got=repr(dim),
                fix="give it another name",
            )
        if beside is not None and (beside.dims != (dim,) or dim in form.scales or form.append is not None):
            raise LayoutError(
                f"write: a dim and a dataset with the name {dim!r}",
                expected="a dataset that gives the values of that dim: along it alone, in a file without steps",
                got=f"dataset {beside.name!r} along {beside.dims}"
                + (", and scales=" if dim in form.scales else "")
                + ("" if form.append is None else f", append={form.append!r}"),
                fix=f"give the dim another name, or its values by scales={{{dim!r}: ...}} and no dataset",
            )


def place_of(name: str) -> str:
    """Return where a dataset of this name lies, in one way of writing it. Not collective."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def extents(form: Schema) -> dict[str, int]:
    """Return the extent of every named dim.

    Not collective.

    Raises
    ------
    LayoutError
        A dim has two extents, or a scale that is not as long.
    """
    out: dict[str, int] = {}
    for v in form.variables:
        for dim, n in zip(v.dims or (), v.shape):
            if out.setdefault(dim, n) != n or dim == form.append:
                raise LayoutError(
                    f"write: dim {dim!r} of {v.name!r}",
                    expected="another name than the one appended along"
                    if dim == form.append
                    else f"one extent in all datasets: {out[dim]}",
                    got=n,
                    fix="give it another name",
                )
    for dim, values in form.scales.items():
        given = _cells(dim, values, text=dim != form.append)
        n = given.size if given.ndim == (dim != form.append) else -1
        expected = 1 if dim == form.append else out.get(dim)
        if n == expected:
            continue
        if expected is None:
            wanted, got = f"one of the dims {sorted(out)}, or the one appended along", f"values of {dim!r}"
            fix = f"name the dims of a dataset, e.g. dims=({', '.join(map(repr, [dim, 'x']))}), or append={dim!r}"
        elif dim == form.append:
            wanted, got = "one number, the step's own", f"shape {given.shape}"
            fix = f"give the value of this step: scales={{{dim!r}: t}}; every step adds one"
        else:
            wanted, got = f"{expected} values, one per cell of the dim", f"shape {given.shape}"
            fix = f"give a sequence of {expected} numbers, those of the whole dim and not of a block"
        raise LayoutError(f"write: scale of dim {dim!r}", expected=wanted, got=got, fix=fix)
    return out


def _cells(dim: str, values: Any, *, text: bool) -> np.ndarray[Any, Any]:
    """Return the values of a scale as HDF5 can have them, also those that h5py has read as objects."""
    try:
        given = np.asarray(values)
        if given.dtype.kind not in "UOMm":
            return given
        if text and given.dtype.kind == "O" and {type(v) for v in given.flat} in ({str}, {bytes}):
            return given
        got = f"{given.dtype}: {shown(values)}"
    except Exception as e:  # noqa: BLE001 (what a user's sequence raises)
        got = f"{type(e).__name__}: {e}"
    raise LayoutError(
        f"write: scale of dim {dim!r}",
        expected="numbers, bytes of one length, or (of a dim that does not grow) objects that are all str or all bytes",
        got=got,
        fix="give dates as numbers, with their unit in variable_attrs=, and text as bytes, e.g. by np.char.encode",
    )


def create(file: Any, form: Schema, make: Any = None) -> list[Any]:
    """Make the datasets, dims and attributes in a new file; datasets that grow begin with no step.

    Not collective, unless the file is open on several ranks: then all of them.

    Parameters
    ----------
    file
        Open h5py file.
    form
        What to make.
    make
        ``make(variable)`` makes a dataset and returns it; plain ones if not given.

    Returns
    -------
    list
        The datasets, to be held until the file is flushed: what HDF5 cannot flush as it is let go ends the process.
    """
    held = []
    for v in form.variables:
        held.append((make or (lambda v: dataset_in(file, v, form.append)))(v))
        _describe(held[-1], v.attrs)
    _describe(file, form.attrs)
    _add_dims(file, form, held)
    return held


def _describe(node: Any, attrs: Mapping[str, Any]) -> None:
    for key, value in attrs.items():
        # h5py takes Python's text, and none of numpy
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind == "U":
            value = value.astype(import_h5py().string_dtype()) if isinstance(value, np.ndarray) else str(value)
        node.attrs[key] = value


def dataset_in(file: Any, v: Variable, append: str | None = None) -> Any:
    """Make one plain dataset. Not collective, unless the file is open on several ranks."""
    shape: tuple[int, ...] = v.shape
    options: dict[str, Any] = {}
    chunks: tuple[int, ...] | bool | None
    if append is not None:
        chunks = v.chunks if isinstance(v.chunks, tuple) else True
        if isinstance(chunks, tuple):
            chunks = (1, *(max(1, min(c, n)) for c, n in zip(chunks, shape)))
        # no chunk fits into an extent of 0 that stays so
        options = {"maxshape": (None, *(n or None for n in shape)), "chunks": chunks, "compression": v.compression}
        shape = (0, *shape)
    elif shape and 0 not in shape:
        chunks = tuple(min(c, n) for c, n in zip(v.chunks, shape)) if isinstance(v.chunks, tuple) else v.chunks
        options = {"chunks": chunks, "compression": v.compression}
    return file.create_dataset(v.name, shape=shape, dtype=v.dtype, **options)


def _add_dims(file: Any, form: Schema, held: list[Any]) -> None:
    names = {v.name for v in form.variables}
    sizes = extents(form)
    if form.append is not None:
        values = np.asarray(form.scales.get(form.append, 0))
        held.append(file.create_dataset(form.append, (0,), values.dtype, maxshape=(None,), chunks=(512,)))
        held[-1].make_scale(form.append)
    for dim, n in sizes.items():
        if dim in form.scales:
            held.append(file.create_dataset(dim, data=np.asarray(form.scales[dim])))
            held[-1].make_scale(dim)
        elif dim in names:
            file[dim].make_scale(dim)
        else:
            held.append(file.create_dataset(dim, shape=(n,), dtype=">f4"))
            held[-1].make_scale(f"{NO_VARIABLE}{n:10d}")
    for dim, attributes in form.scale_attrs.items():
        _describe(file[dim], attributes)
    for v in form.variables:
        dims = v.dims or ()
        if form.append is not None:
            dims = (form.append, *dims)
        for i, dim in enumerate(dims):
            if dim and dim != v.name:
                file[v.name].dims[i].attach_scale(file[dim])
                file[v.name].dims[i].label = dim


def step_of(file: Any, form: Schema, path: Any) -> int:
    """Return the number of steps that a file has, after a look whether it takes one more of this form.

    Not collective.

    Raises
    ------
    FileError
        A dataset is missing, or of another shape or dtype, or cannot grow, or has other steps than the rest; or the
        file has one more that grows along the same dim.
    """
    steps: int | None = None
    given = set()
    for v in form.variables:
        dataset, got = in_place(file, path, v.name)
        if dataset is not None:
            fits = dataset.shape[1:] == v.shape and dataset.dtype.newbyteorder("=") == v.dtype
            if fits and dataset.shape and dataset.maxshape[0] is None and steps in (None, dataset.shape[0]):
                steps = dataset.shape[0]
                given.add(dataset)
                continue
        raise _cannot_append(
            path,
            v.name,
            f"a dataset of steps of shape {v.shape}, {v.dtype}, with room for more"
            + ("" if steps is None else f", {steps} of them"),
            got,
        )
    if form.append is not None:
        scale, got = in_place(file, path, form.append)
        if scale is None or scale.maxshape != (None,) or scale.shape != (steps,):
            raise _cannot_append(path, form.append, f"a scale of {steps} values, with room for more", got)
        value = form.scales.get(form.append, steps)
        if not _keeps(scale.dtype, value):
            wanted = f"values that {scale.dtype}, the type of the first step's, holds"
            fix = "give the first step's as this one (0.0, not 0), or write another file"
            raise _cannot_append(path, form.append, wanted, repr(value), fix)
        for name, dataset in sorted(_along(file, scale).items()):
            if dataset not in given:
                wanted = f"a tensor for each dataset of the file along {form.append!r}"
                raise _cannot_append(path, name, wanted, "none of that name")
    return steps or 0


def _keeps(dtype: Any, value: Any) -> bool:
    """Tell whether a value is the same when it is stored. Not collective."""
    given = np.asarray(value)
    try:
        with np.errstate(invalid="ignore"):  # of NaN as an integer
            stored = given.astype(dtype)
        return bool(stored == given or (stored != stored and given != given))
    except (TypeError, ValueError, OverflowError):
        return False


def is_filtered(dataset: Any) -> bool:
    """Return whether cells of a dataset go through filters. Not collective."""
    return bool(dataset.id.get_create_plist().get_nfilters())


def any_filtered(path: Path, names: Iterable[str]) -> bool:
    """Return whether cells of any of these datasets of a file go through filters; what is no dataset has none.

    Not collective.
    """
    with contextlib.suppress(Exception), looked_at(path) as file:
        return any(is_filtered(in_place(file, path, name)[0]) for name in names)
    return False


def _along(file: Any, scale: Any) -> dict[str, Any]:
    """Return the datasets whose first dim has a scale and can grow: the scale lists them, and no other is opened."""
    along = {}
    for reference, dim in scale.attrs.get("REFERENCE_LIST", ()):
        try:
            node = file[reference]
            grows = dim == 0 and bool(node.maxshape) and node.maxshape[0] is None
        except Exception:  # noqa: BLE001 (of one that is gone, or no dataset, h5py raises anything)
            continue
        if grows and node.name is not None:
            along[node.name.lstrip("/")] = node
    return along


def in_place(file: Any, path: Any, name: str) -> tuple[Any, str]:
    """Return a dataset that can be written to in the file itself, or None; and what was found."""
    try:
        dataset = found(file, path, name, looked=True)  # in `begun`
        if dataset.is_virtual:
            return None, "a virtual dataset"
        return dataset, f"shape {dataset.shape}, at most {dataset.maxshape}, {dataset.dtype}"
    except FileError as e:
        return None, str(e).splitlines()[0]
    except Exception as e:  # noqa: BLE001 (of a damaged file h5py raises anything)
        return None, f"{type(e).__name__}: {e}"


def _cannot_append(
    path: Any,
    name: str,
    expected: str,
    got: str,
    fix: str = "append the same datasets at every step, or write another file",
) -> FileError:
    return FileError(f"write: cannot append {name!r} to {str(path)!r}", expected=expected, got=got, fix=fix)


def grow(file: Any, form: Schema, steps: int) -> None:
    """Set the number of steps. Not collective, unless the file is open on several ranks."""
    for v in form.variables:
        file[v.name].resize(steps, axis=0)
    if form.append is not None and form.append in file:
        file[form.append].resize(steps, axis=0)


class _Kept(NamedTuple):
    """Where cells lie that no step to come touches, and of how many steps, as of a state of the file."""

    state: tuple[int, ...]
    steps: dict[str, int]
    spans: list[tuple[int, int]]


_MANY = 1 << 20  # chunks


_MOST_FILES = 64

# of the files that this process appended to last: looking up every chunk at every step would take longer than to
# write it
_known: dict[Path, _Kept] = {}


def begun(path: Path) -> Journal:
    """Keep what a step may change of a file that it is appended to: all bytes but the cells of older steps.

    Not collective; one rank calls it, before any opens the file to write.
    """
    known = _known.pop(path, None)
    if known is None or known.state != _state(path):
        known = _Kept((), {}, [])
    with looked_at(path) as file:
        steps, spans = _kept(file, known)
        size = os.path.getsize(path)
    regions, at = [], 0
    for start, stop in [*spans, (size, size)]:
        # a damaged file may say that cells lie behind its end
        if min(start, size) > at:
            regions.append((at, min(start, size) - at))
        at = max(at, stop)

    def settled() -> None:
        _known[path] = _Kept(_state(path), steps, spans)
        if len(_known) > _MOST_FILES:
            del _known[next(iter(_known))]

    return Journal(path, regions, settled)


def _state(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _chunks(dataset: Any, grid: list[range]) -> Iterator[Any]:
    """Give where the chunks of a grid lie, of a vast and empty one those that there are."""
    if math.prod(map(len, grid)) <= _MANY:
        return (dataset.id.get_chunk_info_by_coord(at) for at in product(*grid))
    each = (dataset.id.get_chunk_info(i) for i in range(dataset.id.get_num_chunks()))
    return (chunk for chunk in each if all(i in within for i, within in zip(chunk.chunk_offset, grid)))


def _kept(file: Any, known: _Kept) -> tuple[dict[str, int], list[tuple[int, int]]]:
    h5py = import_h5py()
    datasets: dict[str, Any] = {}
    file.visititems(lambda name, node: datasets.update({name: node}) if isinstance(node, h5py.Dataset) else None)
    steps, spans = {}, list(known.spans)
    for name, dataset in datasets.items():
        offset = dataset.id.get_offset()
        if offset is not None:
            spans.append((offset, offset + dataset.id.get_storage_size()))
        elif dataset.chunks:
            n, step = dataset.shape[0], dataset.chunks[0]
            # of one that grows, a chunk with room for more steps is written again
            steps[name] = n // step * step if dataset.maxshape[0] is None else -(-n // step) * step
            grid = [range(known.steps.get(name, 0), steps[name], step)]
            grid += [range(0, extent, c) for extent, c in zip(dataset.shape[1:], dataset.chunks[1:])]
            there = (chunk for chunk in _chunks(dataset, grid) if chunk.byte_offset is not None)
            spans += [(chunk.byte_offset, chunk.byte_offset + chunk.size) for chunk in there]
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return steps, joined
