"""What a model in a simulation's time loop costs, against a program of torch and mpi4py written by hand.

The hand-written program has the same ghosted array, exchanges its ghost cells in place by persistent requests, runs
the first convolution on the whole array, and pads and exchanges the activations of the later layers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench


def by_hand(cart: MPI.Cartcomm, model: torch.nn.Sequential, u: np.ndarray, tau: np.ndarray) -> Callable[[], None]:
    """Write the model's step along the one dim that is cut; ghost cells beyond the domain are zeros."""
    lo, hi = cart.Shift(0, 1)
    requests = [
        cart.Recv_init(u[0], lo, 0),
        cart.Recv_init(u[-1], hi, 1),
        cart.Send_init(u[-2], hi, 0),
        cart.Send_init(u[1], lo, 1),
    ]
    field, out = torch.from_numpy(u)[None, None], torch.from_numpy(tau)[1:-1, 1:-1]

    def padded(x: torch.Tensor) -> torch.Tensor:
        sides = [x[:, :, :1].contiguous(), x[:, :, -1:].contiguous()]
        came = [torch.zeros_like(sides[0]), torch.zeros_like(sides[1])]
        cart.Sendrecv(sides[1].numpy(), hi, 2, came[0].numpy(), lo, 2)
        cart.Sendrecv(sides[0].numpy(), lo, 3, came[1].numpy(), hi, 3)
        x = F.pad(x, (1, 1, 1, 1))
        x[:, :, :1, 1:-1] = came[0]
        x[:, :, -1:, 1:-1] = came[1]
        return x

    def step() -> None:
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        with torch.no_grad():
            x = F.relu(F.conv2d(field, model[0].weight, model[0].bias))
            x = F.relu(F.conv2d(padded(x), model[2].weight, model[2].bias))
            x = F.conv2d(padded(x), model[4].weight, model[4].bias)
            out.copy_(x[0, 0])

    return step


def run(bench: Bench) -> None:
    """Compare a hook's parts, and a network in it."""
    side = 64 if bench.quick else 512
    cart = WORLD.Create_cart([WORLD.size, 1])
    sim = ms.insitu.adopt(cart, shape=(side * WORLD.size, side), halo=1, names=("y", "x"))
    arrays = [np.zeros((side + 2, side + 2), np.float32) for _ in range(3)]
    arrays[0][1:-1, 1:-1] = np.random.default_rng(WORLD.rank).random((side, side))
    u = sim.field("u", arrays[0])
    sim.field("tau", arrays[1])

    levels = [arrays[2], arrays[0]]

    def wrap() -> object:
        levels.reverse()
        u.rebind(levels[0])
        return u.tensor

    def another() -> object:
        sim.fields.pop("v", None)  # its name may be used again
        return sim.field("v", levels[0])

    def model(x: ms.ShardTensor) -> ms.ShardTensor:
        return x

    flag, most = np.zeros(1, np.int32), np.zeros(1, np.int32)

    def floor() -> None:
        cart.Allreduce(flag, most, MPI.MAX)

    count = 10 if bench.quick else 2000
    tensor, empty = u.tensor, sim.hook(model, ["u"])
    calls = {
        "wrap another array (rebind)": wrap,
        "wrap a field (like one before)": another,
        "exchange of ghost cells": u.exchange,
        "reduction of 4 bytes": floor,
    }
    bench.compare(f"{side}^2 a rank", calls, floor="reduction of 4 bytes", count=count)
    # what the hook does beside its model
    bench.compare(
        f"empty hook, {side}^2 a rank",
        {"model alone": lambda: model(tensor), "hook": empty},
        floor="model alone",
        count=count,
    )

    u.rebind(arrays[0])
    torch.manual_seed(0)
    cnn = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 1, 3, padding=1),
    )
    hook = sim.hook(cnn, ["u"], ["tau"], pack=lambda x: x[None, None], unpack=lambda y: y[0, 0])
    hand = by_hand(cart, cnn, arrays[0], arrays[1])
    hook()
    expected = arrays[1][1:-1, 1:-1].copy()
    hand()
    np.testing.assert_allclose(arrays[1][1:-1, 1:-1], expected, atol=1e-5)
    bench.compare(
        f"CNN of three layers, {side}^2 a rank",
        {"hook": hook, "hand": hand},
        floor="hand",
        count=2 if bench.quick else 5,
    )
    sim.release()
