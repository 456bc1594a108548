"""Checkpoints and what ends a job: kills, full and read-only disks, signals; and other numbers of ranks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.failure.killed import killed

FIELD = """
folder = os.environ["FOLDER"]
mesh = ms.init_mesh((-1,), ("x",))

def field(step, n=512, dim=0):
    full = torch.arange(float(n * 256)).view(n, 256) + step
    return ms.distribute_tensor(full, mesh, (ms.Shard(dim),))

def save(step, **options):
    state = {"x": field(step), "plain": torch.full((1000,), float(step))}
    return ms.io.save_checkpoint(folder, step, tensors=state, extra=step, rng=False, keep=2, **options)

def load(dim=1):
    found = ms.io.load_checkpoint(folder, mesh=mesh, placements=(ms.Shard(dim),), rng=False)
    assert found.extra == found.step
    assert torch.equal(found.tensors["x"].to_local(), field(found.step, dim=dim).to_local())
    return found.step

def refused(what, **options):
    try:
        ms.io.save_checkpoint(folder, 9, **options).wait()
    except OSError as e:
        texts = world.allgather(str(e))
        assert len(set(texts)) == 1 and "cannot write" in texts[0], texts
    else:
        raise AssertionError(what)
"""

PIPELINE = """
pipe = ms.Pipeline([torch.nn.Linear(64, 64) for _ in range(world.size)], mesh, 0)

def save(step, **options):
    with torch.no_grad():
        pipe.stage.weight.fill_(step + pipe.index)
    return ms.io.save_checkpoint(folder, step, model=pipe, extra=step, rng=False, keep=2, **options)

def load(dim=1):
    found = ms.io.load_checkpoint(folder, model=pipe, rng=False)
    assert found.extra == found.step
    assert pipe.stage.weight.eq(found.step + pipe.index).all()
    return found.step
"""


def test_three_ranks_save_and_two_go_on(job, tmp_path):
    program = """
torch.manual_seed(rank)
model = ms.distribute_module(torch.nn.Linear(256, 3), mesh)
optimizer = torch.optim.Adam(model.parameters())
parts = {"model": model, "optimizer": optimizer, "mesh": mesh}
def step():
    optimizer.zero_grad()
    loss = model(field(1) / 1e5).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)
"""
    folder = os.fspath(tmp_path / "checkpoints")
    first = "step()\nms.io.save_checkpoint(folder, 1, **parts)\n"
    first += "save(2, asynchronous=True)\nlosses = [step(), step()]\nif rank == 0:\n    note('LOSSES', *losses)\n"
    outcome = job(3, FIELD + program + first, FOLDER=folder)
    assert outcome.status == 0, outcome.output
    (expected,) = outcome.noted("LOSSES")
    then = f"""
assert load() == 2
assert ms.io.load_checkpoint(folder, step=1, **parts).step == 1
for got, expected in zip([step(), step()], [{", ".join(expected)}], strict=True):
    assert abs(got - expected) < 1e-6 * expected, (got, expected)
save(3)
if rank == 0:
    print("went on")
"""
    outcome = job(2, FIELD + program + then, FOLDER=folder)
    assert outcome.status == 0, outcome.output
    assert "went on" in outcome.output


def test_killed_at_any_moment_of_a_save(tmp_path, kills):
    """One process, again and again, saves in the foreground and in the background."""
    program = "import mpishard as ms\nfrom mpi4py import MPI\nimport os, torch\nworld = MPI.COMM_WORLD\n" + FIELD
    program += """
def first(i):
    if i == 0:
        save(0)
    return load() + 1

def work(step, i):
    save(step, asynchronous=i % 2 == 1)
"""
    # what is saved in the background is there when the next save has begun
    times = kills(16)
    assert killed(program, times, may_lose=1, FOLDER=os.fspath(tmp_path / "checkpoints")) > times


@pytest.mark.parametrize("kind", ["field", "pipeline"])
def test_a_rank_killed_at_any_moment_of_a_save(kind, job, tmp_path, kills):
    """One of two ranks, or stages; the other one waits for it, in MPI or in a file."""
    program = FIELD + (PIPELINE if kind == "pipeline" else "")
    generator = random.Random(1)
    folder = os.fspath(tmp_path / "checkpoints")
    reached = 0
    times = kills(4)
    for i in range(times):
        body = f"""
