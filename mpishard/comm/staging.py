"""Collectives on tensors in a GPU's memory through pinned host memory, in pieces.

While MPI moves one piece, the next ones come down from the device and the last one goes up. MPI never sees the
device's memory: libraries that take it copy through pageable memory of their own, or crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mpishard.comm import buffer
from mpishard.comm.buffer import byte_view
from mpishard.comm.driver import Driver

PIECE_NBYTES = 4 << 20
_DEPTH = 3  # pieces in pinned memory: one comes down, one travels, one goes up

# what one piece reads or writes on the device: (start, stop) in bytes
Spans = Sequence[tuple[int, int]]


def through_host(
    driver: Driver,
    source: Tensor,
    sends: Sequence[Spans],
    target: Tensor,
    recvs: Sequence[Spans],
    move: Callable[[int, Tensor, Tensor], None],
) -> None:
    """Run a collective piece by piece, from device memory to device memory.

    Collective, if ``move`` is.

    Parameters
    ----------
    driver
        The device.
    source, target
        Contiguous, in its memory; they may be the same.
    sends, recvs
        Per piece, what it reads of the source and writes of the target; equally many on every rank.
    move
        ``move(k, here, there)`` runs piece ``k``: ``here`` are its bytes of the source, one span after the other
        in pinned host memory, and ``there`` those of the target, to be filled.
    """
    driver.check()
    outgoing, incoming = byte_view(source), byte_view(target)
    depth = min(_DEPTH, len(sends))
    slots = [[driver.pinned(max(map(_nbytes, side), default=0)) for side in (sends, recvs)] for _ in range(depth)]
    marks = {}

    def download(k: int) -> None:
        at = 0
        for a, b in sends[k]:
            driver.download(slots[k % depth][0][at : at + b - a], outgoing[a:b])
            at += b - a
        # behind the upload that used this slot's other half before, too
        marks[k] = driver.mark()

    for k in range(depth):
        download(k)
    for k in range(len(sends)):
        driver.wait(marks.pop(k))
        here, there = (host[: _nbytes(side[k])] for host, side in zip(slots[k % depth], (sends, recvs)))
        driver.lend([here], [there])
        move(k, here, there)
        driver.take_back([here], [there])
        at = 0
        for a, b in recvs[k]:
            driver.upload(incoming[a:b], there[at : at + b - a])
            at += b - a
        if k + depth < len(sends):
            download(k + depth)


def cut(nbytes: int, itemsize: int = 1) -> list[Spans]:
    """Cut a tensor of ``nbytes`` into pieces of one span each. Not collective."""
    step = _step(1, itemsize)
    return [((a, min(a + step, nbytes)),) for a in range(0, nbytes, step)]


def cut_blocks(blocks: Sequence[int], itemsize: int = 1) -> list[Spans]:
    """Cut blocks that lie one after the other into pieces that hold a span of every block. Not collective.

    Parameters
    ----------
    blocks
        Their lengths in bytes.
    itemsize
        What no span cuts through.

    Examples
    --------
    >>> cut_blocks([4, 8])
    [((0, 4), (4, 12))]
    """
    step = _step(len(blocks), itemsize)
    borders = buffer.spans(blocks)
    return [tuple((min(lo + a, hi), min(lo + a + step, hi)) for lo, hi in borders) for a in range(0, max(blocks), step)]


def _step(blocks: int, itemsize: int) -> int:
    return max(1, min(PIECE_NBYTES, buffer.MESSAGE_NBYTES) // (blocks * itemsize)) * itemsize


def _nbytes(spans: Spans) -> int:
    return sum(b - a for a, b in spans)
