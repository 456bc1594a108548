"""A model in the host's time loop."""

from __future__ import annotations

import random
import signal
import threading
from contextlib import nullcontext
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils._pytree import tree_map_only

import mpishard as ms
from mpishard.comm.agreement import threads_may_communicate
from tests.insitu.hosts import WORLD, Host, cut

SIZE = WORLD.size


@pytest.fixture
def host():
    made = Host((SIZE, 1), [cut(12, SIZE), (8,)], [(1, 1), (1, 1)])
    yield made
    made.free()


@pytest.fixture
def sim(host):
    with ms.insitu.adopt(host.cart, host.shape, 1, ("x", "y")) as made:
        yield made


def batched(*fields):
    return torch.stack(fields)[None]


def test_inference_equals_torch(host, sim):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(3, 1, 3, padding=1)
    ).double()
    u, v, tau = host.array(), host.array() * 2, host.array() * 0
    for name, array in (("u", u), ("v", v), ("tau", tau)):
        sim.field(name, array)
    hook = sim.hook(model, ["u", "v"], ["tau"], pack=batched, unpack=lambda y: y[0, 0])
    for step in range(3):
        assert hook()
        whole = torch.from_numpy(host.whole) * (1 + step)
        with torch.no_grad():
            expected = model(torch.stack([whole, 2 * whole])[None])[0, 0]
        np.testing.assert_allclose(tau[host.interior], expected[host.box], rtol=1e-12)
        # the solver goes on
        u[host.interior] += host.whole[host.box]
        v[host.interior] += 2 * host.whole[host.box]
    assert hook.runs == 3
    assert all(t > 0 for t in hook.times.values())


@pytest.mark.parametrize("way", ["view", "reshape", "flatten", "ravel"])
def test_a_model_that_looks_at_fields_in_another_shape_sees_every_step(host, sim, way):
    u, tau = host.array(), host.array() * 0
    sim.field("u", u)
    sim.field("tau", tau)
    rows = {"view": lambda x: x.view(-1, 1), "reshape": lambda x: x.reshape(-1, 1)}
    seen = rows.get(way, lambda x: getattr(x, way)()[:, None])
    hook = sim.hook(lambda x: (2 * seen(x)).view(x.shape), ["u"], ["tau"])
    for step in range(3):
        u[host.interior] = step
        assert hook()
        np.testing.assert_array_equal(tau[host.interior], 2 * step)


