"""What ranks that disagree tell each other: a text of each kind, and who says it; kilobytes, whatever their number.

Works on communicators of mpi4py; those who call it are in a wait bracket.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpishard.errors import ranges_of, ranks_text

Ranges = list[tuple[int, int]]

TEXT_NBYTES = 6 << 10  # of all texts together
_RANGES = 16  # that travel, of one kind; of the others, the number of ranks
_KINDS = 4  # told apart
_SLOTS = 8  # among which a kind is found that more than one of nine ranks has
_ROW = 1 + 2 * _RANGES  # number of ranks, then first and last of each range, -1 where there is none


class Kind(NamedTuple):
    """Ranks that say the same.

    Attributes
    ----------
    text
        What they say, its middle left out where it is long; of ``mixed`` ones, the first of them.
    digest
        Of the whole text.
    number
        How many they are.
    ranges
        The first of their ranges.
    mixed
        Whether these are all the ranks beside the other kinds, which do not say the same.
    """

    text: str
    digest: int
    number: int
    ranges: Ranges
    mixed: bool = False

    @property
    def ranks(self) -> str:
        """How a text names them."""
        return ranks_text(self.ranges, self.number)

    def __str__(self) -> str:
        return f"{self.ranks}{' otherwise, the first' * self.mixed}: {self.text or 'nothing in particular'}"


def digest_of(text: str) -> int:
    """Return a number, not zero, that differs where texts differ. Not collective."""
    return 1 + int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=7).digest(), "little")


def first_told(comm: MPI.Intracomm, first: int, text: str | None) -> tuple[Kind, Kind]:
    """Return who says what rank ``first`` says, and who says something else; the others have None. Collective."""
    digest = 0 if text is None else digest_of(text)
    said, common = _said(comm, first, text or "", digest, TEXT_NBYTES)
    same, other = _who(comm, None if text is None else int(digest != common), 2)
    return Kind(said, common, *same), Kind("", 0, *other, mixed=True)


def any_told(comm: MPI.Intracomm, text: str | None) -> Kind | None:
    """Return what the lowest rank says that has not None, and who says the same; None where none does. Collective."""
    first = np.array([comm.Get_size() if text is None else comm.Get_rank()], np.int64)
    lowest = np.empty_like(first)
    comm.Allreduce(first, lowest, MPI.MIN)
    return first_told(comm, int(lowest[0]), text)[0] if lowest[0] < comm.Get_size() else None


def kinds(comm: MPI.Intracomm, text: str) -> list[Kind]:
    """Return what the ranks say, that of most ranks first, and what is rare together at the end. Collective."""
    digest = digest_of(text)
    slots, common = np.zeros((_SLOTS, 2), np.int64), np.zeros((_SLOTS, 2), np.int64)
    slots[0] = digest, 1
    datatype, op = _reduction(_SLOTS * 2, _add_counts)
    # what is counted depends on the order of the sums: one rank's is taken
    comm.Reduce([slots, 1, datatype], [common, 1, datatype], op, 0)
    if comm.Get_rank() == 0 and not common.any():
        common[0] = slots[0]
    comm.Bcast([common, MPI.INT64_T], 0)
    often = [int(d) for d, n in common[:_KINDS] if n]
    mine = often.index(digest) if digest in often else len(often)
    found = []
    for i, (number, ranges) in enumerate(_who(comm, mine, len(often) + 1)):
        if number:
            said, known = _said(comm, ranges[0][0], text, digest, TEXT_NBYTES // (_KINDS + 1))
            found.append(Kind(said, known, number, ranges, i == len(often)))
    return sorted(found, key=lambda kind: (kind.mixed, -kind.number, kind.ranges))


def unlike(found: Sequence[Kind]) -> str:
    """Return how a text names the ranks that do not say what most say, or "" where none say it most. Not collective."""
    if len(found) < 2 or found[0].mixed or found[0].number <= max(kind.number for kind in found[1:]):
        return ""
    number = sum(kind.number for kind in found[1:])
    if sum(b - a + 1 for kind in found[1:] for a, b in kind.ranges) < number:
        return f"{number} ranks"
    return ranks_text(ranges_of(r for kind in found[1:] for a, b in kind.ranges for r in range(a, b + 1)))


def _said(comm: MPI.Intracomm, root: int, text: str, digest: int, nbytes: int) -> tuple[str, int]:
    """Return the text of one rank, as far as it fits, and its digest."""
    data = np.frombuffer(_clipped(text, nbytes), np.uint8) if comm.Get_rank() == root else np.empty(0, np.uint8)
    head = np.array([digest, len(data)], np.int64)
    comm.Bcast([head, MPI.INT64_T], root)
    if comm.Get_rank() != root:
        data = np.empty(head[1], np.uint8)
    comm.Bcast([data, MPI.BYTE], root)
    return data.tobytes().decode(errors="ignore"), int(head[0])


def _clipped(text: str, nbytes: int) -> bytes:
    data = text.encode(errors="replace")
    if len(data) <= nbytes:
        return data
    half = nbytes // 2 - 32
    return b"%s ... (%d bytes) ... %s" % (data[:half], len(data) - 2 * half, data[-half:])


def _who(comm: MPI.Intracomm, mine: int | None, count: int) -> list[tuple[int, Ranges]]:
    """Return number and first ranges of the ranks of each of ``count`` kinds; this rank is of kind ``mine``."""
    rows, every = _no_rows(count), _no_rows(count)
    if mine is not None:
        rows[mine, :3] = 1, comm.Get_rank(), comm.Get_rank()
    datatype, op = _reduction(rows.size, _add_ranges)
    comm.Allreduce([rows, 1, datatype], [every, 1, datatype], op)
    return [_told(row) for row in every]


def _no_rows(count: int) -> np.ndarray[Any, Any]:
    rows = np.full((count, _ROW), -1, np.int64)
    rows[:, 0] = 0
    return rows


def _told(row: np.ndarray[Any, Any]) -> tuple[int, Ranges]:
    number, *ends = row.tolist()
    return number, [(a, b) for a, b in zip(ends[::2], ends[1::2]) if a >= 0]


@cache
def _reduction(length: int, add: Any) -> tuple[MPI.Datatype, MPI.Op]:
    # one element, lest a library cuts it; in the order of the ranks
    return MPI.INT64_T.Create_contiguous(length).Commit(), _operation(add)


@cache
def _operation(add: Any) -> MPI.Op:
    def run(low: Any, high: Any, _: MPI.Datatype) -> None:
        add(np.frombuffer(low, np.int64), np.frombuffer(high, np.int64))

    return MPI.Op.Create(run, commute=False)


def _add_ranges(low: np.ndarray[Any, Any], high: np.ndarray[Any, Any]) -> None:
    """Add to ``high`` the ranges of ``low``, which are of lower ranks."""
    for a, b in zip(low.reshape(-1, _ROW), high.reshape(-1, _ROW)):
        (n, before), (m, after) = _told(a), _told(b)
        # behind ranges that were left out, none can be told
        if sum(end - start + 1 for start, end in before) == n:
            if before and after and before[-1][1] + 1 == after[0][0]:
                before[-1:], after = [(before[-1][0], after[0][1])], after[1:]
            before += after
        before = before[:_RANGES]
        b[:] = -1
        b[0] = n + m
        b[1 : 1 + 2 * len(before)] = [end for pair in before for end in pair]


def _add_counts(low: np.ndarray[Any, Any], high: np.ndarray[Any, Any]) -> None:
    """Add counts of digests to others; where they are too many, what all of them exceed is kept (Misra and Gries)."""
    counts: Counter[int] = Counter()
    for digest, n in [*low.reshape(-1, 2).tolist(), *high.reshape(-1, 2).tolist()]:
        counts[digest] += n
    often = sorted(((-n, digest) for digest, n in counts.items() if n))
    spare = -often[_SLOTS][0] if len(often) > _SLOTS else 0
    kept = [(digest, -n - spare) for n, digest in often[:_SLOTS] if -n > spare]
    high[:] = 0
    high[: 2 * len(kept)] = [x for pair in kept for x in pair]
