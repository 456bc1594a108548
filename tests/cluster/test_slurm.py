"""The job scripts, submitted for real to a one-node Slurm that this file starts and stops."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Above what slurm.sh itself waits for; together below the limit of one test.
START_S = 45
JOB_S = 100

Submit = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def submit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submit]:
    """Submit a job script and wait: ``submit(script, *args, options=(), env=None)`` -> exit code, output."""
    folder = tmp_path_factory.mktemp("slurm")
    control = ROOT / "tests" / "cluster" / "slurm.sh"

    def run(
        script: Path, *args: str, options: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> tuple[int, str]:
        output = folder / f"job-{len(list(folder.glob('job-*')))}.out"
        command = ["sbatch", "--wait", f"--output={output}", *options, os.fspath(script), *args]
        variables = {**os.environ, "SLURM_CONF": os.fspath(folder / "slurm.conf"), "PYTHON": sys.executable}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env={**variables, **(env or {})}, capture_output=True, text=True, timeout=JOB_S
            )
        except subprocess.TimeoutExpired:
            subprocess.run(["scancel", "--user", str(os.getuid())], env=variables, timeout=30, check=False)
            pytest.fail(f"no end within {JOB_S} s: {command}\n{output.read_text() if output.exists() else ''}")
        return done.returncode, done.stderr + (output.read_text() if output.exists() else "")

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
import os, sys
import torch
import mpishard as ms

mesh = ms.init_mesh((2, 2), ("y", "x"))
assert mesh.size == int(os.environ["SLURM_NTASKS"])
assert torch.get_num_threads() == int(os.environ["SLURM_CPUS_PER_TASK"])
if "--raise" in sys.argv and mesh.rank == 1:
    raise RuntimeError("rank 1 has had enough")
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
    assert output.strip() == "sum over 4 ranks: 4"


def test_a_rank_that_raises_ends_the_job(submit: Submit, job: Path) -> None:
    code, output = submit(job, "--raise")
    assert code != 0, output
    assert output.count("RuntimeError: rank 1 has had enough") == 1, output
