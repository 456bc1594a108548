"""Programs of one job that exchange fields: what goes right, and what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TWO, DRAWN = (HERE / name for name in ("two_programs.py", "drawn_programs.py"))


def ended_well(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout


def test_two_programs(programs):
    ended_well(programs(*[(2, [sys.executable, TWO, name]) for name in ("solver", "model")]))


# three of the pairs every day, all where many are drawn
PAIRS = [(a, b) for a in (1, 2, 3) for b in (1, 2, 3)]
VARIANTS = int(os.environ.get("MPISHARD_VARIANTS", "20"))


@pytest.mark.parametrize("ranks", PAIRS if VARIANTS > 20 else [(2, 2), (3, 1), (1, 3)], ids=str)
def test_drawn(programs, ranks):
    """Decompositions, policies, links and mistakes; ``MPISHARD_VARIANTS=300`` and ``MPISHARD_SEED`` as elsewhere."""
    count = -(-VARIANTS // len(PAIRS)) if VARIANTS > 20 else VARIANTS
    named = zip(ranks, ("solver", "model"))
    done = programs(*[(n, [sys.executable, DRAWN, name, str(count)]) for n, name in named], timeout_s=120 + count)
    ended_well(done)
    assert "model any_links" in done.stdout


THREE = """
import sys
import torch
import mpishard as ms
name = sys.argv[1]
me = ms.insitu.join(name)
assert me.programs == {"ocean": 2, "air": 1, "model": 1}, me.programs
assert set(me.programs) - {name} == {"ocean", "air", "model"} - {name}
mesh = ms.init_mesh((-1,), ("x",), comm=me.comm)
x, y = (ms.zeros(5, mesh=mesh, placements=(ms.Shard(0),)) for _ in range(2))
if name == "model":
    with me.connect("ocean", into={"x": x}) as a, me.connect("air", out={"y": y}) as b:
        for step in a:
            y.copy_(x + step)
            b.put()
elif name == "ocean":
    with me.connect("model", out={"x": x}, policy="block", depth=1) as link:
        for step in range(4):
            x.to_local().fill_(10 * step)
            link.put()
else:
    with me.connect("model", into={"y": y}) as link:
        got = [(step, y.full_tensor().tolist()) for step in link]
    assert got == [(step, [11.0 * step] * 5) for step in range(4)], got
    print("AIR IS RIGHT", flush=True)
"""


def test_three_programs_whose_ranks_lie_anywhere(programs, tmp_path):
    path = tmp_path / "three.py"
    path.write_text(THREE)
    done = programs(*[(1, [sys.executable, path, name]) for name in ("ocean", "air", "ocean", "model")])
    ended_well(done)
    assert "AIR IS RIGHT" in done.stdout


JOINS = """
import os
import mpishard as ms
try:
    ms.insitu.join({name!r}, timeout={timeout})
except ms.MpishardError as e:
    os.write(1, f"TOLD {{e}}\\n".encode())
"""


def test_names_that_are_not_right(programs):
    # two programs of one name; then a name that is none, on one of them
    text = (
        JOINS.format(name="one", timeout=100)
        + "\n"
        + JOINS.replace("{name!r}", "{name}").format(name="'a' if '1.py' in __file__ else ''", timeout=100)
    )
    done = programs((1, text), (1, text + "# another program"))
    ended_well(done)
    assert done.stdout.count("TOLD join: two programs of one name, 'one'") == 2, done.stdout
    assert done.stdout.count("TOLD join: no name of a program on rank 1") == 2, done.stdout


AGAIN = """
import os, time
from mpi4py import MPI
import mpishard as ms
rank, join = MPI.COMM_WORLD.rank, ms.insitu.join
def told(timeout):
    try:
        join(f"program {rank}", timeout=timeout)
    except ms.PeerError as e:
        os.write(1, f"TOLD {rank} {e}\\n".encode())
    else:
        os.write(1, b"NO ERROR\\n")
told(-1 if rank == 1 else 60)  # what is wrong on one rank
MPI.COMM_WORLD.Barrier()
# a rank gives up before the first comes, which must not wait for it in what follows
if rank == 1:
    told(0.5)
MPI.COMM_WORLD.Barrier()
if rank != 1:
    told(2)
