"""What training does around a model: checkpoints, half precision, clipping, optimisers, reparametrisations, state."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import mpishard as ms
from tests.compare import WORLD, gathered
from tests.models.convolutional import ConvNeXtBlock, ResNet, UNet
from tests.models.transformer import Block, SwinBlock
from tests.models.twin import close, data, mean_square, meshes, run, same_state, seeded, twins

FIELD = (2, 3)


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Segments(nn.Sequential):
    """Two segments of a sequence."""

    def forward(self, x):
        return checkpoint_sequential(list(self), 2, x, use_reentrant=False)


def test_checkpoints():
    twins(lambda: Checkpointed([UNet(2, norm="group").first, ConvNeXtBlock(4)]), data(1, 1, 13, 11), FIELD)
    twins(lambda: Checkpointed([Block(8), Block(8)]), data(2, 9, 8), (1,))
    twins(lambda: Checkpointed([SwinBlock(4, shift=2)]), data(1, 12, 8, 4), (1, 2))
    twins(lambda: Segments(*[nn.Conv2d(2, 2, 3, padding=1) for _ in range(4)]), data(1, 2, 9, 11), FIELD)


@pytest.mark.parametrize("up", ["transposed", "interpolated"])
def test_autocast_to_bfloat16(up):
    """As far from the result in float32 as one process is, or nearly."""
    x = data(1, 1, 17, 23, dtype=torch.float32)
    target = data(1, 2, 17, 23, dtype=torch.float32, seed=3)

    def step(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            loss = F.mse_loss(out.float(), target)
        loss.backward()
        return out, loss

    reference = seeded(lambda: UNet(2, up=up), x.dtype)
    expected, expected_loss = step(reference, x)
    for mesh, placements in meshes(FIELD):
        model = ms.distribute_module(seeded(lambda: UNet(2, up=up), x.dtype, mesh.rank), mesh)
        out, loss = step(model, ms.distribute_tensor(x, mesh, placements))
        assert out.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(gathered(out).float(), expected.float(), rtol=0.05, atol=0.1)
        close(loss, expected_loss, "loss", 0.02)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            scale = max(float(q.grad.abs().max()), 1e-2)
            torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.15 * scale)
        for (name, b), c in zip(model.named_buffers(), reference.buffers(), strict=True):
            close(b, c, name, 0.02)


OPTIMISERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW for loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_three_steps_with_clipping(name, clip):
    x = data(2, 1, 13, 11)

    def train(model, x):
        optimiser = OPTIMISERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 5)
        norms = []
        for _ in range(3):
            optimiser.zero_grad(set_to_none=True)
            mean_square(model(x)).backward()
            if clip == "norm":
                norms.append(clip_grad_norm_(model.parameters(), 0.3))
            else:
                clip_grad_value_(model.parameters(), 0.01)
            optimiser.step()
            schedule.step()
        return norms

    def build():
        # no bias before a batch norm: Adam would divide rounding by rounding
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.SiLU(), nn.Conv2d(3, 2, 3, padding=1)
        )

    reference = seeded(build, x.dtype)
    expected = train(reference, x)
    for mesh, placements in meshes(FIELD):
        model = ms.distribute_module(seeded(build, x.dtype, mesh.rank), mesh)
        got = train(model, ms.distribute_tensor(x, mesh, placements))
        close(got, expected, "norms", 1e-8)
        same_state(model, reference, f"{name} on {mesh.shape}", 1e-7)


def test_sharded_parameters_are_trained():
    """A field that is itself learnt, as in data assimilation: a leaf ShardTensor beside plain parameters."""
    x, target = data(1, 2, 13, 11), data(1, 2, 13, 11, seed=5)

    for name, make in OPTIMISERS.items():

        def train(model, state, make=make):
            optimiser = make([state, *model.parameters()])
            for _ in range(3):
                optimiser.zero_grad()
                F.mse_loss(model(state), target).backward()
                norm = clip_grad_norm_([state, *model.parameters()], 0.1)
                optimiser.step()
            return norm

        def build():
            return nn.Conv2d(2, 2, 3, padding=1)

        reference, whole = seeded(build, x.dtype), x.clone().requires_grad_()
        expected = train(reference, whole)
        for mesh, placements in meshes(FIELD):
            model = ms.distribute_module(seeded(build, x.dtype, mesh.rank), mesh)
            part = ms.distribute_tensor(x, mesh, placements).requires_grad_()
            close(train(model, part), expected, f"{name}: norm", 1e-8)
            close(part.detach(), whole.detach(), f"{name}: state", 1e-8)
            same_state(model, reference, name, 1e-7)


class Assimilation(nn.Module):
    """A model that owns the field that it learns, and a sharded weight of each cell."""

    def __init__(self, first, weight):
        super().__init__()
        self.conv, self.field = nn.Conv2d(2, 2, 3, padding=1, dtype=first.dtype), nn.Parameter(first)
        self.register_buffer("weight", weight)

    def forward(self, x):
        return self.weight * (self.conv(self.field) - x)


@pytest.mark.parametrize("shard", [False, True])
def test_a_model_that_owns_sharded_parameters(shard):
    x, first, weight = data(2, 2, 13, 11), data(1, 2, 13, 11, seed=5), data(1, 1, 13, 11, seed=6)

    def train(model, x):
        optimiser = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(3):
            optimiser.zero_grad()
            mean_square(model(x)).backward()
            norm = clip_grad_norm_(model.parameters(), 0.1)
            optimiser.step()
        return norm

    reference = seeded(lambda: Assimilation(first.clone(), weight), x.dtype)
    expected = train(reference, x)
    for mesh, placements in meshes(FIELD):
        own = [ms.distribute_tensor(t, mesh, placements) for t in (first, weight)]
        model = seeded(lambda own=own: Assimilation(*own), x.dtype, mesh.rank)
        model = ms.distribute_module(model, mesh, **({"shard_parameters": 0} if shard else {}))
        close(train(model, ms.distribute_tensor(x, mesh, placements)), expected, "norm", 1e-8)
        for (name, got), (_, want) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
            close(got, want, name, 1e-7)


def test_parameters_of_another_mesh():
    one, other = (ms.init_mesh((WORLD.size,), (name,)) for name in "ab")
    first, weight = (ms.distribute_tensor(data(1, n, 13, 11), one, [ms.Shard(2)]) for n in (2, 1))
    with pytest.raises(ms.LayoutError, match="on another mesh"):
        ms.distribute_module(Assimilation(first, weight), other)


def test_weight_norm():
    def build():
        return nn.Sequential(
            weight_norm(nn.Conv2d(2, 4, 3, padding=1)), nn.ReLU(), weight_norm(nn.ConvTranspose2d(4, 2, 2, 2), dim=1)
        )

    twins(build, data(2, 2, 13, 11), FIELD, sharded=True)
    twins(lambda: weight_norm(nn.Linear(5, 3)), data(7, 5), (0,))


@pytest.mark.parametrize("train", [True, False])
def test_spectral_norm(train):
    """Buffers (the singular vectors) change in a training step, alike on every rank."""

    def build():
        return nn.Sequential(
            spectral_norm(nn.Conv2d(2, 4, 3, padding=1)), nn.LeakyReLU(0.2), spectral_norm(nn.Conv2d(4, 1, 4, 2, 1))
        )

    twins(build, data(2, 2, 13, 11), FIELD, train=train, sharded=True)


class Standardise(nn.Module):
    """Buffers that a step changes: a running mean, and a count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 1, 1))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("window", torch.hann_window(11), persistent=False)
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                mean = x.mean(dim=(0, 2, 3), keepdim=True)[0]
                # a statistic of the whole field: every rank has it
                mean = mean.full_tensor() if isinstance(mean, ms.ShardTensor) else mean
                self.mean.lerp_(mean, 0.1)
                self.steps += 1
        return self.conv((x - self.mean) * self.window)


