"""Copies of parameters on ranks that see different data: gradients are those of all of them, or it raises."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpishard as ms
from mpishard.autograd import replica
from mpishard.comm import guard
from tests.compare import WORLD

ROWS = 7


@pytest.fixture(scope="module")
def groups():
    """Torch's process groups over all ranks (None), and over the ranks along "data" of `mesh_2d`."""
    # a port that was free before may be another program's by now: rank 0 listens, then tells where
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if WORLD.rank == 0 else None
    port = WORLD.bcast(store and store.port)
    store = store or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=WORLD.rank, world_size=WORLD.size)
    mesh = mesh_2d()
    along = [dist.new_group([mesh.rank_at((d, y)) for d in range(mesh.shape[0])]) for y in range(mesh.shape[1])]
    yield {"world": None, "data": along[mesh.coords[1]]}
    dist.destroy_process_group()


def mesh_2d():
    return ms.init_mesh((-1, WORLD.size // 2 if WORLD.size % 2 == 0 and WORLD.size > 2 else 1), ("data", "y"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.b = nn.Conv2d(4, 2, 3)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.double()

    def forward(self, x):
        return self.b(torch.relu(self.norm(self.a(x)))) * self.scale + self.scale.square()


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 2, ROWS, 5, dtype=torch.float64, generator=generator).unbind(0)


def shard(x, mesh, dim=2):
    return ms.distribute_tensor(x, mesh, [ms.Shard(dim) for _ in mesh.shape])


def loss_of(y):
    return y.square().mean()


def check(model, expected):
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def frozen(model):
    model.a.requires_grad_(False)
    return model


def outside(model, x):
    """A parameter that is used beside the module's own forward."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return loss_of(model(x)) + (inner.scale * x).square().mean()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("marked", "group", "view", "change", "loss"),
    [
        (True, "data", False, Net, lambda model, x: loss_of(model(x))),
        (True, "world", True, Net, outside),
        (True, "data", True, lambda: frozen(Net()), outside),
        (False, "data", False, Net, outside),
    ],
)
def test_ddp_averages_replicas_that_are_sharded(groups, marked, group, view, change, loss):
    mesh = mesh_2d()
    found = batches(2 * mesh.shape[0])
    expected = change()
    for x in found:
        (loss(expected, x) / mesh.shape[0]).backward()
    model = change()
    if marked:
        model = ms.distribute_module(model, mesh["y"])
    ddp = DistributedDataParallel(model, process_group=groups[group], gradient_as_bucket_view=view)
    mine = [shard(x, mesh["y"]) for x in found[mesh.coords[0] :: mesh.shape[0]]]
    for accumulated, x in enumerate(mine, 1):  # gradients accumulate, without and with an average
        with ddp.no_sync() if accumulated < len(mine) else contextlib.nullcontext():
            loss(ddp, x).backward()
    check(model, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_ddp_that_looks_at_the_graph_is_refused(groups, option):
    mesh = mesh_2d()
    ddp = DistributedDataParallel(ms.distribute_module(Net(), mesh["y"]), **{option: True})
    with pytest.raises(ms.UnsupportedOperationError, match="find_unused_parameters"):
        ddp(shard(batches(1)[0], mesh["y"]))


def test_a_batch_over_the_whole_mesh():
    mesh = mesh_2d()
    whole = torch.cat(batches(mesh.shape[0]))
    expected, model = Net(), ms.distribute_module(Net(), mesh)
    loss_of(expected(whole)).backward()
    loss_of(model(ms.distribute_tensor(whole, mesh, [ms.Shard(0), ms.Shard(2)]))).backward()
    check(model, expected)


# where a model is distributed, in turn, and the dims on which its data lie
CASES = [
    (("data", "y"), [("data", "y")], "y"),
    (("data", "y"), ["y", "data"], "y"),
    (("data", "y"), ["y", "data"], "data"),
    (("a", "b", "c"), [("a", "b", "c")], ("a", "c")),
    (("a", "b", "c"), [("b", "c"), "a"], ("b", "c")),
]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("end", [lambda loss: loss.backward(), lambda loss: loss.to_local().backward()])
@pytest.mark.parametrize("change", [lambda model: model, frozen])
def test_data_on_some_dims_of_the_mesh(case, end, change):
    names, where, used = case
    mesh = ms.init_mesh((-1,) * len(names), names)
    part = mesh[used]
    others = WORLD.size // part.size

    def run(x):
        model = change(Net())
        for dims in where:
            ms.distribute_module(model, mesh[dims])
        for _ in range(2):
            end(loss_of(model(shard(x, part))))
        return model

    x, expected = batches(1)[0], change(Net())
    (2 * loss_of(expected(x))).backward()
    check(run(x), expected)  # the same on all ranks: it is right
    if others > 1:
        with pytest.raises(ms.DesyncError, match="gradients differ between ranks"):
            run(batches(1, seed=min(part.comm.allgather(WORLD.rank)))[0])


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("change", [lambda model: model, frozen])
def test_plain_batches(change):
    mesh = ms.init_mesh((-1,))
    x, expected = batches(1)[0], change(Net())
    loss_of(expected(x)).backward()
    model = change(ms.distribute_module(Net(), mesh))
    loss_of(model(x)).backward()
    check(model, expected)
    with pytest.raises(ms.DesyncError, match="DistributedDataParallel"):
        loss_of(model(batches(1, seed=WORLD.rank)[0])).backward()


@pytest.mark.ranks(2, 3, 4)
def test_a_frozen_parameter_that_thaws():
    mesh = ms.init_mesh((-1,))
    model = ms.distribute_module(frozen(Net()), mesh)
    loss_of(model(batches(1)[0])).backward()
    model.a.requires_grad_()
    for p in model.parameters():
        p.grad = None
    model.b.requires_grad_(False)
    model.scale.requires_grad_(False)
    model.norm.requires_grad_(False)
    with pytest.raises(ms.DesyncError, match=r"a\.weight"):
        loss_of(model(batches(1, seed=WORLD.rank)[0])).backward()


@pytest.mark.ranks(3, 4)
def test_the_odd_rank_is_named():
    mesh = ms.init_mesh((-1,))
    model = ms.distribute_module(Net(), mesh)
    with pytest.raises(ms.DesyncError, match="rank 2 unlike the others"):
        loss_of(model(batches(1, seed=int(WORLD.rank == 2))[0])).backward()


@pytest.mark.ranks(2, 3, 4)
def test_debug_compares_parameters(monkeypatch):
    monkeypatch.setattr(guard, "DEBUG", True)
    mesh = ms.init_mesh((-1,))
    model, x = ms.distribute_module(Net(), mesh), shard(batches(1)[0], mesh)
    loss_of(model(x)).backward()
    with torch.no_grad():
        model.norm.bias.add_(1e-3 * WORLD.rank)
    with pytest.raises(ms.DesyncError, match=r"parameters differ between ranks: norm\.bias"):
        sum(loss_of(model(x)) for _ in range(2)).backward()


def test_a_copy_is_a_model_of_its_own():
    mesh = ms.init_mesh((-1,))
    model = copy.deepcopy(ms.distribute_module(Net(), mesh))
    loss_of(model(batches(1, seed=WORLD.rank)[0])).backward()


@pytest.mark.ranks(2, 3, 4)
def test_a_mesh_that_one_rank_has_collected():
    """Which ranks compare does not depend on when they collect garbage."""
    gc.disable()
    try:
        model = Net()

        def train(mesh, passes):
            ms.distribute_module(model, mesh)
            for x in batches(passes):
                loss_of(model(shard(x, mesh))).backward()

        mesh = ms.init_mesh((-1,), ("y",))
        cycle = [mesh]
        cycle.append(cycle)
        train(mesh, 3)
        del mesh, cycle
        mesh = ms.init_mesh((-1,), ("rows",))
        train(mesh, 2)
        if WORLD.rank == 1:
            gc.collect()
        train(mesh, 7)
    finally:
        gc.enable()


def test_threads_with_a_mesh_each():
    """Gradients of one thread's pass do not go into another's."""
    meshes = [ms.init_mesh((1,), comm=MPI.COMM_SELF) for _ in range(2)]
    models = [ms.distribute_module(Net(), mesh) for mesh in meshes]
    data = [shard(batches(1, seed=i)[0], mesh) for i, mesh in enumerate(meshes)]
    together = threading.Barrier(2)

    def gradients(i, meet):
        models[i].zero_grad()
        y = models[i](data[i])
        y.register_hook(lambda _: (meet(), None)[1])
        loss_of(y).backward()
        return [None if p.grad is None else p.grad.clone() for p in models[i].parameters()]

    alone = [gradients(i, lambda: None) for i in range(2)]
    for mesh in meshes:
        mesh.free()
    meshes[:] = [ms.init_mesh((1,), comm=MPI.COMM_SELF) for _ in range(2)]
    models[:] = [ms.distribute_module(Net(), mesh) for mesh in meshes]
    data[:] = [shard(batches(1, seed=i)[0], mesh) for i, mesh in enumerate(meshes)]
    with ThreadPoolExecutor(2) as pool:
        # a mesh belongs to the thread that uses it first
        for found in zip(*(pool.map(lambda i: [gradients(i, together.wait) for _ in range(5)], range(2)))):
            for got, expected in zip(found, alone):
                torch.testing.assert_close(got, expected)


def test_passes_of_two_threads_are_compared_one_by_one(monkeypatch):
    """Where hooks of one thread run between those of another."""
    compared = []
    monkeypatch.setattr(replica, "compare", lambda due: compared.append([r.name for r, _ in due]))
    mesh, turns = ms.init_mesh((-1,)), threading.Barrier(2, timeout=30)

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            turns.wait()
            return g

    def run(name):
        first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
        for param, own in ((first, f"{name} first"), (second, f"{name} second")):
            replica.replicate(param, mesh, own)
        # backward begins at what is used last, and the other thread's first hook comes before the second one here
        (Wait.apply(second * 2) + first).sum().backward()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, "ab"))
    assert sorted(map(sorted, compared)) == [["a first", "a second"], ["b first", "b second"]]
    gc.collect()
    # those of passes before, which an error may hold, are left out
    assert not {r.name for due in replica._passes.values() for r, _ in due} & {"a first", "b first"}
