from __future__ import annotations

import os
import sys
import warnings
from functools import partial

import h5py
import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.comm.collective import gather_slabs
from mpishard.errors import MpishardError
from mpishard.io.backend import choice as backend
from mpishard.io.backend import job, mpio, root, virtual
from mpishard.io.backend.choice import mpio_obstacle
from mpishard.io.file import hyperslab
from mpishard.io.file.dtype import NUMPY
from tests.io.files import BACKENDS, WORLD, on_root, same_on_all, sharded, values

SIZE = WORLD.size
CUTS = [
    ((7, 5, 3), (ms.Shard(0), ms.Shard(1)), None),
    ((2, 9), (ms.Shard(1), ms.Shard(1)), None),
    ((1, 3), (ms.Shard(0), ms.Shard(1)), None),
    ((6, 4), (ms.Replicate(), ms.Shard(0)), None),
    ((0, 4), (ms.Shard(0), ms.Shard(1)), None),
    ((5,), (ms.Replicate(), ms.Replicate()), None),
]


def contents(file):
    """Return all that a user sees of a file."""
    found = {}

    def look(name, node):
        if isinstance(node, h5py.Dataset):
            dims = [(d.label, [s.name for s in d.values()]) for d in node.dims]
            own = {k: v for k, v in node.attrs.items() if k not in ("DIMENSION_LIST", "REFERENCE_LIST")}
            found[name] = (node.shape, node.dtype, np.asarray(node[()]).tobytes(), dims, str(own))

    file.visititems(look)
    return found, str(dict(file.attrs))


def written(path, tensors, backends=BACKENDS, **options):
    """Write through every back-end, and return what is in the files, which must be the same."""
    seen = []
    mesh, filtered = next(iter(tensors.values())).mesh, options.get("compression") is not None
    for name in backends:
        at = path / f"{name}.h5"
        done = ms.io.write(at, tensors, backend=name, **options)
        assert done.backend == ms.io.choose_backend(mesh, 0, name, filtered=filtered).name
        assert "asked for" in done.reason
        with h5py.File(at, "r", locking=False) as f:
            seen.append(contents(f))
        WORLD.Barrier()
    for other in seen[1:]:
        assert other == seen[0]
    return seen[0][0]


@pytest.mark.parametrize(("shape", "placements", "sizes"), CUTS, ids=str)
def test_all_backends_write_the_same(mesh, folder, shape, placements, sizes):
    full = values(shape)
    x = sharded(full, mesh, placements, sizes)
    seen = written(folder, {"g/x": x, "y": x.double() * 2}, attrs={"title": "t", "n": [1, 2], "words": ["a", "b"]})
    assert seen["g/x"][2] == full.numpy().tobytes()
    assert seen["y"][2] == (full.double() * 2).numpy().tobytes()


def test_scalars_and_dtypes(mesh, folder):
    tensors = {str(d): sharded(values((4, 5), d), mesh) for d in NUMPY}
    tensors["scalar"] = sharded(torch.tensor(2.5), mesh, (ms.Replicate(), ms.Replicate()))
    seen = written(folder, tensors)
    for dtype in NUMPY:
        assert seen[str(dtype)][2] == values((4, 5), dtype).numpy().tobytes()
    assert seen["scalar"][0] == ()


def test_uneven_and_empty_blocks(mesh, folder):
    full = values((11, 6))
    ny, nx = mesh.shape
    x = sharded(full, mesh, sizes={0: [11 - (ny - 1), *[1] * (ny - 1)], 1: [0] * (nx - 1) + [6]})
    assert written(folder, {"x": x})["x"][2] == full.numpy().tobytes()


