"""Pairs of calls that ranks make differently, one after the other; run under an MPI launcher of 3 ranks.

``python -m tests.failure.mismatched SEED FIRST COUNT NOTES``: the pairs FIRST to FIRST + COUNT - 1 of a seed. All
plans are made first, so that nothing but the calls themselves can tell. A pair that ends the job is the last one: what
is written to the file NOTES says which it was.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mpi4py import MPI

import mpishard as ms

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
# Kinds of calls; what a call is named by, besides: how large, and of which dtype.
SIZES, BITS = (3, 5), (32, 64)
RANKS = 3
# How long a rank with an error waits for the others, and how it ends the job then.
GRACE_S, ENDED = 0.5, 77


def plain(n: int, bits: int) -> torch.Tensor:
    """What only this rank, size and dtype has."""
    return torch.arange(1, 1 + SIZE * n).to(getattr(torch, f"float{bits}")) * (1 + RANK) + n + bits


def field(mesh: Any, n: int, bits: int, rows: int = 5) -> Any:
    block = torch.arange(float(rows * 6)).view(1, 1, rows, 6).to(getattr(torch, f"float{bits}"))
    return ms.ShardTensor.from_local(block * (RANK + 2) + n + bits, mesh, (ms.Shard(2),))


Ready = Callable[[], torch.Tensor]


def backward(mesh: Any, n: int, bits: int) -> Ready:
    whole = field(mesh, n, bits)

    def run() -> torch.Tensor:
        x = whole.detach().requires_grad_()
        F.avg_pool2d(x, n, 1, n // 2).square().to_local().sum().backward()
        return x.grad.to_local()

    return run


def exchanger(mesh: Any, n: int, bits: int) -> Ready:
    u = plain(n, bits).numpy().repeat(4)
    exchange = ms.HaloExchanger(mesh, u.shape, n - 2, u.dtype)

    def run() -> torch.Tensor:
        exchange(u)
        return torch.from_numpy(np.array(u))

    return run


def attention(mesh: Any, n: int, bits: int) -> Ready:
    x = torch.linspace(0, 1, 2 * 4 * n).view(1, 2, n, 4).to(getattr(torch, f"float{bits}")) * (RANK + 1)
    q = ms.ShardTensor.from_local(x, mesh, (ms.Shard(2),))

    def run() -> torch.Tensor:
        with ms.attention_method("ring"):
            return F.scaled_dot_product_attention(q, q, q).to_local()

    return run


def on_field(call: Callable[[Any, int], torch.Tensor], rows: int | None = 5) -> Callable[[Any, int, int], Ready]:
    """A call of a sharded tensor, which is made before; ``rows`` of it on every rank, None: as the size says."""

    def ready(mesh: Any, n: int, bits: int) -> Ready:
        x = field(mesh, n, bits, n if rows is None else rows)
        return lambda: call(x, n)

    return ready


def on_plain(call: Callable[[torch.Tensor, Any, int], torch.Tensor]) -> Callable[[Any, int, int], Ready]:
    def ready(mesh: Any, n: int, bits: int) -> Ready:
        x = plain(n, bits)
        return lambda: call(x, mesh, n)

    return ready


def ring(x: torch.Tensor, mesh: Any, _: int) -> torch.Tensor:
    return ms.send_recv(x, mesh, dest=(RANK + 1) % SIZE, source=(RANK - 1) % SIZE)


def convolution(x: Any, n: int) -> torch.Tensor:
    return F.conv2d(x, torch.ones(1, 1, n, n, dtype=x.dtype), padding=n // 2).to_local()


EXCHANGES: dict[str, Callable[[Any, int, int], Ready]] = {
    "conv2d": on_field(convolution),
    "backward of avg_pool2d": backward,
    "halo_exchange": on_field(lambda x, n: ms.halo_exchange(x, {2: n - 2}, mode="circular")),
    "one-sided halo": on_field(lambda x, _: ms.halo_exchange(x, {2: (0, 1)}, mode="zeros")),
    "HaloExchanger": exchanger,
    "ring attention": attention,
    "send_recv": on_plain(ring),
    "shift": on_plain(lambda x, mesh, n: ms.shift(x, mesh, 0, n - 4)),
    "roll": on_field(lambda x, n: x.roll(n, 2).to_local()),
}
COLLECTIVES: dict[str, Callable[[Any, int, int], Ready]] = {
    "all_reduce": on_plain(lambda x, mesh, _: ms.all_reduce(x, mesh)),
    "all_reduce max": on_plain(lambda x, mesh, _: ms.all_reduce(x, mesh, op="max")),
    "all_gather": on_plain(lambda x, mesh, _: ms.all_gather(x, mesh)),
    "reduce_scatter": on_plain(lambda x, mesh, _: ms.reduce_scatter(x, mesh)),
    "broadcast": on_plain(lambda x, mesh, n: ms.broadcast(x, mesh, root=n % SIZE)),
    "redistribute": on_field(lambda x, _: x.redistribute(placements=(ms.Shard(3),)).to_local(), None),
    "full_tensor": on_field(lambda x, _: x.full_tensor(), None),
    "sum": on_field(lambda x, _: x.sum((0, 1, 2)).full_tensor()),
}
CALLS = EXCHANGES | COLLECTIVES
Call = tuple[str, int, int]
Pair = tuple[Call, Call, int]


def pairs(seed: int) -> list[Pair]:
    """Every pair of calls, and the rank that makes the second one, in an order that is drawn."""
    every = list(itertools.product(CALLS, SIZES, BITS))
    draw = random.Random(seed)
    found = [(*draw.sample(pair, 2), draw.randrange(RANKS)) for pair in itertools.combinations(every, 2)]
    draw.shuffle(found)
    return found


def family(pair: Pair) -> str:
    """What a table calls the class of a pair."""
    (one, *_), (other, *_), _ = pair
    if one == other:
        return "the same call, another size or dtype" if one in EXCHANGES else "the same collective, otherwise"
    number = (one in COLLECTIVES) + (other in COLLECTIVES)
    return ("two exchanges", "a collective against an exchange", "two collectives")[number]


def outcome(call: Ready, expected: torch.Tensor) -> str:
    """What came of a call of this rank's: 'right', 'wrong', or its error."""
    try:
        got = call()
    except ms.MpishardError as error:
        return f"{type(error).__name__}: {error}"
    return "right" if got.shape == expected.shape and torch.equal(got, expected) else "wrong"


def main(seed: int, first: int, count: int, path: str) -> None:
    notes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(**what: Any) -> None:
        os.write(notes, (json.dumps(what) + "\n").encode())

    beside = WORLD.Dup()
    every = pairs(seed)
    for i in range(first, min(first + count, len(every))):
        one, other, odd = every[i]
        mesh = ms.init_mesh((-1,), ("x",), periodic=True)
        ready = [CALLS[name](mesh, n, bits) for name, n, bits in (one, other)]
        for _ in range(2):
            expected = [call().clone() for call in ready]
        if RANK == 0:
            note(case=i)
        beside.Barrier()
        mine = int(odd == RANK)
        came = outcome(ready[mine], expected[mine])
        note(case=i, rank=RANK, came=came)
        # an error ends the job, as it does where nobody catches it, unless all ranks come to an end
        told, start = beside.Ibarrier(), time.monotonic()
        while not told.Test():
            time.sleep(0.001)
            if came not in ("right", "wrong") and time.monotonic() - start > GRACE_S:
                WORLD.Abort(ENDED)
    # what the pairs have left under way on their meshes cannot be taken back
    sys.stdout.flush()
    beside.Barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
