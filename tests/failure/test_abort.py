"""A rank that raises, dies, stops or goes another way ends the whole job, and is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from select import select
from socket import socketpair

import pytest

MESH = """
mesh = ms.init_mesh((-1,), ("x",), periodic=True)
x = ms.distribute_tensor(torch.arange(12.0), mesh, (ms.Shard(0),))
def step():
    return ms.halo_exchange(x, {0: (1, 1)}, mode="circular")
for _ in range(3):
    step()
"""


def test_rank_that_raises_between_exchanges(job):
    outcome = job(3, MESH + "if rank == 1:\n    raise ValueError('only here')\nfor _ in range(9):\n    step()\n")
    outcome.failed_with("ValueError: only here", "[rank 1 of 3 on ")
    assert outcome.output.count("Traceback") == 1


def test_interrupted_rank(job):
    outcome = job(2, MESH + "if rank == 1:\n    raise KeyboardInterrupt\nstep()\n")
    outcome.failed_with("KeyboardInterrupt", "[rank 1 of 2 on ")


def test_print_before_the_error_is_not_lost(job):
    outcome = job(
        2, MESH + "if rank == 1:\n    print('last words', end='')\n    raise ValueError('only here')\nstep()\n"
    )
    outcome.failed_with("ValueError: only here", "last words")


@pytest.mark.parametrize("socket", [False, True])
def test_what_was_said_is_handed_on_before_the_job_ends(socket):
    there, back = (s.detach() for s in socketpair()) if socket else os.pipe()[::-1]
    body = "import os; from mpishard.comm import exit; exit.end = os._exit; print('last words'); exit.abort(3)"
    with subprocess.Popen([sys.executable, "-c", body], stdout=there) as rank, os.fdopen(back, "rb", 0) as launcher:
        os.close(there)
        select([launcher], [], [])
        time.sleep(0.8)  # it does other work
        assert rank.poll() is None
        assert launcher.read(100) == b"last words\n"
        assert rank.wait() == 3


def test_error_in_a_thread_ends_nothing(job):
    body = """
import threading
thread = threading.Thread(target=lambda: [][0])
thread.start()
thread.join()
everyone = world.gather(rank)
if rank == 0:
    print(f"still {len(everyone)} here")
"""
    outcome = job(2, body)
    assert outcome.status == 0, outcome.output
    assert "still 2 here" in outcome.output
    assert "IndexError" in outcome.output


def test_error_in_a_forked_child_ends_nothing(job):
    body = """
child = os.fork()
if child == 0:
    try:
        raise ValueError("in a child")
    except ValueError:
        sys.excepthook(*sys.exc_info())
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
everyone = world.gather(rank)
if rank == 0:
    print(f"still {len(everyone)} here")
"""
    outcome = job(2, body)
    assert outcome.status == 0, outcome.output
    assert "still 2 here" in outcome.output
    assert "ValueError: in a child" in outcome.output


def test_forked_children_that_end_leave_the_job_alone(job):
    body = (
        MESH
        + """
import multiprocessing
def child(how):
    if how == "communicates":
        try:
            step()
        except ms.UnsupportedOperationError:
            os._exit(9)
    if how == "raises":
        raise ValueError("in a child")
    sys.exit({"exits": 0, "fails": 3, "says why": "why"}[how]) if how != "falls off" else None
for how, status in {"exits": 0, "fails": 3, "says why": 1, "raises": 1, "communicates": 9, "falls off": 0}.items():
    pid = os.fork()
    if pid == 0:
        child(how)
        break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status, how
else:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]
    step()
    note("SUM", float(ms.all_reduce(torch.ones(1), mesh)))
"""
    )
    outcome = job(2, body)
    assert outcome.status == 0, outcome.output
    assert outcome.noted("SUM") == [["2.0"], ["2.0"]]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "call",
    ["x.sum()", "x[:, :0].sum()", "ms.init_mesh((-1,), ('y',))", "mesh.free()", "exchange.free()", "exchange.poke()"],
)
def test_forked_children_take_no_messages_of_their_parents(job, call, ranks):
    # the first sum is under way, as nobody has asked for it
    body = (
        MESH
        + f"""