@pytest.mark.parametrize("chunks", [True, (2, 3), None], ids=str)
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_chunks_and_filters(mesh, folder, chunks, compression):
    full = values((9, 10))
    x = sharded(full, mesh)
    small = sharded(full[:1, :2], mesh)
    assert (
        written(folder, {"x": x, "s": small}, chunks=chunks, compression=compression)["x"][2] == full.numpy().tobytes()
    )
    with h5py.File(folder / "root.h5", "r") as f:
        assert f["x"].compression == compression
        if chunks is True:
            assert f["x"].chunks == tuple(-(-n // s) for n, s in zip(full.shape, mesh.shape))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compressed_datasets_of_many_chunks(mesh, folder, backend):
    # through MPI-IO, HDF5 1.10.8 hangs or writes other bytes here, and cannot read what lzf did not shorten
    full = torch.rand(400, 350, generator=torch.Generator().manual_seed(0))
    tensors = {"x": sharded(full, mesh), "y": sharded(full + 1, mesh)}
    ms.io.write(folder / "a.h5", tensors, backend=backend, chunks=(5, 7), compression="lzf")
    steps = None if backend == "virtual" else backend
    ms.io.write(folder / "t.h5", tensors, backend=steps, append="time", chunks=(5, 7), compression="lzf")
    # filters of the file, not of the call
    ms.io.write(folder / "t.h5", tensors, backend=steps, append="time")
    for name, expected in {"a.h5": full, "t.h5": torch.stack((full, full))}.items():
        for i, dataset in enumerate("xy"):
            x = ms.io.read(folder / name, dataset, mesh, (ms.Shard(0), ms.Shard(1)), backend=backend)
            assert torch.equal(x.full_tensor(), expected + i)


def test_dims_scales_and_attributes(mesh, folder):
    full = values((4, 6))
    x = sharded(full, mesh)
    lat = np.linspace(-90, 90, 4)
    scales = {"lat": lat if WORLD.rank == 0 else lat + 1}
    attrs = {"title": f"from rank {WORLD.rank}"}
    seen = written(
        folder,
        {"t": x, "u": x},
        attrs=attrs,
        dims={"t": ("lat", "lon")},
        scales=scales,
        variable_attrs={"t": {"units": "K", "by": WORLD.rank}},
    )
    assert seen["t"][3] == [("lat", ["/lat"]), ("lon", ["/lon"])]
    # in a file of named dims, those of all datasets have names
    assert seen["u"][3] == [("dim0_4", ["/dim0_4"]), ("dim1_6", ["/dim1_6"])]
    assert np.frombuffer(seen["lat"][2]).tolist() == lat.tolist()
    with h5py.File(folder / "root.h5", "r") as f:
        assert f.attrs["title"] == "from rank 0"
        assert f["t"].attrs["by"] == 0
        assert f["lon"].attrs["NAME"].startswith(b"This is a netCDF dimension but not a netCDF variable.")
    xarray_like = ms.io.read(folder / "root.h5", "lat", mesh, (ms.Replicate(), ms.Replicate()))
    assert torch.equal(xarray_like.to_local(), torch.from_numpy(lat))


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "virtual"])
def test_steps_are_appended(mesh, folder, backend):
    full = values((4, 6))
    for step in range(3):
        ms.io.write(
            folder / "a.h5",
            {"x": sharded(full + step, mesh), "n": sharded(torch.tensor(step), mesh, (ms.Replicate(), ms.Replicate()))},
            backend=backend,
            append="time",
            scales={"time": 0.5 * step},
        )
    with h5py.File(folder / "a.h5", "r", locking=False) as f:
        assert f["x"].maxshape == (None, 4, 6)
        assert f["time"][:].tolist() == [0.0, 0.5, 1.0]
        assert f["n"][:].tolist() == [0, 1, 2]
        assert f["x"].dims[0].label == "time"
        for step in range(3):
            assert np.array_equal(f["x"][step], full.numpy() + step)
    last = ms.io.read(folder / "a.h5", "x", mesh, (ms.Shard(0), ms.Shard(1)), select=-1)
    assert torch.equal(last.full_tensor(), full + 2)
    WORLD.Barrier()
    for other in (sharded(full[:3], mesh), sharded(full.double(), mesh)):
        with pytest.raises(ms.MpishardError, match="cannot append 'x'") as e:
            ms.io.write(folder / "a.h5", {"x": other}, backend=backend, append="time")
        same_on_all(e)
    with h5py.File(folder / "a.h5", "r", locking=False) as f:
        assert len(f["x"]) == 3
    with pytest.raises(ms.UnsupportedOperationError, match="cannot append"):
        ms.io.write(folder / "a.h5", {"x": sharded(full, mesh)}, append="time", backend="virtual")


