"""Parameter gradients summed in buckets while backward goes on."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

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
# a bucket beyond it gives each new gradient memory of its own: a user may keep one and drop the others
_SHARED_NBYTES = 1 << 16

_Key = tuple[CartMesh, tuple[int, ...], torch.dtype]


class _Bucket:
    """Gradients that travel together, one after the other in ``parts``, and whose they are."""

    __slots__ = ("nbytes", "params", "parts", "sizes")

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.sizes: list[int] = []
        self.parts: list[Tensor] = []
        self.nbytes = 0

    def put(self, params: Sequence[Tensor], sizes: Sequence[int], part: Tensor) -> int:
        """Take some, together; return the number of their part."""
        self.params += params
        self.sizes += sizes
        self.parts.append(part)
        self.nbytes += part.nbytes
        return len(self.parts) - 1


class _Deferred:
    """A gradient of a weight that is computed later in the pass, in the place of the zeros that autograd got for it.

    Those reach the weight's node alone, or in a sum with gradients of other uses.
    """

    __slots__ = ("compute", "node", "value", "where", "zeros")

    def __init__(self, node: Any, zeros: Tensor, compute: Callable[[], Tensor]) -> None:
        self.node, self.zeros, self.compute = node, zeros, compute
        self.value: Tensor | None = None
        # in which bucket the gradient lies, and as which part, once the weight's node has had it
        self.where: tuple[_Bucket, int] | None = None

    def run(self) -> None:
        """Compute it, and add it to what the node had."""
        self.value = self.compute()
        if self.where is not None:
            bucket, i = self.where
            bucket.parts[i] = self.added_to(bucket.parts[i])

    def added_to(self, g: Tensor) -> Tensor:
        """Return what the weight's node would have had."""
        assert self.value is not None
        return self.value if g is self.zeros else g + self.value


class _Place(NamedTuple):
    """Where a gradient goes that shares its node with others; as `_UseParameter`'s own node."""

    param: Tensor
    replica: Replica
    mesh: CartMesh
    mesh_dims: tuple[int, ...]


