"""Dissemination: the least of four numbers over all ranks, by messages that travel while a rank does other things.

In round k every rank sends what it knows 2**k ranks up. A reduction of MPI's that waits begins when a rank has done its
own work, and one that does not wait takes tens of microseconds to begin; of messages on requests that are kept, the
first has mostly come when the rank looks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpishard.comm import in_flight

# looked up once: these are most of what it costs
_test_all, _wait_all, _start_all = MPI.Request.Testall, MPI.Request.Waitall, MPI.Prequest.Startall
_pack = struct.Struct("=4q").pack_into


class Dissemination:
    """Agreements of all ranks of a communicator, one after the other. `start` is called by all of them, alike.

    Parameters
    ----------
    comm
        Their communicator.
    tag
        Of its messages there, and of nothing else's.

    Attributes
    ----------
    least : memoryview
        Where `done` is true: the least of every rank's, for each of the numbers.
    """

    __slots__ = ("__weakref__", "_at", "_came", "_peers", "_rounds", "least")

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        rank, size = comm.Get_rank(), comm.Get_size()
        count = (size - 1).bit_length()
        # own numbers, then what comes in each round
        numbers = np.zeros((1 + count, 4), np.int64)
        self.least, *self._came = (row.data for row in numbers)
        self._rounds: list[list[MPI.Prequest]] = []
        self._peers: list[tuple[int, int]] = []
        for k in range(count):
            # after round k a rank knows the least of 2**(k+1) ranks up to its own; that some are met twice is harmless
            source, target = (rank - (1 << k)) % size, (rank + (1 << k)) % size
            self._rounds.append([comm.Recv_init(numbers[1 + k], source, tag), comm.Send_init(numbers[0], target, tag)])
            self._peers.append((source, target))
        self._at = count

    def start(self, a: int, b: int, c: int, d: int, along: Sequence[MPI.Prequest] = ()) -> None:
        """Start with this rank's numbers. Collective; ``along``: other requests, as one call for all costs less."""
        _pack(self.least, 0, a, b, c, d)
        self._at = 0
        if self._rounds:
            _start_all([*along, *self._rounds[0]] if along else self._rounds[0])
        elif along:
            _start_all(list(along))

    def done(self) -> bool:
        """Go on, and tell whether it is over. Not collective."""
        rounds = self._rounds
        while self._at < len(rounds):
            if not _test_all(rounds[self._at]):
                return False
            self._merge()
        return True

    def wait(self) -> None:
        """Wait for the end of the round. Not collective, but it ends where all ranks have called `start`."""
        _wait_all(self._rounds[self._at])
        self._merge()

    def waits_for(self) -> tuple[Sequence[MPI.Prequest], Sequence[int]]:
        """Return the requests of the round, the receive first, and the ranks at their other ends. Not collective."""
        return self._rounds[self._at], self._peers[self._at]

    def _merge(self) -> None:
        came, least = self._came[self._at], self.least
        if came != least:
            _pack(least, 0, *map(min, least, came))
        self._at += 1
        if self._at < len(self._rounds):
            _start_all(self._rounds[self._at])

    def free(self) -> None:
        """Free the requests; those of an agreement that is not `done` stay MPI's. Not collective."""
        if self._at == len(self._rounds):
            for requests in self._rounds:
                for request in requests:
                    request.Free()
            self._rounds, self._at = [], 0
        else:
            in_flight.left.append(self)
