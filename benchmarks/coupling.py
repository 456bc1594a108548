"""Fields between two programs of a job against messages written by hand.

Half of the ranks are a solver, half a model. put + get: a field cut into rows here and into columns there, against
Isend and Irecv of the same boxes (packed and unpacked, as strided boxes must be) with mpi4py, also with a reduction
among the readers, without which a rank whose peer died leaves the others waiting. slowed: how long a
solver's step takes that puts every one into a "latest" link whose reader sleeps most of the time, and one that only
copies its block. memory: growth of the largest rank over 1,000 steps with two slots. Ranks beyond the cores measure the
scheduler: many short rounds, whose median says more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench, Unfit
from mpishard.layout import layout_of, plan_sources, plan_targets

FIRST = WORLD.rank < (WORLD.size + 1) // 2


class ByHand:
    """The boxes of one rank, as a program that knows them would send them."""

    def __init__(self, x: ms.ShardTensor, writer: ms.Layout, reader: ms.Layout, rank: int, start: int) -> None:
        shares = (plan_targets if FIRST else plan_sources)(writer, reader, rank)
        local = x.to_local().numpy()
        self.boxes = [local[tuple(slice(lo, hi) for lo, hi in s.box)] for s in shares]
        self.buffers = [np.empty(b.shape, b.dtype) for b in self.boxes]
        self.peers = [start + s.peer for s in shares]

    def __call__(self) -> None:
        if FIRST:
            for buffer, box in zip(self.buffers, self.boxes, strict=True):
                buffer[...] = box
            MPI.Request.Waitall([WORLD.Isend(b, p, 1) for b, p in zip(self.buffers, self.peers, strict=True)])
        else:
            MPI.Request.Waitall([WORLD.Irecv(b, p, 1) for b, p in zip(self.buffers, self.peers, strict=True)])
            for buffer, box in zip(self.buffers, self.boxes, strict=True):
                box[...] = buffer


def field(me: ms.insitu.Program, nbytes: int) -> ms.ShardTensor:
    mesh = ms.init_mesh((-1,), ("x",), comm=me.comm)
    columns = 256
    rows = me.programs["solver"] * nbytes // (4 * columns)
    return ms.zeros(rows, columns, mesh=mesh, placements=(ms.Shard(0 if FIRST else 1),))


def one_way(me: ms.insitu.Program, other: str, nbytes: int, bench: Bench) -> None:
    u = field(me, nbytes)
    ranks = me.programs
    writer = layout_of((ranks["solver"],), (ms.Shard(0),), u.shape)
    reader = layout_of((ranks["model"],), (ms.Shard(1),), u.shape)
    hand = ByHand(u, writer, reader, me.comm.rank, ranks["solver"] if FIRST else 0)
    link = me.connect(other, **{"out" if FIRST else "into": {"u": u}})
    ours = link.put if FIRST else link.get
    mine, least = np.zeros(4, np.int64), np.zeros(4, np.int64)

    def hand_and_agree() -> None:
        hand()
        if not FIRST:
            # whether a step is there for all ranks, and which: as `get` tells
            me.comm.Allreduce(mine, least, MPI.MIN)

    calls = {"ours": ours, "hand": hand, "hand, its readers agree": hand_and_agree}
    count = 3 if bench.quick else max(8, min(200, (1 << 26) // nbytes))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range((1 if bench.quick else 3) * bench.rounds + 1):
        for name, call in calls.items():
            WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(count):
                call()
            WORLD.Barrier()
            times[name].append((time.perf_counter() - start) / count)
    link.close()
    bench.add(
        f"put + get, {nbytes >> 10} KiB a rank", {who: t[1:] for who, t in times.items()}, floor="hand", nbytes=nbytes
    )


def slowed(me: ms.insitu.Program, other: str, bench: Bench) -> None:
    u = field(me, 1 << 20)
    block, kept = u.to_local(), torch.empty_like(u.to_local())
    a, dt, least = torch.rand(200, 200), np.ones(1), np.ones(1)
    steps = 10 if bench.quick else 60

    def run(leave: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            for _ in range(16):
                torch.mm(a, a)
            # a solver's ranks go in step without a link, too
            me.comm.Allreduce(dt, least, MPI.MIN)
            leave()
        return (time.perf_counter() - start) / steps

    times: dict[str, list[float]] = {"alone": [], "a copy of its block": [], "put": []}
    for _ in range(bench.rounds):
        link = me.connect(other, **{"out" if FIRST else "into": {"u": u}}, policy="latest")
        WORLD.Barrier()
        if FIRST:
            calls = (lambda: None, lambda: kept.copy_(block), link.put)
            for of_call, call in zip(times.values(), calls, strict=True):
                of_call.append(run(call))
        else:
            # it sleeps: what it would compute on cores of the solver's is not the link's
            for _ in link:
                time.sleep(0.05)
        link.close()
    bench.add("a solver's step, 1 MiB a rank, with a slow reader", WORLD.bcast(times), floor="alone")


def memory(me: ms.insitu.Program, other: str, bench: Bench) -> None:
    u = field(me, 1 << 20)
    link = me.connect(other, **{"out" if FIRST else "into": {"u": u}}, depth=2)
    sizes = []
    for step in range(100 if bench.quick else 1000):
        (link.put if FIRST else link.get)()
        if step in (50, 99, 999):
            with open("/proc/self/statm") as statm:
                sizes.append(int(statm.read().split()[1]) * 4096)
    link.close()
    grown = WORLD.allreduce(sizes[-1] - sizes[0], op=MPI.MAX)
    bench.figure("memory after the last step less that after 50", grown / 2**20, "MiB", "largest rank")


def run(bench: Bench) -> None:
    """Make two programs of the ranks, and compare."""
    if WORLD.size < 2:
        raise Unfit("two programs need two ranks, or more")
    me = ms.insitu.join("solver" if FIRST else "model")
    other = "model" if FIRST else "solver"
    for nbytes in (1 << 16,) if bench.quick else (1 << 16, 1 << 24):
        one_way(me, other, nbytes, bench)
    slowed(me, other, bench)
    memory(me, other, bench)