def test_a_failed_step_is_taken_back(mesh, folder, monkeypatch):
    x = sharded(values((4, 6)), mesh)
    ms.io.write(folder / "a.h5", {"x": x}, append="time", backend="root")

    def full_disk(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(root, "selection", full_disk)
    with pytest.raises(ms.MpishardError, match="No space left"):
        ms.io.write(folder / "a.h5", {"x": x}, append="time", backend="root")
    monkeypatch.undo()
    with h5py.File(folder / "a.h5", "r", locking=False) as f:
        assert len(f["x"]) == len(f["time"]) == 1
    WORLD.Barrier()
    ms.io.write(folder / "a.h5", {"x": x}, append="time", backend="root")
    assert len(ms.io.Dataset(folder / "a.h5", "x", mesh, x.placements)) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_rank_0_alone_cannot_send_or_write(mesh, folder, backend):
    """Its description of the file is sent to all; what cannot travel, or be named, is an error of all."""
    x = sharded(values((4, 6)), mesh)
    for wrong in (
        {"compression": {"x": lambda: 0}},
        {"attrs": {"a": memoryview(b"xy")}},
        {"attrs": {"a": "\ud800"}},
        {"attrs": {"a": 10**5000}},
        {"dims": ("y", "\ud800")},
        {"tensors": {"x\ud800": x}},
        {"path": folder / "\ud800.h5"},
    ):
        with pytest.raises(ms.errors.FileError) as e:
            ms.io.write(**{"path": folder / "a.h5", "tensors": {"x": x}, "backend": backend, **wrong})
        assert len(set(WORLD.allgather(str(e.value)))) == 1
    WORLD.Barrier()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("kind", [AttributeError, MemoryError, OverflowError, UserWarning])
def test_whatever_one_rank_raises_all_raise(mesh, folder, monkeypatch, kind):
    def fail(*_):
        raise kind("of rank 0")

    for name in ("create", "selection", "finish"):
        monkeypatch.setattr(root, name, fail)  # only rank 0 calls it
        with pytest.raises(ms.errors.FileError, match="of rank 0"):
            ms.io.write(folder / "a.h5", {"x": sharded(values((4, 6)), mesh)}, backend="root")
        monkeypatch.undo()
    WORLD.Barrier()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", BACKENDS)
def test_many_pieces_and_views(mesh, folder, name, monkeypatch):
    for module in (job, mpio, root):
        for limit in ("STAGED_NBYTES", "DIRECT_NBYTES"):
            if hasattr(module, limit):
                monkeypatch.setattr(module, limit, 64)
    monkeypatch.setattr(hyperslab, "DIRECT_NBYTES", 64)
    monkeypatch.setattr(hyperslab, "STAGED_NBYTES", 64)
    full = values((7, 13, 3))
    x = sharded(full, mesh)
    local = x.to_local()
    # of one rank, memory that is not in order
    if WORLD.rank == 0:
        local = local.transpose(0, 2).contiguous().transpose(0, 2)
    x = ms.ShardTensor.from_local(local, mesh, x.placements)
    ms.io.write(folder / "a.h5", {"x": x, "z": torch.complex(x, x).conj()}, backend=name)
    for placements in ((ms.Shard(0), ms.Shard(1)), (ms.Shard(2), ms.Shard(0)), (ms.Replicate(), ms.Shard(1))):
        for how in (name, "root"):
            for dtype in (torch.float32, torch.float64):
                y = ms.io.read(folder / "a.h5", "x", mesh, placements, backend=how, dtype=dtype)
                assert torch.equal(y.full_tensor(), full.to(dtype))
    z = ms.io.read(folder / "a.h5", "z", mesh, (ms.Shard(2), ms.Shard(1)))
    assert torch.equal(z.full_tensor(), torch.complex(full, -full))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_headers_have_checksums(mesh, folder, name, background):
    """In the superblock, whose version follows the signature, and before each object: HDF5 sees damage."""
    x = sharded(values((6, 6)), mesh)
    ms.io.write(folder / "x.h5", {"g/x": x}, backend=name)
    own = None if background else name
    ms.io.save_checkpoint(folder / "c", 1, tensors={"x": x}, asynchronous=background, backend=own).wait()
    WORLD.Barrier()
    for at in folder.rglob("*.h5"):
        raw = at.read_bytes()
        assert raw[8] >= 2, at
        assert b"OHDR" in raw, at


@pytest.mark.parametrize("name", BACKENDS)
def test_one_file_is_replaced_by_another(mesh, folder, name):
    x = sharded(values((6, 6)), mesh)
    for before in BACKENDS:
        ms.io.write(folder / "a.h5", {"old": x}, backend=before)
        ms.io.write(folder / "a.h5", {"x": x * 2}, backend=name)
        assert torch.equal(ms.io.read(folder / "a.h5", "x", mesh, x.placements).full_tensor(), 2 * values((6, 6)))
        WORLD.Barrier()
        there = sorted(os.listdir(folder))
        assert len(there) == 1 + (name == "virtual"), there


@pytest.mark.parametrize("name", BACKENDS)
def test_a_file_that_was_renamed_keeps_its_parts(mesh, folder, name):
    """Outputs are rotated so, and what is written next under the old name is another file."""
    x = sharded(values((6, 6)), mesh)
    for k in range(3):
        ms.io.write(folder / "a.h5", {"x": x + k}, backend="virtual" if k < 2 else name)
        if k < 2:
            on_root(lambda k=k: os.rename(folder / "a.h5", folder / f"{k}.h5"))
    for k, at in enumerate(("0.h5", "1.h5", "a.h5")):
        assert torch.equal(ms.io.read(folder / at, "x", mesh, x.placements).full_tensor(), values((6, 6)) + k)


def test_a_file_that_another_name_or_a_link_leads_to_keeps_its_parts(mesh, folder):
    x = sharded(values((6, 6)), mesh)

    def named_twice():
        os.link(folder / "a.h5", folder / "kept.h5")

    def linked():
        os.rename(folder / "a.h5", folder / "renamed.h5")
        os.symlink("renamed.h5", folder / "a.h5")

    for give in (named_twice, linked):
        ms.io.write(folder / "a.h5", {"x": x}, backend="virtual")
        on_root(give)
        ms.io.write(folder / "a.h5", {"x": x + 1}, backend="virtual")
    for at, more in (("kept.h5", 0), ("renamed.h5", 0), ("a.h5", 1)):
        assert torch.equal(ms.io.read(folder / at, "x", mesh, x.placements).full_tensor(), values((6, 6)) + more)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "mpio"])
