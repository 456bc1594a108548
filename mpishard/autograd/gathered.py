"""Sharded parameters: gathered for as long as a layer computes with them, their gradients reduce-scattered.

What autograd saves of a gathered parameter is not kept: it is gathered again when the backward pass asks for it. So
of the whole parameters a rank holds those of the layer that computes, and of the next, which are on their way.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpishard.autograd.bucket import is_postponing, postpone
from mpishard.autograd.linear import apply, in_transform, pair
from mpishard.autograd.redistribute import use_step
from mpishard.comm.collective import blocking
from mpishard.comm.collective.nonblocking import PendingReduction, iall_gather, ireduce_scatter
from mpishard.comm.memory.buffer import pack
from mpishard.comm.mesh import CartMesh
from mpishard.layout import Layout


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
        self._forward: Unit | None = None
        self._backward: Unit | None = None
        self._task = -1

    def begin(self) -> None:
        """Note that the model starts. Not collective."""
        self._forward = None

    def forward(self, unit: Unit) -> None:
        """Note that a layer computes, and send for the one that followed it last time. Collective."""
        if self._forward is not None:
            self._forward.after = unit
        self._forward = unit
        if unit.after is not None:
            unit.after.start()

    def backward(self, unit: Unit) -> None:
        """Note that a layer differentiates, send for it, and for the one that followed it last time. Collective.

        All of its parameters: which of them autograd saves, if any, depends on the kernels of this rank's block.
        """
        if self._backward is unit:
            return
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        if task not in (self._task, -1):
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]
            self._task, self._backward = task, None
        if self._backward is not None:
            self._backward.free()
            self._backward.before = unit
        self._backward = unit
        unit.start()
        if unit.before is not None:
            unit.before.start()

    def is_at(self, unit: Unit) -> bool:
        """Tell whether the backward pass is at a layer. Not collective."""
        return self._backward is unit

    def _end(self) -> None:
        if self._backward is not None:
            self._backward.free()
        self._backward, self._task = None, -1


class Unit:
    """The parameters of one layer, which are gathered together."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.members: list[Gathered] = []
        # what followed it in the last pass
        self.after: Unit | None = None
        self.before: Unit | None = None

    def start(self) -> None:
        """Send for all parameters. Collective."""
        for member in self.members:
            member.start()

    def free(self) -> None:
        """Drop the whole parameters. Collective."""
        for member in self.members:
            member.free()


