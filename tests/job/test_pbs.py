"""Scripts for PBS, run: what a job finds there, its check, its signal, its end, and the jobs that go on from it.

The queue is `tests/job/pbs.py`, which stands in for PBS; launcher, ranks, signals and checkpoints are real.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpishard.cli import main
from tests.conftest import python
from tests.job import pbs

ROOT = Path(__file__).parents[2]
# starts `timeout` for real, and says by which number it can be told that the time is over
TIMEOUT = """#!/bin/sh
echo $$ >{told}
exec {timeout} "$@"
"""
PROGRAM = """
import os, sys, time
import mpishard as ms

mesh = ms.init_mesh((-1,), ("y",))
assert mesh.size == 2
folder = os.environ["MPISHARD_CHECKPOINTS"]
first = ms.io.load_checkpoint(folder, mesh=mesh).step if os.path.exists(folder) else 0
with ms.io.preemption(mesh) as stop:
    if mesh.rank == 0:
        print(f"from step {first}", flush=True)
    for step in range(first, first + (3 if first else 10**6)):
        time.sleep(0.05)
        if stop.should_stop():
            ms.io.save_checkpoint(folder, step + 1, mesh=mesh)
            sys.exit(stop.exit_code)
if mesh.rank == 0:
    print("done", flush=True)
"""
# saves, and asks for another turn, as often as its argument says
SHELL = """
mkdir -p "$MPISHARD_CHECKPOINTS"
echo "index ${PBS_ARRAY_INDEX:-none}" >>"$MPISHARD_CHECKPOINTS/turns"
[ "$(wc -l <"$MPISHARD_CHECKPOINTS/turns")" -gt "$1" ] || exit 75
"""

Queue = Callable[..., list[pbs.Job]]


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    """Render a script, submit it and run all that follows: ``queue(options, *command, when=text)`` -> the jobs.

    Once the output has the text, the first job is told that its time is over.
    """
    spool, work = tmp_path / "spool", tmp_path / "work"
    place = pbs.installed(spool)
    work.mkdir()
    told = tmp_path / "told"
    timeout = place / "timeout"
    timeout.write_text(TIMEOUT.format(told=told, timeout=shutil.which("timeout")))
    timeout.chmod(0o755)
    # PBS starts jobs in an environment of its own: these a site sets for all, and the last for Open MPI on few cores
    site = {
        "PATH": f"{place}:{os.environ['PATH']}",
        "PYTHONPATH": os.fspath(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }

    def run(script: Path, home: Path, variables: dict[str, str], when: str | None) -> tuple[int, str]:
        # as MOM does: a shell reads the name of the script
        script.chmod(0o700)
        with open(script.with_suffix(".out"), "w+") as output:
            job = subprocess.Popen(
                ["sh"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=home,
                env={**site, **variables},
                text=True,
            )
            tells = threading.Thread(target=tell, args=(job, Path(output.name), when))
            tells.start()
            job.communicate(f"{script}\n", timeout=300)
            tells.join()
            output.seek(0)
            return job.returncode, output.read()

    def tell(job: subprocess.Popen[str], output: Path, when: str | None) -> None:
        while when is not None and job.poll() is None:
            if when in output.read_text():
                os.kill(int(told.read_text()), signal.SIGUSR1)
                return
            time.sleep(0.1)

    def submitted(options: list[str], *command: str, when: str | None = None) -> list[pbs.Job]:
        script = tmp_path / "job.sh"
        assert main(["pbs", "render", "--output", os.fspath(script), *options, "--", *command]) == 0
        done = subprocess.run(
            [place / "qsub", script], cwd=work, env={**os.environ, **site}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        first = [when]
        return pbs.drain(spool, lambda *given: run(*given, first.pop() if first else None))

    return submitted


def test_a_job_is_checked_stopped_and_goes_on(queue: Queue, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ["--ranks-per-node=2", f"--env={sys.prefix}", f"--checkpoints={tmp_path / 'check points'}"]
    # the interpreter that the environment puts first
    command = ["python", *python("-m", "mpishard", "run", "--check", program)[1:]]
    jobs = queue(options, *command, when="from step 0")
    assert [job.code for job in jobs] == [75, 0], jobs
    assert "the job keeps its promises" in jobs[0].output
    assert "from step" in jobs[1].output
    assert "from step 0" not in jobs[1].output
    assert "done" in jobs[1].output


def test_each_of_an_array_goes_on_alone(queue: Queue, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    jobs = queue(["--array=3-4", f"--checkpoints={folder}"], "bash", "-c", SHELL, "program", "2")
    # two of the array; each goes on twice, by itself
    assert [job.code for job in jobs] == [75, 75, 75, 75, 0, 0], jobs
    assert [job.index for job in jobs] == [3, 4, None, None, None, None]
    for index in (3, 4):
        assert (folder / str(index) / "turns").read_text() == f"index {index}\n" * 3


def test_the_cap_is_the_end(queue: Queue, tmp_path: Path) -> None:
    jobs = queue(["--max-requeues=2", f"--checkpoints={tmp_path / 'saved'}"], "bash", "-c", SHELL, "program", "99")
    assert [job.code for job in jobs] == [75, 75, 75], jobs
    assert "the cap is 2" in jobs[2].output
    assert "the cap" not in jobs[1].output


def test_a_site_without_qsub_on_its_nodes_says_what_to_do(queue: Queue, tmp_path: Path) -> None:
    hidden = 'rm "$(command -v qsub)"; '
    (job,) = queue([f"--checkpoints={tmp_path / 'saved'}"], "bash", "-c", hidden + SHELL, "program", "99")
    assert job.code == 75
    assert "submit this script by hand" in job.output


def test_a_launcher_of_another_library_is_noticed(queue: Queue, tmp_path: Path) -> None:
    # it starts single processes, which know of no others
    launcher = tmp_path / "spool" / "bin" / "mpiexec"
    launcher.write_text('#!/bin/sh\nshift 2\n"$@" & "$@"; code=$?; wait; exit $code\n')
    launcher.chmod(0o755)
    (job,) = queue(["--ranks-per-node=2"], *python("-m", "mpishard", "info", "--check", "--json"))
    assert job.code == 1
    assert job.output.count("MPI has 1, the launcher says lines of PBS_NODEFILE=2") == 2
