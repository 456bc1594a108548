"""The collectives as adjoint pairs, built once per call signature; see `mpishard.autograd.collective`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from mpishard.autograd.linear import LocalMap, Step, apply, pair, same
from mpishard.comm.collective import blocking
from mpishard.comm.memory.reduction_type import rule_of
from mpishard.comm.mesh import Group
from mpishard.comm.point_to_point import send_recv
from mpishard.errors import UnsupportedDtypeError
from mpishard.layout import as_block_sizes, balanced, bounds, repeated, runs_of, scaled, total


def sum_step(group: Group, replicated: bool = False, deterministic: bool | None = None) -> Step:
    """Return the sum over a group; its adjoint is itself, or (``replicated``) the identity. Not collective."""
    run = partial(blocking.all_reduce, group=group, deterministic=deterministic)
    return _noted(pair(run, same if replicated else run))


def gather_step(
    group: Group, sizes: tuple[int, ...], dim: int, replicated: bool = False, deterministic: bool | None = None
) -> Step:
    """Return the all-gather; its adjoint is the reduce-scatter, or (``replicated``) the own block. Not collective."""
    sizes = as_block_sizes(sizes)
    first = bounds(sizes)[group.rank]

    def own(g: Tensor) -> Tensor:
        return g.narrow(dim, first, sizes[group.rank]).clone(memory_format=torch.contiguous_format)

    def scatter(g: Tensor) -> Tensor:
        return blocking.reduce_scatter(g, group, dim, sizes, deterministic=deterministic)

    gather = partial(blocking.all_gather, group=group, dim=dim, sizes=sizes)
    return _noted(pair(gather, own if replicated else scatter))


def _noted(step: Step) -> Step:
    step.cotangent = step.adjoint.cotangent = None
    return step


def broadcast_step(group: Group, root: int, replicated: bool = False, deterministic: bool | None = None) -> Step:
    """Return the broadcast; its adjoint is the sum (``replicated``: the root's own) on the root. Not collective."""
    forward = partial(blocking.broadcast, group=group, root=root)
    if replicated:
        return _noted(pair(forward, torch.clone if group.rank == root else torch.zeros_like))
    return _noted(pair(forward, partial(blocking.reduce, group=group, root=root, deterministic=deterministic)))


def message_step(
    group: Group, dest: int | None, source: int | None, sent: Sequence[int], received: Sequence[int], call: str
) -> Step:
    """Return "send to one rank, receive from another", which both call ``call``; its adjoint goes the other way.

    Not collective.
    """
    return pair(
        lambda x: send_recv.send_recv(x, group, dest, source, received, call),
        lambda g: send_recv.send_recv(g, group, source, dest, sent, f"adjoint of {call}"),
    )


def transpose_step(
    group: Group,
    shape: torch.Size,
    itemsize: int,
    split_dim: int,
    concat_dim: int,
    split: tuple[int, ...] | None,
    extents: tuple[int, ...],
) -> Step:
    """Return the all-to-all of a tensor that is cut along one dim and joined along another. Not collective.

    Parameters
    ----------
    group
        Ranks that take part.
    shape, itemsize
        Of this rank's tensor and its elements.
    split_dim, concat_dim
        Not negative.
    split
        Extents of the blocks, or None for the balanced cut.
    extents
        Of every rank's tensor along ``concat_dim``.
    """
    size = group.size
    same_dim = split_dim == concat_dim
    cut = as_block_sizes(split or balanced(shape[split_dim], size))
    own = (*shape[:split_dim], cut[group.rank], *shape[split_dim + 1 :])
    joined = as_block_sizes(extents)
    if same_dim:
        joined = repeated(((own[split_dim], size),)) if split else _shares(joined, group.rank)
    sent, received = _Cut(shape, split_dim, cut), _Cut(own, concat_dim, joined)
    # most that any rank sends, and receives: the first block of a balanced cut is the largest
    runs = runs_of(extents)
    longest = max(n for n, _ in runs)
    if same_dim:
        sends = longest
        recvs = max(split) * size if split else sum(-(-n // size) * count for n, count in runs)
    else:
        sends = longest * shape[split_dim]
        recvs = total(extents) * (max(split) if split else -(-shape[split_dim] // size))
    rest = [n for d, n in enumerate(shape) if d not in (split_dim, concat_dim)]
    bound = itemsize * math.prod(rest) * max(sends, recvs)

    def run(there: _Cut, back: _Cut, x: Tensor) -> Tensor:
        return back.join(blocking.all_to_all_flat(there.pack(x), there.counts(), back.counts(), group, bound))

    return pair(partial(run, sent, received), partial(run, received, sent))


def _shares(extents: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return what a rank gets of every rank's balanced cut, where a tensor is cut and joined along one dim."""
    runs, count = [], len(extents)
    for n, times in runs_of(extents):
        # larger blocks come first
        runs.append((n // count + (rank < n % count), times))
    return repeated(runs)


class _Cut:
    """A tensor that is cut into a block for each rank along a dim, as one message of the blocks, and back.

    Equal blocks that follow each other are one copy.

    Parameters
    ----------
    shape, dim
        Of the tensor; its extent along the dim is the blocks'.
    sizes
        Of the blocks along the dim.
    """

    def __init__(self, shape: Sequence[int], dim: int, sizes: Sequence[int]) -> None:
        self.shape, self.dim, self.sizes = (*shape[:dim], total(sizes), *shape[dim + 1 :]), dim, sizes
        self.row = math.prod(n for d, n in enumerate(shape) if d != dim)

    def counts(self) -> Sequence[int]:
        """Return how many numbers each block has."""
        return scaled(self.sizes, self.row)

    def _runs(self, x: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the blocks of each run of equal ones: in the tensor, and in the message."""
        start = at = 0
        for size, count in runs_of(self.sizes):
            n = size * count
            blocks = x.narrow(self.dim, start, n).unflatten(self.dim, (count, size)).movedim(self.dim, 0)
            yield blocks, flat[at : at + n * self.row].view(blocks.shape)
            start, at = start + n, at + n * self.row

    def pack(self, x: Tensor) -> Tensor:
        """Return the numbers of the blocks, one block after the other."""
        flat = x.new_empty(x.numel())
        for blocks, message in self._runs(x, flat):
            message.copy_(blocks)
        return flat

    def join(self, flat: Tensor) -> Tensor:
        """Return the tensor of which ``flat`` has the blocks."""
        x = flat.new_empty(self.shape)
        for blocks, message in self._runs(x, flat):
            blocks.copy_(message)
        return x


class Extremum(Function):
    """Maximum or minimum over a group: the cotangent goes to the ranks that attain it, in equal shares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, op: str, total: Step) -> Tensor:
        """Reduce."""
        y = blocking.all_reduce(x, group, op)
        share = (x == y).to(x.dtype)
        share /= blocking.all_reduce(share, group)
        ctx.save_for_backward(share)
        ctx.save_for_forward(share)
        ctx.total = total
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Collect the cotangents. Collective as the sum is."""
        (share,) = ctx.saved_tensors
        return share * apply(ctx.total.adjoint, grads[0]), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Average the tangents of those that attain it. Collective as the sum is."""
        (share,) = ctx.saved_tensors
        return apply(ctx.total, share * tangents[0])


def reducer(group: Group, op: str, dtype: torch.dtype, replicated: bool, deterministic: bool | None) -> LocalMap:
    """Return the differentiable reduction ``op``.

    Not collective; the function is.

    Raises
    ------
    UnsupportedDtypeError
        The dtype has no such reduction.
    """
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedDtypeError(
            f"no reduction 'avg' of {dtype}",
            expected="a floating or complex dtype",
            got=dtype,
            fix="convert the tensor first, or use op='sum' and divide as you mean it",
        )
    rule_of("sum" if op == "avg" else op, dtype)
    total = sum_step(group, replicated, deterministic)
    if op == "sum":
        return partial(apply, total)
    if op == "avg":
        return lambda x: apply(total, x) / group.size
    plain = partial(blocking.all_reduce, group=group, op=op, deterministic=deterministic)
    if not (dtype.is_floating_point or dtype.is_complex):
        return plain
    factors = gather_step(group, (1,) * group.size, 0, replicated, deterministic)

    def reduce(x: Tensor) -> Tensor:
        if forward_ad._current_level < 0 and not x.requires_grad:
            return plain(x)
        if op == "prod":
            return apply(factors, x.unsqueeze(0)).prod(0)
        return Extremum.apply(x, group, op, total)  # type: ignore[no-any-return]

    return reduce