def test_scales_of_text_as_h5py_has_it(mesh, folder, name):
    """What h5py reads of names of channels can be written again; MPI-IO writes no text of several lengths."""
    at, given = folder / "a.h5", np.array(["u", "v", "t2m"], object)
    for _ in range(2):
        x = sharded(values((3, 4)), mesh)
        ms.io.write(at, {"x": x}, dims=("channel", "y"), scales={"channel": given}, backend=name)
        with h5py.File(at, "r", locking=False) as f:
            given = f["channel"][:]
        assert given.tolist() == [b"u", b"v", b"t2m"]
        WORLD.Barrier()
    with pytest.raises(MpishardError, match="scale of dim 'channel'") as e:
        ms.io.write(at, {"x": x}, dims=("channel", "y"), scales={"channel": ["u", "v", "t2m"]}, backend=name)
    same_on_all(e)


def test_jobs_that_write_one_file_leave_each_other_their_parts(mesh, folder, monkeypatch):
    """The last one to finish has the file, and all of it, whenever the others tidy up."""
    at, full = folder / "a.h5", values((6, 6))
    where = (ms.Shard(0), ms.Shard(1))
    finish = virtual.finish

    def beside(job):
        # another job finishes, and tidies up while this one has all but the name
        virtual.prune(at)
        finish(job)

    monkeypatch.setattr(virtual, "finish", beside)
    for k in (1, 2):
        ms.io.write(at, {"x": sharded(k * full, mesh)}, backend="virtual")
        if WORLD.rank == 0:
            (folder / "a.h5.parts-0123456789ab").mkdir()  # of a job that was killed
            # one that has finished before, and tidies up now
            virtual.prune(at)
            assert len(os.listdir(folder)) == 2
        WORLD.Barrier()
        assert torch.equal(ms.io.read(at, "x", mesh, where).full_tensor(), k * full)


