"""Global heaps of HDF5 files, which list the sources of virtual datasets: HDF5 never comes back from damaged ones."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.errors import FileError
from mpishard.io.file.heap import Watched
from mpishard.io.file.open import looked_at
from tests.io.files import WORLD, on_root, outcome, values

HALVES = (ms.Shard(0), ms.Shard(1))
FULL = values((8, 6))
DAMAGE = {
    "zeros": (16, bytes(64)),
    "no size": (24, bytes(8)),
    "round": (24, ((1 << 64) - 32).to_bytes(8, "little")),
    "beyond": (24, (1 << 28).to_bytes(8, "little")),
    "endless": (8, b"\xff" * 8),
}


def make(path, libver, userblock=0):
    """A virtual dataset, and a plain one that has a list and text beside it."""
    with h5py.File(path.with_name("source.h5"), "w") as file:
        file["x"] = FULL.numpy()
    with h5py.File(path, "w", libver=libver, userblock_size=userblock) as file:
        whole = h5py.VirtualLayout((8, 6), "f4")
        for i in range(0, 8, 2):
            whole[i : i + 2] = h5py.VirtualSource(path.with_name("source.h5").name, "x", shape=(8, 6))[i : i + 2]
        file.create_virtual_dataset("v", whole)
    with h5py.File(path, "r+", libver=libver) as file:
        file.create_dataset("x", data=FULL.numpy(), maxshape=(None, 6))
        file["x"].attrs["_FillValue"] = "none"
        rows = np.empty(2, object)
        rows[:] = [np.arange(2, dtype="i4"), np.arange(3, dtype="i4")]
        file["x"].attrs.create("missing_value", rows, dtype=h5py.vlen_dtype("i4"))


def harm(path, raw, how):
    """Damage every heap of a file."""
    at = raw.find(b"GCOL")
    assert at >= 0
    while at >= 0:
        start, data = DAMAGE[how]
        raw = raw[: at + start] + data + raw[at + start + len(data) :]
        at = raw.find(b"GCOL", at + 4)
    path.write_bytes(raw)


@pytest.mark.parametrize("userblock", [0, 512])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_reading(mesh, folder, libver, userblock):
    path = folder / "a.h5"
    on_root(lambda: make(path, libver, userblock))
    raw = path.read_bytes()

    def dataset(name):
        with ms.io.Dataset(path, name, mesh, (ms.Replicate(),) * 2) as ds:
            return ds.batch(range(8))

    def of(name, **options):
        return ms.io.read(path, name, mesh, HALVES, **options)

    assert torch.equal(of("v").full_tensor(), FULL)
    assert torch.equal(dataset("v").full_tensor(), FULL)
    for how in DAMAGE:
        WORLD.Barrier()
        on_root(lambda how=how: harm(path, raw, how))
        for call in (lambda: of("v"), lambda: dataset("v")):
            _, error = outcome(call)
            assert isinstance(error, FileError), how
            assert "global heap" in str(error)
        # what has nothing there is read, also where names are told, and where text is no number
        assert torch.equal(of("x", decode=True).full_tensor(), FULL)
        _, error = outcome(lambda: of("absent"))
        assert "'absent'" in str(error)
        # a source that is virtual itself, and a link to it
        on_root(lambda: outer(folder / "b.h5", path.name))
        for name, external in (("w", False), ("link", True)):
            _, error = outcome(
                lambda name=name, external=external: ms.io.read(folder / "b.h5", name, mesh, HALVES, external=external)
            )
            assert "global heap" in str(error), how


def outer(path, source):
    with h5py.File(path, "w") as file:
        whole = h5py.VirtualLayout((8, 6), "f4")
        whole[...] = h5py.VirtualSource(source, "v", shape=(8, 6))
        file.create_virtual_dataset("w", whole)
        file["link"] = h5py.ExternalLink(source, "v")


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_appending(mesh, folder, libver):
    """To a file in which somebody put a virtual dataset beside the steps."""
    path = folder / "a.h5"
    x = ms.distribute_tensor(FULL, mesh, HALVES)
    ms.io.write(path, {"t": x}, append="time")

    def more():
        with h5py.File(path, "r+", libver=libver) as file:
            file.create_virtual_dataset("v", h5py.VirtualLayout((2,), "f4"))
            whole = h5py.VirtualLayout((8, 6), "f4")
            whole[...] = h5py.VirtualSource("source.h5", "x", shape=(8, 6))
            file.create_virtual_dataset("w", whole)

    on_root(more)
    ms.io.write(path, {"t": x + 1}, append="time")
    WORLD.Barrier()
    raw = path.read_bytes()
    WORLD.Barrier()
    for how in DAMAGE:
        on_root(lambda how=how: harm(path, raw, how))
        before = path.read_bytes()
        _, error = outcome(lambda: ms.io.write(path, {"t": x + 2}, append="time"))
        assert "global heap" in str(error), how
        assert path.read_bytes() == before
        WORLD.Barrier()


@pytest.mark.ranks(1)
def test_little_of_a_large_file_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    make(path, "latest")
    with h5py.File(path, "r+") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((1 << 40,))
        h5py.h5d.create(file.id, b"large", h5py.h5t.STD_U8LE, space, plist)
        whole = h5py.VirtualLayout((4096, 6), "f4")
        for i in range(4096):
            whole[i] = h5py.VirtualSource("source.h5", "x", shape=(8, 6))[i % 8]
        file.create_virtual_dataset("behind", whole)
    assert os.path.getsize(path) > 1 << 40
    read = []
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, n, at: read.append(n) or pread(fd, n, at))
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: read.extend(map(len, b)) or preadv(fd, b, at))
    with looked_at(path) as file:
        assert file["behind"].is_virtual
        assert file["large"].nbytes == 1 << 40
    assert sum(read) < 4 << 20
    assert len(read) < 100


@pytest.mark.ranks(1)
def test_files_that_are_looked_at_are_not_written(tmp_path):
    path = tmp_path / "a.h5"
    make(path, "latest")
    with Watched(path) as file:
        assert file.read(8) == b"\x89HDF\r\n\x1a\n"
        with pytest.raises(OSError, match="looked at"):
            file.write(b"abc")
