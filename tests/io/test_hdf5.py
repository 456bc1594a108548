from __future__ import annotations

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpishard as ms
from mpishard.comm.collective.gather_slabs import funnel
from mpishard.errors import FileError, MissingPackageError
from mpishard.io.backend import root
from mpishard.io.backend.choice import mpio_obstacle
from mpishard.io.file.dtype import NUMPY
from tests.compare import gathered, mesh_of, shard
from tests.io.files import block, on_root, same_on_all, sharded, store, values

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
DTYPES = sorted(NUMPY, key=str)


PLACEMENTS = [
    (ms.Shard(1), ms.Shard(2)),
    (ms.Shard(2), ms.Shard(1)),
    (ms.Shard(-1), ms.Shard(-1)),
    (ms.Replicate(), ms.Shard(0)),
    (ms.Replicate(), ms.Replicate()),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(2, 7, 5), (1, 1, 3), (4, 0, 2)], ids=str)
def test_read_takes_the_block(mesh, folder, shape, placements):
    full = values(shape)
    store(folder / "a.h5", a=(full.numpy(), {}))
    x = ms.io.read(folder / "a.h5", "a", mesh, placements)
    assert x.shape == full.shape
    assert x.dtype == torch.float32
    assert x.placements == ms.distribute_tensor(full, mesh, placements).placements
    assert torch.equal(x.to_local(), block(x, full))
    assert torch.equal(x.full_tensor(), full)


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(2, 7, 5), (1, 1, 3), (4, 0, 2)], ids=str)
def test_written_and_read_in_another_layout(mesh, folder, shape, placements):
    full = values(shape)
    x = ms.distribute_tensor(full, mesh, placements)
    ms.io.write(folder / "b.h5", {"group/b": x, "c": x}, attrs={"title": "two", "step": 3})
    assert sorted(os.listdir(folder)) == ["b.h5"]
    with h5py.File(folder / "b.h5", "r") as f:
        assert np.array_equal(f["group/b"][:], full.numpy())
        assert np.array_equal(f["c"][:], full.numpy())
        assert dict(f.attrs) == {"title": "two", "step": 3}
    back = ms.io.read(folder / "b.h5", "group/b", mesh, (ms.Shard(0), ms.Shard(2)))
    assert torch.equal(back.full_tensor(), full)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_survive(mesh, folder, dtype):
    full = values((5, 6), dtype)
    ms.io.write(folder / "d.h5", {"d": ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Shard(1)))})
    back = ms.io.read(folder / "d.h5", "d", mesh, (ms.Shard(1), ms.Shard(0)))
    assert back.dtype == dtype
    assert torch.equal(back.full_tensor(), full)


@pytest.mark.parametrize("stored", [np.uint8, ">f4", ">i2", np.float64, np.bool_], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.complex64], ids=str)
def test_dtype_is_converted(mesh, folder, stored, dtype):
    full = values((5, 6)).numpy().astype(stored)
    store(folder / "e.h5", e=(full, {}))
    x = ms.io.read(folder / "e.h5", "e", mesh, (ms.Shard(0), ms.Shard(1)), dtype=dtype)
    expected = torch.from_numpy(full.astype(full.dtype.newbyteorder("="))).to(dtype)
    assert torch.equal(x.full_tensor(), expected)


def test_bools_are_0_or_1_in_memory(mesh, folder):
    """Torch counts other bytes, which a file may hold, as they are."""
    kept = torch.arange(30, dtype=torch.uint8).view(5, 6) % 4
    full = kept.bool()
    store(folder / "b.h5", b=(full.numpy(), {}))
    on_root(lambda: write_raw(folder / "b.h5", "b", kept.numpy()))
    for select in (None, (slice(1, None), slice(0, 6, 2))):
        whole = full if select is None else full[1:, ::2]
        x = ms.io.read(folder / "b.h5", "b", mesh, (ms.Shard(0), ms.Shard(1)), select=select)
        assert int(x.sum()) == int(whole.sum())
        assert torch.equal(x.full_tensor().view(torch.uint8), whole.view(torch.uint8))


