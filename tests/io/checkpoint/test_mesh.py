"""Whose ranks save and load, where no mesh is given: those of the model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mpishard as ms
from mpishard.errors import MeshError
from tests.io.files import outcome, same_on_all


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper, copy.deepcopy], ids=["itself", "inside", "a copy"])
@pytest.mark.parametrize("options", [{}, {"shard_parameters": "y"}], ids=["plain", "sharded"])
def test_of_a_distributed_model(mesh, folder, options, wrap):
    """With plain parameters too, and of sharded ones on a single rank, which stay plain."""
    model = wrap(ms.distribute_module(net(), mesh, **options))
    optimizer = torch.optim.AdamW(model.parameters())
    ms.io.save_checkpoint(folder, 1, model=model, optimizer=optimizer)
    expected = [x.full_tensor() if isinstance(x, ms.ShardTensor) else x.clone() for x in model.state_dict().values()]
    other = wrap(ms.distribute_module(net().requires_grad_(requires_grad=False), mesh))
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert ms.io.load_checkpoint(folder, model=other).step == 1
    for got, want in zip(other.state_dict().values(), expected):
        assert torch.equal(got, want)
    ms.io.export_safetensors(folder / "model.safetensors", model)


def test_a_mesh_that_is_given_counts(mesh, folder):
    whole = ms.init_mesh((mesh.size,), ("all",))
    model = ms.distribute_module(net(), mesh)
    x = ms.distribute_tensor(torch.arange(6.0), whole, [ms.Shard(0)])
    ms.io.save_checkpoint(folder, 1, model=model, tensors={"x": x})
    assert ms.io.load_checkpoint(folder, model=model, mesh=whole).tensors["x"].mesh is whole


def test_of_no_model_or_of_two_meshes(mesh, folder):
    other = ms.init_mesh((mesh.size,), ("all",))
    two = nn.ModuleList([ms.distribute_module(net(), mesh), ms.distribute_module(net(), other)])
    for model in (net(), two):
        with pytest.raises(MeshError, match="one mesh is needed") as e:
            ms.io.save_checkpoint(folder, 1, model=model)
        same_on_all(e)
    ms.io.save_checkpoint(folder, 1, model=two, mesh=mesh)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sharded", ["model", "tensors"])
def test_what_one_rank_cannot_store_or_take_raises_on_all(mesh, folder, sharded):
    """It raised there, before the ranks were known, and the others waited."""
    last = mesh.rank == mesh.size - 1
    model = ms.distribute_module(net(), mesh) if sharded == "model" else None
    tensors = {"x": ms.ones(5, mesh=mesh, placements=(ms.Shard(0),) * mesh.ndim)} if sharded == "tensors" else None
    with pytest.raises(ms.MpishardError, match="extra/f cannot be stored"):
        ms.io.save_checkpoint(folder, 1, model=model, tensors=tensors, extra={"f": print if last else 1})
    ms.io.save_checkpoint(folder, 1, model=model, tensors=tensors)
    with pytest.raises(ms.MpishardError, match="scheduler"):
        ms.io.load_checkpoint(folder, model=model, tensors=tensors, scheduler=1 if last else None)


class Stateless(nn.Linear):
    def state_dict(self, *args, **kwargs):
        raise ValueError("no state here")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("given", ["a model without a state", "a mesh that is none"])
def test_whose_argument_one_rank_has_wrong_raises_on_all(mesh, folder, given):
    """Where the others' tensors say who they are; it raised there, and they waited."""
    last = mesh.rank == mesh.size - 1
    x = {"x": ms.ones(5, mesh=mesh, placements=(ms.Shard(0),) * mesh.ndim)}
    other = 3 if last and given == "a mesh that is none" else None
    model = ms.distribute_module((Stateless if last and other is None else nn.Linear)(2, 2), mesh)
    for call in (
        lambda: ms.io.save_checkpoint(folder, 1, model=model, mesh=other),
        lambda: ms.io.load_checkpoint(folder, model=model, mesh=other),
        lambda: ms.io.export_safetensors(folder / "a.safetensors", model, mesh=other),
        lambda: ms.io.import_dcp(folder, model, mesh=other),
    ):
        with pytest.raises(ms.MpishardError) as e:
            call()
        same_on_all(e)
    ms.io.export_safetensors(folder / "a.safetensors", x)
    if given == "a mesh that is none":
        with pytest.raises(ms.MpishardError, match="mesh= is no mesh"):
            ms.io.export_safetensors(folder / "a.safetensors", x, mesh=other)


class Unprintable:
    """Has no text that ranks could compare."""

    def __repr__(self):
        raise RuntimeError("it has no text")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("option", ["asynchronous", "backend", "step", "fallback", "rng", "strict", "placements"])
def test_an_option_of_one_rank_that_has_no_text_raises_on_all(mesh, folder, option):
    """What ranks compare is made of it: it raised there, and the others waited."""
    ms.io.save_checkpoint(folder, 1, extra=1, mesh=mesh)
    options = {option: Unprintable()} if mesh.rank == mesh.size - 1 else {}
    if option in ("asynchronous", "backend"):
        outcome(lambda: ms.io.save_checkpoint(folder, 2, mesh=mesh, **options).wait())
    else:
        outcome(lambda: ms.io.load_checkpoint(folder, mesh=mesh, **options))


@pytest.mark.ranks(2, 3)
def test_a_tensor_that_lies_otherwise_on_one_rank_is_not_waited_for(mesh, folder):
    x = ms.ones(5, mesh=mesh, placements=(ms.Shard(0),) * mesh.ndim)
    full = x.full_tensor()
    given = {"x": full if mesh.rank == mesh.size - 1 else x}
    for call in (ms.io.export_safetensors, ms.io.import_dcp):
        with pytest.raises(ms.MpishardError) as e:
            call(folder / "a", given, mesh=mesh)
        same_on_all(e)
