"""Kernels that torch lacks for a dtype: a rank without cells raises what ranks with cells raise.

Torch looks for the kernel of a dtype only where there are cells. Of a tensor that it refuses, a rank with an empty
block would go on, and meet nobody. So an operation of which this rank's block is empty is done once, per function,
dtypes and layouts, with torch asked after each kernel by a tensor of a cell; forward, and backward when it comes. None
of this is in the way of a program before a layout with an empty block is made; then, blocks with cells cost a look at
their number.

Views of an empty block are taken so that their graph goes on where they are written into, as it does on other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpishard.autograd.graph import before, own_nodes, packs, replayed_views, unseen
from mpishard.comm.memory.buffer import transforms_active
from mpishard.comm.thread import Depth
from mpishard.layout import watch_empty_blocks
from mpishard.tensor.registry import BACKWARD, RULES, Rule, tensors_in
from mpishard.tensor.shard_tensor import ShardTensor

_KEPT = 65536
_DIMS = 8
_LAZY = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
# calls that were done so, and calls whose backward was; of kernels, what torch said of them
_calls: set[Any] = set()
_backwards: set[Any] = set()
_kernels: dict[Any, NotImplementedError | None] = {}


class _Asking(TorchDispatchMode):
    """Asks, for each operation without cells, whether torch has its kernel.

    ``key`` is that of the call in whose backward it asks, which is asked again where it has none.
    """

    def __init__(self, key: Any = None) -> None:
        super().__init__()
        self.key = key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch leaves out what resolves conjugates inside functions that it composes
        with torch._C._PreserveDispatchKeyGuard():
            for lazy in _LAZY:
                torch._C._dispatch_tls_set_dispatch_key_excluded(lazy, False)
            found = func(*args, **(kwargs or {}))
        try:
            _require_kernel(func, args, kwargs or {})
        except NotImplementedError:
            _backwards.discard(self.key)
            raise
        return found


_asking = _Asking()
_depth = Depth()


def _require_kernel(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what torch raises of an operation of these dtypes where there are cells. Not collective."""
    leaves, tree = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not any(x.numel() == 0 and x.device.type != "meta" for x in tensors):
        return
    if torch.Tag.nondeterministic_seeded in func.tags:
        return  # it would draw numbers, on this rank alone
    key = (func, tuple(x.dtype if isinstance(x, Tensor) else x for x in leaves if isinstance(x, (Tensor, torch.dtype))))
    if key not in _kernels:
        if len(_kernels) > _KEPT:
            _kernels.clear()
        # numbers of cells, whose extents and values torch does not always check: all are of one cell, and its number
        single = any(x.numel() and _is_whole_number(x) for x in tensors)
        cells = [_with_cells(x, single, func._schema.is_mutable) for x in leaves]
        args, kwargs = tree_unflatten(cells, tree)
        _kernels[key] = _refusal_of(func, args, kwargs, single)
    refusal = _kernels[key]
    if refusal is not None:
        raise NotImplementedError(*refusal.args)


def _is_whole_number(x: Tensor) -> bool:
    return not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool)


def _refusal_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], single: bool) -> NotImplementedError | None:
    given = {a.name: a for a in func._schema.arguments}
    named = {name: _in_place_of(given[name], value, single) for name, value in kwargs.items()}
    try:
        with unseen():
            func(*(_in_place_of(a, value, single) for a, value in zip(given.values(), args)), **named)
    except NotImplementedError as e:
        return e.with_traceback(None)
    except Exception:  # noqa: BLE001 (of shapes or values, which are not the caller's)
        pass
    return None


def _in_place_of(argument: Any, value: Any, single: bool) -> Any:
    """Return what an argument is with cells: lists of extents have none that is 0, and torch makes the results."""
    if argument.is_out:
        return value.new_empty(0) if isinstance(value, Tensor) else [t.new_empty(0) for t in value]
    if "size" in argument.name and isinstance(value, (list, tuple)):
        return [1 if single else n or 1 for n in value]
    return value


def _with_cells(x: Any, single: bool, written: bool) -> Any:
    """Return a tensor that has a cell where ``x`` has none, or a single one, and is not written into for others."""
    if not isinstance(x, Tensor):
        return x
    if single:
        return x.new_zeros([1] * x.ndim)
    if x.numel() == 0:
        return x.new_zeros([n or 1 for n in x.shape])
    return torch.zeros_like(x) if written else x


