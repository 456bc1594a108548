"""A model that learns beside a solver, small: its closure helps, and the solver is one in Fortran and in numpy."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.conftest import mpiexec

ROOT = Path(__file__).parents[2]
LIMIT_S = 600


def errors(folder: Path, solver: str) -> tuple[float, float, str]:
    """Return the coarse run's errors without and with the closure, and what the program printed."""
    size = ["--steps", "30", "--window", "10", "--cells", "16", "--ranks", "2", "1", "--solver", solver]
    done = subprocess.run(
        [sys.executable, ROOT / "examples/online_demo.py", *size, "--build", folder / "build", "--out", folder],
        env={
            **os.environ,
            "PYTHONPATH": os.fspath(ROOT),
            "MPIEXEC": shlex.join(mpiexec()),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    assert "Warning" not in done.stdout, done.stdout
    found = re.search(r"after 30 steps: (\S+) without the closure, (\S+) with it", done.stdout)
    assert found, done.stdout
    return float(found[1]), float(found[2]), done.stdout


def test_it_learns_in_fortran_and_in_numpy(tmp_path):
    without, closed, told = errors(tmp_path, "auto")
    assert 0 < closed < 0.9 * without
    assert (tmp_path / "online_closure.png").read_bytes().startswith(b"\x89PNG")
    if (tmp_path / "build" / "online_solver").exists():
        assert errors(tmp_path, "numpy")[:2] == (without, closed)
    else:
        assert "No Fortran compiler for this MPI" in told
