"""What is garbage is freed where MPI may be called, whichever thread finds it."""

from __future__ import annotations

import copy
import gc
import threading

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import mpishard as ms
from mpishard.comm import lifetime, tag
from tests.compare import WORLD

SIZE = WORLD.size


@pytest.fixture
def freed(monkeypatch):
    """Per freed request, whether MPI's own thread freed it."""
    lifetime.free_discarded()
    seen = []

    def free(flight, free=tag.Flight.free):
        seen.extend(MPI.Is_thread_main() for request in flight.requests if request)
        free(flight)

    monkeypatch.setattr(tag.Flight, "free", free)
    gc.collect()
    gc.disable()
    seen.clear()
    yield seen
    gc.enable()


def mesh_dropped(_mesh):
    mesh = ms.init_mesh((SIZE,))
    mesh.itself = mesh  # as its plans refer to it
    exchanged(mesh)


def plan_dropped(mesh):
    exchanged(mesh)
    in_a_thread(mesh.plans.clear)


def exchanger_dropped(mesh):
    h = ms.HaloExchanger(mesh, (6,), 1, np.float32)
    h(np.zeros(6, np.float32))
    h.itself = h


def exchanged(mesh):
    x = ms.distribute_tensor(torch.ones(1, 1, 2 * SIZE, 4), mesh, (ms.Shard(2),))
    torch.nn.functional.conv2d(x, torch.ones(1, 1, 3, 3), padding=1)


def another_mesh(_mesh):
    ms.init_mesh((SIZE,))


def another_field(mesh):
    ms.HaloExchanger(mesh, (7,), 1, np.float32)(np.zeros(7, np.float32))


def another_plan(mesh):
    x = ms.distribute_tensor(torch.ones(1, 2, 3 * SIZE, 4), mesh, (ms.Shard(2),))
    torch.nn.functional.conv2d(x, torch.ones(1, 2, 3, 3), padding=1)


def in_a_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("drop", [mesh_dropped, plan_dropped, exchanger_dropped])
@pytest.mark.parametrize("again", [another_mesh, another_field, another_plan])
@pytest.mark.parametrize("level", [MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED])
def test_another_thread_leaves_garbage_to_the_one_that_may_call_mpi(freed, monkeypatch, drop, again, level):
    monkeypatch.setattr(MPI, "Query_thread", lambda: level)
    mesh = ms.init_mesh((SIZE,), periodic=True)
    drop(mesh)
    in_a_thread(gc.collect)
    assert not freed
    left = list(lifetime._garbage)
    again(mesh)
    assert freed
    assert all(freed)
    assert not any(free in lifetime._garbage for free in left)
    mesh.free()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("drop", [mesh_dropped, exchanger_dropped])
def test_garbage_goes_at_once_where_any_thread_may_call_mpi(freed, monkeypatch, drop):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_MULTIPLE)
    mesh = ms.init_mesh((SIZE,), periodic=True)
    drop(mesh)
    in_a_thread(gc.collect)
    assert freed
    assert not lifetime._garbage
    mesh.free()


def test_what_cannot_be_freed_any_more_is_no_error_of_the_next_call(monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    called = []

    def fails():
        called.append(1)
        raise MPI.Exception(MPI.ERR_REQUEST)

    lifetime.discard(fails)
    lifetime.discard(lambda: called.append(2))
    assert not called
    ms.init_mesh((SIZE,))
    assert called[:2] == [1, 2]


class Resource:
    """What a mesh owns weakly."""

    def __init__(self, freed):
        self.freed = freed

    def free(self):
        self.freed.append(MPI.Is_thread_main())


def test_resources_that_go_with_their_mesh_are_freed_in_the_thread_that_may(monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    freed = []
    held = [ms.init_mesh((SIZE,)), Resource(freed)]
    held[0].own_weakly(held[1])

    def drop():
        held.pop(0)
        gc.collect()
        held.clear()

    in_a_thread(drop)
    assert not freed
    ms.init_mesh((SIZE,))
    assert freed == [True]


@pytest.mark.ranks(2, 3, 4)
def test_a_sum_that_nobody_asks_for_when_its_mesh_is_freed():
    """Open MPI crashes where a communicator goes before what travels on it."""
    for _ in range(30):
        mesh = ms.init_mesh((-1,), ("x",))
        y = ms.ones(WORLD.size, mesh=mesh, placements=(ms.Shard(0),), requires_grad=True)
        (y * 2).sum().backward()
        mesh.free()
        assert WORLD.allreduce(1) == WORLD.size


@pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="MPI allows one thread")
def test_threads_with_a_mesh_each():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 3, padding=1)).double()
    full = torch.rand(1, 2, 4 * SIZE, 5, dtype=torch.float64)
    reference = copy.deepcopy(net)
    reference(full).square().mean().backward()
    failed = []

    def train(mesh, model):
        try:
            x = ms.distribute_tensor(full, mesh, (ms.Shard(2),))
            ms.distribute_module(model, mesh)
            for k in range(30):
                model.zero_grad()
                (model(x).square().mean() * k).backward()
                assert float((x * k).sum()) == pytest.approx(k * float(full.sum()))
                for ours, theirs in zip(model.parameters(), reference.parameters()):
                    torch.testing.assert_close(ours.grad, theirs.grad * k)
        except BaseException as e:  # noqa: BLE001 (the thread ends with it)
            failed.append(e)

    threads = [threading.Thread(target=train, args=(ms.init_mesh((-1,)), copy.deepcopy(net))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
