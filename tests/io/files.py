"""What the tests of files share."""

from __future__ import annotations

import h5py
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.io.backend.choice import mpio_obstacle

WORLD = MPI.COMM_WORLD
BACKENDS = ["root", "virtual", *([] if mpio_obstacle() else ["mpio"])]


def values(shape, dtype=torch.float32):
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if dtype.is_complex:
        return torch.complex(x.double(), -x.double()).to(dtype)
    return (x % 2 == 1) if dtype == torch.bool else (x % 100).to(dtype)


def store(path, **datasets):
    """Write on rank 0; every rank may read afterwards."""
    if WORLD.rank == 0:
        with h5py.File(path, "w") as f:
            for name, (array, options) in datasets.items():
                f.create_dataset(name, data=array, **options)
    WORLD.Barrier()


def block(x, full):
    """Return the cells of ``full`` that this rank holds of ``x``."""
    return full[tuple(slice(lo, hi) for lo, hi in x.layout.box(x.mesh.coords))]


def same_on_all(error):
    texts = WORLD.allgather(f"{type(error.value).__name__}: {error.value}")
    assert len(set(texts)) == 1
    return texts[0]


def sharded(full, mesh, placements=None, sizes=None):
    return ms.distribute_tensor(full, mesh, placements or (ms.Shard(0), ms.Shard(1)), sizes=sizes)
