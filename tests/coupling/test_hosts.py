"""Hosts in C and Fortran, compiled from the package's sources, beside a model in Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

from mpishard.errors import ranges_of, ranks_text
from mpishard.insitu.build import SOURCES
from tests.conftest import TESTS
from tests.coupling.conftest import mpi_of_launcher, wrapper

HERE = Path(__file__).parent


def test_c(programs, compiled, tmp_path):
    host = compiled(HERE / "host.c", tmp_path / "host", link=True)
    needed = subprocess.run(["ldd", os.fspath(host)], capture_output=True, text=True).stdout
    assert "libmpishard_link.so => /" in needed
    assert "python" not in needed
    for order, ranks in (("C", 2), ("F", 3)):
        done = programs((ranks, [host, order]), (2, [sys.executable, HERE / "model_of_host.py"]))
        assert done.returncode == 0, done.stdout
        assert "C IS RIGHT" in done.stdout


def test_fortran(programs, compiled, tmp_path):
    host = compiled(HERE / "host.f90", tmp_path / "host", link=True)
    done = programs((2, [host]), (2, [sys.executable, HERE / "model_of_host.py"]))
    assert done.returncode == 0, done.stdout
    assert "FORTRAN IS RIGHT" in done.stdout


def test_two_programs_in_c_that_misunderstand_each_other(programs, compiled, tmp_path):
    host = compiled(HERE / "pair.c", tmp_path / "host", link=True)
    done = programs((2, [host, "a"]), (1, [host, "b"]))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ALIVE") == 3, done.stdout


@pytest.mark.parametrize("policy", [0, 1, 2], ids=["block", "drop_newest", "latest"])
def test_two_programs_in_c_of_which_one_is_killed(programs, compiled, survives, tmp_path, policy):
    host = compiled(HERE / "pair.c", tmp_path / "host", link=True)
    done = programs((2, [host, "a", "kill", str(policy)]), (1, [host, "b", "kill", str(policy)]), flags=survives)
    assert done.stdout.count("ALIVE") == 2, done.stdout


def test_a_model_on_the_ranks_of_c(programs, compiled, tmp_path):
    """One job with everything that goes right and wrong, one with more threads, and one with another MPI inside."""
    host = compiled(HERE / "embedded.c", tmp_path / "host")
    other = "mpich" if mpi_of_launcher().startswith("Open MPI") else "openmpi"
    venv.create(tmp_path / "bare", symlinks=True)
    bare = {"MPISHARD_PYTHON": os.fspath(tmp_path / "bare" / "bin" / "python"), "PYTHONPATH": ""}
    for ranks, part, said, env in (
        (2, "all", "EMBEDDED C IS RIGHT", {}),
        (2, "threads", "THE SOLVER GOES ON", {}),
        (1, "wrong another MPI", "THE PYTHON IS REFUSED", {"MPI4PY_MPIABI": other}),
        (1, "wrong fix:      name a Python that has it in MPISHARD_PYTHON", "THE PYTHON IS REFUSED", bare),
    ):
        done = programs((ranks, [host, part, HERE]), env=env)
        assert done.returncode == 0, done.stdout
        assert said in done.stdout
        assert part != "all" or done.stdout.count("LEARNED") == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_threads_in_which_mpi_allows_no_call(programs, compiled, tmp_path, ranks):
    """Of a program with a model on its ranks, and of one without."""
    host = compiled(HERE / "threads.c", tmp_path / "host")
    done = programs((ranks, [host, "a", "b", "single", "copy:copy"]), (1, [host, "b", "a", "funneled"]))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("TOLD") == ranks + 1, done.stdout


def test_a_model_on_the_ranks_of_fortran(programs, compiled, tmp_path):
    host = compiled(HERE / "embedded.f90", tmp_path / "host")
    done = programs((2, [host, HERE]))
    assert done.returncode == 0, done.stdout
    assert "EMBEDDED FORTRAN IS RIGHT" in done.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_staggered_grid_in_c(programs, compiled, tmp_path, ranks):
    """On the ranks of the solver, and in another program."""
    host = compiled(HERE / "staggered.c", tmp_path / "host")
    done = programs((ranks, [host, HERE]), (2, [sys.executable, HERE / "staggered_model.py"]))
    assert done.returncode == 0, done.stdout
    assert "STAGGERED C IS RIGHT" in done.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_of_c_that_comes_late_to_adopt(programs, compiled, tmp_path, ranks):
    host = compiled(HERE / "adopts.c", tmp_path / "host")
    done = programs((ranks, [host, "late"]), env={"MPISHARD_TIMEOUT": "1"}, timeout_s=60)
    assert done.returncode == 0, done.stdout
    assert "ALIVE" in done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_more_communicators_in_c(programs, compiled, tmp_path, ranks):
    if mpi_of_launcher().startswith("Open MPI"):
        pytest.skip("it makes some ten thousand, in minutes")
    host = compiled(HERE / "adopts.c", tmp_path / "host")
    done = programs((ranks, [host, "no_more"]), timeout_s=60)
    assert done.returncode == 0, done.stdout
    assert "ALIVE" in done.stdout


def with_sources(name: str, folder: Path, *flags: str) -> Path:
    """Return a program in C that has the library's sources in it."""
    cc = wrapper("mpicc")
    if cc is None:
        pytest.skip("no MPI compiler that works beside the launcher")
    program, native = folder / "program", TESTS.parent / "mpishard" / "insitu" / "native"
    sources = [HERE / name, *(native / source for source in SOURCES)]
    subprocess.run([cc, f"-I{native}", *flags, *sources, "-lm", "-o", program], check=True)
    return program


