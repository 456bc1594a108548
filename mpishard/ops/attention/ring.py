"""Ring attention: blocks of keys and values go round the ranks, each travelling while the one before is used.

In hop ``h``, rank ``i`` of ``p`` has block ``j = (i - h) mod p`` and sends it to rank ``i + 1``. How blocks are added
up forward is told where they are planned (`mpishard.ops.attention.scaled_dot_product`).

Backward recomputes the weights of every block from the saved logarithm of their sum, ``L = m + log l``. With the
result ``O``, its cotangent ``dO`` and ``D = sum_v dO O`` per row, block ``j`` has::

    P_j = exp(S_j - L),  dV_j = P_j^T dO,  dS_j = P_j (dO V_j^T - D),  dK_j = scale dS_j^T Q,  dQ += scale dS_j K_j

``dK_j`` and ``dV_j`` are sums over the ranks that had the block: rank ``j`` keeps its own share; those of the others
travel one hop behind the block, each rank adding its own, and from the last such rank, ``j + reach[j]``, straight home
to ``j``. Nothing is ever whole on a rank.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.linear import again, differentiated_again, in_transform
from mpishard.autograd.redistribute import redistribute
from mpishard.autograd.use import use
from mpishard.comm import guard
from mpishard.comm.interruption import under_way
from mpishard.comm.mesh import CartMesh, Group
from mpishard.comm.point_to_point import ring
from mpishard.comm.tag import Label, said
from mpishard.layout import FEW, Each, Layout, bounds
from mpishard.ops.attention.layout import SequenceBlocks, Stretches
from mpishard.ops.attention.online_softmax import (
    Backward,
    Dropout,
    OnlineSoftmax,
    Operand,
    Scores,
    Tile,
    is_needed,
    tiles,
)
from mpishard.ops.rule.autocast import no_autocast
from mpishard.ops.rule.dim import unsharded


class RingPlan(NamedTuple):
    """What one attention does on this rank.

    Attributes
    ----------
    mesh, ring
        The mesh, and its dims along which the blocks travel (none: there is one block).
    rows, columns
        Cells of this rank's queries, and of every block of keys.
    layouts
        Of keys and values, as they are cut into these blocks.
    operands
        How queries, keys and values are brought to one batch dim.
    scale, causal
        As in torch.
    reach
        How many hops every block travels: to the last rank that sees any of it.
    label
        What the ranks call this plan.
    """

    mesh: CartMesh
    ring: tuple[int, ...]
    rows: Stretches
    columns: SequenceBlocks
    layouts: tuple[Layout, Layout]
    operands: tuple[Operand, Operand, Operand]
    scale: float
    causal: bool
    reach: Sequence[int]
    label: Label

    @property
    def batch(self) -> tuple[int, ...]:
        """Batch shape of this rank's scores."""
        return self.operands[0].batch

    def tiles(self, block: int, fusable: bool) -> Iterator[Tile]:
        """Return the tiles of this rank's queries and a block of keys."""
        return tiles(self.rows, self.columns[block], math.prod(self.batch), self.causal, fusable)

    def offset(self, block: int) -> int:
        """Return where the columns of a block begin in masks, whose columns are whole."""
        # without a causal mask, which allows no other, a block is one segment
        return self.columns[block][0].start if self.columns[block] else 0


def reach_of(
    rows: SequenceBlocks, columns: SequenceBlocks, causal: bool, position: Callable[[int], int] = lambda i: i
) -> Sequence[int]:
    """Return how many hops every block travels: to the last rank that sees any of it. Not collective.

    That is the nearest one behind it in the ring whose last row (0 if all see all) is no earlier than the block's first
    column. Last rows rise along the ring, those of mirrored blocks, of which none is empty, fall: so it is found by
    bisection.

    Parameters
    ----------
    rows, columns
        Cells of blocks of queries and keys.
    causal
        Whether rows see no later columns.
    position
        Rank of the ring -> which of ``rows`` it has; does not fall.
    """
    n, falls = len(columns), causal and rows.mirrored
    # blocks without rows that end the ring are not looked at
    filled = n if falls else bisect_left(Each(n, lambda i: rows.start(position(i))), rows.start(len(rows)))

    def minus_last(i: int) -> int:
        own = rows[position(i)][-1]
        return 1 - own.start - own.count if causal else 0

    def reach(block: int) -> int:
        cells = columns[block]
        if not cells:
            return 0
        first = cells[0].start if causal else 0
        for lo, hi in ((0, min(block, filled)), (block, filled)):
            if falls:
                seeing = bisect_right(Each(hi, minus_last), -first, lo, hi) - 1
            else:
                seeing = next((i for i in range(hi - 1, lo - 1, -1) if rows[position(i)]), -1)
                seeing = seeing if seeing >= lo and -minus_last(seeing) >= first else -1
            if seeing >= lo:
                return (seeing - block) % n
        return 0

    every = Each(n, reach)
    return tuple(every) if n <= FEW else every