def test_odd_bools_of_a_checkpoint(mesh, folder):
    """As `Tensor.view` makes them: their checksums are those of what is read."""
    odd = (torch.arange(30, dtype=torch.uint8).view(5, 6) % 4).view(torch.bool)
    x = ms.distribute_tensor(odd, mesh, (ms.Shard(0), ms.Shard(1)))
    ms.io.save_checkpoint(folder / "c", 1, tensors={"x": x, "plain": odd}, mesh=mesh)
    back = ms.io.load_checkpoint(folder / "c", mesh=mesh).tensors
    for found in (back["x"].full_tensor(), back["plain"]):
        assert torch.equal(found.view(torch.uint8), (odd.view(torch.uint8) > 0).byte())


def write_raw(path, name, cells):
    with h5py.File(path, "r+") as f:
        node = f[name].id
        node.write(h5py.h5s.ALL, h5py.h5s.ALL, cells.view(np.bool_), mtype=node.get_type())


def test_compressed_and_scalar_datasets(mesh, folder):
    full = values((9, 11))
    store(folder / "g.h5", g=(full.numpy(), {"chunks": (4, 4), "compression": "gzip"}), s=(np.float64(2.5), {}))
    x = ms.io.read(folder / "g.h5", "g", mesh, (ms.Shard(0), ms.Shard(1)))
    assert torch.equal(x.full_tensor(), full)
    s = ms.io.read(folder / "g.h5", "s", mesh, (ms.Replicate(), ms.Replicate()))
    assert s.to_local().item() == 2.5


def test_uneven_blocks_are_written(mesh, folder):
    full = values((11, 6))
    ny, nx = mesh.shape
    cut = {0: [11 - (ny - 1), *[1] * (ny - 1)], 1: [0] * (nx - 1) + [6]}
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Shard(1)), sizes=cut)
    ms.io.write(folder / "u.h5", {"u": x})
    with h5py.File(folder / "u.h5", "r") as f:
        assert np.array_equal(f["u"][:], full.numpy())


def test_partial_is_summed(mesh, folder):
    full = values((4, 6))
    x = ms.ShardTensor.from_local(
        block(ms.distribute_tensor(full, mesh, (ms.Replicate(), ms.Shard(1))), full), mesh, (ms.Partial(), ms.Shard(1))
    )
    ms.io.write(folder / "p.h5", {"p": x})
    with h5py.File(folder / "p.h5", "r") as f:
        assert np.array_equal(f["p"][:], mesh.shape[0] * full.numpy())


def test_views_and_graphs_are_written(mesh, folder):
    full = values((6, 5))
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Shard(1))).requires_grad_()
    local = (x.to_local() * 2).t().contiguous().t()
    y = ms.ShardTensor.from_local(local, mesh, x.placements)
    ms.io.write(folder / "v.h5", {"v": y})
    with h5py.File(folder / "v.h5", "r") as f:
        assert np.array_equal(f["v"][:], 2 * full.numpy())


def test_no_rank_hands_over_more_than_a_slab(mesh, folder, monkeypatch):
    monkeypatch.setattr(root, "STAGED_NBYTES", 64)
    seen = []

    def watched(x, offset, slabs, group, consume, *, op):
        def look(box, cells):
            seen.append(cells.nbytes)
            consume(box, cells)

        funnel(x, offset, slabs, group, look, op=op)

    monkeypatch.setattr(root, "funnel", watched)
    full = values((2, 13, 9))
    x = ms.distribute_tensor(full, mesh, (ms.Shard(1), ms.Shard(2)))
    with ms.comm_counter() as count:
        ms.io.write(folder / "s.h5", {"s": x}, backend="root")
    assert max(seen, default=0) <= 64
    assert bool(seen) == (mesh.rank == 0)
    sent = x.to_local().nbytes if mesh.rank else 0
    assert count.by_op["io.write"].nbytes == sent if sent else "io.write" not in count.by_op
    with h5py.File(folder / "s.h5", "r") as f:
        assert np.array_equal(f["s"][:], full.numpy())


