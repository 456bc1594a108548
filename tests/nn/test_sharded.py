"""Sharded parameters: what one process computes, with a share of the memory."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, parametrize, vector_to_parameters
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from tests.compare import WORLD, shard
from tests.models.convolutional import UNet
from tests.models.transformer import Block, VisionTransformer
from tests.models.twin import close, data, mean_square, run, seeded

SHAPES = {1: [(1, 1)], 2: [(2, 1)], 3: [(3, 1)], 4: [(2, 2), (4, 1)]}
PLACEMENTS = (ms.Shard(0), ms.Shard(2))


@pytest.fixture(params=SHAPES.get(WORLD.size, [(2, WORLD.size // 2)]), ids=str)
def mesh(request):
    return ms.init_mesh(request.param, ("data", "y"))


def sharded(build, mesh, dtype=torch.float64, **options):
    return ms.distribute_module(seeded(build, dtype, mesh.rank), mesh, **{"shard_parameters": "data", **options})


def whole(x):
    return x.full_tensor() if isinstance(x, ms.ShardTensor) else x


def same(model, reference, what, rtol=1e-9):
    """Parameters, and gradients relative to the largest."""
    scale = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(whole(p.detach()), q.detach(), f"{what}: {name}", rtol)
        assert (p.grad is None) == (q.grad is None), f"{what}: gradient of {name}"
        if q.grad is not None:
            torch.testing.assert_close(
                whole(p.grad), q.grad, rtol=rtol, atol=rtol * scale, msg=lambda m, n=name: f"{what}: {n}: {m}"
            )


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(8, 2), Block(8, 2)

    def forward(self, x):
        return checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)


class Tied(nn.Module):
    """One weight in two modules, a module that is called twice, a frozen parameter, and a spare one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 4, 3, padding=1)
        self.second.weight = self.first.weight
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.spare = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x):
        y = self.first(x) + self.second(x.square())
        return self.frozen(torch.tanh(self.twice(torch.tanh(self.twice(y))))) * self.scale


class TorchAttention(nn.Module):
    """A module that reads parameters of one inside it, which is not called."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """A layer that computes with a list of its parameters."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(8, 8, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0]


MODELS = {
    "unet": (lambda: UNet(2), (4, 1, 13, 11)),
    "unet, group norms": (lambda: UNet(2, norm="group"), (4, 1, 13, 11)),
    "vit": (lambda: VisionTransformer((20, 28)), (4, 3, 20, 28)),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 4, 3)), nn.Conv2d(4, 4, 1)),
        (4, 1, 9, 8),
    ),
    "tied": (Tied, (4, 1, 9, 8)),
    # a hook makes the weight of other parameters
    "weight norm, of old": (
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Conv2d(1, 4, 3)), nn.Conv2d(4, 4, 1)),
        (4, 1, 9, 8),
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_one_process(mesh, name):
    build, shape = MODELS[name]
    full = data(*shape)
    reference, everything = seeded(build, full.dtype), full.clone().requires_grad_()
    model = sharded(build, mesh)
    held = sum(isinstance(p, ms.ShardTensor) for p in model.parameters())
    assert held or mesh.shape[0] == 1
    for step in range(2):  # the second one gathers ahead
        expected, _ = run(reference, everything, mean_square)
        x = ms.distribute_tensor(full, mesh, PLACEMENTS).requires_grad_()
        out, _ = run(model, x, mean_square)
        close(out, expected, f"{name} {step}: output")
        same(model, reference, f"{name} {step}")
    close(x.grad, everything.grad / 2, f"{name}: gradient of the input")
    with torch.no_grad():
        close(model(x), reference(everything), f"{name}: without gradients")


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Sequential(TorchAttention(), Block(8, 2)), (4, 9, 8)),
        (Checkpointed, (4, 9, 8)),
        (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), (4, 9, 8)),
        (lambda: nn.Sequential(Recurrent(nn.GRU), Recurrent(nn.RNN)), (4, 9, 8)),
        (lambda: Recurrent(nn.LSTM, proj_size=4), (4, 9, 8)),
    ],
)
def test_attention_recurrence_and_checkpoints(mesh, build, shape):
    full = data(*shape)
    reference = seeded(build, full.dtype)
    expected, _ = run(reference, full, mean_square)
    model = sharded(build, mesh)
    for _ in range(2):
        model.zero_grad()
        out, _ = run(model, ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Shard(1))), mean_square)
    close(out, expected, "output")
    same(model, reference, "gradients")


