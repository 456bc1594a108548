"""Convolution without a padded copy: the block first, and then what the cells at its edges have of their halo.

The local convolution runs with zero padding on the untouched block while the strips travel. By linearity, what the
strips alone give is added then: to the results forward, to the cotangents backward. In 16 bits, and where several
windows at an edge read the halo, the results there are computed anew, each from its whole window, so that they are
rounded once. Strips are those of the window's own plan, and their corners too: see `mpishard.comm.exchange.frame`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.comm.exchange.frame import Cuts, Frame, read
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.interruption import under_way
from mpishard.comm.memory.piece import empty_as
from mpishard.layout import Layout, bounds, sizes_of
from mpishard.layout.stencil import Sliding, of_every_kind, paddings_meet
from mpishard.ops.rule.reduction import HALVES
from mpishard.ops.window.conv_kernel import Gradients, convolution, convolution_backward


class Side(NamedTuple):
    """The output cells at one end of a dim that read the halo there.

    Attributes
    ----------
    first, count
        Local output cells.
    cells
        Extent of the input window of these cells.
    end
        0 at the low end, 1 at the high one.
    at, taken
        Where the halo lies in that window, and how many of its cells, from its first.
    one
        Whether that is one window, of cells side by side: weights ``at`` to ``at + taken`` read the halo, no others.
    """

    first: int
    count: int  # type: ignore[assignment]
    cells: int
    end: int
    at: int
    taken: int
    one: bool


class Edge(NamedTuple):
    """One sharded dim of the convolution: its sides with neighbours, and what torch pads of its strips."""

    dim: int
    sides: tuple[Side, ...]
    padding: tuple[int, ...]


class Overlapped:
    """A convolution on one layout whose strips travel while the block is convolved.

    Parameters
    ----------
    window
        Fetch of the input cells.
    edges
        The sharded dims with a halo, in the order of its rounds.
    local
        ``(stride, padding, dilation, transposed, output_padding, groups)`` of the local convolution.
    """

    def __init__(self, window: WindowOp, edges: Sequence[Edge], local: tuple[Any, ...]) -> None:
        self.window, self.edges, self.local, self.read = window, tuple(edges), local, window.in_shape
        self._frame = Frame(window)
        # the padding of a window that holds the halo of every edge
        reached = {edge.dim - 2 for edge in self.edges}
        self._inside = tuple(0 if i in reached else p for i, p in enumerate(local[1]))
        self._sides = [(2 * k + side.end, edge, side) for k, edge in enumerate(edges) for side in edge.sides]
        adds = window.dtype not in HALVES and all(side.one for _, _, side in self._sides)
        self._anew = None if adds else [self._window_of(i // 2, side) for i, _, side in self._sides]

    def _window_of(self, k: int, side: Side) -> tuple[list[int], Cuts]:
        """Return the shape of the window that the results at one side read, and what it is made of."""
        dim, shape, origin = self.edges[k].dim, list(self.window.out_shape), [0] * len(self.edges)
        shape[dim], origin[k] = side.cells, side.first * self.local[0][dim - 2]
        return shape, self._frame.cuts(shape, origin)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Convolve; return the result and the halo. Neighborwise collective."""
        frame, parts, y = self._frame, [x], None
        for k in range(len(self.edges)):
            exchange = frame.start(k, parts)
            if y is None:
                with under_way(self.window.op, self.window.mesh.comm):
                    y = convolution(x, weight, bias, *self.local)
            frame.finish(k, exchange, parts)
        assert y is not None
        stride, _, *rest = self.local
        for n, (i, edge, side) in enumerate(self._sides):
            cells = y.narrow(edge.dim, side.first, side.count)
            if self._anew is None:
                strip, w = parts[1 + i].narrow(edge.dim, 0, side.taken), weight.narrow(edge.dim, side.at, side.taken)
                cells.add_(convolution(strip, w, None, stride, edge.padding, *rest))
            else:
                shape, cuts = self._anew[n]
                window = empty_as(x, shape)
                read(window, parts, cuts)
                cells.copy_(convolution(window, weight, bias, stride, self._inside, *rest))
        return y, parts[1:]

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, halos: Sequence[Tensor], needs: Sequence[bool]
    ) -> Gradients:
        """Return the cotangents of block, weight and bias where needed. Neighborwise collective."""
        g_halos, g_shares = [torch.zeros_like(halo) for halo in halos] if needs[0] else [], []
        stride, _, *rest = self.local
        for i, edge, side in self._sides:
            dim, strip, w = edge.dim, halos[i].narrow(edge.dim, 0, side.taken), weight
            if side.one:
                w = weight.narrow(dim, side.at, side.taken)
            else:
                taken = strip
                # zeros where the block's cells are
                strip = taken.new_zeros([side.cells if d == dim else n for d, n in enumerate(taken.shape)])
                strip.narrow(dim, side.at, side.taken).copy_(taken)
            g_strip, g_share, _ = convolution_backward(
                g.narrow(dim, side.first, side.count), strip, w, stride, edge.padding, *rest, [*needs[:2], False]
            )
            if needs[0]:
                at = 0 if side.one else side.at
                g_halos[i].narrow(dim, 0, side.taken).add_(g_strip.narrow(dim, at, side.taken))
            g_shares.append((dim, side, g_share))
        home, parts, last = self._frame, [x, *g_halos], len(self.edges) - 1
        exchange = home.start_adjoint(last, parts) if needs[0] else None
        with under_way(self.window.op, self.window.mesh.comm):
            gx, gw, gb = convolution_backward(g, x, weight, *self.local, list(needs))
        if needs[1]:
            for dim, side, share in g_shares:
                (gw.narrow(dim, side.at, side.taken) if side.one else gw).add_(share)
        if needs[0]:
            parts[0] = gx
            for k in range(last, -1, -1):
                home.finish_adjoint(k, exchange if k == last else home.start_adjoint(k, parts), parts)
        return gx, gw, gb


