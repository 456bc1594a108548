"""Networks that are drawn, trained as is drawn on a mesh that is drawn: each result is that of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpishard as ms
from tests.compare import WORLD, gathered, mesh_of, mesh_shapes
from tests.models.twin import close, data, seeded

DRAWS = 6
RTOL = 1e-7
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Around(nn.Module):
    """A module, or a function of it and its input, in a way that layers do not have of themselves."""

    def __init__(self, inner: nn.Module, call: Callable) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


class Spectral(nn.Module):
    """Complex weights for the lowest modes."""

    def __init__(self, channels: int, ndim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, *[2] * ndim, dtype=torch.cdouble))

    def forward(self, x):
        dims = tuple(range(2, x.ndim))
        spectrum = torch.fft.rfftn(x, dim=dims)
        low, letters = (..., *[slice(0, 2)] * len(dims)), "xyz"[: len(dims)]
        out = torch.zeros_like(spectrum)
        out[low] = torch.einsum(f"bi{letters},io{letters}->bo{letters}", spectrum[low], self.weight)
        return torch.fft.irfftn(out, s=x.shape[2:], dim=dims)


def as_tokens(inner, x):
    tokens = x.flatten(2).transpose(1, 2)
    return (tokens + inner(tokens)).transpose(1, 2).reshape(x.shape)


def down_and_up(inner, x):
    return F.interpolate(inner(x), size=x.shape[2:], mode="nearest")


def squeezed(inner, x):
    mean = x.mean(tuple(range(2, x.ndim)))
    return x * torch.sigmoid(inner(mean)).reshape(*mean.shape, *[1] * (x.ndim - 2))


def layer(rng: random.Random, channels: int, ndim: int, mixes: bool) -> nn.Module:
    """A layer from channels to as many; ``mixes``: samples may meet in it."""
    conv, k = CONVS[ndim - 1], rng.choice([1, 3, 5])
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[ndim - 1]
    makes = [
        lambda: conv(channels, channels, k, padding="same", padding_mode=rng.choice(["zeros", "circular"])),
        lambda: conv(channels, channels, 3, padding=2, dilation=2, bias=False),
        lambda: conv(channels, channels, 3, padding=1, groups=channels),
        lambda: norm(channels, track_running_stats=rng.random() < 0.7) if mixes else nn.Tanh(),
        lambda: nn.GroupNorm(rng.choice([1, channels]), channels),
        lambda: nn.Sequential(nn.GELU(), nn.PReLU(channels)),
        lambda: Around(nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, channels)), as_tokens),
        lambda: Around(nn.TransformerEncoderLayer(channels, 2, 8, dropout=0.0, batch_first=True), as_tokens),
        lambda: Around(conv(channels, channels, 2, stride=2), down_and_up),
        lambda: Around(nn.Linear(channels, channels), squeezed),
        lambda: Spectral(channels, ndim),
        lambda: nn.utils.parametrizations.weight_norm(conv(channels, channels, 3, padding=1)),
    ]
    made = rng.choice(makes)()
    way = rng.choice(["as it is", "residual", "checkpoint"])
    if way == "residual":
        return Around(made, lambda inner, x: x + inner(x))
    return made if way == "as it is" else Around(made, lambda inner, x: checkpoint(inner, x, use_reentrant=False))


class Draw:
    """What is drawn of one training: extents, placements, layers, and how often what is done."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.ndim, self.channels = rng.choice([1, 2, 2, 3]), rng.choice([2, 4])
        self.shape = (rng.randint(1, 5), 2, *(rng.randint(4, 13 if self.ndim < 3 else 7) for _ in range(self.ndim)))
        self.layers = [rng.random() for _ in range(rng.randint(1, 4))]
        self.classes = rng.random() < 0.3
        self.sharded = rng.random() < 0.4
        self.inputs = [data(*self.shape, seed=k) for k in range(4)]
        ends = [data(self.shape[0], self.channels, *self.shape[2:], seed=k + 9) for k in range(4)]
        self.targets = [t.argmax(1) for t in ends] if self.classes else ends

    def net(self, layers: list[float], *, mixes: bool = True, first: bool = True) -> nn.Module:
        lift = [CONVS[self.ndim - 1](2, self.channels, 1)] if first else []
        return nn.Sequential(*lift, *(layer(random.Random(s), self.channels, self.ndim, mixes) for s in layers))

    def placement(self) -> ms.Placement:
        dim = self.rng.choice([None, 0, *range(2, 2 + self.ndim)])
        return ms.Replicate() if dim is None else ms.Shard(dim)

    def put(self, t, mesh, placements):
        """A field, or the classes of its cells, which lack the channels."""
        if mesh is None:
            return t
        lost = len(self.shape) - t.ndim
        dims = [p.dim - lost * (p.dim > 0) if isinstance(p, ms.Shard) else None for p in placements]
        return ms.distribute_tensor(t, mesh, [ms.Replicate() if d is None else ms.Shard(d) for d in dims])

    def loss(self, out, target, reduction="mean"):
        return (F.cross_entropy if self.classes else F.mse_loss)(out, target, reduction=reduction)


