"""`mpishard info --check`: promises that are kept, and each of them broken on purpose."""

import json
import resource
import subprocess

import pytest
import torch
from mpi4py import MPI

from mpishard.cli import main
from mpishard.comm import preflight as module
from mpishard.comm.preflight import preflight

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1


def found(report, check):
    """The finding of a check on rank 0, None on the others."""
    if WORLD.rank:
        return None
    (finding,) = [f for f in report.findings if f.check == check]
    return finding


def broken(report, check, text):
    assert not report.ok
    finding = found(report, check)
    if finding is not None:
        assert finding.state == "broken", finding
        assert text in finding.found, finding
        assert finding.advice


def test_a_job_that_keeps_its_promises(tmp_path):
    report = preflight(str(tmp_path))
    assert report.ok, report.findings
    assert report.first == (WORLD.rank == 0)
    assert not list(tmp_path.iterdir())
    names = {f.check for f in report.findings}
    assert names == {
        *("ranks", "ranks per node", "devices", "threads", "versions"),
        *("environment", "HDF5", "MPI", "output folder"),
    }


def test_a_launcher_that_says_another_number(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_NTASKS", str(WORLD.size + 4))
    broken(preflight(str(tmp_path)), "ranks", f"SLURM_NTASKS={WORLD.size + 4}")


@pytest.mark.ranks(1)
def test_single_processes_under_pbs(monkeypatch, tmp_path):
    (tmp_path / "nodes").write_text("a\nb\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    broken(preflight(str(tmp_path)), "ranks", "PBS_NODEFILE=2")


@pytest.mark.ranks(2, 3, 4)
def test_nodes_that_see_different_versions(monkeypatch, tmp_path):
    mine = module.versions()
    usual = mine["torch"]
    if WORLD.rank == LAST:
        mine["torch"] = "1.0"
    monkeypatch.setattr(module, "versions", lambda: mine)
    broken(preflight(str(tmp_path)), "versions", f"torch: '{usual}' on rank 0, '1.0' on rank {LAST}")


@pytest.mark.ranks(2, 3, 4)
def test_ranks_with_different_environments(monkeypatch, tmp_path):
    if WORLD.rank == LAST:
        monkeypatch.setenv("MPISHARD_DEBUG", "1")
    broken(preflight(str(tmp_path)), "environment", f"MPISHARD_DEBUG: 'not set' on rank 0, '1' on rank {LAST}")


def test_more_threads_than_cores(monkeypatch, tmp_path):
    if WORLD.rank == LAST:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 10**6)
    broken(preflight(str(tmp_path)), "threads", "threads more than cores")


def test_a_folder_that_is_not_there(tmp_path):
    """It is made, and removed: a check leaves nothing behind."""
    assert preflight(str(tmp_path / "new" / "below")).ok
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    broken(preflight(str(tmp_path / "file" / "below")), "output folder", "rank 0")


def test_a_folder_that_cannot_be_written_to():
    # nobody writes here, not even root
    broken(preflight("/proc"), "output folder", "rank 0")


def test_a_folder_without_room(tmp_path):
    at = tmp_path / "disk"
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", at]
    mounted = WORLD.rank == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        broken(preflight(str(at)), "output folder", "rank 0")
        assert not list(at.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        WORLD.Barrier()
        if mounted:
            subprocess.run(["umount", "-l", at], check=False)


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_sees_another_folder(tmp_path, monkeypatch):
    # every rank is a node of its own, and tmp_path another folder on each
    alone = WORLD.Split(WORLD.rank)
    monkeypatch.setattr(module, "_node", lambda _: alone.Dup())
    own = str(tmp_path)
    report = preflight(own)
    alone.Free()
    broken(report, "output folder", "another folder")


def test_an_hdf5_of_another_mpi(monkeypatch, tmp_path):
    if WORLD.rank == LAST:
        monkeypatch.setattr(module, "mpi_libraries", lambda: ["/a/libmpi.so", "/b/libmpi.so"])
    broken(preflight(str(tmp_path)), "HDF5", "")


@pytest.mark.parametrize("good", [True, False])
def test_the_command(good, capsys, tmp_path):
    folder = tmp_path if good else "/proc"
    assert main(["info", "--check", "--json", "--output", str(folder)]) == int(not good)
    out = capsys.readouterr().out
    assert bool(out) == (WORLD.rank == 0)
    if out:
        assert json.loads(out)["ok"] == good
    assert main(["info", "--check", "--output", str(folder)]) == int(not good)
    out = capsys.readouterr().out
    if WORLD.rank == 0:
        assert "output folder" in out
        assert ("broken promises" in out) == (not good)


def test_the_job_as_data(capsys):
    assert main(["info", "--json"]) == 0
    out = capsys.readouterr().out
    assert bool(out) == (WORLD.rank == 0)
    if out:
        job = json.loads(out)
        assert job["size"] == len(job["ranks"]) == WORLD.size
        assert job["versions"]["mpi4py"]