@pytest.mark.parametrize("width", [1, 3])
def test_a_field_that_a_model_has_read_trains_one(host, sim, width):
    """What a hook has written itself is no write that autograd does not know."""
    u, tau = host.array(), host.array() * 0
    sim.field("u", u)
    sim.field("tau", tau)
    torch.manual_seed(0)
    model = torch.nn.Conv2d(1, 1, width, padding=width // 2).double()
    plain = torch.nn.Conv2d(1, 1, width, padding=width // 2).double()
    plain.load_state_dict(model.state_dict())
    infer = sim.hook(model, ["u"], ["tau"], pack=lambda u: u[None, None], unpack=lambda y: y[0, 0])

    def learn(x, model=model):
        loss = (model(x[None, None]) - 1).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad

    train = sim.hook(learn, ["u"], grad=True)
    for _ in range(3):
        assert infer()
        assert train()
        learn(torch.from_numpy(host.whole), plain)
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
        sim.fields["tau"].tensor.mul_(2)


@pytest.mark.ranks(2, 3, 4)
def test_a_model_that_differs_between_ranks_is_refused(sim, host):
    sim.field("u", host.array())
    torch.manual_seed(WORLD.rank)
    model = torch.nn.Linear(8, 8).double()
    with pytest.raises(ms.MpishardError, match="checksum"):
        sim.hook(model, ["u"], ["u"])
    sim.hook(ms.distribute_module(model, sim.mesh), ["u"], ["u"])


def test_a_model_with_a_strided_number_is_compared(sim, host):
    sim.field("u", host.array())
    model = torch.nn.Linear(8, 8).double()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    model.register_buffer("scale", torch.arange(6.0).view(3, 2)[1:2, 1])
    sim.hook(model, ["u"], ["u"])


def test_a_lazy_module_is_made_by_its_first_run(host, sim):
    u, tau = host.array(), host.array() * 0
    sim.field("u", u)
    sim.field("tau", tau)
    model = torch.nn.LazyConv2d(1, 3, padding=1)
    hook = sim.hook(model, ["u"], ["tau"], pack=lambda u: u[None, None].float(), unpack=lambda y: y[0, 0].double())
    torch.manual_seed(0)
    assert hook()
    with torch.no_grad():
        expected = model(torch.from_numpy(host.whole)[None, None].float())[0, 0]
    np.testing.assert_allclose(tau[host.interior], expected[host.box], rtol=1e-5, atol=1e-5)


def test_a_hook_in_a_model_is_refused(host, sim):
    sim.field("u", host.array())
    inner = sim.hook(lambda u: None, ["u"])
    outer = sim.hook(lambda u: inner() if WORLD.rank == SIZE - 1 else u.sum(), ["u"])
    both = sim.hook(lambda u: inner(), ["u"])
    for hook in (outer, both):
        with pytest.raises(ms.UnsupportedOperationError, match="inside another"):
            hook()
    assert inner()
    assert (inner.runs, outer.runs) == (1, 0)


def test_every(host, sim):
    sim.field("u", host.array())
    seen = []
    hook = sim.hook(lambda u: seen.append(1), ["u"], every=3)
    assert [hook() for _ in range(7)] == [True, False, False, True, False, False, True]
    assert len(seen) == 3


def test_names_of_outputs(host, sim):
    u, v = host.array(), host.array()
    sim.field("u", u)
    sim.field("v", v)
    sim.hook(lambda a, b: {"v": a + b, "u": a - b}, ["u", "v"], ["u", "v"])()
    np.testing.assert_array_equal(u[host.interior], 0 * host.whole[host.box])
    np.testing.assert_array_equal(v[host.interior], 2 * host.whole[host.box])


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        lambda a, b: (b, a),
        lambda a, b: (2 * a - b + 10, a),
        lambda a, b: (b[:, :], a[None].squeeze(0)),
        lambda a, b: (a, a),
        lambda a, b: {"b": a.flip(0), "a": b.view(b.shape)},
    ],
)
def test_inputs_as_outputs(host, sim, model, apart, beside):
    """What is written first is no other output's value, also where both fields lie in one array."""
    if beside and not threads_may_communicate():
        pytest.skip("MPI without threads")
    both = np.stack([host.array(), 3 * host.array() + 1], axis=-1)
    a, b = (both[..., i].copy() if apart else both[..., i] for i in range(2))
    sim.field("a", a)
    sim.field("b", b)
    hook = sim.hook(model, ["a", "b"], ["a", "b"])
    if beside:
        hook.start()
        hook.wait()
    else:
        hook()
    whole = torch.from_numpy(host.whole)
    out = model(whole, 3 * whole + 1)
    expected = [out["a"], out["b"]] if isinstance(out, dict) else out
    for found, want in zip((a, b), expected):
        np.testing.assert_array_equal(found[host.interior], want[host.box])


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda u: u[1:], "does not fit"),
        (lambda u: (u, u), "does not fit"),
        (lambda u: u.to_local(), "does not fit"),
        (lambda u: {"w": u, 3: u}, r"names \['u'\]\s+got: +\['3', 'w'\]"),
        (lambda u: u.to(torch.complex128), "cannot hold"),
    ],
)
def test_outputs_that_do_not_fit(host, sim, model, text):
    array = host.array()
    before = array.copy()
    sim.field("u", array)
    with pytest.raises(ms.MpishardError, match=text):
        sim.hook(model, ["u"], ["u"])()
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("given", [{"model": None}, {"model": 3}, {"pack": "u"}, {"unpack": 1}, {"grad": 3}], ids=repr)
def test_what_cannot_be_called_is_refused_when_the_hook_is_made(host, sim, given):
    sim.field("u", host.array())
    with pytest.raises(ms.LayoutError, match=r"hook: \w+= is of another kind"):
        sim.hook(**{"model": lambda u: u, "inputs": ["u"], **given})


class Untold(ValueError):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(("error", "text"), [(ValueError, "no such regime"), (Untold, r"Untold: \(no text")])
def test_a_model_that_raises_on_one_rank(host, sim, error, text):
    array = host.array()
    before = array.copy()
    sim.field("u", array)

    def model(u):
        if WORLD.rank == SIZE - 1:
            raise error("no such regime")
        return u + 1

    hook = sim.hook(model, ["u"], ["u"])
    for _ in range(2):
        with pytest.raises(ms.MpishardError, match=text) as caught:
            hook()
        assert isinstance(caught.value.__cause__, ValueError) == (WORLD.rank == SIZE - 1)
        np.testing.assert_array_equal(array, before)
    sim.hook(lambda u: u + 1, ["u"], ["u"])()
    np.testing.assert_array_equal(array[host.interior], before[host.interior] + 1)


