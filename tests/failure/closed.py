"""A file that cannot be written from its Nth write on, closed, and what was open in it let go: each in a process.

    python closed.py SEED CASES

Prints the cases whose process did not end by itself.
"""

import errno
import gc
import io
import os
import random
import sys

import h5py
import numpy as np

from mpishard.io.file.close import shut
from mpishard.io.file.open import LIBVER


class Disk(io.BytesIO):
    """A file of h5py's driver of Python objects."""

    def __init__(self, count, failing):
        super().__init__()
        self.left, self.failing = count, failing

    def _do(self, what):
        self.left -= what in self.failing
        if self.left < 0:
            raise OSError(errno.ENOSPC, f"no room to {what}")

    def write(self, data):
        self._do("write")
        return super().write(data)

    def truncate(self, size=None):
        self._do("truncate")
        return super().truncate(size)

    def flush(self):
        self._do("flush")


def program(disk, chunks, make_room):
    held = []
    try:
        file = h5py.File(disk, "w", libver=LIBVER)
    except OSError:
        return
    try:
        for name in "ab":
            held.append(file.create_dataset(name, (4, 300), "f8", chunks=chunks))
            held[-1][1] = np.ones(300)
            held[-1].attrs["of a page"] = np.arange(1000)
        file.flush()
        held[0][2] = 3
    except (OSError, RuntimeError, ValueError) as e:
        held.append(e)  # with the frames of h5py
    shut(file, make_room)
    del file
    held.clear()
    gc.collect()


seed, cases = map(int, sys.argv[1:])
draw = random.Random(seed)
for _ in range(cases):
    failing = draw.choice([("write", "truncate", "flush"), ("write",), ("truncate",), ("flush",)])
    count = draw.randrange(30 if "write" in failing else 6)
    chunks, roomy = draw.choice([None, (2, 100)]), draw.random() < 0.5
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        disk = Disk(count, failing)
        program(disk, chunks, lambda disk=disk, roomy=roomy: roomy and setattr(disk, "left", 10**9))
        sys.exit()
    if status := os.waitpid(child, 0)[1]:
        print(failing, count, chunks, roomy, "ended with", status, flush=True)
