"""Checkpoints: how much a save in the background slows training, what a save costs, and its memory.

    mpiexec -n 2 python benchmarks/checkpoint.py --nbytes 1073741824 --folder /scratch

The training is of a small convolutional network, with a state beside of ``--nbytes`` that is saved. Steps run in
turns: some while nothing is saved, some while a save goes on in the background. Lines:

- steps that run while a save goes on, to steps that do not (1 is no slower); at most 1.1 is the aim;
- the time that `save_checkpoint` itself takes before training goes on, synchronous and asynchronous;
- the memory that a synchronous and an asynchronous save need above what the program holds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import timing
import torch
from torch import nn

import mpishard as ms

WORLD = timing.WORLD


def own_options() -> argparse.Namespace:
    """Return our own command line, and leave the common one to `timing`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nbytes", type=int, default=256 << 20, help="of the state, on all ranks (default 256 MiB)")
    parser.add_argument("--width", type=int, default=512, help="of the image that is trained on (default 512)")
    parser.add_argument("--folder", help="where files go (default: the system's temporary folder)")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return own


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
        return WORLD.allreduce(time.perf_counter() - start, op=timing.MPI.MAX)


def slowdown(training: Training, save, rounds: int) -> None:
    """Compare steps with and without a save in the background, in turns."""
    ratios, takes, counts, returns = [], [], [], []
    for _ in range(rounds):
        alone = [training.step() for _ in range(10)]
        WORLD.Barrier()
        start = time.perf_counter()
        saving = save(asynchronous=True)
        returns.append(WORLD.allreduce(time.perf_counter() - start, op=timing.MPI.MAX))
        during: list[float] = []
        while not WORLD.allreduce(int(saving.done()), op=timing.MPI.MIN):
            during.append(training.step())
        takes.append(time.perf_counter() - start)
        saving.wait()
        alone += [training.step() for _ in range(10)]
        if during:
            ratios.append(statistics.mean(during) / statistics.mean(alone))
            counts.append(len(during))
    if not ratios:
        timing.say("no step met a save: give a larger --nbytes or a smaller --width")
        return
    timing.say(
        f"steps during a save / steps without     {statistics.median(ratios):5.2f}x"
        f"   of {statistics.median(counts):.0f} steps of {statistics.median(alone) * 1e3:.0f} ms;"
        f" saves took {statistics.median(takes):.2f} s"
    )
    timing.say(f"save_checkpoint(asynchronous) returns in {statistics.median(returns) * 1e3:6.0f} ms")


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


def main() -> None:
    """Run all comparisons."""
    own = own_options()
    options = timing.options(__doc__)
    nbytes, width = (4 << 20, 64) if options.quick else (own.nbytes, own.width)
    folder = Path(WORLD.bcast(tempfile.mkdtemp(prefix="mpishard-bench-", dir=own.folder) if WORLD.rank == 0 else None))
    mesh = ms.init_mesh((-1,), ("y",))
    state = ms.rand(max(WORLD.size, nbytes // 4 // 4096), 4096, mesh=mesh, placements=(ms.Shard(0),))
    training = Training(mesh, width)
    step = 0

    def save(**how) -> ms.io.Saving:
        nonlocal step
        step += 1
        return ms.io.save_checkpoint(folder, step, model=training.model, tensors={"state": state}, keep=2, **how)

    timing.say(f"{nbytes / 2**20:.0f} MiB on {WORLD.size} ranks")
    try:
        for how in ("synchronous", "asynchronous"):
            for turn in range(2):
                with Peak() as peak:
                    save(asynchronous=how == "asynchronous").wait()
                most = max(WORLD.allgather(peak.nbytes))
                if turn:
                    timing.say(f"memory above the program's, {how:12s}   {most / 2**20:6.0f} MiB on a rank")
        seconds = timing.interleaved({"save": save}, 1, max(2, options.rounds // 3))["save"]
        timing.say(f"save_checkpoint takes                    {statistics.median(seconds) * 1e3:6.0f} ms")
        slowdown(training, save, options.rounds)
    finally:
        WORLD.Barrier()
        if WORLD.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
