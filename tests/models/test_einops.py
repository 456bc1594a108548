"""einops on shards, in modules as their users write them."""

from __future__ import annotations

import pytest
import torch
from einops import einsum, pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import Rearrange, Reduce
from torch import nn

from tests.models.twin import data, twins


class Attention(nn.Module):
    """Tokens of patches, heads, and a field again."""

    def __init__(self, dim=6, heads=2, patch=2):
        super().__init__()
        self.embed = nn.Sequential(
            Rearrange("b c (h p) (w q) -> b h w (c p q)", p=patch, q=patch), nn.Linear(3 * patch * patch, dim)
        )
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, 3 * patch * patch)
        self.heads, self.patch = heads, patch

    def forward(self, x):
        x = self.embed(x)
        b, h, _, _ = x.shape
        x = rearrange(x, "b h w c -> b (h w) c")
        token = repeat(self.token, "1 1 c -> b 1 c", b=b)
        x, shapes = pack([token, x], "b * c")
        q, k, v = rearrange(self.qkv(x), "b n (three g d) -> three b g n d", three=3, g=self.heads)
        scores = einsum(q, k, "b g i d, b g j d -> b g i j") * q.shape[-1] ** -0.5
        y = rearrange(scores.softmax(-1) @ v, "b g n d -> b n (g d)")
        token, y = unpack(y, shapes, "b * c")
        y = y + token
        return rearrange(self.out(y), "b (h w) (c p q) -> b c (h p) (w q)", h=h, p=self.patch, q=self.patch)


class SpaceTime(nn.Module):
    """Squeeze and excitation, pooling by reduction, space to depth."""

    def __init__(self):
        super().__init__()
        self.squeeze = nn.Sequential(Reduce("b c h w -> b c", "mean"), nn.Linear(4, 4), nn.Sigmoid())
        self.conv = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x):
        scale = self.squeeze(x)
        x = x * rearrange(scale, "b c -> b c 1 1")
        x = self.conv(rearrange(x, "b c (h a) (w d) -> b (a d c) h w", a=2, d=2))
        pooled = reduce(x, "b c (h a) (w d) -> b c h w", "max", a=2, d=2)
        return reduce(pooled, "b c h w -> b h w", "sum"), repeat(pooled, "b c h w -> b c (h a) (w d)", a=2, d=2)


def test_attention():
    twins(Attention, data(2, 3, 12, 10), (2, 3), sharded=True)


def test_pooling():
    twins(SpaceTime, data(2, 4, 12, 16), (2, 3))


PATTERNS = {
    "split": lambda x: rearrange(x, "b (h a) w c -> b h a w c", a=2),
    "merge": lambda x: rearrange(x, "b h w c -> (b h) (w c)"),
    "all": lambda x: rearrange(x, "b h w c -> (w h b c)"),
    "batch to width": lambda x: rearrange(x, "(a b) h w c -> h (a w) (b c)", a=2),
    "mean": lambda x: reduce(x, "b (h a) (w d) c -> b h w c", "mean", a=3, d=2),
    "min": lambda x: reduce(x, "b h w c -> h w", "min"),
    "prod": lambda x: reduce(x, "b h w c -> b 1 w 1", "prod"),
    "repeat": lambda x: repeat(x, "b h w c -> b (h 2) w (2 c)"),
    "new dim": lambda x: repeat(x, "b h w c -> b k h w c", k=3),
    "list": lambda x: rearrange([x, x * 2], "k b h w c -> b (k h) w c"),
}


class Pattern(nn.Module):
    """One call."""

    def __init__(self, f):
        super().__init__()
        self.f, self.weight = f, nn.Parameter(torch.randn(2))

    def forward(self, x):
        return self.f(x * self.weight[0])


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    twins(lambda: Pattern(PATTERNS[name]), data(2, 6, 4, 3), (1, 2))
