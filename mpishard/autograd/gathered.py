"""Sharded parameters: gathered for as long as a layer computes with them, their gradients reduce-scattered.

What autograd saves of a gathered parameter is not kept: it is gathered again when the backward pass asks for it. So
of the whole parameters a rank holds those of the layer that computes, and of the next, which are on their way.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.bucket import current, is_postponing
from mpishard.autograd.graph import unseen
from mpishard.autograd.linear import apply, in_transform, node_of, pair
from mpishard.autograd.padded import Padded
from mpishard.autograd.parcel import Part, scatter
from mpishard.autograd.redistribute import use_step
from mpishard.comm.collective import blocking
from mpishard.comm.collective.nonblocking import PendingReduction, iall_gather
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout

# cells of a parameter that shares a message: copies take less time than a message of its own
_SMALL = 1 << 15


class Schedule:
    """What is gathered of one model, and in which order its layers compute.

    Attributes
    ----------
    lent : dict
        Address of a storage -> the parameter that it was gathered for.
    nbytes, peak_nbytes : int
        Of gathered parameters, those on their way too: now, and the most so far.
    """

    def __init__(self) -> None:
        self.lent: dict[int, Gathered] = {}
        self.nbytes = self.peak_nbytes = 0
        self._forward: Turn | None = None
        # of a layer that has computed, for the next one
        self._kept: Unit | None = None
        self._computing, self._differentiating = _Order(), _Order()
        self._task = -1

    def __deepcopy__(self, _memo: dict[int, Any]) -> Schedule:
        return Schedule()

    def rest(self) -> None:
        """Note that no layer computes, before and after the model. Collective where it did not go as last time."""
        self._forward = None
        self._keep(None)
        self._computing.end()

    def forward(self, turn: Turn) -> None:
        """Note that a layer computes, and send for the unit that followed its own last time. Collective."""
        last, self._forward = self._forward, turn
        self._keep(turn.unit)
        if last is not None:
            last.after = turn
        self._computing.come(turn.unit)

    def computed(self, turn: Turn) -> None:
        """Note that a layer has computed: its unit is dropped, unless the next layer is of it too. Collective."""
        unit = turn.unit
        if self._differentiating.unit is unit:
            return  # computed again in backward, which comes to it
        if self._forward is turn and turn.after is not None and turn.after.unit is unit:
            self._keep(unit)
        else:
            unit.free()

    def _keep(self, unit: Unit | None) -> None:
        if self._kept is not None and self._kept is not unit:
            self._kept.free()
        self._kept = unit

    def backward(self, unit: Unit) -> None:
        """Note that a layer differentiates, send for it, and for the one that followed it last time. Collective.

        All of its parameters: which of them autograd saves, if any, depends on the kernels of this rank's block.
        """
        order, task = self._differentiating, _task()
        if order.unit is unit:
            return
        if task not in (self._task, -1):
            self._end()  # of a pass that failed, or goes on around this one
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]
            self._task = task
        if order.unit is not None:
            order.unit.free()
        unit.start()
        order.come(unit)

    def _end(self) -> None:
        last, self._task = self._differentiating.unit, -1
        if last is not None:
            last.free()
        self._differentiating.end()


class _Order:
    """Which unit comes after which in a pass, and the one that was sent for before it came.

    Attributes
    ----------
    unit : Unit or None
        The last that came.
    """

    def __init__(self) -> None:
        self.unit: Unit | None = None
        self._before: Unit | None = None
        self._ahead: Unit | None = None
        # by two, as layers that are gathered together may compute before and behind others
        self._followed: dict[tuple[Unit | None, Unit], Unit] = {}

    def come(self, unit: Unit) -> None:
        """Drop what was sent for in vain, and send for what followed last time. Collective."""
        last, ahead = self.unit, self._ahead
        if last is unit:
            return
        if ahead is not None and ahead is not unit:
            ahead.free()
        if last is not None:
            self._followed[self._before, last] = unit
        self._before, self.unit = last, unit
        ahead = self._followed.get((last, unit))
        # one that is there already computes
        self._ahead = ahead if ahead is not None and ahead.start() else None

    def end(self) -> None:
        """Note that the pass is over. Collective where it did not go as last time."""
        if self._ahead is not None:
            self._ahead.free()
        self.unit = self._before = self._ahead = None


class Turn:
    """A layer in the order of the forward pass.

    Attributes
    ----------
    unit : Unit
        With which its parameters are gathered.
    after : Turn or None
        What followed it in the last pass.
    """

    unit: Unit
    after: Turn | None = None


def _task() -> int:
    """Return the backward pass that goes on; -1: none. Not collective."""
    return torch._C._current_graph_task_id()  # type: ignore[attr-defined,no-any-return]


@contextmanager
def _aside() -> Iterator[None]:
    """Gather apart from what computes: the next pass may have a backward, and checkpoints count operations."""
    with torch.inference_mode(False), unseen():
        yield


class Unit:
    """Parameters of a layer, or of some small ones, which are gathered together.

    Attributes
    ----------
    small : int
        How many of them share a message.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.members: list[Gathered] = []
        self.small = 0
        self._pending: list[tuple[PendingReduction, list[Gathered]]] = []
        self._nbytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return Unit(copy.deepcopy(self.schedule, memo))  # its members join when they are copied

    def start(self) -> bool:
        """Send for the blocks of the others, and tell so, unless that was done before. Collective."""
        members = self.members
        blocks = [member.block() for member in members]
        if self._nbytes and all(map(Gathered.is_of, members, blocks)):
            return False
        self.free()
        parcels: dict[object, list[Gathered]] = {}
        for member, block in zip(members, blocks):
            member.sent_block, member.version, member.writes = block, block._version, member.written()
            dtype = member.whole_dtype(block)
            self._nbytes += member.numel * dtype.itemsize
            parcels.setdefault(dtype if member.is_small else member, []).append(member)
        with _aside():
            self._pending = [(iall_gather([m.row() for m in some], some[0].group), some) for some in parcels.values()]
        self._count(self._nbytes)
        return True

    def finish(self) -> None:
        """Wait for what was sent for. Collective."""
        pending, self._pending = self._pending, []
        with _aside():
            for parcel, some in pending:
                rows = parcel.wait()
                parts = [rows] if len(some) == 1 else rows.split([member.padded.width for member in some], 1)
                for member, part in zip(some, parts):
                    member.take(part)

    def free(self) -> None:
        """Drop whole parameters, also where none was asked for: they are gathered anew on all ranks. Collective."""
        if not self._nbytes:
            return
        for parcel, _ in self._pending:
            parcel.wait()
        self._pending = []
        for member in self.members:
            member.drop()
        self._count(-self._nbytes)
        self._nbytes = 0

    def _count(self, nbytes: int) -> None:
        schedule = self.schedule
        schedule.nbytes += nbytes
        schedule.peak_nbytes = max(schedule.nbytes, schedule.peak_nbytes)


