"""Neighbourhood attention: every query attends to a window of cells around it, in 1, 2 or 3 dims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.argument import require
from mpishard.autograd.linear import again, apply, differentiated_again, in_transform
from mpishard.autograd.window import intervals_wanted, window_op
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.mesh import CartMesh
from mpishard.errors import LayoutError
from mpishard.layout import Each, Layout, bounds, layout_of
from mpishard.ops.rule.dim import frozen, whole_along
from mpishard.ops.rule.reduction import HALVES
from mpishard.tensor.operand import mesh_of, moved, on_mesh
from mpishard.tensor.shard_tensor import ShardTensor, wrap


class Along(NamedTuple):
    """Geometry of one spatial dim: extent, cells of the window, their distance, and whether it ends at the query."""

    n: int
    kernel: int
    dilation: int
    causal: bool

    def cells(self, a: int, b: int) -> Tensor:
        """Return the cells (b - a, kernel) that the queries ``[a, b)`` see; negative: none. Not collective."""
        query = torch.arange(a, b, device="cpu")
        # a query sees cells of its own residue only: a dim of their own
        residue, position = query % self.dilation, query // self.dilation
        if self.causal:
            first = position - self.kernel + 1
        else:
            extent = (self.n - residue + self.dilation - 1) // self.dilation
            first = torch.minimum((position - self.kernel // 2).clamp_(min=0), extent - self.kernel)
        column = first.unsqueeze(1) + torch.arange(self.kernel, device="cpu")
        return torch.where(column < 0, -1, column * self.dilation + residue.unsqueeze(1))

    def window(self, a: int, b: int) -> tuple[int, int]:
        """Return the interval that holds all cells that the queries ``[a, b)`` see. Not collective."""
        if b <= a:
            return 0, 0
        cells = self.cells(a, b)
        return int(cells[cells >= 0].min()), int(cells.max()) + 1


class Neighbours:
    """The cells that this rank's queries see, in its window of keys.

    Parameters
    ----------
    dims
        Geometry of the spatial dims.
    queries, windows
        Their intervals on this rank.
    """

    def __init__(
        self, dims: Sequence[Along], queries: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]]
    ) -> None:
        self._cells = [d.cells(*q) for d, q in zip(dims, queries)]
        self._windows = tuple(windows)
        self._extents = [hi - lo for lo, hi in windows]
        self._kernels = [d.kernel for d in dims]
        self._any_hidden = any(d.causal for d in dims)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield, per position in the window, the key that every query sees there, and where it sees none.

        From the last one: that one every query sees.
        """
        ndim = len(self._kernels)
        for at in product(*[reversed(range(k)) for k in self._kernels]):
            index, hidden = torch.zeros((1,) * ndim, dtype=torch.int64, device="cpu"), None
            for d, (cells, (lo, _), extent) in enumerate(zip(self._cells, self._windows, self._extents)):
                own = cells[:, at[d]].view([-1 if e == d else 1 for e in range(ndim)])
                index = index * extent + (own - lo).clamp_(min=0)
                if self._any_hidden:
                    hidden = own < 0 if hidden is None else hidden | (own < 0)
            yield index.reshape(-1), None if hidden is None else hidden.reshape(-1)


def _flat(x: Tensor) -> Tensor:
    """Return (batch, cells, heads, features), in the dtype of the sums."""
    x = x.float() if x.dtype in HALVES else x
    return x.reshape(x.shape[0], math.prod(x.shape[1:-2]), *x.shape[-2:])


