"""`mpishard.comm.halo.host` for fields in a GPU's memory: one kernel packs all strips of all fields, one unpacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpi4py import MPI

from mpishard.comm.device.driver import Driver, Memory
from mpishard.comm.halo.host import OP, Message, Refresh, Step, Sweep, placed
from mpishard.comm.memory.block import Block, copy_views
from mpishard.comm.memory.copy_table import Box, plan_table
from mpishard.comm.transport.device_message import Envelope, Relay


class _DeviceStep(Step):
    """One sweep on given fields: its messages, and tables for what is packed and unpacked around them."""

    __slots__ = ("fold", "folded", "pack", "relay", "unpack")

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self.relay = relay
        self.pack: Any = None
        self.unpack: Any = None
        # what stays on this rank: a table to pack it, one to unpack it, and the memory between
        self.fold: tuple[Any, Any, Memory] | None = None
        self.folded: Any = None  # the mark behind the last use of that memory


class DeviceRefresh(Refresh):
    """Refreshes the halos of fields at fixed addresses of one GPU.

    Parameters
    ----------
    comm, sweeps, fields, rest
        As for `Refresh`.
    foreign
        Whether other streams than torch's current one may still write the fields.
    driver
        The device.
    aware
        Whether MPI may be given device memory; the same on all ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        sweeps: Sequence[Sweep],
        fields: Sequence[Block],
        *rest: Any,
        foreign: bool,
        driver: Driver,
        aware: bool,
    ) -> None:
        self._driver, self._aware, self._foreign = driver, aware, foreign
        super().__init__(comm, sweeps, [f._replace(device=driver.device) for f in fields], *rest)

    def free(self) -> None:
        """Free the persistent requests and the buffers. Not collective."""
        steps: list[Any] = self._steps
        for step in steps:
            if step.fold is not None:
                step.fold[2].free(step.folded)
            step.relay.free()
        self._steps = []

    def _step(self, sweep: Sweep) -> Any:
        driver = self._driver
        sends, recvs = ([self._envelope(m) for m in side] for side in (sweep.sends, sweep.recvs))
        self._messages += len(sends)
        self._nbytes += sum(m.nbytes for m in sends)
        # the refresh is counted as one
        relay = Relay(self._comm, driver, sends, recvs, OP, self._aware, counted=False, in_order=False)
        step = _DeviceStep(relay)
        if driver.has_kernel:
            if sweep.local:
                step.fold = self._fold(sweep.local)
            # at address 0, every offset is an address
            step.pack, step.unpack = (
                driver.table(plan_table(_box(block, at) for block, at in self._places(messages, starts)))
                for messages, starts in ((sweep.sends, relay.out_starts), (sweep.recvs, relay.into_starts))
            )
        else:
            pairs = [(field.box(dst), field.box(src)) for field in self._fields for src, dst in sweep.local]
            step.local = [copy_views(dst, src) for dst, src in pairs]
            for block, at in self._places(sweep.sends, relay.out_starts):
                step.packs.append(copy_views(_packed(relay.out, block, at), block))
            for block, at in self._places(sweep.recvs, relay.into_starts):
                step.unpacks.append(copy_views(block, _packed(relay.into, block, at)))
        return step

    def _fold(self, local: Sequence[tuple[Any, Any]]) -> tuple[Any, Any, Memory]:
        """Plan the copies within the fields as one launch that packs and one that unpacks."""
        sides = [[field.box(pair[k]) for field in self._fields for pair in local] for k in (0, 1)]
        starts, nbytes = placed(sides[0])
        tables = (plan_table(map(_box, blocks, starts)) for blocks in sides)
        return *map(self._driver.table, tables), self._driver.allocate(nbytes)  # type: ignore[return-value]

    def _envelope(self, message: Message) -> Envelope:
        return Envelope(message.peer, self._tag + message.tag, placed(self._blocks(message))[1])

    def _places(self, messages: Sequence[Message], starts: Sequence[int]) -> Iterator[tuple[Block, int]]:
        """Yield every block that travels and where it lies in the buffer of all messages."""
        for message, start in zip(messages, starts):
            blocks = self._blocks(message)
            for block, at in zip(blocks, placed(blocks)[0]):
                yield block, start + at

    def _begin(self, step: Any) -> None:
        if self._foreign:
            self._driver.wait_all()
        step.relay.acquire()
        if step.pack is not None:
            self._driver.pack(step.pack, 0, step.relay.out)
        for dst, src in step.packs:
            dst.copy_(src)
        step.relay.start()
        if step.fold is not None:
            pack, unpack, memory = step.fold
            self._driver.pack(pack, 0, memory)
            self._driver.unpack(unpack, 0, memory)
            step.folded = self._driver.mark()
        for dst, src in step.local:
            dst.copy_(src)

    def _arrived(self, step: Any) -> bool:
        return step.relay.poke()

    def _wait(self, step: Any) -> None:
        pass  # `_unpack` does, for it also brings what arrived to the device

    def _unpack(self, step: Any) -> None:
        step.relay.finish()
        if step.folded is not None:
            self._driver.wait(step.folded)  # it may have been queued on another stream
        if step.unpack is not None:
            self._driver.unpack(step.unpack, 0, step.relay.into)
        for dst, src in step.unpacks:
            dst.copy_(src)
        step.relay.release()
        if self._foreign:
            # whoever reads the fields next knows nothing of torch's stream
            self._driver.wait(self._driver.mark())


def _box(block: Block, packed: int) -> Box:
    return Box(block.address, block.shape, block.strides, block.itemsize, packed)


def _packed(memory: Memory, block: Block, at: int) -> Block:
    return block.dense(memory.address + at)._replace(device=memory.tensor.device)
