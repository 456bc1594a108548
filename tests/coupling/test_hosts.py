"""Hosts in C and Fortran, compiled from the package's sources, beside a model in Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TESTS, mpiexec

HERE = Path(__file__).parent


def wrapper(name: str) -> str:
    """Return the compiler of the MPI that the launcher belongs to."""
    found = Path(shutil.which(mpiexec()[0])).with_name(name)
    if not found.exists() or subprocess.run([found, "--version"], capture_output=True).returncode:
        pytest.skip(f"no {name} that works beside the launcher")
    return os.fspath(found)


def compiled(command: list[str], folder: Path, **wrappers: str) -> Path:
    """Compile a host against the libraries that `mpishard config` builds."""
    built = subprocess.run(
        [sys.executable, "-m", "mpishard", "config", "--cflags", "--libs", "--build", os.fspath(folder / "built")],
        env={**os.environ, "PYTHONPATH": os.fspath(TESTS.parent), **wrappers},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    program = folder / "host"
    subprocess.run([*command, *built.stdout.split(), "-o", os.fspath(program)], check=True, cwd=folder)
    return program


def test_c(programs, tmp_path):
    cc = wrapper("mpicc")
    host = compiled([cc, "-Wall", "-Werror", os.fspath(HERE / "host.c")], tmp_path, MPICC=cc)
    needed = subprocess.run(
        ["ldd", os.fspath(tmp_path / "built/lib/libmpishard_link.so")], capture_output=True, text=True
    )
    assert "python" not in needed.stdout
    for order, ranks in (("C", 2), ("F", 3)):
        done = programs((ranks, [host, order]), (2, [sys.executable, HERE / "model_of_host.py"]))
        assert done.returncode == 0, done.stdout
        assert "C IS RIGHT" in done.stdout


def test_fortran(programs, tmp_path):
    fc, cc = wrapper("mpif90"), wrapper("mpicc")
    host = compiled([fc, os.fspath(HERE / "host.f90")], tmp_path, MPICC=cc, MPIFC=fc)
    done = programs((2, [host]), (2, [sys.executable, HERE / "model_of_host.py"]))
    assert done.returncode == 0, done.stdout
    assert "FORTRAN IS RIGHT" in done.stdout


def test_without_a_compiler(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mpishard", "config", "--build", os.fspath(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.fspath(TESTS.parent), "MPICC": "no-such-mpicc"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no MPI compiler" in done.stderr


@pytest.mark.parametrize("name", ["heat.c", "shallow_water.f90"])
def test_a_solver_is_the_same_on_any_ranks_and_beside_a_model_that_does_nothing(programs, tmp_path, name):
    cc = wrapper("mpicc")
    examples = TESTS.parent / "examples"
    if name == "heat.c":
        model, solver = (
            "heat_model.py",
            compiled([cc, "-Wall", "-Werror", os.fspath(examples / name)], tmp_path, MPICC=cc),
        )
    else:
        fc = wrapper("mpif90")
        model, solver = "drag_model.py", compiled([fc, os.fspath(examples / name)], tmp_path, MPICC=cc, MPIFC=fc)
    beside = [sys.executable, examples / model]
    jobs = (
        [(1, [solver, "20", "alone"])],
        [(3, [solver, "20"]), (2, [*beside, "0"])],
        [(1, [solver, "20"]), (1, beside)],
        [(2, [solver, "20"]), (2, beside)],
    )
    ends = []
    for parts in jobs:
        done = programs(*parts)
        assert done.returncode == 0, done.stdout
        ends.append(re.search(r"(?:sum|energy) +(\S+), mark (\w+)", done.stdout).groups())
    # bit for bit without a model, and up to the order of sums in a convolution with one
    assert ends[0][1] == ends[1][1]
    assert float(ends[2][0]) == pytest.approx(float(ends[3][0]), rel=1e-9)
    assert float(ends[2][0]) != pytest.approx(float(ends[0][0]), rel=1e-4)
