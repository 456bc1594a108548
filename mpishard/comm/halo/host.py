"""One refresh of the halos of fields at fixed addresses: persistent messages, and copies around them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from mpishard.comm import counter
from mpishard.comm.exchange.neighbours import Way, across
from mpishard.comm.memory.block import Block, copy_views
from mpishard.comm.memory.buffer import pieces
from mpishard.comm.mesh import CartMesh
from mpishard.comm.tag import Flight
from mpishard.comm.transport.device_message import PATIENCE_S
from mpishard.layout import Piece, Pieces, Stage
from mpishard.layout.halo import plan_halo

OP = "halo_refresh"
_ALIGN = 16  # of every part of a message: the largest item

Box = tuple[tuple[int, int], ...]
Widths = tuple[Sequence[int], Sequence[int]]


class Message(NamedTuple):
    """Boxes of every field that travel together to or from ``peer``, with a tag of their direction."""

    peer: int
    tag: int
    boxes: tuple[Box, ...]


class Sweep(NamedTuple):
    """The exchange along one dim, or along all at once; ``local`` are (source, destination) boxes."""

    local: tuple[tuple[Box, Box], ...]
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]


def plan_sweep(
    mesh: CartMesh, dim: int, mesh_dim: int, sizes: Sequence[int], widths: Widths, ranges: Sequence
) -> Sweep:
    """Plan the exchange along array dim ``dim``; other dims take part in ``ranges``. Not collective.

    ``widths`` are those of the halo at the low and at the high side, for each position along the dim.
    """
    coords, (lo, _) = mesh.coords, widths
    place = coords[mesh_dim]
    stage = _stage(mesh, dim, mesh_dim, sizes, widths)

    def box(interval: tuple[int, int]) -> Box:
        return (*ranges[:dim], interval, *ranges[dim + 1 :])

    def messages(found: Sequence[tuple[int, Pieces]], end: int) -> tuple[Message, ...]:
        # the low and the high halo of a receiver are messages of their own
        return tuple(
            Message(
                mesh.rank_at((*coords[:mesh_dim], peer, *coords[mesh_dim + 1 :])),
                2 * dim + side,
                tuple(box(_ends(p, lo[place])[end]) for p in group),
            )
            for peer, pieces in found
            for side, group in groupby(pieces, key=lambda p: int(p.dst >= lo[place if end else peer]))
        )

    if any(start == stop for d, (start, stop) in enumerate(ranges) if d != dim):
        return Sweep((), (), ())
    local = tuple((box(src), box(dst)) for src, dst in (_ends(p, lo[place]) for p in _copied(stage, lo[place])))
    return Sweep(local, messages(stage.sends, 0), messages(stage.recvs, 1))


def _stage(mesh: CartMesh, dim: int, mesh_dim: int, sizes: Sequence[int], widths: Widths) -> Stage:
    mode = "circular" if mesh.periodic[mesh_dim] else "zeros"
    return plan_halo(dim, (mesh_dim,), sizes, *widths, mode, mesh.coords[mesh_dim])


def _ends(p: Piece, lo: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the cells of a piece lie in the array that sends them, and in the one that receives them."""
    return (p.src + lo, p.src + lo + p.count), (p.dst, p.dst + p.count)


def _copied(stage: Stage, lo: int) -> list[Piece]:
    """Return what is copied within an array: all that this rank has, but its interior, which stays."""
    return [p for p in stage.own if p.dst != lo]


def plan_at_once(
    mesh: CartMesh,
    mesh_dims: Mapping[int, int],
    sizes: Mapping[int, Sequence[int]],
    widths: Mapping[int, Widths],
    ranges: Sequence[tuple[int, int]],
) -> Sweep:
    """Plan the exchange along all dims as one sweep: every cell comes straight from the rank that owns it.

    Not collective. One message to every rank that owns a cell of the halo, also across edges and corners. ``mesh_dims``
    are those of the exchanged array dims, ``sizes`` the interior extents of all positions along these, ``widths`` those
    of their halos, as for `plan_sweep`, and ``ranges`` the interior of every array dim.
    """
    ways: tuple[list[Way[tuple[int, int]]], ...] = ([], [])
    for d, own in enumerate(ranges):
        m = mesh_dims.get(d)
        stage = None if m is None else _stage(mesh, d, m, sizes[d], widths[d])
        lo = 0 if m is None else widths[d][0][mesh.coords[m]]
        for k, way in enumerate(ways):
            by_place: dict[int | None, list[tuple[int, int]]] = {None: [own]}
            if stage is not None:
                by_place[None] += [_ends(p, lo)[k] for p in _copied(stage, lo)]
                for peer, pieces in (stage.sends, stage.recvs)[k]:
                    by_place[peer] = [_ends(p, lo)[k] for p in pieces]
            way.append(by_place)
    on_mesh = [(mesh_dims[d],) if d in mesh_dims else () for d in range(len(ranges))]
    sends, recvs = (
        tuple(Message(peer, 0, cells) for peer, boxes in across(mesh, on_mesh, way) if (cells := _filled(boxes)))
        for way in ways
    )
    pairs = zip(*(_filled(product(*(by_place[None] for by_place in way))) for way in ways))
    return Sweep(tuple((src, dst) for src, dst in pairs if src != dst), sends, recvs)


def _filled(boxes: Iterable[Box]) -> tuple[Box, ...]:
    return tuple(box for box in boxes if all(stop > start for start, stop in box))


