"""What torch.distributed asks for as a reduction, by the names of this package."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.memory.buffer import as_bytes, dense, to_host
from mpishard.comm.mesh import Group
from mpishard.errors import UnsupportedOperationError

_NAMES = {
    dist.ReduceOp.SUM: "sum",
    # of what `scaled` has multiplied
    dist.ReduceOp.PREMUL_SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
# "any" and "all": DTensor asks for them by these names, as torch's other back-ends take them
_OF_TRUTHS = {"sum": "max", "prod": "min"}
# torch has no division of these
_NOT_DIVIDED = (torch.uint16, torch.uint32, torch.uint64)
# of whole bytes, which MPI has for memory of any integer type
_BITWISE = {"band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}


def name_of(opts: Any, x: Tensor) -> str:
    """Return the name of the reduction of ``x`` that is asked for. Not collective."""
    given = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for op, name in _NAMES.items():
        if given == op:
            if op == dist.ReduceOp.PREMUL_SUM and not (x.is_floating_point() or x.is_complex()):
                raise UnsupportedOperationError(
                    f"no reduction 'premul_sum' of {x.dtype}",
                    expected="floats",
                    got=x.dtype,
                    fix="sum, and multiply the sum",
                )
            return _OF_TRUTHS.get(name, name) if x.dtype == torch.bool else name
    raise UnsupportedOperationError(
        "torch.distributed: a reduction that MPI does not have",
        expected=f"one of {', '.join(dict.fromkeys(_NAMES.values()))}",
        got=given,
        fix="scale before the sum",
    )


def scaled(x: Tensor, opts: Any, *, in_place: bool = False) -> Tensor:
    """Return the numbers of ``x``, times the factor that ``ReduceOp.PREMUL_SUM`` brings. Not collective.

    ``fully_shard`` divides gradients by it after ``set_gradient_divide_factor``.
    """
    own = x.detach()
    if opts is None or not opts.reduceOp == dist.ReduceOp.PREMUL_SUM:  # noqa: SIM201 - torch defines == alone
        return own
    factor = float(opts.reduceOp.__getstate__()[1])
    return own.mul_(factor) if in_place else own * factor


def reduced(x: Tensor, op: str, group: Group) -> None:
    """Reduce ``x`` in place. Collective over the group."""
    if op in _BITWISE:
        _bitwise(x, op, group)
        return
    blocking.all_reduce(x, group, "sum" if op == "avg" else op, in_place=True)
    if op == "avg" and x.dtype in _NOT_DIVIDED:
        x.copy_(torch.from_numpy(x.cpu().numpy() // group.size))
    elif op == "avg":
        x.div_(group.size, rounding_mode=None if x.is_floating_point() or x.is_complex() else "floor")


def _bitwise(x: Tensor, op: str, group: Group) -> None:
    if x.is_floating_point() or x.is_complex():
        raise UnsupportedOperationError(
            f"no reduction {op!r} of {x.dtype}", expected="an integer dtype", got=x.dtype, fix="convert it"
        )
    host = dense(x) if x.device.type == "cpu" else to_host(x)
    with guard.waiting("all_reduce", (), group.comm):
        group.comm.Allreduce(MPI.IN_PLACE, (as_bytes(host), MPI.BYTE), _BITWISE[op])
    if host is not x:
        x.copy_(host)
