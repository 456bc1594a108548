"""Folders that cannot be written to, and disks that are full."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess

import pytest
import torch

import mpishard as ms
from mpishard.errors import FileError
from mpishard.io.file.open import reserve
from tests.io.files import BACKENDS, WORLD, same_on_all, sharded, values


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


def test_room_that_is_not_there_is_not_taken(small_disk):
    at, is_disk = small_disk
    if not is_disk:
        pytest.skip("no file system can be mounted here")
    if WORLD.rank == 0:
        (at / "a").write_bytes(b"abc")
        before = os.statvfs(at).f_bavail
        with pytest.raises(OSError, match="No space left"):
            reserve(at / "a", 4 << 20)
        assert os.statvfs(at).f_bavail == before
        assert (at / "a").read_bytes() == b"abc"
    WORLD.Barrier()


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
