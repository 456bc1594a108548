"""Who gives up leaves messages under way: what comes later, or is read later, is in memory that lives on."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.comm.coupling import wire
from mpishard.comm.coupling.channel import HEAD, Channel, Parcel, notice
from mpishard.comm.coupling.greeting import meet_peers
from mpishard.comm.coupling.inlet import Inlet
from mpishard.comm.coupling.meeting import Far, Meeting
from mpishard.comm.coupling.outlet import Outlet
from mpishard.comm.coupling.patience import Ballot, Circle, Presence, presence
from mpishard.comm.in_flight import keep_sent
from mpishard.comm.memory import buffer
from mpishard.insitu.program import Program

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


def test_a_step_that_nobody_has_taken_when_the_link_goes(far):
    comm, n = far.comm, 1 << 17
    if comm.rank == 0:
        circle = Circle(MPI.COMM_SELF, "one")
        channel = Channel(comm, 1, 8, 0, circle, "other", {1: Presence(0, 0, 0)}, 1.0)
        parcels = [Parcel(1, ((0, ((0, n),)),))]
        outlet = Outlet(channel, parcels, [torch.float64], "block", 1, Ballot(circle, later=True))
        outlet.put([torch.arange(n, dtype=torch.float64)], None)
        outlet.release(gone=True)
        del outlet
        gc.collect()
        others = [np.full(HEAD + 8 * n, 255, np.uint8) for _ in range(8)]
    comm.Barrier()
    if comm.rank == 1:
        came = np.empty(HEAD + 8 * n, np.uint8)
        comm.Recv([came, MPI.BYTE], 0, 8 + wire.DATA)
        assert (came[HEAD:].view(np.float64) == np.arange(n)).all()
        comm.Recv([came, MPI.BYTE], 0, 8 + wire.DATA)
        assert came.view(np.int64)[2] == wire.GONE
    comm.Barrier()
    if comm.rank == 0:
        assert all((x == 255).all() for x in others)


def test_a_step_of_which_the_rest_never_comes(far, monkeypatch):
    """Of a message in pieces, from a rank that has ended meanwhile."""
    comm, n = far.comm, 64
    monkeypatch.setattr(buffer, "MESSAGE_NBYTES", 256)
    if comm.rank == 0:
        channel = Channel(comm, 1, 8, 0, Circle(MPI.COMM_SELF, "one"), "other", {1: Presence(0, 0, 0)}, 0.3)
        inlet = Inlet(channel, [Parcel(1, ((0, ((0, n),)),))], [torch.float64], False)
        into = torch.zeros(n, dtype=torch.float64)
        with pytest.raises(ms.PeerError, match="did not answer"):
            inlet.get([into], None)
        inlet.release()
        assert not into.any()
    elif comm.rank == 1:
        piece = np.zeros(256, np.uint8)
        piece[:HEAD] = notice(wire.STEP, 0, HEAD + 8 * n).view(np.uint8)
        comm.Send(piece, 0, 8 + wire.DATA)
    comm.Barrier()


def test_links_that_would_need_a_tag_beyond_those_of_mpi(far):
    assert (wire.MOST_LINKS - 1) * wire.LINK_TAGS + wire.SERVE < 1 << 15
    circle = Circle(far.comm, "one")
    program = Program("one", Meeting({"one": circle.size, "other": 1}, far.comm, circle, {"other": far}))
    program._counts["other"] = wire.MOST_LINKS
    with pytest.raises(ms.UnsupportedOperationError, match="no tags are left"):
        program.connect("other")
    for i in range(wire.MOST_OF_PROGRAM):
        # of the circle itself there is one before
        assert circle.new_tag() < 1 << 15, i