class _Blocks:
    """The blocks of keys and values on their way round this rank."""

    def __init__(self, plan: RingPlan, k: Tensor, v: Tensor, *, adjoint: bool = False) -> None:
        self._plan = plan
        self.group: Group | None = plan.mesh.group(plan.ring) if plan.ring else None
        self.size, self.rank = (self.group.size, self.group.rank) if self.group else (1, 0)
        self._k, self._v = k, v
        self._extents = plan.columns.sizes
        if guard.DEBUG and self.group is not None:
            guard.check(plan.mesh.comm, said(ring.OP, plan.label, adjoint))

    def shapes(self, block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the keys and the values of a block."""
        n = self._extents[block]
        return tuple(  # type: ignore[return-value]
            (*x.shape[:-2], n, x.shape[-1]) for x in (self._k, self._v)
        )

    def numel(self, block: int) -> int:
        """Return how many numbers a block has."""
        return sum(map(math.prod, self.shapes(block)))

    def travels(self, block: int, hop: int) -> bool:
        """Tell whether a block makes its ``hop``-th hop."""
        return 0 < hop <= self._plan.reach[block] and self.numel(block) > 0

    def round(self, attend: Callable[[int, int, Tensor, Tensor, Callable[[], None]], None]) -> None:
        """Call ``attend(block, hop, k, v, poke)`` for every block. Collective over the ring."""
        flat: Tensor | None = None
        k, v = self._k, self._v
        comm = None if self.group is None else self.group.comm
        for hop in range(self.size):
            block = (self.rank - hop) % self.size
            on_the_way: list[ring.Transit] = []
            coming = None
            if self.group is not None:
                after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
                if self.travels((block - 1) % self.size, hop + 1) and hop + 1 < self.size:
                    n = self.numel((block - 1) % self.size)
                    coming = ring.receive(n, k.dtype, k.device, self.group, before, ring.ONWARD, self._plan.label)
                    on_the_way.append(coming)
                if self.travels(block, hop + 1):
                    if flat is None:
                        flat = torch.cat((k.reshape(-1), v.reshape(-1)))
                    on_the_way.append(ring.send(flat, self.group, after, ring.ONWARD, self._plan.label))

            def poke(messages: list[ring.Transit] = on_the_way) -> None:
                for message in messages:
                    message.poke()

            with under_way(ring.OP, comm, *(message.wait for message in on_the_way)):
                attend(block, hop, k, v, poke)
            if hop + 1 < self.size:
                shapes = self.shapes((block - 1) % self.size)
                flat = coming.wait() if coming is not None else self._k.new_zeros(self.numel((block - 1) % self.size))
                k, v = self.parts(flat, shapes)

    @staticmethod
    def parts(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Return the keys and the values in a message."""
        n = math.prod(shapes[0])
        return flat[:n].view(shapes[0]), flat[n:].view(shapes[1])


class _Sums:
    """Cotangents of blocks, which follow them and come home at the end."""

    def __init__(self, blocks: _Blocks, dtype: torch.dtype, device: torch.device) -> None:
        self._blocks, self._dtype, self._device = blocks, dtype, device
        self._sent: list[ring.Transit] = []
        self._home: ring.Transit | None = None
        self.own: Tensor | None = None
        group, rank, size = blocks.group, blocks.rank, blocks.size
        last = blocks._plan.reach[rank]
        if group is not None and blocks.travels(rank, last):
            self._home = self._receive((rank + last) % size, rank, ring.HOME)

    def _receive(self, source: int, block: int, way: str) -> ring.Transit:
        n = self._blocks.numel(block)
        return ring.receive(n, self._dtype, self._device, self._blocks.group, source, way, self._blocks._plan.label)

    def expect(self, block: int, hop: int) -> ring.Transit | None:
        """Start to receive what earlier ranks have added for a block."""
        # the owner's share stays at home
        if hop < 2 or not self._blocks.travels(block, hop):
            return None
        return self._receive((self._blocks.rank - 1) % self._blocks.size, block, ring.SUMS)

    def add(self, block: int, hop: int, share: Tensor, coming: ring.Transit | None) -> None:
        """Add this rank's share, and send the sum on, or home."""
        blocks = self._blocks
        if hop == 0:
            self.own = share
            return
        if coming is not None:
            share += coming.wait()
        for message in self._sent:
            message.wait()
        self._sent = []
        last = blocks._plan.reach[block]
        if blocks.travels(block, hop):
            dest, way = (block, ring.HOME) if hop == last else ((blocks.rank + 1) % blocks.size, ring.SUMS)
            self._sent.append(ring.send(share, blocks.group, dest, way, blocks._plan.label))

    def result(self) -> Tensor:
        """Return the sum of this rank's own block."""
        for message in self._sent:
            message.wait()
        assert self.own is not None
        if self._home is not None:
            self.own += self._home.wait()
        return self.own


def attended(
    plan: RingPlan, dropout: Dropout | None, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the attention, and the logarithm of each one's sum of weights. Collective."""
    scores = Scores(plan.operands[0].flat(q) * plan.scale, masks, plan.batch, dropout)
    softmax, fusable = OnlineSoftmax(scores, v.shape[-1]), scores.fusable(v.shape[-1])
    of_keys, of_values = plan.operands[1:]

    def attend(block: int, hop: int, k: Tensor, v: Tensor, poke: Callable[[], None]) -> None:
        if is_needed(plan.rows, plan.columns[block], plan.causal):
            softmax.add(plan.tiles(block, fusable), of_keys.flat(k), of_values.flat(v), plan.offset(block), poke)

    _Blocks(plan, k, v).round(attend)
    out, log_sum = softmax.result()
    # of what is a view when it comes from a node, torch lets nobody write into it
    return torch.ops.aten._unsafe_view(out.to(q.dtype), [*plan.batch, *out.shape[-2:]]), log_sum


def cotangents(
    plan: RingPlan,
    dropout: Dropout | None,
    operands: Sequence[Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return the cotangents of queries, keys, values and masks, where needed. Collective.

    ``saved``: the cotangent of the result, and what `attended` returned.
    """
    q, k, v, *masks = operands
    g, result, log_sum = saved
    scores = Scores(plan.operands[0].flat(q) * plan.scale, masks, plan.batch, dropout)
    out, g = (plan.operands[0]._replace(group=1).flat(x) for x in (result, g))
    dmasks = [torch.zeros_like(m, dtype=g.dtype) if n else None for m, n in zip(masks, needs[3:])]
    fusable = scores.fusable(v.shape[-1])
    backward = Backward(scores, g, out, log_sum, (g * out).sum(-1, keepdim=True), torch.zeros_like(scores.q), dmasks)
    blocks = _Blocks(plan, k, v, adjoint=True)
    sums = _Sums(blocks, g.dtype, g.device) if needs[1] or needs[2] else None

    def attend(block: int, hop: int, k: Tensor, v: Tensor, poke: Callable[[], None]) -> None:
        coming = sums.expect(block, hop) if sums is not None else None
        shapes = blocks.shapes(block)
        share = g.new_zeros(blocks.numel(block)) if sums is not None else None
        if is_needed(plan.rows, plan.columns[block], plan.causal):
            of_keys, of_values = plan.operands[1:]
            flat = of_keys.flat(k), of_values.flat(v)
            own = (None, None) if share is None else blocks.parts(share, shapes)
            # where each cell is used once, its cotangent goes where it is sent from
            into = tuple(
                torch.zeros_like(x) if d is None or operand.is_shared(d.shape) else d.view(x.shape)
                for x, d, operand in zip(flat, own, plan.operands[1:])
            )
            backward.add(plan.tiles(block, fusable), *flat, plan.offset(block), into, poke)
            for d, total, operand in zip(own, into, plan.operands[1:]):
                if d is not None and operand.is_shared(d.shape):
                    d.copy_(operand.folded(total, d.shape))
        if sums is not None:
            sums.add(block, hop, share, coming)

    blocks.round(attend)
    dk = dv = None
    if sums is not None:
        dk, dv = blocks.parts(sums.result(), blocks.shapes(blocks.rank))
    dq = plan.operands[0].folded(backward.dq.mul_(plan.scale), q.shape)
    return [d.to(x.dtype) if n and d is not None else None for d, x, n in zip((dq, dk, dv, *dmasks), operands, needs)]


class RingAttention(Function):
    """Autograd of the ring; derivatives of the gradient go through `composed`."""

    @staticmethod
    def forward(
        ctx: Any, plan: RingPlan, dropout: Dropout | None, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor
    ) -> Tensor:
        """Attend to every block. Collective over the ring."""
        result, log_sum = attended(plan, dropout, q, k, v, masks)
        ctx.plan, ctx.dropout = plan, dropout
        ctx.save_for_backward(q, k, v, result, log_sum, *masks)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Carry the cotangent back. Collective over the ring."""
        q, k, v, result, log_sum, *masks = ctx.saved_tensors
        plan, (g,), needs = ctx.plan, grads, ctx.needs_input_grad[2:]
        operands = q, k, v, *masks
        if differentiated_again():
            return None, None, *again(partial(composed, plan, ctx.dropout), operands, needs, g)
        return None, None, *cotangents(plan, ctx.dropout, operands, (g, result, log_sum), needs)


def composed(plan: RingPlan, dropout: Dropout | None, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
    """Return the same attention as ordinary differentiable operations on gathered keys and values.

    Collective over the ring. For gradients of gradients and forward-mode derivatives: all keys, values and
    this rank's rows of scores are in memory.
    """
    whole = []
    for x, layout, operand in zip((k, v), plan.layouts, plan.operands[1:]):
        if plan.ring:
            dim = layout.ndim - 2
            x = use(redistribute(x, plan.mesh, layout, unsharded(layout, (dim,))), plan.mesh, plan.ring)
        whole.append(operand.flat(x))
    s = (plan.operands[0].flat(q) * plan.scale) @ whole[0].mT
    s = s.view(*plan.batch, *s.shape[-2:])
    starts = bounds(plan.columns.sizes)
    columns = [(first + c.at, c) for first, block in zip(starts, plan.columns) for c in block]
    for mask in masks:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    if plan.causal:
        row = torch.cat(
            [torch.arange(r.start, r.start + r.count, device="cpu") for r in plan.rows]
            or [torch.arange(0, device="cpu")]
        )
        column = torch.empty(s.shape[-1], dtype=torch.int64, device="cpu")
        for at, c in columns:
            column[at : at + c.count] = torch.arange(c.start, c.start + c.count, device="cpu")
        s = s.masked_fill((column > row.unsqueeze(1)).to(s.device), -torch.inf)
    hidden = (s == -torch.inf).all(-1, keepdim=True)
    p = s.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    if dropout is not None:
        factor = s.new_zeros(math.prod(plan.batch), *s.shape[-2:])
        for r in plan.rows:
            for at, c in columns:
                part = dropout.factor((r.start, r.start + r.count), (c.start, c.start + c.count), factor)
                factor[:, r.at : r.at + r.count, at : at + c.count] = part
        p = p * factor.view(p.shape)
    out = p.reshape(math.prod(plan.batch), *p.shape[-2:]) @ whole[1]
    return out.view(*plan.batch, *out.shape[-2:]).to(q.dtype)


def ring_attention(plan: RingPlan, dropout: Dropout | None, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
    """Return this rank's rows of the attention, given its blocks. Collective over the ring."""
    with no_autocast(q.device.type):
        if in_transform():
            return composed(plan, dropout, q, k, v, *masks)
        return RingAttention.apply(plan, dropout, q, k, v, *masks)  # type: ignore[no-any-return,no-untyped-call]