def test_batch_on_other_dims_than_the_parameters(mesh):
    """Parameters over "data", data over "y" alone or over none; and parameters over both dims."""
    full = data(4, 1, 13, 11)
    reference = seeded(lambda: UNet(2), full.dtype)
    expected, _ = run(reference, full, mean_square)
    for over, placements in (
        ("data", (ms.Replicate(), ms.Shard(2))),
        ("data", (ms.Replicate(), ms.Replicate())),
        (("data", "y"), PLACEMENTS),
        ("y", (ms.Shard(0), ms.Replicate())),
        (np.int64(0), PLACEMENTS),
    ):
        model = sharded(lambda: UNet(2), mesh, shard_parameters=over)
        out, _ = run(model, ms.distribute_tensor(full, mesh, placements), mean_square)
        close(out, expected, f"{over} {placements}: output")
        same(model, reference, f"{over} {placements}")


OPTIMISERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}


def trained(model, x, make, steps=3):
    optimizer = make(model.parameters())
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        mean_square(model(x)).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
    return optimizer, norms


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimizers_and_clipping(mesh, name):
    def build():
        return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU(), nn.Conv2d(6, 4, 3))

    full = data(4, 1, 9, 8)
    reference = seeded(build, full.dtype)
    _, expected = trained(reference, full, OPTIMISERS[name])
    model = sharded(build, mesh)
    optimizer, norms = trained(model, ms.distribute_tensor(full, mesh, PLACEMENTS), OPTIMISERS[name])
    close([whole(n) for n in norms], expected, "norms", 1e-8)
    same(model, reference, name, 1e-7)
    for state in optimizer.state.values():
        for value in state.values():
            assert not isinstance(value, ms.ShardTensor) or value.to_local().shape[0] <= value.shape[0]


def test_derivatives_that_go_by_autograd_grad_and_hooks(mesh):
    full = data(4, 1, 9, 8)

    def build():
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3))

    reference, model = seeded(build, full.dtype), sharded(build, mesh)
    x = ms.distribute_tensor(full, mesh, PLACEMENTS)
    expected = torch.autograd.grad(mean_square(reference(full)), list(reference.parameters()), create_graph=True)
    found = torch.autograd.grad(mean_square(model(x)), list(model.parameters()), create_graph=True)
    for g, h in zip(found, expected, strict=True):
        close(whole(g), h, "first order")
    second = torch.autograd.grad(sum(whole(g).square().sum() for g in found), list(model.parameters()))
    wanted = torch.autograd.grad(sum(h.square().sum() for h in expected), list(reference.parameters()))
    for g, h in zip(second, wanted, strict=True):
        close(whole(g), h, "second order")
    seen = []
    model[0].weight.register_hook(lambda g: seen.append(g) or 2 * g)
    mean_square(model(x)).backward()
    mean_square(reference(full)).backward()
    assert len(seen) == 1
    close(whole(model[0].weight.grad), 2 * reference[0].weight.grad, "hooked")


