"""Where the cells of a dataset lie that many ranks wrote: 64 ranks share a file, 1,024 files a folder.

The file of a group of ranks has a dataset per rank and name, ``RANK/NAME``. The file that shows them as whole
datasets has virtual ones, of at most about 1,024 sources each: where there are more blocks, a source is a box of
blocks, shown by a virtual dataset of its own, ``index-K.h5``. Beside them lies ``layout.json``, by which `narrowed`
finds the few blocks that a rank reads without a look at all the others. For one process; nothing communicates.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpishard.errors import FileError, MpishardError
from mpishard.io.file.close import made
from mpishard.io.file.open import LIBVER, import_h5py, looked_at, source_name, virtual_source
from mpishard.io.file.trust import check_memory, read_bounded, shown
from mpishard.layout import Layout, Replicate, Shard, layout_of
from mpishard.layout.block_sizes import bounds
from mpishard.layout.partition import balanced, coords_of, rank_of
from mpishard.layout.slab import Box

RANKS_PER_FILE = 64
FILES_PER_FOLDER = 1024
SOURCES = 1024  # of a virtual dataset
LAYOUTS = "layout.json"
_MOST_RANKS = 1 << 20
_MOST_NBYTES = 1 << 28  # of layout.json

_numbers = count()


class Plan(NamedTuple):
    """Which rank, of ``size``, writes to which file."""

    size: int
    per_file: int
    per_folder: int

    @classmethod
    def of(cls, size: int) -> Plan:
        """Return that of today, for a number of ranks. Not collective."""
        return cls(size, RANKS_PER_FILE, FILES_PER_FOLDER)

    def name(self, rank: int) -> str:
        """Return the file of a rank, in the folder of all. Not collective.

        Examples
        --------
        >>> Plan.of(256).name(130), Plan.of(100_000).name(65_536)
        ('2.h5', '1/1024.h5')
        """
        file = rank // self.per_file
        return f"{file}.h5" if self.size <= self.per_file * self.per_folder else f"{file // self.per_folder}/{file}.h5"

    def folders(self) -> list[str]:
        """Return the folders in the folder of all. Not collective."""
        firsts = range(0, self.size, self.per_file * self.per_folder)
        return sorted({os.path.dirname(self.name(r)) for r in firsts} - {""})

    def ranks(self, file: int) -> range:
        """Return the ranks of a file, by its number. Not collective."""
        return range(file * self.per_file, min((file + 1) * self.per_file, self.size))

    def absent(self, folder: Path) -> set[int]:
        """Return the numbers of the files that are not in the folder of all. Not collective."""
        files = range(-(-self.size // self.per_file))
        return {file for file in files if not (folder / self.name(file * self.per_file)).exists()}

    def turn(self, rank: int) -> int:
        """Return the number of a rank among those of its file: 0 makes it. Not collective."""
        return rank % self.per_file


def place(rank: int, name: str) -> str:
    """Return the name of a rank's block in its file. Not collective."""
    return f"{rank}/{name}"


def gives(layout: Layout, coords: Sequence[int]) -> bool:
    """Tell whether this rank is the one that writes its block: of those with the same, the first. Not collective."""
    return not any(c for c, p in zip(coords, layout.placements) if not p.is_shard())


def writes(layout: Layout, coords: Sequence[int]) -> bool:
    """Tell whether this rank has cells to write. Not collective."""
    return gives(layout, coords) and 0 not in layout.local_shape(coords)