def test_only_the_first_of_equal_blocks_travels(mesh, folder):
    x = ms.distribute_tensor(values((8, 8)), mesh, (ms.Replicate(), ms.Shard(0)))
    with ms.comm_counter() as count:
        ms.io.write(folder / "r.h5", {"r": x}, backend="root")
    assert ("io.write" in count.by_op) == (mesh.coords[0] == 0 and mesh.coords[1] != 0)


def test_missing_file(mesh, folder):
    with pytest.raises(FileError, match="no such file") as e:
        ms.io.read(folder / "none.h5", "a", mesh, (ms.Shard(0), ms.Replicate()))
    same_on_all(e)


def test_file_that_one_rank_does_not_see(mesh, folder):
    store(folder / "a.h5", a=(np.zeros(4), {}))
    name = "a.h5" if WORLD.rank < SIZE - 1 else "b.h5"
    with pytest.raises(FileError, match=r"b\.h5") as e:
        ms.io.read(folder / name, "a", mesh, (ms.Shard(0), ms.Replicate()))
    same_on_all(e)


def test_missing_dataset(mesh, folder):
    store(folder / "a.h5", **{"g/a": (np.zeros(4), {})})
    for name in ("b", "g", "g/a/b"):
        with pytest.raises(FileError, match="g/a") as e:
            ms.io.read(folder / "a.h5", name, mesh, (ms.Shard(0), ms.Replicate()))
        same_on_all(e)


@pytest.mark.parametrize(
    "placements", [(ms.Shard(3), ms.Shard(0)), (ms.Shard(0),), (ms.Partial(), ms.Shard(0)), ("y", "x")], ids=str
)
def test_placements_that_do_not_fit(mesh, folder, placements):
    store(folder / "a.h5", a=(np.zeros((4, 4)), {}))
    with pytest.raises(ms.LayoutError) as e:
        ms.io.read(folder / "a.h5", "a", mesh, placements)
    same_on_all(e)


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_read_different_datasets(mesh, folder):
    store(folder / "a.h5", a=(np.zeros((4, 4)), {}), b=(np.zeros((5, 4)), {}))
    with pytest.raises(ms.DesyncError) as e:
        ms.io.read(folder / "a.h5", "a" if WORLD.rank == 0 else "b", mesh, (ms.Shard(0), ms.Shard(1)))
    same_on_all(e)


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_write_differently(mesh, folder):
    x, me = sharded(values((8, 4)), mesh), WORLD.rank
    odd = me == WORLD.size - 1
    for options in ({"locking": False}, {"chunks": True}, {"compression": "gzip"}, {"append": "time"}, {"xdmf": True}):
        with pytest.raises(ms.DesyncError) as e:
            ms.io.write(folder / "a.h5", {"x": x}, **(options if odd else {}))
        same_on_all(e)
        assert not os.listdir(folder)
    # beside the cells, what rank 0 gives counts
    named = {"dims": (f"d{me}", "b"), "attrs": {"who": me}, "scales": {"b": np.arange(4) + me}}
    ms.io.write(folder / "a.h5", {"x": x}, variable_attrs={"x": {"units": f"m{me}"}}, **named)
    with h5py.File(folder / "a.h5", "r", locking=False) as file:
        found = file.attrs["who"], file["x"].dims[0].label, file["b"][0], file["x"].attrs["units"]
        assert found == (0, "d0", 0, "m0")


