"""Pieces of code that models have between their layers, as they are written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpishard as ms
from tests.compare import compare
from tests.models.twin import data, meshes

WEIGHT = data(1, 4, 3, 3, seed=1)


def non_local(x):
    """Every cell attends to the pooled field."""
    b, c, h, w = x.shape
    theta = x.view(b, c, -1).permute(0, 2, 1)
    phi = F.max_pool2d(x, 2).view(b, c, -1)
    g = F.max_pool2d(x, 2).view(b, c, -1).permute(0, 2, 1)
    y = F.softmax(theta @ phi, dim=-1) @ g
    return y.permute(0, 2, 1).contiguous().view(b, c, h, w) + x


def linear_attention(x):
    b, c, h, w = x.shape
    q, k, v = (t.reshape(b, 2, c // 2, h * w) for t in (x, x.flip(1), 2 * x))
    context = torch.einsum("bhdn,bhen->bhde", k.softmax(dim=-1), v)
    return torch.einsum("bhde,bhdn->bhen", context, q.softmax(dim=-2)).reshape(b, -1, h, w)


def axial_attention(x):
    """Rows, then columns, as batches."""
    b, c, h, w = x.shape
    rows = x.permute(0, 2, 3, 1).reshape(-1, w, c)
    rows = (rows @ rows.transpose(1, 2)).softmax(-1) @ rows
    columns = rows.view(b, h, w, c).permute(0, 2, 1, 3).reshape(-1, h, c)
    columns = (columns @ columns.transpose(1, 2)).softmax(-1) @ columns
    return columns.view(b, w, h, c).permute(0, 3, 2, 1)


def rotary_positions(x):
    t = x.flatten(2).transpose(1, 2)
    angle = torch.arange(t.shape[1], dtype=t.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=t.dtype)
    cos, sin = angle.cos(), angle.sin()
    even, odd = t[..., ::2], t[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def masked_autoencoder(x):
    """Tokens are shuffled, some dropped, the others put back among mask tokens."""
    t = x.flatten(2).transpose(1, 2)
    n, length, dim = t.shape
    keep = length // 2
    shuffle = torch.argsort(data(n, length, seed=2), dim=1)
    restore = torch.argsort(shuffle, dim=1)
    visible = torch.gather(t, 1, shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, dim))
    mask_tokens = WEIGHT[:, :, 0, 0].view(1, 1, dim).repeat(n, length - keep, 1)
    full = torch.cat([visible * 2, mask_tokens], dim=1)
    return torch.gather(full, 1, restore.unsqueeze(-1).repeat(1, 1, dim))


def latent_tokens(x):
    """A few tokens read the field."""
    latents = WEIGHT.flatten(2).transpose(1, 2).expand(x.shape[0], -1, -1)
    t = x.flatten(2).transpose(1, 2)
    return (latents @ t.transpose(1, 2)).softmax(-1) @ t


def memory_tokens(x):
    """Torch's attention to the field and a few tokens, all strided as flattened images are."""
    t = x.flatten(2).transpose(1, 2)
    keys = torch.cat([t, WEIGHT.flatten(2).transpose(1, 2).expand(2, -1, -1)], dim=1)
    return F.scaled_dot_product_attention(t, keys, keys).transpose(1, 2).view(x.shape)


def experts(x):
    """Every cell's two best experts."""
    t = x.permute(0, 2, 3, 1)
    best, which = t.softmax(-1).topk(2, dim=-1)
    y = torch.einsum("bhwc,eoc->bhweo", t, data(4, 3, 4, seed=3))
    chosen = torch.gather(y, 3, which.unsqueeze(-1).expand(*which.shape, 3))
    return (chosen * best.unsqueeze(-1)).sum(3)


def quantised(x):
    """The nearest vector of a codebook, gradients straight through."""
    book = data(5, 4, seed=3)
    b, c, h, w = x.shape
    t = x.permute(0, 2, 3, 1).reshape(-1, c)
    distance = t.pow(2).sum(1, keepdim=True) - 2 * t @ book.t() + book.pow(2).sum(1)
    q = book[distance.argmin(1)].view(b, h, w, c).permute(0, 3, 1, 2)
    return x + (q - x).detach(), F.mse_loss(x, q.detach())