def plan_overlapped(
    window: WindowOp,
    layout: Layout,
    coords: Sequence[int],
    first: int,
    dims: dict[int, Sliding],
    borders: dict[int, tuple[int, ...]],
    local: tuple[Any, ...],
) -> Overlapped | str:
    """Plan the overlapped form, or return the reason why the window is fetched.

    Not collective: every rank decides alike, from what all ranks know.

    Parameters
    ----------
    window
        Fetch of the input cells.
    layout, coords
        Of the input, and of this rank.
    first
        Its first spatial dim.
    dims
        Geometry of the sharded spatial dims.
    borders
        Output borders of these dims.
    local
        Arguments of the local convolution, with padding in every dim.
    """
    for dim, g in dims.items():
        sizes = layout.sizes[dim]
        assert sizes is not None
        cells = bounds(sizes)
        for i in of_every_kind(sizes, sizes_of(borders[dim]), 1, g.stride):
            n, at, (a, b) = sizes[i], cells[i], borders[dim][i : i + 2]
            if n < max(1, g.lo):
                return "a block is smaller than the halo"
            if paddings_meet(g, g.lo, n):
                return "a block is not much longer than its padding"
            if at % g.stride or a != at // g.stride or b - a != g.n_out(n):
                return "output cells of the padded block are not the rank's own"
            if a == b:
                return "a block without output cells"
    if not any(g.lo for g in dims.values()):
        return "no padding: windows begin inside the blocks"
    shape, edges, reached = layout.local_shape(coords), [], set()
    for stage in window.stages:
        dim, g = stage.dim, dims[stage.dim]
        # strips of a dim hold the halo of the dims before it: see `Frame`
        reached.add(dim - first)
        padding = tuple(0 if i in reached else p for i, p in enumerate(local[1]))
        sides = _sides(g, shape[dim], layout.index(dim, coords), len(layout.sizes[dim] or ()))
        edges.append(Edge(dim, sides, padding))
    return Overlapped(window, edges, local)


def _sides(g: Sliding, n: int, index: int, count: int) -> tuple[Side, ...]:
    sides = []
    n_out, w = g.n_out(n), g.lo
    if index > 0:
        m = min(n_out, -(-w // g.stride))
        sides.append(Side(0, m, (m - 1) * g.stride + g.reach, 0, 0, w, m == g.dilation == 1))
    if index + 1 < count:
        # the first output cell whose window ends past the block
        first = max(0, -((g.reach - n - 1 - w) // g.stride))
        m = n_out - first
        if m > 0:
            start, cells = first * g.stride - w, (m - 1) * g.stride + g.reach
            at = n - start
            taken = min(w, cells - at)
            if taken > 0:
                sides.append(Side(first, m, cells, 1, at, taken, m == g.dilation == 1))
    return tuple(sides)
