"""Second derivatives of torch's own database of operators, on shards, also of calls in checkpoints, one in another.

Each entry runs on a sample of torch's own, with operands and cotangents on a mesh, in placements and blocks that are
drawn, empty ones among them. A gradient of a gradient goes through what torch's own backward is made of, which may
depend on a block; a checkpoint makes its calls again where the first of a rank's nodes asks for what it kept.
"""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from mpishard.errors import NoShardingRule, UnsupportedOperationError
from tests.compare import WORLD, drawn_sizes, flat, gathered, mesh_of, mesh_shapes, shard
from tests.ops import test_database as database

PARTS = 4
REFUSED = (NoShardingRule, UnsupportedOperationError)
# of torch's own derivatives: no second one; the input's where it is written over; NaN where all cells are zero
KNOWN = {"nn.functional.linear_cross_entropy/chunked", "as_strided_scatter", "linalg.norm/subgradients_at_zero"}


def once(f: Callable[..., Any], *operands: Any) -> Any:
    return checkpoint(f, *operands, use_reentrant=False)


HOW = {
    "plain": lambda f, *operands: f(*operands),
    "checkpoint": once,
    "nested": lambda f, *operands: once(lambda *inner: once(f, *inner), *operands),
}


def placed(t: Tensor, mesh: ms.CartMesh, rng: random.Random, requires_grad: bool) -> Any:
    free, placements, sizes = list(range(t.ndim)), [], {}
    for count in mesh.shape:
        dim = rng.choice([None, *free])
        if dim is None:
            placements.append(ms.Replicate())
            continue
        free.remove(dim)
        placements.append(ms.Shard(dim))
        if rng.random() >= 0.3:  # the others are balanced
            sizes[dim] = drawn_sizes(rng, t.shape[dim], count)
    return shard(t, mesh, placements, sizes or None, requires_grad)


def drawn(t: Tensor, seed: int) -> Tensor:
    return torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=torch.Generator(t.device).manual_seed(seed))


def derivatives(
    f: Callable[..., Any], operands: Sequence[Any], leaves: Sequence[Any], place: Callable[[Tensor, bool], Any]
) -> list[Tensor | None] | None:
    """Gradients, and gradients of these with respect to leaves and cotangents; None where there is no gradient."""
    results = [y for y in flat(f(*operands)) if isinstance(y, Tensor) and y.requires_grad]
    if not results:
        return None
    cotangents = [place(drawn(y, i), True) for i, y in enumerate(results)]
    first = torch.autograd.grad(results, leaves, cotangents, create_graph=True, allow_unused=True)
    again = [(i, g) for i, g in enumerate(first) if g is not None and g.requires_grad]
    found: list[Tensor | None] = [*first, *[None] * (len(leaves) + len(cotangents))]
    if again:
        towards = [
            place(drawn(g, 100 + i), False) if isinstance(g, ms.ShardTensor) else drawn(g, 100 + i) for i, g in again
        ]
        sources = [*leaves, *cotangents]
        found[len(leaves) :] = torch.autograd.grad([g for _, g in again], sources, towards, allow_unused=True)
    return found


def wrong(got: list[Tensor | None], expected: list[Tensor | None]) -> str:
    """Where derivatives differ; '' where they do not. Of none it is said by None, or by zeros."""
    missing = WORLD.allgather([g is None for g in got])
    if any(each != missing[0] for each in missing):
        return f"ranks differ in what they have a derivative for: {missing}"
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        whole = None if g is None else gathered(g.detach())
        if whole is None and e is None:
            continue
        whole, e = (torch.zeros_like(e) if whole is None else whole), (torch.zeros_like(whole) if e is None else e)
        try:
            torch.testing.assert_close(whole, e.detach(), rtol=1e-7, atol=1e-7, equal_nan=True)
        except AssertionError as error:
            return f"derivative {i} of {len(got)}: {error}"
    return ""


def outcome(call: database.Call, rng: random.Random, how: str) -> str:
    """What came of the second derivatives of a call: '' where all was right."""
    plain = [t.clone().requires_grad_(d) for t, d in zip(call.tensors, call.differentiable)]
    wanted = [x for x, d in zip(plain, call.differentiable) if d]

    def run(*operands: Any) -> Any:
        return HOW[how](call.run, *operands)

    try:
        expected = derivatives(run, plain, wanted, lambda t, needed: t.requires_grad_(needed))
    except (RuntimeError, NotImplementedError):
        return ""  # torch has none, as of checkpoints that write into what they are given
    if expected is None:
        return ""
    mesh = mesh_of(rng.choice(mesh_shapes(2)))
    try:
        operands = [placed(t, mesh, rng, d) for t, d in zip(call.tensors, call.differentiable)]
        leaves = [x for x, d in zip(operands, call.differentiable) if d]
        got = derivatives(run, operands, leaves, lambda t, needed: placed(t, mesh, rng, needed))
        return "no gradient" if got is None else wrong(got, expected)
    except REFUSED as e:
        return f"refused: {e}"
    except Exception as e:  # noqa: BLE001 (the outcome)
        return f"raised: {type(e).__name__}: {e}"


@pytest.mark.ranks(3)
@pytest.mark.parametrize("part", range(PARTS))
def test_entries(part, request, monkeypatch):
    """Each entry on a sample that is drawn, by one of the ways; by all in a run that leaves none out."""
    seed, whole = request.config.option.seed, request.config.getoption("--sample") == 1
    entries = database.entries(monkeypatch)[part::PARTS]
    monkeypatch.setattr(database, "DTYPES", (torch.float64, torch.complex128))
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in entries:
            name = database.name_of(entry)
            rng = random.Random(zlib.crc32(f"{seed} {name}".encode()))
            if not entry.supports_autograd or name in {*database.DRAWN, *KNOWN}:
                continue
            calls = [c for c in database.calls(entry, database.SEEN_TO_DRAW) if any(c.differentiable)]
            for how in (HOW if whole else [rng.choice(list(HOW))]) if calls else []:
                what = f"{name}, {how}"
                came = database.together(outcome(rng.choice(calls), rng, how), what)
                if came and not came.startswith("refused"):
                    found.append(f"{what}: {came}")
    assert not found, "\n- ".join(["", *found])
