"""The collectives as adjoint pairs, built once per call signature; see `mpishard.autograd.collective`."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from mpishard.errors import UnsupportedDtypeError, described
from mpishard.layout import as_block_sizes, balanced, bounds


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
    ranks = range(group.size)
    lengths = extents if split_dim == concat_dim else (shape[split_dim],) * group.size
    cut = list(split or balanced(lengths[group.rank], group.size))

    def block(source: int, n: int) -> tuple[int, ...]:
        sizes = list(shape)
        sizes[concat_dim] = extents[source]
        sizes[split_dim] = n
        return tuple(sizes)

    sent = [block(group.rank, n) for n in cut]
    # of every rank's tensor: larger blocks come first
    mine = [cut[group.rank] if split else n // group.size + (group.rank < n % group.size) for n in lengths]
    received = [block(r, n) for r, n in enumerate(mine)]
    joined = [s[concat_dim] for s in received]
    row = itemsize * math.prod(n for d, n in enumerate(shape) if d not in (split_dim, concat_dim))
    rows = (1,) * group.size if split_dim == concat_dim else extents
    # most that any rank sends, and receives: the first block of a balanced cut is the largest
    most = max(split) if split else None
    sends = max(rows[s] * (sum(split) if split else lengths[s]) for s in ranks)
    recvs = sum(rows[s] * (-(-lengths[s] // group.size) if most is None else most) for s in ranks)
    bound = row * max(sends, recvs)

    def forward(x: Tensor) -> Tensor:
        return torch.cat(blocking.all_to_all(x.split(cut, split_dim), received, group, bound), concat_dim)

    def backward(g: Tensor) -> Tensor:
        return torch.cat(blocking.all_to_all(g.split(joined, concat_dim), sent, group, bound), split_dim)

    return pair(forward, backward)


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
            described(
                f"no reduction 'avg' of {dtype}",
                expected="a floating or complex dtype",
                got=dtype,
                fix="convert the tensor first, or use op='sum' and divide as you mean it",
            )
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