def test_a_virtual_file_moves_with_its_folder(mesh, folder):
    full = values((6, 6))
    ms.io.write(folder / "a.h5", {"x": sharded(full, mesh)}, backend="virtual")
    if WORLD.rank == 0:
        (folder / "there").mkdir()
        for name in os.listdir(folder):
            if name != "there":
                os.rename(folder / name, folder / "there" / name)
    WORLD.Barrier()
    x = ms.io.read(folder / "there" / "a.h5", "x", mesh, (ms.Shard(1), ms.Replicate()))
    assert torch.equal(x.full_tensor(), full)


@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": (2, 3)}, {"chunks": (2, 3), "compression": "gzip"}, {"chunks": (2, 3), "maxshape": (None, 6)}],
)
@pytest.mark.parametrize("written", [0, 2])
def test_what_was_never_written_is_the_fill_value(mesh, folder, options, written):
    """Also where ranks have nothing to read: HDF5 does not meet them in what it fills."""
    at, full = folder / "x.h5", torch.full((4, 6), 3.0)
    full[:written] = 1
    if WORLD.rank == 0:
        with h5py.File(at, "w") as f:
            x = f.create_dataset("x", (4, 6), "f4", fillvalue=3, **options)
            if written:
                x[:written] = 1
    WORLD.Barrier()
    last = (0,) * (mesh.shape[0] - 1)
    for sizes in (None, {0: (*last, 4)}, {0: (4, *last)}):
        x = ms.io.read(at, "x", mesh, (ms.Shard(0), ms.Shard(1)), sizes=sizes)
        assert torch.equal(x.full_tensor(), full)


@pytest.mark.parametrize("harm", ["missing", "truncated"])
def test_a_part_that_is_damaged_is_no_fill_value(mesh, folder, harm):
    ms.io.write(folder / "a.h5", {"x": sharded(values((6, 6)), mesh)}, backend="virtual")
    if WORLD.rank == 0:
        (parts,) = folder.glob("a.h5.parts-*")
        last = parts / "0.h5"
        if harm == "missing":
            last.unlink()
        else:
            os.truncate(last, 500)
    WORLD.Barrier()
    with pytest.raises(ms.MpishardError, match=r"parts-\w+/0\.h5") as e:
        ms.io.read(folder / "a.h5", "x", mesh, (ms.Shard(0), ms.Shard(1)))
    same_on_all(e)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "mpio"])
