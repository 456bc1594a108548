"""What mps_step costs above a hook's call in Python, with a model that does nothing.

Both in one process, in turns: this program is the host, and calls libmpishard as one in C would, by ctypes, which
costs a microsecond or so of its own.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpishard as ms
from benchmarks.harness.measure import WORLD, Bench, Unfit
from mpishard.errors import MpishardError
from mpishard.insitu.build import build


def nothing(_u: ms.ShardTensor) -> None:
    """Be a model that does nothing."""


def built(folder: Path) -> ctypes.CDLL:
    """Compile the library by the wrapper of this Python's MPI, on rank 0."""
    error = ""
    if WORLD.rank == 0:
        own = Path(sys.executable).with_name("mpicc")
        try:
            build(str(folder), str(own) if own.exists() else None, "no Fortran")
        except MpishardError as e:
            error = str(e).split("\n", 1)[0]
    if error := WORLD.bcast(error):
        raise Unfit(error)
    return ctypes.CDLL(f"{folder}/lib/libmpishard.so")


def numbers(*values: int) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


def run(bench: Bench) -> None:
    """Compare an empty hook by both ways."""
    side = 64
    lib = built(bench.folder)
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
    bench.compare(
        "empty hook",
        {"hook": python.hook(nothing, ["u"]), "mps_step": lambda: checked(lib.mps_step(hook))},
        floor="hook",
        count=10 if bench.quick else 2000,
    )
    checked(lib.mps_release(ctypes.byref(sim)))
    python.release()
