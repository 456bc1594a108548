"""Parameter gradients summed in buckets while backward goes on."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from mpishard.autograd.linear import apply, in_transform
from mpishard.autograd.redistribute import redistribute, use_step
from mpishard.autograd.replica import Replica, Together, compare, note_ddp, note_use, replica_of
from mpishard.autograd.withhold import held, is_withholding, taken_share, withhold
from mpishard.comm import traced
from mpishard.comm.collective.blocking import all_reduce
from mpishard.comm.collective.nonblocking import PendingReduction, iall_reduce
from mpishard.comm.mesh import CartMesh, Group
from mpishard.layout import Layout

BUCKET_NBYTES = 4 << 20

_Key = tuple[CartMesh, tuple[int, ...], torch.dtype]


class _Buckets:
    """The gradients of one backward pass: filled by its nodes, all in the same order on every rank."""

    def __init__(self) -> None:
        self._open: dict[_Key, list[tuple[Tensor, Tensor]]] = {}
        self._travelling: list[tuple[PendingReduction, list[Tensor]]] = []
        self._suspect: dict[Replica, Tensor] = {}
        self._nbytes: dict[_Key, int] = {}
        self._postponed: deque[Callable[[], None]] = deque()
        self._deferred: tuple[Replica, Callable[[], None]] | None = None

    def postpone(self, finish: Callable[[], None]) -> None:
        """Have what is under way finished later in the pass; few at a time, as each holds memory."""
        while len(self._postponed) > 1:
            self._postponed.popleft()()
        self._postponed.append(finish)

    def defer(self, replica: Replica, compute: Callable[[], None]) -> None:
        """Have a gradient of `add`, which is zeros now, computed later in the pass; one at a time holds memory."""
        self.run_deferred()
        self._deferred = replica, compute

    def run_deferred(self, *, hides_sums: bool = False) -> None:
        """Compute what was deferred."""
        if self._deferred is not None:
            (replica, compute), self._deferred = self._deferred, None
            replica.hides_sums = hides_sums
            compute()

    def add(self, param: Tensor, replica: Replica, g: Tensor, mesh: CartMesh, mesh_dims: tuple[int, ...]) -> None:
        """Take a gradient that is this rank's share of the sum over ``mesh_dims``."""
        key = mesh, mesh_dims, g.dtype
        if held or is_withholding():
            self.run_deferred()
        if is_withholding():
            withhold(param, key, g)
            replica.postpone(param)
            return
        if held:
            g = taken_share(param, key, g)
        if replica.postpone(param):
            self._suspect[replica] = param
        self._put(param, key, g)

    def add_all(
        self, found: Sequence[tuple[Tensor, Replica, Tensor]], mesh: CartMesh, mesh_dims: tuple[int, ...]
    ) -> None:
        """Do what `add` does, for gradients of one dtype."""
        if held or is_withholding():
            for param, replica, g in found:
                self.add(param, replica, g, mesh, mesh_dims)
            return
        for param, replica, _ in found:
            if replica.postpone(param):
                self._suspect[replica] = param
        key = mesh, mesh_dims, found[0][2].dtype
        self._open.setdefault(key, []).extend([(param, g) for param, _, g in found])
        self._grown(key, sum([g.nbytes for _, _, g in found]))

    def _put(self, param: Tensor, key: _Key, g: Tensor) -> None:
        self._open.setdefault(key, []).append((param, g))
        self._grown(key, g.nbytes)

    def _grown(self, key: _Key, by: int) -> None:
        nbytes = self._nbytes[key] = self._nbytes.get(key, 0) + by
        if nbytes >= BUCKET_NBYTES:
            self._start(key)

    def _start(self, key: _Key) -> None:
        flat, group, params = self._close(key)
        self._travelling.append((iall_reduce(flat, group), params))

    def _close(self, key: _Key) -> tuple[Tensor, Group, list[Tensor]]:
        self.run_deferred()
        mesh, mesh_dims, _ = key
        bucket = self._open.pop(key)
        del self._nbytes[key]
        parts = [g if g.ndim == 1 else g.reshape(-1) for _, g in bucket]
        return torch.cat(parts), mesh.group(mesh_dims), [p for p, _ in bucket]

    def finish(self) -> None:
        """Wait for all sums and add them to the parameters' gradients. Collective."""
        self.run_deferred()
        while self._postponed:
            self._postponed.popleft()()
        if held and not is_withholding():
            for waiting in [alive for known in list(held.values()) if (alive := known()) is not None]:
                for key, (param, share) in waiting.taken():
                    self._put(param, key, share)
        while self._open:
            key = next(iter(self._open))
            if len(self._open) > 1 or self._travelling:
                self._start(key)
                continue
            # nothing is left to do meanwhile, and MPI is faster when it need not return
            flat, group, params = self._close(key)
            _accumulate(all_reduce(flat, group, in_place=True), params)
        for pending, params in self._travelling:
            # those after it travel on
            _accumulate(pending.wait(), params)
        if self._suspect:
            compare([(replica, param) for replica, param in self._suspect.items() if replica.is_due()])