def test_beside_the_solver(host, sim):
    """Between start and wait the solver writes and exchanges; the model sees the fields of the start."""
    u, tau = host.array(), host.array() * 0
    field = sim.field("u", u)
    sim.field("tau", tau)
    weight = torch.full((1, 1, 3, 3), 0.25, dtype=torch.float64)
    hook = sim.hook(
        lambda x: torch.nn.functional.conv2d(x[None, None], weight, padding=1)[0, 0], ["u"], ["tau"], every=2
    )
    for step in range(4):
        expected = torch.nn.functional.conv2d(field.tensor.full_tensor()[None, None], weight, padding=1)[0, 0]
        before = tau.copy()
        assert hook.start() == (step % 2 == 0)
        with pytest.raises(ms.UnsupportedOperationError, match="not waited for"):
            hook()
        alike = sim.field(f"alike{step}", u.copy())
        if step % 2 == 0:
            # without a look-up of the plan, which the ranks compare where they are asked to
            assert alike._ready is field._ready is not None
            alike.exchange()
            # the model may ask the ranks something now
            with pytest.raises(ms.UnsupportedOperationError, match="field 'other'"):
                sim.field("other", u.astype("float32"))
        for _ in range(3):
            u[host.interior] += 1
            field.exchange()
        np.testing.assert_array_equal(tau, before)
        if hook.wait():
            np.testing.assert_allclose(tau[host.interior], expected[host.box])
    assert hook.runs == 2
    with pytest.raises(ms.UnsupportedOperationError, match="nothing was started"):
        hook.wait()


# what a program may do on a simulation's mesh, by messages of each kind
WORK = {
    "small sum": lambda x: x.sum(),
    "extremum": lambda x: float(x.max()),
    "halo": lambda x: torch.nn.functional.conv2d(x[None, None], torch.ones(1, 1, 3, 3, dtype=x.dtype), padding=1),
    "window": lambda x: torch.nn.functional.max_pool2d(x[None], 3, 1, 1),
    "whole": lambda x: x.full_tensor(),
    "redistribution": lambda x: x.redistribute(placements=(ms.Replicate(), ms.Shard(1))),
    "large sum": lambda x: ms.all_reduce(torch.ones(1 << 17), x.mesh),
    "product": lambda x: (x.mT @ x).abs(),
    "along one dim": lambda x: ms.all_reduce(torch.ones(3), x.mesh, "x"),
    "shift": lambda x: ms.shift(torch.ones(3), x.mesh, "x", 1),
    "all to all": lambda x: ms.all_to_all(torch.ones(SIZE), x.mesh, "x", split_dim=0, concat_dim=0),
    "scatter": lambda x: ms.scatter_tensor(torch.ones(9, 8), 0, x.mesh, x.placements),
    "sort": lambda x: x.sort(0),
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("planned", [False, True])
def test_what_meets_the_model_is_refused(host, sim, planned):
    """On every rank, before anything is sent, however the ranks' calls fall among the model's."""
    u, tau = host.array(), host.array() * 0
    x = sim.field("u", u).tensor
    sim.field("tau", tau)
    rng, ended = random.Random(WORLD.rank), threading.Event()

    def model(x):
        for _ in range(8):
            for work in ("small sum", "halo", "redistribution", "product", "whole"):
                WORK[work](x)
        ended.wait()
        return x * x.sum()

    def all_of(calls):
        found = {name: work(x) for name, work in calls.items()}
        return tree_map_only(ms.ShardTensor, ms.ShardTensor.to_local, found)

    hook = sim.hook(model, ["u"], ["tau"])
    if planned:
        ended.set()
        hook()
        ended.clear()
        expected = all_of(WORK)
    hook.start()
    try:
        for _ in range(3):
            for name in rng.sample(sorted(WORK), len(WORK)):
                with pytest.raises(ms.UnsupportedOperationError, match="a mesh is lent to another thread"):
                    WORK[name](x)
            assert torch.equal((x + 1).to_local(), x.to_local() + 1)
    finally:
        ended.set()
        assert hook.wait()
    np.testing.assert_allclose(tau[host.interior], (host.whole * host.whole.sum())[host.box])
    again = all_of(WORK)
    if planned:
        torch.testing.assert_close(again, expected)


NAMED = ContextVar("NAMED", default="")


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", cache_enabled=False),
        torch.inference_mode,
        torch.enable_grad,
    ],
)
def test_beside_the_solver_as_in_a_call(host, sim, mode):
    u, tau = host.array(), host.array() * 0
    sim.field("u", u)
    sim.field("tau", tau)
    weight, seen = torch.eye(8), []

    def model(x):
        y = x.float() @ weight
        told = y.dtype, torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled(), NAMED.get()
        seen.append((*told, torch.is_inference_mode_enabled(), torch.is_grad_enabled(), y.requires_grad))
        return y.double()

    hook = sim.hook(model, ["u"], ["tau"])
    token = NAMED.set("here")
    with mode():
        hook()
        expected = tau.copy()
        tau[...] = 0
        hook.start()
    # the caller may be elsewhere by now
    NAMED.reset(token)
    hook.wait()
    assert seen[0] == seen[1]
    assert seen[0][2] == "here"
    np.testing.assert_array_equal(tau, expected)


