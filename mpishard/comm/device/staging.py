"""Collectives on tensors in a GPU's memory through pinned host memory, in pieces.

While MPI moves one piece, the next ones come down from the device and the last one goes up. MPI never sees the
device's memory: libraries that take it copy through pageable memory of their own, or crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mpishard.comm.device.driver import Driver
from mpishard.comm.memory import buffer
from mpishard.comm.memory.buffer import byte_view

PIECE_NBYTES = 4 << 20  # of all blocks together
LEAST_NBYTES = 64 << 10  # of one block, however many there are
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

    Raises
    ------
    UnsupportedOperationError
        A CUDA graph is being captured.
    """
    driver.check()
    outgoing, incoming = byte_view(source), byte_view(target)
    sends, recvs = ([_joined(spans) for spans in side] for side in (sends, recvs))
    sizes = [[sum(b - a for a, b in spans) for spans in side] for side in (sends, recvs)]
    depth = min(_DEPTH, len(sends))
    slots = [[driver.pinned(max(own)) for own in sizes] for _ in range(depth)]
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
        here, there = (host[: own[k]] for host, own in zip(slots[k % depth], sizes))
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
    return cut_blocks([nbytes], itemsize)


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
    borders, at = buffer.spans(blocks), 0
    pieces: list[Spans] = []
    while at < max(blocks):
        # many short spans would cost more than they overlap
        left, limit = sum(n > at for n in blocks), buffer.MESSAGE_NBYTES
        share = max(min(PIECE_NBYTES, limit) // left, min(LEAST_NBYTES, limit // left))
        step = max(1, share // itemsize) * itemsize
        pieces.append(tuple((min(lo + at, hi), min(lo + at + step, hi)) for lo, hi in borders))
        at += step
    return pieces


def of_block(pieces: Sequence[Spans], k: int) -> list[Spans]:
    """Return the spans of block ``k`` in every piece, counted from its own start. Not collective."""
    start = pieces[0][k][0]
    return [((a - start, b - start),) for a, b in (piece[k] for piece in pieces)]


def _joined(spans: Spans) -> Spans:
    """Return the spans that are not empty, those that follow each other as one."""
    joined: list[tuple[int, int]] = []
    for a, b in spans:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        elif b > a:
            joined.append((a, b))
    return joined