MPI.COMM_WORLD.Barrier()
assert len(join(f"program {rank}", timeout=60).programs) == MPI.COMM_WORLD.size
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_who_gave_up_may_come_again(programs, ranks):
    """Whatever the others tried meanwhile."""
    done = programs((ranks, AGAIN), env={"MPISHARD_TIMEOUT": "30"})
    ended_well(done)
    assert "NO ERROR" not in done.stdout, done.stdout
    assert done.stdout.count("join: rank 1: timeout") == ranks, done.stdout
    assert "TOLD 1 join: rank 0 of MPI_COMM_WORLD did not come" in done.stdout, done.stdout
    assert "TOLD 0 join: rank 1 of MPI_COMM_WORLD did not come" in done.stdout, done.stdout


CROSSED = """
import mpishard as ms
from mpi4py import MPI
from mpishard.comm.coupling import meeting, wire
world, decided = MPI.COMM_WORLD, meeting._one_name
rank, size = world.rank, world.size
def seen_too_late(entries):
    # the others are here: what the last of them says next comes too late
    world.Probe(size // 2, wire.MEETING_TAG)
    meeting._one_name = decided
    return decided(entries)
if rank == 0:
    meeting._one_name = seen_too_late
join = ms.insitu.join
world.Barrier()  # who is still importing would find the last rank gone before it is there
for timeout in 0.1 if rank == size - 1 else 60, 60:
    join("first" if rank == 0 else "others", timeout=timeout)
    print(f"rank {rank} JOINED", flush=True)
"""


