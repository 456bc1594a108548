"""Parameter gradients summed in buckets while backward goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mpishard.autograd.hooked import Hooked, deliver, has_hooks, hooked
from mpishard.autograd.parcel import Parcel, Part, Way, accumulating
from mpishard.autograd.replica import Replica, compare
from mpishard.autograd.withhold import all_taken, forget_replaced, held, is_withholding, replaced, taken_share, withhold
from mpishard.comm.collective.blocking import all_reduce
from mpishard.comm.collective.nonblocking import PendingReduction, abandon, iall_reduce
from mpishard.comm.memory.buffer import cat
from mpishard.comm.mesh import CartMesh, Group

BUCKET_NBYTES = 4 << 20
# a bucket beyond it gives each new gradient memory of its own: a user may keep one and drop the others
_SHARED_NBYTES = 1 << 16
_MOST_UNDER_WAY = 8

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


class Buckets:
    """The gradients of one backward pass: filled by its nodes, all in the same order on every rank."""

    def __init__(self) -> None:
        self._open: dict[_Key, _Bucket] = {}
        self._travelling: list[tuple[PendingReduction, _Bucket]] = []
        self._suspect: dict[Replica, Tensor] = {}
        # under way: of which unit, what waits for it, and for what
        self._scattered: deque[tuple[object, Callable[[], None], PendingReduction]] = deque()
        self._parcel: Parcel | None = None
        self._deferred: _Deferred | None = None
        # computed before the weight's node had its share
        self._early: dict[Any, _Deferred] = {}
        self._withholds = is_withholding()
        # by their parameters' ids, which live as long as the pass
        self._hooked: dict[int, tuple[Tensor, Hooked]] = {}
        # the pass that was seen last, and whether it adds to .grad: one of plain tensors inside of this one may not
        self.task, self.adds = -1, False

    def collect(self, unit: object, count: int, way: Way, part: Part) -> bool:
        """Take one of ``count`` small gradients of sharded parameters, which travel together; return whether all came.

        Collective: those of another unit are sent then.
        """
        if self._parcel is None or self._parcel.unit is not unit:
            self.send_parcel()
            self._parcel = Parcel(unit, count)
        return self._parcel.add(way, part)

    def send_parcel(self) -> None:
        """Send what was collected, if anything. Collective."""
        parcel, self._parcel = self._parcel, None
        if parcel is not None:
            for (way, _), parts in parcel.ways.items():
                self.send(parcel.unit, way, parts)

    def send(self, unit: object, way: Way, parts: list[Part]) -> None:
        """Send gradients of sharded parameters, of one unit at a time, as they hold memory. Collective."""
        under_way = self._scattered
        # a layer that is called over and over is one unit, too
        while under_way and (under_way[0][0] is not unit or len(under_way) >= _MOST_UNDER_WAY):
            under_way.popleft()[1]()
        self._scattered.append((unit, *accumulating(way, parts, self.accumulate)))

    def defer(self, node: Any, weight: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Return zeros for the gradient of a weight that goes to its ``node``, whose share is computed later.

        Not collective, nor is ``compute``. One at a time holds memory.
        """
        self.run_deferred()
        # no memory: they are a sign, and what autograd may add others to
        zeros = weight.new_zeros(()).expand(weight.shape)
        # where there is none, torch asks for every kind of device
        stream = torch.cuda.stream(torch.cuda.current_stream(weight.device)) if weight.is_cuda else nullcontext()

        def later() -> Tensor:
            with torch.no_grad(), stream:
                return compute()

        self._deferred = _Deferred(node, zeros, later)
        return zeros

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
        deferred = self._deferred
        if deferred is None or deferred.node is not node or held or replaced or self._withholds:
            deferred, g = None, self.whole(node, g)
        self._take(node.param, node.replica, g, (node.mesh, node.mesh_dims, g.dtype), deferred)

    def _take(self, param: Tensor, replica: Replica, g: Tensor, key: _Key, deferred: _Deferred | None = None) -> None:
        if self._withholds:
            withhold(param, key, g)
            replica.postpone(param)
            if has_hooks(param):
                hooked(param)
            return
        if held or replaced:
            g = taken_share(param, key, g)
        if replica.postpone(param):
            self._suspect[replica] = param
        if has_hooks(param):
            self.await_sum(param)
        self._put(key, (param,), (g.numel(),), g, deferred)

    def await_sum(self, leaf: Tensor) -> None:
        """Have the hooks of a parameter, or of its block, wait for the end of the pass. Not collective."""
        if id(leaf) not in self._hooked:
            state = hooked(leaf)
            state.waits = True
            self._hooked[id(leaf)] = leaf, state

    def accumulate(self, leaf: Tensor, g: Tensor) -> None:
        """Add to the gradient of a parameter, or of its block, which may keep ``g``. Not collective."""
        if (known := self._hooked.get(id(leaf))) is not None:
            _, state = known
            state.total = g if state.total is None else state.total + g
        elif leaf.grad is None:
            leaf.grad = g if leaf.is_contiguous() and g.is_contiguous() else _lying_as(leaf, g)
        else:
            leaf.grad.add_(g)

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
        if held or replaced or self._withholds:
            for param, replica, g in zip(params, replicas, grads):
                self._take(param, replica, g, (mesh, mesh_dims, g.dtype))
            return
        for param, replica in zip(params, replicas):
            if replica.postpone(param):
                self._suspect[replica] = param
            if has_hooks(param):
                self.await_sum(param)
        # at once: their memory is in the cache, and is for what backward makes next
        part = cat([g if g.ndim == 1 else g.reshape(-1) for g in grads])
        self._put((mesh, mesh_dims, part.dtype), params, sizes, part)

    def _accumulate_all(self, flat: Tensor, bucket: _Bucket) -> None:
        new = bucket.params[0].grad is None
        split: Any = torch.split_with_sizes
        if new:
            # not views, which would keep their base
            split = torch.unsafe_split_with_sizes if flat.nbytes <= _SHARED_NBYTES else torch.split_with_sizes_copy
        hooks = self._hooked
        for param, g in zip(bucket.params, split(flat, bucket.sizes)):
            grad = param.grad
            if hooks and id(param) in hooks:
                self.accumulate(param, g.view(param.shape))
            elif grad is not None:
                grad.add_(g if param.ndim == 1 else g.view(param.shape))
            elif not param.is_contiguous():
                param.grad = _lying_as(param, g.view(param.shape))
            elif new:
                param.grad = g if param.ndim == 1 else g.resize_(param.shape)
            else:
                param.grad = g.view(param.shape).clone()

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
        flat = cat([g if g.ndim == 1 else g.reshape(-1) for g in bucket.parts])
        bucket.parts.clear()
        return flat, mesh.group(mesh_dims), bucket

    def abandon(self) -> None:
        """Let go of all but what is under way: MPI still writes into it. Not collective."""
        self._open.clear()
        self._suspect.clear()
        self._early.clear()
        for _, state in self._hooked.values():
            state.waits = False
        self._parcel = self._deferred = None
        abandon([*(pending for pending, _ in self._travelling), *(pending for *_, pending in self._scattered)])
        self._travelling.clear()
        self._scattered.clear()

    def finish(self) -> None:
        """Wait for all sums and add them to the parameters' gradients. Collective."""
        self.run_deferred()
        self.send_parcel()
        while self._scattered:
            self._scattered.popleft()[1]()
        if held and not self._withholds:
            for key, (param, share) in all_taken():
                if has_hooks(param):
                    self.await_sum(param)
                self._put(key, (param,), (share.numel(),), share)
        while self._open:
            key = next(iter(self._open))
            if len(self._open) > 1 or self._travelling:
                self._start(key)
                continue
            # nothing is left to do meanwhile, and MPI is faster when it need not return
            flat, group, bucket = self._close(key)
            self._accumulate_all(all_reduce(flat, group, in_place=True), bucket)
        for pending, bucket in self._travelling:
            # those after it travel on
            self._accumulate_all(pending.wait(), bucket)
        deliver(self._hooked.values())
        if self._suspect:
            compare([(replica, param) for replica, param in self._suspect.items() if replica.is_due()])