def test_gathered_in_bfloat16(mesh):
    """Master weights and gradients in float32; as near to one process in float32 as its own bfloat16 is, or nearly."""

    def build():
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1))

    full = data(4, 1, 9, 8, dtype=torch.float32)
    reference = seeded(build, torch.float32)
    mean_square(reference(full)).backward()
    model = sharded(build, mesh, torch.float32, gather_dtype=torch.bfloat16)
    x = ms.distribute_tensor(full, mesh, PLACEMENTS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    if mesh.shape[0] > 1:
        assert out.dtype == torch.bfloat16
    mean_square(out.float()).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=0.1, atol=0.02 * float(q.grad.abs().max()) + 2e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before = [whole(p.detach()).clone() for p in model.parameters()]
    optimizer.step()  # smaller than the least step of bfloat16
    assert all((whole(p.detach()) != b).any() for p, b in zip(model.parameters(), before))


def test_checkpoint_on_another_mesh(mesh, tmp_path):
    folder = WORLD.bcast(str(tmp_path))

    def build():
        return UNet(2, norm="group")

    full = data(4, 1, 13, 11)
    model = sharded(build, mesh)
    x = ms.distribute_tensor(full, mesh, PLACEMENTS)
    optimizer, _ = trained(model, x, OPTIMISERS["AdamW"])
    ms.io.save_checkpoint(folder, 3, model=model, optimizer=optimizer, mesh=mesh)
    one = seeded(build, full.dtype)
    trained(one, full, OPTIMISERS["AdamW"])
    other = ms.init_mesh((1, WORLD.size), ("data", "y"))
    for there, options in ((mesh, {}), (other, {"shard_parameters": "y"}), (other, {"shard_parameters": None})):
        again = sharded(build, there, **options)
        fresh = OPTIMISERS["AdamW"](again.parameters())
        ms.io.load_checkpoint(folder, model=again, optimizer=fresh, mesh=there)
        y = ms.distribute_tensor(full, there, PLACEMENTS)
        reference = copy.deepcopy(one)
        for p, q in zip(again.parameters(), reference.parameters(), strict=True):
            close(whole(p.detach()), q.detach(), "loaded", 1e-7)
        mean_square(again(y)).backward()
        mean_square(reference(full)).backward()
        fresh.step()


def test_memory_is_a_share(mesh):
    """Parameters, gradients and Adam's state: a share, and a tenth of all, and two layers with their gradients."""
    width, depth = 64, 8

    def build():
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    model = sharded(build, mesh, torch.float32)
    count = mesh.shape[0]
    layer = 4 * (width * width + width)
    total = 4 * depth * layer
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = ms.distribute_tensor(data(4, 4, width, dtype=torch.float32), mesh, (ms.Shard(0), ms.Replicate()))
    before = ms.parameter_memory(model)["parameters"]
    peaks = []
    for _ in range(3):
        with ms.testing.LiveMemory() as live:
            model(x).square().sum().backward()
        peaks.append(before + live.peak + ms.parameter_memory(model, optimizer)["optimizer"])
        optimizer.step()
        memory = ms.parameter_memory(model, optimizer)
        assert count == 1 or all(p.grad.to_local().shape == p.to_local().shape for p in model.parameters())
        optimizer.zero_grad()
    assert memory["parameters"] == memory["gradients"] == before
    assert before + before + memory["optimizer"] <= (1 / count + 0.1) * total
    if count > 1:
        assert memory["gathered_peak"] <= 2 * layer
        assert max(peaks) <= (1 / count + 0.1) * total + 4 * layer, (peaks, total, layer)


@pytest.mark.ranks(2, 3, 4)
def test_layers_are_gathered_ahead_and_dropped(mesh):
    model = sharded(lambda: nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)]), mesh)
    x = ms.distribute_tensor(data(4, 3, 8), mesh, (ms.Shard(0), ms.Replicate()))
    counts = []
    for _ in range(2):
        with ms.comm_counter() as forward:
            loss = model(x).square().sum()
        with ms.comm_counter() as backward:
            loss.backward()
        counts.append((forward.by_op["all_gather"].messages, backward.by_op["all_gather"].messages))
        assert backward.by_op["reduce_scatter"].messages == 4
    # the first layer's backward needs no weight: the data need no gradient
    assert counts == [(4, 3), (4, 3)]
    layer = model[0].weight.numel() * 8
    held = []
    for part in model:
        part.register_forward_hook(lambda *_: held.append(ms.parameter_memory(model)["gathered"]))
    with torch.no_grad():
        model(x)
    # its own was dropped by then, the next is on its way
    assert held == [layer, layer, layer, 0]
    assert ms.parameter_memory(model)["gathered_peak"] == 2 * layer


@pytest.mark.ranks(2, 3, 4)
def test_neighbours_travel_together(mesh):
    """Norms and biases with the convolution before, as far as that is hardly more than the largest layer."""

    def conv():
        return nn.Conv1d(16, 16, 9, padding=4)

    def build():
        pairs = [layer() for _ in range(3) for layer in (conv, lambda: nn.GroupNorm(2, 16))]
        return nn.Sequential(*pairs, nn.Conv1d(16, 2, 1), nn.Flatten())

    reference = seeded(build, torch.float64)
    model = sharded(build, mesh)
    full = data(4, 16, 7)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Replicate())).requires_grad_()
    for _ in range(3):
        model.zero_grad()
        with ms.comm_counter() as forward:
            loss = model(x).square().sum()
        with ms.comm_counter() as backward:
            loss.backward()
        # three pairs, the last with the layer that follows
        assert forward.by_op["all_gather"].messages == 3
        assert backward.by_op["all_gather"].messages == 3
        assert backward.by_op["reduce_scatter"].messages == 3
    pair = sum(p.numel() for p in nn.Sequential(*list(reference)[4:]).parameters()) * 8
    assert ms.parameter_memory(model)["gathered_peak"] <= 2 * pair
    assert ms.parameter_memory(model)["gathered"] == 0
    reference(full).square().sum().backward()
    same(model, reference, "gradients")


