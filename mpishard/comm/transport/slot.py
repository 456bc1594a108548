"""Small all-reduces: all of one length, with a mark that tells whether all ranks have made the same one.

Lengths that differ make MPI libraries fail in ways of their own, some of which end the process; equal lengths of
different dtypes give wrong numbers. So what is small travels in a message of `guard.SLOT_NBYTES`, whose end is reduced
with the rest, to what is known before if all ranks reduce as many numbers of one dtype in one way.

Extrema all travel as maxima of 64-bit integers: where some ranks took the smaller and some the larger of two marks, or
looked at numbers of other lengths, one of them could come out with its own. Products have no place here: a mark would
have to be 1.

What is not small, or no sum or extremum, has no place for a mark: MPI libraries let other lengths pass, or end the
process, and two ranks may wait for each other. So ahead of it goes a message of nothing but a mark, and beside a large
sum in the background, which is compared where a rank asks for it. Ahead of gathers in the background, and of what NCCL
carries, no rank waits: operation, dtype and length are noted here, and go into the next mark, where all ranks learn
of it if they differed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mpi4py import MPI

from mpishard.comm import caller, guard, thread
from mpishard.comm.guard import MARK_NBYTES, SLOT_NBYTES, extreme_mark
from mpishard.comm.memory.buffer import address

if TYPE_CHECKING:
    from mpishard.comm.memory.reduction_type import Rule
    from mpishard.comm.mesh import Group

ROOM_NBYTES = SLOT_NBYTES - MARK_NBYTES
# each text is made once
ALL_REDUCE = {op: f"all_reduce {op}" for op in ("sum", "prod", "max", "min")}
_NOTHING = bytes(SLOT_NBYTES)
_inside = caller.inside
_EMPTY = torch.empty(0, dtype=torch.int64, device="cpu")
# of marks, which take some microseconds to make
_KEPT = 4096

# operation, dtype, and what else is common to all ranks: bytes as they travel, 0 for nothing, or, of a
# gather, shape, dim, and what is counted in which shape
_Key = tuple[str, torch.dtype, Hashable]
# such a key, a number for all that was noted before, and what the call is of: a function, and a layout
_Of = tuple[str, str] | None
_Called = tuple[_Key, int, _Of]
# what is added to a reduction, and the two words that it is reduced to
_Mark = tuple[bytes, int, int]
# of a sum in the background: what is told of it, its message but for the numbers, and the end that comes back; what is
# noted of it, and the number for all since then
_Sum = tuple[_Called, bytes, tuple[int, int], _Key, int]


class Slot:
    """Where the small all-reduces of a group happen, one after the other, or in the background.

    Parameters
    ----------
    comm
        Of its ranks.
    """

    __slots__ = (
        *("_buffer", "_comm", "_last", "_marks", "_noted", "_numbers"),
        *("_remark", "_since", "_spare", "_sums", "_words"),
    )

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._buffer, self._words = _room()
        # of sums in the background that are through
        self._spare: list[tuple[Any, memoryview]] = []
        self._marks: dict[_Called, _Mark] = {}
        self._sums: dict[tuple[torch.dtype, int, int, _Of], _Sum] = {}
        self._last: _Mark | None = None
        # of what has none: a number for each kind; one for all since the last small one, and the last of them
        self._numbers: dict[_Key, int] = {}
        self._since = 0
        self._noted: _Key = ("", torch.uint8, 0)
        self._remark = ""

    def all_reduce(self, x: torch.Tensor, y: torch.Tensor, rule: Rule, op: str) -> None:
        """Reduce ``x``, contiguous and of `ROOM_NBYTES` at most, to ``y``, which may be ``x``. Collective.

        ``op`` is ``"sum"``, ``"max"`` or ``"min"``.

        Raises
        ------
        DesyncError
            On every rank: some reduce otherwise.
        """
        key = ALL_REDUCE[op], rule.dtype, x.nbytes
        if op == "sum":
            self._reduce(x, y, key, (rule.datatype, rule.op))
            return
        most = x.to(torch.int64, copy=True)
        if op == "min":
            most.bitwise_not_()
        self._reduce(most, most, key, (MPI.INT64_T, MPI.MAX))
        y.copy_(most.bitwise_not_() if op == "min" else most)

    def start_sum(self, x: torch.Tensor, rule: Rule) -> tuple[MPI.Request, Callable[[], None]]:
        """Start to sum ``x``, contiguous, in place: if it is small, else what is to be compared alone. Collective.

        Returns a request, and what puts the sum into ``x`` after it, which is not collective, and raises a
        `DesyncError` where the ranks have started other sums. It alone keeps the memory that MPI writes into.
        """
        comm, noted, remark = self._comm, self._noted, self._remark
        of = _operands()
        known = self._sums.get((rule.dtype, x.nbytes, self._since, of))
        if known is None:
            known = self._sum_of(x, rule.dtype, of)
        # a small one that waits tells of those that nobody waits for
        called, blank, expected, self._noted, self._since = known
        self._remark = ""
        room = self._spare.pop() if self._spare else _room()
        message, words = room
        n = x.nbytes if x.nbytes <= ROOM_NBYTES else 0
        values = address(x.data_ptr(), n)
        message[:] = blank
        message[:n] = values
        left = [room]

        def arrived() -> None:
            if not left:
                return
            if (words[-2], words[-1]) != expected:
                # not compared: the others may never ask for this sum
                told = self._told(called, noted, remark)
                raise guard.desync(f"rank {comm.Get_rank()}: {told}; another rank: a call that its own error names")
            values[:] = message[:n]
            self._spare.append(left.pop())

        return comm.Iallreduce(MPI.IN_PLACE, (message, rule.datatype), rule.op), arrived

    def _sum_of(self, x: torch.Tensor, dtype: torch.dtype, of: _Of) -> _Sum:
        if len(self._sums) >= _KEPT:
            self._sums.clear()
        since = self._since
        called = (f"{ALL_REDUCE['sum']} in the background", dtype, x.nbytes), since, of
        mine, *end = self._marked(called, x.dtype, summed=True)
        self.note("all_reduce in the background", dtype, x.nbytes)
        known = called, bytes(ROOM_NBYTES) + mine, (end[0], end[1]), self._noted, self._since
        self._sums[dtype, x.nbytes, since, of] = known
        return known

    def meet(self, op: str, dtype: torch.dtype, common: Hashable = 0) -> None:
        """Wait for all ranks ahead of a collective that has no mark, and compare it with what they call. Collective.

        The parameters are those of `note`.

        Raises
        ------
        DesyncError
            On every rank: some make another call.
        """
        thread.require(self._comm)
        self._reduce(_EMPTY, _EMPTY, (op, dtype, common), (MPI.INT64_T, MPI.MAX))

    @staticmethod
    def _told(called: _Called, noted: _Key, remark: str) -> str:
        key, since, of = called
        text = _words_of(key)
        if of is not None:
            text += f", in {of[0]} of {of[1] or 'some tensor'}"
        return text + (f", after {_words_of(noted)} (all since: {since:x}){remark}" if since else "")

    def note(self, op: str, dtype: torch.dtype, common: Hashable = 0) -> None:
        """Have a collective that has no mark compared with those of the other ranks at the next small all-reduce.

        Not collective.
        """
        thread.require(self._comm)
        self._noted = kind = op, dtype, common
        number = self._numbers.get(kind)
        if number is None:
            if len(self._numbers) >= _KEPT:
                self._numbers.clear()
            number = self._numbers[kind] = zlib.crc32(str(kind).encode())
        self._since = (self._since * 31 + number + 1) & 0xFFFFFFFF

    def remark(self, what: str) -> None:
        """Have something that is no collective compared likewise; the error says it. Not collective."""
        noted = self._noted
        self.note(what, torch.uint8)
        self._noted, self._remark = noted, f"; {what}"

    def _reduce(self, x: torch.Tensor, y: torch.Tensor, key: _Key, how: tuple[MPI.Datatype, MPI.Op]) -> None:
        n, words, buffer = x.nbytes, self._words, self._buffer
        called = key, self._since, _operands()
        mark = self._marked(called, x.dtype, summed=how[1] == MPI.SUM)
        if mark is not self._last:
            # what others have left would be reduced again and again
            buffer[:] = _NOTHING
            self._last = mark
        buffer[:n] = address(x.data_ptr(), n)
        buffer[ROOM_NBYTES:] = mark[0]
        self._comm.Allreduce(MPI.IN_PLACE, (buffer, how[0]), how[1])
        if words[-2] != mark[1] or words[-1] != mark[2]:
            raise guard.differing(self._comm, self._told(called, self._noted, self._remark))
        self._remark = ""
        address(y.data_ptr(), n)[:] = buffer[:n]

    def _marked(self, called: _Called, dtype: torch.dtype, *, summed: bool) -> _Mark:
        self._since = 0
        mark = self._marks.get(called)
        if mark is None:
            if len(self._marks) >= _KEPT:
                self._marks.clear()
            mine, expected = marks(str(called), dtype, self._comm.Get_size(), summed=summed)
            mark = self._marks[called] = (mine, *np.frombuffer(expected, np.int64).tolist())
        return mark


def _words_of(key: _Key) -> str:
    op, dtype, common = key
    if isinstance(common, tuple):
        shape, dim, *rest = common
        return f"{op} to {shape} along {dim}, {dtype}{f' ({rest[0]} in {tuple(rest[1:])})' if rest else ''}"
    return f"{op}, {common or 'some'} bytes for {dtype}"


def _operands() -> _Of:
    if _inside.operands is None:
        return None
    name, args = _inside.operands
    layout = getattr(args[0], "sharding", None) if args else None
    return name, "" if layout is None else layout.told


def _room() -> tuple[Any, memoryview]:
    """Return a message as MPI takes it fastest, and its words. Not collective."""
    memory = bytearray(SLOT_NBYTES)
    return MPI.buffer(memory), memoryview(memory).cast("q")


def slot_of(group: Group) -> Slot:
    """Return the slot of a group, one for all that its ranks do, wherever tensors lie. Not collective."""
    found: Slot | None = group.links.get("slot")
    if found is None:
        found = group.links["slot"] = Slot(group.comm)
    return found


def has_room(x: torch.Tensor, op: str) -> bool:
    """Tell whether the all-reduce of a tensor is a small one. Not collective."""
    if op == "sum":
        return x.nbytes <= ROOM_NBYTES
    return op != "prod" and 8 * x.numel() <= ROOM_NBYTES and x.dtype is not torch.uint64


def marks(text: str, dtype: torch.dtype, size: int, *, summed: bool) -> tuple[bytes, bytes]:
    """Return what a rank adds to a reduction, and what ``size`` equal ones are reduced to. Not collective."""
    crc = zlib.crc32(text.encode())
    if not summed:
        mark = np.array(extreme_mark(crc), np.int64).tobytes()
        return mark, mark
    number: np.dtype[Any] = np.dtype(str(dtype).removeprefix("torch."))
    digest = np.frombuffer(crc.to_bytes(4, "little") * (MARK_NBYTES // 4), np.uint8)
    if number.kind in "iu":
        values = digest.view(number)
        return values.tobytes(), (values * np.array(size).astype(number)).tobytes()
    real = np.zeros(1, number).real.dtype
    whole = digest if real == np.float32 else digest.view(np.uint32)
    # sums of so few bits are exact
    limit = 2 ** (np.finfo(real).nmant + 1) // size
    values = (whole[: MARK_NBYTES // real.itemsize] % min(limit + 1, np.iinfo(whole.dtype).max)).astype(real)
    return values.tobytes(), (values * real.type(size)).tobytes()
