"""Networks and losses of segmentation: labels and weights of cells, sharded as the field or whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import mpishard as ms
from tests.models.convolutional import UNet
from tests.models.twin import close, data, mean_square, meshes, same_state, seeded, twins

FIELD = (2, 3)


def dice(logits, target):
    p = logits.softmax(1)
    hot = F.one_hot(target, logits.shape[1]).movedim(-1, 1).to(p.dtype)
    both, each = (p * hot).sum((0, 2, 3)), (p + hot).sum((0, 2, 3))
    return 1 - ((2 * both + 1) / (each + 1)).mean()


def cross_entropy(logits, target):
    weight = torch.tensor([0.3, 0.7], dtype=logits.dtype)
    return F.cross_entropy(logits, target, weight=weight, ignore_index=-100, label_smoothing=0.1)


def focal(logits, target):
    ce = F.cross_entropy(logits, target, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def smooth(logits, target):
    """Total variation, and the binary loss of one channel."""
    rows = (logits[..., 1:, :] - logits[..., :-1, :]).abs().mean()
    columns = (logits[..., :, 1:] - logits[..., :, :-1]).abs().mean()
    return rows + columns + F.binary_cross_entropy_with_logits(logits[:, 0], target.to(logits.dtype))


def jaccard_of_thresholds(logits, target):
    """With a mask of valid cells, as boolean indexing in a sum, and numbers of cells in the denominator."""
    valid = target >= 0
    p = torch.sigmoid(logits[:, 1])
    inter = torch.where(valid, p * target, torch.zeros_like(p)).sum()
    union = (p + target - p * target).masked_fill(~valid, 0).sum()
    return 1 - inter / union.clamp(min=1) + p[:, ::2].mean() / valid.sum()


LOSSES = [dice, cross_entropy, focal, smooth, jaccard_of_thresholds]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("whole_target", [False, True])
def test_losses(loss, whole_target):
    x, target = data(2, 1, 13, 11), (data(2, 13, 11, seed=4) > 0).long()

    def build():
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 2, 3, padding=1))

    reference = seeded(build, x.dtype)
    expected = loss(reference(x), target)
    expected.backward()
    for mesh, placements in meshes(FIELD):
        model = ms.distribute_module(seeded(build, x.dtype, mesh.rank), mesh)
        labels = target
        if not whole_target:
            labels = ms.distribute_tensor(target, mesh, [ms.Shard(p.dim - 1) for p in placements])
        got = loss(model(ms.distribute_tensor(x, mesh, placements)), labels)
        got.backward()
        close(got, expected, "loss")
        same_state(model, reference, f"{loss.__name__} on {mesh.shape}")


class SqueezeExcite(nn.Module):
    """Channels weighed by pooled features."""

    def __init__(self, c):
        super().__init__()
        self.pool, self.fc1, self.fc2 = nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, 2, 1), nn.Conv2d(2, c, 1)

    def forward(self, x):
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(self.pool(x)), inplace=True)))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, excitation, projection."""

    def __init__(self, a, b, stride):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(a, 2 * a, 1, bias=False), nn.BatchNorm2d(2 * a), nn.Hardswish(inplace=True),
            nn.Conv2d(2 * a, 2 * a, 5, stride, 2, groups=2 * a, bias=False), nn.BatchNorm2d(2 * a),
            nn.ReLU6(inplace=True),
            SqueezeExcite(2 * a), nn.Conv2d(2 * a, b, 1, bias=False), nn.BatchNorm2d(b),
        )  # fmt: skip
        self.shortcut = stride == 1 and a == b

    def forward(self, x):
        return x + self.block(x) if self.shortcut else self.block(x)


class SpatialAttention(nn.Module):
    """A map of weights from the mean and the largest channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x):
        mean, largest = torch.mean(x, dim=1, keepdim=True), torch.max(x, dim=1, keepdim=True)[0]
        return x * torch.sigmoid(self.conv(torch.cat([mean, largest], dim=1)))


class Pyramid(nn.Module):
    """Features of several strides, added from the coarsest up; a dense block and pooled scales."""

    def __init__(self, width=4):
        super().__init__()
        self.stages = nn.ModuleList(
            [InvertedResidual(3, width, 2), InvertedResidual(width, width, 1), InvertedResidual(width, 2 * width, 2)]
        )
        self.lateral = nn.ModuleList([nn.Conv2d(c, width, 1) for c in (width, width, 2 * width)])
        self.dense = nn.ModuleList([nn.Conv2d(width * (i + 1), width, 3, padding=1) for i in range(2)])
        self.attention = SpatialAttention()
        self.bins = (1, 2, 3)
        self.classify = nn.Conv2d(width * (3 + len(self.bins)), 2, 1)

    def forward(self, x):
        size, maps = x.shape[2:], []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        top = None
        for lateral, m in zip(reversed(self.lateral), reversed(maps)):
            y = lateral(m)
            top = y if top is None else y + F.interpolate(top, size=y.shape[-2:], mode="nearest")
        features = [self.attention(top)]
        for layer in self.dense:
            features.append(F.elu(layer(torch.cat(features, 1)), inplace=True))
        for n in self.bins:
            pooled = F.adaptive_avg_pool2d(features[0], n)
            features.append(F.interpolate(pooled, size=top.shape[2:], mode="bilinear", align_corners=True))
        y = F.avg_pool2d(F.max_pool2d(torch.cat(features, 1), 3, 1, 1), 3, 1, 1)
        return F.interpolate(self.classify(y), size=size, mode="bicubic")


@pytest.mark.parametrize("train", [True, False])
def test_pyramid(train):
    twins(Pyramid, data(2, 3, 25, 22), FIELD, train=train, sharded=True)


def test_fewer_rows_than_ranks():
    """Deep in a network some ranks have no cells left."""
    twins(lambda: UNet(2, depth=3), data(2, 1, 9, 17), FIELD)
    twins(lambda: UNet(2, width=2, depth=3, norm="group", up="interpolated"), data(1, 1, 17, 9), FIELD)


def test_functional_call():
    """Parameters by name, as meta-learning passes them: gradients of what they were computed from."""

    def build():
        return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 1))

    def adapted(model, x):
        params = dict(model.named_parameters())
        inner = mean_square(model(x))
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads)}
        return mean_square(functional_call(model, fast, (x,)))

    x = data(2, 1, 9, 11)
    reference = seeded(build, x.dtype)
    expected = adapted(reference, x)
    expected.backward()
    for mesh, placements in meshes(FIELD):
        model = ms.distribute_module(seeded(build, x.dtype, mesh.rank), mesh)
        got = adapted(model, ms.distribute_tensor(x, mesh, placements))
        got.backward()
        close(got, expected, "loss")
        same_state(model, reference, f"{mesh.shape}")
