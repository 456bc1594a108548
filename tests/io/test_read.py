from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import h5py
import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.errors import FileError
from mpishard.io.file.hyperslab import BlockReader
from mpishard.io.file.selection import selected
from tests.io.files import BACKENDS, WORLD, block, same_on_all, sharded, store, values

READERS = [b for b in BACKENDS if b != "virtual"]
SELECTS = [
    0,
    (-1,),
    (slice(None), 2),
    (slice(1, None), slice(None, None, 2), slice(-3, None)),
    (..., 1),
    (0, ..., slice(4, 2)),
    (1, slice(None), slice(1, 20, 3)),
    (),
    None,
]


@pytest.mark.parametrize("backend", READERS)
@pytest.mark.parametrize("select", SELECTS, ids=str)
def test_selections(mesh, folder, select, backend):
    full = values((3, 6, 7))
    store(folder / "a.h5", a=(full.numpy(), {}))
    expected = full.numpy()[... if select is None else select]
    last = expected.ndim - 1
    x = ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(last)), select=select, backend=backend)
    assert x.shape == expected.shape
    assert np.array_equal(x.full_tensor().numpy(), expected)


@pytest.mark.parametrize("select", [3, (0, 0, 0, 0), (..., ...), (slice(None, None, -1),), ("a",), 1.5, True], ids=str)
def test_selections_that_do_not_fit(mesh, folder, select):
    store(folder / "a.h5", a=(np.zeros((3, 4, 5)), {}))
    with pytest.raises(ms.LayoutError, match="select") as e:
        ms.io.read(folder / "a.h5", "a", mesh, (ms.Replicate(), ms.Replicate()), select=select)
    same_on_all(e)


@pytest.mark.parametrize("shape", [(), (0,), (4,), (3, 5)], ids=str)
def test_a_selection_has_numpys_shape(shape):
    for select in ((), (...,), (slice(1, 3),), (0,)):
        try:
            expected = np.empty(shape)[select].shape
        except IndexError:
            with pytest.raises(ms.LayoutError):
                selected(select, shape)
            continue
        assert tuple(a.count for a in selected(select, shape) if a.kept) == expected


HALOS = [
    ({0: (1, 2)}, None),
    ({0: 1, 1: (2, 1)}, "zeros"),
    ({0: (3, 3), 1: (1, 0)}, "reflect"),
    ({-1: (2, 9)}, "replicate"),
    ({0: (8, 1), 1: (0, 2)}, "circular"),
    ({}, None),
]


@pytest.mark.parametrize("backend", READERS)
@pytest.mark.parametrize(("halo", "mode"), HALOS, ids=str)
@pytest.mark.parametrize("placements", [(ms.Shard(0), ms.Shard(1)), (ms.Shard(1), ms.Shard(1))], ids=str)
def test_a_halo_from_the_file_is_the_one_of_an_exchange(mesh, folder, halo, mode, placements, backend):
    full = values((7, 6))
    store(folder / "a.h5", a=(full.numpy(), {}))
    padded = ms.io.read(folder / "a.h5", "a", mesh, placements, halo=halo, mode=mode, backend=backend)
    widths = {d: (w, w) if isinstance(w, int) else w for d, w in halo.items()}
    expected = ms.halo_exchange(sharded(full, mesh, placements), widths, mode=mode) if halo else None
    if expected is None:
        expected = block(sharded(full, mesh, placements), full)
    assert type(padded) is torch.Tensor
    assert torch.equal(padded, expected)
    # into a kept buffer, of another order in memory and dtype
    kept = torch.full(padded.shape, -1.0, dtype=torch.float64)
    again = ms.io.read(folder / "a.h5", "a", mesh, placements, halo=halo, mode=mode, out=kept, backend=backend)
    assert again is kept
    assert torch.equal(kept, expected.double())
    if padded.ndim == 2:
        kept = torch.full(padded.shape[::-1], -1.0).t()
        ms.io.read(folder / "a.h5", "a", mesh, placements, halo=halo, mode=mode, out=kept, backend=backend)
        assert torch.equal(kept, expected)


def test_a_halo_wraps_on_a_periodic_mesh(folder):
    mesh = ms.init_mesh((-1,), ("x",), periodic=True)
    full = values((3, 8))
    store(folder / "a.h5", a=(full.numpy(), {}))
    padded = ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(1),), halo={1: (2, 1)})
    assert torch.equal(padded, ms.halo_exchange(sharded(full, mesh, (ms.Shard(1),)), {1: (2, 1)}))


