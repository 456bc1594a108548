"""ShardTensors in checkpoints of torch.distributed.checkpoint, which lays them out anew when it reads."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mpi4py import MPI
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils._pytree import tree_map

import mpishard as ms
from tests.compare import drawn_sizes, gathered, mesh_of, mesh_shapes, shard
from tests.release import RELEASE

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size


@pytest.fixture
def group():
    yield ms.process_group(WORLD)
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path):
    return WORLD.bcast(str(tmp_path / "checkpoint"))


def drawn(rng, full):
    """Return the tensor on a drawn mesh, by drawn cuts, some of them empty."""
    mesh = mesh_of(rng.choice(mesh_shapes()))
    placements, sizes, free = [], {}, list(range(full.ndim))
    for extent in mesh.shape:
        dim = rng.choice([None, *free])
        placements.append(ms.Replicate() if dim is None else ms.Shard(dim))
        if dim is not None:
            free.remove(dim)
            sizes[dim] = drawn_sizes(rng, full.shape[dim], extent)
    return shard(full, mesh, tuple(placements), sizes)


@pytest.mark.parametrize("i", range(4))
def test_drawn_layouts(request, group, folder, i):
    rng = random.Random(request.config.option.seed * 1000 + i)
    shapes = {"field": (5, 7, 3), "line": (SIZE + 1,), "one": (1, 1), "nothing": (0, 3), "number": ()}
    full = {name: torch.randn(s, generator=torch.Generator().manual_seed(3)) for name, s in shapes.items()}
    full["counts"] = torch.arange(12).reshape(4, 3)
    saved = {name: drawn(rng, x) for name, x in full.items()}
    dcp.save({"state": saved, "step": 4, "plain": torch.ones(2)}, checkpoint_id=folder)
    loaded = {name: drawn(rng, torch.full_like(x, 9)) for name, x in full.items()}
    state = {"state": loaded, "step": 0, "plain": torch.zeros(2)}
    dcp.load(state, checkpoint_id=folder)
    assert state["step"] == 4
    assert torch.equal(state["plain"], torch.ones(2))
    for name, x in full.items():
        assert torch.equal(gathered(loaded[name]), x), name
        # our own reader reads it too
        read = ms.io.import_dcp(folder, {name: loaded[name]}, prefix="state.")
        assert torch.equal(gathered(read[name]), x), name


@pytest.mark.parametrize("shard_parameters", [None, "x"])
def test_training_goes_on_as_if_never_stopped(group, folder, shard_parameters):
    mesh = ms.init_mesh((SIZE,), ("x",))
    x = ms.distribute_tensor(torch.randn(2, 2, 8, 6, generator=torch.Generator().manual_seed(1)), mesh, [ms.Shard(2)])

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def trained(seed):
        torch.manual_seed(seed)
        layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 1, 1)
        model = ms.distribute_module(nn.Sequential(*layers), mesh, shard_parameters=shard_parameters)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        return model, optimizer

    first, second = trained(0), trained(1)
    of_model, of_optimizer = get_state_dict(*first)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    of_model, of_optimizer = get_state_dict(*second)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(*second, model_state_dict=of_model, optim_state_dict=of_optimizer)
    step(*first)
    step(*second)
    for p, q in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(gathered(p), gathered(q))


class Stager:
    """As docs/files.md has it."""

    should_synchronize_after_execute = False

    def stage(self, state):
        return tree_map(lambda x: x.detach().clone() if torch.is_tensor(x) else x, state)

    def synchronize_staging(self):
        pass

    def close(self):
        pass


@pytest.mark.skipif(RELEASE < (2, 9), reason="before, torch takes no stager")
def test_saved_in_the_background(group, folder):
    own, full = dist.new_group(), torch.arange(4.0 * SIZE).view(SIZE, 4)
    x = shard(full, mesh_of((SIZE,)), (ms.Shard(0),))
    pending = dcp.async_save({"x": x}, checkpoint_id=folder, async_stager=Stager(), process_group=own)
    for _ in range(5):  # the ranks go on, and communicate
        x += x.sum()
    pending.result()
    WORLD.Barrier()
    dcp.load(state := {"x": shard(full * 0, mesh_of((SIZE,)), (ms.Shard(1),))}, checkpoint_id=folder)
    assert torch.equal(gathered(state["x"]), full)


def test_what_cannot_be_saved(folder):
    from torch.distributed.checkpoint import CheckpointException

    mesh = mesh_of((SIZE,))
    if SIZE > 1:
        refused = pytest.raises(CheckpointException, match=r"torch.distributed is not started")
        with pytest.warns(UserWarning, match="in a single process"), refused:
            dcp.save({"x": ms.ones(4, mesh=mesh, placements=[ms.Shard(0)])}, checkpoint_id=folder)
    ms.process_group(WORLD)
    try:
        terms = ms.ShardTensor.from_local(torch.ones(3), mesh, [ms.Partial()])
        with pytest.raises(CheckpointException, match="a sum whose terms the ranks hold"):
            dcp.save({"x": terms}, checkpoint_id=folder)
    finally:
        dist.destroy_process_group()
