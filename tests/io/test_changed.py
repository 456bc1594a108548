"""Files that change while they are read: what they held before, what they hold now, or an error on every rank."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.errors import FileError
from mpishard.io.file import open as opening
from mpishard.io.file import seen
from tests.io.files import WORLD, on_root, same_on_all, store, values

reading = sys.modules["mpishard.io.read"]  # of which the package shows the function
WHOLE = (ms.Replicate(), ms.Replicate())

# another process: in this one, HDF5 would know
APPEND = """
import sys, h5py
with h5py.File(sys.argv[1], "r+") as f:
    x = f["a"]
    n = len(x)
    x.resize(n + int(sys.argv[2]), 0)
    for i in range(n, len(x)):
        x[i] = i
"""


def append(at, n):
    on_root(lambda: subprocess.run([sys.executable, "-c", APPEND, str(at), str(n)], check=True, timeout=60))


def counted(at, n):
    """Steps of 4 x 3 cells that say which step they are."""
    cells = np.broadcast_to(np.arange(float(n))[:, None, None], (n, 4, 3))
    store(at, a=(cells, {"chunks": (1, 4, 3), "maxshape": (None, 4, 3)}))


@pytest.mark.parametrize("steps", [1, 32, 400])
def test_a_dataset_whose_file_grows(mesh, folder, steps):
    at = folder / "a.h5"
    counted(at, steps)
    ds = ms.io.Dataset(at, "a", mesh, WHOLE)
    assert torch.all(ds[steps // 2].full_tensor() == steps // 2)
    append(at, 100)
    for call in (lambda: ds[steps - 1], lambda: next(iter(ds)), lambda: next(iter(ms.io.Loader(ds, batch_size=2)))):
        with pytest.raises(FileError, match="has changed since it was opened") as e:
            call()
        same_on_all(e)
    # what is open here stays as it was, to HDF5
    with pytest.raises(FileError, match="it is open in this process") as e:
        ms.io.read(at, "a", mesh, (*WHOLE, ms.Shard(0))[-mesh.ndim :])
    same_on_all(e)
    ds.close()
    with ms.io.Dataset(at, "a", mesh, WHOLE) as again:
        assert len(again) == steps + 100
        for t in (0, steps - 1, steps, -1):
            assert torch.all(again[t].full_tensor() == t % len(again))
    assert ms.io.read(at, "a", mesh, WHOLE, select=(slice(None), 0, 0)).full_tensor().tolist() == list(
        range(steps + 100)
    )


def test_parts_that_are_gone(mesh, folder):
    """HDF5 takes the cells of a file that is not there for fill values."""
    at = folder / "a.h5"
    full = values((6, 5, 4)) + 10
    first, second = (ms.distribute_tensor(x, mesh, (ms.Shard(1), ms.Replicate())) for x in (full, -full))
    ms.io.write(at, {"a": first}, backend="virtual")
    ds = ms.io.Dataset(at, "a", mesh, (ms.Shard(1), ms.Replicate()))
    ms.io.write(at, {"a": second}, backend="virtual")
    with pytest.raises(FileError, match="has changed since it was opened") as e:
        ds[2]
    same_on_all(e)
    ds.close()
    assert torch.equal(ms.io.read(at, "a", mesh, WHOLE).full_tensor(), -full)


def test_a_layout_of_other_parts(mesh, folder):
    """Of a file `layout.json` that says other borders than the parts have."""
    at = folder / "a.h5"
    full = values((6, 6))
    x = ms.distribute_tensor(full, mesh, (ms.Shard(0), ms.Replicate()))
    ms.io.write(at, {"a": x}, backend="virtual")
    if mesh.shape[0] == 1:
        return  # one part is the whole

    def harm():
        (told,) = folder.glob("*/layout.json")
        text = told.read_text()
        assert '"dims": [0, null]' in text
        told.write_text(text.replace('"dims": [0, null]', '"dims": [1, null]'))

    on_root(harm)
    with pytest.raises(FileError, match="in place of") as e:
        ms.io.read(at, "a", mesh, WHOLE)
    same_on_all(e)


def test_a_plain_file_that_is_replaced(mesh, folder):
    """The one that is open stays."""
    at = folder / "a.h5"
    counted(at, 5)
    with ms.io.Dataset(at, "a", mesh, WHOLE) as ds:
        ms.io.write(at, {"a": ms.distribute_tensor(values((7, 4, 3)), mesh, WHOLE)}, backend="root")
        assert torch.all(ds[3].full_tensor() == 3)


@pytest.mark.parametrize("when", ["check_sources", "check_chunks"])
def test_a_read_beside_an_appending_job(mesh, folder, monkeypatch, when):
    """Read once more, on all ranks, be it that one alone has seen the change."""
    at = folder / "a.h5"
    counted(at, 5)
    check, calls = getattr(reading, when), []

    def meanwhile(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            append(at, 3)
        return check(*args, **kwargs)

    monkeypatch.setattr(reading, when, meanwhile)
    x = ms.io.read(at, "a", mesh, WHOLE)
    assert x.shape == (8, 4, 3)
    assert torch.all(x.full_tensor() == torch.arange(8.0)[:, None, None])
    assert len(calls) == 2


@pytest.mark.ranks(2, 3)
def test_ranks_that_find_other_steps(mesh, folder, monkeypatch):
    at = folder / "a.h5"
    counted(at, 5)
    found, opened, calls = reading.found, reading.opened, []

    def first(*args, **kwargs):
        """Find it, before there is one step more."""
        dataset = found(*args, **kwargs)
        calls.append(1)
        if len(calls) == 1:
            WORLD.Barrier()
        return dataset

    def second(path):
        calls.append(1)
        if len(calls) == 1:
            WORLD.Barrier()
            if WORLD.rank == 1:
                subprocess.run([sys.executable, "-c", APPEND, str(at), "1"], check=True, timeout=60)
            else:
                time.sleep(1)
        return opened(path)

    monkeypatch.setattr(reading, *(("opened", second) if WORLD.rank else ("found", first)))
    x = ms.io.read(at, "a", mesh, WHOLE, backend="root")
    assert x.shape == (6, 4, 3)
    assert torch.all(x.full_tensor() == torch.arange(6.0)[:, None, None])


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("steps", [5, 6])
def test_a_dataset_of_which_ranks_open_other_files(mesh, folder, monkeypatch, steps):
    """Opened anew: the one that is replaced stays to those who have it open, and would be one rank's alone."""
    at, other = folder / "a.h5", folder / "b.h5"
    counted(at, 5)
    store(other, a=(np.full((steps, 4, 3), 9.0), {}))
    module, calls = sys.modules["mpishard.io.dataset"], []
    opened = module.opened

    def meanwhile(path):
        calls.append(1)
        if len(calls) > 1:
            return opened(path)
        if WORLD.rank:
            WORLD.Barrier()
            return opened(path)
        file = opened(path)
        other.replace(at)
        WORLD.Barrier()
        return file

    monkeypatch.setattr(module, "opened", meanwhile)
    with ms.io.Dataset(at, "a", mesh, WHOLE) as ds:
        assert len(ds) == steps
        assert torch.all(ds[2].full_tensor() == 9)
    assert len(calls) == 2


