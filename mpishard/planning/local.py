"""The machine here: the rank's own work is done here, on blocks of the planned shape, with messages to nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median

import torch
from torch import nn

from mpishard.comm.mesh import init_mesh
from mpishard.comm.null import Event
from mpishard.comm.point_to_point.send_recv import send_recv
from mpishard.errors import JobError
from mpishard.planning.machine import Machine
from mpishard.planning.mesh import mesh_on
from mpishard.planning.step import Program, step_on
from mpishard.planning.timeline import host_seconds
from mpishard.planning.trace import Trace

_PATIENCE_S = 2.0  # of one measurement, beyond its first repetitions
_CHAIN = 200  # operations


@lru_cache(1)
def local_machine() -> Machine:
    """Return what a rank of this machine has, measured. Collective over all ranks of the program.

    Ranks of a program measure at the same time: what they share, they share here too. Latency and bandwidth are those
    between neighbours of them; of one rank alone, those of messages to itself.
    """
    a, big = torch.rand(512, 512, device="cpu"), torch.rand(1 << 23, device="cpu")
    product, copy = _seconds(lambda: a @ a), _seconds(big.clone)
    latency, network = _messages()
    operation, call = _host()
    measured = "measured here"
    return Machine(
        name="local",
        gpu=False,
        flops={"float32": 2 * 512**3 / product},
        memory=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        memory_bandwidth=2 * big.nbytes / copy,
        network_bandwidth=network,
        latency=latency,
        operation=operation,
        exchange=call,
        collective=call,
        sources=dict.fromkeys(Machine._fields[2:-1], measured),
    )


def check_room(memory: int, extents: Sequence[int]) -> None:
    """Raise where a rank's tensors need more memory than this machine has free. Not collective."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory > free:
        raise JobError(
            "plan: machine local",
            expected=f"a rank that fits here: {free / 1e9:.1f} GB are free",
            got=f"{memory / 1e9:.1f} GB of tensors a rank on mesh {tuple(extents)}",
            fix="plan more ranks, a smaller field, or a published machine",
        )


def step_seconds(program: Program, extents: Sequence[int], coords: Sequence[int]) -> float:
    """Return how long a rank's own work of a step takes here. Not collective."""
    mesh = mesh_on("cpu", extents, coords=coords)
    try:
        return _seconds(step_on(mesh, program), warm=2)
    finally:
        mesh.free()


def _seconds(call: Callable[[], object], *, warm: int = 1) -> float:
    for _ in range(warm):
        call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < _PATIENCE_S and len(times) < 15):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def _messages() -> tuple[float, float]:
    """Return latency and bandwidth of messages in a ring of all ranks. Collective."""
    mesh = init_mesh(-1, ("ring",), periodic=True, device="cpu")
    group = mesh.group((0,))
    to, of = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    small, large = torch.zeros(1, device="cpu"), torch.zeros(1 << 20, device="cpu")

    def swap(x: torch.Tensor) -> object:
        return send_recv(x, group, to, of, x.shape)

    one, many = _rounds(lambda: swap(small), 200), _rounds(lambda: swap(large), 10)
    mesh.free()
    return one, large.nbytes / max(many - one, 1e-9)


def _rounds(call: Callable[[], object], count: int) -> float:
    # as many on every rank: each waits for its neighbours
    call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _host() -> tuple[float, float]:
    """Return what an operation costs the host, and an exchange or collective besides its operations. Not collective."""
    x = torch.zeros(4, requires_grad=True, device="cpu")

    def chain() -> None:
        y = x
        for _ in range(_CHAIN):
            y = y + 1
        y.sum().backward()

    operation = _seconds(chain) / (2 * _CHAIN)
    program = Program(_layers, (1, 2, 12, 12, 12), (2, 3, 4))
    mesh = mesh_on("cpu", (3, 3, 3))
    step = step_on(mesh, program)
    seconds = _seconds(step, warm=2)
    with Trace(mesh) as traced:
        step()
    mesh.free()
    calls = sum(e.kind not in ("finish", "end") for e in traced.events if isinstance(e, Event))
    known = Machine("", False, {"float32": 1.0}, 0.0, 1.0, 1.0, 0.0, operation, 0.0, 0.0, {})
    return operation, max(0.0, seconds - host_seconds(known, traced.events)) / calls


def _layers() -> nn.Module:
    return nn.Sequential(*[m for _ in range(2) for m in (nn.Conv3d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU())])
