"""Methods and operators of ShardTensor that call their rule at once.

Torch's way from a method to ``__torch_function__`` costs 1.5 to 3 us a call; Python's own costs 0.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpishard.errors import MpishardError
from mpishard.tensor.refusal import explained, stumbled, with_ints
from mpishard.tensor.registry import RULES, by_torch_names
from mpishard.tensor.shard_tensor import ShardTensor

# inside `with SomeTorchFunctionMode():` the mode is asked first, by torch
_modes_active = torch._C._is_torch_function_mode_enabled


_OPERANDS = (torch.Tensor, int, float, complex, np.generic, torch.SymInt, torch.SymFloat, torch.SymBool)


def _method(function: Any) -> Any:
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if _modes_active():
            return function(self, *args, **kwargs)
        try:
            if kwargs:
                return RULES[function](self, *args, **by_torch_names(function, kwargs))
            return RULES[function](self, *args)
        except BaseException as e:
            if stumbled(function, e, self, args, kwargs):
                if again := with_ints(args, kwargs, e):  # type: ignore[arg-type]
                    return method(self, *again[0], **again[1])
                if told := explained(function, (self, *args), kwargs, e):  # type: ignore[arg-type]
                    raise told from None
            raise

    method.__name__ = method.__qualname__ = getattr(function, "__name__", "method")
    method.__doc__ = getattr(function, "__doc__", None)
    return method


def _operator(function: Any, *, in_place: bool) -> Any:
    def operator(self: Any, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            # as torch does: an array counts as a tensor, but not for writing, and not one without dims
            if not isinstance(other, np.ndarray) or in_place or not other.ndim:
                return NotImplemented
            try:
                other = torch.as_tensor(np.ascontiguousarray(other), device=self.device)
            except TypeError:
                return NotImplemented
        try:
            return function(self, other) if _modes_active() else RULES[function](self, other)
        except BaseException as e:
            # one of ours may be a TypeError too
            if stumbled(function, e, self, other) and isinstance(e, TypeError) and not isinstance(e, MpishardError):
                return NotImplemented  # as torch does: the other operand may know how
            raise

    return operator


_NOT_BINARY = (
    "__abs__ __bool__ __complex__ __contains__ __dir__ __float__ __getitem__ __index__ __int__ __invert__ __long__ "
    "__neg__ __nonzero__ __pos__ __reversed__ __setitem__"
).split()


def install() -> None:
    """Give ShardTensor a method for every method of torch.Tensor that has a rule. Not collective."""
    for name in dir(torch.Tensor):
        function = getattr(torch.Tensor, name)
        if name in vars(ShardTensor) or not callable(function) or function not in RULES:
            continue
        binary = name.startswith("__") and name not in _NOT_BINARY
        in_place = name.startswith("__i") and name != "__invert__"
        setattr(ShardTensor, name, _operator(function, in_place=in_place) if binary else _method(function))