@pytest.mark.ranks(2, 3, 4)
def test_layers_in_another_order_than_they_were_made(mesh):
    """Units come back, and what was kept for a layer that did not come is dropped."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.big = nn.Linear(8, 32)
            self.small = nn.ModuleList([nn.Linear(8, 8, bias=bool(i % 2)) for i in range(5)])
            self.back = nn.Linear(32, 8)

        def forward(self, x, order):
            for i in order:
                x = torch.tanh(self.small[i](x))
                if i == 2:
                    x = self.back(self.big(x))
            return x

    reference = seeded(Odd, torch.float64)
    model = sharded(Odd, mesh)
    full = data(4, 3, 8)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Replicate()))
    for order in ((0, 1, 2, 3, 4), (4, 0, 2, 2, 1), (1,), (3, 1, 4, 1, 0, 2), (2, 0)):
        model.zero_grad()
        reference.zero_grad()
        with torch.no_grad():
            close(model(x, order[:-1]), reference(full, order[:-1]), f"{order}: without gradients")
        out = model(x, order)
        assert ms.parameter_memory(model)["gathered"] <= 2 * 8 * (32 * 8 + 32) * 17 // 16
        expected = reference(full, order)
        close(out.detach(), expected.detach(), str(order))
        out.square().sum().backward()
        expected.square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (order, name)
            if q.grad is not None:
                torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-9, atol=1e-12, msg=f"{order}: {name}")
        with torch.no_grad():
            for p in (*model.parameters(), *reference.parameters()):
                p.mul_(0.9)


@pytest.mark.ranks(2, 3, 4)
def test_a_layer_called_over_and_over(mesh):
    """Small and large: its gradients do not pile up on their way."""

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 1 << 13)

        def forward(self, x):
            for i in range(12):
                x = torch.tanh(self.large(x)[..., :: 1 << 10] if i % 5 == 1 else self.small(x))
            return x

    reference, model = seeded(Again, torch.float64), sharded(Again, mesh)
    full = data(4, 3, 8)
    model(ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Replicate()))).square().sum().backward()
    reference(full).square().sum().backward()
    same(model, reference, "gradients")


@pytest.mark.ranks(2, 3, 4)
def test_a_backward_that_fails_holds_nothing(mesh):
    model = sharded(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), mesh)
    x = ms.distribute_tensor(data(4, 3, 8), mesh, (ms.Shard(0), ms.Replicate())).requires_grad_()

    def fails(*_):
        raise KeyError("in the middle")

    handle = model[1].register_full_backward_hook(fails)
    loss = model(x).square().sum()
    with pytest.raises(KeyError, match="in the middle"):
        loss.backward()
    handle.remove()
    model[3](x).sum().backward()
    assert ms.parameter_memory(model)["gathered"] == 0
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        model(x).square().sum().backward()
        assert ms.parameter_memory(model)["gathered"] == 0
    reference = seeded(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.float64)
    reference(data(4, 3, 8)).square().sum().backward()
    same(model, reference, "after it")


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        self.between = torch.tanh(F.linear(x, self.weight))
        return F.linear(self.between, self.weight)


def test_a_backward_that_fails_between_two_uses_and_another_of_its_graph(mesh):
    full = data(4, 3, 8)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Replicate()))
    reference, model = seeded(Twice, torch.float64), sharded(Twice, mesh)

    def fails(_):
        raise KeyError("in the middle")

    for net, given in ((reference, full), (model, x)):
        loss = net(given).square().sum()
        handle = net.between.register_hook(fails)
        with pytest.raises(KeyError, match="in the middle"):
            loss.backward(retain_graph=True)
        handle.remove()
        net.zero_grad()
        loss.backward()
    same(model, reference, "after it")


@pytest.mark.ranks(2, 3, 4)
def test_writing_into_a_parameter_that_backward_needs(mesh):
    model = sharded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh)
    x = ms.distribute_tensor(data(4, 3, 8), mesh, (ms.Shard(0), ms.Replicate())).requires_grad_()
    loss = model(x).square().sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("build", "options", "error", "text"),
    [
        (lambda: nn.Linear(8, 8), {"shard_parameters": "batch"}, ms.MeshError, "no such mesh dim"),
        (lambda: nn.Linear(8, 8), {"shard_parameters": True}, ms.MeshError, "no such mesh dim"),
        (lambda: nn.Linear(8, 8), {"shard_parameters": False}, ms.MeshError, "no such mesh dim"),
        (lambda: nn.Linear(8, 8), {"gather_dtype": torch.bfloat16}, ms.LayoutError, "which they belong to"),
        (
            lambda: nn.Linear(8, 8),
            {"shard_parameters": 0, "gather_dtype": "x"},
            ms.LayoutError,
            "a floating-point dtype",
        ),
        (lambda: nn.Linear(8, 8), {"offload": True}, ms.LayoutError, "which they belong to"),
    ],
)
def test_what_is_refused(mesh, build, options, error, text):
    with pytest.raises(error, match=text):
        ms.distribute_module(build(), mesh, **options)


@pytest.mark.parametrize("again", [{}, {"shard_parameters": "y"}])
def test_a_second_call_is_refused(mesh, again):
    model = sharded(lambda: nn.Linear(8, 8), mesh)
    with pytest.raises(ms.LayoutError, match="not distributed with shard_parameters"):
        ms.distribute_module(nn.Sequential(model), mesh, **again)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("how", ["assign", "set", "plain", "removed"])
def test_replaced_parameters_are_read_or_refused(mesh, how):
    model = sharded(lambda: nn.Linear(8, 8), mesh)
    x = ms.ones(4, 8, mesh=mesh, placements=[ms.Shard(0), ms.Replicate()], dtype=torch.float64)
    model(x)
    state = {name: p.detach() * 10 for name, p in model.state_dict().items()}
    if how == "assign":
        model.load_state_dict(state, assign=True)
    elif how == "set":
        model.weight, model.bias = (nn.Parameter(state[name]) for name in ("weight", "bias"))
    else:
        model.weight = nn.Parameter(whole(state["weight"])) if how == "plain" else None
        with pytest.raises(ms.LayoutError, match="the parameter 'weight' of a Linear was replaced"):
            model(x)
        return
    y = model(x).square().mean()
    y.backward()
    reference = nn.Linear(8, 8).double()
    reference.load_state_dict({name: whole(value) for name, value in state.items()})
    expected = reference(torch.ones(4, 8).double()).square().mean()
    expected.backward()
    close(whole(y.detach()), expected.detach(), how)
    same(model, reference, how)


@pytest.mark.ranks(2, 3, 4)
def test_parameters_replaced_before_backward(mesh):
    """Backward goes through those that the forward pass computed with, and gives theirs the gradient."""
    model, reference = sharded(lambda: nn.Linear(8, 8), mesh), nn.Linear(8, 8).double()
    reference.load_state_dict({name: whole(p.detach()) for name, p in model.state_dict().items()})
    x = ms.ones(4, 8, mesh=mesh, placements=[ms.Shard(0), ms.Replicate()], dtype=torch.float64).requires_grad_()
    plain, before, expected = torch.ones(4, 8).double().requires_grad_(), model.weight, reference.weight
    for net, given in ((model, x), (reference, plain)):
        y = net(given).square().mean()
        net.load_state_dict({name: p.detach() * 10 for name, p in net.state_dict().items()}, assign=True)
        y.backward()
        assert net.weight.grad is None
    close(whole(x.grad), plain.grad, "input")
    close(whole(before.grad), expected.grad, "weight")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("leaves", [True, False])
def test_parameters_for_one_call(mesh, leaves):
    """`functional_call` puts others in the place of the module's, as meta-learning does, twice before a backward."""
    model, reference = sharded(lambda: nn.Linear(8, 8), mesh), nn.Linear(8, 8).double()
    reference.load_state_dict({name: whole(p.detach()) for name, p in model.state_dict().items()})
    found = []
    for net, x in (
        (model, ms.ones(4, 8, mesh=mesh, placements=[ms.Shard(0), ms.Replicate()], dtype=torch.float64)),
        (reference, torch.ones(4, 8).double()),
    ):
        first = {name: (p.detach() * 1.5).requires_grad_() if leaves else p * 1.5 for name, p in net.named_parameters()}
        second = {name: p * 0.5 for name, p in first.items()}
        y = torch.func.functional_call(net, first, (x,)).sin() + torch.func.functional_call(net, second, (x,))
        (y + net(x)).square().mean().backward()
        found.append([p.grad for p in (*net.parameters(), *(first.values() if leaves else ()))])
    for got, expected in zip(*found, strict=True):
        close(whole(got), expected, "gradient")


