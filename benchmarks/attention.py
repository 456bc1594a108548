"""Ring attention over length, forward and backward, against local attention of the same work.

The floor is torch's attention of one rank's queries to the keys and values of all, which are there: what a rank has to
compute, and nothing that travels. Each way of `ms.attention_method` is a row, and the one chosen without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench

AXIS = "tokens"
OPTIONS = {"tokens": "of a rank, with commas between (default: 1024,4096)"}
HEADS, WIDTH = 4, 64


def trained(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, way: str | None) -> Callable[[], None]:
    """Return a forward and backward of attention."""

    def step() -> None:
        for t in (q, k, v):
            t.grad = None
        with nullcontext() if way is None else ms.attention_method(way):
            F.scaled_dot_product_attention(q, k, v).sum().backward()

    return step


def run(bench: Bench) -> None:
    """Compare over tokens a rank."""
    mesh = ms.init_mesh((-1,), ("d",))
    default = ["32", "64"] if bench.quick else ["1024", "4096"]
    for tokens in map(int, default if bench.quick else bench.setting("tokens", default)):
        generator = torch.Generator().manual_seed(0)
        full = torch.randn(3, 1, HEADS, tokens * WORLD.size, WIDTH, generator=generator).unbind(0)
        own = full[0].chunk(WORLD.size, 2)[WORLD.rank].clone().requires_grad_()
        keys, values = (t.clone().requires_grad_() for t in full[1:])
        calls = {"local": trained(own, keys, values, None)}
        for way in (None, "ring", "gather", "all_to_all"):
            shards = [ms.distribute_tensor(t, mesh, (ms.Shard(2),)).requires_grad_() for t in full]
            calls["chosen" if way is None else way] = trained(*shards, way)
        bench.compare(
            f"attention, {tokens} tokens a rank, {HEADS} heads of {WIDTH}",
            calls,
            floor="local",
            count=1 if tokens > 512 else 3,
            tokens=tokens,
        )