class Gathered:
    """A parameter of which every rank holds a block, and for a while the whole.

    Parameters
    ----------
    block
        Returns this rank's block, a leaf.
    layout, mesh
        How the mesh holds the parameter: one tensor dim is sharded.
    unit
        The layer.
    dtype
        Of the whole parameter; None: that of the block.
    """

    def __init__(
        self, block: Callable[[], Tensor], layout: Layout, mesh: CartMesh, unit: Unit, dtype: torch.dtype | None
    ) -> None:
        self.mesh, self.unit = mesh, unit
        self._block, self._dtype = block, dtype
        ((self._dim, self._mesh_dims),) = layout.shard_dims.items()
        self._group = mesh.group(self._mesh_dims)
        sizes = layout.sizes[self._dim]
        assert sizes is not None
        self._sizes, self._shape = sizes, layout.shape
        row = math.prod(layout.shape) // layout.shape[self._dim]
        self._counts = [n * row for n in sizes]
        self._interval = layout.interval(self._dim, mesh.coords)
        self._pending: PendingReduction | None = None
        self._whole: Tensor | None = None
        self._sent_block: Tensor | None = None
        self._version = -1
        self._nbytes = 0
        # of another block that autograd saved, and that block
        self._other: tuple[weakref.ref[Tensor], Tensor] | None = None
        self.slice = pair(self._cut, self._joined)

    # -- the whole

    def start(self) -> None:
        """Send for the blocks of the others, if that was not done. Collective."""
        block = self._block()
        known = self._sent_block is block and self._version == block._version
        if known and (self._pending or self._whole is not None):
            return
        self.free()
        self._sent_block, self._version = block, block._version
        with torch.inference_mode(False):  # the next forward may have a backward
            self._pending = self._sent(block.detach())
        self._count(math.prod(self._shape) * (self._dtype or block.dtype).itemsize)

    def whole(self) -> Tensor:
        """Return the parameter. Collective where it is not there."""
        self.start()
        if self._whole is None:
            assert self._pending is not None
            with torch.inference_mode(False):
                flat, self._pending = self._pending.wait(), None
                self._whole = self._of_ranks(flat)
            self.unit.schedule.lent[self._whole.untyped_storage()._cdata] = self
        return self._whole

    def whole_of(self, block: Tensor) -> Tensor:
        """Return the parameter of a block that autograd saved. Collective where it is not there."""
        if block is self._block():
            return self.whole()
        # as `functional_call` puts one in the place of the module's own, until the layer has computed
        if self._other is None or self._other[0]() is not block:
            self._other = weakref.ref(block), self._joined(block.detach())
        return self._other[1]

    def free(self) -> None:
        """Drop the whole parameter, also where it was not asked for: it is gathered anew on all ranks. Collective."""
        self._other = None
        if self._pending is not None:
            self._pending.wait()
        elif self._whole is not None:
            self.unit.schedule.lent.pop(self._whole.untyped_storage()._cdata, None)
        else:
            return
        self._pending = self._whole = None
        self._count(-self._nbytes)

    def _count(self, nbytes: int) -> None:
        schedule = self.unit.schedule
        self._nbytes = max(nbytes, 0)
        schedule.nbytes += nbytes
        schedule.peak_nbytes = max(schedule.nbytes, schedule.peak_nbytes)

    def _sent(self, block: Tensor) -> PendingReduction:
        own = block.to(self.mesh.device, self._dtype or block.dtype).contiguous().view(-1)
        return iall_gather(own, self._group, self._counts)

    def _of_ranks(self, flat: Tensor) -> Tensor:
        """Return the tensor whose blocks lie one after the other."""
        shape, dim = self._shape, self._dim
        if not dim:
            return flat.view(shape)
        blocks = flat.split(self._counts)
        return torch.cat([b.view(*shape[:dim], n, *shape[dim + 1 :]) for b, n in zip(blocks, self._sizes)], dim)

    def _cut(self, g: Tensor) -> Tensor:
        lo, hi = self._interval
        block = self._block()
        return g.narrow(self._dim, lo, hi - lo).to(block.device, block.dtype, copy=True).contiguous()

    def _joined(self, block: Tensor) -> Tensor:
        return self._of_ranks(self._sent(block).wait())

    # -- what autograd sees

    def tensor(self) -> Tensor:
        """Return the parameter for one forward of its layer, linked to the block. Collective."""
        if in_transform():  # a tangent of the block is one of the parameter
            return apply(self.slice.adjoint, self._block())
        whole, block = self.whole(), self._block()
        if not (block.requires_grad and torch.is_grad_enabled()):
            return whole
        loan = Loan(self, block)
        y: Tensor = _Gather.apply(block, loan)
        y._gathered = loan  # type: ignore[attr-defined]
        return y

    def started(
        self, share: Tensor, mesh_dims: tuple[int, ...], block: Tensor
    ) -> tuple[Callable[[], Tensor], PendingReduction | None]:
        """Send a share of a sum over ``mesh_dims``; return what waits for this rank's block of it, and for what.

        Collective.
        """
        mesh = self.mesh
        if not set(self._mesh_dims) <= set(mesh_dims):
            return lambda: self._cut(blocking.all_reduce(share, mesh.group(mesh_dims))), None
        parts = [share] if not self._dim else share.split(list(self._sizes), self._dim)
        flat = pack([p.contiguous() for p in parts], block.dtype) if self._dim else share.to(block.dtype).reshape(-1)
        pending = ireduce_scatter(flat, self._group, self._counts)
        rest = tuple(m for m in mesh_dims if m not in self._mesh_dims)

        def finish() -> Tensor:
            own = pending.wait()
            if rest:
                own = blocking.all_reduce(own, mesh.group(rest), in_place=True)
            return own.view(block.shape).to(block.device)

        return finish, pending