def _lying_as(leaf: Tensor, g: Tensor) -> Tensor:
    """Return a gradient whose memory has the order of the leaf's, as autograd's own: fused optimizers rely on it."""
    return torch.empty_like(leaf).copy_(g)


def _accumulates(node: Any) -> bool:
    """Tell whether autograd will add to the ``.grad`` of the parameter to which a node leads."""
    leaf = next(n for n, _ in node.next_functions if n is not None)
    try:
        return torch._C._will_engine_execute_node(leaf)  # type: ignore[attr-defined,no-any-return]
    except RuntimeError:  # torch's answer where a pass returns the gradient of a leaf
        return False


def finish_withheld() -> None:
    """Sum what earlier passes withheld, before a pass that sums on its own. Collective where there is any.

    In `no_sync`, too: such a pass puts another gradient in the place of the one that holds it.
    """
    if held:
        buckets = Buckets()
        buckets._withholds = False
        buckets.finish()


# until a backward pass ends: what only its graph would hold, held here as what the parameters hold would hold it
kept: deque[object] = deque(maxlen=64)
# of the threads that differentiate, each with a mesh of its own; None: of a pass that returns what it finds
_active: dict[int, list[Buckets | None]] = {}
# in which torch hands them to its own threads, which compute for the one that differentiates; it is emptied, as an
# object left in it ends the process with its thread, which torch 2.8 cannot: there, one thread differentiates at a time
_SLOT = "mpishard.buckets"
_empty: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)


