"""Transfers of blocks that have cells in a band along one dim, and zeros beside it: the band alone travels.

Which band that is a rank knows of its own block alone. So messages have as many bytes as there are cells in it, at most
those of the whole box, and begin with its two ends.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpishard.comm import counter, guard
from mpishard.comm.collective import transfer
from mpishard.comm.memory import buffer
from mpishard.comm.mesh import CartMesh
from mpishard.comm.tag import hashed
from mpishard.comm.transport.choice import transport_of
from mpishard.comm.transport.device import Device
from mpishard.errors import DesyncError

if TYPE_CHECKING:
    from mpishard.layout import Box, Transfer

_OP = "redistribute"  # for counters and the watchdog
_ENDS = struct.Struct("=2q")  # of a band, before its cells


def fits(nbytes: int) -> bool:
    """Tell whether a box of so many bytes at most can travel so, in one message. Not collective."""
    return nbytes + _ENDS.size <= buffer.MESSAGE_NBYTES


def run_banded(
    mesh: CartMesh,
    plan: Transfer,
    x: Tensor,
    dim: int,
    lo: int,
    shape: Sequence[int],
    *,
    call: object,
    inner: Sequence[int] = (),
    sent: Sequence[int] = (),
) -> Tensor:
    """Return this rank's block of the target layout, as `run_transfer` does; of blocks on a CPU.

    Collective over the ranks that exchange boxes; each has a band of its own.

    Parameters
    ----------
    mesh, plan, shape, call, inner, sent
        As of `run_transfer`. All boxes that leave a block have all of its cells along ``dim``.
    x
        The cells from ``lo`` on, along ``dim``, of this rank's block of the source layout; zeros are beside them.
    dim, lo
        The dim of the band, and where it begins.

    Raises
    ------
    DesyncError
        Other boxes came: those of another call.
    """
    if guard.DEBUG:
        guard.check(mesh.comm, transfer.text_of(_OP, call), None, x.dtype)
    order = transfer.order_of(len(shape), sent)
    back = transfer.back_of(order)
    count = x.shape[dim]

    def band(box: Box) -> Box:
        return tuple((0, count) if d == dim else ends for d, ends in enumerate(box))

    sends = []
    for peer, box in plan.sends:
        cells = transfer.narrow(x, band(box)).permute(order)
        message = x.new_empty(_ENDS.size + cells.nbytes, dtype=torch.uint8)
        _write_ends(message, lo, lo + count)
        message[_ENDS.size :].view(x.dtype).view(cells.shape).copy_(cells)
        sends.append((peer, message))
    recvs = []
    for peer, box in plan.recvs:
        message = x.new_empty(_ENDS.size + math.prod(b - a for a, b in box) * x.itemsize, dtype=torch.uint8)
        recvs.append((peer, message))
    if counter.active:
        counter.record(_OP, len(sends), sum(message.nbytes - _ENDS.size for _, message in sends))
    tag = hashed("banded", call, x.dtype)
    transport = transport_of(mesh.group(tuple(range(mesh.ndim))), x)
    assert not isinstance(transport, Device), "a rank on a device does not know its band"
    posted = transport.post(sends, recvs, transfer.text_of(_OP, call), tag, at_most=True, bulk=True)
    out = transfer.empty(x, tuple(shape), inner)
    if plan.local is not None:
        cells = transfer.narrow(x, band(plan.local[0]))
        if sent:
            # as in `run_transfer`: turned round where the cells of a row are not far apart
            cells = cells.permute(order).contiguous().permute(back)
        _put(transfer.narrow(out, plan.local[1]), cells, dim, lo)
    posted.wait()
    for (peer, box), (_, message) in zip(plan.recvs, recvs):
        into = transfer.narrow(out, box)
        a, b = _ends(message, into.shape[dim])
        if not 0 <= a <= b <= into.shape[dim]:
            raise DesyncError(
                f"ranks made different calls: {transfer.text_of(_OP, call)}",
                expected=f"cells between 0 and {into.shape[dim]} from rank {peer} of the mesh",
                got=f"{a} to {b}",
                fix="look for code that depends on the rank; MPISHARD_DEBUG=1 finds the first such call",
            )
        extents = [b - a if d == dim else into.shape[d] for d in order]
        cells = message[_ENDS.size :].view(x.dtype)[: math.prod(extents)].view(extents).permute(back)
        _put(into, cells, dim, a)
    return out


def _write_ends(message: Tensor, lo: int, hi: int) -> None:
    if not message.is_meta:
        ctypes.memmove(message.data_ptr(), _ENDS.pack(lo, hi), _ENDS.size)


def _ends(message: Tensor, n: int) -> tuple[int, ...]:
    """Return the ends of the band that has come; of a mesh without values, those of all ``n`` cells."""
    return (0, n) if message.is_meta else _ENDS.unpack(ctypes.string_at(message.data_ptr(), _ENDS.size))


def _put(into: Tensor, cells: Tensor, dim: int, lo: int) -> None:
    """Write ``cells`` from ``lo`` on, along ``dim``, and zeros beside them."""
    hi, n = lo + cells.shape[dim], into.shape[dim]
    if hi > lo:
        into.narrow(dim, lo, hi - lo).copy_(cells)
    for a, b in ((0, lo), (hi, n)):
        if b > a:
            into.narrow(dim, a, b - a).zero_()
