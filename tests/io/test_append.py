"""Steps that fail half way, and the journals that put their files back."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random

import h5py
import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.errors import FileError, LayoutError
from mpishard.io.backend import mpio, root
from mpishard.io.file import journal, schema
from mpishard.io.file.journal import Journal, journal_of
from tests.io.files import BACKENDS, WORLD, same_on_all, sharded, values
from tests.io.harm import SEED, VARIANTS

WRITERS = [b for b in BACKENDS if b != "virtual"]
FULL = values((12, 16))


def append(path, mesh, step, full=FULL, **options):
    ms.io.write(path, {"x": sharded(full + step, mesh)}, append="time", scales={"time": step / 2}, **options)


def check(path, mesh, steps, full=FULL):
    ds = ms.io.Dataset(path, "x", mesh, (ms.Shard(0), ms.Shard(1)))
    assert len(ds) == steps
    for step, x in enumerate(ds):
        assert torch.equal(x.full_tensor(), full + step)
    ds.close()
    assert ms.io.read(path, "time", mesh, (ms.Shard(0), ms.Replicate())).full_tensor().tolist() == [
        step / 2 for step in range(steps)
    ]
    WORLD.Barrier()


@pytest.mark.parametrize("backend", WRITERS)
@pytest.mark.parametrize("options", [{}, {"chunks": (5, 3)}, {"compression": "gzip"}], ids=str)
def test_a_journal_undoes_any_step(mesh, folder, backend, options, monkeypatch):
    """The state of every step, kept by its journal, is what comes back after it."""
    at = folder / "a.h5"
    append(at, mesh, 0, backend=backend, **options)
    monkeypatch.setattr(Journal, "commit", Journal.close)  # as a job that is killed before the journal goes
    for step in range(1, 4):
        before = at.read_bytes()
        WORLD.Barrier()
        append(at, mesh, step, backend=backend, **options)
        WORLD.Barrier()
        half = at.read_bytes()
        assert half != before
        WORLD.Barrier()
        # reading it changes nothing
        with pytest.raises(FileError, match=r"was not finished[\s\S]*mpishard\.io\.heal\(") as e:
            check(at, mesh, step)
        same_on_all(e)
        assert at.read_bytes() == half
        WORLD.Barrier()
        link = folder / f"link of {WORLD.rank}"
        link.symlink_to(at)
        with pytest.raises(FileError, match="a link to a file that was left in the middle of a step"):
            ms.io.heal(link)
        link.unlink()
        WORLD.Barrier()
        ms.io.heal(at)  # the first that comes does it
        assert at.read_bytes() == before
        WORLD.Barrier()
        check(at, mesh, step)
        assert os.listdir(folder) == ["a.h5"]
        WORLD.Barrier()
        monkeypatch.undo()
        append(at, mesh, step, backend=backend, **options)
        monkeypatch.setattr(Journal, "commit", Journal.close)


@pytest.mark.ranks(1)
def test_what_is_kept(mesh, folder):
    """Not the cells of older steps, nor other datasets': a journal is small."""
    full = values((64, 64))
    append(folder / "a.h5", mesh, 0, full)
    with h5py.File(folder / "a.h5", "r+") as file:
        file["still"] = np.zeros(100_000)
        file.create_dataset("pieces", data=np.zeros((64, 64)), chunks=(8, 8))
    for step in range(1, 30):
        append(folder / "a.h5", mesh, step, full)
    kept = schema.begun(folder / "a.h5")
    size = os.path.getsize(journal_of(folder / "a.h5"))
    assert size < 100_000 < os.path.getsize(folder / "a.h5") - 30 * 4 * 64 * 64 - 700_000
    kept.close()
    ms.io.heal(folder / "a.h5")
    check(folder / "a.h5", mesh, 30, full)


def test_what_is_remembered_of_many_files_is_bounded(mesh, folder, monkeypatch):
    monkeypatch.setattr(schema, "_MOST_FILES", 2)
    monkeypatch.setattr(schema, "_known", {})
    for step in range(2):
        for name in "abc":
            append(folder / f"{name}.h5", mesh, step)
            assert len(schema._known) <= 2
    for name in "abc":
        check(folder / f"{name}.h5", mesh, 2)