def test_errors_beside_the_solver(host, sim, monkeypatch):
    sim.field("u", host.array())

    def model(u):
        raise KeyError("lost")

    hook = sim.hook(model, ["u"])
    hook.start()
    with pytest.raises(ms.MpishardError, match="lost"):
        hook.wait()
    with pytest.raises(ms.UnsupportedOperationError, match="grad=True"):
        sim.hook(model, ["u"], grad=True).start()
    monkeypatch.setattr("mpishard.insitu.hook.threads_may_communicate", lambda: False)
    if SIZE > 1:
        with pytest.raises(ms.UnsupportedOperationError, match="THREAD_MULTIPLE"):
            hook.start()


def test_models_that_are_started_run_in_one_thread_until_the_release(host, sim):
    """MPI keeps memory for every thread that there has been."""
    u, tau, threads = host.array(), host.array() * 0, []
    sim.field("u", u)
    sim.field("tau", tau)

    def model(x):
        threads.append(threading.current_thread())
        if len(threads) == 2:
            raise KeyError("lost")
        return x + len(threads)

    hooks = [sim.hook(model, ["u"], ["tau"]) for _ in range(2)]
    for step in range(4):
        hooks[step % 2].start()
        with pytest.raises(ms.MpishardError, match="lost") if step == 1 else nullcontext():
            hooks[step % 2].wait()
    assert set(threads) == {threads[0]} != {threading.current_thread()}
    np.testing.assert_array_equal(tau[host.interior], (host.whole + 4)[host.box])
    sim.release()
    threads[0].join(30)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("interrupted", ["wait", "release"])
def test_who_is_interrupted_while_the_model_runs_may_wait_again(host, sim, interrupted):
    u, tau, gate = host.array(), host.array() * 0, threading.Event()
    sim.field("u", u)
    sim.field("tau", tau)

    def model(x):
        gate.wait(60)
        return x + x.sum()

    hook = sim.hook(model, ["u"], ["tau"])
    hook.start()
    call = hook.wait if interrupted == "wait" else sim.release

    def cut_short():
        main = threading.main_thread().ident
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        call()

    if WORLD.rank == SIZE - 1:
        with pytest.raises(KeyboardInterrupt):  # however late this thread comes to the call
            cut_short()
    gate.set()
    call()
    np.testing.assert_allclose(tau[host.interior], (host.whole + host.whole.sum())[host.box])
    if interrupted == "wait":
        assert hook()


def test_no_room_for_the_copies_of_one_rank(host, sim, monkeypatch):
    u, tau = host.array(), host.array() * 0
    sim.field("u", u)
    sim.field("tau", tau)
    hook = sim.hook(lambda x: x + x.sum(), ["u"], ["tau"])

    class Large:
        def clone(self):
            raise MemoryError("no room")

    with monkeypatch.context() as patch:
        if WORLD.rank == SIZE - 1:
            patch.setattr("mpishard.insitu.field.Field._enter", lambda self: Large())
        hook.start()
    with pytest.raises(ms.MpishardError, match="no room"):
        hook.wait()
    hook.start()
    hook.wait()
    np.testing.assert_allclose(tau[host.interior], (host.whole + host.whole.sum())[host.box])


