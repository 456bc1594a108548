"""Messages between single ranks: by buffer address, as bytes, without autograd."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpishard.comm import counter, guard
from mpishard.comm.device.driver import driver_at
from mpishard.comm.memory import buffer
from mpishard.comm.memory.buffer import address, as_bytes, dense, pieces
from mpishard.comm.mesh import Group
from mpishard.comm.point_to_point.device_message import relayed
from mpishard.comm.tag import Flight, crossed, hashed
from mpishard.errors import LayoutError, described


def send_recv(
    x: torch.Tensor,
    group: Group,
    dest: int | None,
    source: int | None,
    shape: Sequence[int],
    call: str = "send_recv",
) -> torch.Tensor:
    """Send ``x`` to one rank and receive a tensor from another.

    Neighborwise collective.

    Parameters
    ----------
    x
        What to send.
    group
        Ranks that take part.
    dest, source
        Ranks in the group, or None for nobody.
    shape
        Of the tensor that comes.
    call
        What both ends call the message.

    Returns
    -------
    torch.Tensor
        What came; zeros where ``source`` is None.

    Raises
    ------
    LayoutError
        Less came than the shape needs.
    DesyncError
        More came, or the message of another call, or one of another dtype.
    """
    x = dense(x)
    y = x.new_zeros(tuple(shape)) if source is None else x.new_empty(tuple(shape))
    to, of = (MPI.PROC_NULL if r is None else r for r in (dest, source))
    if counter.active:
        counter.record("send_recv", int(dest is not None), x.nbytes if dest is not None else 0)
    driver, comm, tag = driver_at(x), group.comm, hashed(call, x.dtype)
    peers = [r for r in (source, dest) if r is not None]
    status = MPI.Status()
    if guard.DEBUG:
        _compare(group, f"{call}, {x.dtype}", to, of)
    # for nobody, it is no collective call
    with guard.waiting(call, peers or [group.rank], comm):
        if driver is not None:
            # the pieces of messages of other lengths would wait for each other
            going, coming = array("q", (x.nbytes,)), array("q", (y.nbytes,))
            _swap(comm, call, (going, MPI.INT64_T), to, (coming, MPI.INT64_T), of, tag, status)
            came = coming[0]
        elif max(x.nbytes, y.nbytes) <= buffer.MESSAGE_NBYTES:
            try:
                _swap(comm, call, as_bytes(x), to, as_bytes(y), of, tag, status)
            except MPI.Exception as e:
                raise crossed(call, comm, peers, [], e) from None
            came = status.Get_count()
        else:
            recvs = [
                (of, comm.Irecv(address(y.data_ptr() + a, n), of, MPI.ANY_TAG), tag, n)
                for a, n in pieces(y.nbytes)
                if source is not None
            ]
            sends = [(to, comm.Isend(address(x.data_ptr() + a, n), to, tag)) for a, n in pieces(x.nbytes)]
            Flight(comm, call, recvs, sends).wait()
            status.tag, came = tag, y.nbytes
    if source is None:
        came = y.nbytes
    elif status.tag != tag:
        raise crossed(call, comm, peers, [(source, status.tag, status.Get_count(), y.nbytes)])
    if driver is not None:
        # also what does not fit: another message would meet it
        into = y if came == y.nbytes else x.new_empty(came, dtype=torch.uint8)
        relayed(driver, group, [] if dest is None else [(dest, x)], [] if source is None else [(source, into)], call)
    if came != y.nbytes:
        raise LayoutError(
            described(
                f"{call}: the tensor from rank {source} does not fit",
                expected=f"{y.nbytes} bytes, {x.dtype} of shape {tuple(shape)}",
                got=f"{came} bytes",
                fix="give the shape and dtype that the source sends",
            )
        )
    return y


def _swap(comm: Any, call: str, going: Any, to: int, coming: Any, of: int, tag: int, status: MPI.Status) -> None:
    if not guard.looked_out():
        comm.Sendrecv(going, to, tag, coming, of, MPI.ANY_TAG, status)
        return
    requests = [comm.Irecv(coming, of, MPI.ANY_TAG), comm.Isend(going, to, tag)]
    with guard.waiting(call, guard.unfinished(requests, [of, to], 1), comm):
        MPI.Request.Waitall(requests, [status, MPI.Status()])


def _compare(group: Group, call: str, dest: int, source: int) -> None:
    """Tell ``dest`` what this rank calls its message, and compare with what ``source`` says."""
    comm, tag = group.comm, hashed("compared")
    with guard.waiting(call, [r for r in (source, dest) if r >= 0], comm):
        told = comm.sendrecv(call, dest, tag, None, source, tag)
    if told is not None and told != call:
        raise crossed(call, comm, [source], [], f"rank {source} of the group sends {told}")


def start_messages(
    x: torch.Tensor,
    sends: Sequence[tuple[int, int]],
    y: torch.Tensor,
    recvs: Sequence[tuple[int, int]],
    group: Group,
) -> list[MPI.Request]:
    """Start the messages of an all-to-all that no count could hold; spans are in bytes. Collective."""
    comm, rank, size, tag = group.comm, group.rank, group.size, hashed("large messages")
    out, into = x.data_ptr(), y.data_ptr()
    requests = []
    for step in range(size):
        of, to = (rank - step) % size, (rank + step) % size
        lo, hi = recvs[of]
        requests += [comm.Irecv(address(into + lo + a, n), of, tag) for a, n in pieces(hi - lo)]
        lo, hi = sends[to]
        requests += [comm.Isend(address(out + lo + a, n), to, tag) for a, n in pieces(hi - lo)]
    return requests
