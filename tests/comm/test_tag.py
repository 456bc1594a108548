"""Messages of different calls: each rank that meets another call's message says so, and what it is."""

from __future__ import annotations

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpishard as ms
from mpishard.comm import guard
from mpishard.comm.lookout import lookout
from mpishard.comm.point_to_point.send_recv import send_recv
from mpishard.comm.tag import Flight, hashed
from mpishard.errors import DesyncError, LayoutError, PeerError

WORLD = MPI.COMM_WORLD
SHARD = (ms.Shard(2),)


def field(mesh, n, dtype):
    return ms.distribute_tensor(torch.ones(1, 1, 4 * n, 4, dtype=dtype), mesh, SHARD)


def conv(mesh, n, dtype):
    return F.conv2d(field(mesh, 4, dtype), torch.ones(1, 1, n, n, dtype=dtype), padding=n // 2)


def backward(mesh, n, dtype):
    x = field(mesh, 4, dtype).requires_grad_()
    F.max_pool2d(x, n, 1, n // 2).to_local().sum().backward()


CALLS = {
    "convolution": conv,
    "backward": backward,
    "halo": lambda mesh, n, dtype: ms.halo_exchange(field(mesh, 4, dtype), {2: n}, mode="zeros"),
    "one-sided halo": lambda mesh, n, dtype: ms.halo_exchange(field(mesh, 4, dtype), {2: (n, 1)}, mode="circular"),
    "shape": lambda mesh, n, dtype: ms.halo_exchange(field(mesh, n, dtype), {2: 1}, mode="circular"),
    "roll": lambda mesh, n, dtype: field(mesh, 4, dtype).roll(n, 2),
    "redistribution": lambda mesh, n, dtype: field(mesh, n, dtype).redistribute(placements=(ms.Shard(3),)),
    "shift": lambda mesh, n, dtype: ms.shift(torch.ones(n, dtype=dtype), mesh, 0, 1),
}
# a rank's call: what, how large, of which dtype
drawn = st.tuples(st.sampled_from(sorted(CALLS)), st.sampled_from([3, 5]), st.sampled_from([32, 64]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("watched", [False, True], ids=["alone", "in a hook's model"])
@settings(max_examples=25, deadline=None)
@given(one=drawn, other=drawn, odd=st.integers(0, 1))
def test_calls_that_cross_are_errors_of_both_ranks(watched, one, other, odd):
    if one == other:
        return
    mesh = ms.init_mesh((-1,), periodic=True)
    calls = [(CALLS[name], n, getattr(torch, f"float{bits}")) for name, n, bits in (one, other)]
    for _ in range(2):
        for call, *how in calls:
            call(mesh, *how)
    # ranks make the same calls in another order, all plans are there
    (first, *how), (second, *then) = calls[:: -1 if mesh.rank == odd else 1]
    with pytest.raises(DesyncError) as info, lookout(lambda: None) if watched else nullcontext():
        first(mesh, *how), second(mesh, *then)
    text = str(info.value)
    # or MPI says so, of one that is too long, to who looks out meanwhile
    said = "(ranks made different calls:|MPI failed on)" if watched else "ranks made different calls:"
    assert re.match(f"{said} rank {WORLD.rank}, in ", text)
    assert re.search(rf"with (rank {1 - WORLD.rank}|other ranks)", text)
    assert "fix:" in text


@pytest.mark.ranks(2)
def test_single_messages_that_do_not_fit():
    group = ms.init_mesh((-1,)).group((0,))
    peer = 1 - group.rank
    with pytest.raises((LayoutError, DesyncError), match="send_recv"):
        send_recv(torch.ones(3 + group.rank), group, peer, peer, (3 + group.rank,))
    group = ms.init_mesh((-1,)).group((0,))
    with pytest.raises(DesyncError, match="send_recv"):
        send_recv(torch.ones(4, dtype=(torch.int32, torch.float32)[group.rank]), group, peer, peer, (4,))


@pytest.mark.ranks(2)
def test_watchdog_tells_what_a_peer_has_sent_instead():
    mesh = ms.init_mesh((-1,), periodic=True)
    u = np.ones(6)
    one, other = (ms.HaloExchanger(mesh, u.shape, width, u.dtype) for width in (1, 2))
    peer = 1 - mesh.rank
    sent = mesh.comm.Isend(bytearray(24), peer, hashed("redistribute", "of this", torch.float32))
    mesh.comm.Barrier()
    text = guard._overdue(5, "halo_exchange", (peer,), one._channel.comm)
    assert f"halo_exchange has waited 5 s for rank {peer} of 2." in text
    assert f"Rank {peer} has sent 24 bytes of redistribute ('of this', torch.float32)." in text
    mesh.comm.Recv(bytearray(24), peer)
    sent.Wait()
    other(u)


def test_tags_are_within_what_mpi_guarantees():
    mesh = ms.init_mesh((-1,))
    assert 0 < hashed("one", 1) <= 32767
    label = mesh.plan("key", lambda: mesh.label)
    for label.number in (0, 10207, 10208, 10**9):
        assert 32 < label.tag(False) < label.tag(True) < 20480


@pytest.mark.parametrize(("code", "kind"), [(MPI.ERR_OTHER, PeerError), (MPI.ERR_TRUNCATE, DesyncError)])
def test_a_message_that_broke_off_is_no_other_call(code, kind):
    """MPI gives up the second half of a message of this very call where its sender is killed."""
    flight = Flight(WORLD, "halo", [(0, MPI.REQUEST_NULL, 7, 96)], [])
    status, _, _ = flight._expected[0]
    status.source, status.tag, status.error = 0, 7, code
    status.Set_elements(MPI.BYTE, 96)
    with pytest.raises(kind, match="in halo, with rank 0"):
        raise flight._crossed(flight._expected, MPI.Exception(code))
