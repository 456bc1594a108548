"""Halos of ghosted arrays along one dim: which cells come from which rank, and where they go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


class Strip(NamedTuple):
    """Cells of one array that travel together.

    ``peer`` is the other rank's position along the dim; ``side`` is 0 for the low and 1 for the high halo of
    the receiver; ``at`` is the first cell along the dim, in this rank's array.
    """

    peer: int
    side: int
    at: int
    count: int  # type: ignore[assignment]


class Strips(NamedTuple):
    """What one rank does along one dim; ``local`` are (source, destination, count) in its own array."""

    local: tuple[tuple[int, int, int], ...]
    sends: tuple[Strip, ...]
    recvs: tuple[Strip, ...]


def plan_strips(
    sizes: Sequence[int], lo: int | Sequence[int], hi: int | Sequence[int], periodic: bool, index: int
) -> Strips:
    """Plan the halo of width ``(lo, hi)`` along one dim for the rank at position ``index``.

    Not collective. ``sizes`` are the interior extents of all positions, ``lo`` and ``hi`` the widths of all of
    them, or of each; the halo may be wider than any interior. Cells beyond a non-periodic edge are in no strip.
    Sender and receiver list the strips of a (peer, side) in the same order.

    Examples
    --------
    >>> plan_strips((4, 3), 1, 0, False, 1)
    Strips(local=(), sends=(), recvs=(Strip(peer=0, side=0, at=0, count=1),))
    """
    borders = (0, *accumulate(sizes))
    los, his = ((w,) * len(sizes) if isinstance(w, int) else w for w in (lo, hi))
    local, sends, recvs = [], [], []
    for receiver, n in enumerate(sizes):
        start, stop = borders[receiver], borders[receiver + 1]
        below, above = los[receiver], his[receiver]
        for side, first, last, origin in ((0, start - below, start, 0), (1, stop, stop + above, below + n)):
            for owner, cell, offset, count in _sources(borders, first, last, periodic):
                src, dst = los[owner] + cell, origin + offset
                if owner == receiver == index:
                    local.append((src, dst, count))
                elif receiver == index:
                    recvs.append(Strip(owner, side, dst, count))
                elif owner == index:
                    sends.append(Strip(receiver, side, src, count))
    return Strips(tuple(local), tuple(sends), tuple(recvs))


def _sources(borders: Sequence[int], first: int, last: int, periodic: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield (owner, cell in its interior, offset from ``first``, count) of the global cells [first, last)."""
    extent = borders[-1]
    at, last = (first, last) if periodic else (max(first, 0), min(last, extent))
    while at < last:
        cell = at % extent
        owner = bisect_right(borders, cell) - 1
        count = min(last - at, borders[owner + 1] - cell)
        yield owner, cell - borders[owner], at - first, count
        at += count
