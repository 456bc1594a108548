"""Who gives up leaves messages under way: what comes later, or is read later, is in memory that lives on."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from mpi4py import MPI

import mpishard as ms
from mpishard.comm.coupling import wire
from mpishard.comm.coupling.greeting import meet_peers
from mpishard.comm.coupling.meeting import Far
from mpishard.comm.coupling.patience import Circle, keep_sent, presence

pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture
def far():
    comm = MPI.COMM_WORLD.Dup()
    yield Far(comm, 0)
    comm.Free()


def test_who_comes_too_late(far):
    comm = far.comm
    where = np.array(presence(), np.int64)
    if comm.rank == 0:
        with pytest.raises(ms.PeerError, match="did not come"):
            meet_peers(Circle(MPI.COMM_SELF, "one"), far, 8, "other", [1], 0.1)
        gc.collect()
        # memory of that size is given out again at once
        others = [np.zeros((1, where.size), np.int64) for _ in range(64)]
    comm.Barrier()
    if comm.rank == 1:
        comm.Send(where, 0, 8 + wire.PRESENCE)
        comm.Recv(where, 0, 8 + wire.PRESENCE)
    comm.Barrier()
    if comm.rank == 0:
        while comm.Iprobe():
            pass
        assert not any(x.any() for x in others)


def test_what_nobody_waits_for(far):
    comm, n = far.comm, 1 << 20
    if comm.rank == 0:
        keep_sent(comm.Isend([bytes(range(256)) * (n // 256), MPI.BYTE], 1, 5))
        gc.collect()
        others = [np.ones(n, np.uint8) for _ in range(8)]
    comm.Barrier()
    if comm.rank == 1:
        came = np.empty(n, np.uint8)
        comm.Recv([came, MPI.BYTE], 0, 5)
        assert (came.reshape(-1, 256) == np.arange(256)).all()
    comm.Barrier()
    if comm.rank == 0:
        assert all(x.all() for x in others)