@pytest.mark.ranks(1, 2, 3, 4)
def test_forward_mode(mesh):
    """A tangent of a block is one of the parameter, also where the derivative is differentiated."""

    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    model, reference = sharded(build, mesh), build().double()
    reference.load_state_dict({name: whole(p.detach()) for name, p in model.state_dict().items()})
    found = []
    for net, x in (
        (model, ms.ones(4, 6, mesh=mesh, placements=[ms.Shard(0), ms.Replicate()], dtype=torch.float64)),
        (reference, torch.ones(4, 6).double()),
    ):
        leaves = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(p, p.detach().cos()) for name, p in leaves.items()}
            tangent = forward_ad.unpack_dual(torch.func.functional_call(net, duals, (x,))).tangent
            grads = torch.autograd.grad(tangent.square().sum(), list(leaves.values()), allow_unused=True)
        found.append([tangent.detach(), *(g for g in grads if g is not None)])
    for got, expected in zip(*found, strict=True):
        close(whole(got), expected, "derivative")


class Recomputed(nn.Module):
    """A checkpoint in the forward of a layer with a parameter of its own, as of positions."""

    def __init__(self):
        super().__init__()
        self.position, self.body = nn.Parameter(torch.randn(8, 1, 1)), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return checkpoint(self.body, x + self.position, use_reentrant=False) * self.position


