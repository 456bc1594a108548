"""Arrays of other libraries as torch tensors that share their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from mpishard.autograd.argument import require_plain, valueless
from mpishard.comm.memory.buffer import followed, uncopied, unfit
from mpishard.comm.mesh import CartMesh
from mpishard.errors import MpishardError, UnsupportedDtypeError, UnsupportedOperationError


def shared(op: str, array: Any, mesh: CartMesh) -> Tensor:
    """Return a plain tensor in the memory of an array, or the plain tensor that it is.

    Not collective. Only on a planning mesh it may be without values.

    Raises
    ------
    UnsupportedDtypeError
        Torch has no such type.
    UnsupportedOperationError
        It is no array, or torch cannot share its memory.
    """
    if isinstance(array, Tensor):
        require_plain(op, array)
        odd = unfit(array) or uncopied(array) or followed()
        if odd is None and array.is_meta and (mesh.device.type != "meta" or is_lazy(array)):
            odd = valueless(array)
        if odd:
            raise _unfit(op, *odd)
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise _unfit(op, "a masked array, whose mask would be lost", "fill it: x.filled(value)")
    if not hasattr(array, "__dlpack__"):
        raise _unfit(op, type(array).__name__, "make it a tensor: torch.as_tensor(x), numpy.asarray(x)")
    strides = getattr(array, "strides", None) or ()
    if any(isinstance(s, int) and s < 0 for s in strides):
        # torch's from_dlpack would end the process (docs/upstream.md)
        raise _unfit(op, f"negative strides {strides}, as of x[::-1]", "copy it: numpy.ascontiguousarray(x)")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise _unfit(op, "a read-only array, which torch would write into", "copy it: x.copy()")
    try:
        return torch.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise UnsupportedDtypeError(
            f"{op}: torch cannot share the memory of this array",
            expected="numbers of one of torch's types, in native byte order, at strides of whole numbers",
            got=f"{getattr(array, 'dtype', type(array).__name__)}: {e}",
            fix="convert it, e.g. numpy.ascontiguousarray(x, dtype=x.dtype.newbyteorder('='))",
        ) from None


def _unfit(op: str, got: str, fix: str) -> MpishardError:
    return UnsupportedOperationError(
        f"{op}: no block that torch can share",
        expected="a dense tensor, or a writable array of numpy, cupy or another library that speaks DLPack",
        got=got,
        fix=fix,
    )
