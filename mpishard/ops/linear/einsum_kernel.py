"""Complex sums of products of two blocks that torch is slow with on a CPU: the spectral layers of Fourier operators.

torch hands ``einsum("bixy,ioxy->boxy", spectrum, weight)`` to a matrix product per mode: it copies the weights until
the modes are its outer dims, and forward and backward multiply thousands of small matrices. Where these have a row or
two, products of cells along the modes as they lie in memory, and then a sum, take a tenth to a half of its time
(measured with one thread, 4 to 64 channels, 12 to 1,728 modes). What decides are layouts in memory; results are those
of torch but for the order of their sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mpishard.layout import Labels

FEW = 2  # rows; memory for so many times the cells of the larger operand is needed while they are summed
MODES = 16  # with fewer, calls take longer than their work


class _Way(NamedTuple):
    """Per operand its dims in the order of the products, and where these have one more; what is summed; and back."""

    operands: tuple[tuple[list[int], list[int]], ...]
    summed: list[int]
    back: list[int]


def summed_products(labels: tuple[Labels, ...], out: Labels, blocks: Sequence[Tensor]) -> Tensor | None:
    """Return the einsum of blocks whose dims have these labels; None where it is better left to torch.

    Not collective.
    """
    if len(blocks) != 2:
        return None
    x, y = blocks
    if x.dtype is not y.dtype or x.dtype not in (torch.complex64, torch.complex128) or not (x.is_cpu and y.is_cpu):
        return None
    way = _way(labels, out, (tuple(x.shape), tuple(y.shape)), (x.stride(), y.stride()))
    if way is None:
        return None
    of_x, of_y = way.operands
    return (_spread(x, *of_x) * _spread(y, *of_y)).sum(way.summed).permute(way.back)


def _spread(x: Tensor, dims: list[int], missing: list[int]) -> Tensor:
    x = x.permute(dims)
    for d in missing:
        x = x.unsqueeze(d)
    return x


@lru_cache(maxsize=4096)
def _way(
    labels: tuple[Labels, ...], out: Labels, shapes: tuple[tuple[int, ...], ...], strides: tuple[tuple[int, ...], ...]
) -> _Way | None:
    a, b = ({*own} for own in labels)
    modes, contracted = a & b & {*out}, (a & b) - {*out}
    once = len(labels[0]) + len(labels[1]) == len(a) + len(b) and len(out) == len({*out})
    if not once or not contracted or {*out} != modes | (a ^ b):
        return None
    extents = {label: n for own, shape in zip(labels, shapes) for label, n in zip(own, shape) if n != 1}
    rows = min(math.prod(extents.get(s, 1) for s in own) for own in (a - b, b - a))
    if 0 in extents.values() or rows > FEW or math.prod(extents.get(s, 1) for s in modes) < MODES:
        return None
    # along the larger operand as it lies in memory
    k = int(math.prod(shapes[1]) > math.prod(shapes[0]))
    places = sorted(range(len(labels[k])), key=strides[k].__getitem__, reverse=True)
    order = [s for s in labels[1 - k] if s not in labels[k]] + [labels[k][d] for d in places]
    if next(s for s in reversed(order) if s in extents) not in modes:
        return None
    kept = [s for s in order if s not in contracted]
    return _Way(
        tuple(([own.index(s) for s in order if s in own], _places(order, {*order} - {*own})) for own in labels),
        _places(order, contracted),
        [kept.index(s) for s in out],
    )


def _places(order: Sequence[object], labels: Set[object]) -> list[int]:
    return [d for d, s in enumerate(order) if s in labels]
