"""Stale data, the fault of others: thousands of exchanges between long kernels, on several streams."""

import os

import pytest
import torch
from mpi4py import MPI

import mpishard as ms

WORLD = MPI.COMM_WORLD
COUNT = int(os.environ.get("MPISHARD_TEST_EXCHANGES", "10000"))


def busy(x, rounds=20):
    """Keep the stream busy for a while, and let ``x`` change only at the end of it."""
    filler = torch.ones(1 << 20, device=x.device)
    for _ in range(rounds):
        filler = filler * 1.0001
    return x + 0 * filler[0]


@pytest.mark.parametrize("streams", ["default", "own", "alternating"])
def test_no_exchange_is_stale(make_mesh, streams):
    mesh = make_mesh((WORLD.size,), True)
    x = ms.distribute_tensor(torch.zeros(WORLD.size * 4, 64, device=mesh.device), mesh, (ms.Shard(0),))
    layout = x.sharding
    own = [torch.cuda.Stream() for _ in range(3)]
    wrong = torch.zeros((), dtype=torch.int64, device=mesh.device)
    torch.cuda.synchronize()
    below, above = (mesh.rank - 1) % mesh.size, (mesh.rank + 1) % mesh.size
    count = COUNT if streams == "default" else COUNT // 4
    for k in range(count):
        stream = torch.cuda.current_stream() if streams == "default" else own[k % 3 if streams == "alternating" else 0]
        if streams == "alternating":
            stream.wait_stream(own[(k - 1) % 3])
        with torch.cuda.stream(stream):
            local = torch.full((4, 64), float(k * mesh.size + mesh.rank), device=mesh.device)
            local = busy(local, 20 if k % 50 == 0 else 1)
            now = ms.ShardTensor.from_local(local, mesh, (ms.Shard(0),), {0: layout.sizes[0]})
            padded = ms.halo_exchange(now, {0: (1, 1)}, mode="circular")
            wrong += (padded[0] != k * mesh.size + below).sum() + (padded[-1] != k * mesh.size + above).sum()
            wrong += (padded[1:-1] != k * mesh.size + mesh.rank).sum()
    torch.cuda.synchronize()
    assert wrong.item() == 0


def test_no_refresh_in_place_is_stale(make_mesh):
    mesh = make_mesh((WORLD.size,), True)
    u = torch.zeros(6, 4096, device=mesh.device)
    h = ms.HaloExchanger(mesh, u.shape, ((1, 1), 0), torch.float32)
    wrong = torch.zeros((), dtype=torch.int64, device=mesh.device)
    below, above = (mesh.rank - 1) % mesh.size, (mesh.rank + 1) % mesh.size
    for k in range(COUNT // 4):
        u[1:-1] = busy(torch.tensor(float(k * mesh.size + mesh.rank), device=mesh.device), 20 if k % 50 == 0 else 1)
        h(u)
        wrong += (u[0] != k * mesh.size + below).sum() + (u[-1] != k * mesh.size + above).sum()
    torch.cuda.synchronize()
    assert wrong.item() == 0
