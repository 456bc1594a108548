"""What the back-ends share: which rank gives which cells, the file's name until it is complete, agreed errors."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.memory.buffer import is_dense
from mpishard.comm.mesh import Group
from mpishard.errors import FileError, MpishardError
from mpishard.io.file.close import flush
from mpishard.io.file.open import not_written
from mpishard.io.file.parts import gives, joined_folders
from mpishard.io.file.schema import Schema
from mpishard.io.file.trust import hidden
from mpishard.layout import Layout
from mpishard.layout.partition import coords_of
from mpishard.layout.slab import Box, slabs
from mpishard.tensor import ShardTensor
from mpishard.tensor.operand import resolved

# Of cells that are copied on their way: what a rank holds besides its block.
STAGED_NBYTES = 64 << 20

# whatever one rank raises, the others wait for it
FAILURES = (Exception,)


class Job(NamedTuple):
    """One call of `write`, the same on every rank but for the blocks.

    ``token`` makes names unique; ``exists`` tells whether a file is appended to that is there; ``lost`` are
    errors that h5py could not raise (see `noted`); ``replaced`` gets the folders of parts of the file whose place the
    new one takes.
    """

    path: Path
    group: Group
    tensors: Mapping[str, ShardTensor]
    form: Schema
    token: str
    exists: bool
    hints: Mapping[str, Any]
    alignment: tuple[int, int] | None
    locking: bool | str | None
    lost: list[BaseException]
    replaced: set[str]

    @property
    def partial(self) -> Path:
        """The file's name until it is complete; its own where it is appended to."""
        return self.path if self.exists else hidden(self.path, self.token)

    @property
    def parts(self) -> Path:
        """The folder of the ranks' files of a virtual dataset."""
        return self.path.with_name(f"{self.path.name}.parts-{self.token}")

    @property
    def nbytes(self) -> int:
        """Bytes of the cells that are written as they are."""
        return sum(math.prod(v.shape) * v.dtype.itemsize for v in self.form.variables if v.compression is None)

    def blocks(self) -> Iterator[tuple[str, Layout, Tensor]]:
        """Give every tensor's name, layout and local block, sums made. Collective over Partial dims."""
        with torch.no_grad():
            for name, x in self.tensors.items():
                whole = resolved(x)
                yield name, whole.sharding, whole.to_local().detach()

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank where any rank has an error. Collective."""
        guard.agree(self.group.comm, None if error is None else self.failed(error))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise on every rank what the ``with`` block raises on any. Collective, at its end."""
        error: BaseException | None = None
        try:
            yield
        except FAILURES as e:
            error = e
        self.agree(error)

    def failed(self, error: BaseException) -> MpishardError:
        """Return the error as the library's own. Not collective."""
        return error if isinstance(error, MpishardError) else not_written(self.path, error)  # type: ignore[arg-type]

    def settle(self, path: Path) -> None:
        """Have what takes the place of another file on the disk before: a crash leaves one of them. Not collective."""
        if os.path.lexists(self.path) and path.exists():
            flush(path)

    @property
    def scrap(self) -> Path | None:
        """The file that may be emptied where writing fails: not one that is appended to."""
        return None if self.exists else self.partial

    def discard(self) -> None:
        """Remove what an unfinished file has left. Not collective; one rank calls it."""
        if not self.exists:
            with contextlib.suppress(OSError):
                self.partial.unlink(missing_ok=True)


def given(layout: Layout, position: int, nbytes: int, itemsize: int) -> list[Box]:
    """Return a rank's slabs of at most ``nbytes``; of ranks with one block, the first gives it. Not collective."""
    coords = coords_of(position, layout.mesh_shape)
    if not gives(layout, coords):
        return []
    return list(slabs(layout.box(coords), max(1, nbytes // itemsize)))


def is_host_dense(local: Tensor) -> bool:
    """Return whether slabs of a block need no copy. Not collective."""
    return not local.is_cuda and is_dense(local)


def selection(box: Box, step: int | None) -> tuple[Any, ...]:
    """Return the index of a box of a dataset, at a step where it has steps. Not collective."""
    cells = tuple(slice(lo, hi) for lo, hi in box)
    return cells if step is None else (step, *cells)


def finish(job: Job) -> None:
    """Give the complete file its name. Not collective; one rank calls it.

    Raises
    ------
    FileError
        Another job has begun a file of this name, which both append to: its steps are not replaced.
    """
    if job.exists:
        return
    if job.form.append is None:
        job.settle(job.partial)
        job.replaced.update(joined_folders(job.path))
        os.replace(job.partial, job.path)
        return
    try:
        _named_anew(job.partial, job.path)
    except FileExistsError:
        raise FileError(
            f"write: another job has begun {os.fspath(job.path)!r} meanwhile",
            expected="a file that this job begins, or one that was there before",
            got="one that has come since, and is as that job left it",
            fix="append again: this step is not in it; or let each job write a file of its own",
        ) from None


def _named_anew(partial: Path, path: Path) -> None:
    """Give a file a name that no other one has; FileExistsError where one does."""
    try:
        os.link(partial, path, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        # a file system without second names: what comes between these two is not seen
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        os.replace(partial, path)
    else:
        partial.unlink()