first = load(0) + 1 if {i} else 1
if rank == 0:
    note("FIRST", first)
world.Barrier()
if rank == {2 * i // times}:
    doom({0.02 + 0.2 * generator.random()})
def work():
    for step in range(first, 10**6):
        save(step, asynchronous={i % 2 == 1})
until_doom(work)
"""
        if i == 0:
            body = "save(0)\n" + body
        outcome = job(2, program + body, FOLDER=folder, MPISHARD_TIMEOUT="5")
        outcome.was_killed()
        ((first,),) = outcome.noted("FIRST")
        assert int(first) >= reached, outcome
        reached = int(first)
    outcome = job(2 if kind == "pipeline" else 1, program + "note('LOADED', load())\n", FOLDER=folder)
    assert outcome.status == 0, outcome.output
    assert int(outcome.noted("LOADED")[0][0]) >= reached - 1


def test_two_jobs_that_are_killed_save_into_one_folder(tmp_path, kills):
    """At drawn moments: one of them saves all, the other one is told who, and nothing is lost."""
    rounds = kills(12)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.failure.two_jobs",
            tmp_path / "x",
            str(rounds),
            os.environ.get("MPISHARD_SEED", "0"),
        ],
        env={**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # of a few rounds perhaps none; each checks what it saw
    assert rounds < 12 or "refused" in done.stdout, done.stdout


def test_full_and_read_only_disks(job, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small file system can only be mounted by root: {mount.stderr}")
    body = """
save(1), save(2)
for mode in (True, False):
    refused("full", tensors={"x": field(9, 8192)}, asynchronous=mode)
    assert load() == 2
    refused("full", tensors={"plain": torch.zeros(2_000_000)}, mesh=mesh, asynchronous=mode)
    assert load() == 2
assert sorted(os.listdir(folder)) == [".lock", "latest", "step_0000000001", "step_0000000002"]
save(3, asynchronous=True).wait()
world.Barrier()
if rank == 0:
    subprocess.run(["mount", "-o", "remount,ro", os.path.dirname(folder)], check=True)
world.Barrier()
for mode in (True, False):
    refused("read-only", tensors={"x": field(9)}, asynchronous=mode)
assert load() == 3
if rank == 0:
    print("all there")
"""
    try:
        outcome = job(2, FIELD + body, FOLDER=os.fspath(disk / "checkpoints"))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert outcome.status == 0, outcome.output
    assert "all there" in outcome.output


def test_a_signal_to_one_rank_and_a_job_that_goes_on(job, tmp_path):
    folder = os.fspath(tmp_path / "checkpoints")
    body = """
first = load() if os.path.exists(folder) else 0
with ms.io.preemption(mesh) as stop:
    for step in range(first, 300):
        if rank == 1 and first == 0 and step == 7:
            subprocess.run(["sh", "-c", f"kill -USR1 {os.getpid()}"])
        if stop.should_stop():
            save(step + 1)
            if rank == 0:
                note("STOPPED", step)
            sys.exit(stop.exit_code)
if rank == 0:
    print(f"from {first} to the end")
"""
    outcome = job(2, FIELD + body, FOLDER=folder)
    assert outcome.status == 75, outcome.output
    assert outcome.noted("STOPPED") == [["7"]]
    outcome = job(2, FIELD + body, FOLDER=folder)
    assert outcome.status == 0, outcome.output
    assert "from 8 to the end" in outcome.output


def test_a_failure_that_nobody_waits_for_is_told(job, tmp_path):
    body = """
import resource
save(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
save(2, asynchronous=True)
"""
    outcome = job(2, FIELD + body, FOLDER=os.fspath(tmp_path / "checkpoints"))
    assert "cannot write a checkpoint" in outcome.output, outcome.output
    assert sorted(os.listdir(tmp_path / "checkpoints"))[-1] == "step_0000000001"
