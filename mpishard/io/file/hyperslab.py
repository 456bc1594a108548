"""Hyperslabs of a dataset into a tensor: straight where nothing changes on the way, else in bounded pieces."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpishard.comm.device.driver import host_tensor
from mpishard.comm.memory.buffer import is_dense
from mpishard.io.file.cf import Decoding
from mpishard.io.file.dtype import NUMPY, SIGNED, plain_bools
from mpishard.io.file.open import import_h5py
from mpishard.io.file.selection import Axis
from mpishard.layout import Run
from mpishard.layout.slab import slabs

STAGED_NBYTES = 64 << 20
# below the 2 GiB that MPI's file layers count
DIRECT_NBYTES = 1 << 30


class Hyperslab(NamedTuple):
    """A hyperslab of the file, and where its cells go: one entry per dim of the result, but for ``file``.

    ``runs`` keeps the direction: a step of -1 comes reversed, one of 0 is a cell that is repeated.
    """

    start: tuple[int, ...]
    stride: tuple[int, ...]
    counts: tuple[int, ...]
    runs: tuple[Run, ...]


def pieces_of(axes: Sequence[Axis], window: Sequence[Sequence[Run]], cells: int) -> list[Hyperslab]:
    """Return the hyperslabs that fill a window of selected cells, each of at most ``cells`` cells.

    Not collective.

    Parameters
    ----------
    axes
        The selection, one per dataset dim.
    window
        Per kept dim the runs that the window needs, in indices of the selection.
    cells
        Largest number of cells of a piece.
    """
    out: list[Hyperslab] = []
    for runs in product(*window):
        counts = [(0, run.count if run.step else min(run.count, 1)) for run in runs]
        out += [
            _piece(axes, [_part(run, *interval) for run, interval in zip(runs, box)]) for box in slabs(counts, cells)
        ]
    return out


def _part(run: Run, lo: int, hi: int) -> Run:
    if run.step == 0:
        return run
    return Run(run.dst + lo, hi - lo, run.src + lo * run.step, run.step)


def _piece(axes: Sequence[Axis], runs: Sequence[Run]) -> Hyperslab:
    start, stride, counts = [], [], []
    each = iter(runs)
    for axis in axes:
        low, count = 0, 1
        if axis.kept:
            run = next(each)
            count = run.count if run.step else 1
            low = run.src - (count - 1) if run.step < 0 else run.src
        start.append(axis.start + low * axis.step)
        stride.append(axis.step)
        counts.append(count)
    return Hyperslab(tuple(start), tuple(stride), tuple(counts), tuple(runs))


class BlockReader:
    """Reads the window of one rank into a tensor; knows nothing of other ranks.

    Parameters
    ----------
    axes, window
        As of `pieces_of`.
    out
        Where it goes: any strides, any device.
    stored
        The dataset's numpy dtype.
    decoding
        What turns stored values into numbers, or None.

    Attributes
    ----------
    calls : int
        Of HDF5, begun so far.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        window: Sequence[Sequence[Run]],
        out: Tensor,
        stored: np.dtype[Any],
        decoding: Decoding | None = None,
    ) -> None:
        self.out, self.stored, self.decoding = out.detach(), stored, decoding
        plain = all(run.step == 1 or run.count <= 1 for runs in window for run in runs)
        is_array = self.out.device.type == "cpu" and self.out.dtype in NUMPY and is_dense(self.out)
        # bools are looked at on their way
        is_array = is_array and self.out.dtype is not torch.bool
        self.direct = plain and decoding is None and is_array and self.out.numpy().dtype == stored
        limit = DIRECT_NBYTES if self.direct else STAGED_NBYTES
        self.pieces = pieces_of(axes, window, max(1, limit // stored.itemsize))
        self.calls = 0

    def read(self, dataset: Any, dxpl: Any = None) -> Generator[None, None, None]:
        """Read piece by piece: one step of the iterator is one call of HDF5. Not collective with no ``dxpl``."""
        h5s = import_h5py().h5s
        space = dataset.id.get_space()
        buffer = np.empty(0, self.stored)
        for piece in self.pieces:
            if piece.start:
                space.select_hyperslab(piece.start, piece.counts, piece.stride)
            if self.direct:
                array = self.out.numpy()
                memory = h5s.create_simple(array.shape) if array.ndim else h5s.create(h5s.SCALAR)
                if array.ndim and array.shape != piece.counts:  # a selection of all costs time as well
                    memory.select_hyperslab(tuple(r.dst for r in piece.runs), tuple(r.count for r in piece.runs))
                self.calls += 1
                dataset.id.read(memory, space, array, None, dxpl)
            else:
                count = math.prod(piece.counts)
                if buffer.size < count:
                    staging = host_tensor((count * self.stored.itemsize,), torch.uint8, self.out.device)
                    buffer = staging.numpy().view(self.stored)
                part = buffer[:count]
                memory = h5s.create_simple((count,)) if piece.start else h5s.create(h5s.SCALAR)
                self.calls += 1
                dataset.id.read(memory, space, part, None, dxpl)
                self._place(piece, part)
            yield

    def _place(self, piece: Hyperslab, part: np.ndarray[Any, Any]) -> None:
        native = part.astype(self.stored.newbyteorder("="), copy=False)
        cells = plain_bools(torch.from_numpy(native)).view([r.count if r.step else 1 for r in piece.runs])
        if self.decoding is not None:
            cells = self.decoding(cells, self.out.dtype)
        flipped = [d for d, r in enumerate(piece.runs) if r.step < 0]
        if flipped:
            # of the wide unsigned types torch flips none
            cells = cells.view(SIGNED.get(cells.dtype, cells.dtype)).flip(flipped).view(cells.dtype)
        at = self.out
        for dim, run in enumerate(piece.runs):
            at = at.narrow(dim, run.dst, run.count)
        at.copy_(cells)