@pytest.mark.parametrize("halo", [{2: 1}, {0: (-1, 0)}, {0: 9}, {0: 1, -2: 1}, {1: 1.5}], ids=str)
def test_halos_that_do_not_fit(mesh, folder, halo):
    store(folder / "a.h5", a=(np.zeros((4, 4)), {}))
    with pytest.raises(ms.LayoutError, match="halo") as e:
        ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(1)), halo=halo)
    same_on_all(e)


def test_into_a_kept_buffer(mesh, folder):
    full = values((6, 5))
    store(folder / "a.h5", a=(full.numpy(), {}))
    placements = (ms.Shard(0), ms.Shard(1))
    kept = torch.zeros(sharded(full, mesh).to_local().shape)
    x = ms.io.read(folder / "a.h5", "a", mesh, placements, out=kept)
    assert x.to_local().data_ptr() == kept.data_ptr()
    assert torch.equal(x.full_tensor(), full)
    wrong = torch.zeros(7, 7) if WORLD.rank == 0 else kept
    with pytest.raises(ms.LayoutError, match="out does not fit"):
        ms.io.read(folder / "a.h5", "a", mesh, placements, out=wrong)
    assert ms.io.read(folder / "a.h5", "a", mesh, placements, out=kept, dtype=kept.dtype).to_local() is not None
    # a dtype that the buffer has not was passed over in silence
    dtype = torch.float64 if WORLD.rank == WORLD.size - 1 else None
    with pytest.raises(ms.LayoutError, match="as dtype= says") as e:
        ms.io.read(folder / "a.h5", "a", mesh, placements, out=kept, dtype=dtype)
    same_on_all(e)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_this_process_has_open(mesh, folder, mode):
    """The text says what to close: HDF5 opens no file in two ways, and nothing is wrong with this one."""
    full = values((6, 5))
    ms.io.write(folder / "a.h5", {"a": sharded(full, mesh)}, backend="root")
    with h5py.File(folder / "a.h5", mode) if WORLD.rank == 0 else contextlib.nullcontext():
        with pytest.raises(FileError, match="close it where this process has it open") as e:
            ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(0),) * mesh.ndim, backend="root")
        same_on_all(e)
        if mode == "r":
            with pytest.raises(FileError, match="close it where this process has it open") as e:
                ms.io.write(folder / "a.h5", {"a": sharded(full, mesh)}, append="time", backend="root")
            same_on_all(e)
    WORLD.Barrier()
    x = ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(0),) * mesh.ndim)
    assert torch.equal(x.full_tensor(), full)


def test_a_dataset_without_cells(mesh, folder):
    store(folder / "a.h5", a=(h5py.Empty("f4"), {}))
    with pytest.raises(FileError, match=r"'a' in .* has no cells") as e:
        ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(1)))
    same_on_all(e)


@pytest.mark.parametrize("backend", READERS)
@pytest.mark.parametrize("halo", [None, {0: 1, 1: (2, 1)}], ids=str)
def test_into_pinned_memory(mesh, folder, halo, backend, monkeypatch):
    """HDF5 writes to the pages themselves, which stay where they are: there is no second copy."""
    full = values((6, 5))
    store(folder / "a.h5", a=(full.numpy(), {}))
    placements = (ms.Shard(0), ms.Shard(1))
    plain = ms.io.read(folder / "a.h5", "a", mesh, placements, halo=halo, backend=backend)
    local = plain if halo else plain.to_local()
    with mmap.mmap(-1, mmap.PAGESIZE) as pages:
        memory = torch.frombuffer(pages, dtype=torch.float32)
        pinned = memory[: local.numel()].view(local.shape)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(memory.data_ptr())
        assert libc.mlock(address, ctypes.c_size_t(mmap.PAGESIZE)) == 0, os.strerror(ctypes.get_errno())
        # what does not go straight passes through here
        monkeypatch.setattr(BlockReader, "_place", lambda *_: pytest.fail("read through another buffer"))
        x = ms.io.read(folder / "a.h5", "a", mesh, placements, halo=halo, out=pinned, backend=backend)
        assert (x if halo else x.to_local()).data_ptr() == memory.data_ptr()
        assert torch.equal(pinned, local)
        libc.munlock(address, ctypes.c_size_t(mmap.PAGESIZE))
        del memory, pinned, x


def test_device(mesh, folder):
    store(folder / "a.h5", a=(np.zeros((6, 5)), {}))
    x = ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(1)), device="cpu")
    assert x.device.type == "cpu"