def test_a_message_in_pieces_of_which_the_rest_never_comes_in_c(programs, tmp_path):
    host = with_sources("pieces.c", tmp_path, "-DMPS_PIECE=512")
    done = programs((1, [host, "a"]), (1, [host, "b"]), timeout_s=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ALIVE") == 2, done.stdout


@pytest.mark.parametrize("policy", [0, 1], ids=["block", "drop_newest"])
def test_a_program_in_c_that_ends_without_close(programs, compiled, tmp_path, policy):
    host = compiled(HERE / "leaves.c", tmp_path / "host", link=True)
    done = programs((2, [host, "a", str(policy)]), (2, [host, "b", str(policy)]))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("TOLD") == 2, done.stdout


@pytest.mark.parametrize("policy", [0, 1, 2], ids=["block", "drop_newest", "latest"])
def test_a_reader_in_c_that_ends_without_close(programs, compiled, tmp_path, policy):
    host = compiled(HERE / "leaves.c", tmp_path / "host", link=True)
    done = programs(*[(2, [host, name, str(policy), "reader"]) for name in "ab"])
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("TOLD") == 2, done.stdout


def test_no_memory_on_one_rank_of_c(programs, tmp_path):
    names = "malloc", "calloc", "realloc"
    host = with_sources("no_memory.c", tmp_path, *(f"-D{name}=failing_{name}" for name in names))
    done = programs((2, [host, "solver"]), (2, [host, "model"]), timeout_s=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ALL HEARD OF IT") == 2, done.stdout


def test_c_names_ranks_as_python_does(tmp_path):
    """In ranges, of which there are a few: a text does not grow with the job."""
    program = with_sources("ranks.c", tmp_path)
    few = [3], [0, 1], [0, 1, 2], [3, 7, 8, 9, 40], [5, 6, 9]
    for ranks in (*few, range(9), range(0, 80, 2), [*range(0, 32, 2), 31]):
        said = subprocess.run([program, *map(str, ranks)], capture_output=True, text=True, check=True).stdout
        # beyond the ranges that C keeps, it knows how many there are
        ranges = ranges_of(ranks)
        assert said.strip() == ranks_text(ranges[:16], len(ranks)), ranks


def test_without_a_compiler(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mpishard", "config", "--build", os.fspath(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.fspath(TESTS.parent), "MPICC": "no-such-mpicc"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no MPI compiler" in done.stderr


EXAMPLES = TESTS.parent / "examples"


def ends(programs, *jobs):
    """Return the sum or energy, and the mark of all bits, at which each job ends."""
    found = []
    for parts in jobs:
        done = programs(*parts)
        assert done.returncode == 0, done.stdout
        end = re.search(r"(?:sum|energy) +(\S+), mark (\w+)", done.stdout)
        found.append((float(end[1]), end[2]))
    return found


def test_heat_is_the_same_on_any_ranks_and_beside_a_model_that_does_nothing(programs, compiled, tmp_path):
    solver = compiled(EXAMPLES / "heat.c", tmp_path / "heat", link=True)
    model = [sys.executable, EXAMPLES / "heat_model.py"]
    alone, idle, one, two = ends(
        programs,
        [(1, [solver, "20", "alone"])],
        [(3, [solver, "20"]), (2, [*model, "0"])],
        [(1, [solver, "20"]), (1, model)],
        [(2, [solver, "20"]), (2, model)],
    )
    # bit for bit without a model, and up to the order of sums in a convolution with one
    assert alone[1] == idle[1]
    assert one[0] == pytest.approx(two[0], rel=1e-9)
    assert one[0] != pytest.approx(alone[0], rel=1e-4)


def water(steps, strength):
    """Return the energy of examples/shallow_water.f90 after some steps, in numpy."""
    nx, ny, g, depth, f, dx, dt = 48, 36, 9.81, 10.0, 1e-2, 100.0, 2.0
    i, j = np.meshgrid(np.arange(1, nx + 1), np.arange(1, ny + 1), indexing="ij")
    h = np.exp(-((i - nx // 2) ** 2 + (j - ny // 2) ** 2) / 30)
    u, v = np.zeros_like(h), np.zeros_like(h)

    def slope(a, d):
        return (np.roll(a, -1, d) - np.roll(a, 1, d)) / (2 * dx)

    for _ in range(steps):
        speed = np.sqrt(u * u + v * v)
        tau = strength * sum(np.roll(speed, (p, q), (0, 1)) for p in (-1, 0, 1) for q in (-1, 0, 1)) / 9
        du, dv = f * v - g * slope(h, 0) - tau * u, -f * u - g * slope(h, 1) - tau * v
        u, v = u + dt * du, v + dt * dv
        h = h - dt * depth * (slope(u, 0) + slope(v, 1))
    return (depth * (u**2 + v**2) + g * h**2).sum()


def test_shallow_water_is_the_same_everywhere(programs, compiled, tmp_path):
    """Alone, with a model that does nothing, and with one, beside it and on its own ranks; and in Python."""
    solver = compiled(EXAMPLES / "shallow_water.f90", tmp_path / "water")
    model = [sys.executable, EXAMPLES / "drag_model.py"]
    alone, idle, still, beside, here, one = ends(
        programs,
        [(1, [solver, "20", "alone"])],
        [(3, [solver, "20"]), (2, [*model, "0"])],
        [(2, [solver, "20", f"{EXAMPLES / 'drag_model.py'}:nothing"])],
        [(2, [solver, "20"]), (2, model)],
        [(4, [solver, "20", f"{EXAMPLES / 'drag_model.py'}:drag"])],
        [(1, [solver, "20", f"{EXAMPLES / 'drag_model.py'}:drag"])],
    )
    assert alone[1] == idle[1] == still[1]
    assert alone[0] == pytest.approx(water(20, 0.0), rel=1e-9)
    for end in (beside, here, one):
        assert end[0] == pytest.approx(water(20, 0.5), rel=1e-9)
    assert here[0] != pytest.approx(alone[0], rel=1e-4)
