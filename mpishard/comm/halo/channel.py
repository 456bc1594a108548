"""What the halo exchangers of one mesh share."""

from __future__ import annotations

import weakref
from typing import Any

from mpi4py import MPI

from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedOperationError


class Channel:
    """What the exchangers of one mesh share: a communicator of their own, and the slots of exchanges in flight.

    Every exchange in flight has tags of its own by its slot: the lowest free one, the same on all ranks that
    start and finish in the same order.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.exchangers: weakref.WeakSet[Any] = weakref.WeakSet()
        # the exchanger itself too: dropped in flight, it must live on
        self.flying: dict[int, tuple[Any, frozenset[int]]] = {}

    def free_slot(self) -> int:
        """Return the lowest slot that is free. Not collective."""
        slot = 0
        while slot in self.flying:
            slot += 1
        return slot

    def refuse_busy(self, addresses: frozenset[int]) -> None:
        """Raise where a field at one of these addresses is in flight. Not collective."""
        if any(addresses & busy for _, busy in self.flying.values()):
            raise UnsupportedOperationError(
                "HaloExchanger: a field is already in flight",
                expected="one exchange of a field at a time",
                got="a field between start() and finish()",
                fix="call finish() first",
            )

    def free(self) -> None:
        """Free all exchangers. Not collective."""
        for exchanger in list(self.exchangers):
            exchanger.free()

    def leave(self, other: Channel) -> None:
        """Have all exchangers go on on another channel; what is in flight is left behind. Not collective."""
        for exchanger in list(self.exchangers):
            exchanger.move(other)


def channel_of(mesh: CartMesh) -> Channel:
    """Return the mesh's channel. Collective on the first call."""
    # not among the plans, which may go: its communicator is made and freed by all ranks together
    links = mesh.all_ranks.links
    channel = links.get("halo")
    if channel is None:
        channel = links["halo"] = Channel(mesh.duplicate())
        mesh.own(channel.free)
    return channel  # type: ignore[no-any-return]