@pytest.mark.parametrize("inference", [torch.inference_mode, torch.no_grad])
def test_a_checkpoint_and_a_forward_without_gradients_before(mesh, inference):
    x = data(4, 8, 13, 11)
    reference, model = seeded(Recomputed, x.dtype), sharded(Recomputed, mesh)
    reference.load_state_dict({name: whole(p.detach()) for name, p in model.state_dict().items()})
    own = ms.distribute_tensor(x, mesh, PLACEMENTS)
    with inference():
        close(whole(model(own)), reference(x), "inference")
    for net, given in ((reference, x), (model, own)):
        mean_square(net(given)).backward()
    same(model, reference, "after inference")
    with inference():
        close(whole(model(own)), reference(x), "inference, again")


@pytest.mark.ranks(2, 3, 4)
def test_a_pickle_is_refused(mesh):
    model = sharded(lambda: nn.Sequential(nn.Linear(8, 8)), mesh)
    for copied in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(ms.UnsupportedOperationError, match="a pickle of a model with shard_parameters"):
            copied(model)


COPIED = {
    **{name: case for name, case in MODELS.items() if "of old" not in name},  # torch copies none of those
    "attention": (lambda: nn.Sequential(TorchAttention(), Block(8, 2)), (4, 9, 8)),
    "checkpoints": (Checkpointed, (4, 9, 8)),
    "recurrent": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), (4, 9, 8)),
}


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_computes_and_learns_for_itself(mesh, name):
    build, shape = COPIED[name]
    full = data(*shape)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Shard(len(shape) // 2)))
    reference, model = seeded(build, full.dtype), sharded(build, mesh)
    pairs = [(reference, full), (model, x)]
    for net, given in pairs:
        trained(net, given, OPTIMISERS["SGD"], 1)
    twins = [copy.deepcopy(net) for net, _ in pairs]
    assert all(p.grad is None for net in twins for p in net.parameters())
    assert [type(p) for p in twins[1].parameters()] == [type(p) for p in model.parameters()]
    for net, given in zip(twins, (full, x)):  # the originals stay as they are
        trained(net, given, OPTIMISERS["SGD"], 2)
    for net, given in pairs:
        trained(net, given, OPTIMISERS["SGD"], 1)
    for found, expected, what in ((model, reference, "original"), (twins[1], twins[0], "copy")):
        same(found, expected, what, 1e-7)
        close(whole(found(x)), expected(full), f"{what}: output", 1e-7)
    for net in (model, twins[1]):
        assert ms.parameter_memory(net)["gathered"] == 0


@pytest.mark.parametrize("over", ["data", "y", ("data", "y")], ids=str)
def test_averages_of_weights(mesh, over):
    """Each with a share of the average, as of the parameters."""

    def build():
        return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.SiLU(), nn.Conv2d(6, 4, 3))

    full = data(4, 1, 9, 8)
    x = ms.distribute_tensor(full, mesh, PLACEMENTS)
    for average in ({}, {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}, {"avg_fn": lambda a, b, _: (a + b) / 2}):
        nets = [(seeded(build, full.dtype), full), (sharded(build, mesh, shard_parameters=over), x)]
        averaged = []
        for net, given in nets:
            ema = swa_utils.AveragedModel(net, use_buffers=True, **average)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                mean_square(net(given)).backward()
                optimizer.step()
                ema.update_parameters(net)
            averaged.append(ema)
        expected, found = averaged
        for p, q in zip(found.parameters(), expected.parameters(), strict=True):
            close(whole(p.detach()), q.detach(), "average", 1e-7)
        for net in (found.eval(), expected.eval()):
            net.requires_grad_(False)
        close(whole(found(x)), expected(full), "output", 1e-7)
        memory = ms.parameter_memory(found)
        assert memory["gathered"] == 0
        assert memory["parameters"] == ms.parameter_memory(nets[1][0])["parameters"]
        assert memory["gathered_peak"] > 0 or all(not isinstance(p, ms.ShardTensor) for p in found.parameters())


