"""Steps that fail half way, and the journals that put their files back."""

from __future__ import annotations

import fcntl
import os

import h5py
import numpy as np
import pytest
import torch

import mpishard as ms
from mpishard.errors import FileError
from mpishard.io.file import journal, schema
from mpishard.io.file.journal import Journal, journal_of
from tests.io.files import BACKENDS, WORLD, same_on_all, sharded, values

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
        assert at.read_bytes() != before
        WORLD.Barrier()
        check(at, mesh, step)
        assert at.read_bytes() == before
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
    check(folder / "a.h5", mesh, 30, full)


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
    at = folder / "a.h5"
    append(at, mesh, 0)
    for harm in ("foreign", "cut", "longer"):
        if WORLD.rank == 0:
            Journal(at, [(0, 100)]).close()
            raw = journal_of(at).read_bytes()
            size = os.path.getsize(at)
            other = raw.replace(f'"size": {size}'.encode(), f'"size": {size + 1}'.encode())
            journal_of(at).write_bytes({"foreign": b"notes", "cut": raw[:-1], "longer": other}[harm])
        WORLD.Barrier()
        for call in (lambda: check(at, mesh, 1), lambda: append(at, mesh, 1)):
            with pytest.raises(FileError, match="longer file" if harm == "longer" else "damaged"):
                call()
        WORLD.Barrier()
        if WORLD.rank == 0:
            journal_of(at).unlink()
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
