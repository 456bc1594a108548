"""The job scripts, submitted for real to a one-node Slurm that this file starts and stops."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpishard.cli import main

ROOT = Path(__file__).parents[2]
# Above what slurm.sh itself waits for.
START_S = 300
JOB_S = 900

Slurm = Callable[..., str]
Submit = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Run a command of a Slurm of one node: ``slurm("squeue", "-h")`` -> what it says."""
    folder = tmp_path_factory.mktemp("slurm")
    control = ROOT / "tests" / "cluster" / "slurm.sh"
    variables = {
        **os.environ,
        "SLURM_CONF": os.fspath(folder / "slurm.conf"),
        "PYTHONPATH": os.fspath(ROOT),
        # unlike mpirun, srun does not tell Open MPI that ranks share cores here
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }

    def run(*command: str | os.PathLike[str]) -> str:
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        # slurm.sh leaves daemons behind, which would hold a pipe open
        with open(folder / "start.log", "w+") as log:
            code = subprocess.call([control, "start", folder], stdout=log, stderr=log, timeout=START_S)
            log.seek(0)
            assert code == 0, log.read()
        yield run
    finally:
        subprocess.run([control, "stop", folder], check=True, timeout=START_S)


def start_again(slurm: Slurm, task: str, number: str) -> None:
    """Start what is queued again, if nothing is left of its first start: Slurm waits two minutes for that.

    ``number`` is that of the job alone, ``task`` also of a task of an array. A step that is not over yet has its
    sockets, and its process a little longer, and the next one of its name would fail.
    """
    spool = re.search(r"SlurmdSpoolDir *= (\S+)", slurm("scontrol", "show", "config"))
    assert spool is not None
    left = any(re.search(rf"[._]{number}\.", name) for name in os.listdir(spool[1]))
    alive = subprocess.run(["pgrep", "-f", rf"^slurmstepd: \[{number}\."], capture_output=True, check=False).stdout
    if not left and not alive:
        # slurmd refuses what starts in the second in which it has ended the first start: "Job credential revoked"
        time.sleep(2)
        slurm("scontrol", "update", f"JobId={task}", "StartTime=now")


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path) -> Submit:
    """Submit a job script and wait: ``submit(script, *args, options=())`` -> exit code, output.

    With ``when=(text, command)``, the command is given the job's number when its output has the text.
    """

    def run(
        script: Path,
        *args: str,
        options: tuple[str, ...] = (),
        when: tuple[str, tuple[str, ...]] | None = None,
    ) -> tuple[int, str]:
        output = tmp_path / f"job-{len(list(tmp_path.glob('job-*')))}.out"
        number = slurm("sbatch", "--parsable", f"--output={output}", *options, script, *args)
        # sbatch --wait looks ever more rarely, in the end once a minute
        end = time.monotonic() + JOB_S
        while True:
            facts = dict(re.findall(r"\b(JobState|Reason|ExitCode)=(\S+)", slurm("scontrol", "show", "job", number)))
            if facts["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                break
            if facts.get("Reason") == "BeginTime":
                start_again(slurm, number, number)
            if when is not None and output.exists() and when[0] in output.read_text():
                slurm(*when[1], number)
                when = None
            if time.monotonic() > end:
                slurm("scancel", number)
                pytest.fail(f"no end within {JOB_S} s: {facts}\n{output.read_text() if output.exists() else ''}")
            time.sleep(1)
        code, signal = map(int, facts["ExitCode"].split(":"))
        return code or signal, f"{output.read_text()}\n{facts}"

    return run


Script = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Render the script of a job of four ranks: ``script(*command, options=())``."""

    def made(*command: str | os.PathLike[str], options: tuple[str, ...] = ()) -> Path:
        path = tmp_path / f"{len(list(tmp_path.glob('*.sbatch')))}.sbatch"
        given = ["--ranks-per-node=4", f"--env={sys.prefix}", f"--output={path}", *options]
        assert main(["slurm", "render", *given, "--", "python", "-u", *map(os.fspath, command)]) == 0
        return path

    return made


PROGRAM = """
import os, sys, time
import torch
import mpishard as ms

mesh = ms.init_mesh((2, 2), ("y", "x"))
assert mesh.size == int(os.environ["SLURM_NTASKS"])
assert torch.get_num_threads() == int(os.environ["SLURM_CPUS_PER_TASK"])
if "--raise" in sys.argv and mesh.rank == 1:
    raise RuntimeError("rank 1 has had enough")
if "--stop" in sys.argv:
    folder = os.environ["MPISHARD_CHECKPOINTS"]
    first = ms.io.load_checkpoint(folder, mesh=mesh).step if os.path.exists(folder) else 0
    with ms.io.preemption(mesh) as stop:
        if mesh.rank == 0:
            print(f"from step {first}", flush=True)
        for step in range(first, first + (3 if "SLURM_RESTART_COUNT" in os.environ else 10**6)):
            time.sleep(0.05)
            if stop.should_stop():
                ms.io.save_checkpoint(folder, step + 1, mesh=mesh)
                # ranks never end at the same moment
                time.sleep(0.3 * mesh.rank)
                sys.exit(stop.exit_code)
total = ms.all_reduce(torch.ones(()), mesh)
if mesh.rank == 0:
    print(f"sum over {mesh.size} ranks: {total.item():.0f}")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_ranks_of_a_job_meet(submit: Submit, script: Script, program: Path) -> None:
    code, output = submit(script(program, options=("--cpus-per-rank=2",)))
    assert code == 0, output
    # this Slurm binds nothing, and says so
    assert output.removeprefix("srun: cluster configuration lacks support for cpu binding\n").startswith(
        "sum over 4 ranks: 4\n\n{"
    )


def test_a_rank_that_raises_ends_the_job(submit: Submit, script: Script, program: Path) -> None:
    code, output = submit(script("-m", "mpishard", "run", "--check", program, "--raise"))
    assert code != 0, output
    assert "the job keeps its promises" in output
    assert output.count("RuntimeError: rank 1 has had enough") == 1, output


def test_a_job_that_must_stop_is_queued_again(submit: Submit, script: Script, program: Path, tmp_path: Path) -> None:
    tell = ("from step 0", ("scancel", "--batch", "--signal=USR1"))
    for most, code in (("0", 75), ("1", 0)):
        options = (f"--checkpoints={tmp_path / 'it is' / most}", f"--max-requeues={most}")
        got, output = submit(script(program, "--stop", options=options), when=tell)
        assert got == code, output
        starts = [int(n) for n in re.findall(r"from step (\d+)", output)]
        assert len(starts) == 1 + int(most), output
        assert starts == sorted(set(starts)), output
    assert "sum over 4 ranks: 4" in output


def test_a_job_that_its_user_cancels_stays_cancelled(
    submit: Submit, script: Script, program: Path, tmp_path: Path
) -> None:
    path = script(program, "--stop", options=(f"--checkpoints={tmp_path / 'saved'}",))
    _, output = submit(path, when=("from step 0", ("scancel",)))
    assert "'JobState': 'CANCELLED'" in output
    assert "cancelled, or queued again by Slurm" in output
    assert output.count("from step") == 1, output
    assert (tmp_path / "saved" / "latest").exists()


# of an array one task has the number of the whole: this one asks for another turn, once, while the others still run
TURNS = """
echo "$SLURM_ARRAY_TASK_ID" >>"$1"
mine() { [ "$SLURM_JOB_ID" = "$SLURM_ARRAY_JOB_ID" ]; }
if mine && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
    while [ "$(wc -l <"$1")" -lt 2 ]; do sleep 0.1; done
    exit 75
fi
while ! grep -q "^again" "$1"; do mine && echo "again $SLURM_ARRAY_TASK_ID" >>"$1"; sleep 0.1; done
"""


def test_of_an_array_the_task_that_saved_goes_on_alone(slurm: Slurm, tmp_path: Path) -> None:
    path = tmp_path / "array.sbatch"
    options = ["--array=0-1", "--ranks-per-node=1", f"--checkpoints={tmp_path / 'saved'}", f"--output={path}"]
    assert main(["slurm", "render", *options, "--", "bash", "-c", TURNS, "turns", os.fspath(tmp_path / "turns")]) == 0
    number = slurm("sbatch", "--parsable", f"--output={tmp_path}/%a.out", path)
    end = time.monotonic() + JOB_S
    while states := slurm("squeue", "--noheader", "--array", "--format=%F_%K %A %r", "--jobs", number):
        for task, job in re.findall(r"(\S+) (\S+) BeginTime", states):
            start_again(slurm, task, job)
        if time.monotonic() > end:
            slurm("scancel", number)
            pytest.fail(f"no end within {JOB_S} s: {states}")
        time.sleep(1)
    turns = (tmp_path / "turns").read_text().split("\n")
    last = turns[3].removeprefix("again ")
    assert sorted(turns[:2]) == ["0", "1"]
    assert turns[2:] == [last, f"again {last}", ""]


HELD = f"""
import os, signal, sys, time
sys.path.insert(0, {os.fspath(ROOT / "examples")!r})
import segment_brain

train = segment_brain.train
rank = segment_brain.MPI.COMM_WORLD.rank

def held(*args):
    # on its first start a job is told to stop after its second step, however busy the machine is
    for i, step in enumerate(train(*args), 1):
        if i == 2 and rank == 0 and "HOLD" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
            told, notice = [], signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *signalled: told.append(notice(*signalled)))
            print("after two steps", flush=True)
            while not told:
                time.sleep(0.05)
        yield step

segment_brain.train = held
sys.exit(segment_brain.main())
"""


def test_the_brain_job_survives(submit: Submit, script: Script, tmp_path: Path) -> None:
    program = tmp_path / "held.py"
    program.write_text(HELD)
    small = ("--subsample=12", "--base=2", "--levels=3", "--steps=4", "--dtype=float64", f"--data={tmp_path}")
    saves = f"--checkpoints={tmp_path / 'checkpoints'}"

    def run(name: str, *options: str, variables: str = "", **how: Any) -> tuple[str, dict[str, np.ndarray]]:
        job = script(
            program,
            *small,
            f"--out={tmp_path / name}",
            options=("--job-name=segment_brain", "--ranks-per-node=3", *options),
        )
        code, output = submit(job, options=(f"--export=ALL,MPISHARD_DETERMINISTIC=1{variables}",), **how)
        assert code == 0, output
        assert (tmp_path / name / "segment_brain.png").stat().st_size > 0
        with h5py.File(tmp_path / name / "segment_brain.h5") as file:
            assert {file[tissue].shape for tissue in ("gm", "wm")} == {(17, 20, 16)}
            return output, {"loss": file.attrs["loss"], "gm": file["gm"][:], "wm": file["wm"][:]}

    output, straight = run("straight")
    assert "on a mesh (3, 1)" in output
    assert "going on" not in output
    assert len(set(straight["loss"])) == 4

    tell = ("after two steps", ("scancel", "--batch", "--signal=USR1"))
    output, again = run("again", saves, variables=",HOLD=1", when=tell)
    assert "told to stop: saved after step 2" in output
    assert "going on after step 2" in output
    for name, values in straight.items():
        # the loss of every step, and the maps, to the last bit
        assert np.array_equal(again[name], values), output

    # what the first start has saved, on another number of ranks
    output, elsewhere = run("elsewhere", saves, "--ranks-per-node=2")
    assert "on a mesh (2, 1)" in output
    assert "going on after step 2" in output
    assert np.array_equal(elsewhere["loss"][:2], straight["loss"][:2])
    np.testing.assert_allclose(elsewhere["loss"], straight["loss"], rtol=1e-7)
    np.testing.assert_allclose(elsewhere["gm"], straight["gm"], atol=1e-4)


# the others ask for more nodes, or for GPUs
@pytest.mark.parametrize("name", ["one_node", "array", "coupled", "segment_brain"])
def test_slurm_takes_what_is_checked_in(slurm: Slurm, name: str) -> None:
    slurm("sbatch", "--test-only", ROOT / "jobs" / f"{name}.sbatch")


def test_names_arrive_as_they_were_given(slurm: Slurm, script: Script) -> None:
    name = """two words, "quotes", it's $(date) `date` \\ # 100%"""
    number = slurm("sbatch", "--parsable", "--hold", script("program", options=(f"--job-name={name}",)))
    try:
        assert slurm("squeue", "--noheader", "--format=%j", "--jobs", number) == name
    finally:
        slurm("scancel", number)


def test_ranks_that_do_not_know_each_other_stop() -> None:
    # what a wrong --mpi does to MPI libraries that then start as single processes
    done = subprocess.run(
        [sys.executable, "examples/segment_brain.py"],
        cwd=ROOT,
        env={**os.environ, "SLURM_NTASKS": "4"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB_S,
    )
    assert done.returncode != 0
    assert "expected: 4 ranks, as SLURM_NTASKS says" in done.stdout


PROGRAMS = """
import sys
import torch
import mpishard as ms
name, other = sys.argv[1:3]
me = ms.insitu.join(name)
assert me.programs == {"solver": 2, "model": 2}, me.programs
mesh = ms.init_mesh((2,), ("x",), comm=me.comm)
u = ms.zeros(5, 3, mesh=mesh, placements=(ms.Shard(int(name == "model")),))
if name == "solver":
    with me.connect(other, out={"u": u}) as link:
        for step in range(3):
            u.to_local().fill_(step)
            link.put()
else:
    with me.connect(other, into={"u": u}) as link:
        seen = [(step, u.to_local().unique().tolist()) for step in link]
    if me.comm.rank == 0:
        print("seen", seen, flush=True)
"""


def test_programs_side_by_side(submit: Submit, tmp_path: Path) -> None:
    program = tmp_path / "two words.py"
    program.write_text(PROGRAMS)
    model = (":", "-n", "2", "python", program, "model", "solver")
    path = tmp_path / "coupled.sbatch"
    given = ["--ranks-per-node=4", f"--env={sys.prefix}", f"--output={path}", "--multi-prog"]
    command = ("-n", "2", "python", program, "solver", "model", *model)
    assert main(["slurm", "render", *given, "--", *map(os.fspath, command)]) == 0
    code, output = submit(path)
    assert code == 0, output
    assert "seen [(0, [0.0]), (1, [1.0]), (2, [2.0])]" in output, output


def test_the_job_that_learns_on_line(submit: Submit, tmp_path: Path) -> None:
    size = ("--steps", "8", "--window", "4", "--cells", "16", "--ranks", "2", "2")
    script = ROOT / "jobs" / "online_closure.sbatch"
    code, output = submit(
        script, *size, f"--out={tmp_path}", f"--build={tmp_path}", options=("--ntasks=4", "--overcommit")
    )
    assert code == 0, output
    assert "error of the coarse run after 8 steps" in output
    assert (tmp_path / "online_solver").exists()
    assert (tmp_path / "online_closure.png").stat().st_size > 0