class Gathered:
    """A parameter of which every rank holds a block, and for a while the whole.

    Parameters
    ----------
    block
        Returns this rank's block, a leaf.
    written
        Returns how often it was written in ways that its version does not count.
    layout, mesh
        How the mesh holds the parameter: one tensor dim is sharded, evenly.
    unit
        With which it is gathered.
    dtype
        Of the whole parameter; None: that of the block.
    """

    def __init__(
        self,
        block: Callable[[], Tensor],
        written: Callable[[], int],
        layout: Layout,
        mesh: CartMesh,
        unit: Unit,
        dtype: torch.dtype | None,
    ) -> None:
        self.mesh, self.unit, self.block, self.written = mesh, unit, block, written
        self._layout, self._dtype = layout, dtype
        ((dim, self._mesh_dims),) = layout.shard_dims.items()
        self.group = mesh.group(self._mesh_dims)
        self.padded = Padded(layout.shape, dim, self.group.size)
        self.shape, self.numel = layout.shape, math.prod(layout.shape)
        # a message of its own takes longer than copies into one that it shares
        self.is_small = self.numel <= _SMALL
        self._interval = layout.interval(dim, mesh.coords)
        # of which the whole is, or comes
        self.sent_block: Tensor | None = None
        self.version = self.writes = -1
        self._whole: Tensor | None = None
        # of another block that autograd saved, and that block
        self._other: tuple[weakref.ref[Tensor], Tensor] | None = None
        self.slice = pair(self._cut, self._joined)
        unit.members.append(self)
        unit.small += self.is_small

    def __deepcopy__(self, memo: dict[int, Any]) -> Gathered:
        block, written, unit = copy.deepcopy((self.block, self.written, self.unit), memo)
        return Gathered(block, written, self._layout, self.mesh, unit, self._dtype)

    # -- the whole

    def whole_dtype(self, block: Tensor) -> torch.dtype:
        """Return the dtype of the whole. Not collective."""
        return self._dtype or block.dtype

    def is_of(self, block: Tensor) -> bool:
        """Tell whether the whole is, or comes, of a block as it is. Not collective."""
        return self.sent_block is block and self.version == block._version and self.writes == self.written()

    def row(self) -> Tensor:
        """Return what of the whole is sent from here. Not collective."""
        assert self.sent_block is not None
        return self._row_of(self.sent_block.detach())

    def take(self, rows: Tensor) -> None:
        """Take the blocks of all ranks. Not collective."""
        self._whole = self.padded.whole_of(rows)
        self.unit.schedule.lent[self._whole.untyped_storage()._cdata] = self

    def drop(self) -> None:
        """Drop the whole. Not collective."""
        self._other = None
        if self._whole is not None:
            self.unit.schedule.lent.pop(self._whole.untyped_storage()._cdata, None)
            self._whole = None

    def whole(self, block: Tensor) -> Tensor:
        """Return the parameter, of the block that the module has now. Collective where it is not there."""
        if self._whole is None or not self.is_of(block):
            self.unit.start()
            self.unit.finish()
            assert self._whole is not None
        return self._whole

    def whole_of(self, block: Tensor) -> Tensor:
        """Return the parameter of a block that autograd saved. Collective where it is not there."""
        if block is self.block():
            return self.whole(block)
        # as `functional_call` puts one in the place of the module's own, until the layer has computed
        if self._other is None or self._other[0]() is not block:
            self._other = weakref.ref(block), self._joined(block.detach())
        return self._other[1]

    def has(self, x: Tensor) -> bool:
        """Tell whether a tensor of its memory is the whole as it was gathered, of its dtype. Not collective."""
        return self._whole is not None and x.dtype == self._whole.dtype

    def _row_of(self, block: Tensor) -> Tensor:
        return self.padded.row_of(block.to(self.mesh.device, self.whole_dtype(block)))

    def _cut(self, g: Tensor) -> Tensor:
        lo, hi = self._interval
        block = self.block()
        return g.narrow(self.padded.dim, lo, hi - lo).to(block.device, block.dtype, copy=True).contiguous()

    def _joined(self, block: Tensor) -> Tensor:
        return self.padded.whole_of(iall_gather([self._row_of(block)], self.group).wait())

    # -- what autograd sees

    def tensor(self) -> Tensor:
        """Return the parameter for one forward of its layer, linked to the block. Collective."""
        if in_transform():  # a tangent of the block is one of the parameter
            return apply(self.slice.adjoint, self.block())
        block = self.block()
        whole = self.whole(block)
        if not (block.requires_grad and torch.is_grad_enabled()):
            return whole
        loan = Loan(self, block)
        y: Tensor = _gather_node(block, loan)
        y._gathered = loan  # type: ignore[attr-defined]
        return y

    def reduce(self, share: Tensor, mesh_dims: tuple[int, ...], block: Tensor, *, at_once: bool) -> Tensor | None:
        """Sum shares of a gradient over ``mesh_dims``, into ``.grad`` of the block later in the pass; or return it.

        Collective.
        """
        mesh, own_dims, buckets = self.mesh, self._mesh_dims, None if at_once else current()
        if not set(own_dims) <= set(mesh_dims):
            total = self._cut(blocking.all_reduce(share, mesh.group(mesh_dims)))
            if buckets is None:
                return total
            buckets.accumulate(block, total)
            return None
        rest = tuple(m for m in mesh_dims if m not in own_dims)
        way = mesh, own_dims, rest
        part = Part(block, self.padded, self.padded.rows_of(share.to(block.dtype)))
        if buckets is None:
            (total,) = scatter(way, [part])[0]()
            return total
        unit = self.unit
        if not self.is_small:
            buckets.send(unit, way, [part])
        elif buckets.collect(unit, unit.small, way, part):
            unit.free()  # what computed with it is through
            buckets.send_parcel()
        return None