@pytest.mark.ranks(2, 3, 4)
def test_a_copy_of_a_part(mesh):
    model = sharded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Block(8, 2)), mesh)
    reference = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Block(8, 2)), torch.float64)
    full = data(4, 9, 8)
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Shard(1)))
    part, expected = copy.deepcopy(model[2]), copy.deepcopy(reference[2])
    for net, given in ((part, x), (expected, full)):
        trained(net, given, OPTIMISERS["AdamW"])
    same(part, expected, "part", 1e-7)
    close(whole(model(x)), reference(full), "the model is as it was")


@pytest.mark.ranks(2, 3, 4)
def test_a_parametrization_that_is_removed(mesh):
    def build():
        return nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 6)))

    reference, model = seeded(build, torch.float64), sharded(build, mesh)
    x = data(4, 5, 6)
    own = ms.distribute_tensor(x, mesh, (ms.Shard(0), ms.Shard(1)))
    for _ in range(2):
        for net, given in ((reference, x), (model, own)):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            optimizer.zero_grad()
            mean_square(net(given)).backward()
            optimizer.step()
            for i in (0, 2):
                if parametrize.is_parametrized(net[i]):
                    parametrize.remove_parametrizations(net[i], "weight")
    close(whole(model(own)), reference(x), "output")


@pytest.mark.ranks(2, 3, 4)
def test_a_vector_of_all_parameters(mesh):
    """Of those of fewer cells than ranks, too, which are plain tensors."""

    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    reference, model = seeded(build, torch.float64), sharded(build, mesh)
    vector_to_parameters(2 * parameters_to_vector(reference.parameters()), reference.parameters())
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(2 * whole(vector.detach()), model.parameters())
    x = data(4, 5, 6)
    for net, given in ((reference, x), (model, ms.distribute_tensor(x, mesh, (ms.Shard(0), ms.Shard(1))))):
        mean_square(net(given)).backward()
    same(model, reference, "as a vector")


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("convert", ["to", "double", "channels_last", "bfloat16"])
def test_a_model_that_is_converted_keeps_its_parameters(mesh, convert, foreach):
    """An optimizer from before, gradients and hooks stay theirs, as of plain parameters."""
    how = {
        "to": lambda model: model.to("cpu"),
        "double": nn.Module.double,
        "channels_last": lambda model: model.to(memory_format=torch.channels_last),
        "bfloat16": lambda model: model.bfloat16().float(),
    }[convert]

    def train(model, x):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        before = list(model.parameters())
        before[0].register_hook(lambda g: 2 * g)
        for step in range(3):
            if step == 1:
                model = how(model)
            y = model(x.to(before[0].dtype))
            (y * torch.arange(5).to(y.dtype)).square().mean().backward()
            optimizer.step()
        assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
        return [whole(p.detach()) for p in before] + [whole(p.grad) for p in before]

    def build():
        return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 1))

    model, reference = sharded(build, mesh, torch.float32), seeded(build, torch.float32)
    full = data(4, 2, 9, 5, dtype=torch.float32)
    for got, expected in zip(train(model, shard(full, mesh, PLACEMENTS)), train(reference, full), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=1e-2 if convert == "bfloat16" else 1e-4, atol=1e-4)