# packed values of real files


def netcdf_like(path):
    """A file as netCDF-4 libraries write it: packed, with fill values, big-endian, unlimited time."""
    generator = np.random.default_rng(0)
    packed = generator.integers(-1000, 1000, (3, 6, 8)).astype(">i2")
    packed[:, 1, 2] = -32767
    packed[1, 3, :] = -9999
    if WORLD.rank == 0:
        with h5py.File(path, "w") as f:
            t = f.create_dataset(
                "t2m", data=packed, maxshape=(None, 6, 8), chunks=(1, 3, 4), compression="gzip", shuffle=True
            )
            t.attrs["scale_factor"] = np.float64(0.01)
            t.attrs["add_offset"] = np.array([273.15])
            t.attrs["_FillValue"] = np.array([-32767], ">i2")
            t.attrs["missing_value"] = np.int16(-9999)
            t.attrs["units"] = "K"
            for i, dim in enumerate(("time", "lat", "lon")):
                f.create_dataset(dim, data=np.arange(packed.shape[i], dtype=">f4")).make_scale(dim)
                t.dims[i].attach_scale(f[dim])
            f.create_dataset("plain", data=np.arange(12.0).reshape(3, 4))
            f.create_dataset("height", data=np.array([1.0, np.nan, 1e20])).attrs["_FillValue"] = 1e20
    WORLD.Barrier()
    missing = (packed == -32767) | (packed == -9999)
    return packed, np.where(missing, np.nan, packed.astype(np.float64) * 0.01 + 273.15)


@pytest.mark.parametrize("backend", READERS)
def test_decoding(mesh, folder, backend):
    packed, expected = netcdf_like(folder / "a.nc")
    where = {"backend": backend, "decode": True}
    x = ms.io.read(folder / "a.nc", "t2m", mesh, (ms.Shard(1), ms.Shard(2)), **where)
    assert x.dtype == torch.float32
    assert np.array_equal(np.isnan(x.full_tensor().numpy()), np.isnan(expected))
    assert np.allclose(x.full_tensor().numpy(), expected, rtol=1e-6, equal_nan=True)
    x = ms.io.read(folder / "a.nc", "t2m", mesh, (ms.Shard(1), ms.Shard(0)), dtype=torch.float64, select=2, **where)
    assert np.array_equal(x.full_tensor().numpy(), expected[2], equal_nan=True)
    # cells beyond the edge are no packed values
    padded = ms.io.read(folder / "a.nc", "t2m", mesh, (ms.Shard(1), ms.Shard(2)), halo={1: 1}, **where)
    if mesh.coords[0] == 0:
        assert not padded[:, 0].any()
    raw = ms.io.read(folder / "a.nc", "t2m", mesh, (ms.Shard(1), ms.Shard(2)), backend=backend)
    assert raw.dtype == torch.int16
    assert np.array_equal(raw.full_tensor().numpy(), packed)
    for name, dtype in (("plain", torch.float64), ("height", torch.float64)):
        y = ms.io.read(folder / "a.nc", name, mesh, (ms.Shard(0), ms.Replicate()), **where)
        assert y.dtype == dtype
    assert np.array_equal(y.full_tensor().numpy(), [1.0, np.nan, np.nan], equal_nan=True)
    with pytest.raises(ms.LayoutError, match="floating"):
        ms.io.read(folder / "a.nc", "t2m", mesh, (ms.Shard(1), ms.Shard(2)), dtype=torch.int32, decode=True)


