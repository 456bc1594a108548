"""conv2d and conv3d, forward and backward: both our forms, a hand-written halo program, and the local convolution.

The floor is the local convolution of the same shard (no communication, so wrong at the borders). The program by hand
makes a padded copy, with numpy buffers and mpi4py. "chosen" is what a user gets; padded and zero-copy are its two
forms, where they can be told apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench
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


def steps(dims: int, extent: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Return everybody's step on a cube (or square) of ``extent`` cells, sharded along its first dim."""
    torch.manual_seed(0)
    full = torch.randn(1, CHANNELS, *[extent] * dims, dtype=dtype)
    kind, function = ((torch.nn.Conv2d, F.conv2d), (torch.nn.Conv3d, F.conv3d))[dims - 2]
    theirs, ours = (kind(CHANNELS, CHANNELS, 3, padding=1, dtype=dtype) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    ms.distribute_module(ours, ms.init_mesh((-1,), ("d",)))
    block = full.tensor_split(WORLD.size, 2)[WORLD.rank].clone().requires_grad_()
    total = full.numel()

    def sharded(cells: int) -> Callable[[], None]:
        before, rules.LARGE_CELLS = rules.LARGE_CELLS, cells
        x = ms.distribute_tensor(full, ms.init_mesh((-1,), ("d",)), (ms.Shard(2),)).requires_grad_()

        def step() -> None:
            x.grad = None
            ours.zero_grad(set_to_none=True)
            ours(x).mean().backward()

        step()  # the plan is made, and the form chosen, at the first call
        rules.LARGE_CELLS = before
        return step

    def hand() -> None:
        block.grad = None
        theirs.zero_grad(set_to_none=True)
        y = function(Halo.apply(block), theirs.weight, theirs.bias, padding=(0, *[1] * (dims - 1)))
        (y.sum() / total).backward()
        for p in theirs.parameters():
            WORLD.Allreduce(MPI.IN_PLACE, p.grad.numpy())

    def local() -> None:
        block.grad = None
        theirs.zero_grad(set_to_none=True)
        (function(block, theirs.weight, theirs.bias, padding=1).sum() / total).backward()

    calls = {"local": local, "hand": hand, "chosen": sharded(rules.LARGE_CELLS)}
    return calls if dims == 3 else {**calls, "padded": sharded(1 << 60), "zero-copy": sharded(0)}


def run(bench: Bench) -> None:
    """Compare at several extents."""
    for dims, dtype, extents in (
        (2, torch.float32, ((32, 2),) if bench.quick else ((128, 40), (512, 8), (1024, 3))),
        (2, torch.float64, () if bench.quick else ((512, 1),)),
        (3, torch.float32, ((8, 2),) if bench.quick else ((32, 5), (64, 1))),
        (3, torch.float64, () if bench.quick else ((32, 2), (64, 1))),
    ):
        name = "" if dtype is torch.float32 else f", {str(dtype).removeprefix('torch.')}"
        for extent, count in extents:
            bench.compare(
                f"conv{dims}d 3, {CHANNELS} channels, {extent}^{dims}{name}",
                steps(dims, extent, dtype),
                floor="local",
                count=count,
                dims=dims,
                extent=extent,
            )
