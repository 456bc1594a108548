"""Statistics and scaling of a block whose channels lie together in memory, where it lies: no copy into rows.

A CPU convolves this format (torch's ``channels_last``) several times faster where there are few channels. The
block is seen as a matrix with one column per channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpishard.ops.rule.moments import BLOCK, chan, is_large

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# columns that fill vector registers; fewer are summed several rows at a time
_WIDTH = 64


def are_columns(x: Tensor) -> bool:
    """Tell whether a block of shape (1, C, ...) is to be worked on by columns. Not collective."""
    if x.ndim not in FORMATS or x.shape[0] != 1 or not x.is_cpu or x.is_contiguous() or not x.numel():
        return False
    return x.dtype in (torch.float32, torch.float64) and x.is_contiguous(memory_format=FORMATS[x.ndim])


def in_columns(x: Tensor) -> Tensor:
    """Return ``x`` with its channels together in memory. Not collective."""
    return x.contiguous(memory_format=FORMATS[x.ndim])


def _matrix(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the columns ``k`` rows side by side, the rows that are left, and ``k``; both views."""
    c = x.shape[1]
    m = x.movedim(1, -1).view(-1, c)
    k = max(1, _WIDTH // c)
    cut = m.shape[0] - m.shape[0] % k
    return m[:cut].view(-1, k * c), m[cut:], k


def _starts(wide: Tensor) -> tuple[range, int]:
    step = max(1, BLOCK // wide.shape[1])
    return range(0, wide.shape[0], step), step


def column_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations of each channel, in float64. As `row_moments`. Not collective."""
    wide, rest, k = _matrix(x)
    c, width = x.shape[1], wide.shape[1]
    starts, step = _starts(wide)
    means, squares = (wide.new_empty((len(starts), width)) for _ in range(2))
    buffer = wide.new_empty((min(step, wide.shape[0]), width))
    cells = []
    for i, a in enumerate(starts):
        block = wide[a : a + step]
        centre = torch.mean(block, 0, out=means[i])
        deviation = torch.sub(block, centre, out=buffer[: len(block)])
        torch.sum(torch.mul(deviation, deviation, out=deviation), 0, out=squares[i])
        cells += [len(block)] * k
    exact = means.double()
    if wide.dtype == torch.float32:
        lengths = squares.new_tensor(cells[::k]).unsqueeze(1)
        for i in is_large(means, squares / lengths).any(1).nonzero()[:, 0].tolist():
            block = wide[starts[i] : starts[i] + step]
            exact[i] += torch.sub(block, means[i], out=buffer[: len(block)]).mean(0)
    # all that belongs to a channel in one row
    every = [t.view(-1, k, c).flatten(0, 1).double() for t in (exact, squares)]
    if len(rest):
        centre = rest.double().mean(0, keepdim=True)
        left = (centre, (rest.double() - centre).square().sum(0, keepdim=True))
        every = [torch.cat(pair) for pair in zip(every, left)]
        cells.append(len(rest))
    return chan(every[0].t(), every[1].t(), torch.tensor(cells, dtype=torch.float64))


def column_dots(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of ``a`` and of ``a * b`` of each channel, in float64. Not collective."""
    (wide, rest, k), (other, left, _) = _matrix(a), _matrix(b)
    c, width = a.shape[1], wide.shape[1]
    starts, step = _starts(wide)
    sums, products = (wide.new_empty((len(starts), width)) for _ in range(2))
    buffer = wide.new_empty((min(step, wide.shape[0]), width))
    for i, at in enumerate(starts):
        block = wide[at : at + step]
        torch.sum(block, 0, out=sums[i])
        torch.sum(torch.mul(block, other[at : at + step], out=buffer[: len(block)]), 0, out=products[i])
    by_one, by_b = (t.double().sum(0).view(k, c).sum(0) for t in (sums, products))
    return by_one + rest.double().sum(0), by_b + (rest.double() * left.double()).sum(0)


def columns_scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x * scale + shift per channel. Not collective."""
    zeros, ones = scale.new_zeros(x.shape[1]), scale.new_ones(x.shape[1])
    return torch.native_batch_norm(x, scale.reshape(-1), shift.reshape(-1), zeros, ones, False, 0.0, 0.0)[0]


def add_columns_scaled(out: Tensor, x: Tensor, scale: Tensor) -> None:
    """Add x * scale per channel to ``out``. Not collective."""
    (wide, rest, k), (other, left, _) = _matrix(out), _matrix(x)
    scale = scale.reshape(-1)
    wide.addcmul_(other, scale.repeat(k))
    rest.addcmul_(left, scale)
