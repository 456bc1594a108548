"""Statistics and scaling of a block whose channels lie together in memory, where it lies: no copy into rows.

A CPU convolves this format (torch's ``channels_last``) several times faster where there are few channels. The
block is seen as a matrix with one column per channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpishard.ops.rule.moments import AT_ONCE, BLOCK, are_few, chan, if_small, is_large

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
    return chan(every[0].t(), every[1].t(), torch.tensor(cells, dtype=torch.float64, device="cpu"))


def column_sums(x: Tensor) -> Tensor | None:
    """Return the sums of each channel and of its squares, in float64, as `row_sums`. Not collective."""
    if are_few(x):
        own = x.double()
        return column_dots(own, own)
    return if_small(column_dots(x, x), x[0, 0].numel())


def column_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of ``a`` and of ``a * b`` of each channel, in float64, below each other. Not collective."""
    (wide, rest, k), (other, left, _) = _matrix(a), _matrix(b)
    pieces = wide.split(max(1, AT_ONCE // wide.shape[1]))
    buffer, products = torch.empty_like(pieces[0]), wide.new_empty((len(pieces), wide.shape[1]))
    for out, p, q in zip(products, pieces, other.split(len(pieces[0]))):
        torch.sum(torch.mul(p, q, out=buffer[: len(p)]), 0, out=out)
    sums = torch.stack((wide.sum(0).double(), products.double().sum(0))).view(2, k, -1).sum(1)
    if len(rest):
        own = rest.double()
        sums += torch.stack((own.sum(0), own.mul(left).sum(0)))
    return sums


def column_pieces(x: Tensor) -> Sequence[Tensor]:
    """Return a block in pieces of `AT_ONCE` cells, whose channels a kernel can sum one cell after the other."""
    return x.split(max(1, AT_ONCE // x[:, :, :1].numel()), 2)


def columns_scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x * scale + shift per channel. Not collective."""
    zeros, ones = scale.new_zeros(x.shape[1]), scale.new_ones(x.shape[1])
    return torch.native_batch_norm(x, scale.reshape(-1), shift.reshape(-1), zeros, ones, False, 0.0, 0.0)[0]


def columns_combined(a: Tensor, b: Tensor, scale: Tensor, slope: Tensor, shift: Tensor) -> Tensor:
    """Return a * scale + b * slope + shift per channel. Not collective."""
    out = torch.empty_like(a)
    (wide, rest, k), (of_a, last_a, _), (of_b, last_b, _) = (_matrix(t) for t in (out, a, b))
    scale, slope, shift = (t.reshape(-1) for t in (scale, slope, shift))
    torch.addcmul(shift, last_b, slope, out=rest).addcmul_(last_a, scale)
    scale, slope, shift = (t.repeat(k) for t in (scale, slope, shift))
    step = max(1, AT_ONCE // wide.shape[1])
    for o, p, q in zip(wide.split(step), of_a.split(step), of_b.split(step)):
        # what is read again is in the cache
        torch.addcmul(shift, q, slope, out=o).addcmul_(p, scale)
    return out