class Loan:
    """A parameter as one forward of its layer has it: of which block, and what its uses find of the gradient."""

    __slots__ = ("_shares", "block", "gathered")

    def __init__(self, gathered: Gathered, block: Tensor) -> None:
        self.gathered, self.block = gathered, block
        # by the pass, too: one that fails leaves what it found, and its graph may be differentiated again
        self._shares: dict[int, dict[tuple[int, ...], Tensor]] = {}

    def used(self, x: Tensor, mesh: CartMesh, mesh_dims: tuple[int, ...]) -> Tensor:
        """Return ``x``, the whole parameter, for data that are sharded over ``mesh_dims``. Not collective."""
        if mesh is not self.gathered.mesh:
            return apply(use_step(mesh, mesh_dims), x)
        return (_Use.apply if in_transform() else _use_node)(x, self, mesh_dims)  # type: ignore[no-any-return]

    def add(self, g: Tensor, mesh_dims: tuple[int, ...]) -> None:
        """Take this rank's share of a gradient that is a sum over ``mesh_dims``. Not collective."""
        shares = self._shares.setdefault(_task(), {})
        share = shares.get(mesh_dims)
        shares[mesh_dims] = g if share is None else share + g

    def reduced(self) -> Tensor | None:
        """Sum what was added, into ``.grad`` of the block later in the pass; or return it. Collective."""
        shares = self._shares.pop(_task(), {})
        block, total = self.block, None
        at_once, buckets = not block.is_leaf, current()
        hooks = block._backward_hooks or block._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if shares and hooks and buckets is not None and not at_once:
            buckets.await_sum(block)
        for mesh_dims in list(shares):
            found = self.gathered.reduce(shares.pop(mesh_dims), mesh_dims, block, at_once=at_once)
            if found is not None:
                total = found if total is None else total + found
        return total


