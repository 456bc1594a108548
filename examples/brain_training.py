"""How the brain is segmented, in ordinary torch: nothing here knows whether a tensor is sharded.

Run as a program, it does a few steps on whole tensors in this one process, without mpishard or MPI, and saves
what came out: what segment_brain.py compares itself with.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from unet import UNet

TISSUES = ("gm", "wm")
VOXELS = (0, 2, 3, 4)
PRIOR = 0.05


class Step(NamedTuple):
    """What a training step reports."""

    loss: float
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=int, default=8, help="channels of the U-Net at full resolution")
    parser.add_argument("--levels", type=int, default=4, help="resolutions of the U-Net")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in backward: less memory")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--amp", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--seed", type=int, default=0)


def make_model(args: argparse.Namespace) -> UNet:
    torch.manual_seed(args.seed)
    model = UNet(1, len(TISSUES), base=args.base, levels=args.levels, prior=PRIOR, recompute=args.recompute)
    # a CPU convolves this format several times faster where there are few channels
    return model.to(getattr(torch, args.dtype), memory_format=torch.channels_last_3d)


def autocast(args: argparse.Namespace, device: torch.device):
    return torch.autocast(device.type, torch.bfloat16) if args.amp else nullcontext()


def loss_of(logits: Tensor, truth: Tensor) -> Tensor:
    """Cross entropy, plus what the soft Dice coefficient of the tissues lacks to 1."""
    logits = logits.to(truth.dtype)
    p = torch.sigmoid(logits)
    overlap = 2 * (p * truth).sum(VOXELS) / ((p * p).sum(VOXELS) + (truth * truth).sum(VOXELS))
    return F.binary_cross_entropy_with_logits(logits, truth) + 1 - overlap.mean()


def dice(p: Tensor, truth: Tensor) -> Tensor:
    """Dice coefficient of each tissue: twice what both call tissue, over what either does."""
    p, truth = (p > 0.5).to(truth.dtype), (truth > 0.5).to(truth.dtype)
    return 2 * (p * truth).sum(VOXELS) / (p.sum(VOXELS) + truth.sum(VOXELS))


def adam(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return Adam and its rates, for so few steps that each has to count.

    Kernels move relative to their own size, the head and the norms by more.
    """
    groups = []
    for name, p in model.named_parameters():
        kernel = p.ndim > 1 and not name.startswith("head")
        rate = 0.2 * p.detach().std().item() if kernel else 0.12 if name.startswith("head") else 0.03
        groups.append({"params": [p], "lr": rate})
    optimizer = torch.optim.Adam(groups, betas=(0.85, 0.95))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 4, 2 * (steps - step) / steps)
    )


def train(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rates: torch.optim.lr_scheduler.LRScheduler,
    x: Tensor,
    truth: Tensor,
    steps: int,
) -> Iterator[Step]:
    for _ in range(steps):
        start = time.perf_counter()
        with autocast(args, x.device):
            loss = loss_of(model(x), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        yield Step(loss.item(), time.perf_counter() - start)


def trace(args: argparse.Namespace, model: nn.Module, x: Tensor, truth: Tensor, steps: int) -> dict[str, list[Tensor]]:
    """Do a few steps and return every loss, every gradient and the last parameters, for comparison.

    The steps are plain gradient descent: Adam divides a gradient by its size, and so makes a whole step of the
    rounding error of one that is nearly zero.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    out: dict[str, list[Tensor]] = {"loss": [], "gradient": [], "parameter": []}
    for _ in range(steps):
        with autocast(args, x.device):
            loss = loss_of(model(x), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out["loss"].append(torch.tensor(loss.item(), dtype=torch.float64))
        out["gradient"] += [p.grad.detach().cpu().clone() for p in model.parameters()]
    out["parameter"] = [p.detach().cpu().clone() for p in model.parameters()]
    return out


def largest_difference(mine: list[Tensor], reference: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, each relative to the reference's largest element."""
    return max(
        ((a.double() - b).abs().max() / b.abs().max().clamp_min(torch.finfo(b.dtype).tiny)).item()
        for a, b in zip(mine, reference, strict=True)
    )


def return_freed_memory() -> None:
    """Have glibc give every freed array back: of those below 32 MB it keeps many, in a heap full of gaps."""
    threshold = -3  # M_MMAP_THRESHOLD
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(threshold, 1 << 20)


def peak_nbytes() -> int:
    """Return the largest resident memory that this process ever had."""
    try:
        # not ru_maxrss: after a fork it begins with that of the parent
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    except OSError:
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description="A few steps in one process, without mpishard.")
    add_arguments(parser)
    parser.add_argument("data", help="the HDF5 file with the volumes")
    parser.add_argument("result", help="what to write")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    import h5py

    return_freed_memory()
    baseline = peak_nbytes()
    with h5py.File(args.data, "r") as f:
        t1, *maps = (
            torch.from_numpy(f[name][:]).to(args.device, getattr(torch, args.dtype)) for name in ("t1", *TISSUES)
        )
    x, truth = t1[None, None], torch.stack(maps)[None]
    model = make_model(args).to(args.device)
    start = time.perf_counter()
    result = trace(args, model, x, truth, args.steps)
    seconds = (time.perf_counter() - start) / args.steps
    torch.save({**result, "seconds": seconds, "peak_nbytes": peak_nbytes() - baseline}, args.result)


if __name__ == "__main__":
    main()
