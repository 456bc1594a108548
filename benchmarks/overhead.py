"""What a ShardTensor adds to an operation on a tiny tensor: the column above torch; and to a step of a small U-Net.

The step is on 8^3 cells a rank, where nearly all is the host's work: processor time of the thread less its waits for
messages, beside plain torch on a block of the same size. Of ranks in the middle of a large mesh, which send to both
sides of three dims, the work is that of a planning mesh: all but MPI. What is counted (calls of Python's functions,
of those in C, operations of torch, exchanges) does not depend on the machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench
from benchmarks.scaling import UNet, trainer
from mpishard.comm.wait_meter import WaitMeter
from mpishard.planning.mesh import mesh_on


class _Operations(TorchDispatchMode):
    """Counts operations of torch, below autograd."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(step: Callable[[], object]) -> dict[str, int]:
    """Return what a call does, by kind. Collective as it is."""
    with ms.comm_counter() as traffic:
        step()
    with _Operations() as operations:
        step()
    calls = {"call": 0, "c_call": 0}

    def see(_frame: Any, event: str, _arg: Any) -> None:
        if event in calls:
            calls[event] += 1

    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    return {
        "calls of Python functions": calls["call"],
        "calls of C functions": calls["c_call"],
        "operations of torch": operations.count,
        "exchanges and collectives": traffic.calls,
        "messages": traffic.messages,
    }


def working(step: Callable[[], object], count: int) -> float:
    """Return processor seconds of a call, without its waits. Collective as it is."""
    meter = WaitMeter(time.thread_time)
    start = time.thread_time()
    meter.start()
    for _ in range(count):
        step()
    waited = meter.stop()
    return (time.thread_time() - start - waited) / count


def steps() -> tuple[dict[str, Callable[[], None]], ms.CartMesh]:
    """Return a step by each who does it. Collective."""
    width = 8
    mesh = ms.init_mesh((-1,), ("d",))
    far = mesh_on("cpu", (4, 4, 4))
    field = ms.distribute_tensor(torch.randn(1, 1, width * WORLD.size, width, width), mesh, (ms.Shard(2),))
    cube = ms.zeros(1, 1, *[4 * width] * 3, mesh=far, placements=[ms.Shard(2), ms.Shard(3), ms.Shard(4)])
    cube.block.uniform_()
    return {
        "torch": trainer(UNet(width), torch.randn([1, 1] + [width] * 3)),
        f"ours, {WORLD.size} ranks": trainer(ms.distribute_module(UNet(width), mesh), field),
        "ours, one of 4x4x4": trainer(ms.distribute_module(UNet(width), far), cube),
    }, mesh


def measure_step(bench: Bench) -> None:
    """Note the host's time of a step, and what it does."""
    every, mesh = steps()
    for step in every.values():
        for _ in range(3):  # plans are made, and gradients compared
            step()
    count = 1 if bench.quick else 5
    times: dict[str, list[float]] = {who: [] for who in every}
    for _ in range(bench.rounds):
        for who, step in every.items():
            times[who].append(max(WORLD.allgather(working(step, count))))
    what = "U-Net, step, 8x8x8 a rank"
    bench.add(f"{what}: host time", times, floor="torch")
    counts = {who: counted(step) for who, step in every.items()}
    for kind in counts["torch"]:
        for who, found in counts.items():
            bench.figure(f"{what}: {kind}", found[kind], "a step", who)
    mesh.free()


def run(bench: Bench) -> None:
    """Compare operations on 512 cells a rank with torch's."""
    count = 20 if bench.quick else 2000
    mesh = ms.init_mesh((-1,), ("d",))
    local = torch.randn(1, 8, 8, 8)
    x = ms.distribute_tensor(torch.randn(1, 8, 8 * WORLD.size, 8), mesh, (ms.Shard(2),))
    operations = {
        "x + 1": lambda t: t + 1.0,
        "x * x": lambda t: t * t,
        "x.mul_(1)": lambda t: t.mul_(1.0),
        "x.addcmul_(x, x)": lambda t: t.addcmul_(t, t, value=0.0),
        "gelu": torch.nn.functional.gelu,
        "shape": lambda t: t.shape,
        "permute": lambda t: t.permute(0, 2, 3, 1),
        "sum(1)": lambda t: t.sum(1),
    }

    def report(name, operation):
        bench.compare(
            name, {"torch": lambda: operation(local), "ours": lambda: operation(x)}, floor="torch", count=count
        )

    with torch.no_grad():
        for name, operation in operations.items():
            report(name, operation)
    local.requires_grad_()
    x.requires_grad_()
    report("x * x, grad", operations["x * x"])
    mesh.free()
    measure_step(bench)
