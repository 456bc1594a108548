"""Pairs of calls that ranks make differently, one after the other; run under an MPI launcher.

``python -m tests.failure.mismatched SEED FIRST COUNT NOTES``: the pairs FIRST to FIRST + COUNT - 1 of a seed. Of warm
pairs all plans are made before, so that nothing but the calls themselves can tell. A pair that ends the job is the last
one: what is written to the file NOTES says which it was.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from typing import Any, NamedTuple

import torch

import mpishard as ms
from mpishard.comm import guard
from mpishard.comm.exit import end
from tests.failure.calls import (
    BITS,
    CALLS,
    COLLECTIVES,
    EXCHANGES,
    FILES,
    RANK,
    SIZE,
    SIZES,
    WORLD,
    Ready,
    communicator,
    prepare,
)
from tests.failure.calls_of_families import FAMILIES

# How long a rank with an error waits for the others, and how it ends the job then.
GRACE_S, ENDED = 0.5, 77
PATIENCE_S = 120.0

# draws among the calls in whose names this regular expression is found
ONLY = os.environ.get("FUZZ_ONLY", "")
EVERY = CALLS | FAMILIES

Call = tuple[str, int, int]


class Pair(NamedTuple):
    """What most ranks call, what the odd one does, its number, and whether the plans are there before."""

    most: Call
    odd: Call
    rank: int
    warm: bool


def pairs(seed: int, ranks: int, count: int) -> list[Pair]:
    """Draw pairs: half of them the same call, otherwise."""
    draw, names = random.Random(f"{seed} {ranks}"), [name for name in EVERY if re.search(ONLY, name)]
    found: list[Pair] = []
    while len(found) < count:
        name, n, bits = draw.choice(names), draw.choice(SIZES), draw.choice(BITS)
        other = name if draw.random() < 0.5 else draw.choice(names)
        pair = Pair(
            (name, n, bits), (other, draw.choice(SIZES), draw.choice(BITS)), draw.randrange(ranks), draw.random() < 0.7
        )
        if pair.most != pair.odd and (name != "no call" or other != "no call"):
            found.append(pair)
    return found


def kind(call: Call) -> str:
    """What a table calls a call."""
    name = call[0]
    if name == "no call":
        return name
    return next((text for text, some in KINDS.items() if name in some), "another call")


KINDS = {"an exchange": EXCHANGES, "a collective": COLLECTIVES, "a file": FILES, "one of a family": FAMILIES}


def family(pair: Pair) -> str:
    """What a table calls the class of a pair."""
    if communicator(pair.most[0]) != communicator(pair.odd[0]):
        return "calls on different communicators"
    if pair.most[0] == pair.odd[0]:
        return f"the same call otherwise: {kind(pair.most)}"
    if "torch.distributed send" in (pair.most[0], pair.odd[0]):
        # no rank but these two knows of their messages: nobody can compare them with what all call
        return "messages of two ranks against a call of all"
    return " against ".join(sorted((kind(pair.most), kind(pair.odd))))


def outcome(call: Ready, expected: torch.Tensor) -> str:
    """What came of a call of this rank's: 'right', 'wrong', or its error."""
    try:
        got = call()
    except Exception as error:  # noqa: BLE001  a raw one is what must not be
        return f"{type(error).__name__}: {error}"
    return "right" if got.shape == expected.shape and torch.equal(got, expected) else "wrong"


def next_call(mesh: Any) -> str:
    """What comes of the call after it, which all ranks make: it may meet what the odd one has left undone."""
    return outcome(lambda: ms.all_reduce(torch.ones(2), mesh, op="min"), torch.ones(2))


def main(seed: str, first: str, count: str, path: str) -> None:
    notes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(**what: Any) -> None:
        os.write(notes, (json.dumps(what) + "\n").encode())

    beside = WORLD.Dup()
    # the watchdog is for the pairs alone: what goes before may take its time on a busy machine
    timeout_s, guard.TIMEOUT_S = guard.TIMEOUT_S, PATIENCE_S
    prepare()
    last = int(first) + int(count)
    every = pairs(int(seed), SIZE, last)
    for i in range(int(first), last):
        pair = every[i]
        for warm in (pair.warm, True):
            mesh = ms.init_mesh((-1,), ("x",), periodic=True)
            ready = [EVERY[name](mesh, n, bits) for name, n, bits in (pair.most, pair.odd)]
            if warm:
                for _ in range(2):
                    expected = [call().clone() for call in ready]
                next_call(mesh)
            if pair.warm:
                break
        mine = int(pair.rank == RANK)
        beside.Barrier()
        if RANK == 0:
            note(case=i, pair=repr(tuple(pair)), family=family(pair))
        beside.Barrier()
        guard.TIMEOUT_S = timeout_s
        came = outcome(ready[mine], expected[mine])
        if came in ("right", "wrong"):
            then = next_call(mesh)
            came = came if then == "right" else f"after a wrong value, {then}" if came == "wrong" else then
        note(case=i, rank=RANK, came=came)
        # an error ends the job, as it does where nobody catches it, unless all ranks come to an end
        told, start = beside.Ibarrier(), time.monotonic()
        while not told.Test():
            time.sleep(0.001)
            if came not in ("right", "wrong") and time.monotonic() - start > GRACE_S:
                end(ENDED)
        guard.TIMEOUT_S = PATIENCE_S
        if RANK == 0:
            note(case=i, over=True)
    # what the pairs have left under way on their meshes cannot be taken back
    sys.stdout.flush()
    beside.Barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
