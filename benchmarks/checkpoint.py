"""Checkpoints: how much a save in the background slows training, what a save costs, and its memory.

The training is of a small convolutional network, with a state beside of ``nbytes`` that is saved. Steps run in
turns: some while nothing is saved, some while a save goes on in the background. Give the command a --folder on the file
system that you mean to use. Figures:

- steps that run while a save goes on, to steps that do not (1 is no slower); at most 1.1 is the aim;
- the time that `save_checkpoint` itself takes before training goes on, synchronous and asynchronous;
- the memory that a synchronous and an asynchronous save need above what the program holds.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path

import torch
from mpi4py import MPI
from torch import nn

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench

OPTIONS = {
    "nbytes": "of the state, on all ranks (default 256 MiB)",
    "width": "of the image that is trained on (default 512)",
}


class Training:
    """Steps of a small network on a sharded image."""

    def __init__(self, mesh: ms.CartMesh, width: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(4, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.SiLU()]
        self.model = ms.distribute_module(nn.Sequential(*layers, nn.Conv2d(16, 4, 1)), mesh)
        self.x = ms.rand(1, 4, width, width, mesh=mesh, placements=(ms.Shard(2),))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self) -> float:
        """Do a step, and return its time on the slowest rank."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        (self.model(self.x) - self.x).square().mean().backward()
        self.optimizer.step()
        return WORLD.allreduce(time.perf_counter() - start, op=MPI.MAX)


def slowdown(bench: Bench, training: Training, save) -> None:
    """Compare steps with and without a save in the background, in turns."""
    ratios, takes, counts, returns = [], [], [], []
    for _ in range(bench.rounds):
        alone = [training.step() for _ in range(10)]
        WORLD.Barrier()
        start = time.perf_counter()
        saving = save(asynchronous=True)
        returns.append(WORLD.allreduce(time.perf_counter() - start, op=MPI.MAX))
        during: list[float] = []
        while not WORLD.allreduce(int(saving.done()), op=MPI.MIN):
            during.append(training.step())
        takes.append(time.perf_counter() - start)
        saving.wait()
        alone += [training.step() for _ in range(10)]
        if during:
            ratios.append(statistics.mean(during) / statistics.mean(alone))
            counts.append(len(during))
    bench.figure("save_checkpoint(asynchronous) returns in", returns, "s")
    if not ratios:
        bench.failed("steps during a save", "ours", "no step met one: set a larger nbytes or a smaller width")
        return
    bench.figure("steps during a save", WORLD.bcast(ratios), "of a step without")
    bench.figure("steps that met a save", counts, "steps")
    bench.figure("a save in the background takes", WORLD.bcast(takes), "s")


class Peak:
    """The largest resident memory above that at the start, of a ``with`` block."""

    def __enter__(self) -> Peak:
        self.nbytes, self._stop = 0, threading.Event()
        self._start = resident()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.nbytes = max(self.nbytes, resident() - self._start)

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def resident() -> int:
    """Return the resident memory of this process that is its own, not a file's."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def run(bench: Bench) -> None:
    """Run all comparisons."""
    quick = bench.quick
    nbytes, width = (4 << 20, 64) if quick else (bench.setting("nbytes", 256 << 20), bench.setting("width", 512))
    mesh = ms.init_mesh((-1,), ("y",))
    state = ms.rand(max(WORLD.size, nbytes // 4 // 4096), 4096, mesh=mesh, placements=(ms.Shard(0),))
    training = Training(mesh, width)
    step = 0

    def save(**how) -> ms.io.Saving:
        nonlocal step
        step += 1
        return ms.io.save_checkpoint(bench.folder, step, model=training.model, tensors={"state": state}, keep=2, **how)

    for how in ("synchronous", "asynchronous"):
        for turn in range(2):
            with Peak() as peak:
                save(asynchronous=how == "asynchronous").wait()
            most = max(WORLD.allgather(peak.nbytes))
            if turn:
                bench.figure(f"memory above the program's, {how}", most / 2**20, "MiB", "largest rank")
    bench.compare(
        f"save_checkpoint of {nbytes / 2**20:.0f} MiB",
        {"a step": training.step, "save": save},
        floor="a step",
        count=1,
        rounds=max(2, bench.rounds // 3),
    )
    slowdown(bench, training, save)
