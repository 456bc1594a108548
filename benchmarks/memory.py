"""What each way to fit a model costs at batch size one: memory of a rank, and time of a training step.

The most bytes of tensors alive on a rank in a step (activations, gradients, whole parameters that are
gathered) beside the parameters and Adam's state that it holds all the time; a step (forward, backward, Adam) and its
ratio to one process, where each rank computes the whole alone. What is kept "on the host" counts where the device is
the host.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mpishard as ms
from benchmarks.harness.measure import WORLD

KEPT = [torch.ops.aten.convolution.default]


class Residual(nn.Module):
    """Two convolutions with norms, beside the identity; computed again in backward as ``again`` says."""

    def __init__(self, width, again=None):
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width),
        )  # fmt: skip
        self.again = again

    def forward(self, x):
        if self.again is None:
            return F.gelu(x + self.inside(x))
        return F.gelu(x + checkpoint(self.inside, x, use_reentrant=False, **self.again))


def network(width, depth, again=None):
    torch.manual_seed(0)
    return nn.Sequential(*[Residual(width, again) for _ in range(depth)])


def run(bench):
    """Measure bytes and time of each way."""
    width, depth, extent = (8, 2, 32) if bench.quick else (16, 6, 96)
    depth = max(depth, WORLD.size)  # no stage without a block
    torch.manual_seed(1)
    full, target = torch.randn(2, 1, width, extent, extent).unbind(0)
    selective = {"context_fn": functools.partial(create_selective_checkpoint_contexts, KEPT)}
    space = ms.init_mesh((-1,), ("y",))
    line = ms.init_mesh((-1,), ("stage",))
    x, t = (ms.distribute_tensor(v, space, [ms.Shard(2)]) for v in (full, target))
    models, calls = {}, {}

    def add(name, model, forward_backward):
        optimizer = torch.optim.Adam(model.parameters())

        def step():
            optimizer.zero_grad()
            forward_backward()
            optimizer.step()

        models[name], calls[name] = (model, optimizer, forward_backward), step

    def plain(name, again=None, around=None):
        model = network(width, depth, again)

        def run():
            with around() if around else torch.enable_grad():
                loss = F.mse_loss(model(full), target)
            loss.backward()

        add(name, model, run)

    def sharded(name, again=None, **how):
        model = ms.distribute_module(network(width, depth, again), space, **how)
        add(name, model, lambda: F.mse_loss(model(x), t).backward())

    plain("one process")
    plain("one process, checkpoints", {})
    plain("one process, selective checkpoints (convolutions kept)", selective)
    plain("one process, saved on the host", around=save_on_cpu)
    sharded(f"space over {WORLD.size} ranks")
    sharded(f"space over {WORLD.size} ranks, checkpoints", {})
    sharded(f"space and parameters over {WORLD.size} ranks", shard_parameters="y")
    sharded(f"space and parameters over {WORLD.size} ranks, checkpoints", {}, shard_parameters="y")
    blocks = list(network(width, depth))
    borders = [depth * i // line.size for i in range(line.size + 1)]
    stages = [nn.Sequential(*blocks[a:b]) for a, b in zip(borders, borders[1:])]
    pipe = ms.Pipeline(stages, line, "stage")
    add(f"pipeline of {WORLD.size} stages", pipe, lambda: pipe.step(full, target, F.mse_loss))

    what = f"step, {depth} blocks of {width}, {extent}^2"
    bench.compare(what, calls, floor="one process", count=1)
    for name, (model, optimizer, forward_backward) in models.items():
        optimizer.zero_grad()
        with ms.testing.LiveMemory() as live:
            forward_backward()
        memory = ms.parameter_memory(model, optimizer)
        held = memory["parameters"] + memory["optimizer"]
        held, peak = (max(WORLD.allgather(n)) / 1e6 for n in (held, live.peak))
        bench.figure(f"{what}: parameters and Adam", held, "MB", name)
        bench.figure(f"{what}: most in a step", peak, "MB", name)
