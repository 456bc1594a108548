"""What a ShardTensor adds to an operation on a tiny tensor: the column above torch."""

from __future__ import annotations

import torch

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench


def run(bench: Bench) -> None:
    """Compare operations on 512 cells a rank with torch's."""
    count = 20 if bench.quick else 2000
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

    def report(name, operation):
        bench.compare(
            name, {"torch": lambda: operation(local), "ours": lambda: operation(x)}, floor="torch", count=count
        )

    with torch.no_grad():
        for name, operation in operations.items():
            report(name, operation)
    local.requires_grad_()
    x.requires_grad_()
    report("x * x, grad", operations["x * x"])
    mesh.free()
