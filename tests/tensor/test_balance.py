"""balance: the cuts that come of given times, what counts as time, and results that do not depend on cuts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

import mpishard as ms
from mpishard.comm import guard
from tests.compare import WORLD, mesh_of, mesh_shapes, shard

several = pytest.mark.ranks(2, 3, 4)
N = 48


def cost_of(ndim):
    """Cost per cell of a domain with a costly corner."""
    i = torch.arange(N, dtype=torch.float64)
    line = torch.where(i < N // 4, 6.0, 1.0)
    out = torch.ones((), dtype=torch.float64)
    for _ in range(ndim):
        out = out[..., None] * line
    return out


def own_cost(x, cost):
    """What this rank's block costs."""
    for dim, (lo, hi) in enumerate(x.sharding.box(x.mesh.coords)):
        cost = cost.narrow(dim, lo, hi - lo)
    return float(cost.sum())


def decide(balancer, x, cost, decisions, noise=lambda: 1.0):
    """Record the block's cost for some decisions (every=1, and one step that makes plans)."""
    for _ in range(2 * decisions):
        x = balancer(x)
        balancer.record(own_cost(x, cost) * noise())
    return balancer(x)


@pytest.mark.parametrize("periodic", [False, True])
def test_cuts_follow_the_times(periodic):
    for shape in mesh_shapes():
        mesh = mesh_of(shape, periodic)
        cost = cost_of(mesh.ndim)
        x = ms.distribute_tensor(cost, mesh, [ms.Shard(d) for d in range(mesh.ndim)])
        balancer = ms.balance(mesh, every=1)
        y = decide(balancer, x, cost, 8)
        assert torch.equal(y.full_tensor(), cost)
        first, last = (WORLD.allreduce(own_cost(t, cost), max) for t in (x, y))
        ideal = float(cost.sum()) / mesh.size
        assert first - last >= 0.8 * (first - ideal)
        if mesh.size > 1:
            assert balancer.imbalance < 1.2
            assert balancer.sizes == {(n,): y.sharding.sizes[d] for d, n in enumerate(mesh.mesh_dim_names)}
        # where nothing is to be gained, nothing moves
        changes = balancer.changes
        with ms.comm_counter() as count:
            assert decide(balancer, y, cost, 4) is y
        assert balancer.changes == changes
        assert set(count.by_op) <= {"all_reduce"}  # of the decisions


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["spike", "corner"])
def test_cuts_end_where_they_were_best(name):
    """A spike over which cuts jump; a corner whose rows and columns both shrink the one slow block."""
    if name == "spike":
        mesh, cost, where = ms.init_mesh((-1,), device="cpu"), torch.ones(1, 400), [ms.Shard(1)]
        cost[:, 37:41] *= 200
    else:
        mesh, cost = ms.init_mesh((-1, 2), device="cpu"), torch.ones(96, 64)
        cost[:24, :16] *= 10
        where = [ms.Shard(0), ms.Shard(1)]
    balancer, x, seen = ms.balance(mesh, every=1), ms.distribute_tensor(cost, mesh, where), []
    for _ in range(60):
        x = balancer(x)
        seen.append(WORLD.allreduce(own_cost(x, cost), max))
        balancer.record(own_cost(x, cost))
    assert seen[-1] <= 1.06 * min(seen)
    ideal = float(cost.sum()) / mesh.size
    if name == "corner":
        assert seen[0] - seen[-1] >= 0.6 * (seen[0] - ideal)
    mesh.free()


@several
def test_cuts_are_those_of_a_constant_density():
    mesh = mesh_of((WORLD.size,))
    x = ms.zeros(24 * mesh.size, mesh=mesh, placements=[ms.Shard(0)])
    balancer = ms.balance(mesh, every=3, relaxation=1.0)
    balancer(x)
    # the first step, and whatever is not the median of three, says nothing
    for time in (99.0, 1.0 if mesh.rank else 2.0, 77.0 * mesh.rank, 1.0 if mesh.rank else 2.0):
        assert balancer.changes == 0
        balancer.record(time)
    share = (mesh.size + 1) / mesh.size  # of the time, in units in which 24 cells of the first block take 2
    assert balancer.changes == 1
    assert balancer(x).sharding.sizes[0][0] == round(12 * share)
    assert balancer.imbalance == pytest.approx(2 * mesh.size / (mesh.size + 1))


