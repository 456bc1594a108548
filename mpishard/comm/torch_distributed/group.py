"""A process group of torch.distributed whose ranks are those of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import guard
from mpishard.comm.collective import blocking
from mpishard.comm.collective.nonblocking import iall_reduce
from mpishard.comm.lifetime import made
from mpishard.comm.memory.buffer import address, dense, is_dense, pieces, to_host, unfit
from mpishard.comm.torch_distributed.call import Calls, Compared
from mpishard.comm.torch_distributed.reduction import name_of, reduced, scaled
from mpishard.comm.torch_distributed.short_form import with_short_forms
from mpishard.comm.torch_distributed.work import Work, keep, settle
from mpishard.errors import LayoutError, MpishardError, UnsupportedOperationError

BACKEND = "mpishard"
# below the smallest upper bound that MPI allows for tags
TAGS = 1 << 15


def _require(op: str, what: str, expected: object, got: object) -> None:
    if expected != got:
        raise LayoutError(
            f"{op}: {what} do not fit",
            expected=expected,
            got=got,
            fix="give every rank's tensor its place, in the dtype that travels",
        )


def _check(op: str, *tensors: Tensor) -> None:
    for x in tensors:
        if odd := unfit(x):
            got, fix = odd
            raise UnsupportedOperationError(f"{op}: works on dense tensors", expected="one", got=got, fix=fix)
        if x.is_meta:
            fix = "give one in memory: torch.empty_like(x, device='cpu')"
            raise UnsupportedOperationError(f"{op}: works on dense tensors", expected="one", got="one on meta", fix=fix)


def _kind(x: Tensor) -> str:
    return f"{x.numel()} of {x.dtype}"


def _kinds(tensors: Sequence[Tensor]) -> tuple[tuple[int, torch.dtype], ...]:
    return tuple((x.numel(), x.dtype) for x in tensors)


@with_short_forms
class MPIProcessGroup(dist.ProcessGroup):
    """A group of torch.distributed: its own communicator, by the collectives of this package.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
    parts : dict
        Of the default group: what `process_group` made, by ranks.
    made : dict
        Of the default group: how many groups were made, by ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self._group = blocking.group_of(comm)
        # messages between single ranks have tags of the caller's, and meet nothing else here
        self._messages = made("a new process group", comm, comm.Dup)
        self._calls = Calls(comm, self._messages)
        self._group.links["slot"] = Compared(comm)
        self._begun: list[Work] | None = None
        self._name, self._description = "", "undefined"
        self.parts: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.made: dict[tuple[int, ...], int] = {}

    @property
    def is_lost(self) -> bool:
        """Whether its ranks can call nothing any more. Not collective."""
        return self._calls.lost is not None

    def shutdown(self) -> None:
        """Give the communicators back, as `torch.distributed.destroy_process_group` asks. Collective."""
        self.parts.clear()
        for comm in (self._messages, self.comm) if settle(self) else ():
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

    @property
    def _device_types(self) -> list[torch.device]:
        """Where torch may put what it sends of its own: a checkpoint in the background asks for the CPU."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> MPIProcessGroup:
        return self

    # -- collectives; all but some sums are over when they return

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce in place. Collective."""
        (x,) = tensors
        with self._calls as calls:
            op = name_of(opts, x)
            _check("all_reduce", x)
            calls.call = f"all_reduce {op}", (x.numel(), x.dtype)
            at_once = op != "sum" or blocking.in_order(None)
            # what is started waits for all ranks where calls are compared
            calls.later = not at_once and not guard.DEBUG and getattr(opts, "asyncOp", False)
        scaled(x, opts, in_place=True)
        if at_once:
            reduced(x.detach(), op, self._group)
            return Work(tensors)
        # whether a rank waits, and how its tensor lies, is its own matter: MPI wants the same call of all
        own = dense(x.detach())
        pending = iall_reduce(own, calls.sums if own.device.type == "cpu" else self._group)
        mark = calls.mark if calls.later else None

        def finish() -> None:
            if mark is not None:
                calls.settle(mark)
            pending.wait()
            if not is_dense(x):
                x.detach().copy_(own)

        work = Work(tensors, finish)
        work.group, work.mark, work.requests = self, mark, [*pending.requests]
        if mark is not None and mark.request is not None:
            work.requests.append(mark.request)
            # a sum that some rank has not started never comes
            work.is_due = lambda own: calls.has_failed(mark) or own.through()
        if getattr(opts, "asyncOp", False):
            return keep(work)
        work.wait()
        return work

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce several tensors in place. Collective."""
        with self._calls as calls:
            _check("all_reduce", *tensors)
            ops = [name_of(opts, x) for x in tensors]
            calls.call = "all_reduce of several", *ops, *_kinds(tensors)
        for x, op in zip(tensors, ops):
            reduced(scaled(x, opts, in_place=True), op, self._group)
        return Work(tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduce onto one rank. Collective."""
        (x,) = tensors
        with self._calls as calls:
            _check("reduce", x)
            op = name_of(opts, x)
            calls.call = f"reduce {op} to {opts.rootRank}", (x.numel(), x.dtype)
        if op == "sum":
            y = blocking.reduce(scaled(x, opts), self._group, opts.rootRank)
        else:
            reduced(y := x.detach().clone(), op, self._group)
        if self.rank() == opts.rootRank:
            x.detach().copy_(y)
        return Work(tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Send one rank's tensor to all. Collective."""
        (x,) = tensors
        with self._calls as calls:
            _check("broadcast", x)
            calls.call = f"broadcast from {opts.rootRank}", (x.numel(), x.dtype)
        blocking.broadcast(x.detach(), self._group, opts.rootRank, in_place=True)
        return Work(tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Give every rank every rank's tensor. Collective."""
        every = []
        with self._calls as calls:
            _require("all_gather", "lists of tensors to fill", len(inputs), len(outputs))
            for parts, x in zip(outputs, inputs):
                _check("all_gather", x, *parts)
                _require("all_gather", "tensors to fill, one for each rank,", self.size(), len(parts))
                counts = tuple(p.numel() for p in parts)
                _require("all_gather", "the numbers given", counts[self.rank()], x.numel())
                every.append((counts, x.dtype))
            calls.call = "all_gather", *every
        for parts, x, (counts, _) in zip(outputs, inputs, every):
            flat = blocking.all_gather(x.detach().reshape(-1), self._group, 0, counts)
            for part, got in zip(parts, flat.split(counts)):
                part.detach().copy_(got.view(part.shape))
        return Work([p for parts in outputs for p in parts])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Give every rank the tensors of every rank, a list of them for each rank. Collective."""
        return self.allgather(list(zip(*outputs)), inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Join the ranks' tensors into one. Collective."""
        return self.all_gather_single_coalesced([output], [input])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Join the ranks' tensors, several at once. Collective."""
        with self._calls as calls:
            _require("all_gather_into_tensor", "tensors to fill", len(inputs), len(outputs))
            for output, x in zip(outputs, inputs):
                _check("all_gather_into_tensor", x, output)
                expected = f"{x.numel() * self.size()} of {x.dtype}"
                _require("all_gather_into_tensor", "the numbers to fill", expected, _kind(output))
            calls.call = "all_gather_into_tensor", *_kinds(inputs)
        for output, x in zip(outputs, inputs):
            flat = blocking.all_gather(x.detach().reshape(-1), self._group, 0, (x.numel(),) * self.size())
            output.detach().copy_(flat.view(output.shape))
        return Work(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Reduce and keep a block each. Collective."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Reduce and keep a block each, of several tensors. Collective."""
        with self._calls as calls:
            ops = []
            _require("reduce_scatter_tensor", "tensors to fill", len(inputs), len(outputs))
            for output, x in zip(outputs, inputs):
                _check("reduce_scatter_tensor", x, output)
                ops.append(name_of(opts, x))
                expected = f"{output.numel() * self.size()} of {output.dtype}"
                _require("reduce_scatter_tensor", "the numbers given", expected, _kind(x))
            calls.call = "reduce_scatter_tensor", *ops, *_kinds(inputs)
        for output, x, op in zip(outputs, inputs, ops):
            self._reduce_scattered(output, scaled(x, opts).reshape(-1), op)
        return Work(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scattered(self, output: Tensor, flat: Tensor, op: str) -> None:
        n = output.numel()
        if op in ("sum", "avg") and (op == "sum" or flat.is_floating_point() or flat.is_complex()):
            got = blocking.reduce_scatter(flat, self._group, 0, (n,) * self.size())
            if op == "avg":
                got = got / self.size()
        else:
            reduced(flat := flat.clone(), op, self._group)
            got = flat[self.rank() * n : (self.rank() + 1) * n]
        output.detach().copy_(got.view(output.shape))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        """Reduce lists of tensors and keep one of them each. Collective."""
        with self._calls as calls:
            ops = []
            _require("reduce_scatter", "tensors to fill", len(inputs), len(outputs))
            for output, parts in zip(outputs, inputs):
                _check("reduce_scatter", output, *parts)
                _require("reduce_scatter", "the tensors given, one for each rank,", self.size(), len(parts))
                _require("reduce_scatter", "the numbers to fill", _kind(parts[self.rank()]), _kind(output))
                ops.append(name_of(opts, output))
            calls.call = "reduce_scatter", *ops, *map(_kinds, inputs)
        for output, parts, op in zip(outputs, inputs, ops):
            if all(p.numel() == output.numel() for p in parts):
                flat = torch.cat([p.detach().reshape(-1) for p in parts])
                self._reduce_scattered(output, scaled(flat, opts), op)
                continue
            for rank, part in enumerate(parts):
                reduced(whole := scaled(part, opts).clone(), op, self._group)
                if rank == self.rank():
                    output.detach().copy_(whole.view(output.shape))
        return Work(outputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Send a tensor to every rank and receive one from each. Collective."""
        return self._all_to_all("all_to_all", lambda: (outputs, inputs), outputs, inputs)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """Send rows of a tensor to every rank and receive rows from each. Collective."""

        def rows() -> list[Sequence[Tensor]]:
            size, both = self.size(), ((output, output_split_sizes), (input, input_split_sizes))
            return [t.detach().split(list(splits) or [t.shape[0] // size] * size) for t, splits in both]

        return self._all_to_all("all_to_all_single", rows, [output], [input])

    all_to_all_single = alltoall_base

    def _all_to_all(
        self, op: str, parts: Callable[[], Sequence[Sequence[Tensor]]], fill: Sequence[Tensor], give: Sequence[Tensor]
    ) -> Work:
        with self._calls as calls:
            _check(op, *give, *fill)
            outputs, inputs = parts()
            for what, tensors in (("given", inputs), ("to fill", outputs)):
                _require(op, f"the tensors {what}, one for each rank,", self.size(), len(tensors))
            calls.call = op, inputs[0].dtype
        sends, ones = torch.tensor([t.numel() for t in inputs], device="cpu"), (1,) * self.size()
        came = blocking.all_to_all_flat(sends, ones, ones, self._group, 8 * self.size()).tolist()
        expected = [t.numel() for t in outputs]
        most = max(sum(t.nbytes for t in inputs), sum(t.nbytes for t in outputs))
        # how they travel depends on the largest of all ranks
        most, odd = blocking.all_reduce(
            torch.tensor([most, came != expected], device="cpu"), self._group, "max"
        ).tolist()
        if odd:
            _agree_on_numbers(self.comm, expected, came)
        blocks = [t.detach() for t in inputs]
        got = blocking.all_to_all(blocks, [tuple(t.shape) for t in outputs], self._group, most)
        for output, part in zip(outputs, got):
            output.detach().copy_(part)
        return Work(fill)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Work:
        """Collect the ranks' tensors on one. Collective."""
        (x,) = inputs
        root = opts.rootRank
        self._compare_list(f"gather to {root}", root, outputs, x)
        sends = [] if self.rank() == root else [(root, x)]
        recvs = []
        if self.rank() == root:
            (parts,) = outputs
            parts[root].detach().copy_(x.detach())
            recvs = [(rank, p) for rank, p in enumerate(parts) if rank != root]
        self._exchanged("gather", sends, recvs)
        return Work([p for parts in outputs for p in parts])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Work:
        """Give each rank its tensor of one rank's list. Collective."""
        (x,) = outputs
        root = opts.rootRank
        self._compare_list(f"scatter from {root}", root, inputs, x)
        sends = []
        if self.rank() == root:
            (parts,) = inputs
            x.detach().copy_(parts[root].detach())
            sends = [(rank, p) for rank, p in enumerate(parts) if rank != root]
        self._exchanged("scatter", sends, [] if self.rank() == root else [(root, x)])
        return Work(outputs)

    def _compare_list(self, call: str, root: int, lists: Sequence[Sequence[Tensor]], x: Tensor) -> None:
        """Raise on all ranks where one rank's list has no tensor for each of them. Collective."""
        op = call.split(maxsplit=1)[0]
        with self._calls as calls:
            _check(op, x)
            if self.rank() == root:
                (parts,) = lists
                _check(op, *parts)
                _require(op, "tensors of the list, one for each rank,", self.size(), len(parts))
                _require(op, "the numbers of this rank", _kind(x), _kind(parts[root]))
            calls.call = call, x.dtype

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Wait for all ranks. Collective."""
        with self._calls as calls:
            calls.call = ("barrier",)
        return Work([])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the watchdog names who is missing. Collective."""
        self.barrier()

    # -- several calls at a time

    def _start_coalescing(self, device: torch.device) -> None:
        """Keep the messages that are started from now on; collectives are over when they return. Not collective."""
        self._begun = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """Return what ends the messages that were started since. Not collective."""
        begun, self._begun = self._begun or [], None

        def finish() -> None:
            for work in begun:
                work.wait()

        work = Work([], finish)
        work.is_due = lambda _: all(w.is_completed() for w in begun)
        return work

    # -- messages between single ranks

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        """Start to send to one rank. Not collective."""
        (x,) = tensors
        return self._message("send", x, dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        """Start to receive from one rank. Not collective."""
        (x,) = tensors
        return self._message("recv", x, src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Start to receive from any rank. Not collective."""
        (x,) = tensors
        return self._message("recv", x, MPI.ANY_SOURCE, tag)

    def _exchanged(self, op: str, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive whole tensors, apart from the messages of the caller's tags."""
        works = [self._message("recv", t, rank, 0, op) for rank, t in recvs]
        works += [self._message("send", t, rank, 0, op) for rank, t in sends]
        for work in works:
            work.wait()

    def _message(self, way: str, x: Tensor, peer: int, tag: int, op: str = "") -> Work:
        if not 0 <= tag < TAGS:
            raise UnsupportedOperationError(
                f"{way}: a tag that MPI may not have", expected=f"0 to {TAGS - 1}", got=tag, fix="take another"
            )
        _check(way, x)
        comm = self.comm if op else self._messages
        own = x.detach()
        host = dense(own) if own.device.type == "cpu" else to_host(own)
        start = comm.Isend if way == "send" else comm.Irecv
        nbytes = host.nbytes
        cut = list(pieces(nbytes)) if nbytes else [(0, 0)]
        work = Work([x])
        if peer == MPI.ANY_SOURCE and len(cut) > 1:
            raise UnsupportedOperationError(
                "recv: a message in pieces from any rank",
                expected=f"at most {cut[0][1]} bytes, or a source",
                got=f"{nbytes} bytes",
                fix="name the rank that sends it",
            )
        work.requests = [start(address(host.data_ptr() + a, n), peer, tag) for a, n in cut]

        work.statuses = statuses = [MPI.Status() for _ in cut]

        def finish() -> None:
            if not work.arrived:  # statuses are told once
                with guard.waiting(op or way, guard.unfinished(work.requests, [peer] * len(cut)), comm):
                    MPI.Request.Waitall(work.requests, statuses)
            if way == "send":
                return
            came = sum(s.Get_count(MPI.BYTE) for s in statuses)
            work.source = statuses[0].Get_source()
            if came != nbytes:
                raise LayoutError(
                    f"{op or way}: the tensor from rank {work.source} does not fit",
                    expected=f"{nbytes} bytes, {x.dtype} of shape {tuple(x.shape)}",
                    got=f"{came} bytes",
                    fix="give the shape and dtype that the source sends",
                )
            if host is not own:
                own.copy_(host)

        work.finish = finish
        if self._begun is not None and not op:
            self._begun.append(work)
        return keep(work)


def _agree_on_numbers(comm: MPI.Intracomm, fill: list[int], came: list[int]) -> None:
    """Raise on all ranks, as on some others send more or less than is to be filled. Collective."""
    error: MpishardError | None = None
    try:
        _require("all_to_all", "the numbers to fill", came, fill)
    except MpishardError as e:
        error = e
    guard.agree(comm, error, "all_to_all")
