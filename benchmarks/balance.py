"""What `ms.balance` gains where the cost of a cell depends on where it lies: a flame in one corner of the domain.

mpiexec -n 2 python benchmarks/balance.py
mpiexec -n 4 python benchmarks/balance.py

In each step a network reads the field, with the halos and sums that it needs, and the cells of the flame do
sub-steps of chemistry. The work of a rank is its processor time without that of its waits, so the figures hold
also where ranks share cores; the wall time of a step is shown beside, and only tells where they do not. Even and
balanced cuts take turns in one run. The ideal is the mean of the ranks' work: cuts at cells, and of whole slabs,
may not reach it.
"""

from __future__ import annotations

import statistics
import time

import torch
from mpi4py import MPI
from timing import WORLD, interleaved, parsed, parser, ratio, say

import mpishard as ms
from mpishard.comm.wait_meter import WaitMeter


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument("--cells", type=int, default=384, help="along each of the two dims (default 384)")
    command_line.add_argument("--substeps", type=int, default=60, help="of a cell in the flame (default 60)")
    args = parsed(command_line)
    n, steps = (48, 2) if args.quick else (args.cells, 5)
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
            for _ in range(args.substeps):
                cells = cells + 0.01 * torch.tanh(cells) * torch.exp(-cells * cells)
            y.square().mean().full_tensor()

    balancer = ms.balance(mesh, every=steps, min_cells=2, clock=time.process_time)
    decisions = 3 if args.quick else 12
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
    for _ in range(args.rounds):
        for tensors, slowest in ((even, before), (balanced, after)):
            own = work(tensors)
            slowest.append(WORLD.allreduce(own, MPI.MAX))
            if tensors is even:
                ideal.append(WORLD.allreduce(own) / WORLD.size)
    reached = statistics.median((b - a) / (b - i) if b > i else 1.0 for b, a, i in zip(before, after, ideal))
    say(f"{WORLD.size} ranks, mesh {mesh.shape}, {n} x {n} cells")
    say(f"{balancer.changes} changes, to blocks of {balancer.sizes}")
    for name, values in (("even cuts", before), ("balanced", after), ("ideal", ideal)):
        say(f"{name:<12}{1e3 * statistics.median(values):>9.2f} ms of work a step on the slowest rank")
    say(f"{100 * reached:.0f} % of the ideal gain (median of {args.rounds} rounds)")
    times = interleaved({"even": lambda: step(*even), "balanced": lambda: step(*balanced)}, steps, args.rounds)
    say(f"wall time of a step, balanced over even: {ratio(times, 'balanced', 'even'):.2f}")


if __name__ == "__main__":
    main()
