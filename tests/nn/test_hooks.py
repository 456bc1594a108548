"""Hooks of parameters on some ranks alone, as a logger of rank 0 has them: ranks send the same, and hooks see sums."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

import mpishard as ms
from mpishard.comm import guard
from tests.compare import WORLD, mesh_of, mesh_shapes


class Net(nn.Module):
    """Small and large parameters, one used twice, one on replicated data too, one never."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {"scale": 6, "shift": 6, "both": 6, "mix": (6, 6), "wide": (6, 400), "unused": 6}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))

    def forward(self, x):
        y = torch.tanh(x * self.scale + self.shift) @ self.mix
        y = torch.tanh((y + self.both * x) @ self.wide)
        return (y**2).mean() + (x @ self.mix).mean() + (self.both**2).sum() + (self.wide**3).mean()


def full():
    return torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


def pair(shape=(-1,), **options):
    mesh = mesh_of(shape)
    placements = (ms.Shard(0), ms.Shard(1))[: mesh.ndim]
    return Net(), ms.distribute_module(Net(), mesh, **options), ms.distribute_tensor(full(), mesh, placements)


def whole(t):
    return t.full_tensor() if isinstance(t, ms.ShardTensor) else t


def alike(ours, plain):
    for (name, p), (_, q) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(whole(p.grad), q.grad, msg=name)


everywhere = pytest.mark.parametrize("some", ["first", "last", "all"])


def here(some):
    return some == "all" or WORLD.rank == {"first": 0, "last": WORLD.size - 1}[some]


def watched(model, seen):
    """Register hooks on all parameters, as a logger does."""
    handles = []
    for name, p in model.named_parameters():
        handles.append(p.register_hook(lambda g, n=name: seen.append((n, g.clone()))))
        handles.append(
            p.register_post_accumulate_grad_hook(lambda p, n=name: seen.append((n + " after", p.grad.clone())))
        )
    return handles


def same_seen(seen, expected):
    assert sorted(name for name, _ in seen) == sorted(name for name, _ in expected)
    expected = dict(expected)
    for name, g in seen:
        torch.testing.assert_close(g, expected[name], msg=name)


@everywhere
@pytest.mark.parametrize("shape", mesh_shapes(2))
def test_a_logger_on_some_ranks(some, shape):
    plain, ours, x = pair(shape)
    seen, expected = [], []
    theirs, mine = watched(plain, expected), watched(ours, seen) if here(some) else []
    for _ in range(3):  # accumulated
        for net, data in ((plain, full()), (ours, x)):
            net(data).backward()
        alike(ours, plain)
        if here(some):
            same_seen(seen, expected)
        seen.clear()
        expected.clear()
    for handle in (*theirs, *mine):
        handle.remove()
    for net, data in ((plain, full()), (ours, x)):
        net.zero_grad()
        net(data).backward()
    alike(ours, plain)
    assert not seen
    pickle.loads(pickle.dumps(ours.state_dict()))


@everywhere
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("how", ["create_graph", "grad", "inputs"])
def test_other_passes(some, how):
    plain, ours, x = pair()
    seen, expected = [], []
    watched(plain, expected)
    if here(some):
        watched(ours, seen)
    for net, data in ((plain, full()), (ours, x)):
        for again in (False, True):
            loss = net(data)
            if how == "create_graph":
                loss.backward(create_graph=True)
                grads = [p.grad for p in net.parameters() if p.grad is not None]
                net.zero_grad()
                sum((whole(g) ** 2).sum() for g in grads).backward()
            elif how == "inputs":
                loss.backward(inputs=[net.scale, net.mix])
            else:
                for p, g in zip((net.both, net.wide), torch.autograd.grad(loss, [net.both, net.wide])):
                    p.grad = g
            if not again:
                net(data * 2).backward()
    alike(ours, plain)
    if here(some):
        assert [n for n, _ in sorted(seen, key=lambda s: s[0])] == [n for n, _ in sorted(expected, key=lambda s: s[0])]


def test_what_hooks_return_is_accumulated():
    plain, ours, x = pair()
    for net, data in ((plain, full()), (ours, x)):
        for p in (net.scale, net.both, net.mix):
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
            p.register_hook(lambda g: 3 * g)
        for _ in range(2):
            net(data).backward()
    alike(ours, plain)


