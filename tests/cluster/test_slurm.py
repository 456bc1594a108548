"""The job scripts, submitted for real to a one-node Slurm that this file starts and stops."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import pytest

ROOT = Path(__file__).parents[2]
# Above what slurm.sh itself waits for.
START_S = 300
JOB_S = 900

Submit = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def submit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submit]:
    """Submit a job script and wait: ``submit(script, *args, options=(), env=None)`` -> exit code, output.

    With ``when=(text, command)``, the command is given the job's number when its output has the text.
    """
    folder = tmp_path_factory.mktemp("slurm")
    control = ROOT / "tests" / "cluster" / "slurm.sh"

    def run(
        script: Path,
        *args: str,
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        when: tuple[str, tuple[str, ...]] | None = None,
    ) -> tuple[int, str]:
        output = folder / f"job-{len(list(folder.glob('job-*')))}.out"
        variables = {
            **os.environ,
            "SLURM_CONF": os.fspath(folder / "slurm.conf"),
            "PYTHON": sys.executable,
            # unlike mpirun, srun does not tell Open MPI that ranks share cores here
            "OMPI_MCA_mpi_yield_when_idle": "1",
            **(env or {}),
        }

        def slurm(*command: str | os.PathLike[str]) -> str:
            return subprocess.check_output(command, cwd=ROOT, env=variables, text=True, timeout=300).strip()

        number = slurm("sbatch", "--parsable", f"--output={output}", *options, script, *args)
        # sbatch --wait looks ever more rarely, in the end once a minute
        end = time.monotonic() + JOB_S
        while True:
            facts = dict(re.findall(r"\b(JobState|Reason|ExitCode)=(\S+)", slurm("scontrol", "show", "job", number)))
            if facts["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                break
            if facts.get("Reason") == "BeginTime":
                # a job that is queued again waits for two minutes; its node needs but a few seconds
                time.sleep(5)
                slurm("scontrol", "update", f"JobId={number}", "StartTime=now")
            if when is not None and output.exists() and when[0] in output.read_text():
                slurm(*when[1], number)
                when = None
            if time.monotonic() > end:
                slurm("scancel", number)
                pytest.fail(f"no end within {JOB_S} s: {facts}\n{output.read_text() if output.exists() else ''}")
            time.sleep(1)
        code, signal = map(int, facts["ExitCode"].split(":"))
        return code or signal, f"{output.read_text()}\n{facts}"

    try:
        # slurm.sh leaves daemons behind, which would hold a pipe open
        with open(folder / "start.log", "w+") as log:
            code = subprocess.call([control, "start", folder], stdout=log, stderr=log, timeout=START_S)
            log.seek(0)
            assert code == 0, log.read()
        yield run
    finally:
        subprocess.run([control, "stop", folder], check=True, timeout=START_S)


JOB = ROOT / "jobs" / "segment_brain.sbatch"
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
    folder = sys.argv[1].removeprefix("--checkpoints=")
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
def job(tmp_path: Path) -> Path:
    """Return the job script, with a small program in the place of its own."""
    program, script = tmp_path / "program.py", tmp_path / "job.sbatch"
    program.write_text(PROGRAM)
    text = JOB.read_text()
    assert text.count("-u examples/segment_brain.py") == 1
    script.write_text(text.replace("-u examples/segment_brain.py", f"-u {program}"))
    return script


def test_ranks_of_a_job_meet(submit: Submit, job: Path) -> None:
    code, output = submit(job, options=("--cpus-per-task=2",))
    assert code == 0, output
    assert output.startswith("sum over 4 ranks: 4\n\n{")


def test_a_rank_that_raises_ends_the_job(submit: Submit, job: Path) -> None:
    code, output = submit(job, "--raise")
    assert code != 0, output
    assert output.count("RuntimeError: rank 1 has had enough") == 1, output


def test_a_job_that_must_stop_is_queued_again(submit: Submit, job: Path, tmp_path: Path) -> None:
    tell = ("from step 0", ("scancel", "--batch", "--signal=USR1"))
    for most, code in (("0", 75), ("1", 0)):
        places = {"CHECKPOINTS": os.fspath(tmp_path / most), "MAX_REQUEUES": most}
        got, output = submit(job, "--stop", env=places, when=tell)
        assert got == code, output
        starts = [int(n) for n in re.findall(r"from step (\d+)", output)]
        assert len(starts) == 1 + int(most), output
        assert starts == sorted(set(starts)), output
    assert "sum over 4 ranks: 4" in output


def test_the_brain_job(submit: Submit, tmp_path: Path) -> None:
    code, output = submit(
        JOB, *("--mesh", "2", "2"), *("--subsample", "6"), *("--steps", "1"), f"--data={tmp_path}", f"--out={tmp_path}"
    )
    assert code == 0, output
    assert "on a mesh (2, 2)" in output
    assert (tmp_path / "segment_brain.png").stat().st_size > 0
    with h5py.File(tmp_path / "segment_brain.h5") as file:
        assert {file[name].shape for name in ("gm", "wm")} == {(33, 39, 32)}


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
    program, conf, script = tmp_path / "program.py", tmp_path / "multi.conf", tmp_path / "job.sh"
    program.write_text(PROGRAMS)
    # ranks of a program need not follow one another
    conf.write_text(f"0,3 {sys.executable} {program} solver model\n1,2 {sys.executable} {program} model solver\n")
    script.write_text(
        f"#!/usr/bin/env bash\nexport PYTHONPATH={ROOT}\nsrun -n 4 --overcommit --mpi=pmix --multi-prog {conf}\n"
    )
    code, output = submit(script, options=("--ntasks=4",))
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