@pytest.mark.parametrize("broken", [False, True])
def test_a_release_waits_for_what_was_started(host, sim, monkeypatch, broken):
    u, tau = host.array(), host.array() * 0
    sim.field("u", u)
    sim.field("tau", tau)
    weight = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    weight[..., 1, 1] = 2
    gate, freed = threading.Event(), []

    def model(x):
        gate.wait()
        y = torch.nn.functional.conv2d(x[None, None], weight, padding=1)[0, 0]
        assert not freed
        return y

    def fails(x):
        if gate.wait():
            raise KeyError("lost")

    hook, other = sim.hook(model, ["u"], ["tau"]), sim.hook(fails, ["u"])
    hook.start()
    for call in (other, other.start):
        with pytest.raises(ms.UnsupportedOperationError, match="another hook"):
            call()
    if broken:
        gate.set()
        hook.wait()
        gate.clear()
        other.start()
    mesh_free = sim.mesh.free
    monkeypatch.setattr(sim.mesh, "free", lambda: (freed.append(1), mesh_free()))
    threading.Timer(0.1, gate.set).start()
    with pytest.raises(ms.MpishardError, match="lost") if broken else nullcontext():
        sim.release()
    assert freed
    np.testing.assert_array_equal(tau[host.interior], 2 * host.whole[host.box])
    for call in (hook.wait, other.wait, other):
        with pytest.raises(ms.UnsupportedOperationError, match="released"):
            call()


def test_training_and_inference_restart_from_a_checkpoint(host, sim, tmp_path_factory):
    """One closure is trained in the loop and used in it; stopped and continued, the run is the same."""
    folder = WORLD.bcast(str(tmp_path_factory.mktemp("run")) if WORLD.rank == 0 else None)

    class Run:
        def __init__(self):
            torch.manual_seed(0)
            self.model = torch.nn.Conv2d(1, 1, 3, padding=1).double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-5, momentum=0.9)
            self.u = host.array()
            names = f"u{len(sim.fields)}"
            self.field = sim.field(names, self.u)
            self.train = sim.hook(self.learn, [names], grad=True)
            self.infer = sim.hook(self.model, [names], [names], lambda u: u[None, None], lambda y: y[0, 0], every=2)
            self.losses = []

        def learn(self, u):
            self.optimizer.zero_grad()
            loss = (self.model(u[None, None])[0, 0] - 2 * u).square().mean()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

        def steps(self, n):
            for _ in range(n):
                self.u[host.interior] += host.whole[host.box]
                self.train()
                self.infer()

    whole = Run()
    whole.steps(4)
    first = Run()
    first.steps(2)
    ms.io.save_checkpoint(
        folder, 2, model=first.model, optimizer=first.optimizer, tensors={"u": first.field.tensor}, mesh=sim.mesh
    )
    second = Run()
    found = ms.io.load_checkpoint(
        folder, model=second.model, optimizer=second.optimizer, tensors={"u": second.field.tensor}, mesh=sim.mesh
    )
    second.field.tensor.copy_(found.tensors["u"])
    second.steps(2)
    np.testing.assert_array_equal(second.u[host.interior], whole.u[host.interior])
    assert first.losses + second.losses == whole.losses


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("beside", [False, True])
def test_others_wait_inside_the_model_for_one_that_raised(host, sim, when, beside):
    """In a plan's agreement, in an exchange, in a reduction: every rank comes back, and the next call is right."""
    array = host.array()
    u = sim.field("u", array)
    torch.manual_seed(0)
    weight = torch.randn(1, 1, 3, 3, dtype=torch.float64)
    kinds = {
        "conv": lambda x: torch.nn.functional.conv2d(x[None, None], weight, padding=1)[0, 0],
        "clone": lambda x: torch.nn.functional.conv2d(x.clone()[None, None], weight, padding=1)[0, 0],
        "sum": lambda x: x * x.sum(),
        "moved": lambda x: x.redistribute(placements=(ms.Replicate(), ms.Shard(1))) + 1,
    }
    for kind, work in kinds.items():
        calls = 0

        def model(x, work=work):
            nonlocal calls
            calls += 1
            if calls == when + 1 and WORLD.rank == 0:
                raise ValueError(f"unstable at call {calls}")
            return work(x)

        hook = sim.hook(model, ["u"], ["u"])

        def call(hook=hook):
            if beside:
                hook.start()
                hook.wait()
            else:
                hook()

        for _ in range(when):
            array[host.interior] = host.whole[host.box]
            call()
        array[host.interior] = host.whole[host.box]
        with pytest.raises(ms.MpishardError, match="unstable"):
            call()
        np.testing.assert_array_equal(array[host.interior], host.whole[host.box], err_msg=kind)
        whole = u.tensor.full_tensor()
        call()
        expected = work(whole) if kind != "moved" else whole + 1
        np.testing.assert_allclose(array[host.interior], expected[host.box], rtol=1e-10, err_msg=kind)


