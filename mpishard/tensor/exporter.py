"""Where torch's exporters and tracers meet ShardTensors: what they make knows no ranks, so they raise."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import TorchFunctionMetadataMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mpishard.comm import traced
from mpishard.errors import UnsupportedOperationError
from mpishard.tensor.gradient import holds_shards
from mpishard.tensor.registry import name_of, no_rule
from mpishard.tensor.shard_tensor import ShardTensor


def refused(what: str, got: str) -> UnsupportedOperationError:
    """Return the error for ShardTensors in what keeps operations as a graph. Not collective."""
    return UnsupportedOperationError(
        what,
        expected="plain tensors: what it makes runs in one process",
        got=got,
        fix="give plain tensors of the same kind; on shards, call the model itself",
    )


def _guarded_export(name: str, export: Callable[..., Any], within: Callable[[str], Any]) -> Callable[..., Any]:
    @functools.wraps(export)
    def run(*args: Any, **kwargs: Any) -> Any:
        if holds_shards((args, kwargs)):
            raise refused(f"{name} with ShardTensors", "a ShardTensor among the arguments")
        for model in tree_leaves((args, kwargs)):
            if isinstance(model, nn.Module) and (own := _own_shard(model)):
                raise refused(f"{name} with ShardTensors", f"a {type(model).__name__} whose {own} is one")
        with within(name):
            return export(*args, **kwargs)

    return run


def _own_shard(model: nn.Module) -> str:
    """Return the name of a parameter or buffer that is a ShardTensor, or nothing. Not collective."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return next((name for name, x in named if isinstance(x, ShardTensor)), "")


class _Refusing(TorchFunctionMode):
    """Refuses the ShardTensors that a function finds elsewhere than among its arguments."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, ShardTensor) for kind in types):
            raise refused(f"{self._name} with ShardTensors", f"{name_of(func)} of one")
        return func(*args, **(kwargs or {}))


_call_script = torch.jit.ScriptFunction.__call__


def _guarded_script(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch.jit; of ShardTensors what it was made of, as its interpreter asks for no rule."""
    if not holds_shards((args, kwargs)):
        return _call_script(self, *args, **kwargs)
    function = getattr(self, "_torchdynamo_inline", None)
    # a trace has the shapes and branches of its example, and so another meaning than its function
    if function is None or torch.jit._state._try_get_jit_cached_function(function) is None:
        raise no_rule(self, args, kwargs)
    return function(*args, **kwargs)


torch.jit.ScriptFunction.__call__ = _guarded_script  # type: ignore[method-assign]

_note_in_trace = TorchFunctionMetadataMode.__torch_function__


def _guarded_trace(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run a function under `make_fx`; refuse ShardTensors, whose blocks its graph would hold as constants.

    Programs of `mpishard.tensor.program` are traced in this way, too, with blocks that the graph knows.
    """
    if traced.recording is None and any(issubclass(kind, ShardTensor) for kind in types):
        raise refused("make_fx with ShardTensors", f"{name_of(func)} of one (torch.func.linearize traces, too)")
    return _note_in_trace(self, func, types, args, kwargs)


TorchFunctionMetadataMode.__torch_function__ = _guarded_trace  # type: ignore[method-assign]
for _module, _name, _called, _within in (
    (torch.jit, "trace", "torch.jit.trace", _Refusing),
    (torch.jit, "trace_module", "torch.jit.trace_module", _Refusing),
    (torch.jit, "_get_trace_graph", "torch.onnx.export", _Refusing),
    # what it finds comes to `_guarded_trace`; Dynamo would read a mode, and make no graph of torch.cond's kin
    (torch.export, "export", "torch.export.export", nullcontext),
):
    setattr(_module, _name, _guarded_export(_called, getattr(_module, _name), _within))
