"""Recurrent layers and cells: each rank runs the sequences of its part of the batch, from end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpishard.errors import UnsupportedOperationError, described
from mpishard.ops.meet import Labels, Met, meet
from mpishard.tensor.registry import RULES


def _filled(t: Tensor, dim: int) -> Tensor:
    """Return one cell along the batch in place of none, with the graph of ``t``: torch refuses empty batches."""
    shape = list(t.shape)
    shape[dim] = 1
    return t.new_zeros(shape) + t.sum()


def _run(met: Met, dims: Sequence[int | None], func: Callable[..., Any], outs: Sequence[Labels]) -> tuple[Any, ...]:
    """Return the results of ``func`` on the local operands, whose batches are the dims ``dims``."""
    operands = list(met.locals)
    empty = any(d is not None and t.shape[d] == 0 for t, d in zip(operands, dims) if isinstance(t, Tensor))
    if empty:
        operands = [_filled(t, d) if d is not None else t for t, d in zip(operands, dims)]
    found = func(*operands)
    results = []
    for t, labels in zip(found if isinstance(found, tuple) else (found,), outs):
        results.append(met.wrapped(t.narrow(labels.index("batch"), 0, 0) if empty else t, labels))
    return tuple(results)


def _layer_rule(func: Callable[..., Any], states: int) -> Callable[..., Any]:
    def rule(*args: Any, **kwargs: Any) -> Any:
        """Run the layers over whole sequences.

        Not collective where only the batch is sharded; a sharded sequence or feature dim is gathered (collective).
        """
        if kwargs or len(args) != 9 or not isinstance(args[4], int):
            raise UnsupportedOperationError(
                described(
                    f"{func.__name__} of a PackedSequence of ShardTensors",
                    expected="padded sequences in one tensor",
                    got="a packed sequence",
                    fix="give the padded tensor, and mask the results",
                )
            )
        input, hx, params, biases, layers, dropout, train, bidirectional, batch_first = args
        if train and dropout and layers > 1:
            raise UnsupportedOperationError(
                described(
                    f"{func.__name__} with dropout between its layers",
                    expected="dropout=0, whose result does not depend on the mesh",
                    got=f"dropout={dropout} in training",
                    fix="use one module per layer, and F.dropout between them",
                )
            )
        hidden = list(hx) if states > 1 else [hx]
        sequence: Labels = ("batch", None, None) if batch_first else (None, "batch", None)
        state: Labels = (None, "batch", None)
        labels = [sequence, *(state,) * states, *((None,) * p.ndim for p in params)]
        met = meet((input, *hidden, *params), labels)

        def local(x: Tensor, *rest: Tensor) -> Any:
            first = list(rest[:states]) if states > 1 else rest[0]
            weights = list(rest[states:])
            return func(x, first, weights, biases, layers, dropout, train, bidirectional, batch_first)

        dims = [sequence.index("batch"), *(1,) * states, *(None,) * len(params)]
        return _run(met, dims, local, (sequence, *(state,) * states))

    return rule


def _cell_rule(func: Callable[..., Any], states: int) -> Callable[..., Any]:
    def rule(input: Any, hx: Any, *params: Any, **named: Any) -> Any:
        """Make one step. Not collective where only the batch is sharded; sharded features are gathered."""
        order = ("w_ih", "w_hh", "b_ih", "b_hh")
        weights = [*params, *(named.get(n) for n in order[len(params) :])]
        hidden = list(hx) if states > 1 else [hx]
        rows: Labels = ("batch", None)
        labels = [rows, *(rows,) * states, *(() if p is None else (None,) * p.ndim for p in weights)]
        met = meet((input, *hidden, *weights), labels)

        def local(x: Tensor, *rest: Any) -> Any:
            return func(x, list(rest[:states]) if states > 1 else rest[0], *rest[states:])

        found = _run(met, [0, *(0,) * states, *(None,) * len(weights)], local, (rows,) * states)
        return found if states > 1 else found[0]

    return rule


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _states = 2 if _name == "lstm" else 1
    RULES[getattr(torch, _name)] = _layer_rule(getattr(torch, _name), _states)
    RULES[getattr(torch, f"{_name}_cell")] = _cell_rule(getattr(torch, f"{_name}_cell"), _states)
