"""Ring attention in a compiled program: all hops of a pass are one operation, which the compiler keeps whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.comm import traced
from mpishard.ops.attention.online_softmax import Dropout
from mpishard.ops.attention.ring import RingPlan, attended, cotangents
from mpishard.tensor.stream import draw_seed

_OP = "ring_attention"


class TracedRing(Function):
    """`RingAttention`, recorded. Result and logarithms of sums travel in one tensor: the operation returns one."""

    @staticmethod
    def forward(ctx: Any, plan: RingPlan, dropout: Dropout | None, *given: Tensor) -> Tensor:
        """Attend to every block. Collective over the ring."""
        assert traced.recording is not None
        q, _, v, *_ = given
        wide = torch.promote_types(q.dtype, torch.float32)
        operands = [*given]
        if dropout is not None:
            operands.append(
                traced.recording.call(
                    f"seed of {_OP}",
                    lambda: torch.tensor([draw_seed(plan.mesh)], device="cpu"),
                    [],
                    (1,),
                    dtype=torch.int64,
                    device=torch.device("cpu"),
                )
            )

        def run(*operands: Tensor) -> Tensor:
            seeded, (q, k, v, *masks) = _seeded(dropout, operands)
            result, log_sum = attended(plan, seeded, q, k, v, masks)
            return torch.cat((result.to(wide), log_sum.view(*result.shape[:-1], 1)), -1)

        shape = (*plan.batch, q.shape[-2], v.shape[-1] + 1)
        packed = traced.recording.call(_OP, run, operands, shape, dtype=wide, device=q.device)
        ctx.plan, ctx.dropout = plan, dropout
        ctx.save_for_backward(packed, *operands)
        return packed[..., :-1].to(q.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Carry the cotangent back. Collective over the ring."""
        assert traced.recording is not None
        plan, dropout, needs = ctx.plan, ctx.dropout, ctx.needs_input_grad[2:]
        packed, *operands = ctx.saved_tensors
        wanted = [i for i, needed in enumerate(needs) if needed]

        def run(packed: Tensor, g: Tensor, *operands: Tensor) -> Tensor:
            seeded, given = _seeded(dropout, operands)
            n, rows, _ = math.prod(plan.batch), *packed.shape[-2:]
            saved = g, packed[..., :-1], packed[..., -1:].reshape(n, rows, 1)
            found = cotangents(plan, seeded, given, saved, needs)
            return torch.cat([found[i].reshape(-1).to(packed.dtype) for i in wanted])  # type: ignore[union-attr]

        lengths = [operands[i].numel() for i in wanted]
        read, shape = [packed, grads[0], *operands], (sum(lengths),)
        flat = traced.recording.call(f"adjoint of {_OP}", run, read, shape)
        out: list[Tensor | None] = [None] * len(needs)
        for i, part in zip(wanted, flat.split(lengths)):
            out[i] = part.view(operands[i].shape).to(operands[i].dtype)
        return None, None, *out


def _seeded(dropout: Dropout | None, operands: Sequence[Tensor]) -> tuple[Dropout | None, Sequence[Tensor]]:
    """Part the seed from the operands, of which it is the last one where anything is dropped."""
    if dropout is None:
        return None, operands
    *given, seed = operands
    return dropout._replace(seed=int(seed)), given
