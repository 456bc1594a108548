"""Under ``torch.set_default_device`` or ``with torch.device(...)`` what the package makes for itself stays where it is.

The device is ``meta``, whose tensors have no values: one that was made there by mistake shows at once.
"""

from __future__ import annotations

import contextlib
import copy
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from tests.compare import WORLD
from tests.conftest import has_gpu
from tests.release import RELEASE

pytestmark = pytest.mark.skipif(has_gpu(), reason="meshes are on a GPU: tests of theirs name devices")

RANK, SIZE = WORLD.rank, WORLD.size
ROWS = (ms.Shard(2),)


class Given:
    """What the calls are given, made before the default is another."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.mesh = ms.init_mesh((-1,), ("y",))
        self.full = torch.randn(2, 3, 8, 6, generator=g)
        self.x = ms.distribute_tensor(self.full, self.mesh, ROWS)
        self.plain = torch.randn(3 * SIZE, 6, generator=g)
        self.points = torch.rand(20, 3, generator=g)
        self.edges = torch.randint(0, 20, (2, 40), generator=g)
        self.labels = torch.randint(0, 3, (2, 8, 6), generator=g)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 3, 3))
        self.kernel = torch.ones(1, 1, 3, 3, dtype=torch.float64)

    def leaf(self):
        return self.x.detach().clone().requires_grad_()

    def shard(self, x, dim):
        return ms.distribute_tensor(x, self.mesh, (ms.Shard(dim),))

    def distributed(self, **kwargs):
        return ms.distribute_module(copy.deepcopy(self.model), self.mesh, **kwargs)


def whole(*tensors):
    return torch.cat(
        [(t.full_tensor() if isinstance(t, ms.ShardTensor) else t).detach().reshape(-1).double() for t in tensors]
    )


def scattered(given, folder):
    x = ms.scatter_tensor(given.full if RANK == 0 else None, 0, given.mesh, ROWS)
    return whole(x, ms.ShardTensor.from_local(x.to_local(), given.mesh, ROWS), x.redistribute(placements=[ms.Shard(1)]))


def made(given, folder):
    torch.manual_seed(1)
    where = {"mesh": given.mesh, "placements": (ms.Shard(0),)}
    return whole(*(f(9, 2, **where) for f in (ms.zeros, ms.ones, ms.rand, ms.randn)), ms.arange(9, **where))


def halos(given, folder):
    ghosted = given.plain.clone()
    ms.HaloExchanger(given.mesh, tuple(ghosted.shape), (1, 0), torch.float32)(ghosted)
    found = [ms.halo_exchange(given.x, {2: (1, 1)}, mode=mode) for mode in ("zeros", "reflect", "circular")]
    return whole(ghosted, *found)


def collectives(given, folder):
    x, mesh = (given.plain * (RANK + 1)).requires_grad_(), given.mesh
    found = [ms.all_reduce(x, mesh), ms.all_gather(x, mesh), ms.reduce_scatter(x, mesh), ms.broadcast(x, mesh, 0)]
    found += [ms.shift(x, mesh, "y", 1), ms.all_reduce(x, mesh, deterministic=True)]
    sum(y.square().sum() for y in found).backward()
    return whole(*found, x.grad)


def trained(given, folder, **kwargs):
    model = given.distributed(**kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(given.x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    path = folder / f"checkpoint{len(kwargs)}"
    ms.io.save_checkpoint(path, model=model, optimizer=optimizer, step=2)
    again = given.distributed(**kwargs)
    ms.io.load_checkpoint(path, model=again, optimizer=torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9))
    return whole(*model.parameters(), *again.parameters())


def sharded(given, folder):
    return trained(given, folder, shard_parameters="y")


def files(given, folder):
    ms.io.write(folder / "x.h5", {"x": given.x}, attrs={"title": "of a test"})
    return whole(ms.io.read(folder / "x.h5", "x", given.mesh, ROWS))


def inside(given, folder):
    rows = 2 * SIZE
    own, result = np.full((4, 6), RANK, dtype=np.float64), np.zeros((4, 6))
    sim = ms.insitu.adopt(WORLD, shape=(rows, 6), halo=(1, 0), names=("x", "y"), grid=(SIZE, 1), coords=(RANK, 0))
    sim.field("u", own)
    sim.field("v", result)
    sim.hook(lambda u: F.conv2d(u[None, None], given.kernel, padding=1)[0, 0], inputs=["u"], outputs=["v"])()
    sim.release()
    return torch.from_numpy(result).reshape(-1)


def irregular(given, folder):
    points = given.shard(given.points, 0).requires_grad_()
    index, distances = ms.points.knn(points, points, 3)
    distances.square().sum().backward()
    return whole(index, points.grad)


def attended(given, folder):
    q = given.leaf()
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    y.square().sum().backward()
    return whole(y, q.grad)


def derived(given, folder):
    x = given.leaf()
    y = torch.fft.irfft2(torch.fft.rfft2(x)) + F.layer_norm(x, (6,)) + F.group_norm(x, 3) + x.cumsum(2)
    loss = y.square().sum() + F.cross_entropy(x, given.shard(given.labels, 1))
    loss = loss + F.interpolate(x, scale_factor=2, mode="bilinear").std() + x.logsumexp((0, 2)).sum() + x.amax()
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    g.square().sum().backward()
    return whole(g, x.grad)


def around(given, folder):
    x, model = given.leaf(), given.distributed()
    with torch.autograd.graph.save_on_cpu():
        loss = checkpoint(model, x, use_reentrant=False).square().sum()
    loss.backward()
    torch.manual_seed(2)
    return whole(x.grad, F.dropout(given.x, 0.5))


def adjoint(given, folder):
    local = given.x.to_local().double()
    passed = ms.dot_test(lambda t: ms.halo_exchange(ms.ShardTensor.from_local(t, given.mesh, ROWS), {2: (1, 1)}), local)
    return torch.full((1,), float(bool(passed)), device="cpu")


def grouped(given, folder):
    ms.process_group(given.mesh)
    try:
        x = given.plain.clone()
        dist.all_reduce(x)
        found = [None] * SIZE
        dist.all_gather_object(found, {"rank": RANK})
        dist.barrier()
        assert [f["rank"] for f in found] == list(range(SIZE))
    finally:
        dist.destroy_process_group()
    return whole(x)


def measured(given, folder):
    model = given.distributed()
    with ms.profile(given.mesh), ms.comm_counter():
        y = model(given.x)
    return whole(y, given.x.rebalance([1.0 + r for r in range(SIZE)]))


CALLS = [scattered, made, halos, collectives, trained, sharded, files, inside, irregular, attended, derived]
CALLS += [adjoint, grouped, measured]
if RELEASE >= (2, 13):  # what checkpoints of torch 2.8 keep for themselves lies on the default device
    CALLS.append(around)


@pytest.mark.parametrize("call", CALLS)
def test_with_another_default_device(call, tmp_path, capsys):
    path = type(tmp_path)(WORLD.bcast(os.fspath(tmp_path)))
    given = Given()
    found = []
    for i, default in enumerate((contextlib.nullcontext(), torch.device("meta"))):
        folder = path / str(i)
        folder.mkdir(exist_ok=True)
        with default:
            found.append(call(given, folder))
    assert found[1].device.type == "cpu"
    torch.testing.assert_close(found[1], found[0])