def test_types_without_a_torch_dtype(mesh, folder):
    store(folder / "a.h5", text=(b"words", {}), pair=(np.zeros(3, [("x", "f4"), ("y", "f4")]), {}))
    for name, placement in (("text", ms.Replicate()), ("pair", ms.Shard(0))):
        with pytest.raises(ms.UnsupportedDtypeError) as e:
            ms.io.read(folder / "a.h5", name, mesh, (placement, ms.Replicate()))
        same_on_all(e)
    x = ms.distribute_tensor(values((4, 4), torch.bfloat16), mesh, (ms.Shard(0), ms.Shard(1)))
    with pytest.raises(ms.UnsupportedDtypeError) as e:
        ms.io.write(folder / "b.h5", {"x": x})
    same_on_all(e)
    assert not (folder / "b.h5").exists()


def test_damaged_file(mesh, folder):
    store(folder / "a.h5", a=(np.arange(20000.0), {"chunks": (1000,), "fletcher32": True}))
    if WORLD.rank == 0:
        with h5py.File(folder / "a.h5", "r") as f:
            at = f["a"].id.get_chunk_info(19).byte_offset
        with open(folder / "a.h5", "r+b") as f:
            f.seek(at)
            f.write(b"\xff" * 64)
    WORLD.Barrier()
    # the last chunk: only the ranks that hold it find it damaged
    with pytest.raises(FileError, match="cannot read 'a'") as e:
        ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(0)))
    same_on_all(e)


def test_truncated_file(mesh, folder):
    store(folder / "a.h5", a=(np.arange(20000.0), {}))
    if WORLD.rank == 0:
        os.truncate(folder / "a.h5", 1000)
    WORLD.Barrier()
    with pytest.raises(FileError, match="check that it is complete") as e:
        ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Replicate()))
    same_on_all(e)


def test_folder_that_is_not_there(mesh, folder):
    x = ms.distribute_tensor(values((4, 4)), mesh, (ms.Shard(0), ms.Shard(1)))
    with pytest.raises(FileError, match="make the folder") as e:
        ms.io.write(folder / "none" / "a.h5", {"x": x})
    same_on_all(e)


def test_failure_while_writing_keeps_the_old_file(mesh, folder, monkeypatch):
    x = ms.distribute_tensor(values((6, 6)), mesh, (ms.Shard(0), ms.Shard(1)))
    ms.io.write(folder / "a.h5", {"x": x})

    def full_disk(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(root, "selection", full_disk)
    with pytest.raises(FileError, match="No space left") as e:
        ms.io.write(folder / "a.h5", {"x": x, "y": x}, backend="root")
    same_on_all(e)
    monkeypatch.undo()
    assert os.listdir(folder) == ["a.h5"]
    assert torch.equal(ms.io.read(folder / "a.h5", "x", mesh, x.placements).full_tensor(), values((6, 6)))


def test_what_cannot_be_written(mesh, folder):
    x = ms.distribute_tensor(values((4, 4)), mesh, (ms.Shard(0), ms.Shard(1)))
    other = ms.init_mesh((-1,), ("z",))
    y = ms.distribute_tensor(values((4, 4)), other, (ms.Shard(0),))
    for tensors in ({}, {"a": torch.zeros(3)}, {"x": x, "y": y}):
        with pytest.raises(ms.MeshError):
            ms.io.write(folder / "a.h5", tensors)
    with pytest.raises(FileError) as e:
        ms.io.write(folder / "a.h5", {"x": x}, attrs={"what": object()})
    same_on_all(e)
    assert not os.listdir(folder)


def test_without_h5py(mesh, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingPackageError, match=r"mpishard\[io\]") as e:
        ms.io.read(folder / "a.h5", "a", mesh, (ms.Shard(0), ms.Shard(1)))
    same_on_all(e)


@pytest.mark.ranks(1)
def test_h5py_is_imported_when_needed():
    code = "import sys, mpishard; assert 'h5py' not in sys.modules"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "PMIX", "HYDRA"))}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)


