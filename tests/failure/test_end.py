"""A program that ends well ends in silence, whatever is still alive."""

from __future__ import annotations

import os

import h5py
import pytest

ALIVE = """
import numpy as np
mesh = ms.init_mesh((-1, 1), ("y", "x"), periodic=True)
dropped = ms.init_mesh((-1,))
x = ms.distribute_tensor(torch.ones(8, 8), mesh, (ms.Shard(0), ms.Shard(1))).requires_grad_()
padded = ms.halo_exchange(x, {0: 1, 1: 1}, mode="circular")
padded.sum().backward()
weight = torch.ones(1, 1, 3, 3, requires_grad=True)
image = ms.distribute_tensor(torch.ones(1, 1, 8, 8), mesh, (ms.Shard(2), ms.Shard(3)))
y = torch.nn.functional.conv2d(image, weight, padding=1)
y.sum().full_tensor().backward()
field = np.ones((6, 6))
h = ms.HaloExchanger(mesh, field.shape, 1, field.dtype)
h(field)
sub = mesh["y"]
ms.all_reduce(torch.ones(3), sub)
"""

ENDS = {
    "falls off the end": "",
    "sys.exit": "sys.exit()",
    "drops everything first": "del mesh, dropped, x, padded, image, y, h, sub\nimport gc\ngc.collect()",
    "frees its mesh": "mesh.free()\nmesh.free()",
    "finalises MPI itself": "MPI.Finalize()",
    "finalises MPI with a mesh freed": "mesh.free()\nMPI.Finalize()",
    "holds a cycle": "class C: pass\nc = C()\nc.c, c.mesh, c.h = c, mesh, h\ndel mesh, h",
}


@pytest.mark.parametrize("end", ENDS)
def test_silence(job, end):
    outcome = job(2, ALIVE + ENDS[end])
    assert outcome.output == ""
    assert outcome.status == 0


def test_status_of_the_program_is_kept(job):
    outcome = job(2, ALIVE + "sys.exit(3)")
    assert outcome.status == 3
    assert "Traceback" not in outcome.output
    assert "mpishard" not in outcome.output


@pytest.mark.parametrize("stderr", ["open", "closed"])
@pytest.mark.parametrize("writes", [True, False])
def test_a_checkpoint_that_nobody_waits_for(job, tmp_path, writes, stderr):
    """The status tells whether it was written, after all that was asked for at the end."""
    body = """
import atexit, errno
from mpishard.io.checkpoint import background
atexit.register(note, "END")
mesh = ms.init_mesh((-1,), ("x",))
x = ms.distribute_tensor(torch.rand(1 << 16), mesh, (ms.Shard(0),))
if rank == 1 and os.environ["WRITES"] == "False":
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    background._write_part = full
if os.environ["STDERR"] == "closed":
    sys.stderr = sys.__stderr__ = None
ms.io.save_checkpoint(os.environ["FOLDER"], 1, tensors={"x": x}, asynchronous=True)
"""
    folder = tmp_path / "run"
    outcome = job(2, body, FOLDER=os.fspath(folder), WRITES=str(writes), STDERR=stderr)
    assert len(outcome.noted("END")) == 2, outcome.output
    # the launcher may kill the rank that ends later
    assert (outcome.status == 0) == writes, outcome.output
    assert ("No space left on device" in outcome.output) == (not writes and stderr == "open")
    assert (folder / "latest").exists() == writes


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_checkpoint_that_is_interrupted_while_the_program_ends(job, tmp_path, culprit):
    """Ctrl-C on one rank: the status tells that it was not written, and the other rank does not wait for it."""
    body = """
import threading
from mpishard.io.checkpoint import background
mesh = ms.init_mesh((-1,), ("x",))
x = ms.distribute_tensor(torch.rand(1 << 16), mesh, (ms.Shard(0),))
ending = threading.Event()
threading._register_atexit(ending.set)
def interrupting(*_):
    ending.wait()
    time.sleep(0.5)  # until Python waits for this thread
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    time.sleep(600)
if rank == int(os.environ["CULPRIT"]):
    background._write_part = interrupting
ms.io.save_checkpoint(os.environ["FOLDER"], 1, tensors={"x": x}, asynchronous=True)
"""
    folder = tmp_path / "run"
    outcome = job(2, body, FOLDER=os.fspath(folder), CULPRIT=str(culprit))
    assert outcome.status != 0, outcome.output
    assert "KeyboardInterrupt: at the end of the program" in outcome.output
    assert outcome.seconds < 60
    assert not (folder / "latest").exists()


def test_nothing_is_said_into_a_file_that_has_the_number_of_stderr(job, tmp_path):
    body = """
from mpishard.comm import exit
sys.stderr = sys.__stderr__ = None
at = os.open(f"{os.environ['FOLDER']}/{rank}", os.O_RDWR | os.O_CREAT)
kept = os.dup(2)
os.dup2(at, 2)
exit.say("words")
os.close(2)
exit.say("words")
os.dup2(kept, 2)
note("SIZE", os.fstat(at).st_size)
"""
    outcome = job(2, body, FOLDER=os.fspath(tmp_path))
    assert outcome.noted("SIZE") == [["0"], ["0"]], outcome.output


def test_exchange_in_flight_at_the_end(job):
    outcome = job(2, ALIVE + "h.start(field)")
    assert outcome.output == ""
    assert outcome.status == 0


def test_finalizers_run_once_and_before_mpi_ends(job):
    body = """
import atexit
from mpishard.comm import exit
atexit.register(lambda: print("before ours was registered", MPI.Is_finalized()))
exit.on_finalize(lambda: print("first", MPI.Is_finalized()))
exit.on_finalize(lambda: print("second", MPI.Is_finalized()))
"""
    mine = "second False\nfirst False\n"
    outcome = job(1, body)
    assert outcome.output == mine + "before ours was registered False\n"
    outcome = job(1, body + "MPI.Finalize()")
    assert outcome.output == mine + "before ours was registered True\n"


def test_a_rank_that_leaves_without_a_word(job, tmp_path):
    """The launcher or the watchdog ends the job, and the file that the other one was writing is as it was."""
    at = tmp_path / "a.h5"
    body = """
mesh = ms.init_mesh((-1,), ("x",))
x = ms.distribute_tensor(torch.arange(64.0), mesh, (ms.Shard(0),))
ms.io.write(os.environ["AT"], {"x": x})
world.Barrier()
if rank == 1:
    os._exit(0)
ms.io.write(os.environ["AT"], {"x": x + 1})
note("WRITTEN")
"""
    outcome = job(2, body, AT=os.fspath(at), MPISHARD_TIMEOUT="5")
    assert not outcome.noted("WRITTEN"), outcome.output
    with h5py.File(at, "r") as file:
        assert file["x"][:].tolist() == list(range(64))
