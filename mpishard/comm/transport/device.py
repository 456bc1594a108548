"""Tensors in a GPU's memory: by NCCL where it serves and they are large, else as messages or through pinned memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpishard.comm import guard, thread
from mpishard.comm.device.driver import Driver
from mpishard.comm.device.staging import Spans, cut, cut_blocks, of_block, through_host
from mpishard.comm.memory.buffer import as_bytes, byte_view, dense, to_host
from mpishard.comm.memory.reduction_type import Rule
from mpishard.comm.mesh import Group
from mpishard.comm.tag import Label, hashed
from mpishard.comm.transport import nccl
from mpishard.comm.transport.device_message import Envelope, Relay
from mpishard.comm.transport.host import Parcels, came, swap
from mpishard.comm.transport.slot import ALL_REDUCE, has_room, slot_of


class Device:
    """How tensors in a GPU's memory travel among the ranks of a group; methods as of `host.Host`.

    Parameters
    ----------
    group, driver
        The ranks, and this rank's device.
    """

    def __init__(self, group: Group, driver: Driver) -> None:
        self.group, self.comm, self.driver = group, group.comm, driver
        self.has_kernel, self.device = driver.has_kernel, driver.device
        self._slot = slot_of(group)

    def _meet(self, wait: str, op: str, dtype: torch.dtype, common: Hashable = 0) -> None:
        with guard.waiting(wait, (), self.comm):
            self._slot.meet(op, dtype, common)

    def all_reduce(self, x: Tensor, y: Tensor, rule: Rule, op: str) -> None:
        """Reduce ``x``, contiguous, to ``y``, which may be ``x``. Collective over the group."""
        # extrema would be turned into others by torch, on the host
        small = op == "sum" and has_room(x, op)
        link = nccl.link_of(self.group, x, x.nbytes)
        if link is not None and link.serves(x.dtype, op):
            self._slot.note(ALL_REDUCE[op], rule.dtype, x.nbytes)
            link.all_reduce(x, y, op)
            return
        if not small:
            self._meet("all_reduce", ALL_REDUCE[op], rule.dtype, x.nbytes)

        def move(_: int, here: Tensor, there: Tensor) -> None:
            with guard.waiting("all_reduce", (), self.comm):
                if small:
                    self._slot.all_reduce(here.view(x.dtype), there.view(x.dtype), rule, op)
                    return
                self.comm.Allreduce((as_bytes(here), rule.datatype), (as_bytes(there), rule.datatype), rule.op)

        parts = cut(x.nbytes, x.itemsize)
        through_host(self.driver, x, parts, y, parts, move)

    def start_sum(self, x: Tensor, rule: Rule) -> tuple[list[MPI.Request], Callable[[], object]]:
        """Start to sum ``x`` in place; return requests, and what is to be done after them. Collective.

        A piece travels while the next one comes down.
        """
        driver = self.driver
        link = nccl.link_of(self.group, x, x.nbytes)
        if link is not None and link.serves(x.dtype):
            self._slot.note("all_reduce in the background", rule.dtype, x.nbytes)
            link.all_reduce(x, x, "sum")
            return [], lambda: None
        memory, host, small = byte_view(x), driver.pinned(x.nbytes), has_room(x, "sum")
        if small:
            driver.download(host, memory)
            driver.wait(driver.mark())
        request, arrived = self._slot.start_sum(host.view(x.dtype), rule)
        marks, requests = [], [request]
        parts = [] if small else [(a, b) for ((a, b),) in cut(x.nbytes, x.itemsize)]
        for a, b in parts:
            driver.download(host[a:b], memory[a:b])
            marks.append(driver.mark())
        for (a, b), mark in zip(parts, marks):
            driver.wait(mark)
            driver.lend([], [host[a:b]])
            requests.append(self.comm.Iallreduce(MPI.IN_PLACE, (as_bytes(host[a:b]), rule.datatype), rule.op))

        def finish() -> None:
            driver.take_back([], [host])
            arrived()
            driver.upload(memory, host)

        return requests, finish

    def on_host(self, x: Tensor) -> Tensor:
        """Return ``x`` where MPI may read it at once. Not collective."""
        return to_host(x)

    def all_gather(self, x: Tensor, flat: Tensor, counts: Sequence[int], common: Hashable) -> None:
        """Gather ``counts`` bytes of every rank to ``flat``, which is contiguous; ``common`` is the same on all.

        Collective over the group.
        """
        flat = flat.view(-1)
        link = nccl.link_of(self.group, x, flat.nbytes)
        if link is not None:
            self._slot.note("all_gather", x.dtype, common)
            link.all_gather(x, flat, [n // x.itemsize for n in counts])
            return
        self._meet("all_gather", "all_gather", x.dtype, common)
        parts = cut_blocks(counts)

        def move(k: int, here: Tensor, there: Tensor) -> None:
            with guard.waiting("all_gather", (), self.comm):
                self.comm.Allgatherv(as_bytes(here), [as_bytes(there), [b - a for a, b in parts[k]]])

        through_host(self.driver, x, of_block(parts, self.group.rank), flat, parts, move)

    def reduce_scatter(self, flat: Tensor, result: Tensor, counts: Sequence[int], rule: Rule) -> None:
        """Reduce ``flat``, of ``counts`` numbers for each rank, to one's own. Collective over the group."""
        self._meet("reduce_scatter", "reduce_scatter", rule.dtype, flat.nbytes)
        comm, datatype, size = self.comm, rule.datatype, flat.itemsize
        parts = cut_blocks([n * size for n in counts], size)

        def move(k: int, here: Tensor, there: Tensor) -> None:
            each = [(b - a) // size for a, b in parts[k]]
            with guard.waiting("reduce_scatter", (), comm):
                comm.Reduce_scatter((as_bytes(here), datatype), (as_bytes(there), datatype), each, rule.op)

        through_host(self.driver, flat, parts, result, of_block(parts, self.group.rank), move)

    def all_to_all(
        self, flat: Tensor, out: Sequence[int], into: Tensor, counts: Sequence[int], bound_nbytes: int
    ) -> None:
        """Send ``out`` numbers to every rank, and receive ``counts`` of each. Collective over the group."""
        blocks, back = flat.split(list(out)), into.split(list(counts))
        link = nccl.link_of(self.group, into, bound_nbytes)
        if link is not None:
            self._slot.note("all_to_all", into.dtype)
            link.all_to_all(blocks, back)
        else:
            self._meet("all_to_all", "all_to_all", into.dtype)
            self.post(list(enumerate(blocks)), list(enumerate(back)), "all_to_all", hashed("all_to_all")).wait()

    def broadcast(self, x: Tensor, root: int) -> None:
        """Fill ``x`` with the root's. Collective over the group."""
        self._meet("broadcast", f"broadcast from {root}", x.dtype, x.nbytes)
        link, at_root = nccl.link_of(self.group, x, x.nbytes), self.group.rank == root
        if link is not None:
            link.broadcast(x, root)
            return

        def move(_: int, here: Tensor, there: Tensor) -> None:
            with guard.waiting("broadcast", (), self.comm):
                self.comm.Bcast(as_bytes(here if at_root else there), root)

        parts = cut(x.nbytes)
        none: list[Spans] = [()] * len(parts)
        through_host(self.driver, x, parts if at_root else none, x, none if at_root else parts, move)

    def reduce(self, x: Tensor, y: Tensor, rule: Rule, root: int) -> None:
        """Reduce ``x`` to ``y`` of the root. Collective over the group."""
        self._meet("reduce", f"reduce to {root}", rule.dtype, x.nbytes)
        comm, datatype, at_root = self.comm, rule.datatype, self.group.rank == root

        def move(_: int, here: Tensor, there: Tensor) -> None:
            with guard.waiting("reduce", (), comm):
                comm.Reduce((as_bytes(here), datatype), (as_bytes(there), datatype) if at_root else None, rule.op, root)

        parts = cut(x.nbytes, x.itemsize)
        through_host(self.driver, x, parts, y, parts if at_root else [()] * len(parts), move)

    def messages(
        self,
        sends: Sequence[Envelope],
        recvs: Sequence[Envelope],
        op: str,
        label: Label,
        storages: Any,  # noqa: ARG002
    ) -> Relay:
        """Return persistent messages, in memory of their own. Not collective."""
        return Relay(self.comm, self.driver, sends, recvs, op, self.group.aware, label=label)

    def post(
        self, sends: Parcels, recvs: Parcels, op: str, tag: int, *, in_order: bool = True, bulk: bool = False
    ) -> Posted:
        """Start to send tensors and to fill contiguous others, once. Neighborwise collective.

        What a rank sends to itself is copied. ``bulk``: what is large goes by NCCL, if the group is connected.

        Raises
        ------
        UnsupportedOperationError
            A CUDA graph is being captured.
        """
        thread.require(self.comm)
        link = self.group.links.get("nccl") if bulk else None
        if link is not None:
            # both ends know a message's size: so both take the same way
            going, coming = ([(r, x) for r, x in side if x.nbytes >= nccl.LEAST_NBYTES] for side in (sends, recvs))
            sends, recvs = ([(r, x) for r, x in side if x.nbytes < nccl.LEAST_NBYTES] for side in (sends, recvs))
            link.exchange([(r, dense(x)) for r, x in going], coming)
        return Posted(self, sends, recvs, op, tag, in_order)

    def send_recv(self, x: Tensor, y: Tensor, to: int, of: int, tag: int, call: str) -> int:
        """Send ``x`` to a rank and fill ``y`` from one; return how many bytes came. Neighborwise collective."""
        # the pieces of messages of other lengths would wait for each other
        going, coming, status = array("q", (x.nbytes,)), array("q", (y.nbytes,)), MPI.Status()
        swap(self.comm, call, (going, MPI.INT64_T), to, (coming, MPI.INT64_T), of, tag, status)
        came(status, self.comm, of, to, tag, call, y.nbytes)
        # also what does not fit: another message would meet it
        into = y if coming[0] == y.nbytes else x.new_empty(coming[0], dtype=torch.uint8)
        sends, recvs = ([(r, t)] if r != MPI.PROC_NULL else [] for r, t in ((to, x), (of, into)))
        self.post(sends, recvs, call, hashed(call)).wait()
        return coming[0]


class Posted:
    """Messages under way, which travel once; see `Device.post`."""

    __slots__ = ("_coming", "_relay")

    def __init__(self, device: Device, sends: Parcels, recvs: Parcels, op: str, tag: int, in_order: bool) -> None:
        group, aware = device.group, device.group.aware
        # what goes to oneself is copied, where both ends of it are here
        own = [[x for r, x in side if r == group.rank] for side in (sends, recvs)]
        local = group.rank if len(own[0]) == len(own[1]) else -1
        going, coming = ([(r, x) for r, x in side if r != local and x.numel()] for side in (sends, recvs))
        out, into = ([Envelope(r, tag, x.nbytes) for r, x in side] for side in (going, coming))
        tensors = None if aware else ([dense(x) for _, x in going], [y for _, y in coming])
        self._coming = coming if aware else []
        self._relay = relay = Relay(
            group.comm, device.driver, out, into, op, aware, tensors=tensors, counted=False, in_order=in_order
        )
        try:
            if aware:
                for (_, x), at in zip(going, relay.out_starts):
                    relay.out.tensor[at : at + x.nbytes].view(x.dtype).view(x.shape).copy_(x.detach())
            relay.start()
            for x, y in zip(*own) if local >= 0 else ():
                byte_view(y).copy_(byte_view(dense(x)))
        except BaseException:
            relay.free()
            raise

    def poke(self) -> None:
        """Let MPI make progress. Not collective."""
        self._relay.poke()

    def wait(self) -> None:
        """Wait for the messages, and queue what brings them to the device. Neighborwise collective."""
        relay = self._relay
        try:
            relay.finish()
            for (_, y), at in zip(self._coming, relay.into_starts):
                byte_view(y).copy_(relay.into.tensor[at : at + y.nbytes])
            relay.release()
        finally:
            relay.free()