@pytest.mark.parametrize("backend", ["virtual", "root"])
def test_names_that_hdf5_would_read_as_patterns(folder, backend):
    """Of virtual datasets' sources: `%%` is one sign there, `%b` a number."""
    mesh, full = mesh_of((WORLD.size,)), torch.arange(35.0).reshape(7, 5) + 1
    x = shard(full, mesh, (ms.Shard(0),))
    for k, (inside, name) in enumerate(
        [("50%%.h5", "u"), ("5%b.h5", "u"), ("a.h5", "50%%"), ("b.h5", "g%b/50%"), ("%2F%.h5", "u%%b"), ("c%", "%")]
    ):
        for at in (folder / inside, folder / f"d%b{k}%%" / inside):
            if WORLD.rank == 0:
                at.parent.mkdir(exist_ok=True)
            WORLD.barrier()
            ms.io.write(at, {name: x}, backend=backend)
            assert torch.equal(gathered(ms.io.read(at, name, mesh, (ms.Shard(1),))), full), (inside, name)
            assert torch.equal(ms.io.Dataset(at, name, mesh, (ms.Replicate(),))[3].to_local(), full[3])
            with h5py.File(at, locking=False) as file:
                assert (file[name][()] == full.numpy()).all()
            WORLD.barrier()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_of_names_that_hdf5_would_read_as_patterns(folder, asynchronous):
    mesh, full = mesh_of((WORLD.size,)), torch.arange(35.0).reshape(7, 5) + 1
    x = shard(full, mesh, (ms.Shard(0),))
    names = ("fields/u", "50%", "%b", "%%")
    at = folder / "run%b%%"
    handle = ms.io.save_checkpoint(at, 1, tensors=dict.fromkeys(names, x), mesh=mesh, asynchronous=asynchronous)
    if asynchronous:
        handle.wait()
    found = ms.io.load_checkpoint(at, mesh=mesh).tensors
    assert all(torch.equal(gathered(found[name]), full) for name in names)


@pytest.mark.parametrize("backend", ["virtual", "root"])
@pytest.mark.parametrize("name", ["/u", "g//u", "./u", "g/./u/"])
def test_names_of_one_place(folder, backend, name):
    """A place has several names: all back-ends take each."""
    mesh, full = mesh_of((WORLD.size,)), torch.arange(35.0).reshape(7, 5) + 1
    x, at, place = shard(full, mesh, (ms.Shard(0),)), folder / "a.h5", "g/u" if "g" in name else "u"
    ms.io.write(at, {name: x}, backend=backend, chunks={name: (2, 2)}, variable_attrs={name: {"k": 1}})
    for each in (name, place):
        assert torch.equal(gathered(ms.io.read(at, each, mesh, (ms.Shard(1),))), full)
    with h5py.File(at, locking=False) as file:
        assert file[place].attrs["k"] == 1


def test_paths_that_are_no_text(folder):
    """Bytes that are no UTF-8: a plain file may have them, one that names others is refused on all ranks."""
    mesh, full = mesh_of((WORLD.size,)), torch.arange(35.0).reshape(7, 5) + 1
    x, at = shard(full, mesh, (ms.Shard(0),)), folder / os.fsdecode(b"a\xff.h5")
    ms.io.write(at, {"u": x}, backend="root")
    for call in (
        lambda: ms.io.write(at, {"u": x + 1}, backend="virtual"),
        lambda: ms.io.save_checkpoint(at.with_suffix(""), 1, tensors={"u": x}, asynchronous=True),
    ):
        with pytest.raises(FileError, match="is no text") as e:
            call()
        same_on_all(e)
    assert torch.equal(gathered(ms.io.read(at, "u", mesh, (ms.Shard(1),))), full)
    ms.io.save_checkpoint(at.with_suffix(""), 1, tensors={"u": x})
    assert torch.equal(gathered(ms.io.load_checkpoint(at.with_suffix(""), mesh=mesh).tensors["u"]), full)


