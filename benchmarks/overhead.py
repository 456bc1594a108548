"""What a ShardTensor adds to an operation on a tiny tensor, in microseconds above plain torch.

mpiexec -n 1 python benchmarks/overhead.py
"""

from __future__ import annotations

import statistics

import torch
from timing import WORLD, interleaved, options, say

import mpishard as ms


def main() -> None:
    args = options(__doc__)
    count = 20 if args.quick else 2000
    mesh = ms.init_mesh((-1,), ("d",))
    local = torch.randn(1, 8, 8, 8)
    x = ms.distribute_tensor(torch.randn(1, 8, 8 * WORLD.size, 8), mesh, (ms.Shard(2),))
    operations = {
        "x + 1": lambda t: t + 1.0,
        "x * x": lambda t: t * t,
        "gelu": torch.nn.functional.gelu,
        "shape": lambda t: t.shape,
        "permute": lambda t: t.permute(0, 2, 3, 1),
        "sum(1)": lambda t: t.sum(1),
    }
    say(f"{WORLD.size} ranks, blocks of {tuple(local.shape)}")
    say(f"{'operation':<12}{'torch us':>10}{'added us':>10}")
    with torch.no_grad():
        for name, operation in operations.items():
            report(name, operation, local, x, count, args.rounds)
    report("x * x, grad", operations["x * x"], local.requires_grad_(), x.requires_grad_(), count, args.rounds)


def report(name, operation, local, x, count, rounds) -> None:
    times = interleaved({"torch": lambda: operation(local), "ours": lambda: operation(x)}, count, rounds)
    added = statistics.median(a - b for a, b in zip(times["ours"], times["torch"]))
    say(f"{name:<12}{1e6 * statistics.median(times['torch']):>10.1f}{1e6 * added:>10.1f}")


if __name__ == "__main__":
    main()
