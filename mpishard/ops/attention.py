"""Attention where the sequence is whole on every rank: batch, heads and (without a causal mask) queries are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mpishard.autograd.bucket import use
from mpishard.errors import UnsupportedOperationError, described
from mpishard.layout import Layout, layout_of
from mpishard.ops.contract import Contraction, Label, Labels, block, plan_contraction
from mpishard.tensor.operand import mesh_of, replicated_layout, resolved
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor, wrap


def _refuse(name: str, expected: str, got: Any, fix: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        described(f"no sharding rule for {name} of these operands", expected=expected, got=got, fix=fix)
    )


def _local(x: Any, mesh: Any) -> tuple[Tensor, Layout]:
    if isinstance(x, ShardTensor):
        x = resolved(x)
        return x._local, x._layout
    return x, replicated_layout(mesh, x.shape)


def _planned(
    name: str, operands: Sequence[Any], labels: Sequence[Labels], out: Labels, sharded: Sequence[Label]
) -> tuple[list[Tensor], Contraction, Any]:
    """Return blocks, plan and mesh, where only labels in ``sharded`` are sharded."""
    mesh = mesh_of(operands)
    pairs = [_local(x, mesh) for x in operands]
    for (_, layout), own in zip(pairs, labels):
        wrong = [d for d in layout.shard_dims if own[d] not in sharded and len(layout.sizes[d] or ()) > 1]
        if wrong:
            raise _refuse(
                name,
                "shards of batch or heads; sequences, features and all dims of masks that are not batch whole",
                f"dim {wrong[0]} of a {tuple(layout.shape)} operand is sharded: {list(layout.placements)}",
                "redistribute queries, keys and values to batch or heads, or gather the sequence: "
                "x.redistribute(placements)",
            )
    plan = plan_contraction(name, tuple(layout for _, layout in pairs), tuple(labels), out)
    blocks = [
        block(x, mesh, layout, target, used) for (x, layout), target, used in zip(pairs, plan.operands, plan.used)
    ]
    return blocks, plan, mesh


def _no_dropout(name: str, p: float) -> None:
    if p > 0:
        raise _refuse(
            f"{name} with dropout",
            "dropout 0: which weights are dropped must not depend on the mesh",
            f"dropout {p}",
            "set it to 0, or call eval() on the module; drop out the result instead",
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    if q.numel() and v.numel():
        return F.scaled_dot_product_attention(q, k, v, mask, **options)
    if options["enable_gqa"]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT  # of nothing, with its graph
    if mask is not None and mask.is_floating_point():
        scores = scores + mask
    return scores @ v


@implements(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ShardTensor:
    """Attend, each rank with its batch entries, heads or queries. Not collective where operands are laid out alike."""
    name = "scaled_dot_product_attention"
    _no_dropout(name, dropout_p)
    n = max(query.ndim, key.ndim, value.ndim) - 2
    batch: list[Labels] = [tuple(range(x.ndim - 3, -1, -1)) for x in (query, key, value)]
    sharded: list[Label] = list(range(n))
    if enable_gqa:
        # heads of keys serve several of the queries': their dim (the last of the batch) is not one label
        batch[1:] = [(*b[:-1], "G") for b in batch[1:]]
        sharded.remove(0)
    labels: list[Labels] = [(*batch[0], "L", "E"), (*batch[1], "S", "E"), (*batch[2], "S", "V")]
    operands = [query, key, value]
    if not is_causal:
        sharded.append("L")
    if attn_mask is not None:
        rows: list[Label] = ["L" if attn_mask.shape[-2] == query.shape[-2] else "1", "S"]
        if attn_mask.shape[-1] != key.shape[-2]:
            rows[1] = "one"
        labels.append((*range(attn_mask.ndim - 3, -1, -1), *rows))
        operands.append(attn_mask)
    blocks, plan, mesh = _planned(name, operands, labels, (*range(n - 1, -1, -1), "L", "V"), sharded)
    q, k, v, mask = *blocks[:3], blocks[3] if attn_mask is not None else None
    return wrap(_attend(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa), plan.out, mesh)


@implements(F.multi_head_attention_forward)
def multi_head_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[ShardTensor, ShardTensor | None]:
    """Attend, each rank with its batch entries. Not collective where operands are laid out alike."""
    name = "multi_head_attention_forward"
    _no_dropout(name, dropout_p if training else 0.0)
    if static_k is not None or static_v is not None:
        raise _refuse(name, "no static_k and static_v", "static_k or static_v", "pass keys and values")
    params = (
        in_proj_weight, in_proj_bias, bias_k, bias_v, out_proj_weight, out_proj_bias,
        q_proj_weight, k_proj_weight, v_proj_weight,
    )  # fmt: skip
    if any(isinstance(p, ShardTensor) for p in params):
        raise _refuse(name, "plain parameters", "a ShardTensor among them", "gather them with full_tensor()")
    n: Labels = ("N",) if query.ndim == 3 else ()
    labels: list[Labels] = [("L", *n, "E"), ("S", *n, "Ek"), ("S", *n, "Ev")]
    operands = [query, key, value]
    if key_padding_mask is not None:
        labels.append((*n, "S"))
        operands.append(key_padding_mask)
    per_head = attn_mask is not None and attn_mask.ndim == 3 and query.ndim == 3
    if attn_mask is not None:
        # (batch * heads, L, S): the batch apart, so that it can be cut
        operands.append(attn_mask.unflatten(0, (-1, num_heads)) if per_head else attn_mask)
        labels.append(("N", "H", "L", "S") if per_head else ("H", "L", "S")[-attn_mask.ndim :])
    blocks, plan, mesh = _planned(name, operands, labels, ("L", *n, "E"), ("N",))
    q, k, v, *masks = blocks
    mask = masks.pop() if attn_mask is not None else None
    if mask is not None and per_head:
        mask = mask.flatten(0, 1)
    used = [p if p is None else use(p, mesh, plan.out.sharded_mesh_dims) for p in params]
    y, weights = F.multi_head_attention_forward(
        q, k, v, embed_dim_to_check, num_heads, *used[:4], add_zero_attn, 0.0, *used[4:6],
        training=training, key_padding_mask=masks[0] if masks else None, need_weights=need_weights, attn_mask=mask,
        use_separate_proj_weight=use_separate_proj_weight, q_proj_weight=used[6], k_proj_weight=used[7],
        v_proj_weight=used[8], average_attn_weights=average_attn_weights, is_causal=is_causal,
    )  # fmt: skip
    out = wrap(y, plan.out, mesh)
    if weights is None:
        return out, None
    shape: tuple[int, ...] = tuple(weights.shape)
    sizes = None
    if n:
        shape = (query.shape[1], *shape[1:])
        sizes = {0: plan.out.sizes[1]} if plan.out.sizes[1] is not None else None
    placements = [type(p)(0) if p.is_shard() else p for p in plan.out.placements]  # type: ignore[call-arg]
    return out, wrap(weights, layout_of(mesh.shape, placements, shape, sizes), mesh)
