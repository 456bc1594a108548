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
from mpishard.comm.interruption import under_way
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


class Banded:
    """A transfer between two layouts in which one dim becomes whole, and another is cut in its place; on CPUs.

    Parameters
    ----------
    mesh, plan, shape, call, inner, sent
        As of `run_transfer`.
    dims
        The dim that becomes whole, along which a block has a band, and the one that is cut. Nothing else changes.
    dtype
        Of the blocks.
    """

    def __init__(
        self,
        mesh: CartMesh,
        plan: Transfer,
        shape: Sequence[int],
        dims: tuple[int, int],
        dtype: torch.dtype,
        *,
        call: object,
        inner: Sequence[int] = (),
        sent: Sequence[int] = (),
    ) -> None:
        self._mesh, self._plan, self._shape, self._inner, self._sent = mesh, plan, tuple(shape), inner, sent
        self._every = tuple(range(mesh.ndim))
        whole, cut = self._dims = dims
        # as cells lie in messages
        self._order = transfer.order_of(len(shape), sent)
        self._along, self._across = self._order.index(whole), self._order.index(cut)
        self._extents = [shape[d] for d in self._order]
        self._plane = math.prod(n for d, n in enumerate(shape) if d != whole) * dtype.itemsize
        self._dtype = dtype
        self._text, self._tag = transfer.text_of(_OP, call), hashed("banded", call, dtype)

    def __call__(self, x: Tensor, lo: int) -> Tensor:
        """Return this rank's block of the target layout.

        Collective over the ranks that exchange boxes; each has a band of its own.

        Parameters
        ----------
        x
            The cells from ``lo`` on, along the dim that becomes whole, of this rank's block of the source layout; zeros
            are beside them.

        Raises
        ------
        DesyncError
            Other boxes came: those of another call.
        """
        assert x.dtype is self._dtype, "planned for another dtype"
        if guard.DEBUG:
            guard.check(self._mesh.comm, self._text, None, x.dtype)
        (whole, cut), turned = self._dims, x.permute(self._order)
        sends, recvs = self._packed(x, turned, lo), []
        for peer, box in self._plan.recvs:
            a, b = box[whole]
            recvs.append((peer, x.new_empty(_ENDS.size + (b - a) * self._plane, dtype=torch.uint8)))
        if counter.active:
            counter.record(_OP, len(sends), sum(message.nbytes - _ENDS.size for _, message in sends))
        transport = transport_of(self._mesh.group(self._every), x)
        assert not isinstance(transport, Device), "a rank on a device does not know its band"
        out = transfer.empty(x, self._shape, self._inner)
        into, filled = out.permute(self._order), []
        posted = transport.post(sends, recvs, self._text, self._tag, at_most=True, bulk=True)
        with under_way(_OP, self._mesh.comm, posted.wait):
            if self._plan.local is not None:
                source, target = self._plan.local
                (a, b), at, count = source[cut], target[whole][0] + lo, x.shape[whole]
                cells = turned.narrow(self._across, a, b - a)
                # as in `run_transfer`: turned round where the cells of a row are not far apart
                into.narrow(self._along, at, count).copy_(cells.contiguous() if self._sent else cells)
                filled.append((at, at + count))
        self._unpack(recvs, posted.lengths(), into, filled)
        _fill_rest(out, whole, filled)
        return out

    def _packed(self, x: Tensor, turned: Tensor, lo: int) -> list[tuple[int, Tensor]]:
        """Return what every peer is sent: the ends of the band, and its cells."""
        whole, cut = self._dims
        count = x.shape[whole]
        ends, nothing, sends = _ENDS.pack(lo, lo + count), None, []
        for peer, box in self._plan.sends:
            a, b = box[cut]
            cells = turned.narrow(self._across, a, b - a)
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
        return sends

    def _unpack(
        self,
        recvs: Sequence[tuple[int, Tensor]],
        lengths: Sequence[int] | None,
        into: Tensor,
        filled: list[tuple[int, int]],
    ) -> None:
        """Put what came, and note where."""
        for i, ((_, box), (peer, message)) in enumerate(zip(self._plan.recvs, recvs)):
            first, end = box[self._dims[0]]
            n = end - first
            a, b = (0, n) if message.is_meta else _ENDS.unpack(ctypes.string_at(message.data_ptr(), _ENDS.size))
            right = _ENDS.size + (b - a) * self._plane
            if not 0 <= a <= b <= n or (lengths is not None and lengths[i] != right):
                found = (peer, self._tag, message.nbytes if lengths is None else lengths[i], right)
                raise crossed(self._text, self._mesh.comm, [peer], [found])
            if a < b:
                extents = self._extents.copy()
                extents[self._along] = b - a
                cells = message[_ENDS.size : right].view(into.dtype).view(extents)
                into.narrow(self._along, first + a, b - a).copy_(cells)
                filled.append((first + a, first + b))


def _fill_rest(out: Tensor, dim: int, filled: list[tuple[int, int]]) -> None:
    """Write zeros beside what came."""
    at = 0
    for a, b in (*sorted(filled), (out.shape[dim],) * 2):
        if a > at:
            out.narrow(dim, at, a - at).zero_()
        at = max(at, b)
