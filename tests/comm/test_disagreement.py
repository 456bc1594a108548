"""What ranks that disagree tell each other: exact, the same everywhere, and a few kilobytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from mpi4py import MPI

from mpishard.comm import disagreement, guard
from mpishard.errors import DesyncError, LayoutError, MeshError, MpishardError, ranges_of, ranks_text

WORLD = MPI.COMM_WORLD


@pytest.fixture
def comm():
    comm = WORLD.Dup()
    yield comm
    comm.Free()


class Counted:
    """A communicator that adds up the bytes of what is given to collectives, and allows no gather."""

    def __init__(self, comm):
        self.comm, self.nbytes, self.calls = comm, 0, 0
        self.Get_size, self.Get_rank = comm.Get_size, comm.Get_rank

    def _count(self, buffer):
        self.calls += 1
        self.nbytes += (buffer[0] if isinstance(buffer, list) else buffer).nbytes

    def Allreduce(self, *args):
        self._count(args[0])
        self.comm.Allreduce(*args)

    def Reduce(self, *args):
        self._count(args[0])
        self.comm.Reduce(*args)

    def Bcast(self, *args):
        self._count(args[0])
        self.comm.Bcast(*args)


def told(rank_texts):
    """Return the ranks' texts in the order of how many ranks have them, by definition."""
    ranks = {}
    for rank, text in enumerate(rank_texts):
        ranks.setdefault(text, []).append(rank)
    return sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 2, 1], "ranks 0-2"),
        ([40, 3, 7, 8, 9, 10, 11, 12], "ranks 3, 7-12 and 40"),
        (range(65535), "ranks 0-65534 (65535 ranks)"),
        (range(0, 100, 2), f"ranks {', '.join(map(str, range(0, 32, 2)))} and others (50 ranks)"),
        ([], "rank none"),
    ],
)
def test_ranks_in_texts(ranks, text):
    assert ranks_text(ranges_of(ranks)) == text


@pytest.mark.parametrize("case", range(20))
def test_ranges_are_added_in_any_grouping(case):
    draw = random.Random(case)
    size = draw.choice([1, 5, 64, 300])
    member = [draw.random() < draw.choice([0.02, 0.5, 0.98]) for _ in range(size)]
    rows = []
    for rank in range(size):
        row = disagreement._no_rows(1)
        if member[rank]:
            row[0, :3] = 1, rank, rank
        rows.append(row.ravel())
    while len(rows) > 1:
        at = draw.randrange(len(rows) - 1)
        disagreement._add_ranges(rows[at], rows[at + 1])
        del rows[at]
    number, ranges = disagreement._told(rows[0])
    expected = ranges_of(r for r in range(size) if member[r])
    assert (number, ranges) == (sum(member), expected[: disagreement._RANGES])


@pytest.mark.parametrize("case", range(10))
def test_what_many_ranks_have_is_not_lost(case):
    draw = random.Random(case)
    size = 200
    digests = [7 if draw.random() < 0.4 else 100 + rank for rank in range(size)]
    rows = []
    for digest in digests:
        row = np.zeros(2 * disagreement._SLOTS, np.int64)
        row[:2] = digest, 1
        rows.append(row)
    while len(rows) > 1:
        at = draw.randrange(len(rows) - 1)
        disagreement._add_counts(rows[at], rows[at + 1])
        del rows[at]
    assert int(rows[0][0]) == 7


@pytest.mark.parametrize("case", range(15))
def test_kinds(comm, case):
    draw = random.Random(case)
    texts = [draw.choice("abcd")[: draw.randrange(2)] * draw.choice([1, 3]) for _ in range(WORLD.size)]
    found = disagreement.kinds(comm, texts[WORLD.rank])
    assert WORLD.allgather(found) == [found] * WORLD.size
    expected = told(texts)
    if len(expected) <= disagreement._KINDS:
        assert [(k.text, k.ranges) for k in found] == [(text, ranges_of(ranks)) for text, ranks in expected]
    odd = [r for _, ranks in expected[1:] for r in ranks]
    several = len(expected) > 1 and len(expected[0][1]) > len(expected[1][1])
    assert disagreement.unlike(found) == (ranks_text(ranges_of(odd)) if several else "")


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("case", range(15))
def test_drawn_failures(comm, case):
    draw = random.Random(case)
    every = [None, None, LayoutError("one"), LayoutError("two"), MeshError("one")]
    mine = [draw.choice(every) for _ in range(WORLD.size)]
    error = mine[WORLD.rank]
    failed = {r: (type(e).__name__, str(e)) for r, e in enumerate(mine) if e is not None}
    if not failed:
        guard.agree(comm, error)
        return
    with pytest.raises(MpishardError) as info:
        guard.agree(comm, error, f"signatures do not matter then {WORLD.rank}")
    name, text = failed[min(failed)]
    same = [r for r in failed if failed[r] == (name, text)]
    if len(same) < WORLD.size:
        text += f"\n  raised on: {ranks_text(ranges_of(same))} of {WORLD.size}"
    if len(same) < len(failed):
        text += f" (for other reasons on {ranks_text(ranges_of(set(failed) - set(same)))})"
    assert (type(info.value).__name__, str(info.value)) == (name, text)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [1 << 4, 1 << 20])
def test_bytes_do_not_grow_with_texts(comm, nbytes, monkeypatch):
    monkeypatch.setattr(guard, "_calls", lambda _: [0])  # which asks for an attribute
    monkeypatch.setattr(guard, "DEBUG", False)  # which starts and tests
    long = "é" * nbytes
    counted = Counted(comm)
    with pytest.raises(LayoutError, match=r"^start") as info:
        guard.agree(counted, LayoutError(f"start {long} {WORLD.rank} end") if WORLD.rank else None, long)
    assert " 1 end" in str(info.value)
    assert counted.nbytes < 10_000
    assert counted.calls <= 4
    for call, args in ((guard.agree, (None, f"{WORLD.rank}{long}")), (guard.check, (f"{WORLD.rank}{long}",))):
        counted = Counted(comm)
        with pytest.raises(DesyncError) as info:
            call(counted, *args)
        assert len(set(WORLD.allgather(str(info.value)))) == 1
        assert counted.nbytes < 10_000


def test_many_kinds_of_texts(comm):
    """More than are told apart: the rest is counted, and its first one told."""
    found = disagreement.kinds(comm, f"only {WORLD.rank}")
    assert sum(kind.number for kind in found) == WORLD.size
    assert {kind.text for kind in found} <= {f"only {r}" for r in range(WORLD.size)}
    assert len(found) == min(WORLD.size, disagreement._KINDS + 1)


def test_any_told(comm):
    assert disagreement.any_told(comm, None) is None
    found = disagreement.any_told(comm, "here" if WORLD.rank == WORLD.size - 1 else None)
    assert (found.text, found.ranges) == ("here", [(WORLD.size - 1, WORLD.size - 1)])
