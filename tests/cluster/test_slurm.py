"""The job scripts, submitted for real to a one-node Slurm that this file starts and stops."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Above what slurm.sh itself waits for, below the limit of one test.
START_S = 60
JOB_S = 120

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
