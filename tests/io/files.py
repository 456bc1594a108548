"""What the tests of files share."""

from __future__ import annotations

import traceback
import warnings

import h5py
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.errors import MpishardError
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


def on_root(f):
    """Run ``f`` on rank 0; every rank goes on afterwards, or fails with it."""
    WORLD.Barrier()
    error = None
    if WORLD.rank == 0:
        try:
            f()
        except Exception:  # noqa: BLE001
            error = traceback.format_exc()
    error = WORLD.bcast(error)
    assert error is None, error


def block(x, full):
    """Return the cells of ``full`` that this rank holds of ``x``."""
    return full[tuple(slice(lo, hi) for lo, hi in x.sharding.box(x.mesh.coords))]


def same_on_all(error):
    texts = WORLD.allgather(f"{type(error.value).__name__}: {error.value}")
    assert len(set(texts)) == 1
    return texts[0]


def outcome(call):
    """Return the value of a call, or its error, which is the library's own and the same on every rank."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value, error = call(), None
    except MpishardError as e:
        value, error = None, e
    told = WORLD.allgather(None if error is None else f"{type(error).__name__}: {error}")
    assert len(set(told)) == 1, told
    return value, error


def sharded(full, mesh, placements=None, sizes=None):
    return ms.distribute_tensor(full, mesh, placements or (ms.Shard(0), ms.Shard(1)), sizes=sizes)
