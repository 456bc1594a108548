"""Files that are damaged at random places: the right values or a clear error on every rank, and nothing else."""

from __future__ import annotations

import os
import warnings

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import mpishard as ms
from tests.io.files import WORLD, on_root, outcome, sharded, values
from tests.io.harm import variants

FULL = values((12, 20))


def harming(path, kinds=1):
    """Damage a file again and again, and mend it in the end."""
    raw = path.read_bytes()
    for what, new in variants(path, kinds):
        on_root(lambda new=new: path.write_bytes(new))
        yield what
    on_root(lambda: path.write_bytes(raw))


def write_netcdf(at, mesh):
    ms.io.write(at, {"g/x": sharded(FULL, mesh)}, attrs={"title": "t"}, dims=("y", "x"), scales={"y": range(12)})


def write_packed(at, mesh):
    attrs = {"g/x": {"scale_factor": 1.0, "add_offset": 0.0, "_FillValue": 1e20}}
    ms.io.write(at, {"g/x": sharded(FULL, mesh)}, chunks=(5, 7), compression="gzip", variable_attrs=attrs)


def write_steps(at, mesh):
    for step in range(2):
        ms.io.write(at, {"g/x": sharded(FULL, mesh)}, append="time", scales={"time": step})


def write_virtual(at, mesh):
    ms.io.write(at, {"g/x": sharded(FULL, mesh)}, backend="virtual")


@pytest.mark.parametrize("store", [write_netcdf, write_packed, write_steps, write_virtual])
def test_reading(mesh, folder, store):
    """Cells have no checksum in HDF5: there are values, or an error."""
    at = folder / "a.h5"
    store(at, mesh)
    placements = (ms.Shard(0), ms.Shard(1))
    WORLD.Barrier()
    files = [at, *sorted(folder.glob("a.h5.parts-*/*"))]
    for path in files:
        for what in harming(path, len(files)):
            outcome(lambda: ms.io.read(at, "g/x", mesh, placements, decode=True).full_tensor())
            samples, _ = outcome(lambda: ms.io.Dataset(at, "g/x", mesh, (ms.Shard(0), ms.Replicate()), decode=True))
            if samples is not None:
                got, error = outcome(lambda samples=samples: samples[-1])
                assert error is not None or got.shape == samples.sample_shape, what
                samples.close()
    x = ms.io.read(at, "g/x", mesh, placements).full_tensor()
    assert torch.equal(x if x.ndim == 2 else x[-1], FULL)


@pytest.mark.parametrize("backend", ["root", "virtual", "background"])
def test_checkpoints(mesh, folder, backend):
    """What is loaded is right to the last bit, or it is the one before; else nothing is changed."""
    model = nn.Linear(3, 2)
    how = {"asynchronous": True} if backend == "background" else {"backend": backend}
    for step in (1, 2):
        torch.nn.init.constant_(model.weight, step)
        tensors = {"x": sharded(FULL + step, mesh), "plain": FULL[0] + step}
        ms.io.save_checkpoint(folder, step, model=model, tensors=tensors, extra={"n": [step]}, mesh=mesh, **how).wait()
    WORLD.Barrier()

    def load(**options):
        torch.nn.init.constant_(model.weight, 7)
        generator = torch.get_rng_state()
        found, error = outcome(lambda: ms.io.load_checkpoint(folder, model=model, mesh=mesh, **options))
        if error is not None:
            assert (model.weight == 7).all(), what
            assert torch.equal(torch.get_rng_state(), generator)
            assert os.fspath(folder) in str(error)
            return None
        assert torch.equal(found.tensors["x"].full_tensor(), FULL + found.step), what
        assert torch.equal(found.tensors["plain"], FULL[0] + found.step), what
        assert found.extra == {"n": [found.step]}, what
        assert (model.weight == found.step).all(), what
        return found.step

    latest = folder / "step_0000000002"
    files = [folder / "latest", *sorted(p for p in latest.rglob("*") if p.is_file())]
    for path in files:
        for what in harming(path, len(files)):
            assert load(fallback=True) in (1, 2), what
            assert load() in (2, None), what
            if path.name == "latest":
                assert load(step=1) == 1
    what = "mended"
    assert load() == 2


@pytest.mark.parametrize("how", [{"backend": "virtual"}, {"asynchronous": True}], ids=str)
def test_sources_without_sizes(mesh, folder, how):
    """HDF5 never comes back from a virtual dataset whose sources were overwritten with zeros."""
    for step in (1, 2):
        ms.io.save_checkpoint(folder, step, tensors={"x": sharded(FULL + step, mesh)}, mesh=mesh, **how).wait()
    path = folder / "step_0000000002" / "tensors.h5"
    WORLD.Barrier()
    raw = path.read_bytes()
    heap = raw.index(b"GCOL")
    WORLD.Barrier()
    on_root(lambda: path.write_bytes(raw[: heap + 16] + bytes(64) + raw[heap + 80 :]))
    _, error = outcome(lambda: ms.io.load_checkpoint(folder, mesh=mesh))
    assert "global heap" in str(error)
    before, _ = outcome(lambda: ms.io.load_checkpoint(folder, mesh=mesh, fallback=True))
    assert before.step == 1
    on_root(lambda: path.write_bytes(raw))
    assert ms.io.load_checkpoint(folder, mesh=mesh).step == 2


def test_imports(mesh, folder):
    if WORLD.rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"x": FULL, "y": FULL[0]}, checkpoint_id=os.fspath(folder / "dcp"), no_dist=True)
    WORLD.Barrier()
    at = folder / "dcp"
    like = {"x": sharded(torch.zeros(12, 20), mesh), "y": torch.zeros(20)}
    for path in [at / ".metadata", at / "__0_0.distcp"]:
        for what in harming(path):
            found, _ = outcome(lambda: ms.io.import_dcp(at, like))
            if found is not None:
                assert torch.equal(found["x"].full_tensor(), FULL), what
                assert torch.equal(found["y"], FULL[0]), what


def test_appending(mesh, folder):
    """A damaged file is refused, or takes the step; where the step fails, it is as it was."""
    at = folder / "a.h5"
    ms.io.write(at, {"x": sharded(FULL, mesh)}, append="time")
    for what in harming(at):
        before = at.read_bytes()
        WORLD.Barrier()
        _, error = outcome(lambda: ms.io.write(at, {"x": sharded(FULL + 1, mesh)}, append="time"))
        if error is not None:
            assert at.read_bytes() == before, (what, error)
        assert [name for name in os.listdir(folder) if name != "a.h5"] == [], what
    with h5py.File(at, "r") as file:
        assert np.array_equal(file["x"], FULL[None])
