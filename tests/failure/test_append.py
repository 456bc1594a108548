"""Jobs that are killed while they append to a file: every step that was written before is there, and right."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

BODY = """
import sys, time
at = os.environ["AT"]
mesh = ms.init_mesh((-1,), ("x",))

def field(step):
    full = torch.arange(64.0 * 96).view(64, 96) + step
    return ms.distribute_tensor(full, mesh, (ms.Shard(0),))

def steps():
    if not os.path.exists(at):
        return 0
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

ZYGOTE = """
import os, random, signal, sys, time
import h5py, torch  # and no MPI: every child is an MPI job of its own

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def armed(where):
    # at a point of the code, for what a random moment seldom meets
    import mpishard.io.root as root
    from mpishard.io.journal import Journal
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

def child(ready, where):
    exec(os.environ["PROGRAM"], globals())
    first = steps()
    os.write(ready, b"%d\\n" % first)
    for step in range(first, 10**6):
        if where is not None and step > first:
            armed(where)
        append(step)
        os.write(ready, b"%d\\n" % (step + 1))

random.seed(0)
reached = 0
POINTS = ["grown", "journal", "closed", "flushed"]
for i in range(int(sys.argv[1])):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(write, POINTS[i // 2 % 4] if i % 2 else None)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    told = os.read(read, 20)
    assert told, "the child ended by itself"
    assert int(told.split()[0]) >= reached, "a step was lost"
    if i % 2 == 0:
        time.sleep(0.01 + 0.1 * random.random())
        os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    rest = told + os.read(read, 1 << 20)
    os.close(read)
    reached = int(rest.split()[-1])
print("REACHED", reached)
"""


def test_killed_at_any_moment_of_a_step(tmp_path):
    """Many times one process, at random moments and at the worst points: quick, because the imports are shared."""
    program = "import mpishard as ms\nimport os, sys, torch\n" + BODY
    for zipped, times, least in (("", 16, 20), ("1", 6, 4)):
        at = tmp_path / f"a{zipped}.h5"
        environment = {**os.environ, "AT": os.fspath(at), "PROGRAM": program, "ZIP": zipped}
        environment["PYTHONPATH"] = os.fspath(Path(__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", ZYGOTE, str(times)], env=environment, capture_output=True, text=True, timeout=140
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert int(done.stdout.split()[-1]) > least, done.stdout


def test_a_rank_killed_at_any_moment_of_a_step(job, tmp_path):
    """Of two ranks, either: the one that writes, or one of those that write together."""
    generator = random.Random(2)
    at = os.fspath(tmp_path / "a.h5")
    reached = 0
    for i in range(3):
        body = f"""
import subprocess
first = steps()
if rank == 0:
    print("FIRST", first, flush=True)
world.Barrier()
if rank == {i % 2}:
    subprocess.Popen(["sh", "-c", f"sleep {0.05 + 0.3 * generator.random()}; kill -9 {{os.getpid()}}"])
for step in range(first, 10**6):
    append(step)
    if rank == 0:
        print("DONE", step + 1, flush=True)
"""
        outcome = job(2, BODY + body, AT=at, MPISHARD_TIMEOUT="5")
        assert outcome.status != 0, outcome.output
        assert "Error" not in outcome.output, outcome.output
        first = int(outcome.output.partition("FIRST ")[2].split()[0])
        assert first >= reached, outcome.output
        reached = max([first, *(int(line.split()[1]) for line in outcome.output.splitlines() if line[:5] == "DONE ")])
    outcome = job(1, BODY + "print('there', steps())\n", AT=at)
    assert outcome.status == 0, outcome.output
    assert int(outcome.output.partition("there ")[2].split()[0]) >= reached
