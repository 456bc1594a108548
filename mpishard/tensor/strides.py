"""How far apart in memory the cells of a whole tensor lie in torch: whether it copies them or takes a view.

Blocks do not tell: one of a single row is in every order, and one that lies in a part whole shows no gap. So a view
carries its trail: the root that it was taken from, and the views since. It is followed where somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.graph import unseen
from mpishard.layout import Layout, runs_of
from mpishard.layout.remembered import remembered
from mpishard.tensor.shard_tensor import ShardTensor

# layout of a root, shape and strides of this rank's block of it, and a tuple (name, arguments) for each view since
Trail = tuple[Any, ...]
Strides = tuple[int, ...]
_LONG = 19  # of views in a loop, such as x.t_()


def trail_of(x: ShardTensor) -> Trail:
    """Return the trail of ``x``, itself a root if it is no view. Not collective."""
    return x._trail or (x.sharding, x.block.shape, x.block.stride())


def trodden(x: ShardTensor, *view: Any) -> Trail:
    """Return the trail of a view of ``x``: a method of tensors, or ``"[]"`` for indexing, and its arguments.

    Not collective.
    """
    trail = x._trail
    if trail is None:
        return x.sharding, x.block.shape, x.block.stride(), view
    return (*trail, view) if len(trail) < _LONG else (*laid(x, *_followed(trail)), view)


def laid(x: ShardTensor, shape: tuple[int, ...], strides: Strides) -> Trail:
    """Return the trail of a view of ``x`` that lies so in memory. Not collective."""
    return (*trail_of(x)[:3], ("as_strided", shape, strides))


def gapped_trail(x: ShardTensor) -> Trail:
    """Return the trail of blocks that the user cut out of larger arrays: as of every other cell. Not collective."""
    shape = x.sharding.shape
    return laid(x, shape, tuple(2 * s for s in row_major(tuple(n + 1 for n in shape))))


def lent_trail(x: ShardTensor) -> Trail | None:
    """Return the trail of a block that the user gave, which stays in a larger array; None if it is dense itself.

    Not collective.
    """
    own, strides = x.block.shape, x.block.stride()
    return None if _dense(own, own, strides) == strides else laid(x, x.sharding.shape, strides_of(x))


def strides_of(x: ShardTensor) -> Strides:
    """Return the strides that ``x`` has in torch, where its root is dense. Not collective."""
    return _followed(trail_of(x))[1]


def is_dense(x: ShardTensor, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Tell whether ``x`` is contiguous in torch. Not collective."""
    return _is_dense(trail_of(x), memory_format)


def is_known(x: ShardTensor) -> bool:
    """Tell whether all ranks know how ``x`` lies: of its root a block of one row, or of none, may not tell.

    Not collective: the same on every rank.
    """
    return _tells(trail_of(x)[0])


def is_dense_alike(x: ShardTensor, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Tell whether ``x`` is contiguous in torch, or were so if its root is row-major: the same on every rank.

    Not collective.
    """
    return _is_dense(_alike(x), memory_format)


def strides_alike(x: ShardTensor) -> Strides:
    """Return the strides of ``x`` in torch, or those that it has if its root is row-major: the same on every rank.

    Not collective.
    """
    return _followed(_alike(x))[1]


def _alike(x: ShardTensor) -> Trail:
    if is_known(x):
        return trail_of(x)
    layout, _, _, *views = trail_of(x)
    return layout, layout.shape, row_major(layout.shape), *views


@remembered
def _tells(layout: Layout) -> bool:
    return all(
        sizes is None or min(s for s, _ in runs_of(sizes)) >= min(n, 2) for n, sizes in zip(layout.shape, layout.sizes)
    )


@remembered
def exists(trail: Trail) -> bool:
    """Tell whether torch has the last view of a trail, one in another shape. Not collective."""
    try:
        _followed(trail)
    except (RuntimeError, ValueError):  # the latter in the hands of a compiler
        return False
    return True


def index_of(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a basic index, whose slices are triples in a key, as the user gave it. Not collective."""
    return tuple(slice(*i) if type(i) is tuple else i for i in key)


def row_major(shape: Sequence[int]) -> Strides:
    """Return the strides of a new tensor. Not collective."""
    inner = accumulate((max(1, n) for n in reversed(shape[1:])), lambda a, b: a * b, initial=1)
    return tuple(reversed([*inner])) if shape else ()


@remembered
def _is_dense(trail: Trail, memory_format: torch.memory_format) -> bool:
    shape, strides = _followed(trail)
    with unseen():
        x = torch.empty_strided(shape, strides, device="meta")
        return x.contiguous(memory_format=memory_format) is x


@remembered
def _followed(trail: Trail) -> tuple[tuple[int, ...], Strides]:
    """Return the shape and strides at the end of a trail."""
    if len(trail) == 3:
        layout, block, strides = trail
        return layout.shape, _dense(layout.shape, block, strides)
    name, *given = trail[-1]
    if name == "as_strided":
        return tuple(given)  # type: ignore[return-value]
    shape, strides = _followed(trail[:-1])
    with unseen():
        x: Tensor = torch.empty_strided(shape, strides, device="meta")
        if name == "[]":
            y = x[index_of(given[0])]
        else:
            y = getattr(x, name)(*given)
        return tuple(y.shape), y.stride()


def _dense(shape: tuple[int, ...], block: Sequence[int], strides: Strides) -> Strides:
    """Return the strides of a dense tensor whose dims follow each other as those of its block do.

    Of two dims that are as far apart, the inner one has one cell, or none. A step of 0 is that of a dim which is
    broadcast, and stays so, or, without cells, of one that lies outside of an empty dim.
    """
    empty = 0 in block
    order = sorted(range(len(shape)), key=lambda d: (-strides[d] if strides[d] else -math.inf, block[d] < 2, d))
    inner = dict(zip(order, row_major([shape[d] for d in order])))
    return tuple(0 if strides[d] == 0 and block[d] > 1 and not empty else inner[d] for d in range(len(shape)))
