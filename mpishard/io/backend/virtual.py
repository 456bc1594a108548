"""Back-end virtual: a file per rank, and a small file that shows them as whole datasets; parallel without MPI-IO."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.io.backend.job import FAILURES, STAGED_NBYTES, Job, cells_of, finish, is_host_dense, selection
from mpishard.io.file.open import empty, import_h5py, no_room, reserve, shut
from mpishard.io.file.schema import Variable, create, dataset_in
from mpishard.layout import Layout
from mpishard.layout.slab import slabs


def write_virtual(job: Job) -> str:
    """Write every rank's blocks to a file of its own in a folder beside, and the file that joins them.

    Collective. The folder goes where the file goes. Returns the mode in which cells were written.
    """
    rank = job.group.rank
    done = False
    layouts: dict[str, Layout] = {}
    try:
        error: Exception | None = None
        if rank == 0:
            try:
                job.parts.mkdir()
            except FAILURES as e:
                error = e
        job.agree(error)
        part = _Part(job)
        for name, layout, local in job.blocks():
            layouts[name] = layout
            part.put(name, layout, local)
        job.agree(part.close())
        error = None
        if rank == 0:
            try:
                _join(job, layouts, part.scalars)
                finish(job)
            except FAILURES as e:
                error = e
        job.agree(error)
        done = True
    finally:
        if rank == 0:
            job.discard()
            if not done:
                shutil.rmtree(job.parts, ignore_errors=True)
    return "a file per rank"


def prune(path: Path, keep: Path | None) -> None:
    """Remove the folders of ranks' files that belong to files of this name no more. Not collective; one rank."""
    pattern = re.compile(re.escape(path.name) + r"\.parts-[0-9a-f]{12}")
    for name in os.listdir(path.parent):
        if pattern.fullmatch(name) and name != (keep.name if keep else ""):
            shutil.rmtree(path.with_name(name), ignore_errors=True)


class _Part:
    """The file of one rank; errors are kept until all ranks ask for them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.file: Any = None
        self.path = job.parts / f"{job.group.rank}.h5"
        self.error: BaseException | None = None
        self.scalars: dict[str, Any] = {}

    def put(self, name: str, layout: Layout, local: Any) -> None:
        job = self.job
        if self.error is not None or not _gives(layout, job.tensors[name].mesh.coords):
            return
        try:
            if local.ndim == 0:
                self.scalars[name] = cells_of(local, (), ()).numpy()[()]
                return
            v = next(v for v in job.form.variables if v.name == name)
            if v.compression is None and (error := no_room(self.path.parent, local.nbytes)):
                raise error
            if self.file is None:
                self.file = import_h5py().File(self.path, "w", locking=job.locking)
            if v.compression is None:
                reserve(self.path, local.nbytes)
            dataset = dataset_in(self.file, v._replace(shape=tuple(local.shape)))
            offset = (0,) * local.ndim
            whole = tuple((0, n) for n in local.shape)
            staged = max(1, STAGED_NBYTES // local.element_size())
            for box in [whole] if is_host_dense(local) else slabs(whole, staged):
                dataset[selection(box, None)] = cells_of(local, offset, box).numpy()
            self.file.flush()
        except FAILURES as e:
            self.error = e
            if self.file is not None:
                empty(self.path)

    def close(self) -> BaseException | None:
        if self.file is not None:
            if self.error is not None:
                empty(self.path)
            error, lost = shut(self.file, partial(empty, self.path)), self.job.lost
            self.error = self.error or error or (lost[0] if lost else None)
        return self.error


def _gives(layout: Layout, coords: tuple[int, ...]) -> bool:
    first = not any(coords[m] for m, p in enumerate(layout.placements) if not p.is_shard())
    return first and 0 not in layout.local_shape(coords)


def _join(job: Job, layouts: dict[str, Layout], scalars: dict[str, Any]) -> None:
    h5py = import_h5py()
    file = h5py.File(job.partial, "w", locking=job.locking)
    try:

        def make(v: Variable) -> Any:
            if v.name in scalars:
                return file.create_dataset(v.name, data=np.asarray(scalars[v.name], v.dtype))
            if 0 in v.shape:
                return dataset_in(file, v)
            return file.create_virtual_dataset(v.name, _virtual(job, v, layouts[v.name]))

        create(file, job.form, make)
        file.flush()
    except FAILURES:
        empty(job.partial)
        raise
    finally:
        error = shut(file, partial(empty, job.partial))
    if error is not None:
        raise error


def _virtual(job: Job, v: Variable, layout: Layout) -> Any:
    h5py = import_h5py()
    whole = h5py.VirtualLayout(v.shape, v.dtype)
    for rank, coords in enumerate(product(*map(range, layout.mesh_shape))):
        if _gives(layout, coords):
            box = layout.box(coords)
            shape = tuple(hi - lo for lo, hi in box)
            # relative: the file and its folder can move together
            name = f"{job.parts.name}/{rank}.h5"
            whole[selection(box, None)] = h5py.VirtualSource(name, v.name, shape=shape, dtype=v.dtype)
    return whole
