"""Transformers and mixers as their users write them: nothing here knows of shards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.convolutional import DropPath


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, dim, hidden, drop=0.0):
        super().__init__()
        self.fc1, self.act, self.fc2, self.drop = (
            nn.Linear(dim, hidden),
            nn.GELU(),
            nn.Linear(hidden, dim),
            nn.Dropout(drop),
        )

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Attention(nn.Module):
    """Multi-head attention by hand: matmul, softmax, matmul; or torch's fused one."""

    def __init__(self, dim, heads=2, fused=False):
        super().__init__()
        self.heads, self.scale, self.fused = heads, (dim // heads) ** -0.5, fused
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)
            attn = self.attn_drop(attn.softmax(dim=-1))
            x = attn @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    """A pre-norm encoder layer."""

    def __init__(self, dim, heads=2, fused=False):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads, fused)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 2 * dim)
        self.drop_path = DropPath(0.0)

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Patches as tokens."""

    def __init__(self, patch, channels, dim):
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, encoder layers, and a head on the token or on the mean."""

    def __init__(self, size, patch=4, dim=8, depth=2, classes=5, layer="explicit", pool="token"):
        super().__init__()
        self.patch_embed = PatchEmbed(patch, 3, dim)
        tokens = (size[0] // patch) * (size[1] // patch)
        self.pool = pool
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02) if pool == "token" else None
        self.pos_embed = nn.Parameter(torch.randn(1, tokens + (pool == "token"), dim) * 0.02)
        if layer == "torch":
            layers = [
                nn.TransformerEncoderLayer(
                    dim, 2, 2 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(depth)
            ]
        else:
            layers = [Block(dim, 2, layer == "fused") for _ in range(depth)]
        self.blocks = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch_embed(x)
        if self.cls_token is not None:
            cls_tokens = self.cls_token.expand(x.shape[0], -1, -1)
            x = torch.cat((cls_tokens, x), dim=1)
        x = x + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0] if self.pool == "token" else x.mean(dim=1))


class DenseTransformer(nn.Module):
    """Tokens of patches, encoder layers, and back to a field by a pixel shuffle: the output is an image again."""

    def __init__(self, patch=2, dim=8):
        super().__init__()
        self.patch_embed = PatchEmbed(patch, 3, dim)
        self.block = Block(dim)
        self.out = nn.Conv2d(dim, 2 * patch * patch, 1)
        self.patch = patch

    def forward(self, x):
        B, _, H, W = x.shape
        y = self.block(self.patch_embed(x))
        y = y.transpose(1, 2).reshape(B, -1, H // self.patch, W // self.patch)
        return F.pixel_shuffle(self.out(y), self.patch)


def window_partition(x, window):
    B, H, W, C = x.shape
    x = x.view(B, H // window, window, W // window, window, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window, window, C)


def window_reverse(windows, window, H, W):
    B = int(windows.shape[0] / (H * W / window / window))
    x = windows.view(B, H // window, W // window, window, window, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class WindowAttention(nn.Module):
    """Attention within windows, with a learned bias per relative position."""

    def __init__(self, dim, window, heads):
        super().__init__()
        self.window, self.heads, self.scale = window, heads, (dim // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, heads))
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous() + window - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * window - 1) + relative[..., 1])
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.heads, N, N)
        attn = self.softmax(attn)
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class SwinBlock(nn.Module):
    """Window attention on a field (batch, height, width, channel), shifted cyclically if asked for."""

    def __init__(self, dim, window=4, shift=0, heads=2):
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.attn = nn.LayerNorm(dim), WindowAttention(dim, window, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 2 * dim)

    def mask(self, H, W, x):
        if not self.shift:
            return None
        regions, count = torch.zeros((1, H, W, 1)), 0
        slices = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        for h in slices:
            for w in slices:
                regions[:, h, w, :] = count
                count += 1
        windows = window_partition(regions, self.window).view(-1, self.window * self.window)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0).to(x.dtype)

    def forward(self, x):
        _, H, W, C = x.shape
        shortcut = x
        x = self.norm1(x)
        bottom, right = -H % self.window, -W % self.window
        x = F.pad(x, (0, 0, 0, right, 0, bottom))
        _, Hp, Wp, _ = x.shape
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = window_partition(x, self.window).view(-1, self.window * self.window, C)
        windows = self.attn(windows, self.mask(Hp, Wp, x)).view(-1, self.window, self.window, C)
        x = window_reverse(windows, self.window, Hp, Wp)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = x[:, :H, :W, :].contiguous()
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    """Two by two cells become one."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x):
        _, H, W, _ = x.shape
        x = F.pad(x, (0, 0, 0, W % 2, 0, H % 2))
        x = torch.cat([x[:, 0::2, 0::2, :], x[:, 1::2, 0::2, :], x[:, 0::2, 1::2, :], x[:, 1::2, 1::2, :]], -1)
        return self.reduction(self.norm(x))


class MixerBlock(nn.Module):
    """Perceptrons over tokens, then over channels."""

    def __init__(self, dim, tokens):
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(dim), Mlp(tokens, 2 * tokens)
        self.norm2, self.channels = nn.LayerNorm(dim), Mlp(dim, 2 * dim)

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Patches, mixer blocks, mean, head."""

    def __init__(self, size, patch=4, dim=6, classes=3):
        super().__init__()
        self.patch_embed = PatchEmbed(patch, 3, dim)
        self.blocks = nn.Sequential(*[MixerBlock(dim, (size[0] // patch) * (size[1] // patch)) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.patch_embed(x))).mean(1))