@pytest.mark.parametrize("locking", [None, False, True, "best-effort"])
def test_locks_are_taken_as_asked(mesh, folder, backend, locking, monkeypatch):
    asked, File = [], h5py.File

    def look(path, mode, **options):
        if mode != "r":
            asked.append(options["locking"])
        return File(path, mode, **options)

    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    monkeypatch.setattr(h5py, "File", look)
    full = values((6, 5))
    ms.io.write(folder / "a.h5", {"x": sharded(full, mesh)}, backend=backend, locking=locking)
    assert set(asked) <= {locking}
    assert asked or WORLD.rank
    assert "HDF5_USE_FILE_LOCKING" not in os.environ
    x = ms.io.read(folder / "a.h5", "x", mesh, (ms.Shard(1), ms.Shard(0)))
    assert torch.equal(x.full_tensor(), full)


# choice


def test_a_rank_that_has_no_memory_for_its_turn(mesh, folder, monkeypatch):
    """Rank 0 waits for its slabs."""
    at, full = folder / "a.h5", values((9, 10))
    ms.io.write(at, {"x": sharded(full, mesh)}, backend="root")
    before = gather_slabs.cells_of

    def failing(odd, *args):
        if WORLD.rank == odd:
            raise MemoryError("none left")
        return before(*args)

    for odd in (0, WORLD.size - 1):
        monkeypatch.setattr(gather_slabs, "cells_of", partial(failing, odd))
        with pytest.raises((MpishardError, MemoryError), match="none left") as e:
            ms.io.write(at, {"x": sharded(full + 1, mesh)}, backend="root")
        same_on_all(e)
        monkeypatch.undo()
        assert torch.equal(ms.io.read(at, "x", mesh, (ms.Shard(0), ms.Shard(1))).full_tensor(), full)
        assert os.listdir(folder) == ["a.h5"]
        WORLD.Barrier()


def test_what_is_chosen_and_why(mesh, monkeypatch, capfd):
    monkeypatch.delenv("MPISHARD_IO", raising=False)
    monkeypatch.setattr(backend, "mpio_obstacle", lambda: ("h5py was built without MPI", "build it"))
    small, large = ms.io.choose_backend(mesh, 1000), ms.io.choose_backend(mesh, 10 << 30)
    if SIZE == 1:
        assert small == large == ("root", "there is one rank")
    else:
        assert small.name == "root"
        assert large == ("virtual", "h5py was built without MPI, and 1.024e+04 MiB are too many for one rank")
        assert ms.io.choose_backend(mesh, 10 << 30, append=True).name == "root"
    with pytest.raises(ms.UnsupportedOperationError, match="without MPI"):
        ms.io.choose_backend(mesh, 1, "mpio")
    monkeypatch.setattr(backend, "mpio_obstacle", lambda: None)
    assert ms.io.choose_backend(mesh, 1).name == ("root" if SIZE == 1 else "mpio")
    for version, fits in {(1, 10, 8): False, (1, 12, 3): False, (1, 14, 0): True, (2, 0, 0): True}.items():
        monkeypatch.setattr(h5py.version, "hdf5_version_tuple", version)
        assert ms.io.choose_backend(mesh, 1, "mpio").name == "mpio"
        asked = ms.io.choose_backend(mesh, 1, "mpio", filtered=True)
        assert asked.name == ("mpio" if fits else "root")
        assert fits or "'mpio' is asked for by the argument, but compressed" in asked.reason
        assert ms.io.choose_backend(mesh, 10 << 30, filtered=True).name == (
            "root" if SIZE == 1 else "mpio" if fits else "virtual"
        )
    monkeypatch.setenv("MPISHARD_IO", "virtual")
    assert ms.io.choose_backend(mesh, 1) == ("virtual", "asked for by MPISHARD_IO")
    assert ms.io.choose_backend(mesh, 1, "root").name == "root"
    for name in ("netcdf", ""):
        monkeypatch.setenv("MPISHARD_IO", name or "posix")
        with pytest.raises(ms.UnsupportedOperationError, match="unknown backend"):
            ms.io.choose_backend(mesh, 1)
    monkeypatch.setattr(backend, "_told", set())
    capfd.readouterr()
    for _ in range(2):
        backend.tell(mesh, large, "write")
    told = capfd.readouterr().err
    assert told.count("mpishard.io: write through") == (WORLD.rank == 0 and SIZE > 1)


