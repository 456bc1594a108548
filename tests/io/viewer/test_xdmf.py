"""XDMF companions, read back by VTK's own reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vtkmodules.util.numpy_support import vtk_to_numpy
from vtkmodules.vtkIOXdmf2 import vtkXdmfReader

import mpishard as ms
from tests.io.files import BACKENDS, WORLD, sharded, values


def opened(path, time=None):
    reader = vtkXdmfReader()
    reader.SetFileName(str(path))
    reader.UpdateInformation()
    if time is None:
        reader.Update()
    else:
        reader.UpdateTimeStep(time)
    out = reader.GetOutputDataObject(0)
    return out.GetBlock(0) if out.IsA("vtkMultiBlockDataSet") else out


def array(grid, name, shape):
    return vtk_to_numpy(grid.GetPointData().GetArray(name)).reshape(shape)


def test_names_that_the_companion_does_not_show_are_any(mesh, folder):
    tensors = {"t": sharded(values((5, 6)), mesh), "x:\u03b8": sharded(values((5, 6)) > 0, mesh)}
    ms.io.write(folder / "a.h5", tensors, xdmf=True)
    if WORLD.rank == 0:
        assert np.array_equal(array(opened(folder / "a.xdmf"), "t", (5, 6)), values((5, 6)).numpy())


@pytest.mark.parametrize("backend", BACKENDS)
def test_images(mesh, folder, backend):
    full = values((5, 6, 4))
    tensors = {"t": sharded(full, mesh), "g/u": sharded(full.double() * 2, mesh), "i": sharded(full.int(), mesh)}
    ms.io.write(folder / "a.h5", tensors, xdmf=True, backend=backend)
    if WORLD.rank == 0:
        grid = opened(folder / "a.xdmf")
        assert grid.GetDimensions() == (4, 6, 5)
        assert np.array_equal(array(grid, "t", full.shape), full.numpy())
        assert np.array_equal(array(grid, "g/u", full.shape), full.double().numpy() * 2)
        assert np.array_equal(array(grid, "i", full.shape), full.numpy())
    WORLD.Barrier()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64, torch.float32], ids=str)
def test_flat_images_of_each_type(mesh, folder, dtype):
    full = values((5, 7), dtype)
    ms.io.write(folder / "a.h5", {"x": sharded(full, mesh)}, xdmf=True)
    if WORLD.rank == 0:
        grid = opened(folder / "a.xdmf")
        assert grid.GetDimensions() == (7, 5, 1)
        assert np.array_equal(array(grid, "x", full.shape), full.numpy())
    WORLD.Barrier()


def test_scales_and_leading_dims(mesh, folder):
    full = values((2, 3, 4, 5))
    x = sharded(full, mesh, (ms.Shard(2), ms.Shard(3)))
    lat = [0.0, 1.0, 4.0, 9.0]
    scales = {"z": [0, 1, 2], "lat": lat, "lon": np.arange(5) * 10.0}
    ms.io.write(folder / "a.h5", {"x": x}, dims=("c", "z", "lat", "lon"), scales=scales, xdmf=True)
    if WORLD.rank == 0:
        grid = opened(folder / "a.xdmf")
        assert np.array_equal(array(grid, "x[1]", full.shape[1:]), full[1].numpy())
        assert grid.GetBounds() == (0.0, 40.0, 0.0, 9.0, 0.0, 2.0)
    WORLD.Barrier()


def test_steps(mesh, folder):
    full = values((4, 6))
    for step in range(3):
        ms.io.write(
            folder / "a.h5", {"x": sharded(full + step, mesh)}, append="time", scales={"time": step / 2}, xdmf=True
        )
    if WORLD.rank == 0:
        for step in range(3):
            grid = opened(folder / "a.xdmf", step / 2)
            assert np.array_equal(array(grid, "x", full.shape), full.numpy() + step)
    WORLD.Barrier()


@pytest.mark.parametrize("times", [(0.0, 0.5, 1.0, 1.5, 1.0, 2.0, 0.25), (3.0, 2.0, 1.0), (1.0, 1.0)], ids=str)
def test_times_of_a_restart(mesh, folder, times):
    """Of the steps at one time the last is shown, whatever came in between."""
    for step, time in enumerate(times):
        x = sharded(values((4, 6)) + step, mesh)
        ms.io.write(folder / "a.h5", {"x": x}, append="time", scales={"time": time}, xdmf=True)
    if WORLD.rank == 0:
        for time in times:
            last = max(step for step, t in enumerate(times) if t == time)
            assert np.array_equal(array(opened(folder / "a.xdmf", time), "x", (4, 6)), values((4, 6)).numpy() + last)
    WORLD.Barrier()


def test_names_that_xml_lacks(mesh, folder):
    x = sharded(values((5, 6)), mesh)
    odd = ["a\x01", "\ufffe", "a:b", "a ", "a\n", "\u00e9", "\u65e5", "a.", ".."]
    for path, name in [
        *(("a.h5", name) for name in odd),
        *((f"{at}.h5", "a") for at in ("a\x1f", " a", "a:b", "a\\b", "\u00e9")),
    ]:
        with pytest.raises(ms.errors.FileError, match="no name in XDMF"):
            ms.io.write(folder / path, {name: x}, xdmf=True)
    assert not list(folder.iterdir())
    # and all that VTK finds
    for path, name in (("a.h5", "\u00e9/a b"), ("a \u00e9.h5", "a&<b>"), ("a%.h5", "g./$t")):
        ms.io.write(folder / path, {name: x}, xdmf=True)
        if WORLD.rank == 0:
            grid = opened((folder / path).with_suffix(".xdmf"))
            assert np.array_equal(array(grid, name, (5, 6)), values((5, 6)).numpy())
        WORLD.Barrier()
    ms.io.write(folder / "a.h5", {"a\x01": x})
    assert torch.equal(ms.io.read(folder / "a.h5", "a\x01", mesh, x.placements).full_tensor(), x.full_tensor())
