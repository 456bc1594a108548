"""A communicator of any number of ranks, of which only this one is there: for plans, not for values.

What a reduction or a gather gives is copied to this rank itself, and messages go to nobody; what would have travelled
is told to those who listen. So one process plans, and runs without values, what a rank of a large job does.
"""

# ruff: noqa: N802 (the names are MPI's)
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from mpishard.errors import MeshError
from mpishard.layout.partition import rank_of

Topology = tuple[tuple[int, ...], tuple[bool, ...], tuple[int, ...]]


class Event(NamedTuple):
    """Something that a rank of a large job does with other ranks.

    Attributes
    ----------
    kind : str
        ``"start"`` and ``"finish"`` of messages to single ranks; ``"begin"`` and ``"end"`` of a collective, which
        ``"collective"`` is at once; ``"pack"``: a copy to or from the buffers of messages.
    op : str
        Name of the operation.
    key : object
        What a start and its finish have in common.
    messages, nbytes : int
        That this rank sends; of a collective, its argument.
    size : int
        Ranks of the group.
    """

    kind: str
    op: str
    key: object
    messages: int
    nbytes: int
    size: int


def _nbytes(buffer: Any) -> int:
    if isinstance(buffer, (tuple, list)):
        buffer = buffer[0]
    return buffer.nbytes if hasattr(buffer, "nbytes") else memoryview(buffer).nbytes


class NullComm:
    """The communicator of a planning mesh.

    Parameters
    ----------
    size, rank
        How many ranks it says it has, and which one this process is.
    device
        Where the tensors of its mesh lie.
    listeners
        Called with every `Event`; shared by all communicators of a mesh.
    """

    def __init__(
        self, size: int, rank: int, device: torch.device, listeners: list[Callable[[Event], object]] | None = None
    ) -> None:
        self.size, self.rank, self.device = size, rank, device
        self.listeners: list[Callable[[Event], object]] = [] if listeners is None else listeners
        self.topology: Topology = ((size,), (False,), (rank,))
        self._attributes: dict[int, Any] = {}

    def note(self, kind: str, op: str, key: object = None, messages: int = 0, nbytes: int = 0) -> None:
        """Tell the listeners of an event. Not collective."""
        for listener in self.listeners:
            listener(Event(kind, op, key, messages, nbytes, self.size))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise no_values(f"MPI's {name}")

    @classmethod
    def cart(
        cls, shape: Sequence[int], coords: Sequence[int], periodic: Sequence[bool], device: torch.device
    ) -> NullComm:
        """Return one with a Cartesian topology, as the rank at ``coords`` has it. Not collective."""
        comm = cls(math.prod(shape), rank_of(coords, shape), device)
        comm.topology = tuple(shape), tuple(periodic), tuple(coords)
        return comm

    def Get_topo(self) -> Topology:
        """Return extents, periods and this rank's coordinates."""
        return self.topology

    def Sub(self, remain: Sequence[bool]) -> NullComm:
        """Return that of the ranks along some dims."""
        shape, _, coords = ([v for v, kept in zip(values, remain) if kept] for values in self.topology)
        return NullComm(math.prod(shape), rank_of(coords, shape), self.device, self.listeners)

    def Dup(self) -> NullComm:
        """Return another one of the same ranks."""
        other = NullComm(self.size, self.rank, self.device, self.listeners)
        other.topology = self.topology
        return other

    def Split_type(self, _kind: int) -> NullComm:
        """Return that of a node where no other rank is."""
        return NullComm(1, 0, self.device)

    def Set_errhandler(self, _handler: MPI.Errhandler) -> None:
        """Do nothing: it makes no errors."""

    def Get_size(self) -> int:
        """Return how many ranks it says it has."""
        return self.size

    def Get_rank(self) -> int:
        """Return this process's."""
        return self.rank

    def Get_group(self) -> Any:
        """Return what stands for its ranks: nobody else has them."""
        return SimpleNamespace(Translate_ranks=lambda *_: [-1 - id(self)], Free=lambda: None)

    def Get_attr(self, keyval: int) -> Any:
        """Return an attribute, or None."""
        return self._attributes.get(keyval)

    def Set_attr(self, keyval: int, value: Any) -> None:
        """Set an attribute."""
        self._attributes[keyval] = value

    def Free(self) -> None:
        """Do nothing: MPI knows nothing of it."""

    # of what ranks tell each other about tensors: every rank tells what this one does

    def Allreduce(self, send: Any, recv: Any, op: MPI.Op = MPI.SUM) -> None:
        """Copy."""
        self.note("collective", "agreement", nbytes=_nbytes(recv))
        MPI.COMM_SELF.Allreduce(send, recv, op)

    def Iallreduce(self, send: Any, recv: Any, op: MPI.Op) -> MPI.Request:
        """Copy, and return what is over."""
        self.Allreduce(send, recv, op)
        return MPI.Request()

    def Allgather(self, send: Any, recv: Any) -> None:
        """Copy to every rank's place."""
        mine, every = (np.frombuffer(b[0] if isinstance(b, tuple) else b, np.uint8) for b in (send, recv))
        self.note("collective", "all_gather", nbytes=mine.nbytes)
        every.reshape(self.size, -1)[:] = mine

    def Bcast(self, x: Any, root: int = 0) -> None:  # noqa: ARG002
        """Leave what is there."""
        self.note("collective", "broadcast", nbytes=_nbytes(x))

    def bcast(self, x: Any, root: int = 0) -> Any:
        """Return the same, which stands for what another rank has; where this one has nothing, refuse."""
        self.note("collective", "broadcast")
        if x is None and root != self.rank:
            raise no_values("MPI's bcast")
        return x

    def sendrecv(self, x: Any, *_: Any) -> Any:
        """Return the same, which stands for what another rank says."""
        return x

    def allgather(self, x: Any) -> list[Any]:
        """Return as many of this rank's as there are ranks."""
        self.note("collective", "all_gather")
        return [x] * self.size

    def allreduce(self, x: Any, op: MPI.Op = MPI.SUM) -> Any:
        """Return what so many equal ranks give."""
        self.note("collective", "agreement")
        return x * self.size if op == MPI.SUM else x


A_VALUE = "a value asked for"


def no_values(what: str) -> MeshError:
    """Return the error of who wants values of a planning mesh. Not collective."""
    return MeshError(
        f"{what} on a mesh for planning",
        expected="plans, and operations on tensors without values",
        got="a call that needs the values of other ranks, which are not there",
        fix="run it on a mesh of ranks: ms.init_mesh",
    )
