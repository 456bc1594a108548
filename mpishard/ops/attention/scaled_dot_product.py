"""Scaled dot-product attention over any sharded dims: whole sequences, a ring, or heads instead of sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.linear import apply, in_transform
from mpishard.autograd.window import window_op
from mpishard.comm import traced
from mpishard.comm.exchange.window import WindowOp
from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedOperationError
from mpishard.layout import Layout, total
from mpishard.ops.attention.gather import GATHERED_NBYTES, GatherAttention, why_not_gathered
from mpishard.ops.attention.layout import (
    Meeting,
    SequenceBlocks,
    contiguous,
    mirrored,
    moved_back,
    moved_into,
    plan_attention,
)
from mpishard.ops.attention.online_softmax import Dropout, Operand
from mpishard.ops.attention.ring import RingPlan, reach_of, ring_attention
from mpishard.ops.attention.ring_traced import TracedRing
from mpishard.ops.rule.autocast import autocast_enabled, no_autocast
from mpishard.ops.rule.contraction import meeting_blocks
from mpishard.ops.rule.dim import number_key, on_domain, require_dtype, resized
from mpishard.ops.rule.empty_block import filled, unfilled
from mpishard.ops.rule.reduction import HALVES
from mpishard.tensor.operand import blocks_of, moved, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap
from mpishard.tensor.stream import draw_seed

METHODS = ("auto", "ring", "all_to_all", "gather")
FEW_NBYTES = 1 << 20  # of keys and values of all ranks, where two ranks gather as fast as they move heads
BALANCED = 256  # cells of a sequence per rank from which it pays to balance causal work

_method: ContextVar[str] = ContextVar("attention_method", default="auto")


@contextmanager
def attention_method(method: str) -> Iterator[None]:
    """Choose how attention treats sequences that are sharded in queries, keys and values.

    Not collective, but every rank must choose alike.

    Parameters
    ----------
    method
        ``"ring"``: blocks of keys and values go round the ranks while these compute. ``"all_to_all"``: heads
        are sharded instead, each rank attends with whole sequences of its heads, and the result goes back.
        ``"gather"``: keys and values are gathered, for one call of torch's fused kernel on a CPU; the ring
        where that does not take the operands (masks, causal or not, dropout, half types).
        ``"auto"``: where every rank has the queries, and they are few, each attends to its own keys, and the
        softmax and its sums are reduced over the ranks; else all-to-all where the heads divide evenly, no mask
        has a row per query, nothing is dropped and no more bytes travel, but for as many and at most 1 MB of keys
        and values; else gathered where keys and values of all ranks have at most 16 MB altogether, which every rank
        then keeps until backward; else the ring.

    Raises
    ------
    UnsupportedOperationError
        There is no such method.

    Examples
    --------
    >>> with ms.attention_method("ring"):
    ...     y = F.scaled_dot_product_attention(q, k, v)
    """
    if method not in METHODS:
        raise UnsupportedOperationError(
            "attention_method: no such method", expected=METHODS, got=repr(method), fix="name one of them"
        )
    token = _method.set(method)
    try:
        yield
    finally:
        _method.reset(token)


class AttentionPlan(NamedTuple):
    """What one attention does on this rank.

    Attributes
    ----------
    meeting
        Layouts of the operands and of what this rank computes.
    out
        Layout of the result.
    ring
        How it is computed in tiles; None: by torch, on the blocks as they are.
    not_gathered
        Why keys and values go round a ring; empty where they are gathered.
    balance, back
        Where causal work is balanced: windows of queries, keys and values, and of the result.
    """

    meeting: Meeting
    out: Layout
    ring: RingPlan | None
    not_gathered: str = ""
    balance: tuple[WindowOp, WindowOp, WindowOp] | None = None
    back: WindowOp | None = None


@implements(F.scaled_dot_product_attention, sharded="moves")
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ShardTensor:
    """Attend, the result sharded as the queries are.

    Not collective where only batch, heads and queries are sharded, alike in all operands. Where keys and values
    are sharded along the sequence: collective, by the ring or by heads (see `attention_method`); each block of
    keys and values is sent once less often than there are ranks, and none is gathered but where they are few.
    Features that are sharded become shards of the sequence. The columns of a mask are gathered. Where every rank
    has the queries, they are cut like the keys, unless they are few: then only sums over the ranks travel.

    Under a causal mask, blocks that no query of a rank sees are neither sent to it nor computed. As the blocks of
    a layout are contiguous, the last ranks would have most of the work: long sequences are therefore exchanged
    first, so that every rank has a piece from either end, and back afterwards.

    Which weights are dropped depends on torch's seed alone, not on the mesh.
    """
    masks = () if attn_mask is None else (attn_mask,)
    return attend(query, key, value, masks, dropout_p, is_causal, scale, enable_gqa)


def attend(
    query: Any,
    key: Any,
    value: Any,
    masks: Sequence[Any] = (),
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ShardTensor:
    """Attend with any number of masks, all of which hold. As `scaled_dot_product_attention`."""
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    operands = [_cast(x) for x in (query, key, value, *masks)]
    mesh, locals_, layouts = blocks_of(operands)
    dtypes = tuple(x.dtype for x in locals_)
    method = _method.get()
    dropped = dropout_p > 0
    key_ = ("attention", layouts, dtypes, is_causal, number_key(scale), enable_gqa, number_key(dropout_p), method)
    plan: AttentionPlan | None = mesh.plans.get(key_)
    if plan is None:
        require_dtype(operands[0], _of_one_head)
        options = {"scale": scale, "enable_gqa": enable_gqa}
        # torch's own shape, and its own errors
        for mask in operands[3:] or (None,):
            given = (*operands[:3], mask, dropout_p, is_causal)
            shape = tuple(on_domain(F.scaled_dot_product_attention, *given, **options).shape)
        plan = mesh.plan(
            key_, lambda: _plan(mesh, layouts, shape, dtypes[0], is_causal, scale, enable_gqa, dropped, method)
        )
    meeting = plan.meeting
    if meeting.keys:
        held = [wrap(x, layout, mesh) for x, layout in zip(locals_, layouts)]
        return _attend_by_keys(
            [moved(x, target) for x, target in zip(held, meeting.operands)], dropout_p, is_causal, scale
        )
    blocks = meeting_blocks(locals_, mesh, layouts, meeting.plan)
    if plan.ring is None:
        y = _attend_locally(blocks, is_causal, scale, enable_gqa)
    elif not plan.not_gathered and not in_transform():
        y = GatherAttention.apply(plan.ring, *blocks)  # type: ignore[no-untyped-call]
    else:
        dropout = None
        if dropped:
            batch = range(meeting.out.ndim - 2)
            intervals = tuple(meeting.out.interval(d, mesh.coords) for d in batch)
            scores = (*meeting.out.shape[:-1], layouts[1].shape[-2])
            # a compiled program draws one in each call
            seed = draw_seed(mesh) if traced.recording is None else 0
            dropout = Dropout(dropout_p, seed, scores, intervals)
        if plan.balance is not None:
            blocks[:3] = [apply(op, x) for op, x in zip(plan.balance, blocks)]
        y = _round(plan.ring, dropout, *blocks)
        if plan.back is not None:
            y = apply(plan.back, y)
    return moved(wrap(y, meeting.out, mesh), plan.out)


def _of_one_head(x: Tensor) -> Tensor:
    rows = x.view(1, 1, -1, 1)
    return F.scaled_dot_product_attention(rows, rows, rows)


def _round(plan: RingPlan, dropout: Dropout | None, *blocks: Tensor) -> Tensor:
    """Attend by the ring. Collective over it."""
    if traced.recording is None:
        return ring_attention(plan, dropout, *blocks)
    with no_autocast(blocks[0].device.type):
        return TracedRing.apply(plan, dropout, *blocks)  # type: ignore[no-any-return,no-untyped-call]


def _cast(x: Any) -> Any:
    """Return an operand in the dtype that autocast gives it."""
    kind = x.device.type
    if not autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _scale(q: Any, scale: float | None) -> float:
    # of no features, all scores are 0
    return 1 / math.sqrt(q.shape[-1] or 1) if scale is None else scale


def _attend_by_keys(operands: Sequence[ShardTensor], dropout_p: float, is_causal: bool, scale: float | None) -> Any:
    """Attend with all queries on every rank, each to its own keys. Collective over the mesh dims that shard keys."""
    dtype = operands[0].dtype
    q, k, v, *masks = (x.float() if x.dtype in HALVES else x for x in operands)
    if q.ndim > 2:
        k, v = (_repeated(x, q.shape[-3]) for x in (k, v))
    s = (q * _scale(q, scale)) @ k.mT
    for mask in masks:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    if is_causal:
        (row, last), (column, end) = (s.sharding.interval(s.ndim - d, s.mesh.coords) for d in (2, 1))
        after = torch.arange(column, end, device="cpu") > torch.arange(row, last, device="cpu").unsqueeze(1)
        s = wrap(s.block.masked_fill(after.to(s.device), -torch.inf), s.sharding, s.mesh)
    if masks:
        hidden = (s == -torch.inf).all(-1, keepdim=True)
        p = s.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    else:
        p = s.softmax(-1)
    if dropout_p > 0:
        p = F.dropout(p, dropout_p)
    return resolved(p @ v).to(dtype)


def _repeated(x: ShardTensor, heads: int) -> ShardTensor:
    """Return keys or values with as many heads as the queries; one head broadcasts."""
    group = 1 if x.ndim < 3 or x.shape[-3] in (0, 1, heads) else heads // x.shape[-3]
    if group == 1:
        return x
    dim, cut = x.ndim - 3, x.sharding.sizes[-3]
    layout = resized(x.sharding, dim, heads, None if cut is None else tuple(n * group for n in cut))
    return wrap(x.block.repeat_interleave(group, dim), layout, x.mesh)


def _attend_locally(blocks: Sequence[Tensor], is_causal: bool, scale: float | None, enable_gqa: bool) -> Tensor:
    q, k, v, *masks = blocks
    mask = _merged(masks, q.dtype)
    if k.shape[-2] and q.shape[-1] and v.shape[-1]:
        # also of no heads: the same kernel as on other ranks, and what torch refuses of its derivatives
        q_, k_, v_, mask_ = map(filled, (q, k, v, mask))
        y = F.scaled_dot_product_attention(q_, k_, v_, mask_, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        # any operand may have no cells along a batch dim, also one that the queries do not have
        along = zip_longest(*(reversed(x.shape[:-2]) for x in (q, k, v, mask) if x is not None), fillvalue=1)
        batch = [n * all(sizes) for n, sizes in zip(reversed(y.shape[:-2]), along)][::-1]
        return unfilled(y, (*batch, q.shape[-2], v.shape[-1]))
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // max(x.shape[-3], 1), -3) for x in (k, v))
    scores = q @ k.mT  # of nothing, with its graph
    if mask is not None and mask.is_floating_point():
        scores = scores + mask
    return (scores.softmax(-1) @ v).to(q.dtype)


def _merged(masks: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    if len(masks) < 2:
        return masks[0] if masks else None
    if all(m.dtype == torch.bool for m in masks):
        out = masks[0]
        for m in masks[1:]:
            out = out & m
        return out
    total: Any = 0
    for m in masks:
        if m.dtype == torch.bool:
            m = torch.zeros((), dtype=dtype, device=m.device).masked_fill(~m, -torch.inf)
        total = total + m
    return total  # type: ignore[no-any-return]


def _plan(
    mesh: CartMesh,
    layouts: tuple[Layout, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropped: bool,
    method: str,
) -> AttentionPlan:
    """Plan an attention: who has which rows of the scores, and how keys and values reach them.

    With queries ``Q`` (rows), keys ``K``, values ``V`` and masks ``M``, of one batch cell and head::

        S = scale Q K^T + M,    y[r] = sum_c exp(S[r, c] - m[r]) V[c] / l[r]
        m[r] = max_c S[r, c],   l[r] = sum_c exp(S[r, c] - m[r])

    Rows are independent: batch, heads and rows that are sharded alike need nothing from other ranks, and torch's own
    function does them (``ring`` is None). Where columns (keys and values) are cut too, the first of these that serves:

    1. few rows, which every rank has: each rank attends to its own columns; ``m``, ``l`` and the sums are reduced
       (``meeting.keys``; `_attend_by_keys`).
    2. heads instead of sequences: all-to-all, whole rows and columns of some heads, and back (`_by_heads`).
    3. the ring: in hop ``h`` rank ``i`` of ``p`` has the block of columns ``(i - h) mod p``, and adds it to what it
       has, for a block ``j`` with its own scores ``S_j``::

           m' = max(m, max_c S_j),  l' = l e^(m - m') + sum_c e^(S_j - m'),  y' = y e^(m - m') + e^(S_j - m') V_j

           hop      0  1  2  3       causal, contiguous: row r sees columns c <= r, so rank i needs the blocks
           rank 0   0  3  2  1       0 .. i only: those right of the diagonal of hops (3 2 1; 3 2; 3) are neither
           rank 1   1  0  3  2       sent nor computed, and block j makes p - 1 - j hops (``reach``)
           rank 2   2  1  0  3
           rank 3   3  2  1  0

    Causal work is uneven there: rank 0 has one block of it, the last one ``p``. Long sequences are balanced: cut in
    ``2 p`` pieces, of which rank ``i`` has the pieces ``i`` and ``2 p - 1 - i``. These see ``i + 1`` and ``2 p - i``
    pieces: ``2 p + 1`` on every rank. The windows in ``balance`` bring queries, keys and values there; ``back``
    returns the rows::

        pieces   | 0 1 | 2 3 |    two ranks, as they lie in the layout
        rank 0     0       3
        rank 1       1   2

    Columns beyond the last row are seen by none, and are left out.
    """
    groups = (1, 1)
    if enable_gqa:
        groups = tuple(layouts[0].shape[-3] // o.shape[-3] for o in layouts[1:3])  # type: ignore[assignment]
    few = method == "auto" and shape[-2] * mesh.size <= layouts[1].shape[-2]
    meeting = plan_attention(layouts, shape, groups, few_queries=few)
    out = meeting.out
    if meeting.keys:
        return AttentionPlan(meeting, out, None)
    plain = not (dropped or is_causal or len(layouts) > 3)
    unfit = why_not_gathered([o.shape for o in meeting.operands[:3]], dtype, mesh.device, plain=plain)
    if meeting.ring and _by_heads(mesh, meeting, groups, dropped, method, None if unfit else dtype.itemsize):
        meeting = plan_attention(layouts, shape, groups, by_heads=True)
    q, k, v = meeting.operands[:3]
    row, column = q.ndim - 2, k.ndim - 2
    queries_cut = len(q.sizes[row] or ()) > 1
    if not dropped and len(k.sizes[column] or ()) < 2 and not (is_causal and queries_cut):
        return AttentionPlan(meeting, out, None)
    count, blocks = len(q.sizes[row] or (1,)), len(k.sizes[column] or (1,))
    balance = back = None
    rows, columns = contiguous(q, row), contiguous(k, column)
    if is_causal and count > 1 and q.shape[row] >= max(BALANCED, 2) * count:
        # queries see no keys beyond their own number
        rows, columns = mirrored(q.shape[row], count), mirrored(min(q.shape[row], k.shape[column]), blocks)
        balance = (
            window_op(mesh, q, dtype, [moved_into(rows, row)], op="attention"),
            window_op(mesh, k, dtype, [moved_into(columns, column)], op="attention"),
            window_op(mesh, v, dtype, [moved_into(columns, v.ndim - 2)], op="attention"),
        )
        held = resized(meeting.out, meeting.out.ndim - 2, q.shape[row], rows.sizes)
        own = meeting.out.sizes[-2]
        assert own is not None
        back = window_op(mesh, held, dtype, [moved_back(rows, held.ndim - 2, own)], op="attention")
        k, v = (resized(o, o.ndim - 2, total(columns.sizes), _cut(o, columns)) for o in (k, v))
    batch = meeting.out.local_shape(mesh.coords)[:-2]
    ring = RingPlan(
        mesh,
        meeting.ring,
        rows[q.index(row, mesh.coords)],
        columns,
        (k, v),
        (Operand(batch, 1), Operand(batch, groups[0]), Operand(batch, groups[1])),
        _scale(q, scale),
        is_causal,
        _reach(mesh, q, row, rows, columns, meeting.ring, is_causal),
        mesh.label,
    )
    reason = "by the ring as asked" if method == "ring" or not meeting.ring else ""
    reason = reason or unfit
    if not reason and method != "gather" and 2 * math.prod(k.shape) * dtype.itemsize > GATHERED_NBYTES:
        reason = "many keys: they travel while others are used"
    return AttentionPlan(meeting, out, ring, reason, balance, back)


def _cut(layout: Layout, blocks: SequenceBlocks) -> tuple[int, ...] | None:
    return None if layout.sizes[-2] is None else blocks.sizes


def _reach(
    mesh: CartMesh,
    q: Layout,
    row: int,
    rows: SequenceBlocks,
    columns: SequenceBlocks,
    ring: tuple[int, ...],
    is_causal: bool,
) -> Sequence[int]:
    """Return how far every block of keys travels among the ranks that share this rank's other coordinates."""

    def position(i: int) -> int:
        coords = list(mesh.coords)
        for m in reversed(ring):
            i, coords[m] = divmod(i, mesh.shape[m])
        return q.index(row, coords)

    return reach_of(rows, columns, is_causal, position)


def _by_heads(
    mesh: CartMesh, meeting: Meeting, groups: tuple[int, int], dropped: bool, method: str, gathered: int | None
) -> bool:
    """Whether to shard heads instead of sequences; ``gathered``: bytes of a cell where keys could be gathered."""
    q, k, v, *masks = meeting.operands
    size = math.prod(mesh.shape[m] for m in meeting.ring)
    has_heads = q.ndim > 2 and all(
        o.ndim > 2 and o.shape[-3] * group == meeting.out.shape[-3] for o, group in zip((q, k, v), (1, *groups))
    )
    if method in ("ring", "gather") or size == 1 or not has_heads:
        return False
    if method == "all_to_all":
        return True
    parts = size * len(q.sizes[-3] or (1,))
    even = all(o.shape[-3] % parts == 0 for o in (k, v))
    per_row = any(o.shape[-2] > 1 for o in masks)
    cells = [math.prod(o.shape) for o in (q, k, v, meeting.out)]
    heads, sequences = sum(cells), size * (cells[1] + cells[2])
    # few are sooner gathered: one message instead of four
    few = gathered is not None and (cells[1] + cells[2]) * gathered <= FEW_NBYTES
    fewer = heads < sequences or (heads == sequences > 0 and not few)
    return even and not per_row and not dropped and fewer
