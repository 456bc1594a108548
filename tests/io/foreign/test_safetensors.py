from __future__ import annotations

import io
import os

import pytest
import torch
from mpi4py import MPI
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import mpishard as ms
from mpishard.errors import FileError
from tests.compare import mesh_of, mesh_shapes

WORLD = MPI.COMM_WORLD


@pytest.fixture
def folder(tmp_path):
    """One folder for all ranks: tmp_path is each rank's own."""
    return type(tmp_path)(WORLD.bcast(os.fspath(tmp_path)))


@pytest.fixture
def mesh():
    return mesh_of(mesh_shapes(2)[-1])


def test_exported_and_read_by_others(mesh, folder):
    torch.manual_seed(0)
    full = torch.randn(7, 5, 6)
    placements = [ms.Shard(0), ms.Shard(2)][: mesh.ndim]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
    whole = {str(d): (full > 0 if d == torch.bool else full.mul(9).abs().to(d)) for d in dtypes}
    whole |= {"none": torch.zeros(0, 3, 2), "one": torch.tensor(3.0), "turned": full.transpose(0, 2)}
    state = {n: x if n == "one" else ms.distribute_tensor(x, mesh, placements) for n, x in whole.items()}
    ms.io.export_safetensors(folder / "a.safetensors", state, metadata={"step": "3"})
    WORLD.Barrier()
    back = load_file(folder / "a.safetensors")
    assert sorted(back) == sorted(whole)
    for name, x in whole.items():
        assert back[name].dtype == x.dtype
        assert torch.equal(back[name], x), name
    with safe_open(folder / "a.safetensors", "pt") as file:
        assert file.metadata() == {"step": "3"}
    assert os.listdir(folder) == ["a.safetensors"]


def test_models_go_out_and_come_in(mesh, folder):
    """To a program without mpishard, and a state dict of torch.save back."""
    torch.manual_seed(WORLD.rank)
    model = ms.distribute_module(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), mesh)
    ms.io.export_safetensors(folder / "m.safetensors", model, mesh=mesh)
    WORLD.Barrier()
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    plain.load_state_dict(load_file(folder / "m.safetensors"))
    assert all(torch.equal(p, q) for p, q in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))
    ms.io.save_checkpoint(folder, 0, model=plain, mesh=mesh)
    ms.io.load_checkpoint(folder, model=model, mesh=mesh)
    raw = io.BytesIO()
    torch.save(plain.state_dict(), raw)
    raw.seek(0)
    model.load_state_dict(torch.load(raw, weights_only=True))
    assert all(torch.equal(p, q) for p, q in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))


def test_what_cannot_be_exported(mesh, folder):
    x = ms.distribute_tensor(torch.ones(4, 4), mesh, [ms.Shard(0)] * mesh.ndim)
    cases = [
        (folder / "none" / "a", {"x": x}, FileError),
        (folder / "a", {"x": x.to(torch.complex128)}, ms.UnsupportedDtypeError),
        (folder / "a", {"x": x, "y": 3}, ms.LayoutError),
    ]
    for path, state, error in cases:
        with pytest.raises(error, match="export_safetensors") as e:
            ms.io.export_safetensors(path, state)
        assert len(set(WORLD.allgather(str(e.value)))) == 1
    assert not os.listdir(folder)
