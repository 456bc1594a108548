"""Checkpoints of torch.distributed.checkpoint, read on a mesh; and those that would run code, refused."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import sys
import warnings
import zipfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

import mpishard as ms
from mpishard.errors import FileError
from tests.io.files import WORLD, on_root, same_on_all, sharded, values


def save(folder, state):
    if WORLD.rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=os.fspath(folder / "dcp"), no_dist=True)
    WORLD.Barrier()
    return folder / "dcp"


def model():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))


def test_a_model_and_fields(mesh, folder):
    torch.manual_seed(0)
    saved, full = model(), values((7, 9))
    fields = {"x": full, "half": full.bfloat16(), "one": torch.tensor(3)}
    at = save(folder, {"model": saved.state_dict(), "fields": fields, "step": 7})
    torch.manual_seed(1)
    other = ms.distribute_module(model(), mesh)
    found = ms.io.import_dcp(at, other, prefix="model.", mesh=mesh)
    assert sorted(found) == sorted(saved.state_dict())
    for name, p in other.state_dict().items():
        assert torch.equal(p, saved.state_dict()[name])
    for placements in ((ms.Shard(0), ms.Shard(1)), (ms.Shard(1), ms.Replicate())):
        like = {name: sharded(torch.zeros(7, 9), mesh, placements) for name in ("x", "half")}
        back = ms.io.import_dcp(at, {**like, "one": torch.tensor(0)}, prefix="fields.")
        assert back["x"].sharding == like["x"].sharding
        assert torch.equal(back["x"].full_tensor(), full)
        assert torch.equal(back["half"].full_tensor(), full.bfloat16())
        assert back["one"] == 3


def test_bools_are_0_or_1_in_memory(mesh, folder):
    odd = (torch.arange(35, dtype=torch.uint8).view(5, 7) % 4).view(torch.bool)
    at = save(folder, {"x": odd})
    like = sharded(torch.zeros(5, 7, dtype=torch.bool), mesh, (ms.Shard(0), ms.Shard(1)))
    back = ms.io.import_dcp(at, {"x": like})["x"]
    assert torch.equal(back.full_tensor().view(torch.uint8), (odd.view(torch.uint8) > 0).byte())


@pytest.mark.ranks(2, 3)
def test_pieces_of_several_processes(mesh, folder):
    """As DTensor saves them: a piece per rank, uneven."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    full = values((7, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=WORLD.rank, world_size=WORLD.size)
        try:
            ranks = init_device_mesh("cpu", (WORLD.size,))
            state = {"x": distribute_tensor(full, ranks, [Shard(0)]), "y": distribute_tensor(full, ranks, [Shard(1)])}
            dcp.save(state, checkpoint_id=os.fspath(folder / "dcp"))
        finally:
            dist.destroy_process_group()
    WORLD.Barrier()
    like = {"x": sharded(torch.zeros(7, 10), mesh), "y": torch.zeros(7, 10)}
    back = ms.io.import_dcp(folder / "dcp", like)
    assert torch.equal(back["x"].full_tensor(), full)
    assert torch.equal(back["y"], full)


def test_a_list_that_python_3_13_wrote(mesh, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    monkeypatch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
    at = save(folder, {"x": values((4, 6))})
    assert b"pathlib._local" in (at / ".metadata").read_bytes()
    assert torch.equal(ms.io.import_dcp(at, {"x": torch.zeros(4, 6)}, mesh=mesh)["x"], values((4, 6)))


class Odd(nn.Linear):
    """A model that keeps something besides tensors."""

    def __init__(self):
        super().__init__(1, 1)

    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("trapped",))


