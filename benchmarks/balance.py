"""What `ms.balance` gains where the cost of a cell depends on where it lies: a flame in one corner of the domain.

In each step a network reads the field, with the halos and sums that it needs, and the cells of the flame do
sub-steps of chemistry. The work of a rank is its processor time without that of its waits, so the figures hold
also where ranks share cores; the wall time of a step is shown beside, and only tells where they do not. Even and
balanced cuts take turns in one run. The ideal is the mean of the ranks' work: cuts at cells, and of whole slabs,
may not reach it.
"""

from __future__ import annotations

import time

import torch
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench
from mpishard.comm.wait_meter import WaitMeter

OPTIONS = {
    "cells": "along each of the two dims (default 384)",
    "substeps": "of a cell in the flame (default 60)",
}


def run(bench: Bench) -> None:
    """Balance, then compare even and balanced cuts."""
    n, steps = (48, 2) if bench.quick else (bench.setting("cells", 384), 5)
    substeps = bench.setting("substeps", 60)
    mesh = ms.init_mesh((-1, -1), ("y", "x"))
    placements = [ms.Shard(2), ms.Shard(3)]
    at = torch.arange(n) / n
    flame = ((at[:, None] - 0.1) ** 2 + (at - 0.2) ** 2 < 0.25**2)[None, None]
    even = [
        ms.randn(1, 4, n, n, mesh=mesh, placements=placements),
        ms.distribute_tensor(flame, mesh, placements),
    ]
    model = ms.distribute_module(torch.nn.Conv2d(4, 4, 3, padding=1), mesh)

    def step(field: ms.ShardTensor, burning: ms.ShardTensor) -> None:
        with torch.no_grad():
            y = model(field)
            cells = y.to_local()[burning.to_local().expand_as(y.to_local())]
            for _ in range(substeps):
                cells = cells + 0.01 * torch.tanh(cells) * torch.exp(-cells * cells)
            y.square().mean().full_tensor()

    balancer = ms.balance(mesh, every=steps, min_cells=2, clock=time.process_time)
    decisions = 3 if bench.quick else 12
    for _ in range(decisions * (steps + 1)):
        field, burning = balancer(*even)
        with balancer.step():
            step(field, burning)
    balanced = balancer(*even)

    meter = WaitMeter(time.process_time)

    def work(tensors: list[ms.ShardTensor]) -> float:
        meter.start()
        begun = time.process_time()
        for _ in range(steps):
            step(*tensors)
        return (time.process_time() - begun - meter.stop()) / steps

    before, after, ideal = [], [], []
    for _ in range(bench.rounds):
        for tensors, slowest in ((even, before), (balanced, after)):
            own = work(tensors)
            slowest.append(WORLD.allreduce(own, MPI.MAX))
            if tensors is even:
                ideal.append(WORLD.allreduce(own) / WORLD.size)
    what = f"work of the slowest rank in a step, {n} x {n} cells"
    bench.add(what, {"mean of the ranks": ideal, "even cuts": before, "balanced": after}, floor="mean of the ranks")
    gained = [100 * (b - a) / (b - i) if b > i else 100.0 for b, a, i in zip(before, after, ideal)]
    bench.figure(f"of the ideal gain, after {balancer.changes} changes", gained, "%")
    calls = {"even cuts": lambda: step(*even), "balanced": lambda: step(*balanced)}
    bench.compare(f"a step, {n} x {n} cells", calls, floor="even cuts", count=steps)
