"""Companions that cannot be written: an error before the file is replaced, or a step is in it."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import FileError
from tests.io.files import WORLD, on_root, same_on_all, sharded, values

FULL = values((4, 6))


@pytest.mark.parametrize("kind", ["xdmf", "vtkhdf"])
def test_nothing_is_written_where_the_companion_cannot_be(mesh, folder, kind):
    path, x = folder / "a.h5", sharded(FULL, mesh)
    options = {"append": "time", "dims": ("y", "x"), kind: True}
    numbers = {"y": range(4), "x": range(6)}

    def steps():
        with ms.io.Dataset(path, "t", mesh, (ms.Replicate(),) * mesh.ndim) as ds:
            return len(ds)

    ms.io.write(path, {"t": x}, scales={**numbers, "time": 0.0}, **options)
    bad = [{**numbers, "y": [b"a", b"b", b"c", b"d"]}, {**numbers, "x": [1j] * 6}, {"time": np.bytes_("2000-01-01")}]
    for scales in bad:
        with pytest.raises(FileError, match="no place that a viewer knows") as e:
            ms.io.write(folder / "b.h5", {"t": x}, scales=scales, **options)
        same_on_all(e)
    on_root((folder / f"a.{kind}").unlink)
    on_root((folder / f"a.{kind}").mkdir)
    with pytest.raises(FileError, match="is a folder") as e:
        ms.io.write(path, {"t": x}, **options)
    same_on_all(e)
    assert steps() == 1
    WORLD.Barrier()
    assert not (folder / "b.h5").exists()


@pytest.mark.parametrize("kind", ["xdmf", "vtkhdf"])
def test_a_companion_takes_the_place_of_none_but_its_own(mesh, folder, kind):
    x, other = sharded(FULL, mesh), sharded(values((5, 6)), mesh)

    def write(name, **tensors):
        ms.io.write(folder / name, tensors, **{kind: True})

    def refused(name, match, **tensors):
        before = {at.name: at.read_bytes() for at in folder.iterdir()}
        WORLD.Barrier()
        with pytest.raises(FileError, match=match) as e:
            write(name, **tensors)
        same_on_all(e)
        assert {at.name: at.read_bytes() for at in folder.iterdir()} == before

    for _ in range(2):
        write("run.1", t=x)
    refused("run.2", "one that shows 'run.1'", t=x)
    write("a & b.h5", t=x)
    write("a & b.h5", t=x)
    refused("a & b.nc", "one that shows 'a & b.h5'", t=x)
    if kind == "vtkhdf":
        write("q.2.h5", t=x)
        refused("q.h5", "one that shows 'q.2.h5'", t=x, other=other)
    on_root(lambda: (folder / f"mine.{kind}").write_text("numbers\n"))
    refused("mine.h5", "a file that is no companion", t=x)


@pytest.mark.parametrize("kind", ["xdmf", "vtkhdf"])
@pytest.mark.parametrize("options", [{"external": True}, {"chunks": (1 << 20,), "shape": (1 << 44,)}, {"shape": ()}])
def test_a_scale_of_a_strangers_file_is_one_of_that_file(mesh, folder, options, kind):
    """A companion would have shown the bytes of any file that this user can read."""
    path = folder / "a.h5"

    def made():
        np.arange(6.0).tofile(folder / "own")
        own = {"external": [(str(folder / "own"), 0, 48)]} if "external" in options else options
        with h5py.File(path, "w") as f:
            t = f.create_dataset("t", (0, 4, 6), "f4", maxshape=(None, 4, 6), chunks=(1, 4, 6))
            f.create_dataset("time", (0,), "f8", maxshape=(None,), chunks=(4,))
            f["y"] = np.arange(4.0)
            f.create_dataset("x", **{"shape": (6,), "dtype": "f8", **own})
            for i, name in enumerate(("time", "y", "x")):
                if f[name].ndim:
                    f[name].make_scale(name)
                    t.dims[i].attach_scale(f[name])
                t.dims[i].label = name

    on_root(made)
    with pytest.raises(FileError, match=r"the scale (of )?'x'") as e:
        ms.io.write(path, {"t": sharded(FULL, mesh)}, append="time", **{kind: True})
    same_on_all(e)
    assert not (folder / f"a.{kind}").exists()


def test_fields_that_vtkhdf_would_call_alike(mesh, folder):
    path, x = folder / "a.h5", sharded(FULL, mesh)
    parts = sharded(values((2, 3, 4, 6)), mesh)
    for tensors in ({"a/b": x, "a.b": x}, {"a": parts, "a[1]": sharded(values((3, 4, 6)), mesh)}):
        with pytest.raises(FileError, match="the name of two fields in VTKHDF") as e:
            ms.io.write(path, tensors, vtkhdf=True)
        same_on_all(e)
        assert not path.exists()
    ms.io.write(path, {"a/b": x, "a.c": x}, vtkhdf=True)


def test_later_steps_lie_where_the_first_one_does(mesh, folder):
    """A call that gave no scales, or others than the file has, moved all steps in the companions."""
    path, t = folder / "a.h5", sharded(FULL, mesh)
    options = {"append": "time", "xdmf": True, "vtkhdf": True}
    lat, lon = [0.0, 1.0, 2.0, 3.0], [10.0 * i for i in range(6)]

    def told():
        WORLD.Barrier()
        text = (folder / "a.xdmf").read_text()
        with h5py.File(folder / "a.vtkhdf", locking=False) as file:
            got = file["VTKHDF"].attrs["Spacing"].tolist(), file["VTKHDF/Steps/Values"][:].tolist()
        WORLD.Barrier()
        return text.count(" ".join(map(repr, lon))), *got

    ms.io.write(path, {"t": t}, dims=("lat", "lon"), scales={"time": 5.0, "lat": lat, "lon": lon}, **options)
    assert told() == (1, [10.0, 1.0, 1.0], [5.0])
    ms.io.write(path, {"t": t}, scales={"time": 6.0}, **options)
    assert told() == (2, [10.0, 1.0, 1.0], [5.0, 6.0])
    other = {"time": 7.0, "lat": [9.0] * 4, "lon": range(6)}
    ms.io.write(path, {"t": t}, dims=("lat", "lon"), scales=other, **options)
    assert told() == (3, [10.0, 1.0, 1.0], [5.0, 6.0, 7.0])
