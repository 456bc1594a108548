"""torch.distributed over plain MPI: for torch's own DDP, fully_shard, DTensor and checkpoints, under any launcher.

A `torch.distributed` backend named ``"mpishard"``: every group of it is a communicator of its own, made from that of
torch's default group by ``MPI_Comm_create_group``, so that only its members take part. No store, port or thread is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import collective, guard
from mpishard.comm.buffer import address, as_bytes, dense, is_dense, pieces, to_host
from mpishard.comm.mesh import CartMesh, Group
from mpishard.comm.pending import iall_reduce
from mpishard.errors import LayoutError, MeshError, UnsupportedOperationError, described

BACKEND = "mpishard"
_NAMES = {
    dist.ReduceOp.RedOpType.SUM: "sum",
    dist.ReduceOp.RedOpType.AVG: "avg",
    dist.ReduceOp.RedOpType.PRODUCT: "prod",
    dist.ReduceOp.RedOpType.MIN: "min",
    dist.ReduceOp.RedOpType.MAX: "max",
    dist.ReduceOp.RedOpType.BAND: "band",
    dist.ReduceOp.RedOpType.BOR: "bor",
    dist.ReduceOp.RedOpType.BXOR: "bxor",
}
# of whole bytes, which MPI has for memory of any integer type
_BITWISE = {"band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}
# below the smallest upper bound that MPI allows for tags
_TAGS = 1 << 15


def process_group(where: CartMesh | MPI.Intracomm | None = None) -> dist.ProcessGroup:
    """Return the `torch.distributed` process group of a mesh, of one of its dims, or of a communicator.

    Collective over ``where``. The first call starts `torch.distributed` (there is nothing to launch it with, no
    address to name): its ranks are those of ``where``, of the whole mesh if ``where`` is a sub-mesh, and the call
    is collective over these. Later ones make sub-groups of it.

    Parameters
    ----------
    where
        A mesh or sub-mesh (``mesh["y"]``), or an mpi4py communicator; torch's default group if not given. It is
        duplicated.

    Returns
    -------
    torch.distributed.ProcessGroup
        Group ranks are the ranks of ``where``, in their order. Works wherever torch takes ``group=`` or
        ``process_group=``: collectives, point to point and their ``async_op``, objects, barriers, ``new_group``,
        ``init_device_mesh``, DistributedDataParallel, ``fully_shard``, DTensor, distributed checkpoints.

    Raises
    ------
    MeshError
        `torch.distributed` runs on another backend already, or ``where`` has ranks beyond its default group.

    Notes
    -----
    A collective with ``async_op=True`` that sums runs while the ranks go on; others are over when the call returns,
    and their work handles are done. ``DistributedDataParallel`` asks for a bucket's result when it starts it, so that
    its buckets do not overlap with backward here; those of `mpishard.distribute_module` do.

    Examples
    --------
    >>> mesh = ms.init_mesh((2, -1), ("data", "y"))
    >>> group = ms.process_group(mesh["data"])
    >>> model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    """
    if where is None and dist.is_initialized():
        return _ours(dist.group.WORLD)
    comm, whole = _comms_of(where)
    if not dist.is_initialized():
        # torch wants a store; nothing of this backend looks into it, and no rank may wait for another's entry
        store, rank, size = dist.HashStore(), whole.Get_rank(), whole.Get_size()
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, pg_options=_Over(whole))
    world = _ours(dist.group.WORLD)
    ranks = _ranks_in(comm, world.comm)
    if len(ranks) == world.comm.size:
        return world
    made = world.parts.get(ranks)
    if made is None:
        # only its members make it
        made = dist.new_group(list(ranks), backend=BACKEND, use_local_synchronization=True)
        world.parts[ranks] = made
    return made


class _Over(NamedTuple):
    """The communicator of torch's default group, on its way through torch."""

    comm: MPI.Intracomm


def _comms_of(where: CartMesh | MPI.Intracomm | None) -> tuple[MPI.Intracomm, MPI.Intracomm]:
    """Return the communicator that is meant, and the one for torch's default group."""
    if where is None:
        return MPI.COMM_WORLD, MPI.COMM_WORLD
    if isinstance(where, CartMesh):
        return where.group(tuple(range(where.ndim))).comm, where.root_comm
    if not isinstance(where, MPI.Intracomm) or where == MPI.COMM_NULL:
        raise MeshError(
            described(
                "process_group: no ranks to make a group of",
                expected="a CartMesh, or an mpi4py intra-communicator that this rank belongs to",
                got=type(where).__name__,
                fix="give a mesh, one of its dims (mesh['y']), or a communicator",
            )
        )
    return where, where


