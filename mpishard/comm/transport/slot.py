"""Small all-reduces: all of one length, with a mark that tells whether all ranks have made the same one.

Lengths that differ make MPI libraries fail in ways of their own, some of which end the process; equal lengths of
different dtypes give wrong numbers. So what is small travels in a message of `guard.SLOT_NBYTES`, whose end is reduced
with the rest, to what is known before if all ranks reduce as many numbers of one dtype in one way.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpishard.comm import guard
from mpishard.comm.guard import MARK_NBYTES, SLOT_NBYTES
from mpishard.comm.memory.buffer import address

if TYPE_CHECKING:
    import torch

    from mpishard.comm.memory.reduction_type import Rule

ROOM_NBYTES = SLOT_NBYTES - MARK_NBYTES
_NOTHING = bytes(SLOT_NBYTES)


class Slot:
    """Where the small all-reduces of a group happen, one after the other.

    Parameters
    ----------
    comm
        Of its ranks.
    """

    __slots__ = ("_buffer", "_comm", "_last", "_marks", "_memory", "_words")

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._memory = bytearray(SLOT_NBYTES)
        # as MPI takes it fastest
        self._buffer = MPI.buffer(self._memory)
        self._words = memoryview(self._memory).cast("q")
        self._marks: dict[Any, tuple[bytes, int, int]] = {}
        self._last: tuple[bytes, int, int] | None = None

    def all_reduce(self, x: torch.Tensor, y: torch.Tensor, rule: Rule, op: str) -> None:
        """Reduce ``x``, contiguous and of `ROOM_NBYTES` at most, to ``y``, which may be ``x``. Collective.

        Raises
        ------
        DesyncError
            On every rank: some reduce otherwise.
        """
        n, words, buffer = x.nbytes, self._words, self._buffer
        mark = self._marks.get(key := (op, x.dtype, rule.carrier, n))
        if mark is None:
            mine, expected = marks(f"{key} {rule.keyed}", op, x.dtype, self._comm.Get_size())
            mark = self._marks[key] = (mine, *np.frombuffer(expected, np.int64).tolist())
        if mark is not self._last:
            # what others have left would be reduced again and again
            buffer[:] = _NOTHING
            self._last = mark
        buffer[:n] = address(x.data_ptr(), n)
        buffer[ROOM_NBYTES:] = mark[0]
        self._comm.Allreduce(MPI.IN_PLACE, (buffer, rule.datatype), rule.op)
        if words[-2] != mark[1] or words[-1] != mark[2]:
            raise guard.differing(self._comm, f"all_reduce {op}, {x.numel()} numbers of {rule.carrier or x.dtype}")
        address(y.data_ptr(), n)[:] = buffer[:n]


def marks(text: str, op: str, dtype: torch.dtype, size: int) -> tuple[bytes, bytes]:
    """Return what a rank adds to a reduction, and what ``size`` equal ones are reduced to. Not collective."""
    number: np.dtype[Any] = np.dtype(str(dtype).removeprefix("torch."))
    digest = np.frombuffer(zlib.crc32(text.encode()).to_bytes(4, "little") * (MARK_NBYTES // 4), np.uint8)
    if op in ("max", "min"):
        # integers: both are largest, or smallest, where all are equal
        half = digest[: MARK_NBYTES // 2]
        mark = np.concatenate([half, ~half])
        return mark.tobytes(), mark.tobytes()
    if op == "prod":
        ones = np.ones(MARK_NBYTES // number.itemsize, number)
        return ones.tobytes(), ones.tobytes()
    if number.kind in "iu":
        values = digest.view(number)
        return values.tobytes(), (values * np.array(size).astype(number)).tobytes()
    real = np.zeros(1, number).real.dtype
    whole = digest if real == np.float32 else digest.view(np.uint32)
    # sums of so few bits are exact
    limit = 2 ** (np.finfo(real).nmant + 1) // size
    values = (whole[: MARK_NBYTES // real.itemsize] % min(limit + 1, np.iinfo(whole.dtype).max)).astype(real)
    return values.tobytes(), (values * real.type(size)).tobytes()