def haar(x):
    h, w = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    a, b = x[:, :, 0:h:2, 0:w:2], x[:, :, 1:h:2, 0:w:2]
    c, d = x[:, :, 0:h:2, 1:w:2], x[:, :, 1:h:2, 1:w:2]
    return torch.cat([a + b + c + d, a - b + c - d], dim=1)


def reaction_diffusion(x):
    """Three explicit steps with periodic borders, each channel for itself."""
    kernel = torch.tensor([[[[0, 1, 0], [1, -4, 1], [0, 1, 0]]]], dtype=x.dtype)
    for _ in range(3):
        field = F.pad(x.reshape(-1, 1, *x.shape[2:]), (1, 1, 1, 1), mode="circular")
        x = x + 0.1 * F.conv2d(field, kernel).view(x.shape) - 0.01 * x**3
    return x


def soft_argmax(x):
    p = x.flatten(2).softmax(-1).view_as(x)
    rows, columns = (torch.arange(n, dtype=x.dtype) for n in x.shape[2:])
    return (p * rows.view(1, 1, -1, 1)).sum((2, 3)), (p * columns).sum((-1, -2))


def structural_similarity(x):
    y = x.roll(1, 2) * 0.9
    window = torch.ones(4, 1, 3, 3, dtype=x.dtype) / 9

    def mean(t):
        return F.conv2d(t, window, groups=4)

    mx, my = mean(x), mean(y)
    xx, yy, xy = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    return (((2 * mx * my + 0.01) * (2 * xy + 0.03)) / ((mx**2 + my**2 + 0.01) * (xx + yy + 0.03))).mean()


def laplacian_pyramid(x):
    levels = []
    for _ in range(2):
        down = F.avg_pool2d(x, 2, ceil_mode=True)
        levels.append(x - F.interpolate(down, size=x.shape[2:], mode="bilinear", align_corners=False))
        x = down
    return [*levels, x]


def coordinates(x):
    """Channels of positions, made as large as the field."""
    b, _, h, w = x.shape
    rows = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(b, 1, h, w)
    columns = torch.linspace(-1, 1, w, dtype=x.dtype).view(1, 1, 1, w).expand(b, 1, h, w)
    return torch.cat([x, rows, columns], 1)


def written_into(x):
    y = x.clone()
    y[y > 0.5] = 0
    y[:, 1] = y[:, 0] * 2
    y[:, :, 1:-1] = y[:, :, 1:-1] * 3
    y[:, :, ::2] += 1
    return y.clamp_(-2, 2).mul_(x)


def unrolled(x):
    h, out = torch.zeros_like(x), []
    for _ in range(3):
        h = torch.tanh(F.conv2d(x, WEIGHT.expand(4, 4, 3, 3), padding=1) + h)
        out.append(h)
    return torch.stack(out, dim=1)


SNIPPETS = [
    non_local, linear_attention, axial_attention, rotary_positions, masked_autoencoder, latent_tokens, memory_tokens,
    experts, quantised, haar, reaction_diffusion, soft_argmax, structural_similarity, laplacian_pyramid, coordinates,
    written_into, unrolled,
]  # fmt: skip


@pytest.mark.parametrize("f", SNIPPETS)
def test_snippets(f):
    x = data(2, 4, 7, 6)
    for dims in ((2, 3), (3, 2)):
        for mesh, placements in meshes(dims):
            compare(f, [(x, mesh, placements, None)], what=f"{f.__name__} on {mesh.shape} {placements}")


def test_what_users_log():
    """Numbers and checks of a loss, which are collective, on every rank alike."""
    x = data(2, 4, 7, 6)
    for mesh, placements in meshes((2, 3)):
        part = ms.distribute_tensor(x, mesh, placements)
        loss = F.mse_loss(part, torch.zeros_like(part))
        expected = x.square().mean()
        assert f"{loss:.6f}" == f"{expected:.6f}"
        assert abs(loss.item() - expected.item()) < 1e-12
        assert torch.isfinite(loss)
        assert not torch.isnan(part).any()
        assert loss > 0.1
        assert part.abs().max() > 1