def test_buffers():
    twins(Standardise, data(2, 3, 13, 11), FIELD, sharded=True)
    twins(Standardise, data(2, 3, 13, 11), FIELD, sharded=True, train=False)


def test_lazy_modules():
    """Shapes come from the first input, which is sharded."""

    def build():
        return nn.Sequential(nn.LazyConv2d(4, 3, padding=1), nn.LazyBatchNorm2d(), nn.Flatten(2), nn.LazyLinear(3))

    x = data(2, 3, 6, 4)
    torch.manual_seed(0)
    reference = build().double()
    reference(x)  # materialised
    fresh = copy.deepcopy(reference)
    for mesh, placements in meshes(FIELD):
        lazy = build().double()
        lazy(ms.distribute_tensor(x, mesh, placements))
        assert [p.shape for p in lazy.parameters()] == [p.shape for p in reference.parameters()]
        lazy.load_state_dict(fresh.state_dict())
        lazy = ms.distribute_module(lazy, mesh)
        whole = copy.deepcopy(fresh)
        expected = run(whole, x, mean_square)
        close(run(lazy, ms.distribute_tensor(x, mesh, placements), mean_square), expected, "output and loss")
        same_state(lazy, whole, f"{mesh.shape}")


def test_training_after_inference():
    """What is planned and cached in inference mode serves gradients later."""
    x = data(1, 1, 12, 17)
    reference = seeded(lambda: UNet(2), x.dtype)
    expected = run(reference, x, mean_square)
    for mesh, placements in meshes(FIELD):
        model = ms.distribute_module(seeded(lambda: UNet(2), x.dtype, mesh.rank), mesh)
        part = ms.distribute_tensor(x, mesh, placements)
        model.eval()
        with torch.inference_mode():
            model(part).mul_(2)
        with torch.no_grad():
            model(part)
        close(run(model.train(), part, mean_square), expected, "output and loss")
        same_state(model, reference, f"{mesh.shape}")