@several
def test_noise_moves_nothing():
    mesh = mesh_of((WORLD.size,))
    x = ms.zeros(N * mesh.size, mesh=mesh, placements=[ms.Shard(0)])
    balancer = ms.balance(mesh, every=9)
    draw = torch.Generator().manual_seed(mesh.rank)
    for _ in range(180):
        assert balancer(x) is x
        # 10 %, and one step in nine takes five times as long
        u, v = torch.rand(2, generator=draw).tolist()
        balancer.record((1 + 0.1 * u) * (5 if v < 1 / 9 else 1))
    assert balancer.changes == 0
    assert balancer.imbalance < 1.1


@several
def test_a_gain_that_does_not_come_is_asked_more_of():
    mesh = mesh_of((WORLD.size,))
    x = ms.zeros(N * mesh.size, mesh=mesh, placements=[ms.Shard(0)])
    balancer = ms.balance(mesh, every=1)
    for _ in range(40):
        balancer(x)
        # the first rank is slow whatever it holds
        balancer.record(1.0 + 0.3 * (mesh.rank == 0))
    assert balancer.changes <= 4


def test_cuts_keep_what_a_model_needs():
    mesh = mesh_of((WORLD.size,))
    cost = torch.cat([torch.ones(4 * N - 2), torch.full((2,), 1e4)]).double()
    x = ms.distribute_tensor(cost, mesh, [ms.Shard(0)], multiple=8)
    balancer = ms.balance(mesh, every=1, min_cells=12, multiple=8)
    sizes = decide(balancer, x, cost, 4).sharding.sizes[0]
    assert all(s % 8 == 0 for s in sizes[:-1])
    assert min(sizes) >= 12
    if mesh.size > 1:
        assert sizes[-1] == 16


