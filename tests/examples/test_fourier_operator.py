from __future__ import annotations

import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "fourier_operator.py"
SMALL = ("--grid", "16", "--samples", "2", "--width", "4", "--modes", "4", "--layers", "2")
# a start of torch on a busy machine is mostly waiting for a core
LIMIT_S = 900


@pytest.mark.parametrize(("size", "options"), [(4, ("--mesh", "2", "2")), (3, ("--ndim", "3", "--mesh", "-1"))])
def test_it_learns_and_equals_one_process(launch, size, options):
    done = launch(size, PROGRAM, *SMALL, *options, "--verify", "--dtype", "float64", "--steps", "12", timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout
    assert "3 steps in float64: as good as equal" in done.stdout
    differences = re.findall(r"largest relative difference of a (\w+) from one process: (\S+)", done.stdout)
    assert [what for what, _ in differences] == ["field", "solution", "loss", "gradient", "parameter"]
    assert all(float(value) < 1e-9 for _, value in differences)
    first, last = map(float, re.search(r"12 steps: loss (\S+) -> (\S+);", done.stdout).groups())
    assert last < 0.9 * first
    assert re.search(r"other fields: relative error \d", done.stdout)


def test_mistakes_are_named(launch):
    done = launch(1, PROGRAM, *SMALL, "--mesh", "1", "1", "1", timeout_s=LIMIT_S)
    assert done.returncode != 0
    assert "a field has 2 dims to shard" in done.stdout
