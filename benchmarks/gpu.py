"""What a GPU's exchanges cost against the hardware's own path; needs a GPU.

With one rank, that rank's operations against plain torch. Several ranks may share a GPU: they take turns on it,
so say so beside any figure. Where MPI may not be given GPU memory, only the staged figures are taken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench, Unfit
from mpishard.comm.collective import blocking
from mpishard.comm.device.driver import driver_of
from mpishard.comm.memory.buffer import as_bytes
from mpishard.comm.memory.copy_table import Box, plan_table
from mpishard.comm.transport.device_message import Envelope, Relay


def synchronous(call: Callable[[], object]) -> Callable[[], object]:
    """Let a call last until the GPU is done."""

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def messages(bench: Bench, mesh: ms.CartMesh) -> None:
    """Compare a ring of contiguous messages with raw mpi4py on the same buffers, and with the parts of staging."""
    driver = driver_of(mesh.device)
    up, down = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    for nbytes in (4096, 1 << 20, 4 << 20, 64 << 20):
        count = 5 if bench.quick else 20 if nbytes > 1 << 20 else 200
        host, other = driver.pinned(nbytes), driver.pinned(nbytes)
        for aware in (True, False) if mesh.gpu_aware else (False,):
            relay = Relay(mesh.comm, driver, [Envelope(up, 5, nbytes)], [Envelope(down, 5, nbytes)], "ring", aware)
            mine = (relay.out.tensor, relay.into.tensor) if aware else (host, other)
            raw = [mesh.comm.Recv_init(as_bytes(mine[1]), down, 6), mesh.comm.Send_init(as_bytes(mine[0]), up, 6)]

            def exchange(relay=relay):
                relay.acquire()
                relay.start()
                relay.finish()
                relay.release()

            def bare(raw=raw):
                MPI.Prequest.Startall(raw)
                MPI.Request.Waitall(raw)

            def copies(relay=relay, host=host, other=other):
                host.copy_(relay.out.tensor, non_blocking=True)
                torch.cuda.current_stream().synchronize()
                relay.into.tensor.copy_(other, non_blocking=True)

            calls = {"ours": synchronous(exchange), "raw": synchronous(bare)}
            if not aware:
                calls["copies"] = synchronous(copies)
            route = "GPU to GPU" if aware else "staged"
            what = f"message of {nbytes} B, {route}"
            times = bench.compare(what, calls, floor="raw", count=count, nbytes=nbytes, route=route)
            if not aware:
                parts = [raw + copies for raw, copies in zip(times["raw"], times["copies"])]
                figure = [ours / part for ours, part in zip(times["ours"], parts)]
                bench.figure(f"{what}: ours / copy + host exchange + copy", figure, "x (target 1.2)")
            for request in raw:
                request.Free()
            relay.free()


def collectives(bench: Bench, mesh: ms.CartMesh) -> None:
    """Compare collectives through pinned memory with their parts: copy, host collective, copy."""
    group = mesh.group((0,))
    for nbytes in (64 << 10, 4 << 20, 64 << 20):
        count = 5 if bench.quick else 10 if nbytes > 4 << 20 else 100
        n = nbytes // 4
        x, host = torch.ones(n, device=mesh.device), torch.ones(n, pin_memory=mesh.device.type == "cuda")
        sizes = blocking.even(n, group.size)
        own, own_host = (t[: sizes[group.rank]] for t in (x, host))
        for name, ours, bare, down, up in (
            (
                "all-reduce",
                lambda x=x: blocking.all_reduce(x, group, deterministic=False),
                lambda h=host: blocking.all_reduce(h, group, deterministic=False, in_place=True),
                (host, x),
                (x, host),
            ),
            (
                "all-gather",
                lambda x=own, s=sizes: blocking.all_gather(x, group, 0, s),
                lambda h=own_host, s=sizes: blocking.all_gather(h, group, 0, s),
                (own_host, own),
                (x, host),
            ),
        ):

            def copies(down=down, up=up):
                down[0].copy_(down[1], non_blocking=True)
                torch.cuda.current_stream().synchronize()
                up[0].copy_(up[1], non_blocking=True)

            what = f"{name} of {nbytes} B"
            calls = {"ours": synchronous(ours), "host": bare, "copies": synchronous(copies)}
            times = bench.compare(what, calls, floor="host", count=count, nbytes=nbytes)
            parts = [on_host + copies for on_host, copies in zip(times["host"], times["copies"])]
            figure = [ours / part for ours, part in zip(times["ours"], parts)]
            bench.figure(f"{what}: ours / copy + host collective + copy", figure, "x (target 1.2)")


def kernels(bench: Bench, device: torch.device) -> None:
    """Compare the copy kernel on the faces of a cube with a copy of as many bytes."""
    driver = driver_of(device)
    if not driver.has_kernel:
        bench.failed("pack", "kernel", "cupy is not installed")
        return
    for n in (64, 128, 256, 512):
        cube = torch.zeros(n, n, n, device=device)
        for dim in range(3):
            shape = [n, n, n]
            shape[dim] = 2
            nbytes = 4 * 2 * n * n
            memory = driver.allocate(nbytes)
            box = Box(0, tuple(shape), tuple(4 * s for s in cube.stride()), 4, 0)
            table = driver.table(plan_table([box]))
            source, target = torch.empty(2, nbytes, dtype=torch.uint8, device=device)
            calls = {
                "kernel": lambda t=table, c=cube, m=memory: driver.pack(t, c.data_ptr(), m),
                "copy": lambda s=source, t=target: t.copy_(s),
                "torch": lambda c=cube, d=dim, m=memory, s=tuple(shape): (
                    m.tensor.view(torch.float32).view(s).copy_(c.narrow(d, 0, 2))
                ),
            }
            bench.compare(
                f"pack the face of {n}^3 across dim {dim}, 50 times (target 1.25 of copy)",
                {k: repeated(v) for k, v in calls.items()},
                floor="copy",
                count=3 if bench.quick else 20,
            )
            memory.free()


def repeated(call: Callable[[], object], count: int = 50) -> Callable[[], object]:
    """Queue a call many times, and wait once: what the GPU takes, not the launch."""

    def run() -> None:
        for _ in range(count):
            call()
        torch.cuda.synchronize()

    return run


def one_rank(bench: Bench, mesh: ms.CartMesh) -> None:
    """Operations of one rank against plain torch: what the wrapper costs."""
    device = mesh.device
    x = torch.randn(1, 8, 1024, 1024, device=device, requires_grad=True)
    sharded = ms.distribute_tensor(x.detach(), mesh, (ms.Shard(2),)).requires_grad_()
    conv = torch.nn.Conv2d(8, 8, 3, padding=1).to(device)
    layers = [torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.SiLU()]
    network = torch.nn.Sequential(*layers, *layers, torch.nn.MaxPool2d(2), *layers).to(device)
    for name, model in {"conv2d 3x3": conv, "nine layers": network}.items():

        def step(t, model=model):
            model.zero_grad()
            model(t).mean().backward()

        calls = {"ours": synchronous(lambda s=step: s(sharded)), "torch": synchronous(lambda s=step: s(x))}
        what = f"{name} forward+backward at 1024^2, one rank (target 1.03)"
        bench.compare(what, calls, floor="torch", count=3 if bench.quick else 20)
    small, plain = ms.ones(64, 64, mesh=mesh, placements=(ms.Shard(0),)), torch.ones(64, 64, device=device)
    bench.compare(
        "x + 1, on the host (target 8 us above)",
        {"ours": lambda: small + 1, "torch": lambda: plain + 1},
        floor="torch",
        count=200 if bench.quick else 2000,
    )


def run(bench: Bench) -> None:
    """Compare what this number of ranks allows."""
    if not torch.cuda.is_available():
        raise Unfit("torch finds no GPU")
    mesh = ms.init_mesh((-1,), periodic=True)
    torch.cuda.set_device(mesh.device)
    if WORLD.size == 1:
        one_rank(bench, mesh)
        kernels(bench, mesh.device)
    else:
        messages(bench, mesh)
        collectives(bench, mesh)
    mesh.free()