def test_cells_that_lie_behind_the_end_of_a_damaged_file(mesh, folder):
    at = folder / "a.h5"
    for step in range(2):
        append(at, mesh, step)
    with h5py.File(at) as file:
        place = file["x"].id.get_chunk_info(0).byte_offset.to_bytes(8, "little")
    far = (1 << 62).to_bytes(8, "little")
    WORLD.Barrier()
    if WORLD.rank == 0:
        whole = at.read_bytes()
        assert whole.count(place) == 1
        at.write_bytes(whole.replace(place, far))
    WORLD.Barrier()
    size = os.path.getsize(at)
    append(at, mesh, 2)  # the first step is lost, as it was
    assert not os.path.lexists(journal_of(at))
    assert torch.equal(ms.io.Dataset(at, "x", mesh, (ms.Shard(0), ms.Shard(1)))[1].full_tensor(), FULL + 1)
    assert os.path.getsize(at) < 2 * size


@pytest.mark.parametrize("backend", WRITERS)
def test_a_step_that_finds_no_room_is_taken_back(mesh, folder, backend, monkeypatch):
    at = folder / "a.h5"
    append(at, mesh, 0, backend=backend)
    before = at.read_bytes()
    WORLD.Barrier()

    full = OSError("No space left on device")

    def fail(*_):
        raise full

    if backend == "root":
        monkeypatch.setattr("mpishard.io.backend.root.selection", fail)
    else:
        monkeypatch.setattr("mpishard.io.backend.mpio._stamp", lambda *_: full)
    with pytest.raises(FileError, match="No space left") as e:
        append(at, mesh, 1, backend=backend)
    same_on_all(e)
    monkeypatch.undo()
    assert at.read_bytes() == before
    assert os.listdir(folder) == ["a.h5"]
    WORLD.Barrier()
    append(at, mesh, 1, backend=backend)
    check(at, mesh, 2)


def test_a_file_that_is_being_written_to(mesh, folder, monkeypatch):
    monkeypatch.setattr(journal, "WAIT_S", 0.3)
    at = folder / "a.h5"
    append(at, mesh, 0)
    if WORLD.rank == 0:
        kept = Journal(at, [(0, 100)])
    WORLD.Barrier()
    for call in (lambda: check(at, mesh, 1), lambda: append(at, mesh, 1)):
        with pytest.raises(FileError, match="by another job") as e:
            call()
        same_on_all(e)
    if WORLD.rank == 0:
        kept.commit()
    WORLD.Barrier()
    append(at, mesh, 1)
    check(at, mesh, 2)


