"""Recurrent layers and cells: each rank runs the sequences of its part of the batch, from end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.layout import Labels
from mpishard.ops.rule.whole import whole
from mpishard.tensor.registry import implements
from mpishard.tensor.shard_tensor import ShardTensor


def _layer_rule(func: Callable[..., Any], states: int) -> Callable[..., Any]:
    def rule(*args: Any) -> Any:
        """Run the layers over whole sequences.

        Not collective where only the batch is sharded; a sharded sequence or feature dim is gathered (collective),
        and packed sequences are whole on every rank. Dropout between layers is that of `torch.nn.functional.dropout`.
        """
        packed = isinstance(args[3], (list, tuple))
        if packed:
            input, batch_sizes, hx, params, biases, layers, dropout, train, bidirectional = args
        else:
            input, hx, params, biases, layers, dropout, train, bidirectional, batch_first = args
        if train and dropout and layers > 1:
            return _layer_by_layer(rule, args, dropout, states, packed)
        hidden = list(hx) if states > 1 else [hx]
        if packed:
            sequence: Labels = (None, None)
            state: Labels = (None, None, None)
        else:
            sequence = ("batch", None, None) if batch_first else (None, "batch", None)
            state = (None, "batch", None)
        labels = [sequence, *(state,) * states, *((None,) * p.ndim for p in params)]

        def local(x: Tensor, *rest: Tensor) -> Any:
            first = list(rest[:states]) if states > 1 else rest[0]
            weights = list(rest[states:])
            if packed:
                return func(x, batch_sizes, first, weights, biases, layers, 0.0, train, bidirectional)
            return func(x, first, weights, biases, layers, 0.0, train, bidirectional, batch_first)

        return whole(local, (input, *hidden, *params), labels, [sequence, *(state,) * states])

    return rule


def _layer_by_layer(rule: Callable[..., Any], args: Any, dropout: float, states: int, packed: bool) -> Any:
    """Run one layer after the other, with dropout between them. Collective."""
    head = list(args[:2]) if packed else list(args[:1])
    hx, params, biases, layers, _, train, bidirectional, *rest = args[len(head) :]
    hidden = list(hx) if states > 1 else [hx]
    count, rows = len(params) // layers, 2 if bidirectional else 1
    ends: list[list[Any]] = [[] for _ in hidden]
    for k in range(layers):
        if k:
            head[0] = F.dropout(head[0], dropout, True)
        first = [h[k * rows : (k + 1) * rows] for h in hidden]
        own = params[k * count : (k + 1) * count]
        start = first if states > 1 else first[0]
        head[0], *last = rule(*head, start, own, biases, 1, 0.0, train, bidirectional, *rest)
        for end, h in zip(ends, last):
            end.append(h)
    return (head[0], *(torch.cat(end) for end in ends))


@implements(torch._pack_padded_sequence, sharded="gathers")
def pack_padded_sequence(input: ShardTensor, lengths: Any, batch_first: bool) -> Any:
    """Pack sequences. Collective: they are gathered, since those of all ranks take turns in the packed rows."""
    rows: Labels = (None,) * (input.ndim - 1)
    return whole(lambda t: torch._pack_padded_sequence(t, lengths, batch_first), (input,), None, [rows, None])


@implements(torch._pad_packed_sequence, sharded="local")
def pad_packed_sequence(
    input: ShardTensor, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> Any:
    """Pad packed sequences, of which every rank has all. Not collective."""
    how = (batch_sizes, batch_first, padding_value, total_length)
    return whole(lambda t: torch._pad_packed_sequence(t, *how), (input,), None, [(None,) * (input.ndim + 1), None])


@implements(torch._C._nn.pad_sequence, sharded="halo")
def pad_sequence(
    sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    """Stack sequences of several lengths. Neighborwise collective where their lengths are sharded."""
    longest = max(s.shape[0] for s in sequences)

    def padded(s: Any) -> Any:
        extra = (0, longest - s.shape[0]) if padding_side == "right" else (longest - s.shape[0], 0)
        return F.pad(s, (*(0,) * (2 * (s.ndim - 1)), *extra), value=padding_value)

    return torch.stack([padded(s) for s in sequences], 0 if batch_first else 1)


def _cell_rule(func: Callable[..., Any], states: int) -> Callable[..., Any]:
    def rule(input: Any, hx: Any, *params: Any, **named: Any) -> Any:
        """Make one step. Not collective where only the batch is sharded; sharded features are gathered."""
        order = ("w_ih", "w_hh", "b_ih", "b_hh")
        weights = [*params, *(named.get(n) for n in order[len(params) :])]
        hidden = list(hx) if states > 1 else [hx]
        rows: Labels = ("batch", None)
        labels = [rows, *(rows,) * states, *(() if p is None else (None,) * p.ndim for p in weights)]

        def local(x: Tensor, *rest: Any) -> Any:
            return func(x, list(rest[:states]) if states > 1 else rest[0], *rest[states:])

        return whole(local, (input, *hidden, *weights), labels, rows)

    return rule


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _states = 2 if _name == "lstm" else 1
    implements(getattr(torch, _name), sharded="gathers")(_layer_rule(getattr(torch, _name), _states))
    implements(getattr(torch, f"{_name}_cell"), sharded="gathers")(_cell_rule(getattr(torch, f"{_name}_cell"), _states))
