"""Reading ahead in a thread, in order or shuffled. For one process; nothing communicates."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

import torch

from mpishard.io.file.trust import check_memory

T = TypeVar("T")


def ahead(read: Callable[[int], T], numbers: range, most: int) -> Generator[T, None, None]:
    """Give what is read for each number, in order; a thread reads up to ``most`` ahead, until the iteration ends.

    Not collective. ``read`` must not raise.
    """
    ready: queue.Queue[T] = queue.Queue(most)
    stop = threading.Event()

    def work() -> None:
        for i in numbers:
            got = read(i)
            while not stop.is_set():
                try:
                    ready.put(got, timeout=0.1)
                    break
                except queue.Full:
                    pass
            if stop.is_set():
                return

    thread = threading.Thread(target=work, name="mpishard-read-ahead", daemon=True)
    thread.start()
    try:
        for _ in numbers:
            yield ready.get()
    finally:
        stop.set()
        thread.join()


def shuffled(n: int, seed: int) -> list[int]:
    """Return an order of ``n`` samples, the same wherever the seed is, any integer. Not collective.

    Raises
    ------
    FileError
        It does not fit into memory.
    """
    generator = torch.Generator().manual_seed(seed if -(1 << 63) <= seed < 1 << 64 else seed % (1 << 63))
    check_memory(64 * n, "Loader: the order of the samples")
    return torch.randperm(n, generator=generator, device="cpu").tolist()  # type: ignore[no-any-return]
