"""Jobs that go wrong, each under an MPI launcher of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

PRELUDE = """
import os, signal, sys, time
import torch
import mpishard as ms
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
world.Barrier()
if rank == 0:
    # in one piece: launchers mix what ranks write
    os.write(1, f"START {time.time()}\\n".encode())
world.Barrier()
"""


@dataclass
class Outcome:
    """How a job ended.

    Attributes
    ----------
    status
        Exit status of the launcher.
    output
        Standard output and error of all ranks and of the launcher, without the line of the start.
    seconds
        From the start of the program's own work, after its imports, to the end of the job.
    """

    size: int
    status: int
    output: str
    seconds: float

    def failed_with(self, *texts: str) -> None:
        """Assert that the job ended soon, in failure, with each text printed, at most once per rank."""
        assert self.status != 0, self.output
        for text in texts:
            assert 1 <= self.output.count(text) <= self.size, f"{text!r} in:\n{self.output}"
        assert self.seconds < 10, f"{self.seconds} s:\n{self.output}"


@pytest.fixture(autouse=True)
def more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Open MPI 4 and 5 start small jobs on any machine, in a container too."""
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "1")
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")


@pytest.fixture
def job(launch: Callable, tmp_path: Path) -> Callable[..., Outcome]:
    """Run ``job(size, body, NAME=value)``: a program after `PRELUDE`, with environment variables."""

    def run(size: int, body: str, **env: str) -> Outcome:
        program = tmp_path / "program.py"
        program.write_text(PRELUDE + body)
        done = launch(size, program, timeout_s=120, env={"MPISHARD_TIMEOUT": "60", "PYTHONFAULTHANDLER": "", **env})
        end = time.time()
        start = re.search(r"^START (.*)\n", done.stdout, re.MULTILINE)
        assert start, f"the program did not start:\n{done.stdout}"
        output = done.stdout.replace(start[0], "")
        return Outcome(size, done.returncode, output, end - float(start[1]))

    return run
