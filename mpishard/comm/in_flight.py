"""Messages that outlive whoever started them: their memory is MPI's until they are done."""

from __future__ import annotations

from mpi4py import MPI

# whose memory MPI may still read or write, of waits that ended without it
left: list[object] = []
_going: list[MPI.Request] = []


def keep_sent(request: MPI.Request) -> MPI.Request:
    """Return the request of a message that is sent, whose memory is kept until MPI has read it. Not collective.

    Nobody need wait for it: a peer that is late, or gone, takes it when it likes, or never.
    """
    _going[:] = [going for going in _going if not going.Test()]
    _going.append(request)
    return request
