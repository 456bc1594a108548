"""Blocks of a parameter as rows of equal length, one for each rank: so MPI needs no list of lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from mpishard.comm.memory.buffer import cat
from mpishard.layout import balanced


class Padded:
    """How the blocks of a tensor, of one dim that is cut evenly, lie in rows: dim first, the shorter ones padded.

    Parameters
    ----------
    shape, dim
        Of the tensor, and which dim is cut.
    count
        Of blocks, each of at least one cell along the dim: the first ones have one more.

    Attributes
    ----------
    dim : int
    width : int
        Values in a row.
    """

    __slots__ = ("_count", "_inner", "_least", "_longer", "_n", "_row", "dim", "width")

    def __init__(self, shape: tuple[int, ...], dim: int, count: int) -> None:
        self._n, self.dim, self._count = shape[dim], dim, count
        self._inner = (*shape[:dim], *shape[dim + 1 :])
        self._row = math.prod(self._inner)
        most, self._least = (sizes := balanced(shape[dim], count))[0], sizes[-1]
        self._longer = shape[dim] - self._least * count
        self.width = most * self._row

    def row_of(self, block: Tensor) -> Tensor:
        """Return a rank's block as its row, 1-D. Not collective."""
        row = self._flat(block)
        return row if row.numel() == self.width else cat([row, row.new_zeros(self.width - row.numel())])

    def block_of(self, row: Tensor, extent: int) -> Tensor:
        """Return the block of so many cells along the dim that lies in a row. Not collective."""
        return self._turned(row[: extent * self._row].view(extent, *self._inner))

    def rows_of(self, whole: Tensor) -> Tensor:
        """Return the blocks of a whole tensor as rows. Not collective."""
        flat = self._flat(whole)
        if not self._longer:
            return flat.view(self._count, self.width)
        rows = flat.new_zeros(self._count, self.width)
        longer, shorter = self._parts(rows)
        at = longer.numel()
        longer.copy_(flat[:at].view(longer.shape))
        shorter.copy_(flat[at:].view(shorter.shape))
        return rows

    def whole_of(self, rows: Tensor) -> Tensor:
        """Return the tensor whose blocks lie in rows: a view where it lies there as it is. Not collective."""
        flat = cat([part.reshape(-1) for part in self._parts(rows)]) if self._longer else rows
        return self._turned(flat.reshape(self._n, *self._inner))

    def _flat(self, x: Tensor) -> Tensor:
        return (x.movedim(self.dim, 0) if self.dim else x).reshape(-1)

    def _turned(self, x: Tensor) -> Tensor:
        return (x.movedim(0, self.dim) if self.dim else x).contiguous()

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[: self._longer], rows[self._longer :, : self._least * self._row]


def sharded_dim(shape: Sequence[int], count: int) -> int | None:
    """Return the dim along which a parameter is cut into blocks: the longest; None where it has too few cells.

    Not collective.
    """
    if not shape or max(shape) < count:
        return None
    # the first lies in memory as it is gathered: a quarter more of imbalance is a fair price
    return 0 if shape[0] >= 8 * count or shape[0] % count == 0 else max(range(len(shape)), key=lambda d: shape[d])