@pytest.mark.parametrize("count", [250, 255])
def test_a_name_too_long_for_a_journal_beside(folder, count):
    """A file that somebody else has made, whose name is as long as one may be."""
    mesh, full = mesh_of((WORLD.size,)), torch.arange(35.0).reshape(7, 5) + 1
    at = folder / ("n" * (count - 3) + ".h5")
    ms.io.write(folder / "a.h5", {"u": shard(full, mesh, (ms.Shard(0),))}, backend="root")
    if WORLD.rank == 0:
        (folder / "a.h5").rename(at)
    WORLD.barrier()
    assert torch.equal(gathered(ms.io.read(at, "u", mesh, (ms.Shard(1),))), full)
    with ms.io.Dataset(at, "u", mesh, (ms.Replicate(),)) as ds:
        assert torch.equal(ds[3].to_local(), full[3])
    with pytest.raises(FileError, match="cannot open") as e:
        ms.io.read(at / "below", "u", mesh, (ms.Shard(1),))
    assert "journal" not in same_on_all(e)
    with pytest.raises(FileError, match="cannot open '1'\n"):
        ms.io.read(1, "u", mesh, (ms.Shard(1),))


@pytest.mark.parametrize("backend", [None, "mpio"])
def test_a_path_beyond_the_array_of_open_mpi(folder, backend):
    """Which ends the process there; elsewhere such a path is as good as any."""
    if backend == "mpio" and mpio_obstacle() is not None:
        pytest.skip("h5py knows no MPI")
    mesh, full = mesh_of((WORLD.size,)), torch.arange(35.0).reshape(7, 5)
    at = folder / ("f" * 150) / ("g" * 150) / "a.h5"
    if WORLD.rank == 0:
        at.parent.mkdir(parents=True)
    WORLD.barrier()
    for _ in range(2):  # made, and replaced
        ms.io.write(at, {"u": shard(full, mesh, (ms.Shard(0),))}, backend=backend)
    assert torch.equal(gathered(ms.io.read(at, "u", mesh, (ms.Shard(1),), backend=backend)), full)
    ms.io.save_checkpoint(at.parent, 1, tensors={"u": shard(full, mesh, (ms.Shard(0),))})
    assert torch.equal(gathered(ms.io.load_checkpoint(at.parent, mesh=mesh).tensors["u"]), full)


@pytest.mark.parametrize("backend", ["root", "virtual", "mpio"])
def test_a_file_that_replaces_another_is_on_the_disk_before(folder, backend, monkeypatch):
    """A machine that goes down leaves one of the two."""
    if backend == "mpio" and mpio_obstacle() is not None:
        pytest.skip("h5py knows no MPI")
    calls = []

    def fsync(fd, then=os.fsync):
        calls.append(("flushed", os.readlink(f"/proc/self/fd/{fd}")))
        then(fd)

    def replace(source, target, then=os.replace):
        calls.append(("renamed", os.fspath(source)))
        then(source, target)

    mesh, full, at = mesh_of((WORLD.size,)), torch.arange(35.0).reshape(7, 5), folder / "a.h5"
    ms.io.write(at, {"u": shard(full, mesh, (ms.Shard(0),))}, backend=backend)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    ms.io.write(at, {"u": shard(2 * full, mesh, (ms.Shard(0),))}, backend=backend)
    monkeypatch.undo()
    if WORLD.rank == 0:
        assert [how for how, path in calls if path.endswith(".partial")] == ["flushed", "renamed"]
    if backend == "virtual":
        flushed = [path for how, path in calls if how == "flushed" and ".parts-" in path]
        assert flushed
        if WORLD.rank == 0:
            assert [path for path in flushed if path.endswith("layout.json")]
            assert [path for path in flushed if os.path.isdir(path)]
    assert torch.equal(gathered(ms.io.read(at, "u", mesh, (ms.Shard(0),))), 2 * full)


