"""How every benchmark here takes its times: interleaved rounds in one run, the slowest rank, medians of ratios."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line that every benchmark has."""
    out = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--quick", action="store_true", help="few repetitions, small sizes")
    out.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    return out


def parsed(command_line: argparse.ArgumentParser) -> argparse.Namespace:
    """Return what the command line says; torch computes with one thread a rank."""
    torch.set_num_threads(1)
    args = command_line.parse_args()
    if args.quick:
        args.rounds = 2
    return args


def options(description: str | None) -> argparse.Namespace:
    """Return the command line: ``--quick`` for a run that only shows that the benchmark works."""
    return parsed(parser(description))


def seconds(call: Callable[[], object], count: int) -> float:
    """Return the mean time of ``count`` calls on the slowest rank."""
    WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return WORLD.allreduce((time.perf_counter() - start) / count, op=MPI.MAX)


def interleaved(
    calls: Mapping[str, Callable[[], object]], count: int, rounds: int, tidy: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Time every call once per round, so that a busy moment of the machine meets all of them; ``tidy`` goes before."""
    for call in calls.values():
        for _ in range(max(2, count // 10)):
            tidy()
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            tidy()
            times[name].append(seconds(call, count))
    return times


def ratio(times: Mapping[str, list[float]], name: str, floor: str) -> float:
    """Return the median over rounds of the ratio of two calls of the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[floor]))


def say(*parts: object) -> None:
    """Print on rank 0."""
    if WORLD.rank == 0:
        print(*parts, flush=True)
