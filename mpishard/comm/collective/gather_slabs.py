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

    Collective over the group. A rank other than 0 packs one slab at a time, and rank 0 receives one at a time.
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
    if rank:
        for box in slabs(rank):
            part = cells_of(x, offset, box)
            if counter.active:
                counter.record(op, len(pieces(part.nbytes)), part.nbytes)
            with guard.waiting(op, (0,), comm):
                for at, nbytes in pieces(part.nbytes):
                    comm.Send(address(part.data_ptr() + at, nbytes), 0, tag)
        return
    buffer = x.new_empty(0, device="cpu")
    for source in range(group.size):
        for box in slabs(source):
            if source == 0:
                consume(box, cells_of(x, offset, box))
                continue
            shape = [hi - lo for lo, hi in box]
            count = torch.Size(shape).numel()
            if buffer.numel() < count:
                buffer = buffer.new_empty(count)
            part = buffer[:count].view(shape)
            for at, nbytes in pieces(part.nbytes):
                piece = address(part.data_ptr() + at, nbytes)
                Flight(comm, op, [(source, comm.Irecv(piece, source, MPI.ANY_TAG), tag, nbytes)], []).wait()
            consume(box, part)


def cells_of(x: torch.Tensor, offset: Sequence[int], box: Intervals) -> torch.Tensor:
    """Return a slab of a block as dense host memory, without a copy where it is that. Not collective."""
    for dim, ((lo, hi), start) in enumerate(zip(box, offset)):
        x = x.narrow(dim, lo - start, hi - lo)
    return dense(to_host(x) if x.is_cuda else x)