def train(draw: Draw, model: nn.Module, how: tuple, mesh=None, placements=()):
    """Losses, norms of gradients, and the output afterwards."""
    parts, clip, adam = how
    parameters = model.parameters()
    optimizer = (
        torch.optim.AdamW(parameters, 0.01, eps=1e-2) if adam else torch.optim.SGD(parameters, 0.02, momentum=0.9)
    )
    found = []
    for first in range(0, len(draw.inputs), parts):
        optimizer.zero_grad()
        batches = list(zip(draw.inputs, draw.targets))[first : first + parts]
        for i, batch in enumerate(batches):
            x, target = (draw.put(t, mesh, placements) for t in batch)
            last = mesh is None or i + 1 == len(batches)
            with nullcontext() if last else ms.no_sync():
                loss = draw.loss(model(x), target) / parts
                loss.backward()
            found.append(loss.detach())
        if clip:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return [*found, model(draw.put(draw.inputs[0], mesh, placements))]


def same(got: nn.Module, expected: nn.Module, what: str) -> None:
    state = expected.state_dict()
    assert list(got.state_dict()) == list(state), what
    for name, value in got.state_dict().items():
        close(value, state[name], f"{what}, {name}", RTOL)


@pytest.mark.parametrize("i", range(DRAWS))
def test_training(request, i):
    draw = Draw(request.config.option.seed * 1000 + i)
    mesh = mesh_of(draw.rng.choice(mesh_shapes(2)))
    placements = [draw.placement() for _ in mesh.shape]
    over = draw.rng.choice(mesh.mesh_dim_names) if draw.sharded else None
    how = draw.rng.choice([1, 2, 4]), draw.rng.random() < 0.4, draw.rng.random() < 0.5
    models = [seeded(lambda: draw.net(draw.layers), torch.float64) for _ in range(2)]
    expected = train(draw, models[0], how)
    ours = ms.distribute_module(models[1], mesh, shard_parameters=over)
    what = f"{models[0]} of {draw.shape} on {mesh.shape}, {placements}, parameters over {over}, {how}"
    for got, right in zip(train(draw, ours, how, mesh, placements), expected, strict=True):
        close(got, right, what, RTOL)
    same(ours, models[0], what)


@pytest.mark.parametrize("i", range(DRAWS // 2))
def test_pipelines(request, i):
    """Batch and target each lie anyhow."""
    draw = Draw(request.config.option.seed * 1000 + 500 + i)
    stages = draw.rng.choice([n for n in range(1, WORLD.size + 1) if WORLD.size % n == 0])
    mesh = ms.init_mesh((stages, WORLD.size // stages), ("stage", "d"))
    of_x, of_target = ([draw.placement()] for _ in range(2))
    parts, reduction = draw.rng.randint(1, 3), draw.rng.choice(["mean", "sum"])
    layers = [[draw.rng.random() for _ in range(draw.rng.randint(1, 2))] for _ in range(stages)]

    def nets():
        return [
            seeded(lambda k=k: draw.net(layers[k], mixes=False, first=k == 0), torch.float64, k) for k in range(stages)
        ]

    whole = nn.Sequential(*nets())
    pipe = ms.Pipeline(nets(), mesh, "stage", parts, shard_parameters="d" if draw.sharded else None)
    what = f"{whole} of {draw.shape} on {mesh.shape}, {of_x}, {of_target}, {parts} parts, {reduction}"
    for x, target in zip(draw.inputs[:2], draw.targets):
        placed = draw.put(x, pipe.mesh, of_x), draw.put(target, pipe.mesh, of_target)
        sizes = placed[0].sharding.sizes[0] or (x.shape[0],)
        if max(sizes) < parts:
            with pytest.raises(ms.LayoutError, match="a batch or target that does not fit"):
                pipe.step(*placed, draw.loss)
            continue
        expected = draw.loss(whole(x), target, reduction)
        expected.backward()
        loss = pipe.step(*placed, lambda y, t: draw.loss(y, t, reduction), reduction=reduction)
        close(loss, expected.detach(), what, RTOL)
        # of some, as of a bias before a norm, all is rounding: relative to the largest of the model
        scale = max(float(q.grad.abs().max()) for q in whole.parameters())
        for p, q in zip(pipe.stage.parameters(), whole[pipe.index].parameters(), strict=True):
            torch.testing.assert_close(
                gathered(p.grad), q.grad, rtol=RTOL, atol=1e-10 * scale, msg=lambda m: f"{what}: {m}"
            )
        out = pipe(placed[0])
        if pipe.is_last:
            close(out, whole(x).detach(), what, RTOL)
