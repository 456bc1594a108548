"""Transforms of dims that are whole, and the transfer to where others are, in one node: zeros are left out of both.

Of a spectrum, a Fourier neural operator keeps a dozen modes, and all else is zero: a block has a band of cells along
the dim that is cut, and zeros beside it. A transform along other dims leaves them so, and they need not travel. So it
is with cotangents of the spectrum that such an operator reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mpishard.autograd.linear import LocalMap, Step, pair
from mpishard.comm.collective.banded import Banded, fits
from mpishard.comm.mesh import CartMesh
from mpishard.comm.transport.choice import transport_of
from mpishard.layout import Layout, Shard, most_cells, plan_transfer


class Turn(NamedTuple):
    """A transform from complex cells to complex ones: itself, its adjoint, and the shapes of its block on this rank."""

    run: LocalMap
    adjoint: LocalMap
    before: tuple[int, ...]
    after: tuple[int, ...]


def swapped(source: Layout, target: Layout) -> tuple[int, int] | None:
    """Return the dim that becomes whole from one layout to another, and the one that is cut in its place.

    Not collective. None where that is not all.
    """
    pairs = [(source.shard_dims.get(d, ()), target.shard_dims.get(d, ())) for d in range(source.ndim)]
    others = [d for d, (a, b) in enumerate(pairs) if a == b and source.sizes[d] == target.sizes[d]]
    changed = [d for d in range(source.ndim) if d not in others]
    if len(changed) != 2:
        return None
    whole, cut = changed if pairs[changed[0]][0] else changed[::-1]
    return (whole, cut) if pairs[whole] == pairs[cut][::-1] and pairs[whole][1] == () else None


def joined(
    mesh: CartMesh,
    source: Layout,
    target: Layout,
    inner: tuple[int, ...],
    inner_back: tuple[int, ...],
    dtype: torch.dtype,
    turns: tuple[Turn | None, Turn | None],
) -> Step | None:
    """Return "transform, block of ``source`` -> block of ``target``, transform", without what is zero.

    None where nothing could be left out. Not collective: every rank decides alike. The step is collective.

    Parameters
    ----------
    mesh, source, target, inner, inner_back
        As of `transfer_step`.
    dtype
        Of what travels.
    turns
        The transforms before and after, of dims that are whole there; None: none.
    """
    dims = swapped(source, target)
    transport = transport_of(mesh.all_ranks, mesh.device)
    if dims is None or transport.driver is not None or not fits(most_cells(source) * dtype.itemsize):
        return None
    first, last = turns
    ways = (
        _Way(mesh, source, target, dims, inner, inner_back, dtype),
        _Way(mesh, target, source, dims[::-1], inner_back, inner, dtype),
    )

    def forward(x: Tensor) -> Tensor:
        y = ways[0](x, first and first.run)
        return y if last is None else _ran(last.run, y, last.after)

    def adjoint(g: Tensor) -> Tensor:
        y = ways[1](g, last and last.adjoint)
        return y if first is None else _ran(first.adjoint, y, first.before)

    step = pair(forward, adjoint)
    step.cotangent = tuple((m, type(p) is Shard) for m, p in enumerate(source.placements))
    return step


def _ran(run: LocalMap, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a transform of a block, which torch refuses where there are no cells (docs/upstream.md)."""
    return run(x).resolve_conj() if x.numel() else x.new_zeros(shape)


class _Way:
    """A transform along other dims than the first of ``dims``, and the transfer from the layout where that is cut."""

    def __init__(
        self,
        mesh: CartMesh,
        source: Layout,
        target: Layout,
        dims: tuple[int, int],
        inner: tuple[int, ...],
        sent: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self._mesh, self._layouts, self._dims, self._dtype = mesh, (source, target), dims, dtype
        self._inner, self._sent = inner, sent
        self._leaves = source.local_shape(mesh.coords)
        self._ends: tuple[int, int] | None = None  # of the last band

    @cached_property
    def _transfer(self) -> Banded:
        source, target = self._layouts
        coords = self._mesh.coords
        ways = {"call": self._layouts, "inner": self._inner, "sent": self._sent}
        plan = plan_transfer(source, target, coords)
        return Banded(self._mesh, plan, target.local_shape(coords), self._dims, self._dtype, **ways)

    def __call__(self, x: Tensor, run: LocalMap | None) -> Tensor:
        """Transform, if that is to be, and transfer. Collective as the transfer is."""
        dim, x = self._dims[0], x.resolve_conj()
        lo, hi = self._ends = _band(x, dim, self._ends)
        x = x.narrow(dim, lo, hi - lo)
        if run is not None:
            shape = [hi - lo if d == dim else n for d, n in enumerate(self._leaves)]
            x = _ran(run, x, tuple(shape))
        return self._transfer(x, lo)


def _band(x: Tensor, dim: int, guess: tuple[int, int] | None) -> tuple[int, int]:
    """Return the ends of the cells along ``dim`` beside which all are zero; it costs little where none are.

    Not collective.
    """
    n = x.shape[dim]
    # torch has no minima of the last ones
    if not x.numel() or x.is_meta or x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return 0, n
    cells, short = torch.view_as_real(x) if x.is_complex() else x, x.stride(dim) == 1

    def are_zero(lo: int, hi: int) -> bool:
        if lo == hi:
            return True
        part = cells.narrow(dim, lo, hi - lo)
        if short:
            return not part.count_nonzero()
        # half the time, of long rows; both are NaN where a cell is
        return float(part.amax()) == 0 == float(part.amin())

    if guess and guess[1] < n and are_zero(guess[1], n):
        hi = guess[1] if guess[1] == 0 or not are_zero(guess[1] - 1, guess[1]) else _first(guess[1] - 1, are_zero)
    else:
        hi = _first(n - 1, are_zero) if are_zero(n - 1, n) else n
    if hi == 0 or not are_zero(0, 1):
        return 0, hi
    if guess and guess[0] < hi and are_zero(0, guess[0]) and not are_zero(guess[0], guess[0] + 1):
        return guess[0], hi
    return hi - _first(hi - 1, lambda lo, to: are_zero(hi - to, hi - lo)), hi


def _first(n: int, are_zero: Callable[[int, int], bool]) -> int:
    """Return from where on all of ``n`` cells are zero, by bisection; each is looked at about once."""
    lo, hi = 0, n
    while lo < hi:
        middle = (lo + hi) // 2
        if are_zero(middle, hi):
            hi = middle
        else:
            lo = middle + 1
    return hi
