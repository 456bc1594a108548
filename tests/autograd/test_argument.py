"""Arguments that are not what a call works on: an error of the package, on every rank, whatever was given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpishard as ms

WRONG = [None, 3, "text", [1, 2], {1: 2}, object(), torch.ones(2), np.ones(3), MPI.COMM_WORLD, torch.nn.Linear(1, 1)]
NO_MESH = {
    "distribute_tensor": lambda mesh: ms.distribute_tensor(torch.ones(4), mesh, (ms.Shard(0),)),
    "distribute_module": lambda mesh: ms.distribute_module(torch.nn.Linear(2, 2), mesh),
    "scatter_tensor": lambda mesh: ms.scatter_tensor(torch.ones(4), 0, mesh, (ms.Shard(0),)),
    "from_local": lambda mesh: ms.ShardTensor.from_local(torch.ones(4), mesh, (ms.Shard(0),)),
    "zeros": lambda mesh: ms.zeros(4, mesh=mesh, placements=(ms.Shard(0),)),
    "all_reduce": lambda mesh: ms.all_reduce(torch.ones(4), mesh),
    "all_gather": lambda mesh: ms.all_gather(torch.ones(4), mesh),
    "broadcast": lambda mesh: ms.broadcast(torch.ones(4), mesh),
    "reduce_scatter": lambda mesh: ms.reduce_scatter(torch.ones(4), mesh),
    "shift": lambda mesh: ms.shift(torch.ones(4), mesh, "x", 1),
    "send_recv": lambda mesh: ms.send_recv(torch.ones(4), mesh, dest=0, source=0),
    "read": lambda mesh: ms.io.read("none.h5", "u", mesh, (ms.Shard(0),)),
    "HaloExchanger": lambda mesh: ms.HaloExchanger(mesh, (4,), 1, torch.float32),
    "Pipeline": lambda mesh: ms.Pipeline([torch.nn.Linear(2, 2)], mesh, 0),
    "Dataset": lambda mesh: ms.io.Dataset("none.h5", "u", mesh, (ms.Shard(0),)),
}


@pytest.mark.parametrize("name", NO_MESH)
def test_no_mesh(name):
    for wrong in WRONG:
        with pytest.raises(ms.MeshError, match=f"{name}: mesh= (.|\n)* {type(wrong).__name__}\n"):
            NO_MESH[name](wrong)


def test_no_communicator():
    for wrong in WRONG:
        if wrong is not None and not isinstance(wrong, MPI.Comm):
            with pytest.raises(ms.MeshError, match=type(wrong).__name__):
                ms.init_mesh((-1,), ("x",), comm=wrong)


def test_other_arguments(tmp_path):
    mesh = ms.init_mesh((-1,), ("x",))
    x = ms.distribute_tensor(torch.ones(4 * mesh.size), mesh, (ms.Shard(0),))
    model = torch.nn.Linear(1, 1)
    calls = {
        "widths": lambda wrong: ms.halo_exchange(x, wrong),
        "x": lambda wrong: ms.halo_exchange(wrong, {0: 1}),
        "sizes": lambda wrong: ms.distribute_tensor(torch.ones(4), mesh, (ms.Shard(0),), sizes=wrong),
        "module": lambda wrong: ms.distribute_module(wrong, mesh),
        "tensors": lambda wrong: ms.io.write(tmp_path / "a.h5", wrong),
        "attrs": lambda wrong: ms.io.write(tmp_path / "a.h5", {"u": x}, attrs=wrong),
        "scales": lambda wrong: ms.io.write(tmp_path / "a.h5", {"u": x}, scales=wrong),
        "model": lambda wrong: ms.io.save_checkpoint(tmp_path, 1, model=wrong, mesh=mesh),
        "optimizer": lambda wrong: ms.io.save_checkpoint(tmp_path, 1, model=model, optimizer=wrong, mesh=mesh),
        "scheduler": lambda wrong: ms.io.load_checkpoint(tmp_path, model=model, scheduler=wrong, mesh=mesh),
    }
    for argument, call in calls.items():
        for wrong in ("text", [1, 2], object(), 3):
            with pytest.raises(ms.LayoutError, match=f"{argument}= is of another kind"):
                call(wrong)
    assert not list(tmp_path.iterdir())
    mesh.free()


def test_dims_and_ranks_that_are_no_integers():
    mesh = ms.init_mesh((-1,), ("x",))
    x = torch.ones(mesh.size)
    for wrong in ("a", None, 0.5, 0.0):
        calls = {
            "no such root": lambda wrong=wrong: ms.broadcast(x, mesh, root=wrong),
            "all_gather: no such dim": lambda wrong=wrong: ms.all_gather(x, mesh, dim=wrong),
            "reduce_scatter: no such dim": lambda wrong=wrong: ms.reduce_scatter(x, mesh, dim=wrong),
            "all_to_all: no such dim": lambda wrong=wrong: ms.all_to_all(x, mesh, split_dim=0, concat_dim=wrong),
            "no such source rank": lambda wrong=wrong: ms.scatter_tensor(x, wrong, mesh, (ms.Shard(0),)),
            "multiple of the borders": lambda wrong=wrong: ms.scatter_tensor(
                x, 0, mesh, (ms.Shard(0),), multiple=wrong
            ),
        }
        if wrong is not None:
            calls["no such mesh dim"] = lambda wrong=wrong: ms.all_reduce(x, mesh, wrong)
            calls["send_recv: no such dest"] = lambda wrong=wrong: ms.send_recv(x, mesh, dest=wrong, source=0)
        for text, call in calls.items():
            with pytest.raises((ms.LayoutError, ms.MeshError), match=text):
                call()
    mesh.free()


def test_one_rank_alone_is_wrong(tmp_path):
    mesh = ms.init_mesh((-1,), ("x",))
    x = ms.distribute_tensor(torch.ones(4 * mesh.size), mesh, (ms.Shard(0),))
    odd = mesh.rank == mesh.size - 1
    with pytest.raises(ms.LayoutError, match="model="):
        ms.io.save_checkpoint(tmp_path, 1, model=3 if odd else torch.nn.Linear(1, 1), mesh=mesh)
    with pytest.raises(ms.LayoutError, match="optimizer="):
        ms.io.load_checkpoint(tmp_path, optimizer="adam" if odd else None, mesh=mesh)
    with pytest.raises(ms.LayoutError, match="attrs="):
        ms.io.write(tmp_path / "a.h5", {"u": x}, attrs=[1] if odd else None)
    mesh.free()
