"""Batches of cotangents and tangents: what computes with shards refuses torch.vmap, and what torch takes it for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from types import FrameType
from typing import Any

import torch.autograd.functional
from torch import Tensor, _vmap_internals
from torch.autograd.function import BackwardCFunction

from mpishard.errors import UnsupportedOperationError

_functorch = torch._C._functorch  # type: ignore[attr-defined]


def vmap_refused(called: str = "") -> UnsupportedOperationError:
    """Return the error for what the caller does inside ``torch.vmap``, or for this call. Not collective."""
    return UnsupportedOperationError(
        "torch.vmap over a communicating operation",
        expected="a call outside torch.vmap",
        got=f"{called or _called()} inside it",
        fix="give the operation the whole batch, or loop over it",
    )


def _called() -> str:
    """Return what a user has called of the package's, from the stack: operations do not know, and differ by rank."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("mpishard."):
            # as a ShardTensor is asked by torch, or calls its rule at once
            function = frame.f_locals.get("func") or frame.f_locals.get("function")
            name = torch.overrides.resolve_name(function) or frame.f_code.co_name
        frame = frame.f_back
    return name


def refuse_batched(tensors: Iterable[Any]) -> None:
    """Raise where one is a batch of cotangents or tangents. Not collective."""
    for x in tensors:
        if isinstance(x, Tensor) and is_batched(x):
            raise batch_refused()


def is_batched(x: Tensor) -> bool:
    """Tell whether a tensor is a batch of ``torch.vmap``. Not collective."""
    return _functorch.is_legacy_batchedtensor(x) or _functorch.is_batchedtensor(x)  # type: ignore[no-any-return]


def batch_refused() -> UnsupportedOperationError:
    """Return the error for a batch of cotangents or tangents. Not collective."""
    return UnsupportedOperationError(
        "a derivative by torch.vmap through operations on ShardTensors",
        expected="one cotangent or tangent at a time",
        got="a batch of them",
        fix="vectorize=False, or one torch.autograd.grad for each cotangent",
    )


# Functions of the package are not asked in every backward: torch asks a node for these, in which they look where torch
# has begun to batch

_of_torch = {name: getattr(BackwardCFunction, name) for name in ("apply", "apply_jvp")}
_vmap_of_torch = getattr(_vmap_internals._vmap, "of_torch", _vmap_internals._vmap)


def _looking(run: Callable[..., Any]) -> Callable[..., Any]:
    def apply(node: Any, *values: Any) -> Any:
        if node._forward_cls.__module__.startswith("mpishard."):
            refuse_batched(values)
        return run(node, *values)

    return apply


_look = {name: _looking(run) for name, run in _of_torch.items()}


def _put(methods: dict[str, Callable[..., Any]]) -> None:
    for name, run in methods.items():
        setattr(BackwardCFunction, name, run)


@wraps(_vmap_of_torch)
def _vmap(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    batched = _vmap_of_torch(*args, **kwargs)

    @wraps(batched)
    def run(*inputs: Any) -> Any:
        _put(_look)
        try:
            return batched(*inputs)
        finally:
            _put(_of_torch)

    return run


_vmap.of_torch = _vmap_of_torch  # type: ignore[attr-defined]
# of is_grads_batched= and vectorize=
for _module in (_vmap_internals, torch.autograd.functional):
    _module._vmap = _vmap  # type: ignore[attr-defined]