@pytest.mark.parametrize("backend", READERS)
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_unsigned_numbers(mesh, folder, backend, bits):
    """As scanners and microscopes store them, and those that netCDF's users declare by an attribute."""
    last = 2**bits - 1
    cells = np.array([0, 1, 2 ** (bits - 1) - 1, 2 ** (bits - 1), last - 1, last] * 2, f">u{bits // 8}").reshape(4, 3)
    signed, on = cells.view(f">i{bits // 8}"), (ms.Shard(0), ms.Replicate())
    if WORLD.rank == 0:
        with h5py.File(folder / "a.nc", "w") as f:
            f["unsigned"] = cells
            for name, data, text in (
                ("bytes", signed, np.bytes_("true")),
                ("text", signed, "True"),
                ("turned", cells, "false"),
            ):
                dataset = f.create_dataset(name, data=data)
                dataset.attrs.update(
                    {"_Unsigned": text, "scale_factor": 0.5, "missing_value": data.dtype.type(data[1, 2])}
                )
                # of another type than the cells, and one that no cell has
                dataset.attrs["_FillValue"] = np.array([float(data[0, 1]), 0.25, 1e300])
    WORLD.Barrier()
    where = {"mesh": mesh, "placements": on, "backend": backend}
    x = ms.io.read(folder / "a.nc", "unsigned", **where)
    assert x.dtype == getattr(torch, f"uint{bits}")
    assert np.array_equal(x.full_tensor().numpy(), cells)
    assert np.array_equal(x.to(torch.float64).full_tensor().numpy(), cells.astype(np.float64))
    padded = ms.io.read(folder / "a.nc", "unsigned", halo={1: 1}, mode="reflect", **where)
    assert np.array_equal(padded.numpy(), np.pad(x.to_local().numpy(), ((0, 0), (1, 1)), "reflect"))
    for name, stored in (("bytes", cells), ("text", cells), ("turned", signed)):
        expected = stored.astype(np.float64) * 0.5
        expected[(stored == stored[1, 2]) | (stored == stored[0, 1])] = np.nan
        y = ms.io.read(folder / "a.nc", name, decode=True, dtype=torch.float64, **where)
        assert np.array_equal(y.full_tensor().numpy(), expected, equal_nan=True), name
        assert ms.io.read(folder / "a.nc", name, decode=True, **where).dtype == (
            torch.float32 if bits < 32 else torch.float64
        )
    ms.io.write(folder / "b.h5", {"x": x})
    assert np.array_equal(ms.io.read(folder / "b.h5", "x", **where).full_tensor().numpy(), cells)
    ms.io.save_checkpoint(folder / "c", 1, tensors={"x": x, "plain": x.full_tensor()}, rng=False)
    found = ms.io.load_checkpoint(folder / "c", mesh=mesh, rng=False).tensors
    assert np.array_equal(found["x"].full_tensor().numpy(), cells)
    assert np.array_equal(found["plain"].numpy(), cells)


@pytest.mark.parametrize("magic", [b"CDF\x01", b"CDF\x02", b"CDF\x05"])
def test_netcdf_3_is_named(mesh, folder, magic):
    if WORLD.rank == 0:
        (folder / "a.nc").write_bytes(magic + b"\0" * 100)
    WORLD.Barrier()
    with pytest.raises(FileError, match="netCDF-3") as e:
        ms.io.read(folder / "a.nc", "t", mesh, (ms.Shard(0), ms.Replicate()))
    assert "nccopy" in same_on_all(e)


def test_a_folder_is_no_file(mesh, folder):
    with pytest.raises(FileError, match="a folder") as e:
        ms.io.read(folder, "t", mesh, (ms.Shard(0), ms.Replicate()))
    same_on_all(e)


@pytest.mark.parametrize("backend", READERS)
@pytest.mark.ranks(2, 3, 4)
def test_one_rank_cannot_open(mesh, folder, backend):
    store(folder / "a.h5", a=(np.zeros(4), {}))
    (folder / f"own{WORLD.rank}").mkdir()
    at = folder / f"own{WORLD.rank}" / "a.h5"
    if WORLD.rank:
        os.link(folder / "a.h5", at)
    with pytest.raises(FileError, match=r"no such file[\s\S]*raised on: rank 0 of") as e:
        ms.io.read(at, "a", mesh, (ms.Shard(0), ms.Replicate()), backend=backend)
    same_on_all(e)


def test_complex_cells_that_are_missing(mesh, folder):
    if WORLD.rank == 0:
        with h5py.File(folder / "a.h5", "w") as f:
            d = f.create_dataset("c", data=np.arange(6) * 1j)
            d.attrs["_FillValue"], d.attrs["missing_value"], d.attrs["scale_factor"] = np.complex128(1j), 0.0, 2.0
    WORLD.Barrier()
    x = ms.io.read(folder / "a.h5", "c", mesh, (ms.Shard(0), ms.Replicate()), decode=True).full_tensor()
    assert x.isnan().tolist() == [True, True, False, False, False, False]
    assert x[2:].tolist() == [4j, 6j, 8j, 10j]


def test_a_step_that_no_file_has(mesh, folder):
    store(folder / "a.h5", u=(np.arange(6.0), {}))
    x = ms.io.read(folder / "a.h5", "u", mesh, (ms.Shard(0), ms.Replicate()), select=slice(2, None, 1 << 70))
    assert x.full_tensor().tolist() == [2.0]
