"""Fields between two programs of a job against messages written by hand.

mpiexec -n 4 python benchmarks/coupling.py

Half of the ranks are a solver, half a model. put + get: a field cut into rows here and into columns there, against
Isend and Irecv of the same boxes (packed and unpacked, as strided boxes must be) with mpi4py. slowed: how much longer a
solver's step takes that puts every one into a "latest" link whose reader is slow. memory: growth of the largest rank
over 1,000 steps with two slots. Ranks beyond the cores measure the scheduler.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from mpi4py import MPI
from timing import WORLD, options, say

import mpishard as ms
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
    rows = 2 * nbytes // (4 * columns)
    return ms.zeros(rows, columns, mesh=mesh, placements=(ms.Shard(0 if FIRST else 1),))


def one_way(me: ms.insitu.Program, other: str, nbytes: int, args: argparse.Namespace) -> None:
    u = field(me, nbytes)
    ranks = me.programs
    writer = layout_of((ranks["solver"],), (ms.Shard(0),), u.shape)
    reader = layout_of((ranks["model"],), (ms.Shard(1),), u.shape)
    hand = ByHand(u, writer, reader, me.comm.rank, ranks["solver"] if FIRST else 0)
    link = me.connect(other, **{"out" if FIRST else "into": {"u": u}})
    ours = link.put if FIRST else link.get
    count = 3 if args.quick else max(20, min(2000, (1 << 28) // nbytes // 4))
    times: dict[str, list[float]] = {"ours": [], "hand": []}
    for _ in range(args.rounds + 1):
        for name, call in (("ours", ours), ("hand", hand)):
            WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(count):
                call()
            WORLD.Barrier()
            times[name].append((time.perf_counter() - start) / count)
    link.close()
    ratio = statistics.median(a / b for a, b in zip(times["ours"][1:], times["hand"][1:], strict=True))
    columns = "".join(f"{1e6 * statistics.median(t[1:]):>12.1f}" for t in times.values())
    say(f"{nbytes >> 10:>8} KiB a rank{columns}{ratio:>10.2f}")


def slowed(me: ms.insitu.Program, other: str, args: argparse.Namespace) -> None:
    u = field(me, 1 << 20)
    a = torch.rand(200, 200)
    steps = 10 if args.quick else 200

    def run(link: ms.insitu.Link | None) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            for _ in range(4):
                torch.mm(a, a)
            if link is not None:
                link.put()
        return (time.perf_counter() - start) / steps

    ratios = []
    for _ in range(args.rounds):
        link = me.connect(other, **{"out" if FIRST else "into": {"u": u}}, policy="latest")
        WORLD.Barrier()
        if FIRST:
            alone = run(None)
            ratios.append(run(link) / alone)
        else:
            for _ in link:
                time.sleep(0.05)
        link.close()
    say(f"a solver with a slow reader takes {statistics.median(ratios or [0]):.3f} of its time alone")


def memory(me: ms.insitu.Program, other: str, args: argparse.Namespace) -> None:
    u = field(me, 1 << 20)
    link = me.connect(other, **{"out" if FIRST else "into": {"u": u}}, depth=2)
    sizes = []
    for step in range(100 if args.quick else 1000):
        (link.put if FIRST else link.get)()
        if step in (50, 99, 999):
            with open("/proc/self/statm") as statm:
                sizes.append(int(statm.read().split()[1]) * 4096)
    link.close()
    grown = WORLD.allreduce(sizes[-1] - sizes[0], op=MPI.MAX)
    say(f"memory after the last step less that after 50, largest rank: {grown / 2**20:.2f} MiB")


def main() -> None:
    args = options(__doc__)
    me = ms.insitu.join("solver" if FIRST else "model")
    other = "model" if FIRST else "solver"
    say(
        f"put + get, {me.programs['solver']} + {me.programs['model']} ranks\n"
        f"{'':>18}{'ours us':>13}{'hand us':>12}{'/ hand':>10}"
    )
    for nbytes in (1 << 16,) if args.quick else (1 << 16, 1 << 24):
        one_way(me, other, nbytes, args)
    slowed(me, other, args)
    memory(me, other, args)


if __name__ == "__main__":
    main()
