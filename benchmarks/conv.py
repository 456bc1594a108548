"""conv2d 3x3, forward and backward: a ShardTensor, a hand-written halo program, and the local convolution.

mpiexec -n 2 python benchmarks/conv.py

Columns: milliseconds of the local convolution of the same shard (no communication, so wrong at the borders: the
floor), and the ratios to it of the hand-written program (padded copy, numpy buffers, mpi4py) and of mpishard in
both its forms.
"""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from mpi4py import MPI
from timing import WORLD, interleaved, options, ratio, say

import mpishard as ms
from mpishard.ops.window import conv as rules

CHANNELS = 8


class Halo(torch.autograd.Function):
    """One row from each neighbour along dim 2, as users write it by hand."""

    @staticmethod
    def forward(ctx, x):
        lo, hi = exchanged(x[:, :, :1].contiguous(), x[:, :, -1:].contiguous())
        return torch.cat([lo, x, hi], 2)

    @staticmethod
    def backward(ctx, g):
        lo, hi = exchanged(g[:, :, :1].contiguous(), g[:, :, -1:].contiguous())
        out = g[:, :, 1:-1].clone()
        out[:, :, :1] += lo
        out[:, :, -1:] += hi
        return out


def exchanged(first, last):
    rank, size = WORLD.rank, WORLD.size
    lo, hi = torch.zeros_like(first), torch.zeros_like(last)
    requests = []
    if rank > 0:
        requests += [WORLD.Irecv(lo.numpy(), rank - 1, 1), WORLD.Isend(first.numpy(), rank - 1, 2)]
    if rank < size - 1:
        requests += [WORLD.Irecv(hi.numpy(), rank + 1, 2), WORLD.Isend(last.numpy(), rank + 1, 1)]
    MPI.Request.Waitall(requests)
    return lo, hi


def main() -> None:
    args = options(__doc__)
    mesh = ms.init_mesh((-1,), ("d",))
    say(f"{WORLD.size} ranks\n{'size':>8}{'local ms':>10}{'hand':>8}{'padded':>8}{'zero-copy':>11}{'chosen':>11}")
    for extent, count in ((32, 2),) if args.quick else ((128, 40), (512, 8), (1024, 3)):
        torch.manual_seed(0)
        full = torch.randn(1, CHANNELS, extent, extent)
        theirs = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        ours = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        ours.load_state_dict(theirs.state_dict())
        ms.distribute_module(ours, mesh)
        block = full.chunk(WORLD.size, 2)[WORLD.rank].clone().requires_grad_()

        def sharded(cells, ours=ours, full=full):
            rules.LARGE_CELLS = cells
            x = ms.distribute_tensor(full, ms.init_mesh((-1,), ("d",)), (ms.Shard(2),)).requires_grad_()

            def step():
                x.grad = None
                ours.zero_grad(set_to_none=True)
                ours(x).mean().backward()

            step()  # the plan is made, and the form chosen, at the first call
            return step

        def hand(theirs=theirs, block=block, total=full.numel()):
            block.grad = None
            theirs.zero_grad(set_to_none=True)
            y = F.conv2d(Halo.apply(block), theirs.weight, theirs.bias, padding=(0, 1))
            (y.sum() / total).backward()
            for p in theirs.parameters():
                WORLD.Allreduce(MPI.IN_PLACE, p.grad.numpy())

        def local(theirs=theirs, block=block, total=full.numel()):
            block.grad = None
            theirs.zero_grad(set_to_none=True)
            (F.conv2d(block, theirs.weight, theirs.bias, padding=1).sum() / total).backward()

        chosen = rules.LARGE_CELLS
        calls = {"local": local, "hand": hand, "padded": sharded(1 << 60), "zero-copy": sharded(0)}
        rules.LARGE_CELLS = chosen
        times = interleaved(calls, count, args.rounds)
        form = "zero-copy" if full.numel() // WORLD.size >= chosen else "padded"
        row = "".join(
            f"{ratio(times, name, 'local'):>{w}.2f}" for name, w in (("hand", 8), ("padded", 8), ("zero-copy", 11))
        )
        say(f"{extent:>7}^2{1e3 * statistics.median(times['local']):>9.2f}{row}{form:>11}")


if __name__ == "__main__":
    main()
