"""The pages for hosts in C, Fortran and Python: their solvers as they stand there, and with the lines of each diff."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import TESTS

NX, NY, STEPS = 48, 32, 10


def blocks(page: str, language: str) -> list[str]:
    text = (TESTS.parent / "docs" / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def applied(source: str, diff: str) -> str:
    """Return a source with the hunks of a diff, each of which fits at one place."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] or line for line in lines if line[0] != sign) for sign in "+-")
        assert source.count(old) == 1, f"the lines are there {source.count(old)} times:\n{old}"
        source = source.replace(old, new)
    return source


def reference(model, periodic: int) -> list[float]:
    """Return what the solver prints, in numpy and torch on one process: without the model, and with it."""
    x, y = np.meshgrid(np.arange(NX), np.arange(NY), indexing="ij")
    along, across = (x / NX, (y + 0.5) / NY) if periodic == 0 else (y / NY, (x + 0.5) / NX)
    ends = []
    for with_model in (False, True):
        u = np.sin(2 * np.pi * along) * np.sin(np.pi * across)
        for _ in range(STEPS):
            with torch.no_grad():
                rate = model(torch.from_numpy(u)).numpy() if with_model else 0.2
            pads = [(1, 1), (0, 0)][:: 1 if periodic == 0 else -1]
            ghosted = np.pad(np.pad(u, pads, "wrap"), pads[::-1])
            u = u + rate * (ghosted[2:, 1:-1] + ghosted[:-2, 1:-1] + ghosted[1:-1, 2:] + ghosted[1:-1, :-2] - 4 * u)
        ends.append(float((u * u * (x + 1)).sum()))
    return ends


def heat(done) -> float:
    assert done.returncode == 0, done.stdout
    return float(re.search(r"heat +(\S+)", done.stdout)[1])


@pytest.mark.parametrize(
    ("page", "language", "suffix", "periodic"), [("host-c.md", "c", ".c", 0), ("host-fortran.md", "fortran", ".f90", 1)]
)
def test_the_solver_and_its_diffs(programs, compiled, tmp_path, page, language, suffix, periodic):
    (solver,), (closure, model) = blocks(page, language), blocks(page, "python")
    here, beside = (applied(solver, diff) for diff in blocks(page, "diff"))
    (tmp_path / "closure.py").write_text(closure)
    (tmp_path / "model.py").write_text(model)

    def built(name: str, source: str, *, link: bool = True) -> Path:
        path = tmp_path / f"{name}{suffix}"
        path.write_text(source)
        return compiled(path, tmp_path / name, link=link)

    names: dict = {}
    exec(closure, names)
    alone, coupled = reference(names["model"], periodic)
    assert abs(alone - coupled) > 1e-6
    assert heat(programs((2, [built("alone", solver)]))) == pytest.approx(alone, rel=1e-12)
    assert heat(programs((3, [built("here", here, link=False)]))) == pytest.approx(coupled, rel=1e-12)
    done = programs((2, [built("beside", beside)]), (2, [sys.executable, tmp_path / "model.py"]))
    assert heat(done) == pytest.approx(coupled, rel=1e-12)


PRINTS = """
block = u[1:-1, 1:-1]
weights = np.arange(x0, x0 + nx)[:, None] + 1
total = cart.reduce(float((block * block * weights).sum()))
if cart.rank == 0:
    print(f"heat {total:.15e}")
"""


def test_the_python_solver_beside_its_model(programs, tmp_path):
    solver, model = blocks("insitu.md", "python")[0], blocks("insitu.md", "python")[-1]
    beside = applied(solver, blocks("insitu.md", "diff")[-1])
    (tmp_path / "solver.py").write_text(beside + PRINTS)
    (tmp_path / "model.py").write_text(model)
    done = programs(*[(2, [sys.executable, tmp_path / f"{name}.py"]) for name in ("solver", "model")])
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Tanh(), torch.nn.Conv2d(4, 1, 1)).double()
    _, coupled = reference(lambda u: 0.2 + 0.01 * net(u[None, None])[0, 0], 0)
    assert heat(done) == pytest.approx(coupled, rel=1e-12)


def test_the_lines_in_c_compile(compiled, tmp_path):
    """Of coupling.md: what is left out there is what a solver has."""
    (lines,) = blocks("coupling.md", "c")
    source = tmp_path / "solver.c"
    source.write_text(f"""
#include <mpishard.h>
#include <stdio.h>
static double u[4][4], tau[4][4];
static void advance(double (*a)[4], double (*b)[4]) {{ a[0][0] += b[0][0]; }}
int main(void)
{{
    MPI_Comm cart = MPI_COMM_WORLD;
    int64_t shape[2] = {{4, 4}}, sizes[2] = {{2, 2}}, extents[2] = {{4, 4}}, ghosts[2] = {{1, 1}};
    int step, steps = 1;
    {lines}
    return 0;
}}
""")
    compiled(source, tmp_path / "solver", link=True)