class Parts(NamedTuple):
    """A dataset in parts: how it is cut, and the folder of the parts, relative to the file that shows it whole."""

    layout: Layout
    folder: str
    plan: Plan

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks along every dim."""
        return tuple(1 if s is None else len(s) for s in self.layout.sizes)

    def borders(self, dim: int) -> tuple[int, ...]:
        """Return the borders of the blocks along a dim."""
        sizes = self.layout.sizes[dim]
        return (0, self.layout.shape[dim]) if sizes is None else bounds(sizes)

    def blocks(self, ranges: Sequence[range]) -> Iterator[tuple[int, Box]]:
        """Give the rank and the box of every block, not an empty one, of a grid of positions along the dims."""
        layout, borders = self.layout, [self.borders(d) for d in range(len(ranges))]
        for at in product(*ranges):
            box = tuple((b[i], b[i + 1]) for b, i in zip(borders, at))
            if any(lo == hi for lo, hi in box):
                continue
            coords = [0] * len(layout.mesh_shape)
            for dim, mesh_dims in layout.shard_dims.items():
                i = at[dim]
                for m in reversed(mesh_dims):
                    i, coords[m] = divmod(i, layout.mesh_shape[m])
            yield rank_of(coords, layout.mesh_shape), box

    def touched(self, box: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Box]]:
        """Give the rank and the box of every block that has cells of ``box``: found by bisection."""
        ranges = []
        for dim, (lo, hi) in enumerate(box):
            b = self.borders(dim)
            ranges.append(range(bisect_right(b, lo) - 1, bisect_left(b, hi)))
        return self.blocks(ranges)

    def path(self, rank: int) -> str:
        """Return where the file of a rank lies, relative to the file that shows the whole."""
        return os.path.join(self.folder, self.plan.name(rank))

    def among(self, absent: Collection[int]) -> str | None:
        """Return a file of this dataset's blocks that is one of ``absent``, as of `Plan.absent`, or None."""
        layout, plan = self.layout, self.plan
        if not absent:
            return None
        if len(absent) * plan.per_file < math.prod(self.counts):
            ranks = (rank for file in sorted(absent) for rank in plan.ranks(file))
            used = (rank for rank in ranks if writes(layout, coords_of(rank, layout.mesh_shape)))
        else:
            blocks = self.blocks([range(n) for n in self.counts])
            used = (rank for rank, _ in blocks if rank // plan.per_file in absent)
        return next((self.path(rank) for rank in used), None)

    def boxes(self) -> list[list[range]]:
        """Return the boxes of blocks that are sources together: one where there are few blocks."""
        wanted = -(-math.prod(self.counts) // SOURCES)
        cuts = []
        for n in self.counts:
            width = -(-n // min(n, wanted)) if n else 1
            cuts.append([range(lo, min(lo + width, n)) for lo in range(0, n, width)])
            wanted = -(-wanted // max(1, len(cuts[-1])))
        return [list(ranges) for ranges in product(*cuts)]

    def told(self) -> dict[str, Any]:
        """Return the layout in JSON's types: of even cuts their number only."""
        layout = self.layout
        uneven = {
            str(d): list(s) for d, s in enumerate(layout.sizes) if s is not None and s != balanced(sum(s), len(s))
        }
        dims = [p.dim if isinstance(p, Shard) else None for p in layout.placements]
        return {"mesh": list(layout.mesh_shape), "dims": dims, "shape": list(layout.shape), "sizes": uneven}


def tell(folder: Path, plan: Plan, datasets: Mapping[str, Parts]) -> None:
    """Write ``layout.json``. Not collective; one rank."""
    each = {name: parts.told() for name, parts in datasets.items()}
    told = {"version": 1, "ranks_per_file": plan.per_file, "files_per_folder": plan.per_folder, "datasets": each}
    (folder / LAYOUTS).write_text(json.dumps(told))


def show(file: Any, name: str, dtype: Any, parts: Parts) -> Any:
    """Make the virtual dataset of the whole, and return it. Not collective."""
    h5py = import_h5py()
    layout = parts.layout
    whole = h5py.VirtualLayout(layout.shape, dtype)
    boxes = parts.boxes()
    if len(boxes) == 1:
        _fill(whole, name, parts, boxes[0], (0,) * layout.ndim, parts.folder)
    for k, ranges in enumerate(boxes if len(boxes) > 1 else ()):
        box = _cells(parts, ranges)
        if all(lo < hi for lo, hi in box):
            shape = tuple(hi - lo for lo, hi in box)
            source = virtual_source(os.path.join(parts.folder, _index(k)), name, shape, dtype)
            whole[tuple(slice(lo, hi) for lo, hi in box)] = source
    return file.create_virtual_dataset(name, whole)


def show_boxes(folder: Path, rank: int, datasets: Sequence[tuple[str, Any, Parts]]) -> list[Path]:
    """Write the files of the boxes of blocks that are this rank's to write, and return them. Not collective.

    Parameters
    ----------
    folder
        That of the parts.
    rank
        This rank.
    datasets
        Name, dtype and parts of every dataset, the same on every rank.
    """
    h5py = import_h5py()
    mine: dict[int, list[tuple[str, Any, Parts, list[range]]]] = {}
    for name, dtype, parts in datasets:
        boxes = parts.boxes()
        for k, ranges in enumerate(boxes if len(boxes) > 1 else ()):
            if k * SOURCES % parts.plan.size == rank:
                mine.setdefault(k, []).append((name, dtype, parts, ranges))
    for k, each in mine.items():
        with made(folder / _index(k), libver=LIBVER, locking=False) as file:
            for name, dtype, parts, ranges in each:
                box = _cells(parts, ranges)
                part = h5py.VirtualLayout(tuple(hi - lo for lo, hi in box), dtype)
                _fill(part, name, parts, ranges, tuple(lo for lo, _ in box), "")
                if all(part.shape):
                    file.create_virtual_dataset(name, part)
    return [folder / _index(k) for k in mine]


def _index(k: int) -> str:
    return f"index-{k}.h5"


def _cells(parts: Parts, ranges: Sequence[range]) -> Box:
    borders = [parts.borders(d) for d in range(len(ranges))]
    return tuple((b[r.start], b[r.stop]) for b, r in zip(borders, ranges))


def _fill(whole: Any, name: str, parts: Parts, ranges: Sequence[range], origin: Sequence[int], folder: str) -> None:
    """Add the blocks of a grid to a virtual dataset that begins at ``origin``; folder: that of the parts from it."""
    for rank, box in parts.blocks(ranges):
        shape = tuple(hi - lo for lo, hi in box)
        at = os.path.join(folder, parts.plan.name(rank))
        cells = tuple(slice(lo - o, hi - o) for (lo, hi), o in zip(box, origin))
        whole[cells] = virtual_source(at, place(rank, name), shape, whole.dtype)


def parts_of(dataset: Any, path: Any) -> tuple[Parts, str] | None:
    """Return how a virtual dataset lies in parts, and in what folder their folder is; None for another one.

    Not collective.

    Raises
    ------
    FileError
        What ``layout.json`` says cannot be.
    """
    name, _, inside = first_source(dataset).partition("/")
    if not inside or name in ("", ".", ".."):
        return None
    bases = [os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path))]
    base = next((b for b in bases if os.path.lexists(os.path.join(b, name, LAYOUTS))), None)
    if base is None:
        return None
    at = os.path.join(base, name, LAYOUTS)
    try:
        raw = read_bounded(at, _MOST_NBYTES)
        check_memory(16 * len(raw), LAYOUTS)
        told = json.loads(raw)
        if told["version"] != 1:
            raise ValueError(f"version {shown(told['version'])}")
        own = told["datasets"].get(dataset.name.removeprefix("/"))
        if own is None:
            return None
        layout = _layout(own, dataset.shape)
        per_file, per_folder = told["ranks_per_file"], told["files_per_folder"]
        if not all(type(n) is int and n > 0 for n in (per_file, per_folder)):
            raise ValueError(f"{shown(per_file)} ranks a file, {shown(per_folder)} files a folder")
        return Parts(layout, name, Plan(math.prod(layout.mesh_shape), per_file, per_folder)), base
    except (AttributeError, LookupError, MpishardError, OSError, RecursionError, TypeError, ValueError) as e:
        raise FileError(
            f"read: the parts of {shown(dataset.name)} of {os.fspath(path)!r}",
            expected=f"{LAYOUTS} as mpishard writes it",
            got=f"{at}: {type(e).__name__}: {e}",
            fix="check that the file and its folder are complete",
        ) from e


def first_source(dataset: Any) -> str:
    """Return the name of the first file in which a virtual dataset lies, or "". Not collective.

    Its property list is held no longer: where frames of an error keep one until the process ends, HDF5 ends it with a
    segmentation fault.
    """
    if not dataset.is_virtual:
        return ""
    plist = dataset.id.get_create_plist()
    return (source_name(plist.get_virtual_filename(0)) or "") if plist.get_virtual_count() else ""


def folders_of(path: Path) -> list[str]:
    """Return the names of the folders of parts that were begun for files of this name. Not collective."""
    pattern = re.compile(re.escape(path.name) + r"\.parts-[0-9a-f]{12}")
    return [name for name in os.listdir(path.parent) if pattern.fullmatch(name)]


def joined_folders(path: Path) -> set[str]:
    """Return those of `folders_of` that nothing joins but the name; none where it cannot be told.

    Not collective. A link's file, and one with a second name, stay when the name is given to another one.
    """
    with contextlib.suppress(Exception):  # of a damaged file h5py raises anything
        found, folders = os.lstat(path), folders_of(path)
        if folders and stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            return part_folders(path).intersection(folders)
    return set()


def part_folders(path: Path) -> set[str]:
    """Return the names of the folders that a file's virtual datasets lie in. Not collective.

    Raises
    ------
    FileError
        It cannot be opened.
    """
    folders: set[str] = set()

    def visit(_: str, node: Any) -> None:
        if isinstance(node, import_h5py().Dataset) and (name := first_source(node)):
            folders.add(name.partition("/")[0])

    with looked_at(path) as file:
        file.visititems(visit)
    return folders


def _layout(told: Any, shape: tuple[int, ...]) -> Layout:
    mesh = tuple(told["mesh"])
    if not all(type(n) is int and n > 0 for n in mesh) or math.prod(mesh) > _MOST_RANKS:
        raise ValueError(f"the mesh {shown(mesh)}")
    if tuple(told["shape"]) != shape:
        raise ValueError(f"the shape {shown(told['shape'])}, not {shape}")
    if not all(d is None or type(d) is int for d in told["dims"]):
        raise ValueError(f"the dims {shown(told['dims'])}")
    placements = [Replicate() if d is None else Shard(d) for d in told["dims"]]
    return layout_of(mesh, placements, shape, {int(d): s for d, s in told["sizes"].items()})


def narrowed(dataset: Any, path: Any, box: Sequence[tuple[int, int]]) -> Any:
    """Return a dataset that shows the blocks of a box only; the dataset itself where it is none in parts.

    Not collective. All else about a virtual dataset takes time and memory by the number of its sources.

    Raises
    ------
    FileError
        As of `parts_of`.
    """
    known = parts_of(dataset, path)
    if known is None:
        return dataset
    h5py = import_h5py()
    parts, folder = known
    whole = h5py.VirtualLayout(dataset.shape, dataset.dtype)
    name = dataset.name.removeprefix("/")
    for rank, block in parts.touched(box):
        shape = tuple(hi - lo for lo, hi in block)
        source = virtual_source(os.path.join(folder, parts.path(rank)), place(rank, name), shape, dataset.dtype)
        whole[tuple(slice(lo, hi) for lo, hi in block)] = source
    # HDF5 opens the sources as this file is open: read-only, and by the same driver (that for memory takes all of them)
    fd, at = tempfile.mkstemp(prefix="mpishard-", suffix=".h5")
    os.close(fd)
    try:
        with made(at, locking=False) as file:
            file.create_virtual_dataset(name, whole)
        return h5py.File(at, "r", locking=False)[name]
    finally:
        os.unlink(at)


def memory_file() -> Any:
    """Return a new HDF5 file that lies in memory alone. Not collective."""
    return import_h5py().File(
        f"mpishard-{next(_numbers)}", "w", driver="core", libver=LIBVER, backing_store=False, locking=False
    )


def files_at(dataset: Any, path: Any, cells: tuple[int, int]) -> list[str]:
    """Return the files that hold some cells (first and last, in row-major order) of a dataset. Not collective."""
    shape = dataset.shape
    known = parts_of(dataset, path)
    if known is not None:
        first = np.unravel_index(cells[0], shape)
        last = np.unravel_index(cells[1], shape)
        # along the first dim in which they differ, and whole behind it
        dim = next((d for d, (a, b) in enumerate(zip(first, last)) if a != b), len(shape))
        box = [(int(first[d]), int(last[d]) + 1) if d <= dim else (0, n) for d, n in enumerate(shape)]
        return sorted({known[0].path(rank) for rank, _ in known[0].touched(box)})
    found = []
    for space, at, _, _ in dataset.virtual_sources() if dataset.is_virtual else ():
        lo, hi = (int(np.ravel_multi_index(end, shape)) for end in space.get_select_bounds())
        if lo <= cells[1] and hi >= cells[0]:
            found.append(source_name(at) or at)
    return found