def _is_idle(values: Iterable[Any]) -> bool:
    """Tell whether this rank's block of an argument is empty, and none of the arguments are. Not collective."""
    return _has_empty_block(values) and all(0 not in x.shape for x in tensors_in(values))


def _has_empty_block(values: Iterable[Any]) -> bool:
    # in the way of every operation
    for a in values:
        kind = type(a)
        if kind is ShardTensor:
            if not a.block.numel():
                return True
        elif (kind is list or kind is tuple) and _has_empty_block(a):
            return True
    return False


def _asked(function: Any, rule: Rule) -> Rule:
    """Return the rule that asks torch where this rank's block is empty."""
    if function in BACKWARD:
        return rule  # its nodes ask for themselves

    def idle(*args: Any, **kwargs: Any) -> Any:
        # autocast does not reach through the mode, and casts to dtypes that have kernels
        if transforms_active() or torch._C._is_any_autocast_enabled():
            return rule(*args, **kwargs)
        key = (function, torch.is_grad_enabled(), _kind((args, kwargs)))
        if key in _calls and (key in _backwards or not key[1]):
            return rule(*args, **kwargs)
        found = rule(*args, **kwargs) if key in _calls else _asking_torch(lambda: rule(*args, **kwargs))
        for kept in (_calls, _backwards):
            if len(kept) > _KEPT:
                kept.clear()
        _calls.add(key)
        if key[1]:
            _ask_in_backward(key, found, tensors_in([*args, *kwargs.values()]))
        return found

    @wraps(rule)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _is_idle((args, (*kwargs.values(),)) if kwargs else args) or _depth.value:
            return rule(*args, **kwargs)
        with replayed_views():
            return idle(*args, **kwargs)

    into = getattr(rule, "into", None)
    if into is not None:
        call.into = _asked((function, "out"), into)  # type: ignore[attr-defined]
    return call


def _asking_torch(run: Callable[[], Any]) -> Any:
    with _depth, _asking:
        return run()


def _kind(a: Any) -> Any:
    """Return what decides which kernels are called with an argument. Not collective."""
    if isinstance(a, ShardTensor):
        return a.dtype, a.sharding, a.requires_grad
    if isinstance(a, Tensor):
        return a.dtype, a.requires_grad
    if isinstance(a, (list, tuple)):
        return tuple(map(_kind, a))
    if isinstance(a, dict):
        return tuple((name, _kind(value)) for name, value in a.items())
    if type(a) is int and -_DIMS <= a <= _DIMS:  # which may be a dim: not all have the same way
        return a
    return a if a is None or isinstance(a, (bool, str, torch.dtype)) else type(a)


def _ask_in_backward(key: Any, found: Any, operands: Iterable[Tensor]) -> None:
    """Have torch asked after the kernels of the backward of a call, when it comes to it."""
    results = found if isinstance(found, (list, tuple)) else [found]
    asking, packed = _Asking(key), packs()

    def ask(node: Any, cotangents: Any) -> None:
        # a formula that torch takes under a mode may be another, and so the graph of the gradient: the node runs once
        # more for that; but what a checkpoint keeps is given once
        if _depth.value or (packed and torch.is_grad_enabled()):
            return
        _backwards.add(key)
        if packed:
            torch._C._push_on_torch_dispatch_stack(asking)  # which torch forgets after the node
            return
        with torch.no_grad(), asking:
            _run(node, cotangents)

    for node in own_nodes(_blocks(results), _blocks(operands)):
        before(node, ask)


def _run(node: Any, cotangents: Any) -> None:
    """Run a node of torch once more, with what autograd adds to it: sums of what was broadcast. Not collective."""
    found = node(*cotangents)
    for g, (after, i) in zip(found if isinstance(found, tuple) else [found], node.next_functions):
        if g is not None and after is not None:
            g.sum_to_size(after._input_metadata[i].shape)


def _blocks(values: Iterable[Any]) -> list[Tensor]:
    # of what is pending, the block is a sum under way
    return [x.block if type(x) is ShardTensor else x for x in tensors_in(values) if type(x) in _SETTLED]


_SETTLED = (ShardTensor, Tensor, torch.nn.Parameter)


watch_empty_blocks(lambda: RULES.put_in_front(_asked))