class _Buckets:
    """The gradients of one backward pass: filled by its nodes, all in the same order on every rank."""

    def __init__(self) -> None:
        self._open: dict[_Key, _Bucket] = {}
        self._travelling: list[tuple[PendingReduction, _Bucket]] = []
        self._suspect: dict[Replica, Tensor] = {}
        self._postponed: deque[Callable[[], None]] = deque()
        self._deferred: _Deferred | None = None
        # computed before the weight's node had its share
        self._early: dict[Any, _Deferred] = {}

    def postpone(self, finish: Callable[[], None]) -> None:
        """Have what is under way finished later in the pass; few at a time, as each holds memory."""
        while len(self._postponed) > 1:
            self._postponed.popleft()()
        self._postponed.append(finish)

    def defer(self, deferred: _Deferred) -> None:
        """Have a gradient computed later in the pass; one at a time holds memory."""
        self.run_deferred()
        self._deferred = deferred

    def run_deferred(self, *, hides_sums: bool = False) -> None:
        """Compute what was deferred."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred.node.replica.hides_sums = hides_sums
            deferred.run()
            if deferred.where is None:
                self._early[deferred.node] = deferred

    def whole(self, node: Any, g: Tensor) -> Tensor:
        """Return the gradient that reaches a weight's node, with what was deferred of it."""
        if self._deferred is not None and self._deferred.node is node:
            self.run_deferred()
        early = self._early.pop(node, None)
        return g if early is None else early.added_to(g)

    def add(self, node: Any, g: Tensor) -> None:
        """Take a gradient that reaches a weight's node: this rank's share of the sum over its ``mesh_dims``."""
        param, replica = node.param, node.replica
        key = node.mesh, node.mesh_dims, g.dtype
        deferred = self._deferred
        if deferred is None or deferred.node is not node or held or is_withholding():
            deferred, g = None, self.whole(node, g)
        if is_withholding():
            withhold(param, key, g)
            replica.postpone(param)
            return
        if held:
            g = taken_share(param, key, g)
        if replica.postpone(param):
            self._suspect[replica] = param
        self._put(key, (param,), (g.numel(),), g, deferred)

    def add_all(
        self,
        params: Sequence[Tensor],
        replicas: Sequence[Replica],
        sizes: Sequence[int],
        grads: Sequence[Tensor],
        mesh: CartMesh,
        mesh_dims: tuple[int, ...],
    ) -> None:
        """Do what `add` does, for small gradients of one dtype."""
        if held or is_withholding():
            for param, replica, g in zip(params, replicas, grads):
                self.add(_Place(param, replica, mesh, mesh_dims), g)
            return
        for param, replica in zip(params, replicas):
            if replica.postpone(param):
                self._suspect[replica] = param
        # at once: their memory is in the cache, and is for what backward makes next
        part = torch.cat([g if g.ndim == 1 else g.reshape(-1) for g in grads])
        self._put((mesh, mesh_dims, part.dtype), params, sizes, part)

    def _put(
        self,
        key: _Key,
        params: Sequence[Tensor],
        sizes: Sequence[int],
        part: Tensor,
        deferred: _Deferred | None = None,
    ) -> None:
        # in the order in which the nodes run, the same on every rank, whatever is deferred
        bucket = self._open.get(key)
        if bucket is None:
            bucket = self._open[key] = _Bucket()
        i = bucket.put(params, sizes, part)
        if deferred is not None:
            deferred.where = bucket, i
        if bucket.nbytes >= BUCKET_NBYTES:
            self._start(key)

    def _start(self, key: _Key) -> None:
        flat, group, bucket = self._close(key)
        self._travelling.append((iall_reduce(flat, group), bucket))

    def _close(self, key: _Key) -> tuple[Tensor, Group, _Bucket]:
        self.run_deferred()
        mesh, mesh_dims, _ = key
        bucket = self._open.pop(key)
        flat = torch.cat([g if g.ndim == 1 else g.reshape(-1) for g in bucket.parts])
        bucket.parts.clear()
        return flat, mesh.group(mesh_dims), bucket

    def finish(self) -> None:
        """Wait for all sums and add them to the parameters' gradients. Collective."""
        self.run_deferred()
        while self._postponed:
            self._postponed.popleft()()
        if held and not is_withholding():
            for waiting in [alive for known in list(held.values()) if (alive := known()) is not None]:
                for key, (param, share) in waiting.taken():
                    self._put(key, (param,), (share.numel(),), share)
        while self._open:
            key = next(iter(self._open))
            if len(self._open) > 1 or self._travelling:
                self._start(key)
                continue
            # nothing is left to do meanwhile, and MPI is faster when it need not return
            flat, group, bucket = self._close(key)
            _accumulate(all_reduce(flat, group, in_place=True), bucket)
        for pending, bucket in self._travelling:
            # those after it travel on
            _accumulate(pending.wait(), bucket)
        if self._suspect:
            compare([(replica, param) for replica, param in self._suspect.items() if replica.is_due()])


def _accumulate(flat: Tensor, bucket: _Bucket) -> None:
    new = bucket.params[0].grad is None
    split: Any = torch.split_with_sizes
    if new:
        # not views, which would keep their base
        split = torch.unsafe_split_with_sizes if flat.nbytes <= _SHARED_NBYTES else torch.split_with_sizes_copy
    for param, g in zip(bucket.params, split(flat, bucket.sizes)):
        grad = param.grad
        if grad is not None:
            grad.add_(g if param.ndim == 1 else g.view(param.shape))
        elif new:
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
    """Return zeros for the gradient of a weight, whose share is computed later in the backward pass, if it is allowed.

    Not collective, nor is ``compute``. Allowed is it where the gradient goes to the buckets alone: of what `use` has
    returned. Not where it hid nothing before: at once, the cotangent is still in the cache.
    """
    node: Any = weight.grad_fn
    if not _active or not isinstance(node, _UseParameter._backward_cls) or node.replica.hides_sums is False:  # type: ignore[attr-defined]
        return None
    # no memory: they are a sign, and what autograd may add others to
    zeros = weight.new_zeros(()).expand(weight.shape)
    # where there is none, torch asks for every kind of device
    stream = torch.cuda.stream(torch.cuda.current_stream(weight.device)) if weight.is_cuda else nullcontext()

    def later() -> Tensor:
        with torch.no_grad(), stream:
            return compute()

    _active[-1].defer(_Deferred(node, zeros, later))
    return zeros


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
        (g,) = grads
        if _active:
            if not _is_awaited(ctx.param, ctx.replica):
                _active[-1].add(ctx, g)
                return None, None, None, None
            g = _active[-1].whole(ctx, g)
            run_deferred()
        return apply(use_step(ctx.mesh, ctx.mesh_dims).adjoint, g), None, None, None


