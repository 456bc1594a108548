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
from mpishard.comm.tag import crossed, hashed
from mpishard.comm.transport.choice import transport_of
from mpishard.comm.transport.device import Device

if TYPE_CHECKING:
    from mpishard.layout import Transfer

_OP = "redistribute"  # for counters and the watchdog
_ENDS = struct.Struct("=2q")  # of a band, before its cells


def fits(nbytes: int) -> bool:
    """Tell whether a box of so many bytes at most can travel so, in one message. Not collective."""
    return nbytes + _ENDS.size <= buffer.MESSAGE_NBYTES


def run_banded(
    mesh: CartMesh,
    plan: Transfer,
    x: Tensor,
    dims: tuple[int, int],
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
        As of `run_transfer`.
    x
        The cells from ``lo`` on, along the first of ``dims``, of this rank's block of the source layout; zeros are
        beside them.
    dims
        The dim that becomes whole, along which a block has a band, and the one that is cut in its place. Nothing else
        changes.
    lo
        Where the band begins.

    Raises
    ------
    DesyncError
        Other boxes came: those of another call.
    """
    if guard.DEBUG:
        guard.check(mesh.comm, transfer.text_of(_OP, call), None, x.dtype)
    order = transfer.order_of(len(shape), sent)
    (whole, cut), count = dims, x.shape[dims[0]]
    # as they lie in messages
    along, across, turned = order.index(whole), order.index(cut), x.permute(order)
    extents = [shape[d] for d in order]
    plane = math.prod(n for d, n in enumerate(shape) if d != whole) * x.itemsize
    ends, nothing = _ENDS.pack(lo, lo + count), None
    sends, recvs = [], []
    for peer, box in plan.sends:
        a, b = box[cut]
        cells = turned.narrow(across, a, b - a)
        message = nothing
        if message is None:
            message = x.new_empty(_ENDS.size + cells.nbytes, dtype=torch.uint8)
            if not x.is_meta:
                ctypes.memmove(message.data_ptr(), ends, len(ends))
            if count:
                message[_ENDS.size :].view(x.dtype).view(cells.shape).copy_(cells)
            else:
                nothing = message
        sends.append((peer, message))
    for peer, box in plan.recvs:
        a, b = box[whole]
        recvs.append((peer, x.new_empty(_ENDS.size + (b - a) * plane, dtype=torch.uint8)))
    if counter.active:
        counter.record(_OP, len(sends), sum(message.nbytes - _ENDS.size for _, message in sends))
    transport = transport_of(mesh.group(tuple(range(mesh.ndim))), x)
    assert not isinstance(transport, Device), "a rank on a device does not know its band"
    tag, text = hashed("banded", call, x.dtype), transfer.text_of(_OP, call)
    posted = transport.post(sends, recvs, text, tag, at_most=True, bulk=True)
    out = transfer.empty(x, tuple(shape), inner)
    into, filled = out.permute(order), []
    if plan.local is not None:
        (a, b), at = plan.local[0][cut], plan.local[1][whole][0] + lo
        cells = turned.narrow(across, a, b - a)
        # as in `run_transfer`: turned round where the cells of a row are not far apart
        into.narrow(along, at, count).copy_(cells.contiguous() if sent else cells)
        filled.append((at, at + count))
    posted.wait()
    lengths = posted.lengths()
    for i, ((peer, box), (_, message)) in enumerate(zip(plan.recvs, recvs)):
        first, n = box[whole][0], box[whole][1] - box[whole][0]
        a, b = (0, n) if x.is_meta else _ENDS.unpack(ctypes.string_at(message.data_ptr(), len(ends)))
        right = _ENDS.size + (b - a) * plane
        if not 0 <= a <= b <= n or (lengths is not None and lengths[i] != right):
            found = (peer, tag, message.nbytes if lengths is None else lengths[i], right)
            raise crossed(text, mesh.comm, [peer], [found])
        if a < b:
            extents[along] = b - a
            cells = message[_ENDS.size : right].view(x.dtype).view(extents)
            into.narrow(along, first + a, b - a).copy_(cells)
            filled.append((first + a, first + b))
    _fill_rest(out, whole, filled)
    return out


def _fill_rest(out: Tensor, dim: int, filled: list[tuple[int, int]]) -> None:
    """Write zeros beside what came."""
    at = 0
    for a, b in (*sorted(filled), (out.shape[dim],) * 2):
        if a > at:
            out.narrow(dim, at, a - at).zero_()
        at = max(at, b)
