"""Shared libraries that this process has loaded, and which MPI is among them."""

from __future__ import annotations

import re

from mpi4py import MPI

# 4.1 has faults of its own
IS_OPEN_MPI = "Open MPI" in MPI.Get_library_version()

# its bindings of C++ and Fortran are libraries beside it
_MPI = r"lib(p?mpi|mpich|mpi_abi|mpi_cray|mpi_gnu\w*)([-.]\w+)*?\.so(\.\d+)*"


def libraries(name: str) -> list[str]:
    """Return the paths of those whose file name matches ``name``, ascending; none where the system does not tell.

    Not collective.
    """
    # libraries lie in folders called lib, or are called so
    lines = (line for line in _maps().splitlines() if "/lib" in line)
    paths = {line[line.find("/") :].removesuffix(" (deleted)") for line in lines}
    return sorted(path for path in paths if re.fullmatch(name, path.rpartition("/")[2]))


def mpi_libraries() -> list[str]:
    """Return the paths of the MPI libraries: one, unless something is wrong. Not collective."""
    return libraries(_MPI)


def _maps() -> str:
    try:
        with open("/proc/self/maps") as file:
            return file.read()
    except OSError:  # not Linux
        return ""
