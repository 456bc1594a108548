"""What this job runs on, as `mpishard info` prints it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from mpi4py import MPI

from mpishard.comm import guard
from mpishard.comm.device import gpu_aware
from mpishard.comm.memory.buffer import as_bytes
from mpishard.comm.mesh import CartMesh, init_mesh
from mpishard.comm.transport import nccl
from mpishard.comm.transport.choice import transport_of

PACKAGES = ("mpishard", "torch", "mpi4py", "numpy", "h5py", "cupy", "cupy-cuda12x", "cupy-cuda13x")
_PROBE_NBYTES = (8, 1 << 20)


def survey(say: Callable[[str], object]) -> None:
    """Describe the job, line by line, on rank 0; where there are GPUs, try them.

    Collective over all ranks of the program.

    Parameters
    ----------
    say
        Called with every line.
    """
    comm = MPI.COMM_WORLD
    first = comm.rank == 0

    def tell(line: str = "") -> None:
        if first:
            say(line)

    versions = {name: version(name) for name in PACKAGES}
    tell(f"Python {platform.python_version()}, " + ", ".join(f"{k} {v}" for k, v in versions.items() if v))
    tell(f"MPI: {MPI.Get_library_version().splitlines()[0].rstrip(chr(0))}, standard {MPI.VERSION}.{MPI.SUBVERSION}")
    _warn_of_singletons(tell)
    mesh = init_mesh(comm.size)
    with guard.waiting("mpishard info", (), comm):
        places = comm.gather(_place(mesh))
    if places is not None:
        hosts = Counter(host for host, *_ in places)
        tell(f"{comm.size} ranks on {len(hosts)} host(s), at most {max(hosts.values())} on one")
        for rank, (host, local_rank, device, gpu) in enumerate(places):
            tell(f"  rank {rank}: {host}, local rank {local_rank}, {device}{gpu and ', ' + gpu}")
        shared = Counter((host, gpu) for host, _, _, gpu in places if gpu)
        if shared and max(shared.values()) > 1:
            tell(f"  up to {max(shared.values())} ranks share a GPU: they take turns, unless CUDA MPS runs")
    with guard.waiting("mpishard info", (), comm):
        _tell_route(mesh, tell)
    mesh.free()


def described_job() -> dict[str, Any] | None:
    """Return on rank 0 what `survey` tells, without trying GPUs, as data. Collective over all ranks of the program."""
    mesh = init_mesh(MPI.COMM_WORLD.size)
    with guard.waiting("mpishard info", (), MPI.COMM_WORLD):
        places = MPI.COMM_WORLD.gather(_place(mesh))
    mesh.free()
    if places is None:
        return None
    names = ("host", "local_rank", "device", "gpu")
    return {
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := version(name))},
        "mpi": MPI.Get_library_version().splitlines()[0].rstrip(chr(0)),
        "size": MPI.COMM_WORLD.size,
        "ranks": [dict(zip(names, place)) for place in places],
        "gpu_aware": [finding._asdict() for finding in gpu_aware.findings()],
    }


def _place(mesh: CartMesh) -> tuple[str, int, str, str]:
    return socket.gethostname(), mesh.local_rank, str(mesh.device), gpu_name(mesh.device)


def _tell_route(mesh: CartMesh, tell: Callable[[str], None]) -> None:
    tell("May MPI be given GPU memory?")
    found = gpu_aware.findings()
    for finding in found:
        tell(f"  {finding.source}: {finding.says} ({finding.detail})")
    _, reason = gpu_aware.decide(found)
    # all ranks leave here, or none: what follows is collective
    have = mesh.comm.allreduce(int(mesh.device.type == "cuda"))
    if have < mesh.size:
        tell(f"  {have} of {mesh.size} ranks have a GPU that torch can use: messages are host memory's")
        return
    tell(f"  messages go {'from GPU to GPU' if mesh.gpu_aware else 'through pinned host memory'}; {reason}")
    if mesh.comm.allreduce(mesh.gpu_aware or any(f.says == "maybe" for f in found), MPI.LOR):
        tell("  trying it; if the job crashes now, the answer is no: set MPISHARD_GPU_AWARE=0")
        works = probe(mesh)
        tell(f"  it {'works' if works else 'gives wrong values: set MPISHARD_GPU_AWARE=0'}")
    link = nccl.connect(mesh.group((0,)), mesh.device) if mesh.size > 1 else None
    tell(
        f"NCCL: {'serves large collectives' if link else 'not used (needs cupy, and a GPU of its own for every rank)'}"
    )
    driver = transport_of(mesh.group((0,)), mesh.device).driver
    packs = (
        "one kernel" if driver is not None and driver.has_kernel else "torch, box by box (install cupy for one kernel)"
    )
    tell(f"Strips are packed by {packs}")


def probe(mesh: CartMesh) -> bool:
    """Send device memory to the next rank and compare what comes. Collective."""
    driver = transport_of(mesh.group((0,)), mesh.device).driver
    assert driver is not None
    right = True
    for nbytes in _PROBE_NBYTES:
        source, target = driver.allocate(nbytes), driver.allocate(nbytes)
        pattern = torch.arange(nbytes, device=mesh.device) % 251
        source.tensor.copy_((pattern + mesh.rank) % 256)
        target.tensor.zero_()
        driver.wait(driver.mark())
        to, of = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
        mesh.comm.Sendrecv(as_bytes(source.tensor), to, 0, as_bytes(target.tensor), of, 0)
        right &= bool(((pattern + of) % 256 == target.tensor).all())
        source.free()
        target.free()
    return bool(mesh.comm.allreduce(right, MPI.LAND))


def _warn_of_singletons(tell: Callable[[str], None]) -> None:
    told = told_ranks(os.environ, "SLURM_NTASKS") or 1
    if MPI.COMM_WORLD.size == 1 and told > 1:
        tell(f"  WARNING: Slurm started {told} tasks, and MPI sees one rank: the launcher is another MPI library's")


def told_ranks(variables: Mapping[str, str], name: str) -> int | None:
    """Return how many ranks a launcher's variable tells of; None where it is not set, or no number. Not collective."""
    text = variables.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def gpu_name(device: torch.device) -> str:
    """Return what tells a GPU from all others, nothing for the CPU. Not collective."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.total_memory >> 20} MiB, {getattr(properties, 'uuid', device.index)})"


def version(package: str) -> str:
    """Return the version of a package, nothing where it is not installed. Not collective."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