def test_forced_by_the_environment(mesh, folder, monkeypatch):
    monkeypatch.setenv("MPISHARD_IO", "virtual")
    x = sharded(values((4, 4)), mesh)
    assert ms.io.write(folder / "a.h5", {"x": x})[:2] == ("virtual", "asked for by MPISHARD_IO")
    with h5py.File(folder / "a.h5", "r") as f:
        assert f["x"].is_virtual
    monkeypatch.setenv("MPISHARD_IO", "posix")
    with pytest.raises(ms.UnsupportedOperationError, match="unknown backend") as e:
        ms.io.write(folder / "b.h5", {"x": x})
    same_on_all(e)


def test_two_mpi_libraries_are_refused(monkeypatch):
    assert len(backend.mpi_libraries()) == 1
    monkeypatch.setattr(backend, "mpi_libraries", lambda: ["/env/lib/libmpi.so.12.5.2", "/lib/libmpi.so.40.30.4"])
    backend.mpio_obstacle.cache_clear()
    if h5py.get_config().mpi:
        assert "two MPI libraries" in backend.mpio_obstacle()[0]
    backend.mpio_obstacle.cache_clear()


if not mpio_obstacle():

    def test_every_cell_is_written_collectively(mesh, folder):
        x = sharded(values((64, 64)), mesh)
        done = ms.io.write(folder / "a.h5", {"x": x}, backend="mpio")
        assert done.mode == "contiguous collective"
        done = ms.io.write(folder / "b.h5", {"x": x}, backend="mpio", chunks=True)
        assert done.mode in mpio.COLLECTIVE
        done = ms.io.write(
            folder / "c.h5", {"x": x}, backend="mpio", hints={"cb_nodes": 1}, alignment=(64, 4096), chunks=(8, 8)
        )
        assert done.mode in mpio.COLLECTIVE
        with h5py.File(folder / "c.h5", "r", locking=False) as f:
            assert f["x"].id.get_chunk_info(0).byte_offset % 4096 == 0

    def test_a_rank_that_has_no_memory_before_a_collective_call(mesh, folder, monkeypatch):
        """The others are in that call, and waited for it."""
        at, full, where = folder / "a.h5", values((9, 10)), (ms.Shard(0), ms.Shard(1))
        ms.io.write(at, {"x": sharded(full, mesh)}, backend="mpio", append="time")
        last = WORLD.size - 1

        def failing(then, *args):
            if WORLD.rank == last:
                raise MemoryError("none left")
            return then(*args)

        monkeypatch.setattr(mpio, "cells_of", partial(failing, mpio.cells_of))
        monkeypatch.setattr(hyperslab, "host_tensor", partial(failing, hyperslab.host_tensor))
        for call in (
            lambda: ms.io.write(at, {"x": sharded(full, mesh)}, backend="mpio"),
            lambda: ms.io.write(at, {"x": sharded(full, mesh)}, backend="mpio", append="time"),
            lambda: ms.io.read(at, "x", mesh, where, backend="mpio", dtype=torch.float64, select=0),
        ):
            with pytest.raises(ms.FileError, match="MemoryError: none left") as e:
                call()
            same_on_all(e)
        monkeypatch.undo()
        assert torch.equal(ms.io.read(at, "x", mesh, where, select=0, backend="mpio").full_tensor(), full)

    @pytest.mark.ranks(2, 3, 4)
    def test_a_rank_that_fails_alone_where_files_are_opened_together(mesh, folder, monkeypatch):
        """To close a file takes all ranks, and HDF5 opens the sources of a virtual dataset with all of them."""
        at, full, where = folder / "a.h5", values((9, 10)), (ms.Shard(0), ms.Shard(1))
        ms.io.write(at, {"x": sharded(full, mesh)}, backend="mpio", append="time")
        ms.io.write(folder / "v.h5", {"x": sharded(full, mesh)}, backend="virtual")
        last = WORLD.rank == WORLD.size - 1

        def failing(then, *args, **options):
            out = then(*args, **options) if then is mpio_opened else None
            if last:
                if out is not None:
                    mpio.abandon(out)
                raise MemoryError("none left")
            return out or then(*args, **options)

        def read(name, **options):
            return ms.io.read(folder / name, "x", mesh, where, backend="mpio", **options)

        def refused(*calls):
            for call in calls:
                with pytest.raises(ms.FileError, match="none left") as e:
                    call()
                same_on_all(e)

        mpio_opened = mpio._opened
        monkeypatch.setattr(mpio, "_opened", partial(failing, mpio_opened))
        refused(
            lambda: read("a.h5", select=0),
            lambda: ms.io.write(folder / "b.h5", {"x": sharded(full, mesh)}, backend="mpio"),
            lambda: ms.io.write(at, {"x": sharded(full, mesh)}, backend="mpio", append="time"),
        )
        monkeypatch.undo()
        module = sys.modules["mpishard.io.read"]
        monkeypatch.setattr(module, "found", partial(failing, module.found))
        refused(lambda: read("v.h5"))
        monkeypatch.undo()
        assert torch.equal(read("v.h5").full_tensor(), full)
        with pytest.raises(ms.FileError, match="could not close after a step that failed") as e:
            ms.io.write(at, {"x": sharded(full + 1, mesh)}, backend="mpio", append="time")
        same_on_all(e)
        assert torch.equal(read("a.h5", select=0).full_tensor(), full)
        ms.io.write(at, {"x": sharded(full + 1, mesh)}, backend="mpio")
        assert torch.equal(read("a.h5").full_tensor(), full + 1)

    @pytest.mark.parametrize("name", ["x", "time"])
    def test_a_dataset_that_one_rank_cannot_open_to_write(mesh, folder, monkeypatch, name):
        """The others were in the collective call that writes it."""
        at, x = folder / "a.h5", sharded(values((9, 10)), mesh)
        ms.io.write(at, {"x": x}, backend="mpio", append="time")
        ready, before, get = [], mpio.step_of, h5py.Group.__getitem__

        def failing(self, at):
            if ready and at == name and WORLD.rank == WORLD.size - 1:
                raise MemoryError("none left")
            return get(self, at)

        monkeypatch.setattr(mpio, "step_of", lambda *args: (before(*args), ready.append(None))[0])
        monkeypatch.setattr(h5py.Group, "__getitem__", failing)
        with pytest.raises(ms.FileError, match="none left") as e:
            ms.io.write(at, {"x": x}, backend="mpio", append="time")
        same_on_all(e)
        monkeypatch.undo()
        assert ms.io.read(at, "x", mesh, (ms.Replicate(), ms.Shard(0)), backend="root").shape == (1, 9, 10)

    def test_reading_collectively(mesh, folder):
        full = values((9, 10))
        ms.io.write(folder / "a.h5", {"x": sharded(full, mesh)}, backend="mpio")
        widths = {0: (1, 1), 1: (2, 0)}
        placements = (ms.Shard(0), ms.Shard(1))
        padded = ms.io.read(folder / "a.h5", "x", mesh, placements, halo=widths, mode="circular", backend="mpio")
        assert torch.equal(padded, ms.halo_exchange(sharded(full, mesh), widths, mode="circular"))


@pytest.mark.ranks(2, 3, 4)
def test_a_warning_of_one_ranks_mode_is_an_error_on_every_rank_or_on_none():
    modes = {"independent: filters"} if WORLD.rank == 0 else {"contiguous collective"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mpio._told(modes, WORLD)
    assert len(seen) == (WORLD.rank == 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MpishardError, match="not collective"):
            mpio._told(modes, WORLD)
