"""What both ends of a link between two programs share: where its messages travel, and how a step lies in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpishard.comm.coupling import wire
from mpishard.comm.coupling.patience import CertainError, Circle, Presence, Wait, call_of, state_of
from mpishard.comm.memory.buffer import pieces
from mpishard.errors import PeerError, described, ranges_of, ranks_text

_ALIGN = 64
_FEW_ROWS = 512
_SMALL_NBYTES = 1 << 17
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
HEAD = wire.HEAD.size


Box = Sequence["tuple[int, int]"]


class Parcel(NamedTuple):
    """The message to or from a rank (of both programs): boxes of fields, by number of the field."""

    peer: int
    boxes: tuple[tuple[int, Box], ...]


class Channel(NamedTuple):
    """Where the messages of a link travel.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        Of the ranks of both programs.
    first : int
        Rank there of the first of the other program.
    tag : int
        The first of the link's tags there.
    serial : int
        The link's number among this program's.
    circle : Circle
        This program's ranks.
    other : str
        Name of the other program.
    presences : dict
        Rank in ``comm`` -> where its process is.
    timeout_s : float
        How long to wait for the other program.
    """

    comm: MPI.Intracomm
    first: int
    tag: int
    serial: int
    circle: Circle
    other: str
    presences: dict[int, Presence]
    timeout_s: float

    def call(self, name: str) -> int:
        """Return the number of a call of the link, for agreements. Not collective."""
        return call_of(name, self.serial)

    def wait(self, peers: Callable[[], Sequence[int]], what: str) -> Wait:
        """Return a wait that ends where a peer is dead. Not collective."""
        return Wait(self.timeout_s, lambda: self.check(peers(), what))

    def check(self, peers: Sequence[int], what: str) -> None:
        """Raise where one of these ranks is known to be dead. Not collective."""
        dead = [p for p in peers if state_of(self.presences[p]) == "dead"]
        if dead:
            raise CertainError(
                f"{what}: {self.named(dead)} died",
                expected="a living peer",
                got="its process is gone",
                fix="see what it printed",
            )

    def named(self, peers: Sequence[int]) -> str:
        """Return ranks of the other program in words. Not collective."""
        program = f"program {self.other!r}"
        # none: what this rank waits for came, or nobody is to send
        return f"{ranks_text(ranges_of(p - self.first for p in peers))} of {program}" if peers else program

    def late(self, peers: Sequence[int], what: str) -> PeerError:
        """Return the error of peers that did not come in time. Not collective."""
        stopped = [p for p in peers if state_of(self.presences[p]) == "stopped"]
        kind = CertainError if stopped else PeerError
        return kind(
            described(
                f"{what}: {self.named(peers)} did not answer",
                expected=f"the other side of the link within {self.timeout_s:g} s",
                got="nothing" + (f"; stopped by a signal: {self.named(stopped)}" if stopped else ""),
                fix="look whether it died or hangs; give connect a longer timeout where its steps take longer",
            )
        )


class Load:
    """Memory for one step: the messages of all peers, each behind its head."""

    def __init__(self, parcels: Sequence[Parcel], dtypes: Sequence[torch.dtype]) -> None:
        shapes = [[tuple(hi - lo for lo, hi in box) for _, box in p.boxes] for p in parcels]
        nbytes = [
            [_aligned(math.prod(shape) * dtypes[field].itemsize) for shape, (field, _) in zip(own, p.boxes)]
            for own, p in zip(shapes, parcels)
        ]
        self.sizes = [HEAD + sum(own) for own in nbytes]
        starts = list(accumulate(self.sizes, initial=0))
        with torch.inference_mode(False):
            # numpy asks for large pages, torch does not: copies and MPI's way to another process take a third less;
            # they are written to now, as a page's first write takes longer than its copy, and steps are to be short
            self.memory = torch.from_numpy(np.empty(starts[-1], np.uint8)).zero_()
            # in the order of the parcels and of their boxes
            self.views: list[Tensor] = []
            for p, start, own, lengths in zip(parcels, starts, shapes, nbytes):
                for (field, _), shape, at in zip(p.boxes, own, accumulate(lengths, initial=start + HEAD)):
                    dtype = dtypes[field]
                    count = math.prod(shape) * dtype.itemsize
                    self.views.append(self.memory[at : at + count].view(dtype).view(shape))
        self.heads = [self.memory[a : a + HEAD].numpy().view(np.int64) for a in starts[:-1]]
        self.parts = [[(self.memory.data_ptr() + a + at, n) for at, n in pieces(s)] for a, s in zip(starts, self.sizes)]


class Copies:
    """Copies from one list of tensors to another, cell by cell, outside autograd.

    numpy begins in a fifth of torch's time; of many rows, or many bytes, torch is the faster.
    """

    __slots__ = ("_rest", "_small")

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._small: list[tuple[np.ndarray, np.ndarray]] = []
        self._rest: list[tuple[Tensor, Tensor]] = []
        for to, of in zip(targets, sources):
            if _is_small(to) and _is_small(of):
                # numpy has not all of torch's dtypes
                same_size = _BITS[to.itemsize]
                self._small.append((to.view(same_size).numpy(), of.view(same_size).numpy()))
            else:
                self._rest.append((to, of))

    def run(self) -> None:
        """Copy. Not collective."""
        for array, values in self._small:
            array[...] = values
        for to, of in self._rest:
            to.copy_(of)


def _is_small(x: Tensor) -> bool:
    # numpy would not see that a block is to be conjugated, or that torch forbids to write to it
    if x.device.type != "cpu" or x.is_conj() or x.is_neg() or x.is_inference():
        return False
    rows = x.numel() // max(1, x.shape[-1]) if x.ndim and x.stride(-1) == 1 else x.numel()
    return rows <= _FEW_ROWS and x.numel() * x.itemsize <= _SMALL_NBYTES


def notice(kind: int, value: int, nbytes: int = HEAD) -> np.ndarray:
    """Return the head of a message, which is all of one without cells. Not collective."""
    return np.array([wire.MAGIC, wire.VERSION, kind, value, nbytes, 0, 0, 0], np.int64)


def boxes_of(blocks: Sequence[Tensor], parcels: Sequence[Parcel]) -> list[Tensor]:
    """Return the boxes of blocks, in the order of the parcels, outside autograd. Not collective."""
    out = []
    for p in parcels:
        for field, box in p.boxes:
            x = blocks[field].detach()
            for dim, (lo, hi) in enumerate(box):
                x = x.narrow(dim, lo, hi - lo)
            out.append(x)
    return out


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
