"""What a job promises before it computes, checked: `mpishard info --check`.

No rank but the first learns of all others: ranks compare by reductions of fixed length, and a rank that differs sends
its text.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpishard.comm import guard, threads
from mpishard.comm.device import gpu_aware
from mpishard.comm.info import PACKAGES, gpu_name, probe, told_ranks, version
from mpishard.comm.loaded import mpi_libraries
from mpishard.comm.mesh import CartMesh, init_mesh

# how many ranks a launcher says that there are
_TOLD = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_NRANKS")
# variables that every rank must have alike
_ALIKE = ("MPISHARD_", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "MPICH_", "MPIR_CVAR_", "NCCL_", "TORCH_")
_NBYTES = 1 << 20


class Finding(NamedTuple):
    """The outcome of one check: its state is ``"ok"``, ``"note"`` or ``"broken"``."""

    check: str
    state: str
    found: str
    advice: str = ""


class Report(NamedTuple):
    """All findings, on rank 0; and on every rank whether no promise is broken."""

    ok: bool
    findings: list[Finding]
    first: bool


def preflight(output: str = ".") -> Report:
    """Check the job. Collective over MPI_COMM_WORLD.

    Parameters
    ----------
    output
        The folder that the job will write to.

    Returns
    -------
    Report
        The findings on rank 0, and the verdict on all ranks.
    """
    comm = MPI.COMM_WORLD
    mesh = init_mesh(comm.size, comm=comm, device="cpu")
    of_versions = "install one environment for all nodes, or share it"
    of_environment = "export them before the launcher, not in a shell's own file"
    checks: tuple[Callable[[], Finding], ...] = (
        lambda: _size(comm, os.environ),
        lambda: _per_node(comm),
        lambda: _devices(comm),
        lambda: _threads(comm),
        lambda: _same(comm, "versions", versions(), of_versions),
        lambda: _same(comm, "environment", environment(os.environ), of_environment),
        lambda: _hdf5(comm),
        lambda: _gpu_aware(mesh),
        lambda: _writes(comm, output),
    )
    findings = []
    for check in checks:
        # a node that hangs, as in a file system, is found here too
        with guard.waiting("a check of the job", (), comm):
            findings.append(check())
    mesh.free()
    with guard.waiting("a check of the job", (), comm):
        ok = bool(comm.bcast(all(f.state != "broken" for f in findings)))
    return Report(ok, findings, comm.rank == 0)


def versions() -> dict[str, str]:
    """Return what this rank runs. Not collective."""
    found = {"Python": platform.python_version(), "MPI": MPI.Get_library_version().rstrip("\0\n ")}
    found |= {name: version(name) or "not installed" for name in PACKAGES}
    return found


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every rank must have alike. Not collective."""
    return {name: value for name, value in sorted(variables.items()) if name.startswith(_ALIKE)}


def _size(comm: MPI.Intracomm, variables: Mapping[str, str]) -> Finding:
    told = {name: count for name in _TOLD if (count := told_ranks(variables, name)) is not None}
    nodes = variables.get("PBS_NODEFILE", "")
    if comm.size == 1 and os.path.isfile(nodes):
        told["lines of PBS_NODEFILE"] = len(Path(nodes).read_text().splitlines())
    wrong = {name: count for name, count in told.items() if count != comm.size}
    if _anywhere(comm, bool(wrong)):
        said = ", ".join(f"{name}={count}" for name, count in wrong.items()) or "another number on another rank"
        return Finding(
            "ranks",
            "broken",
            f"MPI has {comm.size}, the launcher says {said}",
            "the launcher belongs to another MPI library, and starts single processes: use the mpiexec of the library "
            "that mpi4py loads, or srun --mpi= as it needs it (srun --mpi=list); or start all tasks",
        )
    return Finding("ranks", "ok", f"{comm.size}" + (f", as {', '.join(told)} says" if told else "; no launcher"))


def _per_node(comm: MPI.Intracomm) -> Finding:
    node = _node(comm)
    most, fewest = comm.allreduce(node.size, MPI.MAX), comm.allreduce(node.size, MPI.MIN)
    nodes = comm.allreduce(int(node.rank == 0))
    node.Free()
    if most != fewest:
        advice = "give every node as many: --ntasks-per-node, --ppn; the slowest node decides"
        return Finding("ranks per node", "note", f"{fewest} to {most} on {nodes} nodes", advice)
    return Finding("ranks per node", "ok", f"{most} on {nodes} node{'s' * (nodes > 1)}")


def _devices(comm: MPI.Intracomm) -> Finding:
    # collective only over the node: nothing of P
    mesh = init_mesh(comm.size, comm=comm)
    device = mesh.device
    mesh.free()
    have = comm.allreduce(int(device.type == "cuda"))
    if have == 0:
        return Finding("devices", "ok", "no GPU that torch can use: all compute on the CPU")
    if have < comm.size:
        advice = "start ranks on nodes with GPUs only, or pass device='cpu'"
        return Finding("devices", "broken", f"{have} of {comm.size} ranks have a GPU", advice)
    node = _node(comm)
    names = node.allgather(gpu_name(device))
    node.Free()
    shared = comm.allreduce(max(names.count(name) for name in names), MPI.MAX)
    if shared > 1:
        advice = (
            "one rank per GPU (--ntasks-per-node), and --gpu-bind=none: each takes the GPU of its place on the node"
        )
        return Finding("devices", "broken", f"up to {shared} ranks share a GPU, and take turns", advice)
    return Finding("devices", "ok", f"a GPU of its own for every rank; rank 0: {names[0]}")


