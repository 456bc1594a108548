"""Folders that cannot be written to, and disks that are full."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import subprocess

import h5py
import pytest
import torch

import mpishard as ms
from mpishard.errors import FileError
from mpishard.io.backend import root
from tests.io.files import BACKENDS, WORLD, outcome, same_on_all, sharded, values


@pytest.fixture
def small_disk(folder):
    """A file system of 1 MiB; where none can be mounted, files of at most 300 KiB."""
    at = folder / "disk"
    mounted = False
    if WORLD.rank == 0:
        at.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", at]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    is_disk = WORLD.bcast(mounted)
    if not is_disk:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, limits[1]))
    yield at, is_disk
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    WORLD.Barrier()
    if mounted:
        subprocess.run(["umount", "-l", at], check=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_disk_costs_nothing(mesh, small_disk, backend):
    small_disk, _ = small_disk
    few = sharded(values((16, 16)), mesh)
    ms.io.write(small_disk / "a.h5", {"x": few}, backend=backend)
    many = sharded(values((1024, 512)), mesh)
    with pytest.raises(FileError, match="cannot write") as e:
        ms.io.write(small_disk / "a.h5", {"x": few, "y": many}, backend=backend)
    same_on_all(e)
    WORLD.Barrier()
    assert len(os.listdir(small_disk)) == 1 + (backend == "virtual")
    assert torch.equal(ms.io.read(small_disk / "a.h5", "x", mesh, few.placements).full_tensor(), values((16, 16)))


@pytest.mark.parametrize("chunks", [None, (1, 4)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_disk_with_room_for_the_cells_alone(mesh, small_disk, backend, chunks):
    """HDF5 keeps a file that it cannot write whole, and ends the process with it."""
    at, is_disk = small_disk
    if not is_disk:
        pytest.skip("no file system can be mounted here")
    x = sharded(values((40, 200)), mesh)  # 64,000 bytes
    ms.io.write(at / "old.h5", {"x": x}, backend=backend)
    for free in (65536, 69632, 90112):
        if WORLD.rank == 0:
            disk = os.statvfs(at)
            (at / "fill").write_bytes(bytes(disk.f_bavail * disk.f_frsize - free))
        WORLD.Barrier()
        written = True
        try:
            ms.io.write(at / "new.h5", {"x": x}, backend=backend, chunks=chunks)
        except FileError as e:
            written = "No space left" not in str(e)
        assert WORLD.allgather(written) == [written] * WORLD.size
        assert torch.equal(ms.io.read(at / "old.h5", "x", mesh, x.placements).full_tensor(), values((40, 200)))
        WORLD.Barrier()
        if WORLD.rank == 0:
            (at / "fill").unlink()
            (at / "new.h5").unlink(missing_ok=True)
            shutil.rmtree(at / "new.h5.parts", ignore_errors=True)
        WORLD.Barrier()


def test_steps_until_the_disk_is_full(mesh, small_disk):
    at, is_disk = small_disk
    if not is_disk:
        pytest.skip("no file system can be mounted here")
    x, steps = sharded(values((40, 40)), mesh), 0
    if WORLD.rank == 0:
        (at / "fill").write_bytes(bytes(500_000))
    WORLD.Barrier()

    def full():
        try:
            ms.io.write(at / "a.h5", {"x": x}, append="time")
        except FileError as e:
            return "No space left" in str(e)
        return False

    while not full():
        steps += 1
    assert 10 < steps < 100
    ms.io.write(at / "b.h5", {"x": sharded(values((4, 4)), mesh)})
    WORLD.Barrier()
    if WORLD.rank == 0:
        (at / "fill").unlink()
    WORLD.Barrier()
    ms.io.write(at / "a.h5", {"x": x}, append="time")
    found = ms.io.read(at / "a.h5", "x", mesh, (ms.Replicate(),) * mesh.ndim).full_tensor()
    assert torch.equal(found, values((40, 40)).expand(steps + 1, 40, 40))


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("chunks", [None, (7, 20)])
@pytest.mark.parametrize("append", ["time", None])
def test_a_disk_that_is_filled_meanwhile(mesh, small_disk, monkeypatch, append, chunks, held):
    """Between the look for room and the writing; some file systems hold room. The program goes on, also later on."""
    at, is_disk = small_disk
    if not is_disk:
        pytest.skip("no file system can be mounted here")
    if not held:
        if h5py.version.hdf5_version_tuple < (1, 14):
            pytest.skip("once it could not write a file, this HDF5 ends the process at the next")
        monkeypatch.setattr(root, "hold", lambda *_: None)

    def look(*args, look=root.check_room, **kwargs):
        found = look(*args, **kwargs)
        disk = os.statvfs(at)
        (at / "fill").write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - free)))
        return found

    monkeypatch.setattr(root, "check_room", look)
    x, options = sharded(values((40, 200)), mesh), {"backend": "root", "append": append, "chunks": chunks}
    steps, failed = 0, 0
    for pages in (256, 0, 1, 2, 5, 9, 14, 256):
        free = 4096 * pages
        _, error = outcome(lambda: ms.io.write(at / "a.h5", {"x": x}, **options))
        steps, failed = steps + (error is None), failed + (error is not None)
        assert error is None or pages < 256
        del error
        gc.collect()
        if WORLD.rank == 0:
            (at / "fill").unlink()
            ms.io.heal(at / "a.h5")
        WORLD.Barrier()
        found = ms.io.read(at / "a.h5", "x", mesh, x.placements).full_tensor()
        assert torch.equal(found, values((40, 200)).expand(steps, 40, 200) if append else values((40, 200)))
    assert failed > 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_that_cannot_be_written_to(mesh, folder, backend):
    x = sharded(values((4, 4)), mesh)
    if os.geteuid():
        if WORLD.rank == 0:
            folder.chmod(0o500)
        WORLD.Barrier()
        closed = folder
    else:
        # permissions do not hold for root; this does
        closed = type(folder)("/sys")
    with pytest.raises(FileError, match="cannot write") as e:
        ms.io.write(closed / "a.h5", {"x": x}, backend=backend)
    same_on_all(e)
    with contextlib.suppress(OSError):
        folder.chmod(0o700)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_that_is_not_there(mesh, folder, backend):
    x = sharded(values((4, 4)), mesh)
    with pytest.raises(FileError, match="make the folder") as e:
        ms.io.write(folder / "none" / "a.h5", {"x": x}, backend=backend)
    same_on_all(e)
