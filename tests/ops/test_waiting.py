"""What ranks wait for in a training step, and what they do while sums travel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from mpishard.autograd import bucket
from mpishard.comm import guard
from mpishard.comm.collective import blocking, nonblocking
from mpishard.comm.transport.host import Host
from mpishard.ops.window import conv, conv_kernel, conv_overlap
from tests.compare import WORLD, mesh_of
from tests.emulated import emulated

pytestmark = pytest.mark.ranks(2, 3, 4)
EXAMPLES = Path(__file__).parents[2] / "examples"


def values(*shape, seed=5):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def events(monkeypatch):
    """What happens, in order: blocking collectives, sums that are started and waited for, gradients of weights."""
    told = []
    monkeypatch.setattr(blocking, "DETERMINISTIC", False)  # sums in rank order wait, and comparisons reduce
    monkeypatch.setattr(guard, "DEBUG", False)

    def record(owner, name, event):
        before = getattr(owner, name)

        def recorded(*args, **kwargs):
            found = event(*args) if callable(event) else event
            told.extend([found] if found else [])
            return before(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)

    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
        record(Host, name, "blocking")
    record(guard, "_agree", "blocking")
    record(Host, "start_sum", "start")
    record(nonblocking.PendingReduction, "wait", "wait")
    for module in (conv_kernel, conv_overlap):
        record(module, "convolution_backward", lambda *args: "weight" if args[-1][1] else "")
    return told


def test_unet_waits_for_few_reductions(events, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from unet import UNet

    mesh = ms.init_mesh((WORLD.size,))
    torch.manual_seed(0)
    model = ms.distribute_module(UNet(base=8, levels=4), mesh)
    x = ms.distribute_tensor(values(1, 1, 8 * WORLD.size, 8, 8).float(), mesh, (ms.Shard(2),))
    truth = (x > 0).expand(-1, 2, -1, -1, -1).float()

    def step():
        logits = model(x)
        p, dims = torch.sigmoid(logits), (2, 3, 4)
        overlap = 2 * (p * truth).sum(dims) / ((p * p).sum(dims) + (truth * truth).sum(dims))
        loss = F.binary_cross_entropy_with_logits(logits, truth) + 1 - overlap.mean()
        loss.backward()
        return loss.item()

    step()  # plans are made once; ranks agree on them
    events.clear()
    step()
    norms = 14
    # large gradients one after the other at the end, uncopied; all others together
    alone = sum(p.nbytes >= bucket.ALONE_NBYTES for p in model.parameters())
    assert events.count("blocking") <= norms + 2 + alone
    assert events.count("start") == norms + 4  # of the norms backward, and of the loss


def test_weight_gradient_is_computed_while_the_sums_of_the_norm_travel(events, monkeypatch):
    monkeypatch.setattr(conv, "LARGE_CELLS", 0)
    mesh = ms.init_mesh((WORLD.size,))
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
    ).double()
    x = values(2, 2, 8 * WORLD.size, 6)
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    ms.distribute_module(net, mesh)
    sharded = ms.distribute_tensor(x, mesh, (ms.Shard(2),))
    for _ in range(2):
        net.zero_grad()
        loss = net(sharded).square().sum()
        loss.item()
        events.clear()
        loss.backward()
        for p, e in zip(net.parameters(), expected):
            torch.testing.assert_close(p.grad, e, rtol=1e-10, atol=1e-10)
    assert "weight" in events[events.index("start") : events.index("wait")]


def test_shared_weights_and_hooks_do_not_read_what_is_computed_later(monkeypatch):
    monkeypatch.setattr(conv, "LARGE_CELLS", 0)
    mesh = mesh_of((WORLD.size,))
    shared = nn.Conv2d(2, 2, 3, padding=1).double()
    x, seen = values(2, 2, 8 * WORLD.size, 6), []
    net = nn.Sequential(shared, nn.GroupNorm(1, 2).double(), shared, nn.ReLU(), shared)
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    ms.distribute_module(net, mesh)
    sharded = ms.distribute_tensor(x, mesh, (ms.Shard(2),))

    def found():
        net.zero_grad()
        net(sharded).square().sum().backward()
        for p, e in zip(net.parameters(), expected):
            torch.testing.assert_close(p.grad, e, rtol=1e-10, atol=1e-10)

    found()
    handle = shared.weight.register_hook(lambda g: seen.append(g.clone()))
    found()
    handle.remove()
    torch.testing.assert_close(seen[-1] if len(seen) == 1 else sum(seen), expected[0], rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(net(sharded).square().sum(), list(net.parameters()))
    for g, e in zip(grads, expected):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-10)


# sums that nobody has asked for yet


def test_sums_are_read_by_one_rank_alone():
    mesh = mesh_of((WORLD.size,))
    x = values(4 * WORLD.size, 3)
    sharded = ms.distribute_tensor(x, mesh, (ms.Shard(0),))
    total, mean, unread = sharded.sum(), sharded.mean(0), sharded.sum(0)
    if WORLD.rank == WORLD.size - 1:
        assert total.item() == pytest.approx(x.sum().item(), rel=1e-12)
    torch.testing.assert_close(mean.full_tensor(), x.mean(0))
    assert type(mean) is ms.ShardTensor
    assert unread.shape == (3,)
    assert unread.dtype == x.dtype
    del unread
    assert isinstance(total, ms.ShardTensor)
    assert not hasattr(sharded.sum(), "no_such_name")


def test_sums_read_in_another_order_have_the_same_gradients():
    mesh = mesh_of((WORLD.size,))
    x = values(4 * WORLD.size, 3)
    leaf = ms.distribute_tensor(x, mesh, (ms.Shard(0),)).requires_grad_()
    a, b = (leaf * 2).sum(), leaf.square().mean()
    order = (a, b) if WORLD.rank else (b, a)
    with torch.no_grad():
        read = [t.item() for t in order]
    assert read[WORLD.rank == 0] == pytest.approx(2 * x.sum().item())
    assert a.requires_grad
    assert b.requires_grad
    (a * b).backward()
    whole = x.clone().requires_grad_()
    ((whole * 2).sum() * whole.square().mean()).backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_dtypes_of_sums(dtype):
    mesh = mesh_of((WORLD.size,))
    x = (values(4 * WORLD.size, 3) > 0).to(dtype)
    sharded = ms.distribute_tensor(x, mesh, (ms.Shard(0),))
    for f in (lambda t: t.sum(), lambda t: t.sum(0)):
        got, expected = f(sharded), f(x)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.full_tensor(), expected)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_statistics_about_an_offset(offset):
    mesh = mesh_of((WORLD.size,))
    x = values(2, 4, 4 * WORLD.size, 5) + offset
    sharded = ms.distribute_tensor(x, mesh, (ms.Shard(2),))
    y = F.group_norm(sharded, 2).full_tensor()
    torch.testing.assert_close(y, F.group_norm(x, 2), rtol=1e-11, atol=1e-11 * max(1, offset))
    narrow = F.group_norm(sharded.float(), 2).full_tensor()
    torch.testing.assert_close(narrow.double(), F.group_norm(x.float().double(), 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [False, True])
def test_on_a_device(kernel):
    """Sums on their way to a device: nothing reads them before they are there."""
    scale = values(4, seed=1).requires_grad_()
    x = values(2, 4, 4 * WORLD.size, 5)
    with emulated(kernel=kernel):
        mesh = ms.init_mesh((WORLD.size,))
        sharded = ms.distribute_tensor(x, mesh, (ms.Shard(2),)).requires_grad_()
        y = F.group_norm(sharded, 2, scale)
        a, b = (y * y * sharded.detach()).sum(), y.abs().mean()
        loss = a * b
        loss.backward()
        got = loss.item(), sharded.grad.full_tensor(), scale.grad
    whole, w = x.clone().requires_grad_(), scale.detach().clone().requires_grad_()
    z = F.group_norm(whole, 2, w)
    expected = (z * z * x).sum() * z.abs().mean()
    expected.backward()
    assert got[0] == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(got[1], whole.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got[2], w.grad, rtol=1e-9, atol=1e-9)
