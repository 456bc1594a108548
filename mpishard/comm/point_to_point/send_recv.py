"""Messages between single ranks: by buffer address, as bytes, without autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpishard.comm import counter, guard, thread, traced
from mpishard.comm.memory.buffer import dense
from mpishard.comm.mesh import Group
from mpishard.comm.tag import crossed, hashed
from mpishard.comm.transport.choice import transport_of
from mpishard.errors import LayoutError

_TEXT_NBYTES = 1 << 12  # at most, of what both ends call a message


def send_recv(
    x: torch.Tensor,
    group: Group,
    dest: int | None,
    source: int | None,
    shape: Sequence[int],
    call: str = "send_recv",
) -> torch.Tensor:
    """Send ``x`` to one rank and receive a tensor of ``shape`` from another; zeros, where ``source`` is None.

    Neighborwise collective. Ranks are those of the group, None is nobody; ``call`` is what both ends call the message.

    Raises
    ------
    LayoutError
        Less came than the shape needs.
    DesyncError
        More came, or the message of another call, or one of another dtype.
    """
    if traced.recording is not None:
        return traced.recording.call(
            "send_recv", lambda t: send_recv(t, group, dest, source, shape, call), [x], tuple(shape)
        )
    x = dense(x)
    y = x.new_zeros(tuple(shape)) if source is None else x.new_empty(tuple(shape))
    to, of = (MPI.PROC_NULL if r is None else r for r in (dest, source))
    if counter.active:
        counter.record("send_recv", int(dest is not None), x.nbytes if dest is not None else 0)
    comm = group.comm
    if guard.DEBUG:
        _compare(group, f"{call}, {x.dtype}", to, of)
    # for nobody, it is no collective call
    with guard.waiting(call, [r for r in (source, dest) if r is not None] or [group.rank], comm):
        came = transport_of(group, x).send_recv(x, y, to, of, hashed(call, x.dtype), call)
    if source is None:
        return y
    if came != y.nbytes:
        raise LayoutError(
            f"{call}: the tensor from rank {source} does not fit",
            expected=f"{y.nbytes} bytes, {x.dtype} of shape {tuple(shape)}",
            got=f"{came} bytes",
            fix="give the shape and dtype that the source sends",
        )
    return y


def _compare(group: Group, call: str, dest: int, source: int) -> None:
    """Tell ``dest`` what this rank calls its message, and compare with what ``source`` says."""
    comm, tag = group.comm, guard.SINGLE
    thread.require(comm)
    # requests: whoever looks out for the end of others can end the wait
    coming = [comm.irecv(bytearray(_TEXT_NBYTES), source, tag)] if source >= 0 else []
    going = [comm.isend(call, dest, tag)] if dest >= 0 else []
    requests, peers = [*coming, *going], [r for r in (source, dest) if r >= 0]
    with guard.waiting(call, guard.unfinished(requests, peers, len(coming)), comm):
        told = [request.wait() for request in requests][: len(coming)] or [call]
    if told != [call]:
        raise crossed(call, comm, [source], [], f"rank {source} of the group sends {told[0]}")
