"""Whether MPI may be given addresses of GPU memory: found at run time, agreed by all ranks.

There is no portable question with a portable answer, and a wrong yes is a crash. So several sources are
asked in order; the first that knows decides, and where none does, messages go through pinned host memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI

from mpishard.comm import guard
from mpishard.comm.environment import switch
from mpishard.comm.loaded import mpi_libraries
from mpishard.errors import MeshError, MpishardError

OVERRIDE = "MPISHARD_GPU_AWARE"

# (text in the library's version, variable, what its value 0 and its value 1 say)
_VARIABLES = (
    ("CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED", "no", "yes"),
    ("MVAPICH", "MV2_USE_CUDA", "no", "yes"),
    ("MVAPICH", "MVP_USE_CUDA", "no", "yes"),
    ("MPICH", "MPIR_CVAR_ENABLE_GPU", "no", "maybe"),
    ("Open MPI", "OMPI_MCA_opal_cuda_support", "no", "maybe"),
    ("Open MPI", "OMPI_MCA_mpi_cuda_support", "no", "maybe"),
)


class Finding(NamedTuple):
    """What one source says: ``"yes"``, ``"no"``, ``"maybe"`` or ``"nothing"``, and in what words."""

    source: str
    says: str
    detail: str


def findings() -> list[Finding]:
    """Ask every source, the most reliable first. Not collective.

    Raises
    ------
    MeshError
        ``MPISHARD_GPU_AWARE`` is neither 0 nor 1.
    """
    library = MPI.Get_library_version().splitlines()[0].rstrip("\0")
    return [_override(), _alloc_kinds(), *_variables(library, os.environ), _query()]


def decide(found: Sequence[Finding]) -> tuple[bool, str]:
    """Return whether MPI may be given device memory, and why. Not collective.

    Examples
    --------
    >>> decide([Finding("MPIX_Query_cuda_support", "maybe", "it says 1")])
    (False, "no source is sure (MPIX_Query_cuda_support: it says 1); ...")
    """
    for finding in found:
        if finding.says in ("yes", "no"):
            return finding.says == "yes", f"{finding.source}: {finding.detail}"
    maybe = "; ".join(f"{f.source}: {f.detail}" for f in found if f.says == "maybe")
    return False, (
        f"no source is sure ({maybe or 'none says anything'}); if `mpishard info` finds that it works, set {OVERRIDE}=1"
    )


def agreed(comm: MPI.Intracomm, device: torch.device) -> bool:
    """Return whether messages of all ranks may go from device to device: each has a GPU and says yes.

    Collective.

    Raises
    ------
    MeshError
        On every rank, where some compute on a GPU and others do not: their messages are not alike.
    """
    with guard.waiting("gpu_aware", (), comm):
        gpus = comm.allreduce(int(device.type == "cuda"))
    if not gpus:
        return False
    if gpus < comm.Get_size():
        raise MeshError(
            "a mesh of ranks with and without a GPU",
            expected="one on every rank, or on none",
            got=f"one on {gpus} of {comm.Get_size()} ranks",
            fix="pass device='cpu' on all ranks, or start ranks on nodes with GPUs only",
        )
    aware, error = False, None
    try:
        aware, _ = decide(findings())
    except MpishardError as e:
        error = e
    guard.agree(comm, error, "")
    with guard.waiting("gpu_aware", (), comm):
        return bool(comm.allreduce(aware, MPI.LAND))


def _override() -> Finding:
    says = {None: "nothing", False: "no", True: "yes"}[switch(OVERRIDE)]
    return Finding(OVERRIDE, says, f"it is {os.environ.get(OVERRIDE) or 'not set'}")


def _alloc_kinds() -> Finding:
    # section 12.4.3 of MPI 4.1
    info = MPI.COMM_WORLD.Get_info()
    try:
        kinds = info.Get("mpi_memory_alloc_kinds")
    finally:
        info.Free()
    if kinds is None:
        return Finding("mpi_memory_alloc_kinds", "nothing", "this MPI library does not have it")
    return Finding("mpi_memory_alloc_kinds", "yes" if "cuda" in kinds.split(",") else "nothing", f"it is {kinds!r}")


def _variables(library: str, environment: Mapping[str, str]) -> list[Finding]:
    found = []
    for text, name, off, on in _VARIABLES:
        value = environment.get(name, "").lower()
        if text in library and value:
            says = off if value in ("0", "false", "no") else on
            found.append(Finding(name, says, f"it is {value}"))
    return found


def _query() -> Finding:
    name = "MPIX_Query_cuda_support"
    function = None
    for library in mpi_libraries():
        function = getattr(ctypes.CDLL(library), name, None)
        if function is not None:
            break
    if function is None:
        return Finding(name, "nothing", "this MPI library does not have it")
    function.restype = ctypes.c_int
    # a library that was built for GPUs says yes also where it finds none
    return Finding(name, "maybe", "it says 1") if function() else Finding(name, "no", "it says 0")
