"""Run by libmpishard in the Python that it has started, or found running: opens the door through which it calls.

Not a part of the package: what happens here comes before its import, and that of mpi4py. ``DOOR`` is given.
"""

import ctypes
import importlib.util
import os
import re
import sys
from pathlib import Path


class Door(ctypes.Structure):
    """The twin of ``door`` in python.c."""

    _fields_ = [
        ("version", ctypes.c_int64),
        ("embedded", ctypes.c_int64),
        ("call", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_char_p)),
        ("text", ctypes.c_char * 1024),
    ]


def is_loaded(library: bytes) -> bool:
    """Tell whether a shared library is in this process, without loading it."""
    try:
        ctypes.CDLL(library.decode(), os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def require_one_mpi(host: str) -> None:
    """Raise where mpi4py was built for another MPI than the host's: with handles of the one, the other would crash."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        # MPI is the host's: its start, its end, and what it does at an error
        mpi4py.rc(initialize=False, finalize=False, errors="default")
    spec = importlib.util.find_spec("mpi4py.MPI")
    assert spec is not None
    assert spec.origin is not None
    needed = sorted(set(re.findall(rb"lib\w*mpi\w*\.so\.\d+", Path(spec.origin).read_bytes())))
    found = f"one that needs {b' or '.join(needed).decode()}, in {sys.executable}"
    if any(map(is_loaded, needed)):
        from mpi4py import MPI

        if MPI.Is_initialized() and MPI.Get_library_version().startswith(host):
            return
        found = MPI.Get_library_version()
    raise ImportError(
        "mpi4py is built on another MPI than the host\n"
        f"  expected: an mpi4py on {host[:200]!r}\n"
        f"  got:      {found[:200].strip()}\n"
        "  fix:      name a Python with such an mpi4py in MPISHARD_PYTHON, or install one:\n"
        "            pip install --no-binary mpi4py mpi4py"
    )


door = Door.from_address(globals()["DOOR"])
if door.version != 2:
    raise ImportError("libmpishard is of another version: mpishard config --build compiles it anew")
require_one_mpi(door.text.decode(errors="ignore").strip())
hook = sys.excepthook

from mpishard.insitu.host import open_door  # noqa: E402

if door.embedded:
    sys.excepthook = hook  # ours ends the job at an error
    # what a model prints appears when it does: nobody flushes at the end
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
open_door(door)
