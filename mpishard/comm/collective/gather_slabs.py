"""Blocks travel to one rank slab by slab: it never holds more of the others' data than one slab."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from mpishard.comm import counter, guard, thread
from mpishard.comm.memory.buffer import address, dense, pieces, to_host
from mpishard.comm.mesh import Group
from mpishard.comm.tag import Flight, hashed

Intervals = Sequence[tuple[int, int]]


def funnel(
    x: torch.Tensor,
    offset: Sequence[int],
    slabs: Callable[[int], Sequence[Intervals]],
    group: Group,
    consume: Callable[[Intervals, torch.Tensor], None],
    *,
    op: str,
) -> None:
    """Call ``consume(box, cells)`` on rank 0 of the group for every slab of every rank, in order.

    Collective over the group. A rank other than 0 packs one slab at a time, and rank 0 receives one at a time. What a
    rank has no memory for is an error on all of them, when they have gone through their slabs.
    ``consume`` must not raise (the others would wait for ever) nor keep ``cells``, which is host memory that
    is used again.

    Parameters
    ----------
    x, offset
        This rank's block, and the global index of its first cell.
    slabs
        Returns the boxes that a rank of the group gives, in global indices; the same on every rank.
    """
    comm, rank = group.comm, group.rank
    if guard.DEBUG:
        guard.check(comm, op, None, x.dtype)
    thread.require(comm)
    tag = hashed(op, x.dtype)
    error: Exception | None = None
    buffer = x.new_empty(0, device="cpu")
    try:
        # before anyone waits for a slab: a rank that has no memory for a copy later sends what is in here
        own = (box for source in (range(1, group.size) if rank == 0 else [rank]) for box in slabs(source))
        buffer = buffer.new_empty(max((_numel(box) for box in own), default=0))
    except Exception as e:  # noqa: BLE001 (torch's for memory, too)
        error = e
    guard.agree(comm, error)
    for source in range(group.size) if rank == 0 else [rank]:
        for box in slabs(source):
            part = buffer[: _numel(box)]
            if source == rank:
                try:
                    part = cells_of(x, offset, box)
                except Exception as e:  # noqa: BLE001
                    error = error or e
            if rank:
                _send(part, group, op, tag)
                continue
            if source:
                _receive(part, source, group, op, tag)
            if error is None:
                consume(box, part.view([hi - lo for lo, hi in box]))
    guard.agree(comm, error)


def _numel(box: Intervals) -> int:
    return torch.Size([hi - lo for lo, hi in box]).numel()


def _send(part: torch.Tensor, group: Group, op: str, tag: int) -> None:
    if counter.active:
        counter.record(op, len(pieces(part.nbytes)), part.nbytes)
    with guard.waiting(op, (0,), group.comm):
        for at, nbytes in pieces(part.nbytes):
            group.comm.Send(address(part.data_ptr() + at, nbytes), 0, tag)


def _receive(part: torch.Tensor, source: int, group: Group, op: str, tag: int) -> None:
    for at, nbytes in pieces(part.nbytes):
        piece = address(part.data_ptr() + at, nbytes)
        Flight(group.comm, op, [(source, group.comm.Irecv(piece, source, MPI.ANY_TAG), tag, nbytes)], []).wait()


def cells_of(x: torch.Tensor, offset: Sequence[int], box: Intervals) -> torch.Tensor:
    """Return a slab of a block as dense host memory, without a copy where it is that. Not collective."""
    for dim, ((lo, hi), start) in enumerate(zip(box, offset)):
        x = x.narrow(dim, lo - start, hi - lo)
    return dense(to_host(x) if x.is_cuda else x)