def _score(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    s = (q * k).sum(-1, keepdim=True)
    return s if hidden is None else s.masked_fill(hidden.to(s.device).view(1, -1, 1, 1), -torch.inf)


class NeighbourhoodAttention(Function):
    """Autograd of the attention on a window; memory is that of the operands. Nothing travels here."""

    @staticmethod
    def forward(ctx: Any, neighbours: Neighbours, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend, one position in the window after the other."""
        query, keys, values = _flat(q) * scale, _flat(k), _flat(v)
        total = query.new_zeros((*query.shape[:-1], 1))
        top = torch.full_like(total, -torch.inf)
        out = query.new_zeros((*query.shape[:-1], v.shape[-1]))
        for index, hidden in neighbours:
            index = index.to(q.device)
            s = _score(query, keys.index_select(1, index), hidden)
            new = torch.maximum(top, s)
            rescale, p = (top - new).exp_(), s.sub_(new).exp_()
            total.mul_(rescale).add_(p)
            out.mul_(rescale).addcmul_(p, values.index_select(1, index))
            top = new
        result = out.div_(total).to(q.dtype).view(*q.shape[:-1], v.shape[-1])
        ctx.neighbours, ctx.scale = neighbours, scale
        ctx.save_for_backward(q, k, v, result, top + total.log_())
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Carry the cotangent back."""
        q, k, v, result, log_sum = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if differentiated_again():
            return None, None, *again(partial(composed, ctx.neighbours, ctx.scale), (q, k, v), needs, grads[0])
        query, keys, values, g = _flat(q) * ctx.scale, _flat(k), _flat(v), _flat(grads[0])
        dot = (g * _flat(result)).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        for index, hidden in ctx.neighbours:
            index = index.to(q.device)
            key = keys.index_select(1, index)
            p = _score(query, key, hidden).sub_(log_sum).exp_()
            ds = (g * values.index_select(1, index)).sum(-1, keepdim=True).sub_(dot).mul_(p)
            dq.addcmul_(ds, key)
            if needs[1]:
                dk.index_add_(1, index, ds * query)
            if needs[2]:
                dv.index_add_(1, index, p * g)
        shaped = [d.view(x.shape).to(x.dtype) for d, x in ((dq.mul_(ctx.scale), q), (dk, k), (dv, v))]
        return None, None, *[d if n else None for d, n in zip(shaped, needs)]


def composed(neighbours: Neighbours, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the same attention as ordinary differentiable operations, with all windows in memory.

    Not collective.
    """
    query, keys, values = _flat(q) * scale, _flat(k), _flat(v)
    scores, seen = [], []
    for index, hidden in neighbours:
        index = index.to(q.device)
        scores.append(_score(query, keys.index_select(1, index), hidden))
        seen.append(values.index_select(1, index))
    out = (torch.stack(scores).softmax(0) * torch.stack(seen)).sum(0)
    return out.to(q.dtype).view(*q.shape[:-1], v.shape[-1])


def _attend(neighbours: Neighbours, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if in_transform():
        return composed(neighbours, scale, q, k, v)
    return NeighbourhoodAttention.apply(neighbours, scale, q, k, v)  # type: ignore[no-any-return,no-untyped-call]


class Plan(NamedTuple):
    """Fetch of the windows of keys and values, and what this rank's queries see in them."""

    keys: WindowOp | None
    values: WindowOp | None
    neighbours: Neighbours


def neighborhood_attention(
    query: Any,
    key: Any,
    value: Any,
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    scale: float | None = None,
) -> Any:
    """Attend from every cell to the cells of a window around it.

    Neighborwise collective where spatial dims are sharded: a rank fetches the keys and values that its queries
    see, from as many ranks as hold them. Keys and values that are laid out differently from the queries are
    redistributed, and features that are sharded are gathered (collective).

    Parameters
    ----------
    query, key, value
        Tensors or ShardTensors ``(batch, *spatial, heads, features)`` with 1 to 3 spatial dims, of the same shape; the
        features of values may differ.
    kernel_size
        Cells of the window, for all spatial dims or per dim.
    dilation
        Their distance; ``kernel_size * dilation`` may not exceed the extent.
    is_causal
        Whether the window ends at the query, for all spatial dims or per dim; it has fewer cells near the start
        then. Else it is centred (``kernel_size // 2`` cells before the query), and shifted inside at the edges of
        the domain, so that every query sees ``kernel_size`` cells.
    scale
        Factor of the scores; ``features ** -0.5`` if not given.

    Returns
    -------
    torch.Tensor
        ``(batch, *spatial, heads, features of values)``, laid out as the queries.

    Raises
    ------
    LayoutError
        Shapes, kernel size, dilation or flags that do not fit.

    Notes
    -----
    Adjoint: that of the attention on the window, and the windows' cotangents sent home and added.

    A. Hassani et al., Neighborhood Attention Transformer, CVPR 2023; its library's layout and windows.

    Examples
    --------
    >>> y = ms.neighborhood_attention(q, k, v, kernel_size=7, dilation=2)
    """
    for argument, x in (("query", query), ("key", key), ("value", value)):
        require("neighborhood_attention", argument, x, Tensor, "give a ShardTensor, or a tensor that all ranks have")
    dims = _checked(query, key, value, kernel_size, dilation, is_causal)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    operands = (query, key, value)
    if not any(isinstance(x, ShardTensor) for x in operands):
        whole = [(0, d.n) for d in dims]
        return _attend(Neighbours(dims, whole, whole), scale, query, key, value)
    mesh = mesh_of(operands)
    held = [whole_along(on_mesh(x, mesh), (x.ndim - 1,)) for x in operands]
    first = next((x.sharding for x in held if x.sharding.shard_dims), held[0].sharding)
    q, k, v = (moved(x, layout_of(mesh.shape, first.placements, x.shape, first.sizes)) for x in held)
    name = ("neighborhood_attention", k.sharding, v.sharding, k.dtype, tuple(dims))
    plan: Plan | None = mesh.plans.get(name)
    if plan is None:
        plan = mesh.plan(name, lambda: _plan(mesh, k.sharding, v.sharding, k.dtype, dims))
    keys, values = (x if op is None else apply(op, x) for op, x in ((plan.keys, k.block), (plan.values, v.block)))
    y = _attend(plan.neighbours, scale, q.block, keys, values)
    return wrap(y, v.sharding, mesh)


def _plan(mesh: CartMesh, keys: Layout, values: Layout, dtype: torch.dtype, dims: Sequence[Along]) -> Plan:
    wanted, queries, windows = [], [], []
    for d, along in enumerate(dims, 1):
        sizes = keys.sizes[d]
        if sizes is None:
            queries.append((0, along.n))
            windows.append((0, along.n))
            continue
        borders = bounds(sizes)
        intervals = _windows(along, borders)
        wanted.append(intervals_wanted(along.n, d, intervals, reached=_reached(along, borders)))
        own = keys.index(d, mesh.coords)
        queries.append((borders[own], borders[own + 1]))
        windows.append(intervals[own])
    ops = [window_op(mesh, o, dtype, wanted, op="neighborhood_attention") if wanted else None for o in (keys, values)]
    return Plan(ops[0], ops[1], Neighbours(dims, queries, windows))


def _windows(along: Along, borders: Sequence[int]) -> Sequence[tuple[int, int]]:
    return Each(len(borders) - 1, lambda i: along.window(borders[i], borders[i + 1]))


def _reached(along: Along, borders: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Return intervals that hold the windows, whose ends do not fall. Not collective."""
    far = along.kernel * along.dilation
    return Each(len(borders) - 1, lambda i: (max(0, borders[i] - far), min(along.n, borders[i + 1] + far)))


def _checked(query: Any, key: Any, value: Any, kernel_size: Any, dilation: Any, is_causal: Any) -> list[Along]:
    """Return the geometry of the spatial dims, or refuse the arguments."""

    def refuse(what: str, expected: str, got: Any, fix: str) -> LayoutError:
        return LayoutError(f"neighborhood_attention: {what}", expected=expected, got=got, fix=fix)

    shapes = [tuple(x.shape) for x in (query, key, value)]
    ndim = len(shapes[0]) - 3
    if ndim not in (1, 2, 3) or shapes[1] != shapes[0] or shapes[2][:-1] != shapes[0][:-1]:
        raise refuse(
            "shapes do not fit",
            "queries, keys and values (batch, 1 to 3 spatial dims, heads, features) of one shape",
            shapes,
            "bring heads and features to the last two dims",
        )
    if len({x.dtype for x in (query, key, value)}) > 1:
        raise refuse("dtypes differ", "one dtype", [x.dtype for x in (query, key, value)], "convert the operands")
    given = []
    for name, x in (("kernel_size", kernel_size), ("dilation", dilation), ("is_causal", is_causal)):
        x = frozen(x, ndim)
        if not isinstance(x, tuple) or len(x) != ndim:
            raise refuse(f"{name} does not fit", f"one value, or {ndim}", x, "give one per spatial dim")
        given.append(x)
    dims = [Along(n, int(k), int(d), bool(c)) for n, k, d, c in zip(shapes[0][1:-2], *given)]
    for along in dims:
        if along.kernel < 1 or along.dilation < 1 or along.kernel * along.dilation > along.n:
            raise refuse(
                "the window does not fit the domain",
                f"kernel_size and dilation of at least 1, with a product of at most the extent {along.n}",
                f"kernel_size {along.kernel}, dilation {along.dilation}",
                "make the window smaller",
            )
    return dims