def test_journals_that_do_not_fit(mesh, folder):
    """Whatever was written into a journal, not a byte of the file changes before all of it was found right."""
    at = folder / "a.h5"
    append(at, mesh, 0)
    before, size = at.read_bytes(), os.path.getsize(at)
    WORLD.Barrier()
    draw = random.Random(SEED)

    def head(raw, **other):
        magic, line, kept = raw.split(b"\n", 2)
        told = {**json.loads(line), **other}
        whole = hashlib.blake2b(json.dumps([told["size"], told["regions"]]).encode(), digest_size=16)
        whole.update(kept)
        return b"\n".join([magic, json.dumps({**told, "digest": whole.hexdigest()}).encode(), kept])

    def flipped(raw):
        at = draw.randrange(len(raw))
        return raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]

    harms = {
        "foreign": lambda raw: b"notes",
        "cut": lambda raw: raw[:-1],
        "more": lambda raw: raw + b"x",
        "longer file": lambda raw: head(raw, size=size + 1),
        "behind": lambda raw: head(raw, regions=[[size - 50, 100]]),
        "before": lambda raw: head(raw, regions=[[-100, 100]]),
        "twice": lambda raw: head(raw, regions=[[0, 50], [0, 50]]),
        "vast": lambda raw: head(raw, regions=[[0, 1 << 60]]),
        "words": lambda raw: head(raw, regions=[["0", "100"]]),
        "deep": lambda raw: raw[:22] + b"[" * 100_000 + raw[22:],
        **{f"cut {i}": lambda raw: raw[: draw.randrange(len(raw))] for i in range(max(20, VARIANTS // 3))},
        **{f"flipped {i}": flipped for i in range(max(40, VARIANTS))},
    }
    for name, harm in harms.items():
        if WORLD.rank == 0:
            Journal(at, [(0, 100)]).close()
            journal_of(at).write_bytes(harm(journal_of(at).read_bytes()))
            with pytest.raises(FileError, match="longer file" if name == "longer file" else "damaged"):
                ms.io.heal(at)
            assert at.read_bytes() == before, name
        if " " not in name:
            WORLD.Barrier()
            with pytest.raises(FileError, match="damaged") as e:
                append(at, mesh, 1)
            same_on_all(e)
            assert at.read_bytes() == before
        if WORLD.rank == 0:
            journal_of(at).unlink()
    WORLD.Barrier()
    # kept, but not to its end: the file was not touched
    for kept in (b"mpishard undo 2 begun\n{", b"") if WORLD.rank == 0 else ():
        Journal(at, [(0, 100)]).close()
        journal_of(at).write_bytes(kept)
        ms.io.heal(at)
        assert at.read_bytes() == before
    WORLD.Barrier()
    check(at, mesh, 1)
    # of a file that is gone
    if WORLD.rank == 0:
        Journal(at, [(0, 100)]).close()
        at.unlink()
    WORLD.Barrier()
    append(at, mesh, 0)
    append(at, mesh, 1)
    check(at, mesh, 2)


def test_a_strangers_journal_overwrites_nothing(mesh, folder):
    """Links, pipes, second names and others' files: no call writes through them, and every rank has the error."""
    at, mine, other = folder / "a.h5", folder / "mine", folder / "b.h5"
    append(at, mesh, 0)
    append(other, mesh, 0)

    def journal(of, where):
        Journal(of, [(0, 100)]).close()
        os.rename(journal_of(of), where)

    def linked_file():
        os.rename(at, mine)
        journal(mine, journal_of(at))
        os.symlink(mine, at)

    def hard_linked_file():
        os.link(at, mine)
        journal(other, journal_of(at))

    def linked_journal():
        journal(at, mine)
        os.symlink(mine, journal_of(at))

    def hard_linked_journal():
        journal(at, mine)
        os.link(mine, journal_of(at))

    def link_to_nothing():
        os.symlink(mine, journal_of(at))

    def foreign():
        journal(at, journal_of(at))
        os.chown(journal_of(at), 12345, -1)

    def foreign_file():
        journal(at, journal_of(at))
        os.chown(at, 12345, -1)

    kinds = [linked_file, hard_linked_file, linked_journal, hard_linked_journal, link_to_nothing]
    kinds += [lambda: os.mkfifo(journal_of(at)), lambda: journal_of(at).mkdir()]
    if os.geteuid() == 0:
        kinds += [foreign, foreign_file]
    original = at.read_bytes()
    WORLD.Barrier()
    for make in kinds:
        if WORLD.rank == 0:
            make()
        WORLD.Barrier()
        before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        WORLD.Barrier()
        calls = [lambda: ms.io.heal(at), lambda: append(at, mesh, 1), lambda: check(at, mesh, 1)]
        if make is linked_file:
            calls = calls[:-1]  # a link may be read, as the file that it leads to
        for call in calls:
            with pytest.raises(FileError, match=r"cannot open|cannot append"):
                call()
            WORLD.Barrier()
            assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
            WORLD.Barrier()
        if WORLD.rank == 0:
            for p in (at, mine, journal_of(at)):
                p.rmdir() if p.is_dir() else p.unlink(missing_ok=True)
            at.write_bytes(original)
        WORLD.Barrier()
    check(at, mesh, 1)
    # what a killed or hostile program may leave under names that we take
    if WORLD.rank == 0:
        mine.write_bytes(b"precious")
        for name in (".a.h5.undo.partial", ".a.xdmf.partial", ".a.vtkhdf.partial", ".a.h5.partial"):
            os.symlink(mine, folder / name)
    WORLD.Barrier()
    append(at, mesh, 1, xdmf=True, vtkhdf=True)
    assert mine.read_bytes() == b"precious"
    check(at, mesh, 2)


@pytest.mark.parametrize("what", ["link", "soft", "raw", "virtual", "scale", "vast"])
def test_a_strangers_file_is_not_written_through(mesh, folder, what):
    """Datasets that lie elsewhere are not appended to, whatever leads there."""
    at, mine = folder / "a.h5", folder / "mine.h5"
    append(at, mesh, 0)
    append(mine, mesh, 0)
    if WORLD.rank == 0:
        (folder / "raw").write_bytes(bytes(1 << 16))
        with h5py.File(at, "r+", libver="latest") as file:
            name = "time" if what == "scale" else "x"
            if what != "vast":
                del file[name]
            if what == "link" or what == "scale":
                file[name] = h5py.ExternalLink("mine.h5", name)
            elif what == "soft":
                file["up"] = h5py.ExternalLink("mine.h5", "/")
                file["x"] = h5py.SoftLink("/up/x")
            elif what == "raw":
                raw = [(os.fspath(folder / "raw"), 0, h5py.h5f.UNLIMITED)]
                file.create_dataset("x", (1, 12, 16), "f4", maxshape=(None, 12, 16), external=raw)
            elif what == "virtual":
                layout = h5py.VirtualLayout((1, 12, 16), "f4", maxshape=(None, 12, 16))
                layout[:1] = h5py.VirtualSource("mine.h5", "x", (1, 12, 16))
                file.create_virtual_dataset("x", layout)
            else:
                # nobody can look at each of its chunks
                file.create_dataset("vast", (1 << 40, 1 << 20), "f4", chunks=(1, 8))
    WORLD.Barrier()
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    WORLD.Barrier()
    if what == "vast":
        append(at, mesh, 1)
        check(at, mesh, 2)
        return
    with pytest.raises(FileError, match="cannot append") as e:
        append(at, mesh, 1)
    same_on_all(e)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_where_there_are_no_locks(mesh, folder, monkeypatch):
    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    at = folder / "a.h5"
    append(at, mesh, 0)
    if WORLD.rank == 0:
        Journal(at, [(0, 100)]).close()
    WORLD.Barrier()
    with pytest.raises(FileError, match="locks do not work") as e:
        check(at, mesh, 1)
    same_on_all(e)
    append(at, mesh, 1)
    check(at, mesh, 2)
    ms.io.heal(at)


@pytest.mark.parametrize("backend", WRITERS)
def test_a_file_that_is_read_here(mesh, folder, backend):
    """HDF5 opens no file in two ways: the text names the Dataset, not the folder."""
    path = folder / "x.h5"
    append(path, mesh, 0, backend=backend)
    with ms.io.Dataset(path, "x", mesh, (ms.Shard(0), ms.Shard(1))) as ds:
        with pytest.raises(FileError, match=r"an io\.Dataset of it that is open") as e:
            append(path, mesh, 1, backend=backend)
        same_on_all(e)
        assert torch.equal(ds[0].full_tensor(), FULL)
    append(path, mesh, 1, backend=backend)
    check(path, mesh, 2)


@pytest.mark.parametrize("names", ["two", "one"])
@pytest.mark.parametrize("backend", WRITERS)
def test_two_jobs_that_begin_one_file(mesh, folder, backend, names, monkeypatch):
    """Each has looked whether there is one before the other made it: no step that was told to be written goes."""
    other, at = folder / "other.h5", folder / "x.h5"
    append(other, mesh, 0, backend=backend)
    module = {"root": root, "mpio": mpio}[backend]
    finish = module.finish

    def late(job):
        os.replace(other, at)
        finish(job)

    def refused(*_, **__):
        raise OSError(errno.EPERM, "of a file system without second names")

    if names == "one":
        monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(module, "finish", late)
    with pytest.raises(FileError, match="another job has begun") as e:
        append(at, mesh, 5, backend=backend)
    same_on_all(e)
    monkeypatch.setattr(module, "finish", finish)
    check(at, mesh, 1)
    append(at, mesh, 1, backend=backend)
    append(folder / "y.h5", mesh, 0, backend=backend)
    check(at, mesh, 2)
    check(folder / "y.h5", mesh, 1)
    assert sorted(os.listdir(folder)) == ["x.h5", "y.h5"]


def test_a_path_that_is_no_files_is_not_healed():
    for path in ("/", "no\0path", None):
        if path == "/":
            ms.io.heal(path)
            continue
        with pytest.raises(FileError, match="is no path"):
            ms.io.heal(path)


@pytest.mark.parametrize("backend", WRITERS)
def test_every_step_has_all_datasets(mesh, folder, backend):
    at = folder / "a.h5"
    x, y = sharded(FULL, mesh), sharded(FULL + 1, mesh)

    def put(**fields):
        ms.io.write(at, fields, append="time", backend=backend)

    put(x=x, **{"g/y": y})
    put(x=x, **{"/g//y": y})
    before = at.read_bytes()
    WORLD.Barrier()
    for fields, named in (({"x": x}, "'g/y'"), ({"g/y": y}, "'x'"), ({"x": x, "g/y": y, "z": x}, "'z'")):
        with pytest.raises(FileError, match=f"cannot append {named}[\\s\\S]*the same datasets at every step") as e:
            put(**fields)
        same_on_all(e)
        assert at.read_bytes() == before
        WORLD.Barrier()
    if WORLD.rank == 0:
        with h5py.File(at, "r+") as file:
            file["time"].resize((3,))
            file.create_dataset("log", (5,), "f4", maxshape=(None,))  # grows, but not along time
    WORLD.Barrier()
    with pytest.raises(FileError, match="a scale of 2 values") as e:
        put(x=x, **{"g/y": y})
    same_on_all(e)
    if WORLD.rank == 0:
        with h5py.File(at, "r+") as file:
            file["time"].resize((2,))
    WORLD.Barrier()
    put(x=x, **{"g/y": y})
    assert ms.io.read(at, "g/y", mesh, (ms.Replicate(), ms.Shard(1))).shape == (3, 12, 16)


@pytest.mark.parametrize("backend", WRITERS)
@pytest.mark.parametrize("values", [(0, 0.5), (None, 0.5), (b"a", b"abcdef"), (np.int8(0), 300), (np.int8(0), np.nan)])
def test_a_value_that_is_another_number_when_it_is_stored(mesh, folder, backend, values):
    """A file's scale has the type of its first value."""
    at, x = folder / "a.h5", sharded(FULL, mesh)
    scales = [{} if value is None else {"scales": {"time": value}} for value in values]
    ms.io.write(at, {"x": x}, append="time", backend=backend, **scales[0])
    before = at.read_bytes()
    WORLD.Barrier()
    with pytest.raises(FileError, match=r"cannot append 'time'[\s\S]*the type of the first step's") as e:
        ms.io.write(at, {"x": x}, append="time", backend=backend, **scales[1])
    same_on_all(e)
    assert at.read_bytes() == before
    WORLD.Barrier()
    ms.io.write(at, {"x": x}, append="time", backend=backend, **scales[0])
    assert len(ms.io.read(at, "x", mesh, (ms.Replicate(), ms.Shard(1)))) == 2


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("a\0b", {}, "is no name of a dataset"),
        (1, {}, "is no name of a dataset"),
        ("/./", {}, "is no name of a dataset"),
        ("a", {"chunks": {"b": (1, 1)}}, "chunks of no dataset"),
        ("a", {"compression": {"b": "gzip"}}, "compression of no dataset"),
        ("a", {"chunks": 7}, "chunks of 'a'"),
    ],
)
def test_names_and_options_that_fit_no_dataset(mesh, folder, name, options, said):
    with pytest.raises(FileError, match=said) as e:
        ms.io.write(folder / "a.h5", {name: sharded(FULL, mesh)}, **options)
    same_on_all(e)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("names", [("a", "a/b"), ("g/a/b", "g/a"), ("g/a", "/g//a")])
def test_datasets_at_one_place(mesh, folder, names):
    with pytest.raises(FileError, match="is no name of a dataset beside") as e:
        ms.io.write(folder / "a.h5", {name: sharded(FULL, mesh) for name in names})
    same_on_all(e)


@pytest.mark.parametrize(
    ("dims", "options", "said"),
    [
        (("y", "x"), {}, "a dim and a dataset"),  # a grid that is not of straight lines
        (("x", "y"), {}, "a dim and a dataset"),
        (("x", "x"), {}, "a dim and a dataset"),
        (("y", "x"), {"scales": {"x": range(12)}}, "a dim and a dataset"),
        (("y", "z"), {"append": "x"}, "a dim and a dataset"),
        (("g/y", "z"), {}, "is no name of a dim"),
        (("", "z"), {}, "is no name of a dim"),
        (("h", "z"), {}, "is no name of a dim"),
    ],
)
def test_dims_that_no_netcdf_has(mesh, folder, dims, options, said):
    square = sharded(FULL[:, :12], mesh)
    with pytest.raises(LayoutError, match=said) as e:
        ms.io.write(folder / "a.nc", {"x": square, "h/t": square}, dims={"x": dims}, **options)
    same_on_all(e)
    assert os.listdir(folder) == []


def test_values_of_a_dim_by_a_dataset(mesh, folder):
    row = ms.ones(6, mesh=mesh, placements=[ms.Shard(0), ms.Replicate()])
    fields = {"x": row, "a": ms.ones(4, 6, mesh=mesh, placements=[ms.Shard(0), ms.Shard(1)])}
    ms.io.write(folder / "a.nc", fields, dims={"x": ("x",), "a": ("y", "x")})
    with h5py.File(folder / "a.nc", "r", locking=False) as f:
        assert f["a"].dims[1][0] == f["x"]
    with pytest.raises(LayoutError, match="a dim and a dataset"):
        ms.io.write(folder / "b.nc", fields, dims={"x": ("x",), "a": ("y", "x")}, append="time")


@pytest.mark.parametrize("dims", [None, {"a": ("y", "x")}])
def test_every_dim_has_a_scale(mesh, folder, dims):
    """As netCDF's libraries want it: of all dims, those without a name too; and time has units."""
    path = folder / "run.nc"
    whole = torch.arange(30.0).reshape(5, 6)
    fields = {
        "a": ms.distribute_tensor(whole, mesh, [ms.Shard(0), ms.Shard(1)]),
        "g/b": ms.ones(6, mesh=mesh, placements=[ms.Shard(0), ms.Replicate()]),
    }
    units = {"units": "hours since 2000-01-01", "calendar": "standard"}
    for t in (0.5, 1.5):
        ms.io.write(path, fields, append="time", dims=dims, scales={"time": t}, variable_attrs={"time": units})
    with h5py.File(path, "r", locking=False) as f:
        for name in fields:
            scales = [list(dim.values()) for dim in f[name].dims]
            assert [len(found) for found in scales] == [1] * f[name].ndim
            assert [found[0].shape[0] for found in scales] == list(f[name].shape)
        assert f["time"].attrs["units"] == units["units"]
        assert f["time"][:].tolist() == [0.5, 1.5]


def test_attributes_of_coordinates(mesh, folder):
    x = ms.ones(4, 6, mesh=mesh, placements=[ms.Shard(0), ms.Shard(1)])
    about = {"y": {"units": "degrees_north"}, "a": {"units": "K"}}
    ms.io.write(folder / "a.nc", {"a": x}, dims=("y", "x"), scales={"y": range(4)}, variable_attrs=about)
    with h5py.File(folder / "a.nc", "r", locking=False) as f:
        assert f["y"].attrs["units"] == "degrees_north"
        assert f["a"].attrs["units"] == "K"
    with pytest.raises(FileError, match="a dim without values"):
        ms.io.write(folder / "a.nc", {"a": x}, dims=("y", "x"), variable_attrs={"x": {"units": "m"}})


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"scales": {"z": [1]}, "dims": ("y", "x")}, "name the dims of a dataset"),
        ({"scales": {"time": 1.0}, "dims": ("y", "x")}, "append='time'"),
        ({"scales": {"time": [1.0, 2.0]}, "append": "time"}, "the value of this step: scales={.time.: t}"),
        ({"scales": {"y": [1.0, 2.0]}, "dims": ("y", "x")}, "4 numbers, those of the whole dim"),
        ({"scales": {"y": 1.0}, "dims": ("y", "x")}, "a sequence of 4 numbers"),
    ],
)
def test_scales_that_do_not_fit_say_the_fix(mesh, folder, options, fix):
    x = ms.ones(4, 6, mesh=mesh, placements=[ms.Shard(0), ms.Shard(1)])
    with pytest.raises(ms.LayoutError, match=fix):
        ms.io.write(folder / "a.nc", {"a": x}, **options)


def test_an_extent_of_none(folder, mesh):
    path = folder / "none.h5"
    for chunks in (None, {"u": (1, 2)}):
        for _ in range(2):
            ms.io.write(
                path, {"u": ms.zeros(3, 0, mesh=mesh, placements=(ms.Shard(0),) * 2)}, append="time", chunks=chunks
            )
        assert ms.io.read(path, "u", mesh, (ms.Replicate(),) * 2).shape == (2, 3, 0)
        if WORLD.rank == 0:
            path.unlink()
        WORLD.barrier()
