"""The blocks of 64 ranks in one file: its first rank makes the datasets, and then each writes its own cells.

Every rank knows from the layouts which datasets there are. Cells go past HDF5 to their place in the file, by plain
writes that need no order; only those that HDF5 filters go through it, one rank after the other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mpishard.comm.collective.gather_slabs import cells_of
from mpishard.comm.memory.buffer import address
from mpishard.io.backend.job import STAGED_NBYTES, is_host_dense
from mpishard.io.file.close import made
from mpishard.io.file.open import LIBVER, import_h5py, opened
from mpishard.io.file.parts import Plan, memory_file, place, writes
from mpishard.io.file.room import SPARE, no_room, reserve
from mpishard.io.file.schema import Variable, dataset_in
from mpishard.layout import Layout
from mpishard.layout.partition import coords_of
from mpishard.layout.slab import slabs

# so that no two ranks write to one page of larger blocks
_PAGE = 4096
_WRITE_NBYTES = 2 << 20
_HEAD = 1 << 10  # at most, of a dataset


class Planned(NamedTuple):
    """A dataset of the whole, and how it is cut."""

    variable: Variable
    layout: Layout

    @property
    def is_plain(self) -> bool:
        """Whether cells lie in the file as in memory."""
        return self.variable.chunks is None and self.variable.compression is None


def make_folders(folder: Path, plan: Plan) -> None:
    """Make the folders of the parts. Not collective; one rank."""
    folder.mkdir()
    for name in plan.folders():
        (folder / name).mkdir()


def lay_out(folder: Path, rank: int, plan: Plan, planned: Iterable[Planned], locking: Any = False) -> None:
    """Make the file of a group of ranks, with room for their cells. Not collective; for the first rank of a group.

    Raises
    ------
    OSError
        There is no room for it.
    """
    blocks = []
    for r in range(rank, min(rank + plan.per_file, plan.size)):
        for variable, layout in planned:
            coords = coords_of(r, layout.mesh_shape)
            if variable.shape and writes(layout, coords):
                blocks.append((r, Planned(variable._replace(shape=layout.local_shape(coords)), layout)))
    if not blocks:
        return
    path = folder / plan.name(rank)
    plain = [(r, v) for r, (v, layout) in blocks if Planned(v, layout).is_plain]
    nbytes = [math.prod(v.shape) * v.dtype.itemsize for _, v in plain]
    if error := no_room(folder, SPARE + sum(n + _HEAD + _PAGE * (n >= _PAGE) for n in nbytes)):
        raise error
    options: dict[str, Any] = {"alignment_threshold": _PAGE, "alignment_interval": _PAGE}
    with made(path, libver=LIBVER, locking=locking, **options) as file:
        for r, v in plain:
            with_room(file, place(r, v.name), v.shape, v.dtype)


def with_room(file: Any, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Make a dataset whose cells have their place in the file already, and return it. Not collective."""
    h5py = import_h5py()
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return file.create_dataset(name, shape=shape, dtype=dtype, dcpl=plist)


def fill(path: Path, blocks: Iterable[tuple[int, Tensor]], pause: Callable[[], object] = lambda: None) -> None:
    """Write blocks to their offsets in a file, past HDF5. Not collective.

    Raises
    ------
    OSError
        There is no room.
    """
    with open(path, "r+b", buffering=0) as raw:
        for offset, block in blocks:
            reserve(raw.fileno(), offset, block.nbytes)
            _write(raw.fileno(), offset, block, pause)


class Part:
    """What one rank writes to its group's file. Not collective.

    Parameters
    ----------
    folder, rank, plan
        That of the parts; this rank, and where each writes to.
    locking
        As of h5py.File.
    """

    def __init__(self, folder: Path, rank: int, plan: Plan, locking: Any = False) -> None:
        self.path, self.rank, self.locking = folder / plan.name(rank), rank, locking
        self._filtered: Any = None

    def write(self, blocks: Mapping[str, Tensor], pause: Callable[[], object] = lambda: None) -> None:
        """Write blocks of which no cell goes through a filter, past HDF5, and flush nothing.

        Raises
        ------
        OSError
            There is no room.
        """
        if blocks:
            fill(self.path, [(self._offsets[name], block) for name, block in blocks.items()], pause)

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """Where the blocks of this rank lie in the file, by name."""
        with opened(self.path) as file:
            own = file[str(self.rank)]
            return {name: own[name].id.get_offset() for name in _datasets(own)}

    def filter(self, name: str, variable: Variable, block: Tensor) -> None:
        """Take a block through HDF5's filters, in memory, for `copy`."""
        if self._filtered is None:
            self._filtered = memory_file()
        dataset = dataset_in(self._filtered, variable._replace(name=place(self.rank, name), shape=tuple(block.shape)))
        for box, cells in _slabs(block):
            dataset[tuple(slice(lo, hi) for lo, hi in box)] = cells.numpy()

    def copy(self) -> None:
        """Copy what went through filters into the group's file: for one rank at a time."""
        if self._filtered is None:
            return
        size = self._filtered.id.get_filesize()
        if error := no_room(self.path.parent, size + SPARE, self.path.stat().st_size):
            raise error
        with open(self.path, "r+b", buffering=0) as raw:
            # HDF5 ends the process where there is none for a copy, and cuts the file to its length when it is closed
            reserve(raw.fileno(), 0, self.path.stat().st_size + size + SPARE)
        try:
            with made(self.path, "r+", locking=self.locking) as file:
                group = str(self.rank)
                for name in _datasets(self._filtered[group]):
                    self._filtered.copy(f"{group}/{name}", file, f"{group}/{name}")
        finally:
            self.close()

    def close(self) -> None:
        """Let go of what is held in memory."""
        if self._filtered is not None:
            self._filtered.close()
            self._filtered = None


def _datasets(group: Any) -> list[str]:
    names: list[str] = []
    kind = import_h5py().Dataset
    group.visititems(lambda name, node: names.append(name) if isinstance(node, kind) else None)
    return names


def _slabs(block: Tensor) -> Iterable[tuple[Any, Tensor]]:
    """Give a block in runs of row-major order, as dense host memory."""
    whole = tuple((0, n) for n in block.shape)
    staged = max(1, STAGED_NBYTES // block.element_size())
    for box in [whole] if is_host_dense(block) else slabs(whole, staged):
        yield box, cells_of(block, (0,) * block.ndim, box)


def _write(fd: int, offset: int, block: Tensor, pause: Callable[[], object]) -> None:
    for _, cells in _slabs(block):
        for at in range(0, cells.nbytes, _WRITE_NBYTES):
            data: Any = address(cells.data_ptr() + at, min(_WRITE_NBYTES, cells.nbytes - at))
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], offset + at + done)
            pause()
        offset += cells.nbytes