def test_a_file_system_that_numbers_open_files_otherwise(mesh, folder, monkeypatch):
    at = folder / "a.h5"
    counted(at, 5)
    own = opening.of_open
    monkeypatch.setattr(opening, "of_open", lambda file: (0, 0, *own(file)[2:]))
    monkeypatch.setattr(seen, "of_open", opening.of_open)
    with ms.io.Dataset(at, "a", mesh, WHOLE) as ds:
        assert torch.all(ds[3].full_tensor() == 3)
    assert ms.io.read(at, "a", mesh, WHOLE, backend="root").shape == (5, 4, 3)


def test_a_file_that_is_written_to_whenever_it_is_opened(mesh, folder, monkeypatch):
    at = folder / "a.h5"
    counted(at, 5)
    own = opening.of_open
    monkeypatch.setattr(opening, "of_open", lambda file: (*own(file)[:3], 0))
    with pytest.raises(FileError, match="written to again and again") as e:
        ms.io.Dataset(at, "a", mesh, WHOLE)
    same_on_all(e)


def test_a_file_that_never_rests(mesh, folder, monkeypatch):
    at = folder / "a.h5"
    counted(at, 5)
    monkeypatch.setattr(reading, "_TRIES", 2)
    monkeypatch.setattr(seen.Seen, "changed", lambda self: "written to" if WORLD.rank == WORLD.size - 1 else "")
    with pytest.raises(FileError, match="written to again and again") as e:
        ms.io.read(at, "a", mesh, WHOLE)
    same_on_all(e)


@pytest.mark.ranks(2, 3)
def test_two_files_are_none_that_changes(mesh, folder):
    """Each has a time of its own, as one has that is written to between the ranks' looks."""
    for name in ("a.h5", "b.h5"):
        store(folder / name, a=(values((12, 4)), {}))
    with pytest.raises(ms.DesyncError, match=r"b\.h5") as e:
        ms.io.read(folder / ("b.h5" if WORLD.rank else "a.h5"), "a", mesh, WHOLE[: mesh.ndim])
    same_on_all(e)