class _Gather(Function):
    """The whole parameter of a block."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, loan: Loan) -> Tensor:
        ctx.loan = loan
        ctx.set_materialize_grads(False)
        return loan.gathered.whole(block).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,), loan = grads, ctx.loan
        own = None if g is None else apply(loan.gathered.slice, g)
        total = loan.reduced()
        if total is not None:
            own = total if own is None else own + total
        return own, None


class _Use(Function):
    """`use` of a gathered parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loan: Loan, mesh_dims: tuple[int, ...]) -> Tensor:
        ctx.loan, ctx.mesh_dims = loan, mesh_dims
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        loan, mesh_dims = ctx.loan, ctx.mesh_dims
        if is_postponing():
            loan.add(grads[0], mesh_dims)
            return None, None, None
        return apply(use_step(loan.gathered.mesh, mesh_dims).adjoint, grads[0]), None, None


_gather_node, _use_node = node_of(_Gather), node_of(_Use)


class saving(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801 (reads as a verb: `with saving(schedule)`)
    """Have autograd save which parameter it was, and not the whole parameter; all else as the hooks around say."""

    def __init__(self, schedule: Schedule) -> None:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
        keep, give = outer or (_same, _same)

        def pack(x: Tensor) -> Any:
            # a checkpoint keeps ShardTensors here, too
            found = schedule.lent.get(x.untyped_storage()._cdata) if type(x) is Tensor else None
            if found is None or not found.has(x):
                return None, keep(x)
            return found, (found.sent_block, found.version, x.size(), x.stride(), x.storage_offset())

        def unpack(saved: Any) -> Tensor:
            found, what = saved
            if found is None:
                return give(what)  # type: ignore[no-any-return]
            block, version, *place = what
            if version != block._version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a sharded parameter of shape {tuple(found.shape)}"
                )
            found.unit.schedule.backward(found.unit)
            return found.whole_of(block).as_strided(*place)  # type: ignore[no-any-return]

        super().__init__(pack, unpack)


def _same(x: Any) -> Any:
    return x
