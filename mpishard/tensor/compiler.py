"""Where torch's compilers meet ShardTensors: `torch.compile` runs eagerly, those that export raise.

They would trace through the rules, into MPI. So what torch offers its users is looked at first: the arguments of a
compiled function, and the example inputs of a trace or an export.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from mpishard.errors import UnsupportedOperationError, described
from mpishard.tensor.gradient import holds_shards

_warned = False


def _eager(function: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls ``function`` itself where it is given ShardTensors."""

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not holds_shards((args, kwargs)):
            return compiled(*args, **kwargs)
        global _warned  # noqa: PLW0603
        if not _warned:
            _warned = True
            warnings.warn(
                "torch.compile: a call with ShardTensors is not compiled, it runs eagerly (mpishard)", stacklevel=2
            )
        return function(*args, **kwargs)

    return run


def _guarded_compile(compile_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_)
    def run(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        compiled = compile_(model, *args, **kwargs)
        if model is None:  # a decorator with arguments
            return lambda function: run(function, *args, **kwargs)
        if not isinstance(compiled, torch.nn.Module):
            return _eager(model, compiled)
        if compiled is not model:
            # what its __call__ runs
            compiled.forward = _eager(model.__call__, compiled.forward)
        return compiled

    return run


def _guarded_export(name: str, export: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(export)
    def run(*args: Any, **kwargs: Any) -> Any:
        if holds_shards((args, kwargs)):
            raise UnsupportedOperationError(
                described(
                    f"{name} with ShardTensors",
                    expected="plain example inputs: what it makes runs in one process",
                    got="a ShardTensor among the arguments",
                    fix="give plain tensors of the same kind; on shards, call the model itself",
                )
            )
        return export(*args, **kwargs)

    return run


torch.compile = _guarded_compile(torch.compile)  # type: ignore[assignment]
for _module, _name in ((torch.jit, "trace"), (torch.jit, "trace_module"), (torch.export, "export")):
    setattr(_module, _name, _guarded_export(f"{_module.__name__}.{_name}", getattr(_module, _name)))