def forged(raw, edit):
    """Return an archive of torch whose members are changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as of, zipfile.ZipFile(out, "w") as into:
        for member in of.infolist():
            into.writestr(member.filename, edit(member.filename, of.read(member)))
    return out.getvalue()


def in_older_form(raw):
    """Return cells without checksums, behind which lies an archive that has good ones."""
    out = io.BytesIO()
    torch.save(torch.load(io.BytesIO(raw), weights_only=True), out, _use_new_zipfile_serialization=False)
    return out.getvalue() + forged(raw, lambda _, content: content)


@pytest.mark.parametrize(
    "harm",
    [
        lambda raw: forged(raw, lambda name, content: content[:8] if name.endswith("data/0") else content),
        lambda raw: forged(raw, lambda name, content: b"big" if name.endswith("byteorder") else content),
        in_older_form,
    ],
    ids=["fewer cells than it says", "turned round", "older form"],
)
def test_cells_that_torch_reads_without_a_check(mesh, folder, harm):
    """Where less is there than is told, torch 2.8 reads, and turns round, the memory behind it."""
    at = save(folder, {"x": values((4, 6))})
    (piece,) = at.glob("*.distcp")

    def forge():
        raw = harm(piece.read_bytes())
        piece.write_bytes(raw)
        listed = pickle.loads((at / ".metadata").read_bytes())
        for info in listed.storage_data.values():
            info.offset, info.length = 0, len(raw)
        (at / ".metadata").write_bytes(pickle.dumps(listed))

    on_root(forge)
    with pytest.raises(FileError, match=r"packed cells|another byte order|another thing|record size") as e:
        ms.io.import_dcp(at, {"x": sharded(torch.zeros(4, 6), mesh)})
    same_on_all(e)


class Unprintable:
    """Cannot be told, nor said to be true or false."""

    def __repr__(self):
        raise RuntimeError("it has no text")

    def __bool__(self):
        raise RuntimeError("neither")


class Choosy(nn.Linear):
    """Does not take a state on one rank."""

    def load_state_dict(self, *args, **options):
        if WORLD.rank == WORLD.size - 1:
            raise KeyError("not this one")
        return super().load_state_dict(*args, **options)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("odd", ["prefix", "strict", "model"])
def test_whatever_one_rank_raises_all_raise(mesh, folder, odd):
    at = save(folder, dict(nn.Linear(2, 2).state_dict()))
    model = Choosy(2, 2) if odd == "model" else nn.Linear(2, 2)
    options = {odd: Unprintable()} if odd != "model" and WORLD.rank == WORLD.size - 1 else {}
    with pytest.raises(ms.MpishardError, match=r"no text|neither|not this one") as e:
        ms.io.import_dcp(at, model, mesh=mesh, **options)
    same_on_all(e)


def test_what_is_refused(mesh, folder):
    at = save(folder, {"x": values((4, 6)), "object": {"a": 1}})
    like = {"x": sharded(torch.zeros(4, 6), mesh)}

    def refused(error, text, tensors=like, **options):
        with pytest.raises(error, match=text) as e:
            ms.io.import_dcp(at, tensors, mesh=mesh, **options)
        same_on_all(e)
        WORLD.Barrier()

    refused(ms.LayoutError, "no such tensor", {"y": torch.zeros(3)})
    refused(ms.LayoutError, "no such tensor", prefix="model.")
    refused(ms.LayoutError, "shape", {"x": torch.zeros(3)})
    refused(ms.LayoutError, "a name in model= is of another kind(.|\n)* 5", {5: torch.zeros(4, 6)})
    refused(ms.LayoutError, "a name in model= is of another kind", {"x": torch.zeros(4, 6), 5: torch.zeros(4, 6)})
    refused(ms.LayoutError, "'x' in model= is of another kind(.|\n)* int", {"x": 3})
    refused(ms.LayoutError, "'x' in model= is of another kind", {"x": 3}, strict=False)
    refused(ms.LayoutError, "model= is of another kind", 3)
    refused(ms.LayoutError, "prefix= is of another kind(.|\n)* NoneType", prefix=None)
    assert ms.io.import_dcp(at, {"y": torch.zeros(3)}, strict=False, mesh=mesh) == {}
    assert ms.io.import_dcp(at, Odd(), strict=False, mesh=mesh) == {}
    refused(ms.LayoutError, "strict=False leaves out", Odd())
    listed = (at / ".metadata").read_bytes()
    (piece,) = at.glob("*.distcp")
    cells = piece.read_bytes()
    WORLD.Barrier()
    for file, raw, text in (
        (".metadata", pickle.dumps(Trap()), r"asks for posix\.mkdir, which could run code"),
        (".metadata", listed[: len(listed) // 2], "check that it is complete"),
        (".metadata", listed.replace(b"__0_0.distcp", b"../up.distcp"), "outside|No such file"),
        (piece.name, cells[:100], "check that it is complete"),
    ):
        if WORLD.rank == 0:
            (at / file).write_bytes(raw)
        WORLD.Barrier()
        refused(FileError, text)
        if WORLD.rank == 0:
            (at / ".metadata").write_bytes(listed)
            piece.write_bytes(cells)
        WORLD.Barrier()
    assert not os.path.exists("trapped")
    if WORLD.rank == 0:
        (at / ".metadata").unlink()
    WORLD.Barrier()
    refused(FileError, "No such file")
