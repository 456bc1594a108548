"""scatter_tensor: growth of resident memory on the source and elsewhere, against the size of a shard.

mpiexec -n 3 python benchmarks/scatter.py
"""

from __future__ import annotations

import resource

import torch
from mpi4py import MPI
from timing import WORLD, options, say

import mpishard as ms


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    args = options(__doc__)
    extent = 256 if args.quick else 2048
    mesh = ms.init_mesh((-1,), ("d",))
    full = torch.randn(1, 16, extent, extent) if mesh.rank == 0 else None
    WORLD.Barrier()
    before = peak_mib()
    x = ms.scatter_tensor(full, 0, mesh, (ms.Shard(2),))
    grown = peak_mib() - before
    shard = x.to_local().nbytes / 2**20
    elsewhere = WORLD.allreduce(grown if mesh.rank else 0.0, op=MPI.MAX)
    say(f"{WORLD.size} ranks, shards of {shard:.0f} MiB")
    say(f"growth: source {grown:.0f} MiB, elsewhere at most {elsewhere:.0f} MiB")


if __name__ == "__main__":
    main()
