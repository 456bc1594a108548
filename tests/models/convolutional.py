"""Convolutional networks as their users write them: nothing here knows of shards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Stem, four stages, pooled features, classes."""

    def __init__(self, width=4, classes=5):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        planes = [width, width, 2 * width, 2 * width, 4 * width]
        self.layers = nn.Sequential(
            *[BasicBlock(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(zip(planes, planes[1:]))]
        )
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(planes[-1], classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layers(x))
        return self.fc(torch.flatten(x, 1))


class UNet(nn.Module):
    """Strided convolutions down, transposed ones or interpolation up, skips joined by channels."""

    def __init__(self, ndim=2, width=4, depth=2, up="transposed", norm="batch"):
        super().__init__()
        conv, transposed = (nn.Conv2d, nn.ConvTranspose2d) if ndim == 2 else (nn.Conv3d, nn.ConvTranspose3d)
        norms = {
            "batch": nn.BatchNorm2d if ndim == 2 else nn.BatchNorm3d,
            "instance": lambda c: (nn.InstanceNorm2d if ndim == 2 else nn.InstanceNorm3d)(c, affine=True),
            "group": lambda c: nn.GroupNorm(2, c),
        }
        self.mode = "bilinear" if ndim == 2 else "trilinear"

        def double(a, b):
            return nn.Sequential(
                conv(a, b, 3, padding=1), norms[norm](b), nn.LeakyReLU(0.1, inplace=True),
                conv(b, b, 3, padding=1), norms[norm](b), nn.LeakyReLU(0.1, inplace=True),
            )  # fmt: skip

        widths = [width * 2**i for i in range(depth + 1)]
        self.first = double(1, width)
        self.down = nn.ModuleList([conv(a, b, 2, stride=2) for a, b in zip(widths, widths[1:])])
        self.encode = nn.ModuleList([double(w, w) for w in widths[1:]])
        if up == "transposed":
            self.up = nn.ModuleList([transposed(b, a, 2, stride=2) for a, b in zip(widths, widths[1:])])
        else:
            self.up = nn.ModuleList([conv(b, a, 1) for a, b in zip(widths, widths[1:])])
        self.interpolate = up != "transposed"
        self.decode = nn.ModuleList([double(2 * w, w) for w in widths[:-1]])
        self.last = conv(width, 2, 1)

    def forward(self, x):
        x = self.first(x)
        skips = []
        for down, encode in zip(self.down, self.encode):
            skips.append(x)
            x = encode(down(x))
        for up, decode in zip(reversed(self.up), reversed(self.decode)):
            skip = skips.pop()
            x = up(x)
            if self.interpolate:
                x = F.interpolate(x, size=skip.shape[2:], mode=self.mode, align_corners=False)
            else:  # a stride drops the last cells of odd extents
                padding = []
                for n, m in zip(reversed(skip.shape[2:]), reversed(x.shape[2:])):
                    padding += [(n - m) // 2, n - m - (n - m) // 2]
                x = F.pad(x, padding)
            x = decode(torch.cat([skip, x], dim=1))
        return self.last(x)


class LayerNormChannelsFirst(nn.Module):
    """Layer norm over channels, written by hand."""

    def __init__(self, channels, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class DropPath(nn.Module):
    """Stochastic depth."""

    def __init__(self, p=0.0):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, then a channels-last perceptron with a layer scale."""

    def __init__(self, dim, drop_path=0.0):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-1 * torch.ones(dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return shortcut + self.drop_path(x)


class ConvNeXt(nn.Module):
    """Stem, blocks, downsampling, blocks, pooled head."""

    def __init__(self, dims=(4, 8), classes=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dims[0], 4, stride=4), LayerNormChannelsFirst(dims[0]))
        self.first = ConvNeXtBlock(dims[0])
        self.down = nn.Sequential(LayerNormChannelsFirst(dims[0]), nn.Conv2d(dims[0], dims[1], 2, stride=2))
        self.second = ConvNeXtBlock(dims[1])
        self.norm = nn.LayerNorm(dims[1])
        self.head = nn.Linear(dims[1], classes)

    def forward(self, x):
        x = self.second(self.down(self.first(self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


class DeepLabHead(nn.Module):
    """Parallel dilated convolutions and image pooling, joined, then enlarged."""

    def __init__(self, channels=3, width=4, rates=(1, 2, 4, 7), align_corners=False, classes=2):
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, stride=2, padding=1)
        self.branches = nn.ModuleList([nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU())])
        for r in rates:
            self.branches.append(
                nn.Sequential(
                    nn.Conv2d(width, width, 3, padding=r, dilation=r, bias=False), nn.BatchNorm2d(width), nn.ReLU()
                )
            )
        self.pool = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1), nn.GroupNorm(2, width), nn.ReLU()
        )
        self.project = nn.Sequential(
            nn.Conv2d(width * (len(rates) + 2), width, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.0)
        )
        self.classify = nn.Conv2d(width, classes, 1)
        self.align_corners = align_corners

    def forward(self, x):
        size = x.shape[-2:]
        x = self.stem(x)
        out = [branch(x) for branch in self.branches]
        pooled = self.pool(x)
        out.append(F.interpolate(pooled, size=x.shape[-2:], mode="bilinear", align_corners=self.align_corners))
        x = self.classify(self.project(torch.cat(out, dim=1)))
        return F.interpolate(x, size=size, mode="bilinear", align_corners=self.align_corners)


class ConvLSTMCell(nn.Module):
    """Four gates in one convolution."""

    def __init__(self, channels, hidden, kernel=3):
        super().__init__()
        self.hidden = hidden
        self.conv = nn.Conv2d(channels + hidden, 4 * hidden, kernel, padding=kernel // 2)

    def forward(self, x, state):
        h, c = state
        gates = self.conv(torch.cat([x, h], dim=1))
        i, f, o, g = torch.split(gates, self.hidden, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class ConvLSTM(nn.Module):
    """A sequence (batch, time, channel, height, width) through one cell; state from zeros."""

    def __init__(self, channels=2, hidden=3):
        super().__init__()
        self.cell = ConvLSTMCell(channels, hidden)
        self.read = nn.Conv2d(hidden, 1, 1)

    def forward(self, x):
        b, _, _, height, width = x.size()
        h = torch.zeros(b, self.cell.hidden, height, width, dtype=x.dtype, device=x.device)
        c = torch.zeros_like(h)
        outputs = []
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(self.read(h))
        return torch.stack(outputs, dim=1), c
