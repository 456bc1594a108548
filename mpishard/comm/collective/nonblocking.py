"""Collectives that travel while the ranks compute; every rank starts them in the same order.

``x`` is contiguous. The rest is as in `blocking`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from mpi4py import MPI

from mpishard.comm import counter, exit, guard, lifetime, thread
from mpishard.comm.collective.blocking import all_gather, even, in_order, reduce_scatter
from mpishard.comm.lookout import looked_out
from mpishard.comm.memory import buffer
from mpishard.comm.memory.buffer import as_bytes, cat, dense, spans
from mpishard.comm.memory.reduction_type import ordered, rule_of
from mpishard.comm.mesh import Group
from mpishard.comm.transport.choice import Transport, transport_of
from mpishard.comm.transport.host import Host, start_messages
from mpishard.comm.transport.null import Null
from mpishard.comm.transport.slot import slot_of
from mpishard.layout import repeated


class PendingReduction:
    """A collective under way; its tensors must not be touched before `wait` returns the result."""

    __slots__ = ("_finish", "_group", "_op", "_requests")

    def __init__(
        self, requests: list[MPI.Request], finish: Callable[[], torch.Tensor], group: Group, op: str = "all_reduce"
    ) -> None:
        self._requests = requests
        self._finish = finish
        self._group = group
        self._op = op

    @property
    def requests(self) -> list[MPI.Request]:
        """What is under way, none once it was waited for."""
        return self._requests

    @property
    def comm(self) -> MPI.Comm:
        """Over which it travels."""
        return self._group.comm

    def poke(self) -> bool:
        """Let MPI make progress; return whether the messages are through. Not collective."""
        return MPI.Request.Testall(self._requests)

    def wait(self) -> torch.Tensor:
        """Return the tensor, which now holds the result. Collective, in the order of the starts."""
        self.land()
        return self._finish()

    def land(self) -> None:
        """Wait until MPI writes no more. Collective, in the order of the starts."""
        with guard.waiting(self._op, (), self._group.comm):
            MPI.Request.Waitall(self._requests)
        self._requests = []


def iall_reduce(x: torch.Tensor, group: Group, *, deterministic: bool | None = None) -> PendingReduction:
    """Start to sum equal-shaped tensors in place; ``wait()`` returns ``x``, once. Collective over the group."""
    rule = rule_of("sum", x.dtype)
    if guard.DEBUG:
        guard.check(group.comm, "iall_reduce", tuple(x.shape), x.dtype)
    if group.size == 1 or not x.numel():
        return PendingReduction([], lambda: x, group)
    thread.require(group.comm)
    transport = transport_of(group, x)
    if transport.driver is not None:
        transport.driver.check()
    if rule.ordered and in_order(deterministic):
        return _start_ordered(x, transport, group)
    work = x if rule.carrier is None else x.to(rule.carrier)
    if counter.active:
        counter.record("all_reduce", 1, work.nbytes)
    requests, arrived = transport.start_sum(work, rule)

    def finish() -> torch.Tensor:
        arrived()
        return x if work is x else x.copy_(work)

    return PendingReduction(requests, finish, group)


# by communicator: MPI does not let two threads look at one request
_left: dict[int, deque[PendingReduction]] = {}


def start_local_sum(x: torch.Tensor, group: Group) -> PendingReduction | None:
    """Start to sum ``x`` in place, which each rank may wait for, or not, when it likes: `wait` does not communicate.

    Collective over the group, but for ``wait()``. None where that cannot be: the caller sums at once.
    """
    if x.nbytes > _LOCAL_NBYTES or in_order(None) or looked_out():
        return None
    # before a look at what is left: in a forked child it would take messages of its parent
    thread.require(group.comm)
    left = _left.get(id(group.comm))
    if left is None:
        _finish_at_end()
        left = _left[id(group.comm)] = deque()
    while left and left[0].poke():
        left.popleft()
    pending = iall_reduce(x, group)
    # nobody may ask for it: MPI writes to its memory until it is through
    left.append(pending)
    return pending


@cache
def _finish_at_end() -> None:
    exit.on_finalize(_wait_for_rest)


def _wait_for_rest() -> None:
    while _left:
        for pending in _left.popitem()[1]:
            pending.land()


# their results are of no use any more
_abandoned: list[PendingReduction] = []
_looking = threading.RLock()
_SETTLED_S = 5.0


def abandon(pending: Iterable[PendingReduction]) -> None:
    """Keep the memory of what a pass that failed has started, while MPI writes into it. Not collective."""
    with _looking:
        _abandoned[:] = [p for p in (*_abandoned, *pending) if not p.poke()]


def _settle(comms: list[MPI.Comm]) -> None:
    """Let what nobody has asked for come through before its communicator goes: Open MPI crashes otherwise.

    Not collective: all ranks have started it, but of what failed on some; so not for ever.
    """
    gone = {id(comm) for comm in comms}
    limit = time.monotonic() + _SETTLED_S
    abandon(pending for comm in gone for pending in _left.pop(comm, ()))
    while any(id(pending.comm) in gone for pending in _abandoned) and time.monotonic() < limit:
        abandon(())
        time.sleep(1e-4)


lifetime.before_free.append(_settle)


def _forked() -> None:
    # the parent's: a look at them here would take messages that it waits for
    _left.clear()
    _abandoned.clear()


os.register_at_fork(after_in_child=_forked)

_LOCAL_NBYTES = 1 << 16


def _start_ordered(x: torch.Tensor, transport: Transport, group: Group) -> PendingReduction:
    work, requests = transport.on_host(x), list[MPI.Request]()
    sizes = even(work.numel(), group.size)
    into = work.new_empty((group.size, sizes[group.rank]))
    sends, recvs = [n * work.itemsize for n in sizes], [into[0].nbytes] * group.size
    most = work.nbytes + group.size * work.itemsize
    if counter.active:
        counter.record("all_reduce", 1, work.nbytes)
    if isinstance(transport, Null):
        transport.all_to_all(work, sizes, into, recvs, most)
    elif most > buffer.MESSAGE_NBYTES:
        requests = start_messages(work, spans(sends), into, spans(recvs), group)
    else:
        requests = [group.comm.Ialltoallv([as_bytes(work), sends], [as_bytes(into), recvs])]

    def finish() -> torch.Tensor:
        return x.copy_(all_gather(ordered(into, "sum"), group, 0, sizes).view(x.shape))

    return PendingReduction(requests, finish, group)


def _is_at_once(x: torch.Tensor, nbytes: int, group: Group) -> bool:
    """Tell whether rows of so many bytes, all together, travel by a collective that is over when it returns."""
    return group.size == 1 or not 0 < nbytes <= buffer.MESSAGE_NBYTES or not isinstance(transport_of(group, x), Host)


def iall_gather(parts: Sequence[torch.Tensor], group: Group) -> PendingReduction:
    """Start to put the ranks' values in rows, one for each rank, which ``wait()`` returns.

    ``parts`` are 1-D and follow one another in this rank's row; all rows are as long. Collective over the group. Over
    before ``wait()``, where the values are very many, or do not lie in memory that MPI reads itself.
    """
    x, size = parts[0], group.size
    width = sum(map(len, parts))
    nbytes = size * width * x.itemsize
    if _is_at_once(x, nbytes, group):
        rows = all_gather(cat(parts), group, 0, repeated([(width, size)])).view(size, width)
        return PendingReduction([], lambda: rows, group, "all_gather")
    if guard.DEBUG:
        guard.check(group.comm, "iall_gather", (size, width), x.dtype)
    if counter.active:
        counter.record("all_gather", 1, nbytes // size)
    slot_of(group).note("all_gather", x.dtype, nbytes)
    rows = x.new_empty(size, width)
    torch.cat(list(parts), out=rows[group.rank])
    requests = [group.comm.Iallgather(MPI.IN_PLACE, as_bytes(rows))]
    return PendingReduction(requests, lambda: rows, group, "all_gather")


def ireduce_scatter(x: torch.Tensor, group: Group) -> PendingReduction:
    """Start to sum rows, one for each rank: ``wait()`` returns this rank's.

    Collective over the group. Over before ``wait()``, where they are very many, must be summed in a fixed order, or do
    not lie in memory that MPI reads itself.
    """
    rule = rule_of("sum", x.dtype)
    simple = rule.carrier is None and not (rule.ordered and in_order(None))
    if not simple or _is_at_once(x, x.nbytes, group):
        sums = reduce_scatter(x, group, 0, repeated([(1, group.size)])).view(-1)
        return PendingReduction([], lambda: sums, group, "reduce_scatter")
    if guard.DEBUG:
        guard.check(group.comm, "ireduce_scatter", tuple(x.shape), x.dtype)
    if counter.active:
        counter.record("reduce_scatter", 1, x.nbytes)
    slot_of(group).note("reduce_scatter", x.dtype, x.nbytes)
    own, sums = dense(x), x.new_empty(x.shape[1])
    datatype = rule.datatype
    requests = [group.comm.Ireduce_scatter_block((as_bytes(own), datatype), (as_bytes(sums), datatype), rule.op)]

    def finish() -> torch.Tensor:
        nonlocal own  # MPI read it until now
        own = sums
        return sums

    return PendingReduction(requests, finish, group, "reduce_scatter")