def _accumulate(flat: Tensor, params: list[Tensor]) -> None:
    # memory of its own for each new one: a user may keep one gradient and drop the others
    new = params[0].grad is None
    split: Any = torch.split_with_sizes_copy if new else torch.split_with_sizes
    for param, g in zip(params, split(flat, [p.numel() for p in params])):
        grad = param.grad
        if grad is not None:
            grad.add_(g if param.ndim == 1 else g.view(param.shape))
        elif new:
            # not a view, which would keep its base
            param.grad = g if param.ndim == 1 else g.resize_(param.shape)
        else:
            param.grad = g.view(param.shape).clone()


def finish_withheld() -> None:
    """Sum what earlier passes withheld, before a pass that sums on its own. Collective where there is any."""
    if held:
        _Buckets().finish()


_active: list[_Buckets] = []
_abandoned: list[_Buckets] = []


@contextmanager
def bucketed() -> Iterator[None]:
    """Sum the gradients of replicated parameters in buckets during the backward pass inside. Collective.

    For a pass that accumulates into ``.grad`` of all leaves and builds no graph of its own.
    """
    buckets = _Buckets()
    _active.append(buckets)
    try:
        yield
        buckets.finish()
    except BaseException:
        # MPI still writes into the sums that are under way
        _abandoned.append(buckets)
        raise
    finally:
        _active.remove(buckets)
        _kept.clear()


def postpone(finish: Callable[[], None]) -> bool:
    """Have what is under way finished later in the backward pass, if that is one which allows it. Not collective."""
    if _active:
        _active[-1].postpone(finish)
    return bool(_active)