@pytest.mark.ranks(2, 3, 4)
def test_a_gradient_that_some_ranks_change(monkeypatch):
    """Their copies of the parameter would part."""
    monkeypatch.setattr(guard, "DEBUG", False)  # which compares gradients in the first pass already
    _, ours, x = pair()
    if WORLD.rank == WORLD.size - 1:
        ours.mix.register_hook(lambda g: 2 * g)
    ours(x).backward()
    told = "a hook returned another gradient" if WORLD.rank == WORLD.size - 1 else "its own error names"
    with pytest.raises(ms.DesyncError, match=told):
        ours(x).backward()


def test_an_optimizer_in_hooks():
    plain, ours, x = pair()
    for net, data in ((plain, full()), (ours, x)):

        def step(p):
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            net(data).backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p.detach(), q.detach())


def test_a_hook_that_returns_what_torch_refuses():
    plain, ours, x = pair()
    for net, data in ((plain, full()), (ours, x)):
        next(net.parameters()).register_post_accumulate_grad_hook(lambda _: 1)
        with pytest.raises((RuntimeError, TypeError), match="hook"):
            net(data).backward()


@everywhere
@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_of_several_parameters(some, mode):
    plain, ours, x = pair()
    seen = {plain: [], ours: []}
    for net, data in ((plain, full()), (ours, x)):
        if net is plain or here(some):
            known = [net.scale, net.mix, net.both]
            register_multi_grad_hook(known, lambda g, net=net: seen[net].append(g), mode=mode)
        for _ in range(2):
            net(data).backward()
    alike(ours, plain)
    assert len(seen[ours]) == (2 if here(some) else 0)
    if mode == "all" and here(some):
        torch.testing.assert_close(seen[ours], seen[plain])


@everywhere
def test_accumulation_sums_once(some):
    """Hooks are called by the pass that sums, with the sum, and by others with what needs none."""
    plain, ours, x = pair()
    seen, handles = [], []
    if here(some):
        for name, p in ours.named_parameters():
            handles.append(p.register_hook(lambda g, n=name: seen.append((n, g.clone()))))
    for net, data in ((plain, full()), (ours, x)):
        net.zero_grad()
        with ms.no_sync():
            net(data).backward()
            net(2 * data).backward()
        (net(3 * data) - net.shift.sum()).backward()
    alike(ours, plain)
    if here(some):
        totals = {}
        for name, g in seen:
            totals[name] = totals.get(name, 0) + g
        assert set(totals) == {"scale", "shift", "both", "mix", "wide"}
        for name, total in totals.items():
            torch.testing.assert_close(total, plain.get_parameter(name).grad, msg=name)
        assert [name for name, _ in seen].count("scale") == 1


@everywhere
@pytest.mark.parametrize("how", ["plain", "sharded"])
def test_a_pass_within_a_pass(some, how):
    plain, ours, x = pair()
    seen = []
    if here(some):
        watched(ours, seen)
    for net, data in ((plain, full()), (ours, x)):
        for _ in range(2):
            y = data * net.scale

            def inner(_, net=net, data=data):
                with torch.enable_grad():
                    for _ in range(2):
                        if how == "plain":
                            ((3 * net.both**2).sum() + (net.mix**3).sum()).backward()
                        net(2 * data).backward()

            y.register_hook(inner)
            ((net.both**3).sum() + net(y)).backward()
    alike(ours, plain)
    if here(some):
        for name, p in plain.named_parameters():
            totals = [g for other, g in seen if other == name]
            assert (p.grad is None) == (not totals)
            if totals:
                torch.testing.assert_close(sum(totals), p.grad, msg=name)


@everywhere
def test_sharded_parameters(some):
    plain, ours, x = pair(shard_parameters=0)
    seen, expected = [], []
    watched(plain, expected)
    if here(some):
        watched(ours, seen)
    for net, data in ((plain, full()), (ours, x)):
        for _ in range(2):
            net(data).backward()
    alike(ours, plain)
    assert len(seen) == (len(expected) if here(some) else 0)
    if some == "all":
        for (name, g), (other, h) in zip(sorted(seen, key=lambda s: s[0]), sorted(expected, key=lambda s: s[0])):
            assert name == other
            torch.testing.assert_close(whole(g), h, msg=name)


@pytest.mark.ranks(2, 3, 4)
def test_a_hook_that_raises_leaves_the_others_as_they_are():
    """What waited in a pass that failed does not keep later hooks from being called."""
    _, ours, x = pair()
    calls = []

    def hook(_):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("once")

    ours.mix.register_hook(hook)
    with pytest.raises(ValueError, match="once"):
        ours(x).backward()
    ours.zero_grad()
    (ours.mix**2).sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(ours.mix.grad, 2 * ours.mix.detach())
