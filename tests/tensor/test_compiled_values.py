"""What compiled programs do where values say what travels, or that a call fails: no plan of one call is kept."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mpishard as ms
from mpishard.autograd.compiled import _kept as kept
from tests.compare import WORLD, gathered, mesh_of, shard, skew
from tests.release import RELEASE

SIZE = WORLD.size
N = 4 * SIZE
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def real(*shape):
    return lambda seed: torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def below(n, *shape):
    return lambda seed: torch.randint(n, shape, generator=torch.Generator().manual_seed(seed))


def different(n, count):
    return lambda seed: torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:count]


def points(*shape):
    """Points near the cells of the same index, or anywhere: those of every third seed."""

    def grid(seed):
        away = real(*shape, 2)(seed)
        if seed % 3 == 0:
            return away * 2.4 - 1.2
        own = F.affine_grid(
            torch.eye(2, 3, dtype=torch.float64).expand(shape[0], 2, 3), [shape[0], 1, *shape[1:]], False
        )
        return own + 0.1 * away

    return grid


def written(x, i, v):
    y = x * 1
    y[i] = v
    return y


def unpooled(x):
    y, at = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y, at, 2)


# function, and per argument: how it is drawn, and the dim that is sharded
CASES = {
    "whole dim": (lambda x, i: x[:, i], (real(N, 5), 0), (below(5, 7), None)),
    "whole dim, sharded index": (lambda x, i: x[i], (real(5, 3), None), (below(5, N), 0)),
    "sharded dim": (lambda x, i: x[i], (real(N, 5), 0), (below(N, 7, 2), None)),
    "from the end": (lambda x, i: x[-1 - i], (real(N, 5), 0), (below(N, 7), None)),
    "two dims": (lambda x, i, j: x[:, i, j], (real(2, N, 5), 1), (below(N, 7), None), (below(5, 7), None)),
    "dims apart": (lambda x, i, j: x[i, :, j], (real(N, 3, 5), 0), (below(N, 7), None), (below(5, 7), None)),
    "asked": (lambda x, i: x[i], (real(N, 5), 0), (below(N, 3 * SIZE), 0)),
    "sharded index of two dims": (lambda x, i: x[i], (real(N, 5), 0), (below(N, 3 * SIZE, 2), 0)),
    "list": (lambda x: x[[0, 2, -1]], (real(N, 5), 0)),
    "index_select": (lambda x, i: x.index_select(0, i), (real(N, 5), 0), (below(N, 7), None)),
    "take": (lambda x, i: x.take(i), (real(N, 5), 0), (below(5 * N, 6), None)),
    "gather": (lambda x, i: x.gather(0, i), (real(N, 5), 0), (below(N, N, 5), 0)),
    "scatter": (lambda x, i: x.scatter(1, i, 2.0), (real(N, 5), 0), (below(5, N, 3), 0)),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), (real(N, 5), 0), (below(N, N, 5), 0), (real(N, 5), 0)),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), (real(N, 5), 0), (below(N, 7), None), (real(7, 5), None)),
    "index_add, sharded": (
        lambda x, i, s: x.index_add(0, i, s),
        (real(N, 5), 0),
        (below(N, 3 * SIZE), 0),
        (real(3 * SIZE, 5), 0),
    ),
    "index_add, to few": (lambda x, i, s: x.index_add(0, i, s), (real(3, 5), None), (below(3, N), 0), (real(N, 5), 0)),
    "scatter_add, to few": (
        lambda x, i, s: x.scatter_add(0, i, s),
        (real(3, 5), None),
        (below(3, N, 5), None),
        (real(N, 5), 0),
    ),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s), (real(N, 5), 0), (different(N, 3), None), (real(3, 5), None)),
    "written": (written, (real(N, 5), 0), (different(N, 3), None), (real(5), None)),
    "filled": (lambda x, i: written(x, i, 2.0), (real(N, 5), 0), (below(N, 3), None)),
    "put": (lambda x, i, s: x.put(i, s, True), (real(N, 5), 0), (below(5 * N, 4), None), (real(4), None)),
    "embedding": (F.embedding, (below(6, N, 2), 0), (real(6, 3), None)),
    "cross_entropy": (
        lambda x, t: F.cross_entropy(x, t, torch.arange(5, dtype=x.dtype), ignore_index=1),
        (real(2, 5, N), 2),
        (below(5, 2, N), 1),
    ),
    "masked_scatter": (lambda x, s: x.masked_scatter(x > 0.5, s), (real(N, 5), 0), (real(N, 5), None)),
    "max_unpool": (unpooled, (real(1, 2, N, 6), 2)),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        (real(2, 3, N, 6), 2),
        (points(2, N, 6), 1),
    ),
    "grid_sample of a whole grid": (
        lambda x, g: F.grid_sample(x, g, "bicubic", "reflection", True),
        (real(2, 3, N, 6), 2),
        (points(2, 5, 4), None),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_other_values_in_a_program_that_is_there(case):
    if case == "embedding" and RELEASE < (2, 13):
        pytest.skip("Dynamo does not read it, and it runs eagerly")
    f, *drawn = CASES[case]
    mesh = mesh_of((SIZE,))
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for seed in (1, 2, 3):
        full = [draw(seed + k) for k, (draw, _) in enumerate(drawn)]
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in full]
        given = []
        for x, (_, dim) in zip(full, drawn):
            # not beside all of a field, which would be gathered
            cut = {dim: skew(N, SIZE)} if dim is not None and x.shape[dim] == N and "grid" not in case else None
            placements = None if dim is None else (ms.Shard(dim),)
            given.append(shard(x, mesh, placements, cut, requires_grad=x.is_floating_point()))
        y, z = compiled(*given), f(*leaves)
        torch.testing.assert_close(gathered(y), z)
        y.square().sum().backward()
        z.square().sum().backward()
        for ours, theirs in zip(given, leaves, strict=True):
            if theirs.requires_grad:
                torch.testing.assert_close(gathered(ours.grad), theirs.grad)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("case", ["asked", "sharded dim", "grid_sample", "max_unpool"])
def test_what_travels_is_what_does_eagerly(case):
    f, *drawn = CASES[case]
    mesh, sent = mesh_of((SIZE,)), []
    for g in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        for _ in range(2):
            given = [
                shard(
                    draw(1), mesh, None if dim is None else (ms.Shard(dim),), requires_grad=draw(1).is_floating_point()
                )
                for draw, dim in drawn
            ]
            with ms.comm_counter() as count:
                g(*given).square().sum().backward()
        sent.append({op: (c.messages, c.nbytes) for op, c in count.by_op.items()})
    assert sent[0] == sent[1]


def test_what_is_kept_for_backward_is_dropped_with_it():
    f, (draw, _), (points_of, _) = CASES["grid_sample"]
    x = shard(draw(1), mesh_of((SIZE,)), (ms.Shard(2),), requires_grad=True)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    points = shard(points_of(1), x.mesh, (ms.Shard(1),))
    before = len(kept)
    first, second = compiled(x, points), compiled(x, points)
    first.sum().backward(retain_graph=True)
    once = gathered(x.grad).clone()
    first.sum().backward()
    torch.testing.assert_close(gathered(x.grad), 2 * once)
    assert len(kept) == before + 1
    del second
    assert len(kept) == before
    # packed, so that it is made anew
    x.grad = None
    checkpoint(compiled, x, points, use_reentrant=False).sum().backward()
    torch.testing.assert_close(gathered(x.grad), once)
    assert len(kept) == before


BAD = {
    "embedding": (lambda x, i: F.embedding(i, x), None, 0, IndexError),
    "gather": (lambda x, i: x.gather(0, i[:, None]), None, 0, RuntimeError),
    "asked": (lambda x, i: x[i], 0, 0, IndexError),
    "sharded dim": (lambda x, i: x[i], 0, None, IndexError),
    "sharded index": (lambda x, i: x[i], None, 0, IndexError),
    "index_add": (lambda x, i: x.index_add(0, i, x[: len(i)]), 0, None, IndexError),
    "cross_entropy": (lambda x, i: F.cross_entropy(x[: len(i)], i), None, 0, IndexError),
    "scatter": (lambda x, i: x.scatter(0, i[:, None], 1.0), None, 0, RuntimeError),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_index_of_one_rank_raises_on_every_rank(case):
    f, x_dim, i_dim, kind = BAD[case]
    mesh = mesh_of((SIZE,))
    x = shard(real(N, N)(1), mesh, None if x_dim is None else (ms.Shard(x_dim),), requires_grad=True)
    good = torch.arange(N)
    bad = good.clone()
    bad[-1] = N
    compiled = torch.compile(lambda x, i: f(x, i).sum(), backend="aot_eager", fullgraph=True)
    for index in (good, bad, good):
        i = shard(index, mesh, None if i_dim is None else (ms.Shard(i_dim),))
        if index is bad:
            with pytest.raises(kind, match=r"out of (range|bounds)"):
                compiled(x, i)
        else:
            torch.testing.assert_close(gathered(compiled(x, i)), f(gathered(x), index).sum())


@pytest.mark.parametrize(
    "f", [lambda x: x[x > 0.5], lambda x: x.masked_select(x > 0.5).mean(), lambda x: (x > 0.5).nonzero()]
)
def test_shapes_of_values_run_eagerly(f):
    x = shard(real(N, 3)(1), mesh_of((SIZE,)), (ms.Shard(0),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = torch.compile(f, backend="aot_eager")(x)
    (told,) = [str(w.message) for w in caught if "torch.compile" in str(w.message)]
    assert "depends on values" in told or RELEASE < (2, 13)  # in other words
    torch.testing.assert_close(gathered(y), f(gathered(x)))


def test_a_weight_that_torch_does_not_hand_on():
    """Nor do compiled functions of whole tensors have it."""
    mesh, full = mesh_of((SIZE,)), [real(N, 3)(seed) for seed in range(3)]
    expected = F.l1_loss(*full[:2], weight=full[2])
    compiled = torch.compile(lambda x, y, w: F.l1_loss(x, y, weight=w), backend="aot_eager", fullgraph=True)
    for placement in (ms.Shard(0), ms.Replicate()):
        x, y, w = (shard(t, mesh, (p,)) for t, p in zip(full, (ms.Shard(0), ms.Shard(1), placement), strict=True))
        torch.testing.assert_close(gathered(compiled(x, y, w)), expected)


@pytest.mark.parametrize("order", [(False, True, False), (True, False, True)], ids=str)
def test_written_inputs_that_share_memory_run_eagerly_and_others_compiled(order):
    """A compiler looks at what lies in the same memory once, at the first inputs."""
    mesh = mesh_of((SIZE,))

    def step(a, b):
        a.add_(1)
        return a * 2 + b

    run = torch.compile(step, backend="aot_eager")
    for seed, is_shared in enumerate(order):
        first, second = real(N - 1, 3)(seed), real(N - 1, 3)(seed + 7)
        a = shard(first, mesh, (ms.Shard(0),))
        b = a.detach() if is_shared else shard(second, mesh, (ms.Shard(0),))
        whole = first.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if is_shared else "error")
            got = run(a, b)
        torch.testing.assert_close(gathered(got), step(whole, whole.detach() if is_shared else second))
        torch.testing.assert_close(gathered(a), whole)


def test_inputs_that_share_memory_and_are_read_compile():
    mesh = mesh_of((SIZE,))
    run = torch.compile(lambda q, k: (q * k).sin(), backend="aot_eager", fullgraph=True)
    for seed in range(2):
        full = real(N, 6)(seed)
        q, k = shard(full, mesh, (ms.Shard(0),)).chunk(2, 1)
        q0, k0 = full.chunk(2, 1)
        torch.testing.assert_close(gathered(run(q, k)), (q0 * k0).sin())


def test_a_dispatch_mode_of_one_rank_has_that_call_run_eagerly_and_no_other():
    made = []

    def backend(graph, examples):
        made.append(graph)
        return aot_eager(graph, examples)

    run = torch.compile(lambda x: x.sin().sum(), backend=backend)
    full = real(N, 3)(1)
    x = shard(full, mesh_of((SIZE,)), (ms.Shard(0),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FlopCounterMode(display=False) if WORLD.rank == 0 else nullcontext():
            torch.testing.assert_close(gathered(run(x)), full.sin().sum())
    assert not made
    torch.testing.assert_close(gathered(run(x)), full.sin().sum())
    assert len(made) == 1
