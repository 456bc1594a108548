"""How a link between two programs is made: their first ranks exchange what they offer, and ranks say where they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from mpi4py import MPI

from mpishard.comm import guard, in_flight
from mpishard.comm.coupling import wire
from mpishard.comm.coupling.meeting import Far
from mpishard.comm.coupling.patience import Circle, Presence, Wait, presence
from mpishard.errors import MpishardError, PeerError, ranges_of, ranks_text


def greet(
    circle: Circle,
    far: Far,
    tag: int,
    other: str,
    error: MpishardError | None,
    offer: bytes,
    timeout_s: float,
) -> bytes:
    """Return the offer of the other program, which has ours.

    Collective over both programs.

    Parameters
    ----------
    circle, far, tag
        This program's ranks, those of the other, and the first tag of the link.
    other
        Name of the other program.
    error
        What this rank finds wrong with its own side: the other side then gets no link either.
    offer
        What this side says, on rank 0.
    timeout_s
        How long to wait for the other program.

    Raises
    ------
    MpishardError
        The error of a rank.
    PeerError
        The other program did not come, or gave up.
    """
    _agreed(circle, far, tag, error, timeout_s)
    theirs = b""
    if circle.rank == 0:
        _start(far, tag, offer)
        theirs, error = _asked(far, tag, other, wire.OFFER, timeout_s)
    # the others wait for rank 0 longer than it waits
    circle.agree(error, timeout_s + 1.0)
    return circle.told(theirs if circle.rank == 0 else None, timeout_s)


def accept(circle: Circle, far: Far, tag: int, other: str, error: Exception | None, timeout_s: float) -> None:
    """Have a link where both sides are ready for one; ``error``: why this rank is not. Collective over both programs.

    Parameters and what it raises: as of `greet`.
    """
    _agreed(circle, far, tag, error, timeout_s)
    if circle.rank == 0:
        _start(far, tag, _head(wire.ACCEPT))
        _, error = _asked(far, tag, other, wire.ACCEPT, timeout_s)
    circle.agree(error, timeout_s + 1.0)


def _agreed(circle: Circle, far: Far, tag: int, error: Exception | None, timeout_s: float) -> None:
    """Raise an error of any rank, and tell the other side, which need not wait. Collective."""
    try:
        circle.agree(error, timeout_s)
    except MpishardError as e:
        if circle.rank == 0:
            _send(far, tag, wire.WITHDRAW, str(e).encode(errors="replace"), timeout_s)
        raise


def _asked(far: Far, tag: int, other: str, kind: int, timeout_s: float) -> tuple[bytes, PeerError | None]:
    """Return the other side's message of this kind, or why there is none. Not collective."""
    try:
        return _awaited(far, tag, other, kind, timeout_s), None
    except PeerError as e:
        return b"", e


def _awaited(far: Far, tag: int, other: str, kind: int, timeout_s: float) -> bytes:
    wait = Wait(timeout_s)
    while True:
        status = MPI.Status()
        message = far.comm.Improbe(far.first, tag + wire.HELLO, status)
        if message is not None:
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            message.Recv([data, MPI.BYTE])
            magic, version, said, *_ = wire.HEAD.unpack_from(data.tobytes())
            if (magic, version) != (wire.MAGIC, wire.VERSION):
                raise PeerError(wire.other_version(version if magic == wire.MAGIC else None))
            if said == wire.WITHDRAW:
                text = data[wire.HEAD.size :].tobytes().decode(errors="replace")
                raise PeerError(
                    f"connect: program {other!r} gave up",
                    expected="a link",
                    got=text.splitlines()[0] if text else "its withdrawal",
                    fix="see its error",
                )
            if said == kind:
                return data.tobytes()
        elif not wait.pause():
            _send(far, tag, wire.WITHDRAW, b"no answer in time", 1.0)
            raise PeerError(
                f"connect: program {other!r} did not come",
                expected=f"its connect within {timeout_s:g} s",
                got="nothing" if kind == wire.OFFER else "its offer, and then nothing",
                fix="call connect in both programs, for several links in the same order; give a longer timeout",
            )


def meet_peers(
    circle: Circle, far: Far, tag: int, other: str, peers: Iterable[int], timeout_s: float
) -> dict[int, Presence]:
    """Return where the processes of some ranks of the other program are, telling them where this one is.

    Peers are ranks of the communicator of both.

    Collective over both programs.
    """
    peers = sorted(peers)
    mine = np.array(presence(), np.int64)
    theirs = np.zeros((len(peers), len(mine)), np.int64)
    requests = [far.comm.Irecv(row, peer, tag + wire.PRESENCE) for row, peer in zip(theirs, peers)]
    requests += [far.comm.Isend(mine, peer, tag + wire.PRESENCE) for peer in peers]
    wait, error = Wait(timeout_s), None
    while not MPI.Request.Testall(requests):
        if not wait.pause():
            silent = [p for p, request in zip(peers, requests) if not request.Test()]
            who = ranks_text(ranges_of(p - far.first for p in silent))
            error = PeerError(
                f"connect: {who} of program {other!r} did not come",
                expected=f"all its ranks within {timeout_s:g} s",
                got="some of them",
                fix="look whether they died or hang",
            )
            in_flight.left.append(requests)
            break
    circle.agree(error, timeout_s)
    return {peer: Presence(*row) for peer, row in zip(peers, theirs.tolist())}


def _head(kind: int) -> bytes:
    return wire.HEAD.pack(wire.MAGIC, wire.VERSION, kind, 0, 0, 0, 0, 0)


def _start(far: Far, tag: int, message: bytes) -> MPI.Request:
    return in_flight.keep_sent(far.comm.Isend([message, MPI.BYTE], far.first, tag + wire.HELLO))


def _send(far: Far, tag: int, kind: int, text: bytes, timeout_s: float) -> None:
    request = _start(far, tag, _head(kind) + text[: wire.TEXT_NBYTES])
    wait = Wait(min(1.0, timeout_s))
    while not request.Test() and wait.pause():
        pass


def order_of(circle: Circle, mesh_comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return per rank of a mesh the rank of the program; empty where they are the same. Collective.

    The table is the one thing here as long as the program has ranks: only a host that had MPI reorder them needs it.
    """
    mine = mesh_comm.Get_rank()
    if circle.agree(None, 60.0, int(mine == circle.rank))[0]:
        return ()
    table = np.empty(circle.size, np.int64)
    with guard.waiting("connect", (), circle.comm):
        circle.comm.Allgather([np.array([mine], np.int64), MPI.INT64_T], [table, MPI.INT64_T])
    return tuple(np.argsort(table).tolist())
