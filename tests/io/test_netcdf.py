"""Real netCDF files, of the package iris-sample-data: climate model, satellite and ocean data of several centres."""

from __future__ import annotations

from pathlib import Path

import h5py
import iris_sample_data
import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.errors import FileError
from tests.io.files import BACKENDS, block, same_on_all

FOLDER = Path(iris_sample_data.path)
READERS = [b for b in BACKENDS if b != "virtual"]
LAST_TWO = (ms.Shard(0), ms.Shard(1))


def stored(file, name):
    with h5py.File(FOLDER / file, "r", locking=False) as f:
        return f[name][:]


@pytest.mark.parametrize("backend", READERS)
def test_time_slices_of_a_climate_model(mesh, backend):
    """240 years of 37 x 49 cells: uneven blocks, an unlimited time."""
    full = stored("A1B_north_america.nc", "air_temperature")
    where = {"path": FOLDER / "A1B_north_america.nc", "name": "air_temperature", "mesh": mesh, "backend": backend}
    for select in (-1, (slice(10, 40, 7),), (slice(None, 3), slice(5, 30), slice(None, None, 2)), None):
        expected = full[... if select is None else select]
        dims = expected.ndim - 2, expected.ndim - 1
        x = ms.io.read(placements=[ms.Shard(d) for d in dims], select=select, decode=True, **where)
        assert x.dtype == torch.float32  # nothing to decode
        assert np.array_equal(x.full_tensor().numpy(), expected)


def test_a_stream_of_years(mesh):
    full = stored("A1B_north_america.nc", "air_temperature")
    with ms.io.Dataset(FOLDER / "A1B_north_america.nc", "air_temperature", mesh, LAST_TWO) as ds:
        for t, batch in zip(range(0, 24, 8), ms.io.Loader(ds, batch_size=8)):
            assert np.array_equal(batch.to_local().numpy(), block(batch, full[t : t + 8]))
        assert np.array_equal(ds[-1].full_tensor().numpy(), full[-1])


@pytest.mark.parametrize("backend", READERS)
@pytest.mark.parametrize(
    ("file", "name", "fill"),
    [
        ("NEMO/nemo_1m_20150101-20150201_grid-T.nc", "tos", 1e20),  # gzip; _FillValue and missing_value
        ("ostia_monthly.nc", "surface_temperature", 1e20),
        ("orca2_votemper.nc", "votemper", 9.96921e36),
        ("atlantic_profiles.nc", "salinity", 32767.0),
    ],
)
def test_missing_cells(mesh, file, name, fill, backend):
    full = stored(file, name)
    missing = full == np.float32(fill)
    last = full.ndim - 1
    assert missing.any()
    assert not missing.all()
    x = ms.io.read(FOLDER / file, name, mesh, (ms.Shard(last - 1), ms.Shard(last)), decode=True, backend=backend)
    assert x.dtype == torch.float32
    assert np.array_equal(x.full_tensor().numpy(), np.where(missing, np.nan, full), equal_nan=True)
    with_halo = ms.io.read(FOLDER / file, name, mesh, (ms.Shard(last - 1), ms.Shard(last)), decode=True, halo={last: 1})
    inner = with_halo.narrow(last, 1, with_halo.shape[last] - 2)
    assert np.array_equal(inner.numpy(), x.to_local().numpy(), equal_nan=True)


def test_a_series_that_is_packed_by_its_users(mesh, folder):
    """A month of the satellite's analysis as centres ship it: 16 bits, a scale and an offset, by netCDF's rules."""
    full = stored("ostia_monthly.nc", "surface_temperature")[:4]
    missing = full == np.float32(1e20)
    packed = np.where(missing, -32768, np.round((np.where(missing, 273, full) - 273.15) / 0.01)).astype("<i2")
    if mesh.rank == 0:
        with h5py.File(folder / "packed.nc", "w") as f:
            d = f.create_dataset("sst", data=packed, maxshape=(None, *full.shape[1:]), chunks=True, shuffle=True)
            d.attrs.update({"scale_factor": np.float32(0.01), "add_offset": np.float32(273.15)})
            d.attrs["_FillValue"] = np.array([-32768], "<i2")
    mesh.comm.Barrier()
    x = ms.io.read(folder / "packed.nc", "sst", mesh, LAST_TWO, select=2, decode=True)
    found = x.full_tensor().numpy()
    assert np.array_equal(np.isnan(found), missing[2])
    assert np.nanmax(np.abs(found - full[2])[~missing[2]]) < 0.006


@pytest.mark.parametrize("file", ["space_weather.nc", "mesh_C4_synthetic_float.nc"])
def test_a_netcdf_3_file_is_named(mesh, file):
    with pytest.raises(FileError, match="netCDF-3") as e:
        ms.io.read(FOLDER / file, "time", mesh, (ms.Shard(0), ms.Replicate()))
    assert "nccopy" in same_on_all(e)


def test_names_that_are_no_numbers(mesh):
    with pytest.raises(FileError, match="air_temperature") as e:
        ms.io.read(FOLDER / "A1B_north_america.nc", "temperature", mesh, LAST_TWO)
    same_on_all(e)
    with h5py.File(FOLDER / "vlstr_type.nc", "r", locking=False) as f:
        names = [n for n, d in f.items() if isinstance(d, h5py.Dataset) and d.dtype.kind == "O"]
    for name in names:
        with pytest.raises(ms.UnsupportedDtypeError, match="do not share") as e:
            ms.io.read(FOLDER / "vlstr_type.nc", name, mesh, (ms.Replicate(), ms.Replicate()))
        same_on_all(e)
    assert names