@contextmanager
def bucketed() -> Iterator[None]:
    """Sum the gradients of replicated parameters in buckets during the backward pass inside. Collective.

    For a pass that accumulates into ``.grad`` of all leaves and builds no graph of its own.
    """
    buckets = Buckets()
    if replaced:
        forget_replaced()
    with _during(buckets):
        try:
            yield
            buckets.finish()
        except BaseException:
            buckets.abandon()
            raise
        finally:
            kept.clear()


@contextmanager
def unbucketed() -> Iterator[None]:
    """Have another kind of pass return what it finds, also inside of one that fills buckets. Not collective."""
    if current() is None:
        yield
    else:
        with _during(None):
            yield


@contextmanager
def _during(buckets: Buckets | None) -> Iterator[None]:
    around, me = current(), threading.get_ident()
    mine = _active.setdefault(me, [])
    mine.append(buckets)
    _hand_on(buckets)
    try:
        yield
    finally:
        mine.pop()
        _hand_on(around)
        if not mine:
            del _active[me]


def _hand_on(buckets: Buckets | None) -> None:
    if _empty is None:
        return
    if buckets is None:
        _empty(_SLOT)
    else:
        torch._C._stash_obj_in_tls(_SLOT, buckets)  # type: ignore[attr-defined]


def run_deferred(*, hides_sums: bool = False) -> None:
    """Compute what `defer` has left, as nothing else is to be done, or while sums travel. Not collective."""
    buckets = current()
    if buckets is not None:
        buckets.run_deferred(hides_sums=hides_sums)


def is_postponing() -> bool:
    """Tell whether a backward pass goes on that adds to ``.grad`` at its end. Not collective."""
    return current() is not None


def current() -> Buckets | None:
    """Return the buckets of such a pass of this thread, or None. Not collective."""
    if not _active:
        return None
    mine = _active.get(threading.get_ident())
    if mine is not None:
        return mine[-1]
    if _empty is None:
        return next(iter(_active.values()))[-1]
    known = torch._C._is_key_in_tls(_SLOT)  # type: ignore[attr-defined]
    return torch._C._get_obj_in_tls(_SLOT) if known else None  # type: ignore[attr-defined,no-any-return]


def serving(node: Any) -> Buckets | None:
    """Return the buckets of the pass that runs a parameter's ``node``, or None. Not collective."""
    buckets = current()
    if buckets is None:
        return None
    task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
    if task != buckets.task:
        buckets.task, buckets.adds = task, _accumulates(node)
    return buckets if buckets.adds else None
