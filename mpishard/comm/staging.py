"""Reductions of tensors in a GPU's memory through pinned host memory, in pieces.

While MPI reduces one piece, the next one comes down from the device and the last one goes up. MPI never sees
the device's memory: libraries that take it copy through pageable memory of their own, or crash.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mpishard.comm.driver import Driver

PIECE_NBYTES = 4 << 20


def reduced(x: Tensor, driver: Driver, reduce: Callable[[Tensor], None]) -> Tensor:
    """Return a contiguous tensor after ``reduce`` has changed every piece of it in place.

    Collective, if ``reduce`` is.

    Parameters
    ----------
    x
        Contiguous, in the memory of the driver's device; stays as it is.
    driver
        The device.
    reduce
        Called with the pieces in order: 1-D tensors in host memory.

    Returns
    -------
    torch.Tensor
        On the device, complete in the order of the current stream.
    """
    result = torch.empty_like(x)
    source, target = _bytes(x), _bytes(result)
    host = driver.pinned(x.nbytes)
    step = max(1, PIECE_NBYTES // x.itemsize) * x.itemsize
    spans = [(a, min(a + step, x.nbytes)) for a in range(0, x.nbytes, step)]
    marks = []
    for a, b in spans:
        driver.download(host[a:b], source[a:b])
        marks.append(driver.mark())
    for (a, b), mark in zip(spans, marks):
        driver.wait(mark)
        piece = host[a:b]
        driver.lend([], [piece])
        reduce(piece.view(x.dtype))
        driver.take_back([], [piece])
        driver.upload(target[a:b], piece)
    return result


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
