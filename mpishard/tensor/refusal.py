"""What torch says of a call that no rule was written for: wrong numbers of dims, words, things that are no tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mpishard.autograd.graph import unseen
from mpishard.comm.interruption import halfway
from mpishard.errors import MpishardError, UnsupportedOperationError

# what Python raises where a rule looks for a dim or an attribute that is not there, and torch for want of a number
STUMBLES = (LookupError, AttributeError, TypeError, ValueError, AssertionError, ArithmeticError, RuntimeError)
# of an integer that a rule has given to torch without its data
_NO_NUMBER = "cannot be called on meta tensors"

# torch's rules for meta are Python, too, and see less than its kernels
_STUMBLES_OF_META = (NotImplementedError, KeyError, AttributeError, AssertionError, ZeroDivisionError)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FEW = 1 << 16  # cells, of which a kernel soon says what it thinks
# what goes wrong in them is not theirs
_GRADIENTS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def stumbled(function: Callable[..., Any], error: BaseException, *given: object) -> bool:
    """Tell whether a rule has failed at a call's arguments, ``given``; else nothing more is to be said of the error.

    Not collective. What has cut the call short leaves their meshes to nobody.
    """
    name = getattr(function, "__name__", "a call")
    return not halfway(name, error, *given) and isinstance(error, STUMBLES)


def explained(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> Exception | None:
    """Return what torch raises of the same call of whole tensors without their data, or None if ``error`` is as clear.

    Not collective. Only for errors that a rule itself has stumbled over: not those on purpose, nor those of torch or of
    the program's functions that it calls.
    """
    if function in _GRADIENTS or isinstance(error, (MpishardError, RuntimeError)) or not _is_ours(error):
        return None
    with torch.no_grad(), unseen():
        few = all(x.numel() <= _FEW for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        for stand_in in (_of_ones, without_data) if few else (without_data,):
            try:
                function(*tree_map(stand_in, tuple(args)), **tree_map(stand_in, dict(kwargs)))
            except Exception as e:  # noqa: BLE001, PERF203 (the answer)
                if str(e) == str(error):
                    if stand_in is _of_ones:
                        return None  # it is torch's own
                elif not isinstance(e, _STUMBLES_OF_META) and "meta" not in str(e):
                    return e.with_traceback(None)
    return None


def with_ints(
    args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """Return arguments with an int for each integer of numpy or tensor without dims; None if there are none of these.

    Not collective. Torch takes them for ints; a rule may have stumbled over one. Not so with an IndexError: as indices
    they do. A vector of one cell counts too where torch itself has asked for its number.
    """
    if isinstance(error, (MpishardError, IndexError)):
        return None
    asked = isinstance(error, RuntimeError)
    if asked and _NO_NUMBER not in str(error):
        return None
    is_int = partial(_is_int, most=int(asked))
    if not any(map(is_int, tree_leaves((args, kwargs)))):
        return None
    return tree_map(lambda x: int(x) if is_int(x) else x, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]


def _is_int(x: Any, most: int) -> bool:
    if type(x) is Tensor:
        return x.ndim <= most and x.numel() == 1 and x.dtype in _INTEGERS and not x.is_meta
    return isinstance(x, np.integer)


def refuse_dtensor(x: Any) -> None:
    """Raise where a plain operand is a DTensor: torch would take a block of one cell for one, on that rank alone.

    Not collective.
    """
    if _is_dtensor(x):
        raise _of_dtensor()


def _is_dtensor(x: Any) -> bool:
    # by name, as torch.distributed.tensor takes half a second to import
    return type(x).__name__ == "DTensor"


def _of_dtensor() -> UnsupportedOperationError:
    """Return the error of a ShardTensor that meets a DTensor; torch's says to make all of them DTensors.

    Not collective.
    """
    return UnsupportedOperationError(
        "a ShardTensor meets a DTensor",
        expected="ShardTensors and plain tensors",
        got="a torch.distributed.tensor.DTensor",
        fix="ShardTensor.from_local(d.to_local(), mesh, d.placements), or d.full_tensor(); let "
        "mpishard.distribute_module, or torch's own on a CartMesh, distribute modules",
    )


def _is_ours(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("mpishard.")


def without_data(x: Any) -> Any:
    """Return a tensor of the same global shape on the ``meta`` device; what is none, as it is. Not collective."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _of_ones(x: Any) -> Any:
    return torch.ones(x.shape, dtype=x.dtype, device="cpu") if isinstance(x, Tensor) else x