@pytest.mark.parametrize("average", ["swa", "ema"])
def test_averaged_models(average):
    """Averages of weights, and running statistics renewed for them."""
    x = data(2, 1, 13, 11)
    swa = torch.optim.swa_utils
    mean = {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.9)} if average == "ema" else {}

    def build():
        return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU())

    def train(model, x):
        averaged = swa.AveragedModel(model, **mean)
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimiser.zero_grad()
            mean_square(model(x)).backward()
            optimiser.step()
            averaged.update_parameters(model)
        swa.update_bn([x, x * 2], averaged)
        return averaged

    expected = train(seeded(build, x.dtype), x)
    for mesh, placements in meshes(FIELD):
        model = ms.distribute_module(seeded(build, x.dtype, mesh.rank), mesh)
        same_state(train(model, ms.distribute_tensor(x, mesh, placements)), expected, f"{mesh.shape}")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_modules():
    """Hooks of modules see global arguments, results and gradients, and may replace them."""
    x = data(2, 3, 9, 7)

    def train(x):
        seen = []

        def note(*found):
            seen.extend(None if t is None else gathered(t) for t in found)

        model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3)), x.dtype)
        first, middle, last = model
        first.register_forward_hook(lambda m, args, out: out.register_hook(note) and None)
        middle.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        for m in model:
            m.register_full_backward_hook(lambda m, before, after: note(*before, *after))
        middle.register_full_backward_hook(lambda m, before, after: (before[0] * 3,))
        last.register_full_backward_pre_hook(lambda m, after: (after[0].sin(),))
        last.register_full_backward_pre_hook(lambda m, after: note(*after))
        mean_square(model(x)).backward()
        note(x.grad, *(p.grad for p in model.parameters()))
        return seen

    for leaf in (True, False):  # without a gradient of its own, the first module's argument has none in the hook
        expected = train(x.clone().requires_grad_(leaf))
        for mesh, placements in meshes(FIELD):
            got = train(ms.distribute_tensor(x, mesh, placements).requires_grad_(leaf))
            for g, e in zip(got, expected, strict=True):
                close(g, e, f"{mesh.shape}")


def test_hooks_of_modules_with_plain_and_sharded_arguments():
    x, scale = data(2, 3, 9), data(3, 1)

    class Scaled(nn.Module):
        def forward(self, scale, x):
            return x * scale, scale * 2

    def train(x):
        seen, module, factor = [], Scaled(), scale.clone().requires_grad_()
        module.register_full_backward_hook(lambda m, before, after: seen.extend(map(gathered, (*before, *after))))
        y, z = module(factor, x)
        ((y**2).mean() + z.sum()).backward()
        return [*seen, gathered(x.grad), factor.grad]

    expected = train(x.clone().requires_grad_())
    for mesh, placements in meshes((2,)):
        for g, e in zip(train(ms.distribute_tensor(x, mesh, placements).requires_grad_()), expected, strict=True):
            close(g, e, f"{mesh.shape}")


def test_state_goes_from_one_process_to_shards_and_back():
    x = data(2, 3, 37, 43)
    reference = seeded(ResNet, x.dtype)
    optimiser = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    run(reference, x, mean_square)
    optimiser.step()
    state, moments = copy.deepcopy(reference.state_dict()), copy.deepcopy(optimiser.state_dict())
    mesh, placements = list(meshes(FIELD))[-1]
    model = seeded(ResNet, x.dtype, mesh.rank + 1)
    model.load_state_dict(state)
    model = ms.distribute_module(model, mesh)
    again = torch.optim.AdamW(model.parameters(), lr=1e-3)
    again.load_state_dict(moments)
    out = run(model.eval(), ms.distribute_tensor(x, mesh, placements), mean_square)
    close(out, run(reference.eval(), x, mean_square), "output and loss")
    assert list(model.state_dict()) == list(state)
    assert all(type(t) is torch.Tensor for t in model.state_dict().values())
    reference.load_state_dict(model.state_dict())
    close(parameters_to_vector(model.parameters()), parameters_to_vector(reference.parameters()), "parameters")
