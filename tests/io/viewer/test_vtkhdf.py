"""VTKHDF companions, read back by VTK's own reader."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
import torch
from vtkmodules.util.numpy_support import vtk_to_numpy
from vtkmodules.vtkCommonCore import vtkVersion
from vtkmodules.vtkIOHDF import vtkHDFReader

import mpishard as ms
from tests.io.files import BACKENDS, WORLD, sharded, values

VTK = tuple(map(int, vtkVersion.GetVTKVersion().split(".")[:3]))


def opened(path, time=None):
    reader = vtkHDFReader()
    reader.SetFileName(str(path))
    reader.UpdateInformation()
    if time is None:
        reader.Update()
    else:
        reader.UpdateTimeStep(time)
    image = reader.GetOutputDataObject(0)
    assert image.IsA("vtkImageData")
    return image, reader


def array(image, name, shape):
    return vtk_to_numpy(image.GetPointData().GetArray(name)).reshape(shape)


@pytest.mark.parametrize("backend", BACKENDS)
def test_images(mesh, folder, backend):
    full = values((5, 6, 4))
    flat = values((9, 8))
    tensors = {"t": sharded(full, mesh), "g/u": sharded(full.double() * 2, mesh), "flat": sharded(flat, mesh)}
    ms.io.write(folder / "a.h5", tensors, vtkhdf=True, backend=backend)
    if WORLD.rank == 0:
        image, _ = opened(folder / "a.vtkhdf")
        assert image.GetDimensions() == (4, 6, 5)
        assert image.GetBounds() == (0, 3, 0, 5, 0, 4)
        assert np.array_equal(array(image, "t", full.shape), full.numpy())
        assert np.array_equal(array(image, "g.u", full.shape), full.double().numpy() * 2)
        image, _ = opened(folder / "a.2.vtkhdf")
        assert image.GetDimensions() == (8, 9, 1)
        assert np.array_equal(array(image, "flat", flat.shape), flat.numpy())
        with h5py.File(folder / "a.vtkhdf", "r") as file:
            assert file["VTKHDF/PointData/t"].is_virtual
        # the file and its companions move together
        (folder / "there").mkdir()
        for name in os.listdir(folder):
            if name != "there":
                os.rename(folder / name, folder / "there" / name)
        image, _ = opened(folder / "there" / "a.vtkhdf")
        assert np.array_equal(array(image, "t", full.shape), full.numpy())
    WORLD.Barrier()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16], ids=str
)
def test_each_type(mesh, folder, dtype):
    full = values((5, 7), dtype)
    no = {"no": sharded(values((5, 7), torch.bool), mesh), "c": sharded(values((5, 7), torch.complex64), mesh)}
    ms.io.write(folder / "a.h5", {"x": sharded(full, mesh), **no}, vtkhdf=True)
    if WORLD.rank == 0:
        image, _ = opened(folder / "a.vtkhdf")
        assert image.GetPointData().GetNumberOfArrays() == 1
        assert np.array_equal(array(image, "x", full.shape), full.numpy())
    WORLD.Barrier()


def test_scales_and_leading_dims(mesh, folder):
    full = values((2, 3, 4, 5))
    x = sharded(full, mesh, (ms.Shard(2), ms.Shard(3)))
    dims, z = ("c", "z", "lat", "lon"), [0.0, 5.0, 10.0]
    even = {"z": z, "lat": [90.0, 60.0, 30.0, 0.0], "lon": np.linspace(0, 1, 5, dtype=np.float32)}
    ms.io.write(folder / "a.h5", {"x": x}, dims=dims, scales=even, vtkhdf=True)
    uneven = {**even, "z": [0.0, 1.0, 10.0]}
    ms.io.write(folder / "b.h5", {"x": x}, dims=dims, scales=uneven, vtkhdf=True)
    if WORLD.rank == 0:
        image, _ = opened(folder / "a.vtkhdf")
        assert np.array_equal(array(image, "x[1]", full.shape[1:]), full[1].numpy())
        assert image.GetPoint(0) == (0.0, 90.0, 0.0)
        assert np.allclose(image.GetPoint(image.GetNumberOfPoints() - 1), (1.0, 0.0, 10.0))
        assert min(image.GetSpacing()) > 0
        image, _ = opened(folder / "b.vtkhdf")
        assert image.GetBounds() == (0, 4, 0, 3, 0, 2)
    WORLD.Barrier()


def test_steps(mesh, folder):
    full = values((2, 4, 6, 3))
    placements = (ms.Shard(1), ms.Shard(2))
    for step in range(3):
        x = sharded(full + step, mesh, placements)
        ms.io.write(folder / "a.h5", {"x": x}, append="time", scales={"time": step / 2}, vtkhdf=True)
    if WORLD.rank == 0:
        for step in range(3):
            image, reader = opened(folder / "a.vtkhdf", step / 2)
            assert reader.GetNumberOfSteps() == 3
            for c in range(2):
                assert np.array_equal(array(image, f"x[{c}]", full.shape[1:]), full[c].numpy() + step)
    WORLD.Barrier()


@pytest.mark.parametrize(
    "times", [(0.0, 0.5, 1.0, 1.5, 1.0, 2.0, 0.25), (3.0, 2.0, 1.0), (1.0, 1.0), (-1.0, -1.5, -1.0)], ids=str
)
def test_times_of_a_restart(mesh, folder, times):
    """Of the steps at one time the last is shown, whatever came in between."""
    for step, time in enumerate(times):
        x = sharded(values((4, 6, 3)) + step, mesh)
        ms.io.write(folder / "a.h5", {"x": x}, append="time", scales={"time": time}, vtkhdf=True)
    if WORLD.rank == 0:
        for time in times:
            image, reader = opened(folder / "a.vtkhdf", time)
            assert reader.GetNumberOfSteps() == len(set(times))
            last = max(step for step, t in enumerate(times) if t == time)
            assert np.array_equal(array(image, "x", (4, 6, 3)), values((4, 6, 3)).numpy() + last)
    WORLD.Barrier()


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(
    "space",
    [(3, 4), (1, 4), (3, 1), (1, 1), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 3, 1), (1, 1, 4), (2, 1, 1), (1, 1, 1)],
    ids=str,
)
def test_dims_of_one_cell_and_single_steps(mesh, folder, space, steps):
    if len(space) == 3 and space[0] > space[1] == 1 and VTK < (9, 7, 2):
        pytest.skip("VTK reads other numbers, in whatever form")
    one = [values(space) + step for step in range(steps or 1)]
    for step, full in enumerate(one):
        options = {"append": "time", "scales": {"time": step / 2}} if steps else {}
        ms.io.write(folder / "a.h5", {"x": sharded(full, mesh)}, vtkhdf=True, **options)
    if WORLD.rank == 0:
        for step, full in enumerate(one):
            image, _ = opened(folder / "a.vtkhdf", step / 2 if steps else None)
            assert image.GetDimensions() == (*space[::-1], 1)[:3]
            assert np.array_equal(array(image, "x", space), full.numpy())
    WORLD.Barrier()