@several
def test_several_tensors_are_cut_alike():
    mesh = mesh_of((WORLD.size,))
    cost = cost_of(1)
    x = ms.distribute_tensor(cost, mesh, [ms.Shard(0)])
    balancer = ms.balance(mesh, every=1)
    decide(balancer, x, cost, 4)
    sizes = balancer.sizes[("dim0",)]
    assert sizes != x.sharding.sizes[0]
    a, b, coarse, whole, empty = balancer(
        x,
        ms.zeros(2, N, mesh=mesh, placements=[ms.Shard(1)]),
        ms.zeros(N // 2, mesh=mesh, placements=[ms.Shard(0)]),
        ms.zeros(N, mesh=mesh, placements=[ms.Replicate()]),
        ms.zeros(0, mesh=mesh, placements=[ms.Shard(0)]),
    )
    assert a.sharding.sizes[0] == b.sharding.sizes[1] == sizes
    assert sum(coarse.sharding.sizes[0]) == N // 2
    assert all(abs(2 * c - s) <= 2 for c, s in zip(coarse.sharding.sizes[0], sizes))
    assert whole.sharding.is_replicated
    assert sum(empty.sharding.sizes[0]) == 0


@pytest.mark.ranks(4)
def test_chosen_dims_and_dims_together():
    mesh = ms.init_mesh((2, 2), ("data", "y"))
    cost = cost_of(2)
    x = ms.distribute_tensor(cost, mesh, [ms.Shard(0), ms.Shard(1)])
    for dims in ("y", np.int64(1)):
        balancer = ms.balance(mesh, dims=dims, every=1)
        y = decide(balancer, x, cost, 4)
        assert y.sharding.sizes[0] == (N // 2, N // 2)
        assert y.sharding.sizes[1][0] < N // 2
    with pytest.raises(ms.LayoutError, match="together"):
        balancer(ms.zeros(N, mesh=mesh, placements=[ms.Shard(0), ms.Shard(0)]))
    # both dims cut one dim of the tensor
    line = cost_of(1)
    joint = ms.balance(mesh, every=1)
    z = decide(joint, ms.distribute_tensor(line, mesh, [ms.Shard(0), ms.Shard(0)]), line, 6)
    assert joint.sizes == {("data", "y"): z.sharding.sizes[0]}
    assert WORLD.allreduce(own_cost(z, line), max) < 1.2 * float(line.sum()) / 4
    with pytest.raises(ms.LayoutError, match="together"):
        joint(x)
    mesh.free()


def test_results_do_not_depend_on_cuts():
    for shape in mesh_shapes(2):
        mesh = mesh_of(shape)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 3, 5, padding=2), nn.GroupNorm(1, 3), nn.GELU(), nn.Conv2d(3, 1, 3, 2, 1))
        model, full = model.double(), torch.randn(1, 1, N, N, dtype=torch.float64)
        target = torch.randn(1, 1, N // 2, N // 2, dtype=torch.float64)
        whole = full.clone().requires_grad_()
        expected = nn.functional.mse_loss(model(whole), target)
        expected.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        ms.distribute_module(model, mesh)
        placements = [ms.Shard(2 + m) for m in range(mesh.ndim)]
        x, y = shard(full, mesh, placements, requires_grad=True), shard(target, mesh, placements)
        balancer = ms.balance(mesh, every=1, min_cells=3)
        for _ in range(6):
            model.zero_grad()
            x.grad = None
            a, b = balancer(x, y)
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()
            balancer.record(1.0 + 5.0 * (mesh.rank == 0))
            torch.testing.assert_close(loss.full_tensor(), expected.detach())
            torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
            for p, g in zip(model.parameters(), gradients):
                torch.testing.assert_close(p.grad, g)
        assert (balancer.changes > 0) == (mesh.size > 1)


@several
def test_waits_for_others_are_no_work():
    mesh, now = mesh_of((WORLD.size,)), [0.0]
    x = ms.zeros(24 * mesh.size, mesh=mesh, placements=[ms.Shard(0)])

    def wait(seconds):
        with guard.waiting("outer"), guard.waiting("inner"):
            now[0] += seconds

    def writer():
        with guard.waiting("a checkpoint"):
            now[0] += work

    cuts = []
    for waits in (True, False):
        balancer = ms.balance(mesh, every=1, relaxation=1.0, clock=lambda: now[0])
        work = 2.0 if mesh.rank == 0 else 1.0
        balancer(x)
        for _ in range(2):
            wait(3.0)  # outside a step nothing counts
            with balancer.step():
                now[0] += work / 2
                if waits:
                    # so long that all ranks take as long
                    wait(10.0 - work)
                # in another thread of the program: not what this rank waits for
                thread = threading.Thread(target=writer)
                thread.start()
                thread.join()
        cuts.append(balancer.sizes)
        assert balancer.changes == 1
    assert cuts[0] == cuts[1]
    assert not guard.meters


@several
def test_real_waits_are_found():
    mesh, calls = mesh_of((WORLD.size,)), []

    def clock():
        calls.append(None)
        return 0.0

    balancer = ms.balance(mesh, clock=clock)
    x = torch.ones(3)
    with balancer.step():
        before = len(calls)
        ms.all_reduce(x, mesh)
        ms.shift(x, mesh, 0, 1)
        found = len(calls) - before
    assert found >= 4
    before = len(calls)
    ms.all_reduce(x, mesh)
    assert len(calls) == before


def test_a_step_that_fails_is_none():
    mesh = mesh_of((WORLD.size,))
    balancer = ms.balance(mesh, every=1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), balancer.step():
            raise ZeroDivisionError
    assert not guard.meters
    with balancer.step(), pytest.raises(ms.errors.UnsupportedOperationError, match="a step in a step"):
        balancer.start()
    with pytest.raises(ms.errors.UnsupportedOperationError, match="no step to end"):
        balancer.stop()
    assert balancer.imbalance is None


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"every": 0}, "every"),
        ({"every": 2.5}, "an integer"),
        ({"threshold": 1}, r"in \[0, 1\)"),
        ({"threshold": "little"}, r"in \[0, 1\)"),
        ({"relaxation": 0}, r"in \(0, 1\]"),
        ({"min_cells": -1}, "min_cells"),
        ({"multiple": None}, "multiple"),
        ({"dims": ["z"]}, "no such mesh dim"),
    ],
)
def test_bad_arguments(how, text):
    mesh = mesh_of((WORLD.size,))
    with pytest.raises(ms.MpishardError, match=text):
        ms.balance(mesh, **how)
    # one rank's mistake is an error on all
    with pytest.raises(ms.MpishardError, match=text):
        ms.balance(mesh, **(how if mesh.rank == mesh.size - 1 else {}))


