"""Parameter gradients summed in buckets while backward goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.linear import apply, in_transform
from mpishard.autograd.redistribute import use_step
from mpishard.autograd.replica import Replica, compare, note_use, replica_of
from mpishard.autograd.withhold import held, is_withholding, taken_share, withhold
from mpishard.comm import traced
from mpishard.comm.collective.blocking import all_reduce
from mpishard.comm.collective.nonblocking import PendingReduction, iall_reduce
from mpishard.comm.mesh import CartMesh, Group

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
        replica.postpone(param)
        if replica.is_suspect:
            self._suspect[replica] = param
        self._put(param, key, g)

    def _put(self, param: Tensor, key: _Key, g: Tensor) -> None:
        bucket = self._open.setdefault(key, [])
        bucket.append((param, g))
        nbytes = self._nbytes[key] = self._nbytes.get(key, 0) + g.nbytes
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
        return torch.cat([g.reshape(-1) for _, g in bucket]), mesh.group(mesh_dims), [p for p, _ in bucket]

    def finish(self) -> None:
        """Wait for all sums and add them to the parameters' gradients. Collective."""
        self.run_deferred()
        while self._postponed:
            self._postponed.popleft()()
        if held and not is_withholding():
            for waiting in list(held.values()):
                for key, (param, share) in waiting.taken():
                    self._put(param, key, share)
        sums = []
        for key in list(self._open)[:-1]:
            self._start(key)
        for key in list(self._open):
            # nothing is left to do meanwhile, and MPI is faster when it need not return
            flat, group, params = self._close(key)
            sums.append((all_reduce(flat, group, in_place=True), params))
        sums += [(pending.wait(), params) for pending, params in self._travelling]
        for flat, params in sums:
            for param, g in zip(params, flat.split_with_sizes([p.numel() for p in params])):
                g = g.view(param.shape)
                if param.grad is None:
                    # memory of its own: a user may keep one gradient and drop the others
                    param.grad = g.clone()
                else:
                    param.grad.add_(g)
        if self._suspect:
            compare([(replica, param) for replica, param in self._suspect.items() if replica.is_due()])


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
        # hooks, and what waits for autograd's own accumulation, need the sum now
        if _active and not replica.direct and not param._backward_hooks and len(param._post_accumulate_grad_hooks) == 1:
            _active[-1].add(param, replica, grads[0], ctx.mesh, ctx.mesh_dims)
            return None, None, None, None
        run_deferred()
        return apply(use_step(ctx.mesh, ctx.mesh_dims).adjoint, grads[0]), None, None, None


_node = super(Function, _UseParameter).apply  # type: ignore[misc]


class _UseTogether(Function):
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
            out += _UseTogether.apply(mesh, mesh_dims, *values[first : i + 1])  # type: ignore[no-untyped-call]
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
            return _node(x, replica, mesh, mesh_dims)
        if (gathered := getattr(x, "_gathered", None)) is not None:
            return gathered.used(x, mesh, mesh_dims)  # type: ignore[no-any-return]
    return apply(use_step(mesh, mesh_dims), x)
