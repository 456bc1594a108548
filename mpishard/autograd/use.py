"""Replicated values used with data that is sharded: the sum of their gradients over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from mpishard.autograd.bucket import BUCKET_NBYTES, kept, run_deferred, serving
from mpishard.autograd.hooked import has_hooks, hooked
from mpishard.autograd.linear import apply, in_transform, node_of
from mpishard.autograd.redistribute import redistribute, use_step
from mpishard.autograd.replica import Replica, Together, meet, note_ddp, note_use, replica_of
from mpishard.comm import traced
from mpishard.comm.collective.blocking import all_reduce
from mpishard.comm.memory.buffer import cat
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout


class _UseParameter(Function):
    """`use` of a replicated parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, replica: Replica, mesh: CartMesh, mesh_dims: tuple[int, ...]) -> Tensor:
        ctx.param, ctx.replica, ctx.mesh, ctx.mesh_dims = param, replica, mesh, mesh_dims
        note_use(replica, mesh)
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,), buckets = grads, serving(ctx)
        if buckets is not None:
            if not ctx.replica.direct:
                buckets.add(ctx, g)
                return None, None, None, None
            g = buckets.whole(ctx, g)
            run_deferred()
        return apply(use_step(ctx.mesh, ctx.mesh_dims).adjoint, g), None, None, None


_node = node_of(_UseParameter)