class Unbuffered(MPI.Intracomm):
    Isend = MPI.Intracomm.Issend


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("culprits", [(0,), (0, 1)])
def test_who_raised_is_told_without_buffers(host, sim, culprits):
    """MPI may let any send wait for its receive: of several ranks that tell each other, none waits to be heard."""
    array = host.array()
    sim.field("u", array)
    agreement = sim.agreement
    agreement.comm = Unbuffered(agreement.comm)

    def model(x):
        if WORLD.rank in culprits:
            raise ValueError("unstable")
        return x * x.sum()

    hook = sim.hook(model, ["u"], ["u"])
    for _ in range(3):
        with pytest.raises(ms.MpishardError, match="unstable"):
            hook()
        np.testing.assert_array_equal(array[host.interior], host.whole[host.box])


class Full(MPI.Intracomm):
    def Dup(self, info=None):
        raise MPI.Exception(MPI.ERR_OTHER)


@pytest.mark.ranks(2, 3, 4)
def test_models_that_raise_until_no_communicator_is_left(host, sim):
    """Each leaves some behind: the last one says so, and nothing is agreed on afterwards."""
    array = host.array()
    sim.field("u", array)
    sim.agreement.comm = Full(sim.agreement.comm)

    def model(x):
        if WORLD.rank == 0:
            raise ValueError("unstable")
        return x * x.sum()

    hook = sim.hook(model, ["u"], ["u"])
    for call in (hook, hook, lambda: sim.hook(model, ["u"], ["u"]), lambda: sim.field("v", array.copy())):
        with pytest.raises(ms.errors.MeshError, match="so often that MPI makes no more communicators"):
            call()
    np.testing.assert_array_equal(array[host.interior], host.whole[host.box])


def _shifted(x, folder):
    corner = x.to_local().sum().reshape(1, 1)
    for way in (1, -1):
        corner = 1 + ms.shift(corner, x.mesh, "x", way).square()
    return x + ms.all_reduce(corner.sum(), x.mesh)


def _sent(x, folder):
    # more than MPI sends before it is asked for
    many = torch.ones(1 << 18, dtype=x.dtype)
    beside = {"dest": (WORLD.rank + 1) % SIZE, "source": (WORLD.rank - 1) % SIZE}
    return x + ms.send_recv(many, x.mesh, **beside)[0]


def _scattered(x, folder):
    whole = torch.ones(*x.shape, dtype=x.dtype) if x.mesh.rank == 0 else None
    sizes = dict(enumerate(x.sharding.sizes))
    return x + ms.scatter_tensor(whole, 0, x.mesh, x.placements, sizes=sizes)


def _written(x, folder):
    ms.io.write(f"{folder}/out.h5", {"u": x})
    return x + 1


def _read(x, folder):
    sizes = dict(enumerate(x.sharding.sizes))
    return x + ms.io.read(f"{folder}/in.h5", "u", x.mesh, x.placements, sizes=sizes)


def _saved(x, folder):
    ms.io.save_checkpoint(f"{folder}/saved", 1, tensors={"u": x}, mesh=x.mesh)
    return x + 1


def _loaded(x, folder):
    return x + ms.io.load_checkpoint(f"{folder}/loaded", tensors={"u": x}, mesh=x.mesh).tensors["u"]


@pytest.mark.parametrize("culprit", [0, SIZE - 1])
@pytest.mark.parametrize("work", [_shifted, _sent, _scattered, _written, _read, _saved, _loaded])
def test_others_wait_for_messages_or_files(host, sim, tmp_path_factory, work, culprit):
    """Ranks that wait in a message, a scatter or a file for the one whose model has raised come back."""
    folder = WORLD.bcast(str(tmp_path_factory.mktemp("files")) if WORLD.rank == 0 else None)
    array = host.array()
    u = sim.field("u", array)
    ms.io.write(f"{folder}/in.h5", {"u": u.tensor})
    ms.io.save_checkpoint(f"{folder}/loaded", 1, tensors={"u": u.tensor}, mesh=sim.mesh)
    fails = True

    def model(x):
        if fails and WORLD.rank == culprit:
            raise ValueError("unstable")
        return work(x, folder)

    hook = sim.hook(model, ["u"], ["u"])
    with pytest.raises(ms.MpishardError, match="unstable"):
        hook()
    np.testing.assert_array_equal(array[host.interior], host.whole[host.box])
    fails = False
    hook()
    assert (u.tensor.full_tensor().numpy() > host.whole).any()