x = ms.distribute_tensor(torch.ones(7, 5), mesh, [ms.Shard(0)])
exchange = ms.HaloExchanger(mesh, (4,), 1, torch.float64)
for turn in range(3):
    for _ in range(4):
        x.sum()
    exchange.start(torch.zeros(4, dtype=torch.float64))
    pid = os.fork()
    if pid == 0:
        try:
            {call}
            os._exit(8)
        except ms.UnsupportedOperationError:
            os._exit(9)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == (8 if "free" in {call!r} else 9), status
    exchange.finish()
note("SUM", float(x.sum()))
"""
    )
    outcome = job(ranks, body)
    assert outcome.status == 0, outcome.output
    assert outcome.noted("SUM") == [["35.0"]] * ranks


def test_error_that_cannot_be_told(job):
    # a signal handler that raises again and again, as torch's does when a worker of a DataLoader is killed
    body = (
        MESH
        + """
class Odd(Exception):
    def __str__(self):
        raise KeyError("no text")
def handler(*_):
    raise Odd
if rank == 1:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.01)
    time.sleep(5)
step()
"""
    )
    outcome = job(2, body)
    outcome.failed_with()
    assert re.search(r"\[rank 1 of 2 on .*\] uncaught exception", outcome.output), outcome.output


def test_hook_of_the_program_is_called_too(job):
    body = """
def hook(kind, error, trace):
    print(f"own hook: {error}", file=sys.stderr, flush=True)
sys.excepthook = hook
import mpishard.comm.exit as ending
ending._installed = False
ending.install()
ending.install()
if rank == 1:
    raise ValueError("only here")
world.recv(source=1)
"""
    outcome = job(2, body)
    outcome.failed_with("own hook: only here", "[rank 1 of 2 on ")
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize("start", ["ms.process_group(mesh)", "_ = ms.process_group(mesh); sys.excepthook = of_torch"])
def test_error_beside_torch_distributed(job, start):
    """Its hook keeps what is written to stderr until the one before it comes back."""
    body = """
from io import StringIO
ours = sys.excepthook
def of_torch(*error):
    sys.stderr = StringIO()
    ours(*error)
"""
    outcome = job(2, MESH + body + start + "\nif rank == 1:\n    raise ValueError('only here')\nstep()\n")
    outcome.failed_with("ValueError: only here", "[rank 1 of 2 on ")


def test_host_program_may_keep_its_own_ways(job):
    body = """
if rank == 1:
    try:
        raise ValueError("only here")
    except ValueError:
        sys.excepthook(*sys.exc_info())
everyone = world.gather(rank)
if rank == 0:
    print(f"still {len(everyone)} here")
"""
    outcome = job(2, body, MPISHARD_ABORT="0")
    assert outcome.status == 0, outcome.output
    assert "still 2 here" in outcome.output
    outcome = job(2, body)
    outcome.failed_with("ValueError: only here")
    assert "still 2 here" not in outcome.output


def test_one_rank_is_no_job(job):
    outcome = job(1, "raise ValueError('alone')")
    outcome.failed_with("ValueError: alone")
    assert "Abort" not in outcome.output
    assert "[rank" not in outcome.output


def test_killed_rank(job):
    body = MESH + "if rank == 1:\n    note('PID', os.getpid())\nworld.Barrier()\n"
    body += "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nfor _ in range(9):\n    step()\n"
    # a launcher names the process that it has started
    outcome = job(2, body, fresh=True, MPISHARD_TIMEOUT="3")
    outcome.failed_with()
    ((pid,),) = outcome.noted("PID")
    # hydra, Open MPI, or the watchdog, whichever is first
    named = re.search(rf"\b{pid}\b|rank 1 .*signal 9|for rank 1 of 2\.", outcome.output)
    assert named, outcome.output
    assert re.search(r"signal 9|KILLED|Killed|MPISHARD_TIMEOUT", outcome.output), outcome.output


def test_stopped_rank(job):
    # as a rank that hangs in a file system does
    body = MESH + "world.Barrier()\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\nstep()\n"
    outcome = job(2, body, MPISHARD_TIMEOUT="2")
    outcome.failed_with("[rank 0 of 2 on ", "has waited 2 s for rank 1 of 2.", "thread MainThread:")
    assert "in step" in outcome.output  # the Python stack


@pytest.mark.parametrize("command", ["info", "info --json", "info --check", "run {empty}"])
def test_a_rank_that_hangs_while_the_job_is_looked_at(job, tmp_path, command):
    (tmp_path / "empty.py").touch()
    words = command.format(empty=tmp_path / "empty.py").split()
    body = """
