"""A 3-D U-Net in ordinary torch: nothing here knows that its input may be sharded."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Sequential):
    """Two 3 x 3 x 3 convolutions, each followed by a group norm over the whole volume and a ReLU.

    The ReLU works in place: its result is what the next convolution keeps for its backward, so a
    block holds four arrays of its size instead of six.
    """

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv3d(channels, outputs, 3, padding=1, bias=False),
                nn.GroupNorm(groups, outputs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """Volume in, one logit map per tissue out, at the same resolution and at any size.

    Parameters
    ----------
    inputs, outputs
        Channels of the input volume and of the predicted maps.
    base
        Channels at full resolution; they double with each level below.
    levels
        Resolutions, the full one included.
    prior
        Mean of each map over the volume. The output bias starts there, so that the first steps are
        not spent on learning that most of the volume is empty.
    recompute
        Recompute the blocks' activations in backward instead of keeping them.
    """

    def __init__(
        self,
        inputs: int = 1,
        outputs: int = 2,
        *,
        base: int = 8,
        levels: int = 4,
        prior: float = 0.1,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        width = [base * 2**level for level in range(levels)]
        groups = max(1, base // 2)
        self.recompute = recompute
        self.encode = nn.ModuleList(Block(a, b, groups) for a, b in zip([inputs, *width[1:]], width, strict=True))
        self.down = nn.ModuleList(
            nn.Conv3d(a, b, 3, stride=2, padding=1) for a, b in zip(width, width[1:], strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(b, a, 3, stride=2, padding=1) for a, b in zip(width, width[1:], strict=False)
        )
        self.decode = nn.ModuleList(Block(2 * a, a, groups) for a in width[:-1])
        self.head = nn.Conv3d(base, outputs, 1)
        nn.init.constant_(self.head.bias, math.log(prior / (1 - prior)))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for encode, down in zip(self.encode, self.down, strict=False):
            skips.append(self.run(encode, x))
            x = down(skips[-1])
        x = self.run(self.encode[-1], x)
        for up, decode in zip(reversed(self.up), reversed(self.decode), strict=True):
            skip = skips.pop()
            # An odd size halves to the same size as the next even one: the skip says which it was.
            x = up(x, output_size=skip.shape[2:])
            x = self.run(decode, torch.cat((skip, x), dim=1))
        return self.head(x)

    def run(self, block: Block, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
