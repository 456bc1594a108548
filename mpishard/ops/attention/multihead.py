"""Multi-head attention, as nn.MultiheadAttention and the transformer layers call it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.ops.attention.layout import plan_attention
from mpishard.ops.attention.scaled_dot_product import attend
from mpishard.ops.rule.autocast import autocast_enabled
from mpishard.ops.rule.dim import number_key, on_domain, unsharded
from mpishard.tensor.operand import mesh_of, moved, on_mesh
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor


@implements(F.multi_head_attention_forward, sharded="moves")
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
) -> tuple[Any, Any]:
    """Project, attend and project, the result sharded as the queries are. As `scaled_dot_product_attention`.

    Where weights are asked for, keys and values are gathered along the sequence: a row of weights has a number per
    key. Ask for none (``need_weights=False``) on long sequences.
    """
    dropout_p = dropout_p if training else 0.0
    tensors = (
        query, key, value, in_proj_weight, in_proj_bias, bias_k, bias_v, out_proj_weight, out_proj_bias,
        key_padding_mask, attn_mask, q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v,
    )  # fmt: skip
    mesh = mesh_of(tensors)
    flags = (
        embed_dim_to_check, num_heads, add_zero_attn, training, need_weights, use_separate_proj_weight,
        average_attn_weights, is_causal,
    )  # fmt: skip
    kinds = [None if x is None else (tuple(x.shape), x.dtype) for x in tensors]
    call = ("multi_head_attention", *kinds, flags, number_key(dropout_p))
    if mesh.plans.get(call) is None:
        _check(tensors, flags, dropout_p)
        mesh.plan(call, lambda: True)

    # also where a parameter alone is sharded
    query, key, value = _alike((query, key, value), lambda x: on_mesh(x, mesh))
    batched = query.ndim == 3
    if not batched:
        query, key, value = _alike((query, key, value), lambda x: x.unsqueeze(1))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    batch = query.shape[1]
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None  # the hint says what it holds
    else:
        is_causal = False

    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    q, k, v = _projected(query, key, value, weights, in_proj_bias)
    if bias_k is not None:
        k, v = (torch.cat([x, b.repeat(1, batch, 1)]) for x, b in ((k, bias_k), (v, bias_v)))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    k = k if static_k is None else static_k.unflatten(0, (batch, num_heads))
    v = v if static_v is None else static_v.unflatten(0, (batch, num_heads))
    if add_zero_attn:
        k, v = (torch.cat([x, _zeros(x, (batch, num_heads, 1, x.shape[-1]))], 2) for x in (k, v))
    masks = _masks(attn_mask, key_padding_mask, (batch, num_heads), int(bias_k is not None) + add_zero_attn)
    shares = None
    if need_weights:
        y, shares = _weighted(q, k, v, masks, dropout_p)
    else:
        # True means hidden here, and seen there
        y = attend(q, k, v, [~m if m.dtype == torch.bool else m for m in masks], dropout_p, is_causal)
    y = F.linear(y.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
    if shares is not None and average_attn_weights:
        shares = shares.mean(1)
    if not batched:
        y = y.squeeze(1)
        shares = None if shares is None else shares.squeeze(0)
    return y, shares


def _check(tensors: Sequence[Any], flags: tuple[Any, ...], dropout_p: float) -> None:
    """Raise torch's own errors. Collective."""
    width, heads, zeros, training, need_weights, separate, average, is_causal = flags

    def torchs(*meta: Tensor | None) -> None:
        if autocast_enabled(tensors[0].device.type):
            # which knows nothing of tensors without data
            meta = tuple(x.float() if x is not None and x.is_floating_point() else x for x in meta)
        F.multi_head_attention_forward(
            *meta[:3], width, heads, *meta[3:7], zeros, dropout_p, *meta[7:9], training, meta[9], need_weights,
            meta[10], separate, *meta[11:], average, is_causal,
        )  # fmt: skip

    on_domain(torchs, *tensors)


def _alike(tensors: Sequence[Any], change: Any) -> list[Any]:
    """Change tensors, each once, so that what was one tensor stays one."""
    done = {id(x): change(x) for x in tensors}
    return [done[id(x)] for x in tensors]


def _projected(query: Any, key: Any, value: Any, weights: Any, bias: Any) -> list[Any]:
    """Return the projections of queries, keys and values, with one product for those of the same tensor."""
    if isinstance(weights, tuple):
        biases = [None] * 3 if bias is None else bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases)]
    if query is key is value:
        return list(F.linear(query, weights, bias).chunk(3, -1))
    width = query.shape[-1]
    if key is value:
        parts = [width, 2 * width]
        biases = [None] * 2 if bias is None else bias.split(parts)
        w_query, w_rest = weights.split(parts)
        return [F.linear(query, w_query, biases[0]), *F.linear(key, w_rest, biases[1]).chunk(2, -1)]
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights.chunk(3), biases)]


def _masks(attn_mask: Any, padding_mask: Any, batch_and_heads: tuple[int, int], extra: int) -> list[Any]:
    """Return the masks that are given, as they broadcast over the weights; ``extra`` keys more are seen."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask.unflatten(0, batch_and_heads) if attn_mask.ndim == 3 else attn_mask)
    if padding_mask is not None:
        masks.append(padding_mask.unsqueeze(1).unsqueeze(1))
    return [F.pad(m, (0, extra)) for m in masks] if extra else masks


def _weighted(q: Any, k: Any, v: Any, masks: Sequence[Any], dropout_p: float) -> tuple[Any, Any]:
    """Return the sums of the values, and their weights, a row of which every rank of the queries has. Collective."""
    q, k, v, *masks = _met(q, k, v, masks)
    shares = (q * math.sqrt(1 / q.shape[-1])) @ k.mT
    for m in masks:
        shares = shares.masked_fill(m, -torch.inf) if m.dtype == torch.bool else shares + m
    shares = shares.softmax(-1)
    if dropout_p > 0:
        shares = F.dropout(shares, dropout_p)
    return shares @ v, shares


def _zeros(like: Any, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _met(q: Any, k: Any, v: Any, masks: Sequence[Any]) -> list[ShardTensor]:
    """Return the operands where they meet, keys and values whole along the sequence. Collective."""
    operands = [q, k, v, *masks]
    mesh = mesh_of(operands)
    operands = [on_mesh(x, mesh) for x in operands]
    shape = (*q.shape[:-1], v.shape[-1])
    meeting = plan_attention(tuple(x.sharding for x in operands), shape, (1, 1))
    targets = list(meeting.operands)
    targets[1:3] = (unsharded(o, (2,)) for o in targets[1:3])
    return [moved(x, target) for x, target in zip(operands, targets)]


@implements(torch._nested_tensor_from_mask_left_aligned, sharded="local")
def nested_tensor_from_mask_left_aligned(*_: Any) -> bool:
    """Tell a transformer encoder not to make nested tensors, which have no shards. Not collective."""
    return False