from mpishard.cli import main
from mpishard.comm import info, threads
where = (threads, "_affinity") if "--check" in words or "run" in words else (info, "_place")
own = getattr(*where)
def hang(*given):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return own(*given)
setattr(*where, hang)
main(words)
"""
    outcome = job(2, f"words = {words}\n" + body, MPISHARD_TIMEOUT="2")
    outcome.failed_with("[rank 0 of 2 on ", "has waited 2 s")


def test_rank_that_never_calls(job):
    body = MESH + "if rank == 2:\n    time.sleep(60)\nms.all_reduce(torch.ones(4), mesh)\n"
    outcome = job(3, body, MPISHARD_TIMEOUT="2")
    outcome.failed_with("MPISHARD_TIMEOUT: agreement on ('all_reduce'", 'program.py", line ')
    warm = MESH + "ms.all_reduce(torch.ones(4), mesh)\n" + body.removeprefix(MESH)
    outcome = job(3, warm, MPISHARD_TIMEOUT="2")
    outcome.failed_with("MPISHARD_TIMEOUT: all_reduce has waited", 'program.py", line ')


@pytest.mark.parametrize("then", ["redistribute", "all_reduce"])
def test_an_error_that_the_others_do_not_ask_for(job, then):
    """What one rank alone finds wrong in a call whose like was made before is told, whatever the others do."""
    body = MESH + "x = ms.ones(6, 4, mesh=mesh, placements=ms.Shard(0))\n"
    body += (
        "call = lambda dim: x.redistribute(placements=[ms.Shard(dim)])\ncall(1)\nms.all_reduce(torch.ones(2), mesh)\n"
    )
    body += "call(9) if rank == 1 else " + (
        "call(1)\n" if then == "redistribute" else "ms.all_reduce(torch.ones(2), mesh)\n"
    )
    outcome = job(2, body, MPISHARD_TIMEOUT="4" if then == "redistribute" else "60")
    assert outcome.status != 0
    told = "has an error, and waits to tell" if then == "redistribute" else "DesyncError: ranks made different calls"
    assert told in outcome.output
    assert "placements do not fit the tensor" in outcome.output
    assert "Shard(9) for a tensor of 2 dims" in outcome.output


def test_no_watchdog_where_it_is_off(job):
    body = MESH + "if rank == 1:\n    time.sleep(4)\nstep()\nimport threading\n"
    body += "names = world.gather([t.name for t in threading.enumerate()])\n"
    body += "if rank == 0:\n    print(names)\n"
    outcome = job(2, body, MPISHARD_TIMEOUT="0")
    assert outcome.status == 0, outcome.output
    assert outcome.output == "[['MainThread'], ['MainThread']]\n"


def test_timeout_that_is_empty_is_none_that_is_set(launch):
    done = launch(1, "-c", "from mpishard.comm import guard; print(guard.TIMEOUT_S)", env={"MPISHARD_TIMEOUT": ""})
    assert done.stdout == "300.0\n"


def test_timeout_that_is_no_number(launch):
    done = launch(1, "-c", "import mpishard as ms; ms.init_mesh(1)", env={"MPISHARD_TIMEOUT": "soon"})
    assert done.returncode != 0
    assert done.stdout.count("got:      'soon'") == 1


def test_different_calls(job):
    body = MESH + "y = torch.ones(4)\nms.all_reduce(y, mesh)\n"
    body += "ms.all_gather(y, mesh, 0) if rank == 1 else ms.all_reduce(y, mesh)\n"
    outcome = job(3, body, MPISHARD_DEBUG="1")
    outcome.failed_with("DesyncError: ranks made different calls (rank 1 differs)")
    assert re.search(r"ranks 0 and 2: call \d+: \W*all_reduce", outcome.output), outcome.output
    assert re.search(r"rank 1: call \d+: \W*all_gather", outcome.output), outcome.output


def test_different_shapes_in_one_call(job):
    # both are known already: no plan is made that could be compared
    body = MESH + "for n in (4, 5):\n    ms.all_reduce(torch.ones(n), mesh)\n"
    body += "ms.all_reduce(torch.ones(4 + (rank == 2)), mesh)\n"
    outcome = job(3, body, MPISHARD_DEBUG="1")
    outcome.failed_with("DesyncError: ranks made different calls (rank 2 differs)")
    assert re.search(r"rank 2: call \d+: \W*all_reduce.*torch\.Size\(\[5\]\)", outcome.output), outcome.output


def test_different_numbers_in_one_call(job):
    # what travels is alike: sums of as many cells
    body = MESH + "y = ms.distribute_tensor(torch.arange(24.0).view(1, 2, 12), mesh, (ms.Shard(2),))\n"
    body += "for eps in (1e-5, 1 / (3 + 1e-14 * rank), 1e-5 + (rank == 1)):\n"
    body += "    torch.nn.functional.batch_norm(y, None, None, training=True, eps=eps)\n    print('once', flush=True)\n"
    outcome = job(3, body, MPISHARD_DEBUG="1")
    outcome.failed_with("DesyncError: ranks made different calls (rank 1 differs)")
    assert "eps=1e-05" in outcome.output, outcome.output
    assert outcome.output.count("once") == 6, outcome.output


def test_what_is_right_with_calls_compared(job):
    """Plain tensors of a rank's own shape in autograd.grad, indices without memory, a mesh that was freed."""
    body = (
        MESH
        + """
y = ms.distribute_tensor(torch.arange(13.0), mesh, (ms.Shard(0),)).requires_grad_()
window = ms.halo_exchange(y, {0: 1}, mode="circular")
torch.autograd.grad([window], [y], [torch.ones_like(window)])
index = torch.tensor([2, 5])
z = y.detach()
torch.func.grad(lambda w: (z * w).index_add(0, index, torch.ones(2)).square().sum())(torch.ones(()))
torch.compile(lambda t: t.index_add(0, index, torch.ones(2)), backend="aot_eager", fullgraph=True)(z)
other = ms.init_mesh((3,), ("z",))
other.free()
try:
    other.plan("key", lambda: "plan")
except ms.MeshError as e:
    print(e, flush=True)
"""
    )
    outcome = job(3, body, MPISHARD_DEBUG="1")
    assert outcome.status == 0, outcome.output
    assert outcome.output.count("mesh used after free") == 3, outcome.output


