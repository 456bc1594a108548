"""Windows that a block's own storage holds: its halo is refreshed in place, or fresh already, and a view is taken."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mpishard.autograd.linear import apply, in_transform
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, bounds
from mpishard.tensor.resident import ResidentHalo
from mpishard.tensor.shard_tensor import ShardTensor

Intervals = Mapping[int, Sequence[tuple[int, int]]]
Extents = dict[int, tuple[int, int]]


def extents_beside(mesh: CartMesh, layout: Layout, intervals: Intervals, halo: ResidentHalo) -> Extents | str:
    """Return how many cells (lo, hi) of this rank's window lie beside its block, or the reason why they do not.

    Not collective: every rank decides alike, from what all ranks know.

    Parameters
    ----------
    mesh, layout
        Of the tensor.
    intervals
        Tensor dim -> windows [lo, hi) of all positions, nowhere past an edge of the domain that nothing is beyond.
    halo
        Where the storage has room.

    Returns
    -------
    dict or str
        Tensor dim -> cells, below 0 where the block has too many.
    """
    if 0 in layout.shape:
        return "empty"
    near, extents, reads = halo.along(layout), {}, False
    for dim, windows in intervals.items():
        sizes = layout.sizes[dim] or (layout.shape[dim],)
        at, widths = bounds(sizes), near.get(dim, ((0, 0),) * len(sizes))
        for k, (start, stop) in enumerate(windows):
            if start >= stop:
                return "a window without cells"
            lo, hi = at[k] - start, stop - at[k + 1]
            if lo > widths[k][0] or hi > widths[k][1]:
                return "the halo beside the block is narrower than the window"
            reads = reads or lo > 0 or hi > 0
            if k == layout.index(dim, mesh.coords) and (lo or hi):
                extents[dim] = (lo, hi)
    return extents if reads else "no halo"


class Beside:
    """What is made of a block and the halo in its storage by a plan; the adjoint is that of the fetched window."""

    __slots__ = ("_halo", "_layout", "_plan", "_window")

    def __init__(self, window: WindowOp, plan: Any, halo: ResidentHalo, layout: Layout) -> None:
        self._window, self._plan, self._halo, self._layout = window, plan, halo, layout

    @property
    def adjoint(self) -> Any:
        """Carries the cotangent home."""
        return self._window.adjoint


class ReadBeside(Beside):
    """The window of one block, as a view of its storage: the plan are its extents."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the window; its halo is refreshed in place unless it is fresh. Neighborwise collective."""
        halo = self._halo
        halo.ensure(x, self._layout)
        # no view of the block, for autograd: it is what the adjoint says. It still shares its version.
        return halo.around(x, self._layout, self._plan).detach()


def read_beside(x: ShardTensor, window: WindowOp, extents: Extents | str, *, saved: bool) -> Tensor | None:
    """Return the window of a block from its own storage, or None where it is not there.

    Neighborwise collective.

    Parameters
    ----------
    x
        A tensor with a resident halo.
    window
        The same window by messages.
    extents
        Of `extents_beside`.
    saved
        Whether autograd will save the window.
    """
    halo = x._halo
    assert halo is not None
    if isinstance(extents, str) or not (halo.writable or halo.fresh(x.block)):
        return None
    if saved:
        halo.watch(x.block, all_cells=True)
    return apply(ReadBeside(window, extents, halo, x.sharding), x.block)


def fetched(x: ShardTensor, window: WindowOp, key: Hashable, intervals: Intervals) -> Tensor:
    """Return the window of a block: from its own storage where it is there, else by messages.

    Neighborwise collective.

    Parameters
    ----------
    x, window
        The tensor, and the window of its block.
    key
        Of the plan of the window.
    intervals
        As of `extents_beside`.
    """
    halo, mesh = x._halo, x.mesh
    if halo is not None and not in_transform():
        told = (key, halo.key)
        extents = mesh.plans.get(told)
        if extents is None:
            extents = mesh.plan(told, lambda: extents_beside(mesh, x.sharding, intervals, halo))
        found = read_beside(x, window, extents, saved=x.block.requires_grad)
        if found is not None:
            return found
    return apply(window, x.block)