class Step:
    """One sweep on given fields."""

    __slots__ = ("flight", "local", "packs", "unpacks")

    def __init__(self) -> None:
        self.packs: list[tuple[Any, Any]] = []
        self.local: list[tuple[Any, Any]] = []
        self.unpacks: list[tuple[Any, Any]] = []
        self.flight: Flight


class Refresh:
    """Refreshes the halos of fields at fixed addresses.

    A part of a message that is dense in host memory travels from and to the field itself; others are packed
    into buffers of our own, dims in the order of the sweeps' boxes on every rank, whatever the strides.

    Parameters
    ----------
    comm
        Communicator of the whole mesh.
    sweeps
        In the order in which they run.
    fields
        In the host's memory.
    tag
        Added to the tags of the messages.
    reverse
        Whether messages hold the first dim fastest.
    op
        What a rank that waits says.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        sweeps: Sequence[Sweep],
        fields: Sequence[Block],
        tag: int,
        reverse: bool = False,
        op: str = OP,
    ) -> None:
        self._op = op
        self.addresses = frozenset(f.address for f in fields if f.nbytes)  # empty arrays share addresses
        self._comm, self._fields, self._tag, self._reverse = comm, fields, tag, reverse
        self._buffers: list[Any] = []
        self._messages = self._nbytes = 0
        self._at = 0
        self._steps = [self._step(sweep) for sweep in sweeps]

    def run(self) -> None:
        """Refresh. Neighborwise collective."""
        if counter.active:
            counter.record(OP, self._messages, self._nbytes)
        for step in self._steps:
            self._begin(step)
            self._wait(step)
            self._unpack(step)

    def start(self) -> None:
        """Start to refresh. Neighborwise collective."""
        if counter.active:
            counter.record(OP, self._messages, self._nbytes)
        self._at = 0
        if self._steps:
            self._begin(self._steps[0])
            self.poke()

    def poke(self) -> bool:
        """Go as far as messages have arrived; return whether that is the end. Not collective."""
        while self._at < len(self._steps):
            step = self._steps[self._at]
            if not self._arrived(step):
                return False
            self._advance(step)
        return True

    def finish(self) -> None:
        """Wait for what `start` has started. Neighborwise collective."""
        while self._at < len(self._steps):
            step = self._steps[self._at]
            self._wait(step)
            self._advance(step)

    def free(self) -> None:
        """Free the persistent requests. Not collective."""
        deadline = time.monotonic() + PATIENCE_S
        for step in self._steps:
            while not step.flight.test() and time.monotonic() < deadline:
                time.sleep(0.001)
            step.flight.free()
        self._steps = []

    def _begin(self, step: Step) -> None:
        for dst, src in step.packs:
            np.copyto(dst, src)
        step.flight.start()
        for dst, src in step.local:
            np.copyto(dst, src)

    def _arrived(self, step: Step) -> bool:
        return step.flight.test()

    def _wait(self, step: Step) -> None:
        step.flight.wait()

    def _unpack(self, step: Step) -> None:
        for dst, src in step.unpacks:
            np.copyto(dst, src)

    def _advance(self, step: Step) -> None:
        self._unpack(step)
        self._at += 1
        if self._at < len(self._steps):
            self._begin(self._steps[self._at])

    def _step(self, sweep: Sweep) -> Step:
        step = Step()
        comm = self._comm
        recvs, sends = [], []
        for message in sweep.recvs:
            tag = self._tag + message.tag
            recvs += [
                (message.peer, comm.Recv_init(part, message.peer, tag), tag, part.nbytes)
                for part in self._parts(message, step.unpacks, sending=False)
            ]
        for message in sweep.sends:
            parts, tag = self._parts(message, step.packs, sending=True), self._tag + message.tag
            sends += [(message.peer, comm.Send_init(part, message.peer, tag)) for part in parts]
            self._messages += 1
            self._nbytes += sum(part.nbytes for part in parts)
        step.local = [copy_views(field.box(dst), field.box(src)) for field in self._fields for src, dst in sweep.local]
        step.flight = Flight(comm, self._op, recvs, sends, exact=True)
        return step

    def _parts(self, message: Message, copies: list[tuple[Any, Any]], *, sending: bool) -> list[MPI.buffer]:
        """Return the memory of a message, and note the copies between it and the fields."""
        blocks = self._blocks(message)
        if len(blocks) == 1 and blocks[0].is_dense:
            address, nbytes = blocks[0].address, blocks[0].nbytes
        else:
            starts, nbytes = placed(blocks)
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._buffers.append(buffer)
            address = buffer.data_ptr()
            for block, start in zip(blocks, starts):
                packed = block.dense(address + start)
                copies.append(copy_views(packed, block) if sending else copy_views(block, packed))
        return [MPI.buffer.fromaddress(address + at, n) for at, n in pieces(nbytes)]

    def _blocks(self, message: Message) -> list[Block]:
        """Return what travels in a message, dims in the order of the sender's and the receiver's buffers."""
        return [self._ordered(field.box(box)) for field in self._fields for box in message.boxes]

    def _ordered(self, block: Block) -> Block:
        return block._replace(shape=block.shape[::-1], strides=block.strides[::-1]) if self._reverse else block


def placed(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Return where the blocks of a message begin in it, and its length. Not collective."""
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + math.ceil(block.nbytes / _ALIGN) * _ALIGN)
    return starts[:-1], starts[-2] + blocks[-1].nbytes