def test_exchange_that_one_rank_leaves_out(job):
    # nothing travels to the last rank, but it has to call
    body = MESH + "y = ms.distribute_tensor(torch.arange(12.0), mesh, (ms.Shard(0),))\n"
    body += "def step():\n    return ms.halo_exchange(y, {0: (1, 0)}, mode='zeros')\n"
    body += "step()\nif rank != 1:\n    step()\nms.all_reduce(torch.ones(4), mesh)\n"
    outcome = job(3, body, MPISHARD_DEBUG="1")
    outcome.failed_with("DesyncError: ranks made different calls (rank 1 differs)")
    assert re.search(r"ranks 0 and 2: call \d+: ", outcome.output), outcome.output


def test_mismatches_of_warm_calls(job):
    # the plans are there: nothing is agreed on any more
    body = (
        MESH
        + """
y = ms.distribute_tensor(torch.arange(24.0), mesh, (ms.Shard(0),))
ms.halo_exchange(y, {0: 2}, mode="circular")
ms.halo_exchange(y, {0: 2} , mode="circular") if rank == 2 else step()
"""
    )
    outcome = job(3, body)
    outcome.failed_with("DesyncError: ranks made different calls: rank")
    assert re.search(r"from rank \d \d+ bytes of \('halo_exchange', Layout\(shape=\(", outcome.output), outcome.output


def test_a_rank_whose_program_ends_early(job):
    outcome = job(3, MESH + "if rank == 1:\n    sys.exit()\nstep()\n", MPISHARD_DEBUG="1")
    outcome.failed_with("ranks made different calls (rank 1 differs)")
    assert re.search(r"rank 1: call \d+: the end of the program", outcome.output), outcome.output


def test_backward_of_one_rank_only(job):
    body = (
        MESH
        + """
def loss():
    z = ms.distribute_tensor(torch.arange(12.0), mesh, (ms.Shard(0),)).requires_grad_()
    return ms.halo_exchange(z, {0: 1}, mode="circular").sum()
loss().backward()
value = loss()
value.backward() if rank == 1 else step()
"""
    )
    outcome = job(3, body, MPISHARD_DEBUG="1")
    outcome.failed_with("DesyncError: ranks made different calls (rank 1 differs)")
    assert re.search(r"rank 1: call \d+: adjoint of halo_exchange of \('halo_exchange'", outcome.output), outcome.output
