"""Attention to few keys: all of them on every rank, and one call of torch's fused kernel.

A ring computes as many tiles as there are ranks, one message after the other, and rescales what it has after each. Keys
and values of some MB are sooner gathered by one message, and their cotangents summed by one each. What is gathered is
kept until backward, and twice that is needed for a moment on either way: so there is a bound, whatever the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.linear import again, differentiated_again
from mpishard.comm.collective import blocking
from mpishard.ops.attention.online_softmax import dense_features
from mpishard.ops.attention.ring import RingPlan, composed

# of keys and values of all ranks; on two ranks the ring takes 1.1 times as long with 1 MB, and no longer from 8; but
# each further rank is a message that it waits for
GATHERED_NBYTES = 16 << 20

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def why_not_gathered(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, *, plain: bool
) -> str:
    """Return why queries, keys and values of these global shapes are not for `gather_attention`; empty if they are.

    Not collective. ``plain``: there is no mask, causal or not, and nothing is dropped.
    """
    q, k, v = shapes
    if device.type != "cpu" or not torch.backends.cuda.flash_sdp_enabled():
        return "torch's fused kernel for a CPU is not there"
    if dtype not in (torch.float32, torch.float64):
        return "sums of half types are kept in float32"
    if not plain:
        return "masked or dropped"
    if len(q) != 4 or q[:2] != k[:2] or k != v or q[-1] != k[-1] or 0 in q or 0 in k:
        return "shapes that the fused kernel does not take"
    return ""


class GatherAttention(Function):
    """Autograd of attention to gathered keys; derivatives of the gradient go through `composed`.

    Notes
    -----
    Adjoint: cotangents of keys and values are summed over the ranks, each block on its owner.
    """

    @staticmethod
    def forward(ctx: Any, plan: RingPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to all keys. Collective over the ring."""
        whole = blocking.all_gather(_rows(k, v), plan.mesh.group(plan.ring), 0, plan.columns.sizes)
        keys, values = _parts(whole)
        if q.numel():
            out, log_sum = _fused(dense_features(q), keys, values, 0.0, False, scale=plan.scale)
        else:
            out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:-1])
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, whole, out, log_sum)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Carry the cotangent back. Collective over the ring."""
        plan, (g,), needs = ctx.plan, grads, ctx.needs_input_grad[1:]
        q, k, v, whole, out, log_sum = ctx.saved_tensors
        if differentiated_again():
            return None, *again(partial(composed, plan, None), (q, k, v), needs, g)
        if q.numel():
            dq, *rest = _fused_backward(
                g, dense_features(q), *_parts(whole), out, log_sum, 0.0, False, scale=plan.scale
            )
        else:
            dq, rest = torch.zeros_like(q), _parts(torch.zeros_like(whole))
        # each where the kernel left it: with the sequence first, if there is one batch cell
        group, sizes = plan.mesh.group(plan.ring), plan.columns.sizes
        dk, dv = (
            blocking.reduce_scatter(d.permute(2, 0, 1, 3), group, 0, sizes).permute(1, 2, 0, 3) if needed else None
            for d, needed in zip(rest, needs[1:])
        )
        return None, dq, dk, dv


def _rows(k: Tensor, v: Tensor) -> Tensor:
    """Return keys and values with the sequence first: blocks of ranks follow each other in memory. Not collective.

    So they are in projections, from which keys and values mostly come.
    """
    batch, heads, n, features = k.shape
    rows = k.new_empty(n, 2, batch, heads, features)
    for i, x in enumerate((k, v)):
        rows[:, i].copy_(x.permute(2, 0, 1, 3))
    return rows


def _parts(rows: Tensor) -> list[Tensor]:
    """Return the keys and the values in `_rows`. Not collective."""
    return [x.permute(1, 2, 0, 3) for x in rows.unbind(1)]