def _ranks_in(comm: MPI.Intracomm, world: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks in ``world`` of the ranks of ``comm``."""
    own, of = comm.Get_group(), world.Get_group()
    ranks = tuple(own.Translate_ranks(None, of))
    own.Free()
    of.Free()
    if MPI.UNDEFINED in ranks:
        raise MeshError(
            described(
                "process_group: ranks that torch.distributed does not know",
                expected=f"ranks of its default group, which has {world.size}",
                got=f"{ranks.count(MPI.UNDEFINED)} of {len(ranks)} beyond it",
                fix="make the group of the largest communicator first: it becomes the default group",
            )
        )
    if list(ranks) != sorted(ranks):
        raise MeshError(
            described(
                "process_group: ranks in another order than torch.distributed's",
                expected="ranks in the order of its default group, as torch has them in every group",
                got=f"ranks {ranks[:8]}{', ...' if len(ranks) > 8 else ''} of it",
                fix="make the communicator with keys that keep the order",
            )
        )
    return ranks


def _ours(group: Any) -> MPIProcessGroup:
    if not isinstance(group, MPIProcessGroup):
        raise MeshError(
            described(
                "process_group: torch.distributed runs on another backend",
                expected=f"not started yet, or by {BACKEND!r}",
                got=repr(dist.get_backend(group)),
                fix="call mpishard.process_group before (in place of) torch.distributed.init_process_group",
            )
        )
    return group


def _create(options: Any, over: _Over | None) -> MPIProcessGroup:
    """Make the group that torch asks for. Collective over its members."""
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        comm = (MPI.COMM_WORLD if over is None else over.comm).Dup()
        if (comm.Get_rank(), comm.Get_size()) != (options.group_rank, options.group_size):
            raise MeshError(
                described(
                    "torch.distributed: other ranks than MPI's",
                    expected=f"rank {comm.Get_rank()} of {comm.Get_size()}",
                    got=f"rank {options.group_rank} of {options.group_size}",
                    fix="start it with mpishard.process_group(mesh or communicator)",
                )
            )
        return MPIProcessGroup(comm)
    whole = _ours(dist.group.WORLD).comm
    every = whole.Get_group()
    members = every.Incl(ranks)
    # groups that are made at the same time by threads or by overlapping members are told apart by their names
    comm = whole.Create_group(members, zlib.crc32(str(options.group_id).encode()) % _TAGS)
    members.Free()
    every.Free()
    return MPIProcessGroup(comm)


class Pending(dist.Work):
    """What runs on; ``wait`` ends it. Groups' operations end in the order in which they are waited for."""

    def __init__(self, tensors: Sequence[Tensor], finish: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._finish = finish
        self._source = -1
        self._requests: list[MPI.Request] = []

    def wait(self, timeout: Any = None) -> bool:
        """End the operation."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether it is over; lets MPI make progress."""
        if self._finish is not None and self._requests and MPI.Request.Testall(self._requests):
            self.wait()
        return self._finish is None

    def is_success(self) -> bool:
        """Whether it is over, and well: what fails raises from ``wait``."""
        return self._finish is None

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that it fills."""
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        """Return a future that is done: who asks for one cannot end the operation later."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def _source_rank(self) -> int:
        return self._source

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        return self._source


class MPIProcessGroup(dist.ProcessGroup):
    """A group of torch.distributed: its own communicator, by the collectives of this package.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
    parts : dict
        Of the default group: what `process_group` made, by ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self._group = collective.group_of(comm)
        # messages between single ranks have tags of the caller's, and meet nothing else here
        self._messages = comm.Dup()
        self._name, self._description = "", "undefined"
        self.parts: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def shutdown(self) -> None:
        """Give the communicators back, as `torch.distributed.destroy_process_group` asks. Collective."""
        self.parts.clear()
        for comm in (self._messages, self.comm):
            if comm != MPI.COMM_NULL and not MPI.Is_finalized():
                comm.Free()

    # -- what torch asks a group

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch knows the group by."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch knows the group by."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take what the group is for."""
        self._description = description

    # -- collectives; all but some sums are over when they return

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Pending:
        """Reduce in place. Collective."""
        op = _name_of(opts)
        (x,) = tensors
        if op == "sum" and getattr(opts, "asyncOp", False) and is_dense(x):
            work = Pending(tensors)
            pending = iall_reduce(x.detach(), self._group)
            work._finish, work._requests = pending.wait, pending.requests
            return work
        _reduced(x.detach(), op, self._group)
        return Pending(tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Pending:
        """Reduce several tensors in place. Collective."""
        for x in tensors:
            _reduced(x.detach(), _name_of(opts), self._group)
        return Pending(tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Pending:
        """Reduce onto one rank. Collective."""
        (x,) = tensors
        op = _name_of(opts)
        if op == "sum":
            y = collective.reduce(x.detach(), self._group, opts.rootRank)
        else:
            _reduced(y := x.detach().clone(), op, self._group)
        if self.rank() == opts.rootRank:
            x.detach().copy_(y)
        return Pending(tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Pending:
        """Send one rank's tensor to all. Collective."""
        (x,) = tensors
        collective.broadcast(x.detach(), self._group, opts.rootRank, in_place=True)
        return Pending(tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Pending:
        """Give every rank every rank's tensor. Collective."""
        for parts, x in zip(outputs, inputs):
            counts = [p.numel() for p in parts]
            flat = collective.all_gather(x.detach().reshape(-1), self._group, 0, counts)
            for part, got in zip(parts, flat.split(counts)):
                part.detach().copy_(got.view(part.shape))
        return Pending([p for parts in outputs for p in parts])

    allgather_coalesced = allgather

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Pending:
        """Join the ranks' tensors into one. Collective."""
        flat = collective.all_gather(input.detach().reshape(-1), self._group, 0, (input.numel(),) * self.size())
        output.detach().copy_(flat.view(output.shape))
        return Pending([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Pending:
        """Join the ranks' tensors, several at once. Collective."""
        for output, x in zip(outputs, inputs):
            self.all_gather_single(output, x)
        return Pending(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Pending:
        """Reduce and keep a block each. Collective."""
        op, n = _name_of(opts), output.numel()
        flat = input.detach().reshape(-1)
        if op in ("sum", "avg") and (op == "sum" or flat.is_floating_point() or flat.is_complex()):
            got = collective.reduce_scatter(flat, self._group, 0, (n,) * self.size())
            if op == "avg":
                got = got / self.size()
        else:
            _reduced(flat := flat.clone(), op, self._group)
            got = flat[self.rank() * n : (self.rank() + 1) * n]
        output.detach().copy_(got.view(output.shape))
        return Pending([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Pending:
        """Reduce and keep a block each, of several tensors. Collective."""
        for output, x in zip(outputs, inputs):
            self.reduce_scatter_single(output, x, opts)
        return Pending(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Pending:
        """Reduce lists of tensors and keep one of them each. Collective."""
        for output, parts in zip(outputs, inputs):
            alike = all(p.numel() == output.numel() for p in parts)
            if alike:
                self.reduce_scatter_single(output, torch.cat([p.detach().reshape(-1) for p in parts]), opts)
                continue
            for rank, part in enumerate(parts):
                _reduced(whole := part.detach().clone(), _name_of(opts), self._group)
                if rank == self.rank():
                    output.detach().copy_(whole.view(output.shape))
        return Pending(outputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Pending:
        """Send a tensor to every rank and receive one from each. Collective."""
        most = max(sum(t.nbytes for t in inputs), sum(t.nbytes for t in outputs))
        # how they travel depends on the largest of all ranks
        with guard.waiting("all_to_all", (), self.comm):
            most = self.comm.allreduce(most, MPI.MAX)
        blocks = [t.detach() for t in inputs]
        got = collective.all_to_all(blocks, [tuple(t.shape) for t in outputs], self._group, most)
        for output, part in zip(outputs, got):
            output.detach().copy_(part)
        return Pending(outputs)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Pending:
        """Send rows of a tensor to every rank and receive rows from each. Collective."""
        size = self.size()
        sends, recvs = (
            list(splits) or [t.shape[0] // size] * size
            for splits, t in ((input_splits, input), (output_splits, output))
        )
        outputs = list(output.detach().split(recvs))
        self.alltoall(outputs, list(input.detach().split(sends)))
        return Pending([output])

    all_to_all_single = alltoall_base

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Pending:
        """Collect the ranks' tensors on one. Collective."""
        (x,) = inputs
        root = opts.rootRank
        sends = [] if self.rank() == root else [(root, x)]
        recvs = []
        if self.rank() == root:
            (parts,) = outputs
            parts[root].detach().copy_(x.detach())
            recvs = [(rank, p) for rank, p in enumerate(parts) if rank != root]
        self._exchanged("gather", sends, recvs)
        return Pending([p for parts in outputs for p in parts])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Pending:
        """Give each rank its tensor of one rank's list. Collective."""
        (x,) = outputs
        root = opts.rootRank
        sends = []
        if self.rank() == root:
            (parts,) = inputs
            x.detach().copy_(parts[root].detach())
            sends = [(rank, p) for rank, p in enumerate(parts) if rank != root]
        self._exchanged("scatter", sends, [] if self.rank() == root else [(root, x)])
        return Pending(outputs)

    def barrier(self, opts: Any = None) -> Pending:
        """Wait for all ranks. Collective."""
        with guard.waiting("barrier", (), self.comm):
            self.comm.Barrier()
        return Pending([])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the watchdog names who is missing. Collective."""
        self.barrier()

    # -- messages between single ranks

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Pending:
        """Start to send to one rank. Not collective."""
        (x,) = tensors
        return self._message("send", x, dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Pending:
        """Start to receive from one rank. Not collective."""
        (x,) = tensors
        return self._message("recv", x, src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Pending:
        """Start to receive from any rank. Not collective."""
        (x,) = tensors
        return self._message("recv", x, MPI.ANY_SOURCE, tag)

    def _exchanged(self, op: str, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive whole tensors, apart from the messages of the caller's tags."""
        works = [self._message("recv", t, rank, 0, op) for rank, t in recvs]
        works += [self._message("send", t, rank, 0, op) for rank, t in sends]
        for work in works:
            work.wait()

    def _message(self, way: str, x: Tensor, peer: int, tag: int, op: str = "") -> Pending:
        if not 0 <= tag < _TAGS:
            raise UnsupportedOperationError(
                described(
                    f"{way}: a tag that MPI may not have", expected=f"0 to {_TAGS - 1}", got=tag, fix="take another"
                )
            )
        comm = self.comm if op else self._messages
        own = x.detach()
        host = dense(own) if own.device.type == "cpu" else to_host(own)
        start = comm.Isend if way == "send" else comm.Irecv
        nbytes = host.nbytes
        cut = list(pieces(nbytes)) if nbytes else [(0, 0)]
        work = Pending([x])
        if peer == MPI.ANY_SOURCE and len(cut) > 1:
            raise UnsupportedOperationError(
                described(
                    "recv: a message in pieces from any rank",
                    expected=f"at most {cut[0][1]} bytes, or a source",
                    got=f"{nbytes} bytes",
                    fix="name the rank that sends it",
                )
            )
        work._requests = [start(address(host.data_ptr() + a, n), peer, tag) for a, n in cut]

        def finish() -> None:
            statuses = [MPI.Status() for _ in cut]
            with guard.waiting(op or way, [peer] if peer >= 0 else [], comm):
                MPI.Request.Waitall(work._requests, statuses)
            if way == "send":
                return
            came = sum(s.Get_count(MPI.BYTE) for s in statuses)
            work._source = statuses[0].Get_source()
            if came != nbytes:
                raise LayoutError(
                    described(
                        f"{op or way}: the tensor from rank {work._source} does not fit",
                        expected=f"{nbytes} bytes, {x.dtype} of shape {tuple(x.shape)}",
                        got=f"{came} bytes",
                        fix="give the shape and dtype that the source sends",
                    )
                )
            if host is not own:
                own.copy_(host)

        work._finish = finish
        return work


def _name_of(opts: Any) -> str:
    given = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for op, name in _NAMES.items():
        if given == op:
            return name
    raise UnsupportedOperationError(
        described(
            "torch.distributed: a reduction that MPI does not have",
            expected=f"one of {', '.join(_NAMES.values())}",
            got=given,
            fix="scale before the sum",
        )
    )


def _reduced(x: Tensor, op: str, group: Group) -> None:
    """Reduce ``x`` in place."""
    if op in _BITWISE:
        _bitwise(x, op, group)
        return
    collective.all_reduce(x, group, "sum" if op == "avg" else op, in_place=True)
    if op == "avg":
        x.div_(group.size, rounding_mode=None if x.is_floating_point() or x.is_complex() else "floor")


def _bitwise(x: Tensor, op: str, group: Group) -> None:
    if x.is_floating_point() or x.is_complex():
        raise UnsupportedOperationError(
            described(f"no reduction {op!r} of {x.dtype}", expected="an integer dtype", got=x.dtype, fix="convert it")
        )
    host = dense(x) if x.device.type == "cpu" else to_host(x)
    with guard.waiting("all_reduce", (), group.comm):
        group.comm.Allreduce(MPI.IN_PLACE, (as_bytes(host), MPI.BYTE), _BITWISE[op])
    if host is not x:
        x.copy_(host)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
