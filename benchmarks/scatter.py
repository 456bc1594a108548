"""scatter_tensor: growth of resident memory on the source and elsewhere, against the size of a shard."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import torch
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench


def peak_mib() -> float:
    """Return the most resident memory since `forget`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def forget() -> None:
    """Let the peak be the present, where the kernel allows it; else what cases before this one took hides ours."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what earlier arrays freed, too
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def run(bench: Bench) -> None:
    """Scatter a tensor."""
    extent = 256 if bench.quick else 2048
    mesh = ms.init_mesh((-1,), ("d",))
    full = torch.randn(1, 16, extent, extent) if mesh.rank == 0 else None
    WORLD.Barrier()
    forget()
    before = peak_mib()
    x = ms.scatter_tensor(full, 0, mesh, (ms.Shard(2),))
    grown = peak_mib() - before
    what = f"scatter_tensor of 1x16x{extent}x{extent}"
    bench.figure(f"{what}: a shard", x.to_local().nbytes / 2**20, "MiB", "a shard")
    bench.figure(f"{what}: growth of the peak", WORLD.bcast(grown), "MiB", "source")
    elsewhere = WORLD.allreduce(grown if mesh.rank else 0.0, op=MPI.MAX)
    bench.figure(f"{what}: growth of the peak", elsewhere, "MiB", "elsewhere, at most")
