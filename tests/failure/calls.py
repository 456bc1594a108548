"""Calls that ranks may make differently: of each kind some, by how large they are and of which dtype.

A call is made ready on a mesh and then made; what it gives is the same whenever all ranks make it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

import mpishard as ms

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SIZES, BITS = (3, 5), (32, 64)
FOLDER = os.environ.get("FOLDER", "")  # with the files that `prepare` writes

Ready = Callable[[], Tensor]
Make = Callable[[Any, int, int], Ready]


def float_of(bits: int) -> torch.dtype:
    return getattr(torch, f"float{bits}")  # type: ignore[no-any-return]


def plain(n: int, bits: int) -> Tensor:
    """What only this rank, size and dtype has."""
    return torch.arange(1, 1 + SIZE * n).to(float_of(bits)) * (1 + RANK)


def field(mesh: Any, n: int, bits: int, rows: int = 5) -> Any:
    block = torch.arange(float(rows * 6)).view(1, 1, rows, 6).to(float_of(bits))
    return ms.ShardTensor.from_local(block * (RANK + 2), mesh, (ms.Shard(2),))


def on_field(call: Callable[[Any, int], Tensor], rows: int | None = 5) -> Make:
    """A call of a sharded tensor, which is made before; ``rows`` of it on every rank, None: as the size says."""

    def ready(mesh: Any, n: int, bits: int) -> Ready:
        x = field(mesh, n, bits, n if rows is None else rows)
        return lambda: call(x, n)

    return ready


def on_plain(call: Callable[[Tensor, Any, int], Tensor]) -> Make:
    def ready(mesh: Any, n: int, bits: int) -> Ready:
        x = plain(n, bits)
        return lambda: call(x, mesh, n)

    return ready


def grad_of(call: Callable[[Any, int], Any]) -> Make:
    """Forward and backward of a call."""

    def ready(mesh: Any, n: int, bits: int) -> Ready:
        whole = field(mesh, n, bits)

        def run() -> Tensor:
            x = whole.detach().requires_grad_()
            call(x, n).square().to_local().sum().backward()
            return x.grad.to_local()

        return run

    return ready


# exchanges with some ranks


def exchanger(mesh: Any, n: int, bits: int) -> Ready:
    u = plain(n, bits).numpy().repeat(4)
    exchange = ms.HaloExchanger(mesh, u.shape, n - 2, u.dtype)

    def run() -> Tensor:
        exchange(u)
        return torch.from_numpy(np.array(u))

    return run


def new_exchanger(mesh: Any, n: int, bits: int) -> Ready:
    def run() -> Tensor:
        exchange = ms.HaloExchanger(mesh, (4 * n,), n - 2, float_of(bits))
        u = plain(n, bits).numpy().repeat(4)[: 4 * n].copy()
        exchange(u)
        exchange.free()
        return torch.from_numpy(u)

    return run


def attention(mesh: Any, n: int, bits: int) -> Ready:
    x = torch.linspace(0, 1, 2 * 4 * n).view(1, 2, n, 4).to(float_of(bits)) * (RANK + 1)
    q = ms.ShardTensor.from_local(x, mesh, (ms.Shard(2),))

    def run() -> Tensor:
        with ms.attention_method("ring"):
            return F.scaled_dot_product_attention(q, q, q).to_local()

    return run


def ring(x: Tensor, mesh: Any, _: int) -> Tensor:
    return ms.send_recv(x, mesh, dest=(RANK + 1) % SIZE, source=(RANK - 1) % SIZE)


def kernel(x: Any, n: int) -> Tensor:
    return torch.ones(1, 1, n, n, dtype=x.dtype)


EXCHANGES: dict[str, Make] = {
    "conv2d": on_field(lambda x, n: F.conv2d(x, kernel(x, n), padding=n // 2).to_local()),
    "strided conv2d": on_field(lambda x, n: F.conv2d(x, kernel(x, n), padding=n // 2, stride=n - 2).to_local()),
    "dilated conv2d": on_field(lambda x, n: F.conv2d(x, kernel(x, 3), padding=n - 2, dilation=n - 2).to_local()),
    "backward of conv2d": grad_of(lambda x, n: F.conv2d(x, kernel(x, n), padding=n // 2)),
    "max_pool2d": on_field(lambda x, n: F.max_pool2d(x, n, 1, n // 2).to_local()),
    "backward of avg_pool2d": grad_of(lambda x, n: F.avg_pool2d(x, n, 1, n // 2)),
    "halo_exchange": on_field(lambda x, n: ms.halo_exchange(x, {2: n - 2}, mode="circular")),
    "one-sided halo": on_field(lambda x, _: ms.halo_exchange(x, {2: (0, 1)}, mode="zeros")),
    "halo of other rows": on_field(lambda x, _: ms.halo_exchange(x, {2: 1}, mode="zeros"), None),
    "HaloExchanger": exchanger,
    "new HaloExchanger": new_exchanger,
    "ring attention": attention,
    "send_recv": on_plain(ring),
    "shift": on_plain(lambda x, mesh, n: ms.shift(x, mesh, 0, n - 4)),
    "roll": on_field(lambda x, n: x.roll(n, 2).to_local()),
    "flip": on_field(lambda x, _: x.flip(2).to_local(), None),
    "circular pad": on_field(lambda x, n: F.pad(x, (0, 0, n - 2, n - 2), mode="circular").to_local()),
    "interpolate": on_field(lambda x, n: F.interpolate(x, scale_factor=(n - 2, 1), mode="bilinear").to_local()),
    "diff": on_field(lambda x, n: x.diff(n - 2, 2).to_local()),
    "unfold": on_field(lambda x, n: x.unfold(2, n, 1).to_local()),
}

# collectives of all ranks


def parameters(mesh: Any, n: int, bits: int) -> Ready:
    """A step of a model whose gradients are summed in buckets."""
    x, model = field(mesh, n, bits), torch.nn.Conv2d(1, 1, n, padding=n // 2, dtype=float_of(bits))
    for p in model.parameters():
        torch.nn.init.constant_(p, 0.5)
    model = ms.distribute_module(model, mesh)

    def run() -> Tensor:
        model.zero_grad()
        model(x).sum().backward()
        return model.weight.grad.clone().view(-1)

    return run


group_of = lru_cache(maxsize=1)(ms.process_group)


def of_group(call: Callable[[Tensor, Any, int], Tensor]) -> Make:
    """A call of torch.distributed, on a group of ours."""

    def ready(mesh: Any, n: int, bits: int) -> Ready:
        x, group = plain(n, bits), group_of(mesh)
        return lambda: call(x.clone(), group, n)

    return ready


def dist_reduce(x: Tensor, group: Any, n: int) -> Tensor:
    dist.all_reduce(x, dist.ReduceOp.SUM if n == 3 else dist.ReduceOp.MAX, group=group)
    return x


def dist_sum_of_equal_bytes(x: Tensor, group: Any, _: int) -> Tensor:
    x = x.view(torch.int32 if x.dtype == torch.float64 else x.dtype)
    dist.all_reduce(x, group=group)
    return x.to(torch.float64)


def dist_reduce_to_one(x: Tensor, group: Any, n: int) -> Tensor:
    dist.reduce(x, n % SIZE, dist.ReduceOp.SUM if n == 3 else dist.ReduceOp.MAX, group=group)
    return x


def dist_scattered_sum(x: Tensor, group: Any, n: int) -> Tensor:
    y = x.new_empty(n)
    dist.reduce_scatter_tensor(y, x, group=group)
    return y


def dist_to_all(x: Tensor, group: Any, _: int) -> Tensor:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x, group=group)
    return y


def dist_barrier(x: Tensor, group: Any, _: int) -> Tensor:
    dist.barrier(group)
    return x


def dist_gather(x: Tensor, group: Any, _: int) -> Tensor:
    y = x.new_empty(SIZE * len(x))
    dist.all_gather_into_tensor(y, x, group=group)
    return y


def dist_ring(x: Tensor, group: Any, _: int) -> Tensor:
    y = torch.empty_like(x)
    sent = dist.isend(x, (RANK + 1) % SIZE, group=group)
    dist.recv(y, (RANK - 1) % SIZE, group=group)
    sent.wait()
    return y


def dist_broadcast(x: Tensor, group: Any, n: int) -> Tensor:
    dist.broadcast(x, n % SIZE, group=group)
    return x


def rounded(call: Callable[[Any, int], Any], rows: int | None = 5) -> Make:
    return on_field(lambda x, n: call(x, n).full_tensor(), rows)


COLLECTIVES: dict[str, Make] = {
    "all_reduce": on_plain(lambda x, mesh, _: ms.all_reduce(x, mesh)),
    "all_reduce of other bytes": on_plain(lambda x, mesh, n: ms.all_reduce(x.view(torch.uint8).to(torch.int32), mesh)),
    "all_reduce of a number": on_plain(lambda x, mesh, n: ms.all_reduce(x.sum(), mesh, op="sum" if n == 3 else "max")),
    "all_reduce of equal bytes": on_plain(lambda x, mesh, _: ms.all_reduce(x.view(torch.int32), mesh)),
    "all_reduce max": on_plain(lambda x, mesh, _: ms.all_reduce(x, mesh, op="max")),
    "all_reduce of much": on_plain(lambda x, mesh, n: ms.all_reduce(x.repeat(n * 4000), mesh)),
    "deterministic all_reduce": on_plain(lambda x, mesh, _: ms.all_reduce(x, mesh, deterministic=True)),
    "all_gather": on_plain(lambda x, mesh, n: ms.all_gather(x.view(SIZE, n), mesh)),
    "all_gather of sizes": on_plain(lambda x, mesh, _: ms.all_gather(x, mesh, sizes=[len(x)] * SIZE)),
    "reduce_scatter": on_plain(lambda x, mesh, _: ms.reduce_scatter(x, mesh)),
    "all_to_all": on_plain(lambda x, mesh, n: ms.all_to_all(x.view(SIZE, n), mesh, split_dim=0, concat_dim=0)),
    "broadcast": on_plain(lambda x, mesh, n: ms.broadcast(x, mesh, root=n % SIZE)),
    "step of a model": parameters,
    "torch.distributed all_reduce": of_group(dist_reduce),
    "torch.distributed all_reduce of equal bytes": of_group(dist_sum_of_equal_bytes),
    "torch.distributed reduce": of_group(dist_reduce_to_one),
    "torch.distributed reduce_scatter": of_group(dist_scattered_sum),
    "torch.distributed all_to_all": of_group(dist_to_all),
    "torch.distributed barrier": of_group(dist_barrier),
    "torch.distributed all_gather": of_group(dist_gather),
    "torch.distributed broadcast": of_group(dist_broadcast),
    "torch.distributed send": of_group(dist_ring),
    "redistribute": on_field(lambda x, _: x.redistribute(placements=(ms.Shard(3),)).to_local(), None),
    "redistribute to one": on_field(lambda x, _: x.redistribute(placements=(ms.Replicate(),)).to_local(), None),
    "full_tensor": on_field(lambda x, _: x.full_tensor(), None),
    "fft": on_field(lambda x, n: torch.view_as_real(torch.fft.fft(x, dim=n - 2 if n == 3 else 2).to_local())),
    "sum": rounded(lambda x, n: x.sum((0, 1, 2) if n == 3 else (2, 3))),
    "std": rounded(lambda x, _: x.std(2)),
    "max": rounded(lambda x, n: x.amax(2) if n == 3 else x.max()),
    "cumsum": on_field(lambda x, _: x.cumsum(2).to_local()),
    "sort": on_field(lambda x, _: x.sort(2).values.to_local()),
    "softmax": on_field(lambda x, _: x.softmax(2).to_local()),
    "matmul": rounded(lambda x, _: x.transpose(2, 3) @ x),
    "group_norm": on_field(lambda x, _: F.group_norm(x, 1).to_local()),
    "index_select": on_field(lambda x, n: x.index_select(2, torch.tensor([0, n, 1])).full_tensor()),
    "reshape": on_field(lambda x, n: x.reshape(1, -1, 2 if n == 3 else 3).full_tensor()),
}

# all else that ranks do together


def scattered(mesh: Any, n: int, bits: int) -> Ready:
    root = n % SIZE

    def run() -> Tensor:
        x = torch.arange(float(n * SIZE)).to(float_of(bits)) if root == RANK else None
        return ms.scatter_tensor(x, root, mesh, (ms.Shard(0),)).to_local()

    return run


def distributed(mesh: Any, n: int, bits: int) -> Ready:
    def run() -> Tensor:
        x = torch.arange(float(n * SIZE)).to(float_of(bits))
        return ms.distribute_tensor(x, mesh, (ms.Shard(0),)).to_local()

    return run


def new_mesh(mesh: Any, n: int, bits: int) -> Ready:
    def run() -> Tensor:
        made = ms.init_mesh((-1,), (f"x{n}",), periodic=bits == 32)
        made.free()
        return torch.zeros(1)

    return run


def from_local(mesh: Any, n: int, bits: int) -> Ready:
    x = plain(n, bits).view(SIZE, n)
    return lambda: ms.ShardTensor.from_local(x, mesh, (ms.Shard(0),)).full_tensor()


def profiled(mesh: Any, n: int, bits: int) -> Ready:
    x = field(mesh, n, bits)

    def run() -> Tensor:
        with ms.profile(mesh, quiet=True) as found:
            x.relu()
        return torch.tensor([row.calls.mean for row in found.rows if row.name == "relu"])

    return run


def balanced(mesh: Any, n: int, bits: int) -> Ready:
    x = field(mesh, n, bits)

    def run() -> Tensor:
        balancer = ms.balance(mesh, every=n - 2)
        for _ in range(n):
            balancer(x)
            balancer.record(1.0 + RANK)
        return balancer(x).full_tensor()

    return run


@lru_cache(maxsize=1)
def simulation_on(mesh: Any) -> Any:
    return ms.insitu.adopt(WORLD, (6 * SIZE, 6), (1, 0), ("x", "y"), grid=(SIZE, 1))


def hooked(mesh: Any, n: int, bits: int) -> Ready:
    array = (np.arange(float(2 + 6), dtype=f"f{bits // 8}") + RANK)[:, None] * np.ones(6)
    array = array.astype(f"f{bits // 8}")
    start, sim, name = array.copy(), simulation_on(mesh), f"u{n}{bits}"
    sim.field(name, array)

    def model(u: Any) -> Any:
        return F.avg_pool2d(u[None, None], n, 1, n // 2)[0, 0]

    hook = sim.hook(model, [name], [name])

    def run() -> Tensor:
        array[:] = start
        hook()
        return torch.from_numpy(array[1:-1].copy())

    return run


def place(n: int, bits: int, kind: str) -> str:
    return os.path.join(FOLDER, f"{kind}{n}-{bits}")


def written(mesh: Any, n: int, bits: int) -> Ready:
    x = field(mesh, n, bits)

    def run() -> Tensor:
        ms.io.write(place(n, bits, "written") + ".h5", {"x": x})
        return torch.zeros(1)

    return run


def appended(mesh: Any, n: int, bits: int) -> Ready:
    x = field(mesh, n, bits)

    def run() -> Tensor:
        ms.io.write(place(n, bits, "appended") + ".h5", {"x": x}, append="time")
        return torch.zeros(1)

    return run


def read(mesh: Any, n: int, bits: int) -> Ready:
    return lambda: ms.io.read(place(n, bits, "a") + ".h5", "x", mesh, (ms.Shard(2),)).to_local()


def sampled(mesh: Any, n: int, bits: int) -> Ready:
    def run() -> Tensor:
        with ms.io.Dataset(place(n, bits, "a") + ".h5", "x", mesh, (ms.Shard(1),)) as samples:
            return samples[0].to_local()

    return run


def saved(mesh: Any, n: int, bits: int) -> Ready:
    x = field(mesh, n, bits)

    def run() -> Tensor:
        ms.io.save_checkpoint(place(n, bits, "saved"), n, tensors={"x": x}, mesh=mesh)
        return torch.zeros(1)

    return run


def loaded(mesh: Any, n: int, bits: int) -> Ready:
    def run() -> Tensor:
        found = ms.io.load_checkpoint(place(n, bits, "checkpoint"), mesh=mesh, rng=False)
        return found.tensors["x"].to_local()

    return run


def prepare() -> None:
    """Write the files that calls read. Collective."""
    mesh = ms.init_mesh((-1,), ("x",), periodic=True)
    for n in SIZES:
        for bits in BITS:
            x = field(mesh, n, bits)
            ms.io.write(place(n, bits, "a") + ".h5", {"x": x})
            ms.io.save_checkpoint(place(n, bits, "checkpoint"), n, tensors={"x": x}, mesh=mesh)
    mesh.free()


FILES: dict[str, Make] = {
    "io.write": written,
    "io.write, append": appended,
    "io.read": read,
    "Dataset": sampled,
    "save_checkpoint": saved,
    "load_checkpoint": loaded,
}
OTHERS: dict[str, Make] = {
    "scatter_tensor": scattered,
    "distribute_tensor": distributed,
    "from_local": from_local,
    "init_mesh": new_mesh,
    "profile": profiled,
    "balance": balanced,
    "hook of a simulation": hooked,
    "no call": lambda *_: lambda: torch.zeros(1),
}
CALLS = EXCHANGES | COLLECTIVES | FILES | OTHERS


def communicator(name: str) -> str:
    """Whose communicator a call is on: calls on different ones never meet, and the watchdog is who notices."""
    return {"init_mesh": "all ranks'", "hook of a simulation": "the simulation's"}.get(name) or (
        "the group's" if name.startswith("torch.distributed") else "the mesh's"
    )
