"""Every benchmark runs, small; what it measures is not tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PROGRAMS = {path.name: path for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py")}
# a start of torch on a busy machine is mostly waiting for a core
LIMIT_S = 900


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"timing.py", "gpu.py"}))
def test_it_runs_and_prints_figures(launch, name):
    done = launch(2, PROGRAMS[name], "--quick", timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d", done.stdout), done.stdout
    assert not re.search(r"\bnan\b|Warning", done.stdout), done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the programs that need one")
def test_without_a_gpu_its_benchmark_says_so(launch):
    done = launch(1, PROGRAMS["gpu.py"], "--quick", timeout_s=LIMIT_S)
    assert done.returncode != 0
    assert "torch finds no GPU" in done.stdout