_node = super(Function, _UseParameter).apply  # type: ignore[misc]


def _is_awaited(param: Tensor, replica: Replica) -> bool:
    """Tell whether hooks, or what waits for autograd's own accumulation, need the sum of a gradient at once."""
    return replica.direct or bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks) > 1  # type: ignore[attr-defined]


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
        buckets = _active[-1] if _active else None
        put_off: list[int] = []
        now: list[int] = []
        for i, (param, replica, g) in enumerate(zip(ctx.params, ctx.replicas, grads)):
            if g is not None:
                (now if buckets is None or _is_awaited(param, replica) else put_off).append(i)
        if buckets is not None and put_off:
            columns: Any = (ctx.params, ctx.replicas, ctx.sizes, grads)
            if len(put_off) < len(grads):
                columns = ([values[i] for i in put_off] for values in columns)
            params, replicas, sizes, found = columns
            buckets.add_all(params, replicas, sizes, found, ctx.mesh, ctx.mesh_dims)
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
    """What a node of small parameters returned, by their places; None for those that need no gradient.

    ``memory`` says where a parameter was, and of what kind: where ``.data`` is set, or it moves, it is used anew. That
    is seen without an operation that checkpoints would count.
    """

    __slots__ = ("__weakref__", "memory", "mesh", "values")

    def __init__(self, together: Together, mesh: CartMesh, mesh_dims: tuple[int, ...]) -> None:
        alive = [(i, p) for i, known in enumerate(together.members) if (p := known()) is not None and p.requires_grad]
        found = [(i, p, replica) for i, p in alive if (replica := replica_of(p)) is not None]
        for _, _, replica in found:
            replica.on(mesh)
        self.mesh = mesh
        self.values: list[Tensor | None] = [None] * len(together.members)
        self.memory: list[Any] = [None] * len(together.members)
        values = _shared_node(mesh, mesh_dims, [replica for _, _, replica in found], *[p for _, p, _ in found])
        for (i, _, _), y in zip(found, values):
            self.values[i] = y
            self.memory[i] = y.data_ptr(), y.shape, y.dtype

    def retire(self) -> None:
        """Leave all parameters to the node that takes its place: a pass that finds both takes twice as long."""
        self.memory = [None] * len(self.memory)


# until a backward pass ends, where no model keeps them; held here, as what the parameters hold would hold them,
# through their graph
_kept: deque[_Used] = deque(maxlen=64)


def _used_together(
    param: Tensor, together: Together, place: int, mesh: CartMesh, mesh_dims: tuple[int, ...]
) -> Tensor | None:
    known = together.used.get((id(mesh), mesh_dims))
    used = None if known is None else known()
    here = param.data_ptr(), param.shape, param.dtype
    if used is None or used.mesh is not mesh or used.memory[place] != here:
        if used is not None:
            used.retire()
        used = _Used(together, mesh, mesh_dims)
        together.used[id(mesh), mesh_dims] = weakref.ref(used)
        _kept.append(used)
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
    if used is None or used.mesh is not mesh or used.memory[place] != (param.data_ptr(), param.shape, param.dtype):
        return None
    return used.values[place]


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
            x = x.narrow(d, lo, hi - lo)
        return x
    return use(redistribute(x, mesh, source, target), mesh, mesh_dims)
