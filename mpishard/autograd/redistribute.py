"""Placement changes as linear ops with the placement rule for cotangents (DTensor's).

Of a Shard each rank holds its block of the cotangent; of a Replicate every rank holds the whole, identical
cotangent; of a Partial every rank holds the cotangent of the sum. Hence the pairs below:

====================== ======================== =====================================
step                   adjoint                  where
====================== ======================== =====================================
all-reduce             identity ("use")         Partial -> Replicate
reduce-scatter         all-gather               Partial -> Shard
keep on coordinate 0   identity                 Replicate -> Partial
transfer of boxes      the transfer back        Shard, Replicate -> Shard, Replicate
====================== ======================== =====================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mpishard.autograd.linear import LocalMap, Step, apply, in_transform, pair, same
from mpishard.comm import traced
from mpishard.comm.collective import blocking
from mpishard.comm.collective.nonblocking import PendingReduction, start_local_sum
from mpishard.comm.collective.transfer import run_transfer
from mpishard.comm.mesh import CartMesh, Group
from mpishard.layout import (
    Box,
    Layout,
    Partial,
    Replicate,
    Shard,
    Spans,
    Transfer,
    joined,
    layout_of,
    plan_transfer,
    without_partial,
)


def use_step(mesh: CartMesh, mesh_dims: tuple[int, ...]) -> Step:
    """Return "a replicated value is used with data sharded over ``mesh_dims``", cached.

    Not collective. Forward is the identity; the adjoint sums the ranks' contributions. Its reverse is
    Partial -> Replicate.
    """
    key = ("use", mesh_dims)
    step = mesh.kept.get(key)
    if step is None:
        group = mesh.group(mesh_dims)
        step = pair(same, lambda g: blocking.all_reduce(g, group))
        step.cotangent = tuple((m, False) for m in mesh_dims)
        step.adjoint.cotangent = tuple((m, True) for m in mesh_dims)
        mesh.keep(key, lambda: step)
    return step  # type: ignore[no-any-return]


def keep_step(mesh: CartMesh, mesh_dims: tuple[int, ...]) -> Step:
    """Return Replicate -> Partial over ``mesh_dims``, cached: the value stays on coordinate 0. Not collective.

    The adjoint is the identity.
    """
    key = ("keep", mesh_dims)
    step = mesh.kept.get(key)
    if step is None:
        first = all(mesh.coords[m] == 0 for m in mesh_dims)
        step = pair(same if first else torch.zeros_like, same)
        step.cotangent = tuple((m, False) for m in mesh_dims)
        mesh.keep(key, lambda: step)
    return step  # type: ignore[no-any-return]


def sum_partial(x: Tensor, mesh: CartMesh, mesh_dims: tuple[int, ...]) -> Tensor:
    """Sum what the ranks along ``mesh_dims`` hold (Partial -> Replicate). Collective over ``mesh_dims``.

    Notes
    -----
    Adjoint: the identity.
    """
    return apply(use_step(mesh, mesh_dims).adjoint, x) if mesh_dims else x


class _StartedSum:
    """The sum of `sum_partial`, which is under way when the op returns."""

    __slots__ = ("_group", "adjoint", "pending")

    def __init__(self, group: Group, adjoint: Step) -> None:
        self._group, self.adjoint = group, adjoint
        self.pending: PendingReduction | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        self.pending = start_local_sum(y.detach(), self._group)
        return y if self.pending else self.adjoint.adjoint(x)


def start_sum_partial(
    x: Tensor, mesh: CartMesh, mesh_dims: tuple[int, ...], then: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Callable[[bool], Tensor] | None]:
    """Start `sum_partial`; return its result, and what waits for it and returns ``then`` of it.

    Collective over ``mesh_dims``; what waits is not, and waits only if asked to: without, its result has no value yet,
    but the graph of one. Where a sum cannot be waited for by a rank alone, all is done, and nothing is to be called.
    """
    if in_transform() or torch.is_inference_mode_enabled() or traced.recording is not None:
        return then(sum_partial(x, mesh, mesh_dims)), None
    op = _StartedSum(mesh.group(mesh_dims), use_step(mesh, mesh_dims))
    y = apply(op, x)
    pending = op.pending
    if pending is None:
        return then(y), None
    recording = torch.is_grad_enabled()

    def settle(wait: bool) -> Tensor:
        if wait:
            with torch.no_grad():
                pending.wait()
        with torch.set_grad_enabled(recording):
            return then(y)

    return y, settle


def redistribute(x: Tensor, mesh: CartMesh, source: Layout, target: Layout) -> Tensor:
    """Return this rank's block of ``target``, given its block of ``source``.

    Collective over the mesh (over fewer ranks where fewer exchange data).

    Notes
    -----
    Adjoint: the redistribution back, by the placement rule; see the module's table.
    """
    if source is target or source == target:
        return x
    for step in _planned(mesh, source, target):
        x = apply(step, x)
    return x


def run_steps(mesh: CartMesh, source: Layout, target: Layout, x: Tensor) -> Tensor:
    """Return what `redistribute` does, without autograd. Collective as it is."""
    if source is target or source == target:
        return x
    for step in _planned(mesh, source, target):
        x = step(x)
    return x


def _planned(mesh: CartMesh, source: Layout, target: Layout) -> list[Step]:
    key = ("redistribute", source, target)
    steps = mesh.plans.get(key)
    return mesh.plan(key, lambda: list(_steps(mesh, source, target))) if steps is None else steps


def _steps(mesh: CartMesh, source: Layout, target: Layout) -> Iterator[Step]:
    now = source
    for m in source.partial_dims:
        wanted = target.placements[m]
        if type(wanted) is Partial:
            continue
        placements = list(now.placements)
        if type(wanted) is Shard and not _also_sharded(now, target, wanted.dim, m):
            after = _placed(now, target, m, wanted)
            yield _scatter_step(mesh, after, m, wanted.dim)
            now = after
        else:
            placements[m] = Replicate()
            yield use_step(mesh, (m,)).adjoint
            now = layout_of(now.mesh_shape, placements, now.shape, now.sizes)
    keep = tuple(
        m for m, p in enumerate(target.placements) if type(p) is Partial and type(now.placements[m]) is not Partial
    )
    # a transfer sees a Partial as a value of its own on every coordinate: like a Replicate
    before, after = without_partial(now), without_partial(target)
    if before != after:
        yield transfer_step(mesh, before, after)
    if keep:
        yield keep_step(mesh, keep)


def transfer_step(
    mesh: CartMesh, source: Layout, target: Layout, inner: tuple[int, ...] = (), inner_back: tuple[int, ...] = ()
) -> Step:
    """Return block of ``source`` -> block of ``target``; neither has a Partial. Not collective.

    ``inner`` are dims that are to lie innermost in the memory of what arrives, ``inner_back`` those of the cotangent,
    and, at best, of what leaves.
    """
    step = pair(mover(mesh, source, target, inner, inner_back), mover(mesh, target, source, inner_back, inner))
    step.cotangent = tuple((m, type(p) is Shard) for m, p in enumerate(source.placements))
    return step


def _also_sharded(now: Layout, target: Layout, dim: int, mesh_dim: int) -> bool:
    """Whether ``dim`` is sharded by any other mesh dim, in which case blocks are not a plain scatter."""
    return any(
        type(p) is Shard and p.dim == dim for t in (now, target) for m, p in enumerate(t.placements) if m != mesh_dim
    )


def _placed(now: Layout, target: Layout, mesh_dim: int, placement: Shard) -> Layout:
    placements = list(now.placements)
    placements[mesh_dim] = placement
    sizes = list(now.sizes)
    sizes[placement.dim] = target.sizes[placement.dim]
    return layout_of(now.mesh_shape, placements, now.shape, sizes)


def _scatter_step(mesh: CartMesh, after: Layout, mesh_dim: int, dim: int) -> Step:
    group, sizes = mesh.group((mesh_dim,)), after.sizes[dim]
    assert sizes is not None
    step = pair(
        lambda x: blocking.reduce_scatter(x, group, dim=dim, sizes=sizes),
        lambda g: blocking.all_gather(g, group, dim=dim, sizes=sizes),
    )
    step.cotangent = ((mesh_dim, True),)
    return step


def mover(
    mesh: CartMesh, source: Layout, target: Layout, inner: tuple[int, ...] = (), sent: tuple[int, ...] = ()
) -> LocalMap:
    """Return the function block of ``source`` -> block of ``target``; neither has a Partial.

    Not collective; the function is collective. See `run_transfer`; what is gathered has its dims in their order.
    """
    gathers = _gathers(source, target, mesh.coords)
    if gathers is not None:
        calls = [(mesh.group((m,)), dim, sizes) for m, dim, sizes in gathers]

        def gather(x: Tensor) -> Tensor:
            for group, dim, sizes in calls:
                x = blocking.all_gather(x, group, dim=dim, sizes=sizes)
            return x

        return gather
    plan = plan_transfer(source, target, mesh.coords)
    shape = target.local_shape(mesh.coords)
    call = (source, target)
    return lambda x: run_transfer(mesh, plan, x, shape, call=call, inner=inner, sent=sent)


def cells_step(mesh: CartMesh, op: str, dim: int, sends: Spans, recvs: Spans, call: object) -> Step:
    """Return "consecutive cells along ``dim`` go to the ranks of ``sends``", and those of ``recvs`` come in that order.

    Not collective; the step is collective over the ranks that exchange cells. ``op`` and ``call`` are as for
    `run_transfer`.
    """

    def mover(give: Spans, take: Spans) -> LocalMap:
        count = take[-1][1][1] if take else 0
        stays, comes = dict(give).get(mesh.rank), dict(take).get(mesh.rank)

        def run(x: Tensor) -> Tensor:
            shape = [count if d == dim else n for d, n in enumerate(x.shape)]

            def box(span: tuple[int, int]) -> Box:
                return tuple(span if d == dim else (0, n) for d, n in enumerate(shape))

            plan = Transfer(
                (box(stays), box(comes)) if stays and comes else None,
                *(tuple((rank, box(span)) for rank, span in spans if rank != mesh.rank) for spans in (give, take)),
            )
            return run_transfer(mesh, plan, x, shape, op, call=call)

        return run

    return pair(mover(sends, recvs), mover(recvs, sends))


def _gathers(source: Layout, target: Layout, coords: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]] | None:
    """Return the all-gathers (mesh dim, tensor dim, sizes), one after the other, that lead to ``target``, or None."""
    now, out = source, []
    for m in reversed(range(len(source.placements))):
        p = now.placements[m]
        if p == target.placements[m]:
            continue
        if type(p) is not Shard or type(target.placements[m]) is not Replicate or now.shard_dims[p.dim][-1] != m:
            return None
        count = now.mesh_shape[m]
        sizes = now.sizes[p.dim]
        assert sizes is not None
        # row-major: the blocks along the innermost mesh dim lie next to each other
        merged = joined(sizes, count)
        first = now.index(p.dim, coords) // count * count
        out.append((m, p.dim, sizes[first : first + count]))
        placements = list(now.placements)
        placements[m] = Replicate()
        rest = list(now.sizes)
        rest[p.dim] = merged if len(merged) > 1 else None
        now = layout_of(now.mesh_shape, placements, now.shape, rest)
    return out if now == target and out else None
