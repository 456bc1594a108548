"""What mps_step costs above a hook's call in Python, with a model that does nothing.

mpiexec -n 2 python benchmarks/embedding.py

Both in one process, in turns: this program is the host, and calls libmpishard as one in C would, by ctypes, which
costs a microsecond or so of its own.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from mpi4py import MPI
from timing import WORLD, interleaved, options, ratio, say

import mpishard as ms
from mpishard.insitu.build import build


def nothing(_u: ms.ShardTensor) -> None:
    """Be a model that does nothing."""


def built(folder: str) -> ctypes.CDLL:
    """Compile the library by the wrapper of this Python's MPI, on rank 0."""
    if WORLD.rank == 0:
        own = Path(sys.executable).with_name("mpicc")
        build(folder, str(own) if own.exists() else None, "no Fortran")
    library = ctypes.CDLL(f"{WORLD.bcast(folder)}/lib/libmpishard.so")
    WORLD.Barrier()
    return library


def numbers(*values: int) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


def main() -> None:
    args = options(__doc__)
    side = 64
    with tempfile.TemporaryDirectory() as folder:
        lib = built(folder)
    lib.mps_error.restype = ctypes.c_char_p
    sim, field, hook = (ctypes.c_void_p() for _ in range(3))

    def checked(status: int) -> None:
        if status:
            raise SystemExit(lib.mps_error().decode())

    # some MPIs have integers as handles, some pointers
    comm = (ctypes.c_void_p if MPI._sizeof(MPI.Comm) == 8 else ctypes.c_int)(MPI._handleof(WORLD))  # type: ignore[attr-defined]
    shape, grid, own = numbers(side * WORLD.size, side), (ctypes.c_int * 2)(WORLD.size, 1), numbers(side + 2, side + 2)
    array = np.zeros((side + 2, side + 2))
    checked(lib.mps_adopt(comm, 2, shape, grid, None, None, ctypes.byref(sim)))
    data, float64 = ctypes.c_void_p(array.ctypes.data), 12
    checked(lib.mps_field(sim, b"u", float64, data, 2, None, own, numbers(1, 1), None, ctypes.byref(field)))
    model = f"{Path(__file__).resolve()}:nothing".encode()
    checked(lib.mps_hook(sim, model, 1, ctypes.byref(field), 0, None, 1, 0, ctypes.byref(hook)))

    python = ms.insitu.adopt(WORLD, (side * WORLD.size, side), 1, grid=(WORLD.size, 1))
    python.field("u", array.copy())
    times = interleaved(
        {"mps_step": lambda: checked(lib.mps_step(hook)), "hook": python.hook(nothing, ["u"])},
        10 if args.quick else 2000,
        args.rounds,
    )
    us = {name: statistics.median(t) * 1e6 for name, t in times.items()}
    above = statistics.median(a - b for a, b in zip(times["mps_step"], times["hook"])) * 1e6
    say(
        f"empty hook: in Python {us['hook']:.1f} us, by mps_step {us['mps_step']:.1f} us: "
        f"{above:.1f} us above, ratio {ratio(times, 'mps_step', 'hook'):.2f}"
    )
    checked(lib.mps_release(ctypes.byref(sim)))
    python.release()


if __name__ == "__main__":
    main()