def _threads(comm: MPI.Intracomm) -> Finding:
    found = threads.cores()
    worst = comm.allreduce(found.threads - found.own, MPI.MAX)
    if worst > 0:
        advice = "set OMP_NUM_THREADS to the cores of a rank, and bind that many: --cpus-per-task, --cpu-bind=cores"
        return Finding("threads", "broken", f"a rank has {worst} threads more than cores", advice)
    crowded = comm.allreduce(found.threads_of_node - found.of_node, MPI.MAX)
    if crowded > 0:
        advice = "set OMP_NUM_THREADS, or bind ranks to cores of their own; `mpishard run` shares them"
        return Finding("threads", "note", f"a node has {crowded} threads more than cores", advice)
    return Finding("threads", "ok", f"{found.threads} on {found.own} cores of rank 0")


def _same(comm: MPI.Intracomm, check: str, mine: dict[str, str], advice: str) -> Finding:
    """Compare texts of all ranks by their hash; the first rank that differs sends its own."""
    text = "\n".join(f"{name}={value}" for name, value in mine.items())
    digest = np.frombuffer(hashlib.sha256(text.encode(errors="replace")).digest(), np.uint8)
    of_first = digest.copy()
    comm.Bcast(of_first)
    other = comm.allreduce(comm.rank if (of_first != digest).any() else comm.size, MPI.MIN)
    if other == comm.size:
        return Finding(check, "ok", f"the same on all ranks ({len(mine)} compared)")
    if comm.rank == other:
        comm.send(mine, 0)
    found = ""
    if comm.rank == 0:
        theirs: dict[str, str] = comm.recv(source=other)
        found = "; ".join(
            f"{name}: {mine.get(name, 'not set')!r} on rank 0, {theirs.get(name, 'not set')!r} on rank {other}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        )
    return Finding(check, "broken", found, advice)


def _hdf5(comm: MPI.Intracomm) -> Finding:
    advice = "build h5py with the MPI library of mpi4py: HDF5_MPI=ON CC=mpicc pip install --no-binary=h5py h5py"
    found, broken = "not installed: no files", False
    try:
        import h5py
    except ModuleNotFoundError:
        pass
    except ImportError as error:
        found, broken = f"h5py cannot be loaded: {error}", True
    else:
        libraries = mpi_libraries()
        parallel = h5py.get_config().mpi
        found = (
            "parallel: all ranks write one file"
            if parallel
            else "serial: ranks write files of their own, and join them"
        )
        if len(libraries) > 1:
            found, broken = f"h5py and mpi4py load different MPI libraries: {', '.join(libraries)}", True
    if _anywhere(comm, broken):
        return Finding("HDF5", "broken", found if broken else "not on all ranks of one build", advice)
    return Finding("HDF5", "ok", found)


def _gpu_aware(mesh: CartMesh) -> Finding:
    library = " ".join(MPI.Get_library_version().splitlines()[0].rstrip("\0").split())
    device = init_mesh(mesh.size, comm=mesh.comm)
    have = device.comm.allreduce(int(device.device.type == "cuda"))
    finding = Finding("MPI", "ok", f"{library}; messages are host memory's")
    if have == mesh.size and device.gpu_aware:
        if probe(device):
            finding = Finding("MPI", "ok", f"{library}; tried: it sends from GPU to GPU")
        else:
            advice = f"set {gpu_aware.OVERRIDE}=0, and messages go through host memory"
            finding = Finding("MPI", "broken", f"{library} claims to send GPU memory, and gives wrong values", advice)
    elif have == mesh.size:
        finding = Finding("MPI", "note", f"{library}; messages go through pinned host memory", "see docs/gpu.md")
    device.free()
    return finding


def _writes(comm: MPI.Intracomm, output: str) -> Finding:
    """Write, read and remove a file on every node; and look whether all nodes see the folder of rank 0."""
    folder, error = Path(output), ""
    made: list[Path] = []  # the deepest first
    token = comm.bcast(uuid.uuid4().hex)
    node = _node(comm)
    shared = folder / f".mpishard-{token}"
    try:
        if comm.rank == 0:
            made += [f for f in (folder, *folder.parents) if not f.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            _write(shared)
    except OSError as e:
        error = _said(e)
    comm.Barrier()
    try:
        if node.rank == 0 and comm.rank and not error:
            own = folder / f".mpishard-{token}-{comm.rank}"
            _write(own)
            own.unlink()
            if not shared.exists():
                error = "a node does not see the file of rank 0: it is another folder there"
    except OSError as e:
        error = _said(e)
    node.Free()
    first = comm.allreduce(comm.rank if error else comm.size, MPI.MIN)
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            shared.unlink(missing_ok=True)
        for each in made:  # a check leaves nothing behind
            with contextlib.suppress(OSError):
                each.rmdir()
    if first == comm.size:
        return Finding("output folder", "ok", f"{folder.absolute()}: every node writes, reads and removes")
    error = comm.bcast(error, root=first)
    advice = "name a folder on a file system that all nodes share, with room, that you may write to: --output DIR"
    return Finding("output folder", "broken", f"rank {first}: {folder.absolute()}: {error}", advice)


def _node(comm: MPI.Intracomm) -> MPI.Intracomm:
    node: MPI.Intracomm = comm.Split_type(MPI.COMM_TYPE_SHARED)  # type: ignore[assignment]
    return node


def _write(path: Path) -> None:
    data = os.urandom(_NBYTES)
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.read_bytes() != data:
            raise OSError("what was read is not what was written")
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def _said(error: OSError) -> str:
    return error.strerror or str(error)


def _anywhere(comm: MPI.Intracomm, flag: bool) -> bool:
    return bool(comm.allreduce(flag, MPI.LOR))