class Loan:
    """A parameter as one forward of its layer has it: of which block, and what its uses find of the gradient."""

    __slots__ = ("_shares", "block", "gathered")

    def __init__(self, gathered: Gathered, block: Tensor) -> None:
        self.gathered, self.block = gathered, block
        self._shares: dict[tuple[int, ...], Tensor] = {}

    def used(self, x: Tensor, mesh: CartMesh, mesh_dims: tuple[int, ...]) -> Tensor:
        """Return ``x``, the whole parameter, for data that are sharded over ``mesh_dims``. Not collective."""
        if mesh is not self.gathered.mesh:
            return apply(use_step(mesh, mesh_dims), x)
        return _Use.apply(x, self, mesh_dims)  # type: ignore[no-any-return]

    def add(self, g: Tensor, mesh_dims: tuple[int, ...]) -> None:
        """Take this rank's share of a gradient that is a sum over ``mesh_dims``. Not collective."""
        share = self._shares.get(mesh_dims)
        self._shares[mesh_dims] = g if share is None else share + g

    def reduced(self) -> Tensor | None:
        """Sum what was added, into ``.grad`` of the block later in the pass; or return it. Collective."""
        shares, self._shares = self._shares, {}
        block, total = self.block, None
        hooked = block._backward_hooks or block._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        for mesh_dims in list(shares):
            finish, pending = self.gathered.started(shares.pop(mesh_dims), mesh_dims, block)
            at_once = hooked or not block.is_leaf
            if at_once or not postpone(lambda finish=finish: _accumulate(block, finish()), pending):  # type: ignore[misc]
                total = finish() if total is None else total + finish()
        return total


def _accumulate(block: Tensor, g: Tensor) -> None:
    if block.grad is None:
        block.grad = g
    else:
        block.grad.add_(g)


class _Gather(Function):
    """The whole parameter of a block."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, loan: Loan) -> Tensor:  # noqa: ARG004
        ctx.loan = loan
        ctx.set_materialize_grads(False)
        return loan.gathered.whole().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,), loan = grads, ctx.loan
        # all that computed with it is through
        loan.gathered.free()
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


class saving(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801 (reads as a verb: `with saving(schedule)`)
    """Have autograd save which parameter it was, and not the whole parameter; all else as the hooks around say."""

    def __init__(self, schedule: Schedule) -> None:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
        keep, give = outer or (_same, _same)

        def pack(x: Tensor) -> Any:
            # a checkpoint keeps ShardTensors here, too
            found = schedule.lent.get(x.untyped_storage()._cdata) if type(x) is Tensor else None
            if found is None or found._whole is None or x.dtype != found._whole.dtype:
                return None, keep(x)
            return found, (found._sent_block, found._version, x.size(), x.stride(), x.storage_offset())

        def unpack(saved: Any) -> Tensor:
            found, what = saved
            if found is None:
                return give(what)  # type: ignore[no-any-return]
            block, version, *place = what
            if version != block._version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a sharded parameter of shape {tuple(found._shape)}"
                )
            found.unit.schedule.backward(found.unit)
            if block is found._block():
                found.unit.start()
            return found.whole_of(block).as_strided(*place)  # type: ignore[no-any-return]

        super().__init__(pack, unpack)


def _same(x: Any) -> Any:
    return x


def sharded_dim(shape: Sequence[int], count: int) -> int | None:
    """Return the dim along which a parameter is cut into blocks: the longest; None where it has too few cells.

    Not collective.
    """
    if not shape or max(shape) < count:
        return None
    # the first lies in memory as it is gathered: a quarter more of imbalance is a fair price
    return 0 if shape[0] >= 8 * count or shape[0] % count == 0 else max(range(len(shape)), key=lambda d: shape[d])
