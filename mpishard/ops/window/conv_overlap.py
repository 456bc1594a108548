"""Convolution without a padded copy: the block first, and the cells at its edges again when their halo is there.

The local convolution runs with zero padding on the untouched block while the strips travel. Then the few
results that read the halo are computed anew, each from its whole window, so that they are rounded like all others.
Backward is by linearity: to the cotangents that the block alone gives, those of the strips alone are added. With
several sharded dims the halo is cut into disjoint strips, dim by dim: those of a dim span the window of the dims
after it (so they carry the corners) and the block of the dims before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpishard.comm.exchange.window import StageRun
from mpishard.comm.memory.piece import empty_as
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout, Run, plan_stage
from mpishard.layout.stencil import Sliding, paddings_meet
from mpishard.ops.window.conv_kernel import Gradients, convolution, convolution_backward


class Side(NamedTuple):
    """The output cells at one end of a dim that read the halo there.

    Attributes
    ----------
    first, count
        Local output cells.
    cells
        Extent of the input window of these cells.
    at, halo, taken
        Where the halo lies in that window, its first cell among the dim's strips, and how many of its cells.
    """

    first: int
    count: int
    cells: int
    at: int
    halo: int
    taken: int


class Edge(NamedTuple):
    """One sharded dim of the convolution: width of its halo, its exchange, and its sides with neighbours."""

    dim: int
    width: int
    run: StageRun
    sides: tuple[Side, ...]
    padding: tuple[int, ...]


class Overlapped:
    """A convolution on one layout whose strips travel while the block is convolved.

    Parameters
    ----------
    edges
        The sharded dims with a halo, ascending.
    local
        ``(stride, padding, dilation, transposed, output_padding, groups)`` of the local convolution.
    """

    def __init__(self, edges: Sequence[Edge], local: tuple[Any, ...]) -> None:
        self.edges = tuple(edges)
        self.local = local
        self._widths = [edge.width for edge in self.edges]
        # the padding of a window that holds the halo of every edge
        reached = {edge.dim - 2 for edge in self.edges}
        self._inside = tuple(0 if i in reached else p for i, p in enumerate(local[1]))

    def _on_strip(self, edge: Edge) -> tuple[Any, ...]:
        stride, _, *rest = self.local
        return (stride, edge.padding, *rest)

    def strips_to_send(self, x: Tensor, k: int, halos: Sequence[Tensor]) -> Tensor:
        """Return the first and the last cells of ``x`` along edge ``k``, in the window of the edges after it.

        ``halos`` are those of the edges after ``k``.
        """
        dim, width = self.edges[k].dim, self.edges[k].width
        ends = []
        for start in (0, x.shape[dim] - width):
            part = x.narrow(dim, start, width)
            for edge, halo in reversed(list(zip(self.edges[k + 1 :], halos))):
                beside = halo.narrow(dim, start, width)
                lo, hi = beside.narrow(edge.dim, 0, edge.width), beside.narrow(edge.dim, edge.width, edge.width)
                part = torch.cat((lo, part, hi), edge.dim)
            ends.append(part)
        return torch.cat(ends, dim)

    def add_strips(self, g_strips: Tensor, k: int, gx: Tensor, g_halos: Sequence[Tensor]) -> None:
        """Add the cotangent of `strips_to_send` to those of the block and of the later edges' halos."""
        dim, width = self.edges[k].dim, self.edges[k].width
        for at, start in ((0, 0), (width, gx.shape[dim] - width)):
            part = g_strips.narrow(dim, at, width)
            for edge, g_halo in zip(self.edges[k + 1 :], g_halos):
                beside, n = g_halo.narrow(dim, start, width), part.shape[edge.dim]
                beside.narrow(edge.dim, 0, edge.width).add_(part.narrow(edge.dim, 0, edge.width))
                beside.narrow(edge.dim, edge.width, edge.width).add_(part.narrow(edge.dim, n - edge.width, edge.width))
                part = part.narrow(edge.dim, edge.width, n - 2 * edge.width)
            gx.narrow(dim, start, width).add_(part)

    def strip(self, edge: Edge, side: Side, halo: Tensor) -> Tensor:
        """Return the input window of one side with the halo in it and zeros where the block's cells are."""
        shape = list(halo.shape)
        shape[edge.dim] = side.cells
        out = halo.new_zeros(shape)
        out.narrow(edge.dim, side.at, side.taken).copy_(halo.narrow(edge.dim, side.halo, side.taken))
        return out

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Convolve; return the result and the halos of all edges. Neighborwise collective."""
        halos: list[Tensor] = []
        y = None
        for k in reversed(range(len(self.edges))):
            run = self.edges[k].run
            sent = self.strips_to_send(x, k, halos)
            exchange = run.start(sent)
            if y is None:
                y = convolution(x, weight, bias, *self.local)
            halo = torch.empty_like(sent)
            run.finish(exchange, halo)
            halos.insert(0, halo)
        assert y is not None
        for edge in self.edges:
            for side in edge.sides:
                window = self._window(edge, side, x, halos)
                cells = convolution(window, weight, bias, self.local[0], self._inside, *self.local[2:])
                y.narrow(edge.dim, side.first, side.count).copy_(cells)
        return y, halos

    def _window(self, edge: Edge, side: Side, x: Tensor, halos: Sequence[Tensor]) -> Tensor:
        """Return the input window of the output cells of a side, corners filled."""
        shape = list(x.shape)
        for other in self.edges:
            shape[other.dim] += 2 * other.width
        shape[edge.dim] = side.cells
        out = empty_as(x, shape)
        # along an edge's dim, cell 0 is the first one of its halo
        first = side.first * self.local[0][edge.dim - 2]

        def place(part: Tensor, starts: Sequence[int]) -> None:
            into = out
            for other, start in zip(self.edges, starts):
                d = other.dim
                if other is edge:
                    lo, hi = max(start, first), min(start + part.shape[d], first + side.cells)
                    if lo >= hi:
                        return
                    part, start = part.narrow(d, lo - start, hi - lo), lo - first
                into = into.narrow(d, start, part.shape[d])
            into.copy_(part)

        place(x, self._widths)
        for k, (other, halo) in enumerate(zip(self.edges, halos)):
            lo, hi = halo.split(other.width, other.dim)
            rest = [0] * (len(self.edges) - k - 1)
            place(lo, [*self._widths[:k], 0, *rest])
            place(hi, [*self._widths[:k], other.width + x.shape[other.dim], *rest])
        return out

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, halos: Sequence[Tensor], needs: Sequence[bool]
    ) -> Gradients:
        """Return the cotangents of block, weight and bias where needed. Neighborwise collective."""
        g_halos, g_shares = [], []
        for edge, halo in zip(self.edges, halos):
            g_halo = torch.zeros_like(halo) if needs[0] else halo
            for side in edge.sides:
                g_strip, g_share, _ = convolution_backward(
                    g.narrow(edge.dim, side.first, side.count),
                    self.strip(edge, side, halo),
                    weight,
                    None,
                    *self._on_strip(edge),
                    [needs[0], needs[1], False],
                )
                if needs[0]:
                    into = g_halo.narrow(edge.dim, side.halo, side.taken)
                    into.add_(g_strip.narrow(edge.dim, side.at, side.taken))
                g_shares.append(g_share)
            g_halos.append(g_halo)
        exchange = self.edges[0].run.start_adjoint(g_halos[0]) if needs[0] else None
        gx, gw, gb = convolution_backward(
            g, x, weight, [weight.shape[0]] if needs[2] else None, *self.local, list(needs)
        )
        if needs[1]:
            for share in g_shares:
                gw.add_(share)
        if needs[0]:
            for k, edge in enumerate(self.edges):
                if k:
                    exchange = edge.run.start_adjoint(g_halos[k])
                g_strips = torch.zeros_like(g_halos[k])
                edge.run.finish_adjoint(exchange, g_strips)
                self.add_strips(g_strips, k, gx, g_halos[k + 1 :])
        return gx, gw, gb


def plan_overlapped(
    mesh: CartMesh,
    layout: Layout,
    dtype: torch.dtype,
    first: int,
    dims: dict[int, Sliding],
    borders: dict[int, tuple[int, ...]],
    local: tuple[Any, ...],
) -> Overlapped | str:
    """Plan the overlapped form, or return the reason why the window is fetched.

    Not collective: every rank decides alike, from what all ranks know.

    Parameters
    ----------
    mesh, layout, dtype
        Of the input.
    first
        Its first spatial dim.
    dims
        Geometry of the sharded spatial dims.
    borders
        Output borders of these dims.
    local
        Arguments of the local convolution, with padding in every dim.
    """
    reach = {}
    for dim, g in dims.items():
        sizes = layout.sizes[dim]
        assert sizes is not None
        at = 0
        for i, n in enumerate(sizes):
            a, b = borders[dim][i : i + 2]
            if n < max(1, g.lo):
                return "a block is smaller than the halo"
            if paddings_meet(g, g.lo, n):
                return "a block is not much longer than its padding"
            if at % g.stride or a != at // g.stride or b - a != g.n_out(n):
                return "output cells of the padded block are not the rank's own"
            if a == b:
                return "a block without output cells"
            at += n
        if g.lo:
            reach[dim] = g
    if not reach:
        return "no padding: windows begin inside the blocks"
    shape = list(layout.local_shape(mesh.coords))
    spatial = len(shape) - first
    edges = []
    for dim, g in sorted(reach.items()):
        index, count, w = layout.index(dim, mesh.coords), len(layout.sizes[dim] or ()), g.lo
        # in the space of what ranks send along this dim: 2 w cells each, their first w and their last w
        windows = []
        for i in range(count):
            runs = [Run(0, w, (i - 1) * 2 * w + w, 1)] if i else []
            if i + 1 < count:
                runs.append(Run(w, w, (i + 1) * 2 * w, 1))
            windows.append(tuple(runs))
        stage = plan_stage(dim, layout.shard_dims[dim], (2 * w,) * count, windows, (2 * w,) * count, index)
        sent = [
            2 * w if d == dim else n + 2 * reach[d].lo if d in reach and d > dim else n for d, n in enumerate(shape)
        ]
        padding = tuple(
            0 if first + i == dim or (first + i in reach and first + i > dim) else p for i, p in enumerate(local[1])
        )
        assert len(padding) == spatial
        edges.append(
            Edge(dim, w, StageRun(mesh, stage, sent, dtype, "conv"), _sides(g, shape[dim], index, count), padding)
        )
    return Overlapped(edges, local)


def _sides(g: Sliding, n: int, index: int, count: int) -> tuple[Side, ...]:
    sides = []
    n_out, w = g.n_out(n), g.lo
    if index > 0:
        m = min(n_out, -(-w // g.stride))
        sides.append(Side(0, m, (m - 1) * g.stride + g.reach, 0, 0, w))
    if index + 1 < count:
        # the first output cell whose window ends past the block
        first = max(0, -((g.reach - n - 1 - w) // g.stride))
        m = n_out - first
        if m > 0:
            start, cells = first * g.stride - w, (m - 1) * g.stride + g.reach
            at = n - start
            taken = min(w, cells - at)
            if taken > 0:
                sides.append(Side(first, m, cells, at, w, taken))
    return tuple(sides)
