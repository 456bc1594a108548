"""A host program's decomposition and ghosted arrays, for tests: what a simulation holds on one rank."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


class Host:
    """A domain cut by a Cartesian communicator, and this rank's ghosted block of a field that all ranks know whole.

    Ghost cells hold noise of this rank. ``sizes`` are owned cells per dim and position, ``widths`` (lo, hi) of the
    ghost layers of this rank per dim.
    """

    def __init__(self, grid, sizes, widths, periodic=None, dtype="float64", seed=0):
        self.grid, self.sizes, self.widths = grid, sizes, widths
        self.periodic = periodic or [False] * len(grid)
        self.cart = WORLD.Create_cart(grid, self.periodic)
        self.coords = self.cart.Get_coords(self.cart.rank)
        self.shape = tuple(map(sum, sizes))
        self.starts = [sum(s[:c]) for s, c in zip(sizes, self.coords, strict=True)]
        self.own = tuple(s[c] for s, c in zip(sizes, self.coords, strict=True))
        self.interior = tuple(slice(lo, lo + n) for (lo, _), n in zip(widths, self.own, strict=True))
        self.box = tuple(slice(a, a + n) for a, n in zip(self.starts, self.own, strict=True))
        self.dtype = dtype
        self.whole = self.cells(np.random.default_rng(seed), self.shape)

    def cells(self, rng, shape):
        # whole numbers: sums of them are exact in every dtype
        return rng.integers(0, 2 if self.dtype == "bool" else 100, shape).astype(self.dtype)

    def array(self, order="C", pad=0):
        """This rank's array, in rows that are ``pad`` cells longer than it."""
        rng = np.random.default_rng(100 + WORLD.rank)
        shape = [n + lo + hi for n, (lo, hi) in zip(self.own, self.widths, strict=True)]
        roomy = list(shape)
        roomy[-1 if order == "C" else 0] += pad
        memory = np.zeros(roomy, self.dtype, order=order)
        array = memory[tuple(slice(n) for n in shape)]
        array[...] = self.cells(rng, shape)
        array[self.interior] = self.whole[self.box]
        return array

    def exchanged(self, array):
        """What ``array`` becomes when its ghost cells are refreshed."""
        out = array.copy()
        index, inside = [], []
        for d, (lo, hi) in enumerate(self.widths):
            cells = np.arange(self.starts[d] - lo, self.starts[d] + self.own[d] + hi)
            there = np.ones(len(cells), bool) if self.periodic[d] else (cells >= 0) & (cells < self.shape[d])
            index.append(cells[there] % self.shape[d])
            inside.append(np.flatnonzero(there))
        out[np.ix_(*inside)] = self.whole[np.ix_(*index)]
        return out

    def free(self):
        self.cart.Free()


def cut(n, count, *, empty=False):
    """Uneven extents of ``count`` positions with sum ``n``; with an empty one, where asked and there is room."""
    if count == 1:
        return (n,)
    out = [n // count + 1] * (count - 1)
    if empty:
        out[0] = 0
    return (*out, n - sum(out))