def put_off(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """Return what stands for the gradient of a weight that is computed later in the backward pass, if it is allowed.

    Not collective, nor is ``compute``. Allowed is it where the gradient goes to the buckets alone: of what `use` has
    returned. Not where it hid nothing before: at once, the cotangent is still in the cache.
    """
    node: Any = weight.grad_fn
    if not isinstance(node, _UseParameter._backward_cls) or node.replica.hides_sums is False:  # type: ignore[attr-defined]
        return None
    buckets = serving(node)
    return None if buckets is None else buckets.defer(node, weight, compute)


class _UseTogether(Function):
    """`use` of small replicated parameters, which share a node: one of each takes longer than what it hands on."""

    @staticmethod
    def forward(
        ctx: Any, mesh: CartMesh, mesh_dims: tuple[int, ...], replicas: list[Replica], *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.mesh_dims, ctx.replicas, ctx.params = mesh, mesh_dims, replicas, params
        ctx.sizes = [p.numel() for p in params]
        ctx.set_materialize_grads(False)
        # not views: an optimizer may write into parameters while the node lives
        return tuple([p.detach() for p in params])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        buckets = serving(ctx)
        put_off: list[int] = []
        now: list[int] = []
        for i, (param, replica, g) in enumerate(zip(ctx.params, ctx.replicas, grads)):
            if g is not None and buckets is not None and not replica.direct:
                put_off.append(i)
                continue
            if has_hooks(param):
                hooked(param)
            if g is not None:
                now.append(i)
        if buckets is not None and put_off:
            columns: Any = (ctx.params, ctx.replicas, ctx.sizes, grads)
            if len(put_off) < len(grads):
                columns = ([values[i] for i in put_off] for values in columns)
            params, replicas, sizes, found = columns
            buckets.add_all(params, replicas, sizes, found, ctx.mesh, ctx.mesh_dims)
        out: list[Tensor | None] = [None] * len(grads)
        if now:
            run_deferred()
            flat = cat([grads[i].reshape(-1) for i in now])
            parts = apply(use_step(ctx.mesh, ctx.mesh_dims).adjoint, flat).split([grads[i].numel() for i in now])
            for i, part in zip(now, parts):
                out[i] = part.view(grads[i].shape)
        return None, None, None, *out


_shared_node = node_of(_UseTogether)


class _Used:
    """What a node of small parameters returned, by their places; None for those that need no gradient.

    ``memory`` says where a parameter was, and of what kind: where ``.data`` is set, or it moves, it is used anew. That
    is seen without an operation that checkpoints would count.
    """

    __slots__ = ("__weakref__", "memory", "mesh", "values")

    def __init__(self, together: Together, mesh: CartMesh, mesh_dims: tuple[int, ...]) -> None:
        alive = [(i, p) for i, known in enumerate(together.members) if (p := known()) is not None and p.requires_grad]
        found = [(i, p, r) for i, p in alive if (r := replica_of(p)) is not None]
        for _, _, replica in found:
            replica.on(mesh)
        self.mesh = mesh
        self.values: list[Tensor | None] = [None] * len(together.members)
        self.memory: list[Any] = [None] * len(together.members)
        values = _shared_node(mesh, mesh_dims, [replica for _, _, replica in found], *[p for _, p, _ in found])
        for (i, _, _), y in zip(found, values):
            self.values[i] = y
            self.memory[i] = y.data_ptr(), y.shape, y.dtype

    def serves(self, param: Tensor, place: int, mesh: CartMesh) -> bool:
        """Tell whether the node stands for a parameter as it is now. Not collective."""
        return self.mesh is mesh and self.memory[place] == (param.data_ptr(), param.shape, param.dtype)

    def retire(self) -> None:
        """Leave all parameters to the node that takes its place: a pass that finds both takes twice as long."""
        self.memory = [None] * len(self.memory)


def _used_together(
    param: Tensor, together: Together, place: int, mesh: CartMesh, mesh_dims: tuple[int, ...]
) -> Tensor | None:
    known = together.used.get((id(mesh), mesh_dims))
    used = None if known is None else known()
    if used is None or not used.serves(param, place, mesh):
        if used is not None:
            used.retire()
        used = _Used(together, mesh, mesh_dims)
        together.used[id(mesh), mesh_dims] = weakref.ref(used)
        kept.append(used)
        together.keep(used)
    return used.values[place]


def used_again(param: Tensor, mesh: CartMesh, beside: Layout) -> Tensor | None:
    """Return what `use_beside` has returned of a small parameter, if it would return the same, or None.

    Not collective.
    """
    replica = replica_of(param)
    if (
        replica is None
        or replica.beside is None
        or replica.beside[0] is not beside
        or traced.recording is not None
        or in_transform()
        or not param.requires_grad
        or DistributedDataParallel._active_ddp_module is not None
    ):
        return None
    _, known, place = replica.beside
    used = known()
    return used.values[place] if used is not None and used.serves(param, place, mesh) else None


def use_beside(x: Tensor, mesh: CartMesh, mesh_dims: tuple[int, ...], beside: Layout) -> Tensor:
    """Do what `use` does, and note beside which layout, for `used_again`. As collective as it is."""
    y = use(x, mesh, mesh_dims)
    if y is not x and (replica := replica_of(x)) is not None and replica.together is not None:
        together, place = replica.together
        known = together.used.get((id(mesh), mesh_dims))
        replica.beside = None if known is None else (beside, known, place)
    return y


class _UseAtOnce(Function):
    """`use` of several values, whose cotangents are summed at once: a compiled program has no end of pass."""

    @staticmethod
    def forward(ctx: Any, mesh: CartMesh, mesh_dims: tuple[int, ...], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.mesh_dims = mesh, mesh_dims
        return tuple(x.view_as(x) for x in values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flat = cat([g.reshape(-1) for g in grads])
        flat = all_reduce(flat, ctx.mesh.group(ctx.mesh_dims))
        # not views of one another, whose versions would be one: `no_sync` tells by them who wrote into a gradient
        split: Any = torch.split_with_sizes_copy
        parts = split(flat, [g.numel() for g in grads])
        return None, None, *(part.view(g.shape) for part, g in zip(parts, grads))


def use_together(values: list[Tensor], mesh: CartMesh, mesh_dims: tuple[int, ...]) -> list[Tensor]:
    """Use replicated values of one dtype with data that is sharded over ``mesh_dims``: as `use`, with one sum.

    Not collective; its backward is collective over ``mesh_dims``, one sum of at most `BUCKET_NBYTES` after the other.
    """
    out: list[Tensor] = []
    first, nbytes = 0, 0
    for i, x in enumerate(values):
        nbytes += x.numel() * x.itemsize
        if nbytes >= BUCKET_NBYTES or i + 1 == len(values):
            out += _UseAtOnce.apply(mesh, mesh_dims, *values[first : i + 1])  # type: ignore[no-untyped-call]
            first, nbytes = i + 1, 0
    return out


def use(x: Tensor, mesh: CartMesh, mesh_dims: tuple[int, ...]) -> Tensor:
    """Use a replicated value with data that is sharded over ``mesh_dims``.

    Not collective; its backward is collective over ``mesh_dims``.

    Notes
    -----
    Adjoint: the sum over the ranks along ``mesh_dims``. That of a replicated parameter may be postponed to the end
    of the backward pass, where it is added to ``.grad``.
    """
    meet(x, mesh)
    if not mesh_dims:
        return x
    if traced.recording is not None and (known := traced.recording.used(x, mesh_dims)) is not None:
        return known
    # a dual's primal, and a value made of what an outer transform differentiates, have requires_grad=False
    if not in_transform():
        if not x.requires_grad:
            return x
        if (replica := replica_of(x)) is not None:
            if not torch.is_grad_enabled():
                return x
            if replica.together is not None and traced.recording is None:
                if DistributedDataParallel._active_ddp_module is not None:
                    note_ddp()
                y = _used_together(x, *replica.together, mesh, mesh_dims)
                if y is not None:
                    return y
            return _node(x, replica, mesh, mesh_dims)
        if (gathered := getattr(x, "_gathered", None)) is not None:
            return gathered.used(x, mesh, mesh_dims)  # type: ignore[no-any-return]
    return apply(use_step(mesh, mesh_dims), x)


def use_part(x: Tensor, mesh: CartMesh, source: Layout, target: Layout, mesh_dims: tuple[int, ...]) -> Tensor:
    """Return the block of ``target`` of an operand, used with data that is sharded over ``mesh_dims``.

    Collective as `redistribute` is; its backward as that and `use`.

    Notes
    -----
    Adjoint: that of `use`, and then of `redistribute`. Of a small replicated parameter, of which ranks take parts, the
    gradients of the parts are summed as those of `use` are, with zeros elsewhere: a bucket travels while backward goes
    on, and an all-gather would stop it for every parameter.
    """
    if (
        source is not target
        and x.requires_grad
        and x.nbytes < BUCKET_NBYTES
        and replica_of(x) is not None
        and source.is_replicated
        and torch.is_grad_enabled()
        and traced.recording is None
        and not in_transform()
    ):
        x = use(x, mesh, tuple(sorted({*mesh_dims, *target.sharded_mesh_dims})))
        for d in target.shard_dims:
            lo, hi = target.interval(d, mesh.coords)
            x = x.narrow(d, lo, hi - lo)
        return x
    return use(redistribute(x, mesh, source, target), mesh, mesh_dims)