@pytest.mark.parametrize("key", ["", "a\0b", "\ud800"], ids=ascii)
def test_names_of_attributes(folder, key):
    """HDF5 ends a name at a zero byte: two attributes would be one."""
    x = shard(torch.ones(4), mesh_of((WORLD.size,)), (ms.Shard(0),))
    for given in ({"attrs": {key: 1}}, {"variable_attrs": {"u": {key: 1}}}):
        with pytest.raises(FileError, match="write: attribute") as e:
            ms.io.write(folder / "a.h5", {"u": x}, **given)
        same_on_all(e)


def test_attributes_that_are_arrays_of_text(folder):
    x = shard(torch.ones(4), mesh_of((WORLD.size,)), (ms.Shard(0),))
    told = np.array([["x", "yy"], ["", "é"]])
    ms.io.write(folder / "a.h5", {"u": x}, attrs={"a": told, "b": told[0, 1]}, variable_attrs={"u": {"a": told[0]}})
    with h5py.File(folder / "a.h5", locking=False) as file:
        assert file.attrs["a"].tolist() == told.tolist()
        assert (file.attrs["b"], file["u"].attrs["a"].tolist()) == ("yy", ["x", "yy"])


@pytest.mark.parametrize("kind", ["xdmf", "vtkhdf"])
def test_a_file_is_not_its_own_companion(folder, kind):
    """A companion is written behind the file, and would take its place."""
    mesh, full = mesh_of((WORLD.size,)), torch.arange(35.0).reshape(7, 5) + 1
    x, at = shard(full, mesh, (ms.Shard(0),)), folder / f"a.{kind}"
    ms.io.write(at, {"u": x})
    for append in (None, "time"):
        with pytest.raises(FileError, match="name of its own companion") as e:
            ms.io.write(at, {"u": x + 1}, append=append, **{kind: True})
        same_on_all(e)
    assert torch.equal(gathered(ms.io.read(at, "u", mesh, (ms.Shard(1),))), full)


def test_values_of_dims_that_are_tensors(folder):
    mesh, full = mesh_of((WORLD.size,)), torch.arange(35.0).reshape(7, 5) + 1
    x, at = shard(full, mesh, (ms.Shard(0),)), folder / "a.h5"
    ms.io.write(at, {"u": x}, dims=("y", "x"), scales={"x": torch.arange(5) * 0.5})
    with h5py.File(at, locking=False) as file:
        assert file["x"][()].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    for time in (torch.tensor(0.5), torch.tensor(1.5)):
        ms.io.write(folder / "b.h5", {"u": x}, append="time", scales={"time": time})
    with h5py.File(folder / "b.h5", locking=False) as file:
        assert file["time"][()].tolist() == [0.5, 1.5]
    with pytest.raises(ms.LayoutError, match=r"got: +shape \(3,\)"):
        ms.io.write(at, {"u": x}, dims=("y", "x"), scales={"x": torch.ones(3)})


@pytest.mark.parametrize("key", ["DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST"])
def test_attributes_that_hdf5_keeps(folder, key):
    """HDF5 would take what is there for its own, and end the process."""
    x = shard(torch.ones(4), mesh_of((WORLD.size,)), (ms.Shard(0),))
    for where in ("u", "x"):
        with pytest.raises(FileError, match=f"attribute {key!r} of {where}") as e:
            ms.io.write(
                folder / "a.h5", {"u": x}, dims=("x",), scales={"x": range(4)}, variable_attrs={where: {key: "a"}}
            )
        same_on_all(e)
    ms.io.write(folder / "a.h5", {"u": x}, attrs={key: "a"})


@pytest.mark.parametrize("name", [".", "a\0b"], ids=ascii)
def test_names_that_no_dim_has(folder, name):
    x = shard(torch.ones(4), mesh_of((WORLD.size,)), (ms.Shard(0),))
    for given in ({"dims": (name,)}, {"append": name}):
        with pytest.raises(ms.LayoutError, match="no name of a dim") as e:
            ms.io.write(folder / "a.h5", {"u": x}, **given)
        same_on_all(e)