@pytest.mark.parametrize("language", ["Python", "C"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_who_gives_up_when_all_have_come_has_joined(programs, compiled, tmp_path, language, ranks):
    """The others, who have taken it for one that is here, would wait for it in what follows."""
    path = tmp_path / "crossed.py"
    path.write_text(CROSSED)
    others = [sys.executable, path]
    if language == "C":
        others = [compiled(HERE / "gives_up.c", tmp_path / "host", link=True)]
    done = programs((1, [sys.executable, path]), (ranks - 1, others), env={"MPISHARD_TIMEOUT": "10"}, timeout_s=60)
    ended_well(done)
    assert done.stdout.count("JOINED") == 2 * ranks, done.stdout


THREAD = """
import threading
import mpi4py
mpi4py.rc.thread_level = LEVEL
import mpishard as ms
from mpi4py import MPI
from mpishard.errors import UnsupportedOperationError
assert MPI.Query_thread() < MPI.THREAD_SERIALIZED
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
name, other = ("solver", "model") if rank else ("model", "solver")
me = ms.insitu.join(name)
mesh = ms.init_mesh((-1,), ("x",), comm=me.comm)
x = ms.zeros(6, mesh=mesh, placements=(ms.Shard(0),))
link = me.connect(other, **{"out" if rank else "into": {"x": x}})
def in_a_thread():
    for call in (
        lambda: ms.insitu.join(name), lambda: ms.init_mesh((-1,), comm=me.comm), lambda: me.connect(other, {"x": x}),
        link.put if rank else link.get, link.close, *[lambda: x.sum().item()] * (mesh.size > 1),
    ):
        try:
            call()
        except UnsupportedOperationError as e:
            assert "MPI allows no call in this thread" in str(e), e
        else:
            raise AssertionError
    print("TOLD", flush=True)
one = threading.Thread(target=in_a_thread)
one.start()
one.join()
x.to_local().fill_(2.0)
with link:
    assert link.put() if rank else link.get() == 0
    assert x.sum().item() == 12
"""


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_threads_in_which_mpi_allows_no_call(programs, ranks):
    done = programs((ranks, THREAD.replace("LEVEL", repr("single" if ranks == 2 else "funneled"))))
    ended_well(done)
    assert done.stdout.count("TOLD") == ranks, done.stdout


NO_MEMORY = """
import os
import sys
import time
import numpy as np
import mpishard as ms
from mpishard.comm.coupling import channel
name = sys.argv[1]
me = ms.insitu.join(name)
mesh = ms.init_mesh((-1,), ("x",), comm=me.comm)
u = ms.zeros(9, mesh=mesh, placements=(ms.Shard(0),))
class Full:
    def __getattr__(self, name):
        return getattr(np, name)
    def empty(self, *args):
        raise MemoryError("Unable to allocate")
def linked():
    if name == "writer":
        return me.connect("reader", out={"u": u}, timeout=60)
    return me.connect("writer", into={"u": u}, timeout=60)
for where in ("writer", "reader"):
    channel.np = Full() if name == where and me.comm.rank == 1 else np
    start = time.monotonic()
    try:
        linked()
    except ms.MpishardError as e:
        os.write(1, f"TOLD {e}\\n".encode())
    else:
        os.write(1, b"NO ERROR\\n")
    assert time.monotonic() - start < 40
channel.np = np
with linked() as link:
    if name == "writer":
        u.to_local().fill_(3)
        link.put()
    else:
        assert list(link) == [0]
        assert (u.full_tensor() == 3).all()
"""


def test_no_memory_on_one_rank_is_told_to_all_of_both_programs(programs, tmp_path):
    path = tmp_path / "no_memory.py"
    path.write_text(NO_MEMORY)
    done = programs((2, [sys.executable, path, "writer"]), (3, [sys.executable, path, "reader"]))
    ended_well(done)
    assert done.stdout.count("TOLD connect: no link to") == 5, done.stdout
    assert done.stdout.count("got:      MemoryError: Unable to allocate") == 5, done.stdout
    assert done.stdout.count("gave up") == 5, done.stdout


NOT_UP = """
import os
import mpi4py
mpi4py.rc.initialize = False
import mpishard as ms
from mpi4py import MPI
def told(call):
    try:
        call()
    except ms.MeshError as e:
        os.write(1, f"TOLD {e}\\n".encode())
calls = (
    lambda: ms.insitu.join("a"),
    lambda: ms.insitu.adopt(MPI.COMM_WORLD, (4,), 1, ("x",)),
    lambda: ms.insitu.adopt(0, (4,), 1, ("x",)),
    lambda: ms.insitu.adopt(None, (4,), 1, ("x",)),
    lambda: ms.init_mesh((1,), ("x",)),
    lambda: ms.CartMesh.from_comm(0, ("x",)),
)
for call in calls:
    told(call)
MPI.Init_thread(MPI.THREAD_FUNNELED)
# what failed before left nothing behind
sim = ms.insitu.adopt(None, (4,), 0, ("x",))
sim.release()
assert set(ms.insitu.join("a").programs) == {"a"}
MPI.Finalize()
for call in calls:
    told(call)
"""


def test_mpi_is_not_up(programs):
    """Where MPI itself would end the process: before MPI_Init, and after MPI_Finalize."""
    done = programs((1, NOT_UP))
    ended_well(done)
    for call, times in (("join", 2), ("adopt", 6), ("init_mesh", 2), ("from_comm", 2)):
        assert done.stdout.count(f"TOLD {call}: MPI is not up") == times, done.stdout
    assert done.stdout.count("got:      MPI is not initialised") == 6, done.stdout
    assert done.stdout.count("got:      MPI is finalized") == 6, done.stdout


def test_program_that_never_joins(programs):
    absent = "from mpi4py import MPI\nimport time\ntime.sleep(12)"
    done = programs((2, JOINS.format(name="solver", timeout=4)), (1, absent))
    ended_well(done)
    assert done.stdout.count("TOLD join: rank 2 of MPI_COMM_WORLD did not come") == 2, done.stdout
    assert "'solver' (2)" in done.stdout


LATE = """
import os, signal, time
import mpishard as ms
from mpi4py import MPI
me = ms.insitu.join("{name}")
mesh = ms.init_mesh((-1,), ("x",), comm=me.comm)
u = ms.zeros(4, mesh=mesh, placements=(ms.Shard(0),))
def told(call):
    try:
        call()
    except ms.MpishardError as e:
        os.write(1, f"TOLD {name} {{me.comm.rank}} {{e}}\\n".encode())  # at once: lines of ranks do not mix
    else:
        os.write(1, b"NO ERROR {name}\\n")
"""
SOLVER = """
told(lambda: me.connect("model", out={"u": u}, timeout=1))
MPI.COMM_WORLD.Barrier()
link = me.connect("model", out={"u": u}, into={"v": u}, timeout=3)
link.put()
told(link.get)
told(link.put)
told(link.get)
link.close()
"""
MODEL = """
MPI.COMM_WORLD.Barrier()
told(lambda: me.connect("solver", into={"u": u}))
link = me.connect("solver", into={"u": u}, out={"v": u}, timeout=3)
link.get()
if me.comm.rank == 1:
    die()
told(link.put)
told(link.get)
"""
STOPPED = """
def die():
    if os.fork() == 0:
        time.sleep(15)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
KILLED = """
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_peer_that_does_not_come_and_one_that_stops(programs):
    done = programs((2, LATE.format(name="solver") + SOLVER), (2, LATE.format(name="model") + STOPPED + MODEL))
    assert "NO ERROR solver" not in done.stdout, done.stdout
    for rank in range(2):
        assert f"TOLD solver {rank} connect: program 'model' did not come" in done.stdout, done.stdout
        assert f"TOLD model {rank} connect: program 'solver' gave up" in done.stdout, done.stdout
        assert done.stdout.count(f"TOLD solver {rank} get: rank 1 of program 'model' did not answer") == 3, done.stdout
    assert "stopped by a signal: rank 1 of program 'model'" in done.stdout, done.stdout


def test_peer_that_is_killed(programs, survives):
    leave = "\ntime.sleep(3)\nos._exit(0)\n"
    done = programs(
        (2, LATE.format(name="solver") + SOLVER + leave),
        (2, LATE.format(name="model") + KILLED + MODEL + leave),
        flags=survives,
    )
    for rank in range(2):
        assert f"TOLD solver {rank} get: rank 1 of program 'model' died" in done.stdout, done.stdout
    assert "NO ERROR solver" not in done.stdout, done.stdout


READER_LEAVES = """
import os
import sys
import time
import mpishard as ms
name = sys.argv[1]
me = ms.insitu.join(name)
mesh = ms.init_mesh((-1,), ("x",), comm=me.comm)
u = ms.zeros(6, mesh=mesh, placements=(ms.Shard(0),))
def told(call, *words):
    start = time.monotonic()
    try:
        while time.monotonic() - start < 30:
            call()
            time.sleep(0.01)
    except ms.PeerError as e:
        assert all(word in str(e) for word in words), e
        os.write(1, f"TOLD {str(e).splitlines()[0]}\\n".encode())
for policy in ("block", "drop_newest", "latest"):
    for last in ("put", "close"):
        if name == "writer":
            link = me.connect("reader", out={"u": u}, policy=policy, depth=3, timeout=100)
            link.put()
            if last == "close":
                link.put()
                link.put()
            me.comm.Barrier()
            open(f"{sys.argv[2]}/{policy} {last}", "w").close()
            told(getattr(link, last), last, "of program 'reader' left")
            link.close()
        else:
            link = me.connect("writer", into={"u": u})
            link.get()
            # not before all is put: a put that finds nobody there would be told, and no close
            while not os.path.exists(f"{sys.argv[2]}/{policy} {last}"):
                time.sleep(0.01)
            block, u.block = u.block, u.block[:0]
            try:
                link.get()
            except ms.LayoutError:
                link.close()
            u.block = block
"""


def test_a_reader_that_leaves_is_told_to_its_writer(programs, tmp_path):
    """By the next call, whatever the policy, and not at the timeout."""
    path = tmp_path / "leaves.py"
    path.write_text(READER_LEAVES)
    done = programs(*((2, [sys.executable, path, name, tmp_path]) for name in ("writer", "reader")))
    ended_well(done)
    assert done.stdout.count("TOLD put") == done.stdout.count("TOLD close") == 6, done.stdout


INTERRUPTED = """
import os
import signal
import sys
import threading
import time
import mpishard as ms
name, folder = sys.argv[1:]
me = ms.insitu.join(name)
mesh = ms.init_mesh((-1,), ("x",), comm=me.comm)
u = ms.zeros(6, mesh=mesh, placements=(ms.Shard(0),))
last = me.comm.rank == me.comm.size - 1
def told(call, *words):
    start = time.monotonic()
    try:
        while time.monotonic() - start < 30:
            call()
    except ms.MpishardError as e:
        assert any(word in str(e) for word in words), e
        os.write(1, f"TOLD {name} {str(e).splitlines()[0]}\\n".encode())
def interrupted(call):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    if not last:
        told(call, "not all of its own ranks came")
        return
    timer.start()
    try:
        while True:
            call()
    except KeyboardInterrupt:
        os.write(1, b"INTERRUPTED\\n")
def one():
    if name == "writer":
        return me.connect("reader", out={"u": u}, depth=1, timeout=4)
    return me.connect("writer", into={"u": u}, depth=1, timeout=4)
for case in ("get", "put", "close"):
    link, flag = one(), f"{folder}/{case} of {me.programs['reader']}"
    if (name == "reader") == (case == "get"):
        if case != "get":
            link.put()
        interrupted(getattr(link, case))
        if case != "close":
            told(getattr(link, case), "interrupted", "lost", "not all")
        link.close()
        me.comm.Barrier()
        open(flag, "w").close()
    else:
        while not os.path.exists(flag):
            time.sleep(0.01)
        told(link.put if case == "get" else link.get, "left")
        link.close()
    if me.programs["reader"] > 1:
        break  # they do not know how far each of them is
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_call_that_is_interrupted_ends_the_link(programs, tmp_path, ranks):
    """Ctrl-C that a program catches, which may then close its links; what was under way meets nothing that follows."""
    path = tmp_path / "interrupted.py"
    path.write_text(INTERRUPTED)
    done = programs(*((n, [sys.executable, path, name, tmp_path]) for n, name in ((1, "writer"), (ranks, "reader"))))
    ended_well(done)
    cases = 3 if ranks == 1 else 1
    assert done.stdout.count("INTERRUPTED") == cases, done.stdout
    assert done.stdout.count("left") == cases, done.stdout
    assert done.stdout.count("it was interrupted, and the link is of no use any more") == (2 if ranks == 1 else 1), (
        done.stdout
    )


OTHER_CALLS = """
import os
import sys
import mpishard as ms
from mpi4py import MPI
class Unbuffered(MPI.Intracomm):
    Isend = MPI.Intracomm.Issend
me = ms.insitu.join({name!r})
mesh = ms.init_mesh((-1,), ("x",), comm=me.comm)
u = ms.zeros(6, mesh=mesh, placements=(ms.Shard(0),))
one = me.comm.rank == 0
def told(call, errors):
    try:
        call()
    except errors as e:
        os.write(1, f"TOLD {{str(e).splitlines()[0]}}\\n".encode())
    else:
        os.write(1, b"NO ERROR\\n")
for policy in ("drop_newest", "latest"):
    for case in ("close", "other link"):
        a, b = (me.connect({other!r}, **{{{side!r}: {{"u": u}}}}, policy=policy, timeout=20) for _ in range(2))
        if {name!r} == "writer":
            a.put()
            told(a.put if one else a.close if case == "close" else b.put, ms.DesyncError)
        else:
            def steps():
                for step in a:
                    pass
            told(steps, ms.MpishardError)
        a.close()
        b.close()
# a reader that closes on one rank
link = me.connect({other!r}, **{{{side!r}: {{"u": u}}}}, policy="block", timeout=20)
if {name!r} == "writer":
    # MPI may let a send wait for its receive
    link._outlet.channel = link._outlet.channel._replace(comm=Unbuffered(link._outlet.channel.comm))
    link.put()
    link.put()
else:
    link.get()
    told(link.get if one else link.close, ms.DesyncError)
link.close()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_that_differ_between_ranks_never_match(programs, ranks):
    """A put here and a close there, of one link or of two: all ranks are told."""
    done = programs(
        (ranks, OTHER_CALLS.format(name="writer", other="reader", side="out")),
        (2, OTHER_CALLS.format(name="reader", other="writer", side="into")),
    )
    ended_well(done)
    assert "NO ERROR" not in done.stdout, done.stdout
    assert done.stdout.count("TOLD ranks of program 'writer' made different calls") == 4 * ranks, done.stdout
    assert done.stdout.count("TOLD ranks of program 'reader' made different calls") == 2, done.stdout
    assert done.stdout.count("TOLD get: ") == 8, done.stdout
