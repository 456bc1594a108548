"""The least of numbers over all ranks, while they do other things."""

from __future__ import annotations

import random
import time

from mpi4py import MPI

from mpishard.comm.dissemination import Dissemination

WORLD = MPI.COMM_WORLD


def numbers(turn: int, rank: int) -> tuple[int, ...]:
    drawn = random.Random(1000 * turn + rank)
    return tuple(drawn.randint(-(1 << 62), 1 << 62) for _ in range(4))


def test_agreements_one_after_the_other():
    rounds = Dissemination(WORLD, 77)
    own = random.Random(WORLD.rank)
    for turn in range(40):
        rounds.start(*numbers(turn, WORLD.rank))
        if own.random() < 0.2:
            time.sleep(0.002)  # who comes late
        if turn % 2:
            while not rounds.done():
                rounds.wait()
        else:
            while not rounds.done():
                pass
        expected = [min(column) for column in zip(*(numbers(turn, rank) for rank in range(WORLD.size)))]
        assert list(rounds.least) == expected
    rounds.free()
    rounds.free()


def test_other_requests_begin_with_it():
    came, sent = bytearray(8), bytes([WORLD.rank] * 8)
    beside = [
        WORLD.Recv_init(came, (WORLD.rank + 1) % WORLD.size, 78),
        WORLD.Send_init(sent, (WORLD.rank - 1) % WORLD.size, 78),
    ]
    rounds = Dissemination(WORLD, 77)
    rounds.start(WORLD.rank, -WORLD.rank, 5, 6, beside)
    MPI.Request.Waitall(beside)
    assert came == bytes([(WORLD.rank + 1) % WORLD.size] * 8)
    while not rounds.done():
        pass
    assert list(rounds.least) == [0, 1 - WORLD.size, 5, 6]
    rounds.free()
    for request in beside:
        request.Free()