def test_bad_tensors():
    mesh = mesh_of((WORLD.size,))
    balancer = ms.balance(mesh, min_cells=4)
    with pytest.raises(ms.LayoutError, match="a ShardTensor"):
        balancer(torch.zeros(8))
    with pytest.raises(ms.MeshError):
        balancer(ms.zeros(8, mesh=ms.init_mesh((-1,)), placements=[ms.Shard(0)]))
    with pytest.raises(ms.LayoutError, match=f"at least {4 * mesh.size} cells"):
        balancer(ms.zeros(4 * mesh.size - 1, mesh=mesh, placements=[ms.Shard(0)]))
    with pytest.raises(ms.MeshError, match="a CartMesh"):
        ms.balance(None)


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf"), "soon", None])
def test_bad_times(bad):
    mesh = mesh_of((WORLD.size,))
    balancer = ms.balance(mesh, every=1)
    x = balancer(ms.zeros(8 * mesh.size, mesh=mesh, placements=[ms.Shard(0)]))
    balancer.record(1.0)
    with pytest.raises(ms.LayoutError, match="no times of steps"):
        balancer.record(bad if mesh.rank == mesh.size - 1 else 1.0)
    balancer.record(1.0)
    assert balancer(x) is x
    assert balancer.imbalance == 1


def test_a_balancer_goes_on_from_its_state(tmp_path_factory):
    folder = WORLD.bcast(str(tmp_path_factory.mktemp("balance")) if WORLD.rank == 0 else None)
    mesh = mesh_of((WORLD.size,))
    cost = cost_of(1)
    x = ms.distribute_tensor(cost, mesh, [ms.Shard(0)])
    balancer, after = ms.balance(mesh, every=2), ms.balance(mesh, every=2)
    decide(balancer, x, cost, 3)
    ms.io.save_checkpoint(folder, 1, extra={"balance": balancer.state_dict()}, mesh=mesh)
    after.load_state_dict(ms.io.load_checkpoint(folder, mesh=mesh).extra["balance"])
    assert after.state_dict() == balancer.state_dict()
    assert after(x).sharding == balancer(x).sharding
    # the step that makes plans does not count
    balancer._fresh = True
    balancer._seconds = []
    for one in (balancer, after):
        decide(one, x, cost, 4)
    assert after.sizes == balancer.sizes
    assert after.imbalance == balancer.imbalance


def test_a_state_of_other_ranks_gives_cuts_of_equal_cost():
    mesh = mesh_of((WORLD.size,))
    (name,) = mesh.mesh_dim_names
    borders = [0, 4, 8, 12, 48, 48][: 5 if WORLD.size != 4 else 6]
    costs = [4 / 16, 4 / 16, 4 / 16, 4 / 16, 0.0][: len(borders) - 1]
    balancer = ms.balance(mesh)
    state = {"changes": 3, "imbalance": 1.5, "before": None, "doubt": 2.0}
    balancer.load_state_dict(
        {**state, "lines": [{"mesh_dims": [name], "borders": borders, "told": [[borders, costs]]}]}
    )
    assert balancer.changes == 3
    sizes = {1: (48,), 2: (8, 40), 3: (5, 6, 37), 4: (4, 4, 4, 36)}[WORLD.size]
    assert balancer.sizes == {(name,): sizes}
    x = ms.zeros(N, mesh=mesh, placements=[ms.Shard(0)])
    assert balancer(x).sharding.sizes == (sizes,)


@pytest.mark.parametrize(
    "harm",
    [
        lambda s: s.pop("lines"),
        lambda s: s["lines"][0].update(mesh_dims=["nowhere"]),
        lambda s: s["lines"][0].update(borders=[3, 48]),
        lambda s: s["lines"][0].update(told=[[[0, 5], [1.0]]]),
        lambda s: s["lines"][0].update(told=[[[0, N], [float("nan")]]]),
        lambda s: s.update(changes="many"),
        lambda s: s.update(doubt=float("nan")),
        lambda s: s.update(before="soon"),
    ],
)
def test_what_is_no_state(harm):
    mesh = mesh_of((WORLD.size,))
    balancer = ms.balance(mesh, every=1)
    x = ms.zeros(N, mesh=mesh, placements=[ms.Shard(0)])
    balancer(x)
    before, state = balancer.state_dict(), balancer.state_dict()
    if WORLD.rank == 0:
        harm(state)
    with pytest.raises(ms.LayoutError, match="no state of a balancer"):
        balancer.load_state_dict(state)
    assert balancer.state_dict() == before
