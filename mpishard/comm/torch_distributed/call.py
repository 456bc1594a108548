"""What the ranks of a process group call, compared before anything travels.

A group may never see a small sum of this package, whose mark would tell later (`transport.slot`), and two ranks that
take each other for the root would wait. So every collective begins with a message of nothing but a mark, of one kind
for all: sums may go on in the background, and so does it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Hashable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpishard.comm import guard, thread
from mpishard.comm.collective import blocking
from mpishard.comm.guard import extreme_mark
from mpishard.comm.interruption import cuts
from mpishard.comm.transport.slot import Slot
from mpishard.errors import DesyncError

# of marks, which take some microseconds to make; not those of lists, which grow with the number of ranks
_KEPT, _LONG = 4096, 4096

# the operation, then what the ranks must have in common
Call = tuple[Any, ...]


class Compared(Slot):
    """The slot of a group whose calls were compared before they come to it."""

    __slots__ = ()

    def note(self, op: str, dtype: torch.dtype, common: Hashable = 0) -> None:
        """Only see whose thread this is. Not collective."""
        thread.require(self._comm)

    def meet(self, op: str, dtype: torch.dtype, common: Hashable = 0) -> None:
        """Only see whose thread this is. Not collective."""
        thread.require(self._comm)


class Mark:
    """The mark of a call, under way."""

    __slots__ = ("call", "came", "error", "mine", "request")

    def __init__(self, comm: MPI.Intracomm, call: Call, mine: Any, error: BaseException | None) -> None:
        self.call, self.mine, self.error = call, mine, error
        self.came = np.empty_like(mine)
        self.request: MPI.Request | None = comm.Iallreduce((mine, MPI.INT64_T), (self.came, MPI.INT64_T), MPI.MAX)

    def is_well(self) -> bool:
        """Whether all ranks are known to have made this call; lets MPI make progress. Not collective."""
        return self.request is not None and self.request.Test() and np.array_equal(self.mine[:3], self.came[:3])


class Calls:
    """The calls of a group: a context in which a rank looks at its own, and at whose end it meets the others'.

    Raises on every rank, where calls differ a DesyncError, where some have errors that of the lowest such rank.

    Parameters
    ----------
    comm
        Of its ranks.
    apart
        Another one of these, for sums in the background: those that some ranks start and others never.

    Attributes
    ----------
    call : tuple
        What to compare at the end of the context.
    later : bool
        Whether `settle` waits for the others, and not the end of the context.
    mark : Mark
        The last one of these.
    sums : Group
        What sums in the background run on.
    lost : DesyncError or None
        Why the ranks, all of them, can call nothing any more.
    """

    def __init__(self, comm: MPI.Intracomm, apart: MPI.Intracomm) -> None:
        self._comm = comm
        self.call: Call = ()
        self.later = False
        self.mark: Mark | None = None
        self.lost: DesyncError | None = None
        self._marks: dict[Call, Any] = {}
        # of sums in the background; they end in this order
        self._open: deque[Mark] = deque()
        self._take(apart)

    def _take(self, apart: MPI.Intracomm) -> None:
        self.sums = blocking.group_of(apart)
        self.sums.links["slot"] = Compared(apart)

    def __enter__(self) -> Calls:
        if self.lost is not None:
            raise self.lost
        self.call, self.later = ("a call that failed",), False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and cuts(error):
            self._leave(error)
            return
        try:
            if error is None and self.later:
                thread.require(self._comm)
                # nobody need wait for them
                while self._open and self._open[0].is_well():
                    self._open.popleft().request = None
                self.mark = self._started(error)
                self._open.append(self.mark)
                return
            # of what others never make, they raise, and do not come here
            if self._open:
                self.settle(self._open[-1])
            self._end(self._started(error))
        except BaseException as interruption:
            if cuts(interruption):
                self._leave(interruption)
            raise

    def _leave(self, error: BaseException) -> None:
        """Let a call that was interrupted be the last one: what it left under way would meet the next."""
        self.lost = DesyncError(
            "torch.distributed: an earlier call was interrupted",
            expected="that nothing catches what interrupts a call that communicates",
            got=f"{type(error).__name__} inside {_text(self.call)}",
            fix="end the program, or make another group (dist.new_group())",
        )

    def settle(self, mark: Mark) -> None:
        """End what was started, up to this one. Collective where it is the last, and some rank's call differs."""
        while mark.request is not None and self.lost is None:
            self._end(self._open.popleft())
        if (error := mark.error or (self.lost if mark.request is not None else None)) is not None:
            raise error

    def has_failed(self, mark: Mark) -> bool:
        """Whether `settle` would raise; lets MPI make progress. Not collective."""
        if mark.request is None:
            return mark.error is not None
        return self.lost is not None or (mark.request.Test() and not mark.is_well())

    def _started(self, error: BaseException | None) -> Mark:
        call = self.call
        mine = self._marks.get(call)
        if mine is None:
            if len(self._marks) >= _KEPT:
                self._marks.clear()
            text = str(call).encode()
            mine = np.array((*extreme_mark(zlib.crc32(text)), 0, 0), np.int64)
            if len(text) <= _LONG:
                self._marks[call] = mine
        if error is not None or self.later:
            mine = mine.copy()
            mine[2:] = error is not None, self.later
        with guard.waiting(call[0], (), self._comm):
            return Mark(self._comm, call, mine, error)

    def _end(self, mark: Mark) -> None:
        request, mark.request = mark.request, None
        with guard.waiting(mark.call[0], (), self._comm):
            request.Wait()  # type: ignore[union-attr]
        *common, failed, background = mark.came.tolist()
        if not failed and common == mark.mine[:2].tolist():
            return
        text = _text(mark.call)
        try:
            # of all ranks, or of none
            if failed:
                guard.agree(self._comm, mark.error, text)
            raise guard.differing(self._comm, text)
        except Exception as error:
            mark.error = error
            raise
        finally:
            if background:
                self._renew(mark)

    def _renew(self, mark: Mark) -> None:
        """Leave the communicator where ranks that have started to sum wait for those that have not. Collective."""
        own, most = np.array([len(self._open)], np.int64), np.empty(1, np.int64)
        with guard.waiting("a new communicator", (), self._comm):
            self._comm.Allreduce(own, most, MPI.MAX)
            if not most[0]:
                self._take(self._comm.Dup())
                return
        # what one rank has started ahead, another may never start, or later: what would meet is not the same call
        lost = DesyncError(
            "torch.distributed: a call failed while sums in the background were under way",
            expected="each sum waited for before the next call, where a call may fail",
            got=f"up to {most[0]} sums started ahead, after: {str(mark.error).partition(chr(10))[0]}",
            fix="make another group (dist.new_group()), or end the program",
        )
        self.lost = guard.common(lost, self._comm)


def _text(call: Call) -> str:
    return ", ".join(" of ".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in call)
