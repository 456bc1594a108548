from __future__ import annotations

import io
import os
import random

import pytest
import torch
from mpi4py import MPI
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import mpishard as ms
from mpishard.errors import FileError
from mpishard.io.foreign import safetensors
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


@pytest.mark.parametrize("seed", range(6))
def test_any_name_is_read_again_or_refused(mesh, folder, seed):
    """Names and metadata drawn from all of Unicode: what others cannot read takes no file's place."""
    draw = random.Random(seed)
    x = ms.distribute_tensor(torch.arange(6.0), mesh, [ms.Shard(0)] * mesh.ndim)
    at = folder / "a.safetensors"
    ms.io.export_safetensors(at, {"before": x})

    def text():
        kinds = [(0, 0x80), (0x80, 0xD800), (0xD800, 0xE000), (0xE000, 0x110000)]
        return "".join(chr(draw.randrange(*draw.choices(kinds, (8, 4, 1, 4))[0])) for _ in range(draw.randrange(4)))

    for _ in range(8):
        names, metadata = [text(), text()], {text(): text()}
        bad = any("\ud800" <= c < "\ue000" for t in (*names, *metadata, *metadata.values()) for c in t)
        if bad:
            with pytest.raises(ms.LayoutError, match="cannot hold") as e:
                ms.io.export_safetensors(at, dict.fromkeys(names, x), metadata=metadata)
            assert len(set(WORLD.allgather(str(e.value)))) == 1
            continue
        ms.io.export_safetensors(at, dict.fromkeys(names, x), metadata=metadata)
        WORLD.Barrier()
        back = load_file(at)
        assert sorted(back) == sorted(set(names))
        with safe_open(at, "pt") as file:
            assert file.metadata() == metadata
        WORLD.Barrier()
    WORLD.Barrier()
    load_file(at)


def test_what_readers_refuse_replaces_no_file(mesh, folder, monkeypatch):
    x = ms.distribute_tensor(torch.arange(6.0), mesh, [ms.Shard(0)] * mesh.ndim)
    at = folder / "a.safetensors"
    ms.io.export_safetensors(at, {"before": x})
    for model, metadata in (
        ({"__metadata__": x}, None),
        ({0: x}, None),
        ({0: x, "0": x}, None),
        ({("a", 1): x}, None),
        ({"a\udc80": x}, None),
        ({"a": x}, {"x": 1}),
        ({"a": x}, {b"x": "1"}),
        ({"a": x}, {1: "x"}),
        ({"a": x}, {"x": object()}),
        ({"a": x}, 3),
        (3, None),
    ):
        with pytest.raises(ms.LayoutError, match="export_safetensors") as e:
            ms.io.export_safetensors(at, model, metadata=metadata, mesh=mesh)
        assert len(set(WORLD.allgather(str(e.value)))) == 1
    monkeypatch.setattr(safetensors, "_HEADER_NBYTES", 1000)
    with pytest.raises(ms.LayoutError, match="at most 1000 bytes"):
        ms.io.export_safetensors(at, {"a": x}, metadata={"a": "x" * 1000})
    WORLD.Barrier()
    assert os.listdir(folder) == ["a.safetensors"]
    assert list(load_file(at)) == ["before"]


@pytest.mark.parametrize("where", ["fresh", "flush", "check_replaceable"])
@pytest.mark.parametrize("kind", [MemoryError, RecursionError, UserWarning, KeyError])
def test_whatever_one_rank_raises_all_raise(mesh, folder, monkeypatch, where, kind):
    def fail(*_, **__):
        raise kind("of rank 0")

    monkeypatch.setattr(safetensors, where, fail)  # only rank 0 calls it
    x = ms.distribute_tensor(torch.arange(6.0), mesh, [ms.Shard(0)] * mesh.ndim)
    with pytest.raises(FileError, match="of rank 0"):
        ms.io.export_safetensors(folder / "a", {"x": x})
    WORLD.Barrier()
    assert not os.listdir(folder)


def test_what_cannot_be_exported(mesh, folder):
    x = ms.distribute_tensor(torch.ones(4, 4), mesh, [ms.Shard(0)] * mesh.ndim)
    cases = [
        (folder / "none" / "a", {"x": x}, FileError),
        (folder / "a", {"x": x.to(torch.complex128)}, ms.UnsupportedDtypeError),
        (folder / "a", {"x": x, "y": 3}, ms.LayoutError),
        ("/", {"x": x}, FileError),
    ]
    for path, state, error in cases:
        with pytest.raises(error, match="export_safetensors") as e:
            ms.io.export_safetensors(path, state)
        assert len(set(WORLD.allgather(str(e.value)))) == 1
    assert not os.listdir(folder)
