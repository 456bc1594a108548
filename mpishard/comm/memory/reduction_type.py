"""How each dtype is reduced: MPI's type and operation, what carries it, and sums in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI

from mpishard.errors import UnsupportedDtypeError


class Rule(NamedTuple):
    """How MPI reduces a dtype.

    ``carrier`` is the dtype that travels, where it is another one: a wider one, or (``keyed``) integers in
    the same order. ``ordered`` says that the order of the ranks changes the result. ``dtype`` is what is reduced.
    """

    dtype: torch.dtype
    datatype: MPI.Datatype
    op: MPI.Op
    carrier: torch.dtype | None
    keyed: bool
    ordered: bool


_INTEGERS = {
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_FLOATS = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
_COMPLEX = {torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX}
_HALVES = (torch.float16, torch.bfloat16)
# Open MPI's sums of these end at the largest number, torch's begin again (4.1, where the processor has vectors)
_NARROW = (torch.int8, torch.int16, torch.uint8, torch.uint16)
# MPI leaves the extrema of NaN open; integers that sort like the floats do not
_KEYS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bool: torch.uint8,
}
_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}


def _rules() -> dict[tuple[str, torch.dtype], Rule]:
    rules = {}
    for op, mpi_op in _OPS.items():
        rules.update({(op, d): Rule(d, t, mpi_op, None, False, False) for d, t in _INTEGERS.items()})
    rules.update({("sum", d): Rule(d, MPI.INT32_T, MPI.SUM, torch.int32, False, False) for d in _NARROW})
    for op in ("sum", "prod"):
        rules.update({(op, d): Rule(d, t, _OPS[op], None, False, True) for d, t in (_FLOATS | _COMPLEX).items()})
        rules.update({(op, d): Rule(d, MPI.FLOAT, _OPS[op], torch.float32, False, True) for d in _HALVES})
    for op in ("max", "min"):
        rules.update({(op, d): Rule(d, _INTEGERS[k], _OPS[op], k, True, False) for d, k in _KEYS.items()})
    return rules


_RULES = _rules()


def rule_of(op: str, dtype: torch.dtype) -> Rule:
    """Return how ``dtype`` is reduced by ``op``.

    Not collective.

    Raises
    ------
    UnsupportedDtypeError
        It is not.
    """
    rule = _RULES.get((op, dtype))
    if rule is None:
        able = [str(d).removeprefix("torch.") for o, d in _RULES if o == op]
        raise UnsupportedDtypeError(
            f"no reduction {op!r} of {dtype}",
            expected=f"for {op!r}, one of {', '.join(able)}" if able else f"an op among avg, {', '.join(_OPS)}",
            got=f"{op!r} of {dtype}",
            fix="convert the tensor first, a quantized one with x.dequantize()" if able else "name one of them",
        )
    return rule


def to_keys(x: torch.Tensor, op: str) -> torch.Tensor:
    """Return integers that sort as the values of ``x`` do, NaN beyond everything. Not collective."""
    if x.dtype == torch.bool:
        return x.view(torch.uint8).clone()
    keys = _mirrored(x.view(_KEYS[x.dtype]))
    limits = torch.iinfo(keys.dtype)
    return keys.masked_fill_(x.isnan(), limits.max if op == "max" else limits.min)


def from_keys(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that `to_keys` made into ``keys``. Not collective."""
    return keys.view(dtype) if dtype == torch.bool else _mirrored(keys).view(dtype)


def _mirrored(bits: torch.Tensor) -> torch.Tensor:
    """Reverse the order of the negative floats, which grow with their magnitude bits; its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def ordered(blocks: Sequence[torch.Tensor] | torch.Tensor, op: str) -> torch.Tensor:
    """Reduce ``blocks`` one after the other, half types in float32. Not collective."""
    dtype = blocks[0].dtype
    total = blocks[0].to(torch.float32 if dtype in _HALVES else dtype, copy=True)
    for block in blocks[1:]:
        if op == "sum":
            total.add_(block)
        else:
            total.mul_(block)
    return total.to(dtype)
