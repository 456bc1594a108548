"""Jobs that are killed while they append to a file: every step that was written before is there, and right."""

from __future__ import annotations

import os
import random

import pytest

from tests.failure.killed import killed

BODY = """
at = os.environ["AT"]
mesh = ms.init_mesh((-1,), ("x",))

def field(step):
    full = torch.arange(64.0 * 96).view(64, 96) + step
    return ms.distribute_tensor(full, mesh, (ms.Shard(0),))

def steps():
    if not os.path.exists(at):
        return 0
    ms.io.heal(at)
    with ms.io.Dataset(at, "x", mesh, (ms.Shard(0),)) as ds:
        for step, x in enumerate(ds):
            assert torch.equal(x.to_local(), field(step).to_local()), step
        times = ms.io.read(at, "time", mesh, (ms.Replicate(),)).full_tensor().tolist()
        assert times == list(range(len(ds)))
        return len(ds)

def append(step):
    ms.io.write(at, {"x": field(step), "y": field(2 * step)}, append="time", scales={"time": step}, compression=
                "gzip" if os.environ.get("ZIP") else None, vtkhdf=step % 3 == 0)
"""

# at points of the code that a random moment seldom meets
ARMED = """
import h5py, signal
import mpishard.io.backend.root as root
from mpishard.io.file.journal import Journal

POINTS = ["grown", "journal", "closed", "flushed"]

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def arm(where):
    if where == "grown":
        grow = root.grow
        root.grow = lambda file, *a: (grow(file, *a), file.flush(), kill())
    elif where == "journal":
        Journal.put_back = Journal.commit = lambda self: kill()
    elif where == "closed":
        shut = root.shut
        root.shut = lambda *a: (shut(*a), kill())
    elif where == "flushed":
        selection = root.selection
        root.selection = lambda *a: (h5py.h5f.flush(h5py.h5f.get_obj_ids(types=h5py.h5f.OBJ_FILE)[0]), kill())

def first(i):
    space["begun"] = steps()
    return space["begun"]

def work(step, i):
    armed = i % 2 and step > space["begun"]
    if armed:
        arm(POINTS[i // 2 % 4])
    append(step)
    assert not armed, "it lived on"

space = {}
"""


@pytest.mark.parametrize(("zipped", "times"), [("", 16), ("1", 6)])
def test_killed_at_any_moment_of_a_step(tmp_path, kills, zipped, times):
    """One process, in turn at random moments and at the worst points."""
    times = kills(times)
    program = "import mpishard as ms\nimport os, torch\n" + BODY + ARMED
    assert killed(program, times, AT=os.fspath(tmp_path / "a.h5"), ZIP=zipped) >= 3 * times // 2


def test_a_rank_killed_at_any_moment_of_a_step(job, tmp_path, kills):
    """Of two ranks, either: the one that writes, or one of those that write together."""
    generator = random.Random(2)
    at = os.fspath(tmp_path / "a.h5")
    reached = 0
    for i in range(kills(3)):
        body = f"""
first = steps()
if rank == 0:
    note("FIRST", first)
world.Barrier()
if rank == {i % 2}:
    doom({0.05 + 0.3 * generator.random()})
def work():
    for step in range(first, 10**6):
        append(step)
        if rank == 0:
            note("DONE", step + 1)
until_doom(work)
"""
        outcome = job(2, BODY + body, AT=at, MPISHARD_TIMEOUT="5")
        outcome.was_killed()
        ((first,),) = outcome.noted("FIRST")
        assert int(first) >= reached, outcome
        reached = max(int(step) for (step,) in [(first,), *outcome.noted("DONE")])
    outcome = job(1, BODY + "note('THERE', steps())\n", AT=at)
    assert outcome.status == 0, outcome.output
    assert int(outcome.noted("THERE")[0][0]) >= reached
