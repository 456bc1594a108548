"""Messages between single ranks: by buffer address, as bytes, without autograd."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpishard.comm import counter, guard
from mpishard.comm.device.driver import driver_at
from mpishard.comm.memory import buffer
from mpishard.comm.memory.buffer import address, as_bytes, dense, pieces
from mpishard.comm.mesh import Group
from mpishard.comm.point_to_point.device_message import relayed
from mpishard.errors import LayoutError, described

TAG = 11  # another than the exchange's: a message here never meets a started exchange


def send_recv(
    x: torch.Tensor, group: Group, dest: int | None, source: int | None, shape: Sequence[int]
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

    Returns
    -------
    torch.Tensor
        What came; zeros where ``source`` is None.

    Raises
    ------
    LayoutError
        Less came than the shape needs.
    """
    x = dense(x)
    y = x.new_zeros(tuple(shape)) if source is None else x.new_empty(tuple(shape))
    to, of = (MPI.PROC_NULL if r is None else r for r in (dest, source))
    if counter.active:
        counter.record("send_recv", int(dest is not None), x.nbytes if dest is not None else 0)
    driver = driver_at(x)
    status = MPI.Status()
    # for nobody, it is no collective call
    peers = [r for r in (source, dest) if r is not None] or [group.rank]
    with guard.waiting("send_recv", peers, group.comm):
        if driver is not None:
            # the pieces of messages of other lengths would wait for each other
            going, coming = array("q", (x.nbytes,)), array("q", (y.nbytes,))
            group.comm.Sendrecv((going, MPI.INT64_T), to, TAG, (coming, MPI.INT64_T), of, TAG)
            came = coming[0]
        elif max(x.nbytes, y.nbytes) <= buffer.MESSAGE_NBYTES:
            group.comm.Sendrecv(as_bytes(x), to, TAG, as_bytes(y), of, TAG, status)
            came = status.Get_count(MPI.BYTE) if source is not None else y.nbytes
        else:
            requests = [group.comm.Irecv(address(y.data_ptr() + a, n), of, TAG) for a, n in pieces(y.nbytes)]
            requests += [group.comm.Isend(address(x.data_ptr() + a, n), to, TAG) for a, n in pieces(x.nbytes)]
            MPI.Request.Waitall(requests)
            came = y.nbytes
    if driver is not None:
        sends = [] if dest is None else [(dest, x)]
        # also what does not fit: another message would meet it
        into = y if came == y.nbytes else x.new_empty(came, dtype=torch.uint8)
        relayed(driver, group, sends, [] if source is None else [(source, into)], "send_recv")
    if came != y.nbytes:
        raise LayoutError(
            described(
                f"send_recv: the tensor from rank {source} does not fit",
                expected=f"{y.nbytes} bytes, {x.dtype} of shape {tuple(shape)}",
                got=f"{came} bytes",
                fix="give the shape and dtype that the source sends",
            )
        )
    return y


def start_messages(
    x: torch.Tensor,
    sends: Sequence[tuple[int, int]],
    y: torch.Tensor,
    recvs: Sequence[tuple[int, int]],
    group: Group,
) -> list[MPI.Request]:
    """Start the messages of an all-to-all that no count could hold; spans are in bytes. Collective."""
    comm, rank, size = group.comm, group.rank, group.size
    out, into = x.data_ptr(), y.data_ptr()
    requests = []
    for step in range(size):
        of, to = (rank - step) % size, (rank + step) % size
        lo, hi = recvs[of]
        requests += [comm.Irecv(address(into + lo + a, n), of, TAG) for a, n in pieces(hi - lo)]
        lo, hi = sends[to]
        requests += [comm.Isend(address(out + lo + a, n), to, TAG) for a, n in pieces(hi - lo)]
    return requests
