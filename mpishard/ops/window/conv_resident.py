"""Convolution of a block whose halo stands beside it in its own storage: strips are refreshed, nothing is copied.

The local convolution reads the block and the part of its halo that it needs as one view. Cells beyond the domain's
edge are a convolution's zeros, whatever a host program keeps there: the view ends at the edge, and torch pads it. As
torch pads both ends alike, output cells that come too many at the other end are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, bounds
from mpishard.layout.stencil import Sliding, paddings_meet
from mpishard.ops.window.beside import Extents, extents_beside
from mpishard.tensor.resident import ResidentHalo


class Beside(NamedTuple):
    """What a convolution of a block with a resident halo does on this rank.

    Attributes
    ----------
    window
        The same window by messages: its adjoint carries cotangents home.
    extents
        Cells beside the block that are read.
    padding
        Of the local convolution.
    crops
        (dim, start, length) of its result.
    """

    window: WindowOp
    extents: Extents
    padding: tuple[int, ...]
    crops: tuple[tuple[int, int, int], ...]


def plan_beside(
    mesh: CartMesh,
    layout: Layout,
    dtype: Any,
    first: int,
    slides: Sequence[Sliding],
    borders: dict[int, tuple[int, ...]],
    halo: ResidentHalo,
) -> Beside | str:
    """Plan the convolution from the halo beside the block, or return the reason why the window is fetched.

    Not collective: every rank decides alike, from what all ranks know.

    Parameters
    ----------
    mesh, layout, dtype
        Of the input.
    first, slides
        Its first spatial dim, and the geometry of each.
    borders
        Output borders of the sharded dims.
    halo
        Where the storage has room.
    """
    intervals: dict[int, list[tuple[int, int]]] = {}
    wanted, padding, crops = [], [], []
    for i, g in enumerate(slides):
        dim = first + i
        n = layout.shape[dim]
        sizes = layout.sizes[dim] or (n,)
        at, outs = bounds(sizes), borders.get(dim) or (0, g.n_out(n))
        index = layout.index(dim, mesh.coords)
        clipped = intervals[dim] = []
        for k in range(len(sizes)):
            a, b = outs[k : k + 2]
            if a == b:
                return "a block without output cells"
            lo, hi = g.window(a, b)
            start, stop = (max(lo, 0), min(hi, n)) if len(sizes) > 1 else (0, n)
            if start >= stop:
                return "a window beyond the domain"
            # alike on both sides, and the first window begins a stride apart from the first output cell's
            extra = max(0, -((start - lo - max(0, hi - stop)) // g.stride))
            pad = start - lo + extra * g.stride
            if paddings_meet(g, pad, stop - start):
                return "a block is not much longer than its padding"
            clipped.append((start, stop))
            if k == index:
                padding.append(pad)
                made = (stop - start + 2 * pad - g.reach) // g.stride + 1
                if extra or made != b - a:
                    crops.append((dim, extra, b - a))
        if clipped != list(zip(at[:-1], at[1:])):
            wanted.append(intervals_wanted(n, dim, clipped))
    extents = extents_beside(mesh, layout, intervals, halo)
    if isinstance(extents, str):
        return extents
    window = window_op(mesh, layout, dtype, wanted, op="conv")
    return Beside(window, extents, tuple(padding), tuple(crops))
