"""Blocking collectives on torch tensors: by buffer address, without autograd.

Reductions are typed; everything else moves bytes. Every function returns a fresh contiguous tensor on the
device of its argument, unless it works in place. Tensors on a GPU travel by NCCL where it serves the group and
they are large, else through pinned host memory in pieces; blocks for single ranks go as messages.

Parameters have one meaning: ``x`` is this rank's tensor, ``group`` the ranks that take part, all of which call,
``dim`` a tensor dim, not negative, ``sizes`` the extent of every rank's block along it, ``root`` a rank of the group;
``deterministic`` asks for an order that the ranks alone determine, which gives the same bits in every run and with
every MPI library (None: what ``MPISHARD_DETERMINISTIC`` says); ``in_place``, that ``x`` itself receives the result. A
reduction of a dtype that has none raises `UnsupportedDtypeError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from mpishard.comm import counter, guard, traced
from mpishard.comm.memory.buffer import dense, is_constant, is_dense, outside, pack, transforms_active
from mpishard.comm.memory.reduction_type import Rule, from_keys, ordered, rule_of, to_keys
from mpishard.comm.mesh import Group
from mpishard.comm.point_to_point.send_recv import send_recv
from mpishard.comm.setting import DETERMINISTIC
from mpishard.comm.transport.choice import transport_of
from mpishard.layout import repeated, runs_of, scaled, sole, total

_WHOLE_NBYTES = 1 << 12  # ordered sums of no more than this travel whole


def world() -> Group:
    """Return all ranks of the program as a group. Not collective."""
    return group_of(MPI.COMM_WORLD)


def group_of(comm: MPI.Intracomm) -> Group:
    """Return the ranks of a communicator as a group. Not collective."""
    return Group(comm, comm.Get_rank(), comm.Get_size(), {})


def all_reduce(
    x: torch.Tensor, group: Group, op: str = "sum", *, deterministic: bool | None = None, in_place: bool = False
) -> torch.Tensor:
    """Reduce equal-shaped tensors elementwise: ``op`` is "sum", "prod", "max" or "min". Collective over the group.

    Half types are accumulated in float32; the extrema of floats propagate NaN. ``x`` in place is contiguous.
    """
    if transforms_active() and is_constant(x):
        result = outside(all_reduce, x, group, op, deterministic=deterministic, in_place=in_place)
        return x if in_place else result
    rule = rule_of(op, x.dtype)
    if traced.recording is not None and group.size > 1 and x.numel():
        result = traced.recording.call(
            f"all_reduce {op}", lambda t: all_reduce(t, group, op, deterministic=deterministic), [x], x.shape
        )
        return x.copy_(result) if in_place else result
    if guard.DEBUG:
        guard.check(group.comm, f"all_reduce {op}", tuple(x.shape), x.dtype)
    if group.size == 1 or not x.numel():
        return x if in_place else dense(x).clone(memory_format=torch.contiguous_format)
    if not (in_place and is_dense(x)):
        source, y = dense(x), None
    else:
        source = y = x
    if rule.ordered and in_order(deterministic):
        result = _ordered_all_reduce(source, group, op)
    elif rule.carrier is not None:
        work = to_keys(source, op) if rule.keyed else source.to(rule.carrier)
        _all_reduce(work, work, group, rule, op)
        result = from_keys(work, source.dtype) if rule.keyed else work.to(source.dtype)
    else:
        result = torch.empty_like(source) if y is None else y
        _all_reduce(source, result, group, rule, op)
    return x.copy_(result) if in_place and result is not x else result


def in_order(deterministic: bool | None) -> bool:
    """Whether to accumulate in an order that the ranks alone determine. Not collective."""
    return DETERMINISTIC if deterministic is None else deterministic


def _all_reduce(x: torch.Tensor, y: torch.Tensor, group: Group, rule: Rule, op: str) -> None:
    if counter.active:
        counter.record("all_reduce", 1, x.nbytes)
    transport_of(group, x).all_reduce(x, y, rule, op)


def _ordered_all_reduce(x: torch.Tensor, group: Group, op: str) -> torch.Tensor:
    flat = x.reshape(-1)
    if x.nbytes <= _WHOLE_NBYTES:
        result = _all_reduce_by_halves(flat, group, op)
    else:
        sizes = even(flat.numel(), group.size)
        own = [(sizes[group.rank],)] * group.size
        blocks = all_to_all(flat.split(sizes), own, group, x.nbytes + group.size * x.itemsize)
        result = all_gather(ordered(blocks, op), group, 0, sizes)
    return result.view(x.shape)


def _all_reduce_by_halves(flat: torch.Tensor, group: Group, op: str) -> torch.Tensor:
    total = flat.to(rule_of(op, flat.dtype).carrier or flat.dtype, copy=True)
    joined = torch.add if op == "sum" else torch.mul
    return all_reduce_by(joined, total, group, f"all_reduce {op} in order").to(flat.dtype)


def all_reduce_by(
    joined: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], part: torch.Tensor, group: Group, call: str
) -> torch.Tensor:
    """Reduce equal-shaped tensors by ``joined(low, high)``, which is associative and gives one such tensor.

    Collective over the group: the logarithm of its size in exchanges of two ranks each. ``call`` is what all call it.
    The order is that of a tree over the ranks, that of the lower rank first: so all compute the same bits. In exchange
    ``h``, of ``2 h`` ranks that follow each other rank ``i`` has the result of its half, and meets that of ``i + h`` or
    ``i - h``. Ranks beyond the largest power of two give theirs away before, and get the result.
    """
    size, rank, total = group.size, group.rank, part
    most = 1 << (size.bit_length() - 1)

    def travel(to: int | None, of: int | None) -> torch.Tensor:
        return send_recv(total, group, to, of, total.shape, call)

    if rank >= most:
        travel(rank - most, None)
    elif rank + most < size:
        total = joined(total, travel(None, rank + most))
    half = most // 2
    while half and rank < most:
        other = rank ^ half
        came = travel(other, other)
        total = joined(total, came) if rank < other else joined(came, total)
        half //= 2
    if rank >= most:
        total = travel(None, rank - most)
    elif rank + most < size:
        travel(rank + most, None)
    return total


def even(n: int, count: int) -> tuple[int, ...]:
    """Cut ``n`` elements into ``count`` equal parts, the last ones shorter. Not collective."""
    step = -(-n // count)
    return tuple(max(0, min(step, n - i * step)) for i in range(count))


def gather_counts(op: str, count: int, group: Group, common: Sequence[int] = ()) -> torch.Tensor:
    """Return the ranks' counts, on the host. Collective over the group.

    ``common`` is what must be the same on all ranks: the shape in which each has counted.
    """
    mine = torch.tensor([count], device="cpu")
    return all_gather(mine, group, 0, repeated(((1, group.size),)), (op, *common))


def all_gather(
    x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int], common: tuple[str | int, ...] = ()
) -> torch.Tensor:
    """Concatenate the ranks' tensors along ``dim``, in rank order; the shapes agree outside it. Collective.

    ``common`` is what else must be the same on all ranks.
    """
    if transforms_active() and is_constant(x):
        return outside(all_gather, x, group, dim, sizes, common)
    shape, extent = x.shape, total(sizes)
    full = (*shape[:dim], extent, *shape[dim + 1 :])
    if traced.recording is not None and group.size > 1 and math.prod(full):
        return traced.recording.call("all_gather", lambda t: all_gather(t, group, dim, sizes), [x], full)
    row = math.prod(full) // max(extent, 1)
    if guard.DEBUG:
        guard.check(group.comm, "all_gather", full, x.dtype)
    x = dense(x)
    if group.size == 1:
        return x.clone()
    owner = sole(sizes)
    if owner is not None:
        # MPI's all-gather may take a step for every rank
        here = group.rank == owner
        return broadcast(x if here else x.new_empty(full), group, owner, in_place=not here)
    whole = x.new_empty(*full)  # one by one: a tuple is read in half as much time again
    if not whole.numel():
        return whole
    # blocks that follow each other in the result are received in place
    direct = dim == 0 or whole.numel() == extent * shape[dim + 1 :].numel()
    flat = whole if direct else torch.empty(whole.numel(), dtype=x.dtype, device=x.device)
    if counter.active:
        counter.record("all_gather", 1, x.nbytes)
    transport_of(group, x).all_gather(x, flat, scaled(sizes, row * x.itemsize), (full, dim, *common))
    if direct:
        return whole
    at = 0
    for blocks in _by_runs(whole, dim, sizes):
        blocks.copy_(flat[at : at + blocks.numel()].view(blocks.shape))
        at += blocks.numel()
    return whole


def _by_runs(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the blocks of ``x`` along ``dim``, one after the other in a leading dim, of each run of equal ones.

    Views; empty blocks are left out. Not collective.
    """
    found, at = [], 0
    for size, count in runs_of(sizes):
        if size:
            found.append(x.narrow(dim, at, size * count).unflatten(dim, (count, size)).movedim(dim, 0))
        at += size * count
    return found