def defer(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """Return zeros for the gradient of a weight, which are filled later in the backward pass, if that is allowed.

    Not collective, nor is ``compute``. Allowed is it where nothing but the buckets reads the gradient: of what `use`
    has returned. Not where it hid nothing before: at once, the cotangent is still in the cache.
    """
    if not _active or not isinstance(weight.grad_fn, _UseParameter._backward_cls):  # type: ignore[attr-defined]
        return None
    replica: Replica = weight.grad_fn.replica  # type: ignore[attr-defined]
    if replica.hides_sums is False:
        return None
    g = torch.zeros_like(weight, requires_grad=False)
    stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None

    def fill() -> None:
        with torch.no_grad(), torch.cuda.stream(stream):  # type: ignore[arg-type]
            g.copy_(compute())

    _active[-1].defer(replica, fill)
    return g


def run_deferred(*, hides_sums: bool = False) -> None:
    """Compute what `defer` has left, as nothing else is to be done, or while sums travel. Not collective."""
    if _active:
        _active[-1].run_deferred(hides_sums=hides_sums)


def is_postponing() -> bool:
    """Tell whether a backward pass goes on that adds to ``.grad`` at its end. Not collective."""
    return bool(_active)


class _UseParameter(Function):
    """`use` of a replicated parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, replica: Replica, mesh: CartMesh, mesh_dims: tuple[int, ...]) -> Tensor:
        ctx.param, ctx.replica, ctx.mesh, ctx.mesh_dims = param, replica, mesh, mesh_dims
        note_use(replica, mesh)
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        param, replica = ctx.param, ctx.replica
        if _active and not _is_awaited(param, replica):
            _active[-1].add(param, replica, grads[0], ctx.mesh, ctx.mesh_dims)
            return None, None, None, None
        run_deferred()
        return apply(use_step(ctx.mesh, ctx.mesh_dims).adjoint, grads[0]), None, None, None


_node = super(Function, _UseParameter).apply  # type: ignore[misc]


def _is_awaited(param: Tensor, replica: Replica) -> bool:
    """Tell whether hooks, or what waits for autograd's own accumulation, need the sum of a gradient at once."""
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    return replica.direct or bool(param._backward_hooks) or len(hooks) > 1


class _UseTogether(Function):
    """`use` of small replicated parameters, which share a node: one of each takes longer than what it hands on."""

    @staticmethod
    def forward(
        ctx: Any, mesh: CartMesh, mesh_dims: tuple[int, ...], replicas: list[Replica], *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.mesh_dims, ctx.replicas, ctx.params = mesh, mesh_dims, replicas, params
        ctx.set_materialize_grads(False)
        # not views: an optimizer may write into parameters while the node lives
        return tuple([p.detach() for p in params])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        put_off, now = [], []
        for i, (param, replica, g) in enumerate(zip(ctx.params, ctx.replicas, grads)):
            if g is None:
                continue
            if _active and not _is_awaited(param, replica):
                put_off.append((param, replica, g))
            else:
                now.append(i)
        if put_off:
            _active[-1].add_all(put_off, ctx.mesh, ctx.mesh_dims)
        out: list[Tensor | None] = [None] * len(grads)
        if now:
            run_deferred()
            flat = torch.cat([grads[i].reshape(-1) for i in now])
            parts = apply(use_step(ctx.mesh, ctx.mesh_dims).adjoint, flat).split([grads[i].numel() for i in now])
            for i, part in zip(now, parts):
                out[i] = part.view(grads[i].shape)
        return None, None, None, *out


_shared_node = super(Function, _UseTogether).apply  # type: ignore[misc]


class _Used:
    """What a node of small parameters returned, by their places; None for those that need no gradient."""

    __slots__ = ("__weakref__", "mesh", "values")

    def __init__(self, together: Together, mesh: CartMesh, mesh_dims: tuple[int, ...]) -> None:
        alive = [(i, p) for i, known in enumerate(together.members) if (p := known()) is not None and p.requires_grad]
        found = [(i, p, replica) for i, p in alive if (replica := replica_of(p)) is not None]
        for _, _, replica in found:
            replica.on(mesh)
        self.mesh = mesh
        self.values: list[Tensor | None] = [None] * len(together.members)
        values = _shared_node(mesh, mesh_dims, [replica for _, _, replica in found], *[p for _, p, _ in found])
        for (i, _, _), y in zip(found, values):
            self.values[i] = y


# until a backward pass ends, where no model keeps them; held here, as what the parameters hold would hold them,
# through their graph
_kept: deque[_Used] = deque(maxlen=64)


def _used_together(
    param: Tensor, together: Together, place: int, mesh: CartMesh, mesh_dims: tuple[int, ...]
) -> Tensor | None:
    known = together.used.get((id(mesh), mesh_dims))
    used = None if known is None else known()
    if used is not None and used.mesh is mesh:
        y = used.values[place]
        # another where `.data` was set, or the module moved; seen without an operation that checkpoints would count
        if y is not None and y.data_ptr() == param.data_ptr() and y.shape == param.shape and y.dtype is param.dtype:
            return y
    used = _Used(together, mesh, mesh_dims)
    together.used[id(mesh), mesh_dims] = weakref.ref(used)
    _kept.append(used)
    together.keep(used)
    return used.values[place]


class _UseAtOnce(Function):
    """`use` of several values, whose cotangents are summed at once: a compiled program has no end of pass."""

    @staticmethod
    def forward(ctx: Any, mesh: CartMesh, mesh_dims: tuple[int, ...], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.mesh_dims = mesh, mesh_dims
        return tuple(x.view_as(x) for x in values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flat = torch.cat([g.reshape(-1) for g in grads])
        flat = all_reduce(flat, ctx.mesh.group(ctx.mesh_dims))
        parts = flat.split_with_sizes([g.numel() for g in grads])
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
            if hi - lo < x.shape[d]:  # else a copy in backward
                x = x.narrow(d, lo, hi - lo)
        return x
    return use(redistribute(x, mesh, source, target), mesh, mesh_dims)
