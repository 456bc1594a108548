"""Networks that make fields: diffusion, modulated and dynamic convolutions, super-resolution, waveforms."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpishard as ms
from tests.compare import WORLD, mesh_of
from tests.models.convolutional import ConvNeXtBlock
from tests.models.twin import data, twins

FIELD = (2, 3)


def timestep_embedding(t, dim):
    """Sines and cosines of the time."""
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2, dtype=t.dtype, device=t.device) / (dim // 2))
    args = t[:, None] * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    """Convolutions with a time embedding added, or as scale and shift."""

    def __init__(self, a, b, emb, scale_shift):
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(2, a), nn.SiLU(), nn.Conv2d(a, b, 3, padding=1))
        self.emb = nn.Sequential(nn.SiLU(), nn.Linear(emb, 2 * b if scale_shift else b))
        self.norm, self.out = nn.GroupNorm(2, b), nn.Sequential(nn.SiLU(), nn.Conv2d(b, b, 3, padding=1))
        self.skip = nn.Identity() if a == b else nn.Conv2d(a, b, 1)
        self.scale_shift = scale_shift

    def forward(self, x, emb):
        h = self.in_layers(x)
        e = self.emb(emb)
        while len(e.shape) < len(h.shape):
            e = e[..., None]
        if self.scale_shift:
            scale, shift = torch.chunk(e, 2, dim=1)
            h = self.out(self.norm(h) * (1 + scale) + shift)
        else:
            h = self.out(self.norm(h + e))
        return self.skip(x) + h


class AttentionBlock(nn.Module):
    """Every cell attends to every other."""

    def __init__(self, channels, heads=2):
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(2, channels), heads
        self.qkv, self.proj = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(x))
        q, k, v = qkv.reshape(b * self.heads, -1, qkv.shape[-1]).split(c // self.heads, dim=1)
        scale = (c // self.heads) ** -0.25
        weight = torch.softmax(torch.einsum("bct,bcs->bts", q * scale, k * scale), dim=-1)
        h = torch.einsum("bts,bcs->bct", weight, v).reshape(b, -1, qkv.shape[-1])
        return (x + self.proj(h)).reshape(b, c, *spatial)


class Diffusion(nn.Module):
    """A U-Net of residual and attention blocks, conditioned on time."""

    def __init__(self, width=4, scale_shift=False):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.first = ResBlock(width, width, 8, scale_shift)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle = ResBlock(width, 2 * width, 8, scale_shift)
        self.attention = AttentionBlock(2 * width)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = ResBlock(2 * width, width, 8, scale_shift)
        self.out = nn.Sequential(nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, 2, 3, padding=1))

    def forward(self, x):
        emb = self.time(timestep_embedding(torch.tensor([3.0, 250.0], dtype=x.dtype), 8))
        h = self.first(self.stem(x), emb)
        y = self.attention(self.middle(self.down(h), emb))
        y = self.up(F.interpolate(y, scale_factor=2, mode="nearest"))[..., : h.shape[2], : h.shape[3]]
        return self.out(self.last(torch.cat([y, h], dim=1), emb))


@pytest.mark.parametrize("scale_shift", [False, True])
def test_diffusion(scale_shift):
    twins(lambda: Diffusion(scale_shift=scale_shift), data(2, 2, 11, 13), FIELD, sharded=True)


class Modulated(nn.Module):
    """StyleGAN's convolution: weights scaled per sample by a style that is computed of the field."""

    def __init__(self, a=4, b=4, k=3):
        super().__init__()
        self.weight, self.style, self.k = nn.Parameter(torch.randn(b, a, k, k)), nn.Linear(a, a), k

    def forward(self, x):
        n, c, h, w = x.shape
        style = self.style(x.mean((2, 3)))
        weight = self.weight[None] * style[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4], keepdim=True) + 1e-8)
        x = F.conv2d(x.reshape(1, n * c, h, w), weight.reshape(-1, c, self.k, self.k), padding=self.k // 2, groups=n)
        return x.reshape(n, -1, h, w)


class Dynamic(nn.Module):
    """Kernels and biases made by a network from the field's mean, and applied to the field."""

    def __init__(self):
        super().__init__()
        self.make = nn.Linear(2, 3 * 2 * 9 + 3)

    def forward(self, x):
        p = self.make(F.adaptive_avg_pool2d(x, 1).flatten(1).mean(0))
        weight, bias = p[: 3 * 2 * 9].view(3, 2, 3, 3), p[3 * 2 * 9 :]
        y = F.conv2d(x, weight, bias, stride=2, padding=1)
        return F.conv_transpose2d(y, weight, stride=2, padding=1)


def test_weights_that_are_computed():
    twins(Modulated, data(2, 4, 11, 9), FIELD, sharded=True)
    twins(Dynamic, data(2, 2, 11, 9), FIELD, sharded=True)


class SuperResolution(nn.Module):
    """Reflected borders, residual blocks scaled, pixel shuffle, and the enlarged input added."""

    def __init__(self, width=4):
        super().__init__()
        self.head = nn.Conv2d(1, width, 3, padding=1, padding_mode="reflect")
        self.body = nn.ModuleList(
            [
                nn.Sequential(
                    nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.PReLU(width),
                    nn.ReplicationPad2d(2), nn.Conv2d(width, width, 5),
                )
                for _ in range(2)
            ]
        )  # fmt: skip
        self.tail = nn.Sequential(nn.Conv2d(width, 4, 3, padding=1, padding_mode="circular"), nn.PixelShuffle(2))

    def forward(self, x):
        y = self.head(x)
        for block in self.body:
            y = y + block(y).mul(0.1)
        base = F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        return self.tail(y) + base.clamp(-1, 1)


def test_super_resolution():
    twins(SuperResolution, data(2, 1, 11, 13), FIELD, sharded=True)


class WaveNet(nn.Module):
    """Causal dilated convolutions with gates, skips summed."""

    def __init__(self, channels=4, dilations=(1, 2, 4, 8)):
        super().__init__()
        self.stem = nn.Conv1d(2, channels, 1)
        self.dilations = dilations
        self.gates = nn.ModuleList([nn.Conv1d(channels, 2 * channels, 2, dilation=d) for d in dilations])
        self.out = nn.ModuleList([nn.Conv1d(channels, channels, 1) for _ in dilations])
        self.last = nn.Conv1d(channels, 3, 1)

    def forward(self, x):
        x, skips = self.stem(x), 0
        for d, gate, out in zip(self.dilations, self.gates, self.out):
            y = out(F.glu(gate(F.pad(x, (d, 0))), dim=1))
            skips = skips + y
            x = x + y
        return self.last(F.relu(skips))


def test_wavenet():
    twins(WaveNet, data(2, 2, 29), (2,), sharded=True)


class StochasticDepth(nn.Module):
    """Blocks that are dropped for some samples, drawn as torch's user draws them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([ConvNeXtBlock(4, drop_path=0.5) for _ in range(3)])

    def forward(self, x):
        torch.manual_seed(5)
        whole = not isinstance(x, ms.ShardTensor)
        if whole:  # the one process drops what any mesh does, which is not what torch's generator says
            x = ms.distribute_tensor(x, mesh_of((WORLD.size,)), (ms.Replicate(),))
        for block in self.blocks:
            x = block(x)
        return x.full_tensor() if whole else x


def test_stochastic_depth():
    twins(StochasticDepth, data(4, 4, 9, 8), FIELD, sharded=True)