def reduce_scatter(
    x: torch.Tensor,
    group: Group,
    dim: int,
    sizes: Sequence[int],
    *,
    deterministic: bool | None = None,
) -> torch.Tensor:
    """Sum equal-shaped tensors; return this rank's block of the sum along ``dim``. Collective over the group."""
    rule = rule_of("sum", x.dtype)
    own = (*x.shape[:dim], sizes[group.rank], *x.shape[dim + 1 :])
    if traced.recording is not None and group.size > 1 and x.numel():
        return traced.recording.call(
            "reduce_scatter", lambda t: reduce_scatter(t, group, dim, sizes, deterministic=deterministic), [x], own
        )
    if guard.DEBUG:
        guard.check(group.comm, "reduce_scatter", tuple(x.shape), x.dtype)
    if group.size == 1:
        return dense(x).clone(memory_format=torch.contiguous_format)
    if not x.numel():
        return x.new_empty(own)
    owner = sole(sizes)
    if owner is not None:
        result = reduce(x, group, owner, deterministic=deterministic)
        return result if group.rank == owner else x.new_empty(own)
    if rule.ordered and in_order(deterministic):
        return ordered(all_to_all(x.split(list(sizes), dim), [own] * group.size, group, x.nbytes), "sum")
    dtype = rule.carrier or x.dtype
    flat = dense(x) if dim == 0 and dtype == x.dtype else pack(_by_runs(x, dim, sizes), dtype)
    result = flat.new_empty(*own)
    if counter.active:
        counter.record("reduce_scatter", 1, flat.nbytes)
    transport_of(group, flat).reduce_scatter(flat, result, scaled(sizes, x.numel() // x.shape[dim]), rule)
    return result if dtype == x.dtype else result.to(x.dtype)


def all_to_all(
    blocks: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    group: Group,
    bound_nbytes: int,
) -> list[torch.Tensor]:
    """Send block r to rank r, and return what comes from each: views of one buffer. Collective over the group.

    ``shapes`` are of what comes, by rank; no rank sends or receives more than ``bound_nbytes``, the same number on
    every rank.
    """
    counts = [math.prod(s) for s in shapes]
    flat = pack(blocks, blocks[0].dtype)
    came = all_to_all_flat(flat, [b.numel() for b in blocks], counts, group, bound_nbytes)
    return [b.view(s) for b, s in zip(came.split(counts), shapes)]


def all_to_all_flat(
    flat: torch.Tensor, out: Sequence[int], into: Sequence[int], group: Group, bound_nbytes: int
) -> torch.Tensor:
    """Send every rank a part of a tensor, 1-D and dense, and return what came from all, too. Collective over the group.

    ``out`` and ``into`` are the numbers that go to, and come from, every rank; ``bound_nbytes`` is as for `all_to_all`.
    """
    if traced.recording is not None and group.size > 1:
        return traced.recording.call(
            "all_to_all", lambda t: all_to_all_flat(t, out, into, group, bound_nbytes), [flat], (total(into),)
        )
    if guard.DEBUG:
        guard.check(group.comm, "all_to_all", (), flat.dtype)
    if group.size == 1:
        return flat.clone()
    came = flat.new_empty(total(into))
    if counter.active:
        counter.record("all_to_all", 1, flat.nbytes)
    transport_of(group, came).all_to_all(flat, out, came, into, bound_nbytes)
    return came


def broadcast(x: torch.Tensor, group: Group, root: int, *, in_place: bool = False) -> torch.Tensor:
    """Copy the root's tensor to every rank; elsewhere, ``x`` has its shape and dtype. Collective over the group."""
    if transforms_active() and is_constant(x):
        result = outside(broadcast, x, group, root, in_place=in_place)
        return x if in_place else result
    if traced.recording is not None and group.size > 1:
        y = traced.recording.call("broadcast", lambda t: broadcast(t, group, root), [x], x.shape)
        return x.copy_(y) if in_place else y
    if guard.DEBUG:
        guard.check(group.comm, "broadcast", tuple(x.shape), x.dtype)
    if group.size == 1:
        return x if in_place else dense(x).clone(memory_format=torch.contiguous_format)
    at_root = group.rank == root
    if in_place and is_dense(x):
        y = x
    elif at_root:
        y = dense(x).clone(memory_format=torch.contiguous_format)
    else:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if counter.active:
        counter.record("broadcast", 1, y.nbytes if at_root else 0)
    transport_of(group, y).broadcast(y, root)
    return x.copy_(y) if in_place and y is not x else y


def reduce(x: torch.Tensor, group: Group, root: int, *, deterministic: bool | None = None) -> torch.Tensor:
    """Sum equal-shaped tensors on the root; the other ranks get zeros. Collective over the group."""
    rule = rule_of("sum", x.dtype)
    if group.size == 1:
        return dense(x).clone(memory_format=torch.contiguous_format)
    if traced.recording is not None:
        return traced.recording.call(
            "reduce", lambda t: reduce(t, group, root, deterministic=deterministic), [x], x.shape
        )
    if rule.ordered and in_order(deterministic):
        result = all_reduce(x, group, deterministic=True)
        return result if group.rank == root else result.zero_()
    if guard.DEBUG:
        guard.check(group.comm, "reduce", tuple(x.shape), x.dtype)
    work = dense(x) if rule.carrier is None else dense(x).to(rule.carrier)
    result = torch.empty_like(work) if group.rank == root else torch.zeros_like(work)
    if counter.active:
        counter.record("reduce", 1, work.nbytes)
    transport_of(group, work).reduce(work, result, rule, root)
    return result.to(x.dtype)
