"""Back-end root: the first rank writes the file, slab by slab as the others hand them over."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import numpy as np

from mpishard.comm.collective.gather_slabs import funnel
from mpishard.io.backend.job import FAILURES, STAGED_NBYTES, Job, finish, given, selection
from mpishard.io.file.close import empty, shut
from mpishard.io.file.journal import Journal, taken_back
from mpishard.io.file.open import LIBVER, import_h5py
from mpishard.io.file.room import check_filtered, check_room, hold, no_room
from mpishard.io.file.schema import begun, create, grow, step_of


def write_root(job: Job) -> str:
    """Write the file through rank 0, which holds one slab of at most 64 MiB of the others' data at a time.

    Collective. Returns the mode in which cells were written.
    """
    target = _Target(job) if job.group.rank == 0 else None
    try:
        job.agree(target.open() if target is not None else None)
        for name, layout, local in job.blocks():
            slabs = partial(given, layout, nbytes=STAGED_NBYTES, itemsize=local.element_size())
            put = None if target is None else target.putter(name)
            funnel(local, layout.offset(job.tensors[name].mesh.coords), slabs, job.group, put, op="io.write")  # type: ignore[arg-type]
        job.agree(target.close() if target is not None else None)
    finally:
        if target is not None:
            target.discard()
    return "one rank"


class _Target:
    """The file that rank 0 writes.

    What goes wrong while slabs arrive is kept: the other ranks are handing them over, and must be heard out.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.file: Any = None
        self.closed = True
        self.held: list[Any] = []
        self.step: int | None = None
        self.journal: Journal | None = None
        self.error: BaseException | None = None

    def open(self) -> BaseException | None:
        job = self.job
        try:
            h5py = import_h5py()
            if error := no_room(job.path.parent, job.nbytes):
                raise error
            if job.exists:
                # takes room, too
                self.journal = begun(job.path)
            most = check_room(job.path, job.form, exists=job.exists)
            self.file = h5py.File(job.partial, "r+" if job.exists else "w", libver=LIBVER, locking=job.locking)
            hold(self.file, most)
            if not job.exists:
                self.held = create(self.file, job.form)
            if job.form.append is not None:
                self.step = step_of(self.file, job.form, job.path)
                grow(self.file, job.form, self.step + 1)
                self.file[job.form.append][self.step] = job.form.scales.get(job.form.append, self.step)
        except FAILURES as e:
            self._fail(e)
        return self.error

    def putter(self, name: str) -> Any:
        def put(box: Any, cells: Any) -> None:
            if self.error is None:
                try:
                    array = cells.numpy()
                    dataset = self.file[name]
                    check_filtered(self.file, dataset, box if self.step is None else ((self.step, self.step + 1), *box))
                    dataset[selection(box, self.step)] = array if array.ndim else np.asarray(array)[()]
                    # what is left in buffers is lost in silence where the disk is full
                    self.file.flush()
                except FAILURES as e:
                    self._fail(e)

        return put

    def close(self) -> BaseException | None:
        lost = self.job.lost
        try:
            error = self._shut()
            self.error = self.error or error or (lost[0] if lost else None)
            if self.error is None:
                finish(self.job)
                if self.journal is not None:
                    self.journal.commit()
                    self.journal = None
        except FAILURES as e:
            self._fail(e)
        if self.error is not None:
            # before the others learn of it
            self.discard()
        return self.error

    def discard(self) -> None:
        self._shut()
        self.job.discard()
        if self.journal is not None:
            taken_back(self.journal, closed=self.closed)
            self.journal = None

    def _shut(self) -> Exception | None:
        """Close the file, once."""
        file, self.file = self.file, None
        if file is None:
            return None
        error = shut(file, self._make_room, None if self.journal is None else self.journal.image)
        self.closed = not file
        self.held.clear()
        return error

    def _make_room(self) -> None:
        empty(self.job.scrap)
        if self.journal is not None:
            with contextlib.suppress(OSError):
                self.journal.put_back()

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        # before the objects are let go, that HDF5 flushes then
        self._make_room()
