"""Reductions that travel while the ranks compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mpi4py import MPI

from mpishard.comm import counter, guard
from mpishard.comm.collective.blocking import all_gather, even, in_order
from mpishard.comm.memory import buffer
from mpishard.comm.memory.buffer import as_bytes, spans
from mpishard.comm.memory.reduction_type import ordered, rule_of
from mpishard.comm.mesh import Group
from mpishard.comm.transport.choice import transport_of
from mpishard.comm.transport.host import start_messages


class PendingReduction:
    """An all-reduce under way; its tensor must not be touched before `wait` returns it."""

    __slots__ = ("_finish", "_group", "_requests")

    def __init__(self, requests: list[MPI.Request], finish: Callable[[], torch.Tensor], group: Group) -> None:
        self._requests = requests
        self._finish = finish
        self._group = group

    @property
    def requests(self) -> list[MPI.Request]:
        """What is under way, none once it was waited for."""
        return self._requests

    def poke(self) -> bool:
        """Let MPI make progress; return whether the messages are through. Not collective."""
        return MPI.Request.Testall(self._requests)

    def wait(self) -> torch.Tensor:
        """Return the tensor, which now holds the sum. Collective, in the order of the starts."""
        with guard.waiting("all_reduce", (), self._group.comm):
            MPI.Request.Waitall(self._requests)
        self._requests = []
        return self._finish()


def iall_reduce(x: torch.Tensor, group: Group, *, deterministic: bool | None = None) -> PendingReduction:
    """Start to sum equal-shaped contiguous tensors in place over the ranks of a group.

    Collective over the group: every rank starts its reductions in the same order.

    Parameters
    ----------
    x
        Contiguous tensor that receives the sum.
    group
        Ranks that take part.
    deterministic
        As in `all_reduce`.

    Returns
    -------
    PendingReduction
        Whose ``wait()`` returns ``x``, once.

    Raises
    ------
    UnsupportedDtypeError
        The dtype has no sum.
    """
    rule = rule_of("sum", x.dtype)
    if guard.DEBUG:
        guard.check(group.comm, "iall_reduce", tuple(x.shape), x.dtype)
    if group.size == 1 or not x.numel():
        return PendingReduction([], lambda: x, group)
    transport = transport_of(group, x)
    if transport.driver is not None:
        transport.driver.check()
    if rule.ordered and in_order(deterministic):
        return _start_ordered(x, transport.on_host(x), group)
    work = x if rule.carrier is None else x.to(rule.carrier)
    if counter.active:
        counter.record("all_reduce", 1, work.nbytes)
    requests, arrived = transport.start_sum(work, rule)

    def finish() -> torch.Tensor:
        arrived()
        return x if work is x else x.copy_(work)

    return PendingReduction(requests, finish, group)


def _start_ordered(x: torch.Tensor, work: torch.Tensor, group: Group) -> PendingReduction:
    sizes = even(work.numel(), group.size)
    into = work.new_empty((group.size, sizes[group.rank]))
    sends, recvs = [n * work.itemsize for n in sizes], [into[0].nbytes] * group.size
    if counter.active:
        counter.record("all_reduce", 1, work.nbytes)
    if work.nbytes + group.size * work.itemsize > buffer.MESSAGE_NBYTES:
        requests = start_messages(work, spans(sends), into, spans(recvs), group)
    else:
        requests = [group.comm.Ialltoallv([as_bytes(work), sends], [as_bytes(into), recvs])]

    def finish() -> torch.Tensor:
        return x.copy_(all_gather(ordered(into, "sum"), group, 0, sizes).view(x.shape))

    return PendingReduction(requests, finish, group)
